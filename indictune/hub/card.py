"""The model card: `README.md` of a model's folder, made from the other files there."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from indictune.console_text import shown_language
from indictune.evaluation.breakdown import RATIOS, SPLITS, Breakdown
from indictune.files import DISTILLED, json_or_nothing, write_whole
from indictune.hub import card_facts
from indictune.hub.card_facts import GROUPS, PREFERENCES, CardFacts, group_cells
from indictune.hub.public_text import Verbatim, escaped, fenced, markdown_table, templates_in
from indictune.models import builtin, fetched

CARD = "README.md"
_MOST_DEFECTS = 20
_DIGITS = 4
_TEXT, _SECOND = "क्या फिल्म थी! 😍", "फिल्म अच्छी थी"  # of the program
_KINDS = {
    "text-classification": "A text classifier",
    "token-classification": "A classifier of words (named entities)",
    "text-generation": "A language model that answers messages",
    "fill-mask": "A language model that guesses masked words",
    None: "A model",
    # By its task:
    "clm": "A language model that continues texts",
    "reward": "A reward model",
}
# Of the recipe: what a reader asks of a training, and what the card calls it.
_SETTINGS = {
    "method": "method",
    "lora_r": "rank of the adapter",
    "lora_alpha": "alpha of the adapter",
    "learning_rate": "learning rate",
    "lr_scheduler_type": "schedule",
    "warmup_steps": "warmup (steps or a share)",
    "weight_decay": "weight decay",
    "optim": "optimizer",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "max_length": "longest text, in tokens",
    "seed": "seed",
    "preference_loss": "loss of a pair",
    "beta": "beta, which holds the model to that before training",
    "length_normalised": "log-probabilities divided by tokens",
    "flipped_share": "share of swapped pairs",
    "sft_weight": "weight of the loss of the chosen answer",
    "desirable_weight": "weight of good answers",
    "undesirable_weight": "weight of bad answers",
}


def write_card(folder: Path, repository: str | None = None, run: Path | None = None) -> None:
    """Write the card of a finished run, or of a model made from a run elsewhere. It replaces those of PEFT and TRL.

    Raises:
        UserError: the folder holds an adapter whose record of its base cannot be read.
    """
    write_whole(folder / CARD, str(card_of(card_facts.card_facts_of(folder, repository, run or folder))))


def card_of(facts: CardFacts) -> ModelCard:
    """The card: whatever the facts hold is escaped, except code that is fenced."""
    environment = templates_in(Path(__file__).parent, finalize=escaped)
    environment.filters |= {"program": lambda text, language: fenced(text.strip(), language), "link": _link}
    metadata = card_facts.metadata_of(facts)
    text = environment.get_template("card.md.jinja").render(
        licence=metadata.license,
        facts=facts,
        program=_words_of_program(facts),
        **_head(facts),
        **_results(facts),
        **_data(facts),
        **_training(facts),
    )
    return ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{text.strip()}\n")


def _words_of_program(facts: CardFacts) -> dict[str, Verbatim] | None:
    """What a program that uses the model names; None for a task that only the user knows."""
    kind, task = facts.config.get("problem_type"), facts.pipeline_tag
    if task is None:
        return None
    kinds = {"regression": ', function_to_apply="none"', "multi_label_classification": ", top_k=None"}
    has_one_label = kind in (None, "single_label_classification") and task == "text-classification"
    quoted = partial(json.dumps, ensure_ascii=False)
    texts = [_TEXT, _SECOND] if facts.reading.get("text_pair_column") else [_TEXT]
    words = {
        **{name: quoted(word) for name, word in (("model", facts.model), ("task", task))},
        "text": quoted(dict(zip(("text", "text_pair"), texts, strict=True)) if texts[1:] else _TEXT),
        "texts": ", ".join(map(quoted, texts)),
        "lists": ", ".join(f"[{quoted(each)}]" for each in texts),
        "base": quoted(facts.base) if facts.base else "",
        "settings": f", truncation=True{kinds.get(str(kind), '')}" if task == "text-classification" else "",
        "result": "config.id2label[logits[0].argmax()]" if has_one_label else "logits",
        "file": shlex.quote(f"{facts.model}/model.gguf"),
    }
    return {name: Verbatim(word) for name, word in words.items()}


def _head(facts: CardFacts) -> dict[str, Any]:
    name = str(facts.settings.get("model_name_or_path") or "")
    students = json_or_nothing(facts.folder / DISTILLED).get("table")  # of `indictune distil`
    return {
        "title": facts.model.rpartition("/")[2],
        "kind": _KINDS.get(str(facts.settings.get("task"))) or _KINDS[facts.pipeline_tag],
        "learned_from": PREFERENCES.get(str(facts.preferred_by)),
        "from_scratch": name.startswith(builtin.PREFIX) and not facts.is_adapter,
        "is_rounded": name == fetched.NAME,
        "labels": _listed(facts.labels),
        "languages": _listed(map(shown_language, facts.languages)),
        "students": students and fenced(str(students), "text"),
    }


def _results(facts: CardFacts) -> dict[str, Any]:
    """What the template says of results: tables of each split, and the language with the worst score."""
    splits = []
    for key, name in SPLITS.items():
        breakdown, block = facts.breakdowns.get(key), facts.metrics.get(key)
        if breakdown is not None:
            rows = card_facts.label_rows(breakdown.overall, _DIGITS)
            more = {
                "table": _scores_of_groups(breakdown),
                "labels": markdown_table(["label", "rows", *RATIOS], rows) if rows else None,
                "calibration": breakdown.calibration,
                "written": breakdown.written and _scores_of_groups(breakdown.written),
            }
        elif block:
            names, rows = card_facts.block_rows(block, _DIGITS, "language ")
            scores = markdown_table(["", "rows", *(name.replace("_", " ") for name in names)], rows)
            more = {"table": scores, **dict.fromkeys(("labels", "calibration", "written"))}
        else:
            continue
        splits.append({"name": name, **more})
    first = next((facts.breakdowns[key] for key in SPLITS if key in facts.breakdowns), None)
    worst = None
    if first is not None and len(first.by["language"]) > 1:
        language, rank = first.worst_language, "highest" if first.lower_is_better else "lowest"
        value = f"{first.by['language'][language].scores[first.score].value:.4f}"
        worst = {"language": shown_language(language), "name": first.score, "value": value, "rank": rank}
    return {"splits": splits, "worst": worst, "intervals": first is not None}


def _scores_of_groups(breakdown: Breakdown) -> Verbatim:
    """Scores of all rows and of each group. A group that all rows are in is left out."""
    names = list(breakdown.overall.scores)
    body = [["all", *group_cells(breakdown.overall, names, _DIGITS)]]
    for what in GROUPS:
        groups = {shown_language(name): group for name, group in (breakdown.by.get(what) or {}).items()}
        if len(groups) > 1:
            body += [[f"{what} {value}", *group_cells(group, names, _DIGITS)] for value, group in groups.items()]
    return markdown_table(["", "rows", *(name.replace("_", " ") for name in names)], body)


def _data(facts: CardFacts) -> dict[str, Any]:
    rows = facts.training_rows
    source = str(facts.settings.get("dataset_name") or "")
    is_ours = source.startswith(builtin.PREFIX)
    return {
        "rows": markdown_table(["training rows", "count"], [*rows[1:], rows[0]]) if rows else None,
        "sources": f"{source}, which comes with indictune" if is_ours else "files of the user",
        "defects": ((facts.metrics.get("data") or {}).get("notes") or [])[:_MOST_DEFECTS],
    }


def _training(facts: CardFacts) -> dict[str, Any]:
    metrics, settings = facts.metrics, facts.settings
    train: Mapping[str, Any] = metrics.get("train") or {}
    energy = facts.energy if {"energy_consumed", "emissions"} <= facts.energy.keys() else None
    unused = [] if facts.is_adapter else ["lora_r", "lora_alpha"]
    unused += [name for name in ("length_normalised", "flipped_share", "sft_weight") if not settings.get(name)]
    unused += ["max_steps"] if settings.get("max_steps") == -1 else ["num_train_epochs"]
    body = {
        **facts.how_it_ran,
        **{shown: settings.get(name) for name, shown in _SETTINGS.items() if name not in unused},
        "training time, in seconds": f"{train['runtime_s']:,.0f}" if "runtime_s" in train else None,
        "energy, in kWh (codecarbon)": f"{float(energy['energy_consumed']):.4g}" if energy else None,
        "emissions, in kg of CO2 (codecarbon)": f"{float(energy['emissions']):.4g}" if energy else None,
    }
    known = ((name, value) for name, value in body.items() if value not in (None, ""))
    shown = [[name, f"{value:g}" if isinstance(value, float) else str(value)] for name, value in known]
    versions = [f"{name} {version}" for name, version in (metrics.get("versions") or {}).items()]
    return {
        "training": markdown_table(["", ""], shown),
        "command": fenced(facts.command, "bash") if facts.chosen else None,
        "versions": ", ".join(versions),
    }


def _link(name: str, kind: str = "") -> Verbatim:
    """A link to the Hub. The name is one of the Hub's form."""
    return Verbatim(f"[{name}](https://huggingface.co/{kind}{name})")


def _listed(names: Iterable[str]) -> Verbatim:
    return Verbatim(", ".join(map(escaped, names)))
