"""Read the models, datasets and rows of tests/faults/hostile.py by the stock stack, and count what it read outside of
their folders, and the cards with markup from rows, as JSON.

python benchmarks/stock_names.py FOLDER
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.modelcard import TrainingSummary, parse_log_history

from tests.faults import hostile


def reads_weights(folder: Path) -> bool:
    """Whether the model has weights from outside."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    outside = load_file(folder.parent / "outside.safetensors")
    return torch.equal(model.base_model.state_dict()[hostile.INDEXED], outside[hostile.INDEXED])


def reads_words(folder: Path) -> bool:
    """Whether the tokenizer has words from outside, with its tokenizer.json or without."""
    found = "secret" in AutoTokenizer.from_pretrained(folder).get_vocab()
    (folder / "tokenizer.json").unlink()
    return found or "secret" in AutoTokenizer.from_pretrained(folder).get_vocab()


def reads_rows(folder: Path) -> bool:
    """Whether the dataset has rows from outside: it has none of its own."""
    return len(datasets.load_dataset(str(folder), split="train", cache_dir=str(folder.parent / "cache"))) > 0


def reads_link(folder: Path) -> bool:
    """Whether a configuration, template or vocabulary is that from outside."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    told = (tokenizer.chat_template, model.config.to_dict())
    return "secret" in str(told) or "secret" in tokenizer.get_vocab()


def obeys_rows(folder: Path) -> bool:
    """Whether the card of a model that is scored by language has markup from the rows: as the Trainer makes it of what
    a run has logged."""
    row = json.loads((folder / "test.jsonl").read_text())
    scores = {"eval_loss": 0.5, f"eval_macro_f1_{row['language']}": 0.5}
    results = parse_log_history([scores, {"train_runtime": 1.0}, scores])[2]  # type: ignore[no-untyped-call]
    card = TrainingSummary(model_name="model", eval_results=results).to_model_card()  # type: ignore[no-untyped-call]
    return any(each in card for each in hostile.OBEYED)


def counts(does: Callable[[Path], bool], folders: list[Path], what: tuple[str, str]) -> Counter[str]:
    """How many did it, refused, or neither; `what` it is, and is not, called."""
    found = Counter[str]()
    for folder in folders:
        try:
            found[what[0] if does(folder) else what[1]] += 1
        except Exception:  # whatever it raises, it has refused it
            found["refused"] += 1
    return found


def main(work: Path) -> None:
    """Print the counts."""
    datasets.disable_progress_bars()
    logging.disable(logging.CRITICAL)
    cases: tuple[tuple[str, Callable[[Path], bool], Callable[[Any, Path], Path], tuple[object, ...]], ...] = (
        ("index of weights", reads_weights, hostile.model_whose_index_names, hostile.IN_AN_INDEX),
        ("tokenizer's settings", reads_words, hostile.model_whose_tokenizer_names, hostile.IN_A_TOKENIZER),
        ("dataset's README", reads_rows, hostile.dataset_that_names, hostile.IN_A_DATASET),
        ("links in a model", reads_link, hostile.model_that_links, hostile.LINKED),
        ("cards", obeys_rows, hostile.rows_whose_language_is, hostile.IN_ROWS),
    )
    found = {}
    for title, does, made, names in cases:
        folders = []
        for number, name in enumerate(names):
            root = work / f"{title}-{number}"
            root.mkdir()
            folders.append(made(name, root))
        what = ("markup in it", "no markup") if title == "cards" else ("read outside", "not read")
        found[title] = counts(does, folders, what)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
