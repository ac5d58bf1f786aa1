"""Read and tokenise the rows of a run before it starts, so that it starts in seconds."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset

from indictune.cache_folders import cache_folder
from indictune.config.arguments import DataArguments, ModelArguments, SentimentTrainingArguments
from indictune.config.recipe import Recipe, read_recipe
from indictune.console_text import in_one_line, printable, table
from indictune.data.bad_rows import REJECTED
from indictune.data.load_rows import load_splits
from indictune.data.row_sources import SPLITS
from indictune.data.tokenisation import tokenise_splits
from indictune.models.classifier import label_order, load_classifier_config
from indictune.models.load import check_max_length, load_tokenizer
from indictune.supervise.logs import PrintableFormatter, quieten_requests
from indictune.supervise.signals import EXIT_RESUMABLE, Stopped, StopRequest, let_through

CLASSIFIER = (ModelArguments, DataArguments, SentimentTrainingArguments)


@dataclass(frozen=True)
class Prepared:
    """The tokenised rows of a run.

    Attributes:
        datasets: by split, with a column `length` (tokens) among others; packs where rows are packed.
        max_length: tokens that a row keeps.
        notes: sentences to tell the user.
        folder: holds the rows that were left out, if any were.
    """

    datasets: dict[str, Dataset | None]
    max_length: int
    notes: list[str]
    folder: Path


def prepare_command(argv: Sequence[str]) -> int:
    """`indictune prepare --config R.yaml [flags]`, with the flags of the run; returns the exit code.

    Keys and flags that only a language model's run knows, such as `packing` and `chat_template`, tell that it is one;
    else it is a classifier's.

    Raises:
        UserError: all that cannot be.
    """
    try:
        with StopRequest().listening():
            let_through()
            return _prepared(argv)
    except (Stopped, KeyboardInterrupt):
        print("indictune: stopped. What is kept is whole; the same command does the rest.", file=sys.stderr)
        return EXIT_RESUMABLE


def _prepared(argv: Sequence[str]) -> int:
    console = logging.StreamHandler()
    console.setFormatter(PrintableFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[console])
    quieten_requests()
    logging.getLogger("indictune").setLevel(logging.INFO)
    recipe = read_recipe(argv, CLASSIFIER)
    prepare: Callable[[Recipe], Prepared] = _prepare_classes
    if recipe.problems:  # else TRL, which is slow to import, is not needed
        from indictune.config.chat_arguments import ChatDataArguments, LlamaModelArguments, LlamaTrainingArguments

        other = read_recipe(argv, (LlamaModelArguments, ChatDataArguments, LlamaTrainingArguments))
        if len(other.problems) < len(recipe.problems):
            recipe, prepare = other, _prepare_chats
    started = time.monotonic()
    if not recipe.is_read:  # what it does not say is not missing
        recipe.problems.raise_any()
    prepared = prepare(recipe)
    for note in prepared.notes:
        print(in_one_line(f"warning: {note}"), file=sys.stderr)
    print(lengths_table(prepared))
    if (prepared.folder / REJECTED).exists():
        print(f"Rows that were left out, with reasons: {prepared.folder / REJECTED}")
    print(f"Prepared in {time.monotonic() - started:.1f} s; kept in {cache_folder() / 'prepared'}")
    return 0


def _prepare_classes(recipe: Recipe) -> Prepared:
    """The rows of a classifier's run.

    Raises:
        UserError: all problems at once.
    """
    with recipe.problems.collecting():
        model_args = recipe.build(ModelArguments)
        config = load_classifier_config(model_args)
        check_max_length(config, recipe.planned(DataArguments, "max_length"))
    with recipe.problems.collecting():
        tokenizer = load_tokenizer(model_args)
    with recipe.problems.collecting():
        data_args = recipe.build(DataArguments)
        splits = load_splits(data_args, recipe.problems)
        labels = label_order(config, splits.labels)
    recipe.problems.raise_any()
    datasets = tokenise_splits(splits, tokenizer, labels, data_args.max_length)
    return Prepared(dict(zip(SPLITS, datasets, strict=True)), data_args.max_length, splits.notes, splits.folder)


def _prepare_chats(recipe: Recipe) -> Prepared:
    """The rows of a language model's run.

    Raises:
        UserError: all problems at once.
    """
    from indictune.config.chat_arguments import ChatDataArguments, LlamaModelArguments
    from indictune.data.conversations import load_conversations, sources_of
    from indictune.data.prepare_chats import check_template, set_template, tokenise_splits
    from indictune.models.causal import check_packing, load_causal_config

    with recipe.problems.collecting():
        model_args = recipe.build(LlamaModelArguments)
        config = load_causal_config(model_args)
        check_max_length(config, recipe.planned(ChatDataArguments, "max_length"))
        if recipe.planned(ChatDataArguments, "packing"):
            check_packing(model_args, config)
    with recipe.problems.collecting():
        data_args = recipe.build(ChatDataArguments)
        sources = sources_of(data_args, recipe.problems)
        tokenizer = load_tokenizer(model_args)
        check_template(tokenizer, data_args, sources)
    with recipe.problems.collecting():
        splits = load_conversations(data_args, recipe.problems, sources)
        template = set_template(tokenizer, splits, data_args)
    recipe.problems.raise_any()
    chats = tokenise_splits(splits, tokenizer, template, data_args)
    print(printable(f"{chats.summary}\n"))
    datasets = (chats.train, chats.validation, chats.test)
    notes = [*splits.notes, *chats.notes]
    return Prepared(dict(zip(SPLITS, datasets, strict=True)), data_args.max_length, notes, chats.folder)


def lengths_table(prepared: Prepared) -> str:
    """Rows and tokens of each split, as lines of a table.

    The last column counts the rows as long as the limit: those that were cut, and the few that just fit.
    """
    limit = prepared.max_length
    body = []
    for name, dataset in prepared.datasets.items():
        if dataset is None:
            continue
        lengths = dataset.with_format("arrow")[:]["length"].to_numpy()
        mean, p95, longest = lengths.mean(), np.percentile(lengths, 95), lengths.max()
        numbers = [f"{len(lengths):,}", f"{lengths.sum():,}", f"{mean:.1f}", f"{p95:.0f}", f"{longest:,}"]
        body.append([name, *numbers, f"{(lengths >= limit).mean():.1%}"])
    return table(["split", "rows", "tokens", "mean", "p95", "longest", f"at the limit of {limit}"], body)
