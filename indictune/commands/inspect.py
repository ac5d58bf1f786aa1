"""Show the health of rows, and some of them as the model sees them: their tokens, and which the loss counts."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from indictune.commands.prepare import Prepared, prepare_rows, show_rows, task_of_flags
from indictune.config.command_line import with_flag
from indictune.config.plan import unresolved
from indictune.config.shared_arguments import Checked, flag
from indictune.console_text import printable
from indictune.data.collation import IGNORED_LABEL
from indictune.data.health.likely_wrong import OUT_OF_FOLD, read_out_of_fold, wrong_labels
from indictune.data.health.row_health import check_health
from indictune.data.labels import REGRESSION, label_counts
from indictune.errors import Problems, problems_of
from indictune.models.load import positions_of
from indictune.tasks.classification import ClassifiedRows

_IN_COLOUR = ("\x1b[1;32m", "\x1b[0m")
_IN_TEXT = ("«", "»")
_FEW = 50  # training rows of a label
_MOST_FEW = 5
_UNFINISHED = "\ufffd"  # of a character whose other bytes follow in the next token


@dataclass
class InspectFlags(Checked):
    """What is shown of the rows. The other flags are those of the run."""

    show_mask: int = flag(3, "Show this many training rows, with the tokens that the loss counts marked.")
    json: bool = flag(False, "Print the health of the rows as JSON, as in health.json, and no rows.")
    from_folds: str | None = flag(
        None, "Folder of a sweep with --folds: list the rows whose label is likely wrong, by its predictions."
    )


def run_inspect(flags: Mapping[str, list[str]]) -> int:
    """Show the health of the rows that the flags name, and some of them."""
    recipe, task = task_of_flags(with_flag(flags, "train_file"), InspectFlags)
    recipe.problems.extend(problems_of(recipe.build, InspectFlags))
    if "max_length" not in recipe.values:
        _fit_max_length(recipe, task)
    made, args = prepare_rows(recipe, task), unresolved(InspectFlags, recipe.values)
    health, folds = made.tokens.health, args.from_folds
    wrong = None if folds is None else wrong_labels(read_out_of_fold(Path(folds) / OUT_OF_FOLD))
    if args.json:
        content = None if health is None else health.as_json()
        content = content if wrong is None else {**(content or {}), "likely_wrong": asdict(wrong)}
        print(json.dumps(content, indent=2, ensure_ascii=False))
        check_health(health, made.plan.configuration)
        return 0
    listed = [] if health is None else [each.note for each in health.findings]
    show_rows(made, [note for note in made.tokens.notes if note not in listed])
    if health is not None:
        print(printable(f"\n{health}"))
        check_health(health, made.plan.configuration)
    if isinstance(made.rows, ClassifiedRows) and made.plan.configuration.get("problem_type") != REGRESSION:
        print_few_rows(label_counts(made.rows.splits.rows["train"], made.plan.configuration.get("problem_type")))
    if wrong is not None:
        print(printable(f"\n{wrong}"))
    is_coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    count = min(args.show_mask, len(made.tokens.train))
    classes = made.rows.labels if task.name == "classification" else None
    if count and classes is None:
        print(f"\nTokens that the loss counts are {'green' if is_coloured else 'in « »'}.")
    for index in range(count):
        print(f"\n{shown_row(made, index, classes, _IN_COLOUR if is_coloured else _IN_TEXT)}")
    return 0


def print_few_rows(counts: Mapping[str, int]) -> None:
    """Say what to expect of labels with few rows, and which recipe suits."""
    few = sorted((count, label) for label, count in counts.items() if count < _FEW)
    if few:
        shown = ", ".join(f"{label} {count}" for count, label in few[:_MOST_FEW])
        uncertain = min(1.0, 0.98 / math.sqrt(few[0][0]))  # half of the 95% interval of a share of one half
        print(
            f"\nLabels with fewer than {_FEW} training rows: {printable(shown)}. Expect little of a model without "
            f"pretrained weights. If all rows of the rarest are scored, that score is uncertain by {uncertain:.0%}. "
            "recipes/sentiment/small_data.yaml suits. `indictune sweep` with --folds 5 scores all rows."
        )


def _fit_max_length(recipe: Any, task: Any) -> None:
    """Set --max_length to the default, or to the model's positions if they are fewer."""
    of_model, of_rows, _ = task.arguments
    config = Problems().attempt(task.read_config, unresolved(of_model, recipe.values))
    if config is not None:  # else `prepare_rows` reports why
        default = unresolved(of_rows, {}).max_length
        recipe.values["max_length"] = min(default, positions_of(config) or default)


def shown_row(made: Prepared, index: int, classes: Sequence[str] | None, marks: tuple[str, str]) -> str:
    """A training row: where it stands, and its text with `marks` around each token that the loss counts.

    `classes` are names of the labels of a classifier, which reads all tokens and learns one label.
    """
    row = made.tokens.train[index]
    ids = row["input_ids"]
    counted = [False] * len(ids) if classes is not None else [label != IGNORED_LABEL for label in row["labels"]]
    cut = f", cut from {row['full_length']:,}" if row.get("full_length", 0) > len(ids) else ""
    learned = (
        f", {sum(counted):,} of them learned" if classes is None else f", label: {_label(row['labels'], classes)}"
    )
    text = "".join(
        f"{marks[0]}{printable(piece)}{marks[1]}" if is_counted else printable(piece)
        for piece, is_counted in pieces(ids, counted, made.rows.tokenizer)
    )
    return f"{made.tokens.row_location(index)}: {len(ids):,} tokens{cut}{learned}\n{text}"


def _label(label: Any, classes: Sequence[str]) -> str:
    if isinstance(label, list) and any(isinstance(each, float) for each in label):  # a teacher's logits
        return " ".join(f"{name} {value:.2f}" for name, value in zip(classes, label, strict=True))
    if isinstance(label, list):
        return "|".join(name for name, is_on in zip(classes, label, strict=True) if is_on) or "(none)"
    return classes[label] if isinstance(label, int) else f"{label:g}"


def pieces(ids: list[int], counted: Sequence[bool], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, bool]]:
    """The text of each token, and whether the loss counts it. Tokens that share a character are one piece.

    A tokenizer may write a token otherwise after another one, so each is decoded after the piece before it.
    """
    before = begin = 0
    for end in range(1, len(ids) + 1):
        text = str(tokenizer.decode(ids[before:end]))
        if text.endswith(_UNFINISHED) and end < len(ids):
            continue
        yield text[len(str(tokenizer.decode(ids[before:begin]))) :], any(counted[begin:end])
        before, begin = begin, end
