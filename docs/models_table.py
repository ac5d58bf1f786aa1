"""docs/models.md: what each published layout of a model does, by the results of tests/hub_layouts/test_models.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "tests/hub_layouts/models.json"
COLUMNS = {
    "trains": "trains",
    "padding_free": "without padding",
    "adapter": "LoRA",
    "merges": "merges",
    "predicts": "predicts",
    "answers": "answers",
    "exports": "exports",
}
INTRODUCTION = """\
# Models as they are published

`tests/hub_layouts` has a tiny copy of each repository below: the same names of files, form of weights, keys of
config.json and tokenizer files, with random weights and invented texts. Each row is what real runs did with it, which
asked a Hub on the same machine: a training online, an adapter without a network at a pinned commit, its merge, and
labels or an answer. **So layouts are tested, not the real weights.** The table is written from what the tests found.

## Weights

Most models from before 2023, such as IndicBERT and MuRIL, have only `pytorch_model.bin`, whole or in shards: a pickle.
It is read with torch's `weights_only`, which runs no code, and before any row is. A file that holds anything but
tensors, or tensors larger than itself, is refused. What a run saves is safetensors. If both are there, safetensors are
taken; what bots offer in open pull requests is not.

## Code

IndicBERT v3 is Gemma 3 that its own Python code makes bidirectional. Without the code it would be another model, so
`--trust_remote_code true` is needed: then our heads for texts and words stand on that code, which is saved with the
model. transformers alone reads the result with `trust_remote_code=True`. Many repositories bring a copy of a class of
transformers: such code is not needed, and the run says that it is not used. A `config.json` with a class that neither
transformers nor its own code has is refused.

## Scripts

IndicBERTv2-SS knows Devanagari alone. If the name of the model has `IndicBERTv2-SS` in it, texts in Bengali, Gurmukhi,
Gujarati, Oriya, Tamil, Telugu, Kannada and Malayalam are written in Devanagari, letter by letter as AI4Bharat's
programs do it. The saved tokenizer does the same. The normalisation of those programs is not done; ours is
([cleaning](data.md)).

## Access

Gated models need a token: ask for access on the model's page, then set `HF_TOKEN` or run `hf auth login`.
"""


def models_page() -> str:
    """The page; a model that a test has not tried has no row."""
    found: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    sections = []
    for title, script in (("Classifiers", "sentiment"), ("Language models", "llama")):
        rows = {name: each for name, each in found.items() if each["command"] == script}
        shown = [key for key in COLUMNS if any(key in each for each in rows.values())]
        lines = [f"| model | layout | {' | '.join(COLUMNS[key] for key in shown)} |", "|---" * (2 + len(shown)) + "|"]
        for name, each in rows.items():
            lines.append(f"| `{name}` | {each['layout']} | {' | '.join(_cell(each.get(key)) for key in shown)} |")
        command = f"indictune train {script} --model_name_or_path NAME --train_file FILE"
        sections.append(f"## {title}\n\n`{command}`\n\n" + "".join(f"{line}\n" for line in lines))
    return "\n".join([INTRODUCTION, *sections])


def _cell(result: Any) -> str:
    if isinstance(result, list):
        return ", ".join(f"[`{code}`](errors.md#{code})" for code in result)
    return "" if result is None else "yes" if result is True else "no"
