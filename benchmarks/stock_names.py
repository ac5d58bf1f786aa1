"""Read the models and datasets of tests/faults/hostile.py by the stock stack, and count what it read outside of their
folders, as JSON.

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


def counts(reads: Callable[[Path], bool], folders: list[Path]) -> Counter[str]:
    """How many were read outside, refused, or neither."""
    found = Counter[str]()
    for folder in folders:
        try:
            found["read outside" if reads(folder) else "not read"] += 1
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
    )
    found = {}
    for title, reads, made, names in cases:
        folders = []
        for number, name in enumerate(names):
            root = work / f"{title}-{number}"
            root.mkdir()
            folders.append(made(name, root))
        found[title] = counts(reads, folders)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
