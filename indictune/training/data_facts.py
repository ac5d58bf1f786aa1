"""What `metrics.json` says of the training rows, for the card and other readers. It names no folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from datasets import Dataset

from indictune.hub.public_text import without_folders
from indictune.tasks.protocol import Tokens


def data_facts(tokens: Tokens, config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Rows, languages and labels of the training rows, and the notes on all rows.

    Args:
        tokens: of the run.
        config: of the model, with the label names of a classifier.
        given: what the user chose, which names files.
    """
    train = tokens.train
    values = [value for name, value in given.items() if name.endswith(("_file", "_files", "dataset_name"))]
    paths = [str(each) for value in values for each in (value if isinstance(value, list) else [value])]
    counts: dict[str, Any] = {"rows": _rows(train)}
    if "language" in train.column_names:
        counts["languages"] = dict(sorted(Counter(train["language"][:]).items()))
    if str(getattr(train.features.get("labels"), "dtype", "")).startswith("int"):  # one label a row
        numbered = Counter(train["labels"][:])
        counts["labels"] = {config.id2label[number]: numbered[number] for number in sorted(numbered)}
    return counts | {"notes": [without_folders(note, paths) for note in tokens.notes]}


def _rows(train: Dataset) -> int:
    """A packed row of chats holds several. A long text in several windows is one."""
    return sum(map(len, train["rows"][:])) if "rows" in train.column_names else len(train)
