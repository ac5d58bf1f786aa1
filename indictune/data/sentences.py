"""Read sentences whose words have tags: from CoNLL files, and from lists in json, jsonl and parquet files."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard

import pyarrow as pa

from indictune.config.arguments import SourceArguments
from indictune.config.plan import RunPlan
from indictune.config.shared_arguments import TextArguments
from indictune.data.bad_rows import BadRows
from indictune.data.cache import StoredRows
from indictune.data.columns import existing_columns, seen, wanted_columns
from indictune.data.health.findings import shares_of_languages
from indictune.data.labels import with_counts
from indictune.data.languages import language_of
from indictune.data.read.conll import conll_sentences
from indictune.data.read.open_files import files_named, kind_of_file
from indictune.data.read.read_files import RECORD_EXTENSIONS, Record, SplitFiles, read_records
from indictune.data.read.row_sources import SPLITS, builtin_files
from indictune.data.row_choice import split_of
from indictune.errors import Problems, UserError, attributed_to, problem

logger = logging.getLogger(__name__)

BUILTIN = "builtin:names"
_NUMBER = re.compile(r"[-+]?\d+([.,]\d+)?")


class Sentences(StoredRows):
    """The sentences of one split: columns `words` and `tags` (lists of one length), `language` and `line`."""

    @property
    def texts(self) -> list[str]:
        """The words of each sentence, with spaces."""
        return [" ".join(words) for words in self.table["words"].to_pylist()]

    def tags(self) -> dict[str, int]:
        """Each tag, and the number of the last sentence that has it."""
        return {tag: number for number, tags in enumerate(self.table["tags"].to_pylist()) for tag in tags}


def files_by_split(args: SourceArguments) -> dict[str, str | Sequence[str]]:
    """The files of each split, as named. Those that a flag names replace the built-in one."""
    builtin = builtin_files(BUILTIN) if args.dataset_name == BUILTIN else {}
    return {**builtin, **{split: named for split in SPLITS if (named := getattr(args, f"{split}_file"))}}


def read_sentences(named: str | Sequence[str], split: str, args: TextArguments) -> Sentences:
    """Read the sentences of a split; raises `UserError` for a missing file or column, or the first bad sentences."""
    wanted = replace(wanted_columns(args), optional={})
    rows: list[dict[str, Any]] = []
    flag = f"--{split}_file"
    with attributed_to(flag):
        Problems(problem("not-of-this-task", f"--{name}") for name in wanted.given_layout()).raise_any()
        name, files = files_named(named, split)
        bad = BadRows(name)
        for line, record in SplitFiles(files).records(bad, partial(_records, args)):
            existing_columns(bad.location(line), list(record), wanted)
            words, tags = record[args.text_column], record[args.label_columns]
            tags = [*map(seen, tags)] if _are_texts(tags) else tags
            if not (_are_texts(words) and _are_texts(tags) and 0 < len(words) == len(tags)):
                bad.add(line, "tags-do-not-match", record)
            elif any(map(_NUMBER.fullmatch, tags)):
                bad.add(line, "tags-are-numbers", record)
            else:
                language = str(record.get(args.language_column or "language") or "").strip()
                language = language or language_of(" ".join(words))
                rows.append({"words": words, "tags": tags, "language": language, "line": line})
        bad.finish(len(rows))
        if not rows:
            raise UserError("no-rows", value=name)
    return Sentences(pa.Table.from_pylist(rows), name, flag, bad.files)


def divided(splits: dict[str, Sentences], plan: RunPlan[Any, Any]) -> dict[str, Sentences]:
    """The splits of a run, with validation sentences that are held out of `train` if the plan asks for it."""
    if (split := split_of(plan)) is None:
        return splits
    train = splits["train"]
    languages, words, tags = (train.table[name].to_pylist() for name in ("language", "words", "tags"))
    kinds = [sorted({*of_row}) for of_row in tags]
    strata = pa.array(" ".join([language, *kind]) for language, kind in zip(languages, kinds, strict=True))
    chosen = split.choose(map("\n".join, words), strata, pa.array(kinds, pa.list_(pa.string())))
    if chosen.any():
        left, held_out = (train.table.filter(pa.array(mask)) for mask in (~chosen, chosen))
        splits = splits | split.divided(train, left, held_out)
    split.announce(splits)
    return splits


def tag_balance(sentences: Sentences) -> tuple[list[dict[str, Any]], list[str]]:
    """Words of each language and tag with their share of the language's words, and notes. Logs the tags."""
    of_language, of_both, of_tag = Counter[str](), Counter[tuple[str, str]](), Counter[str]()
    columns = (sentences.table[name].to_pylist() for name in ("language", "tags"))
    for language, tags in zip(*columns, strict=True):
        of_language[language] += len(tags)
        of_both.update((language, tag) for tag in tags)
        of_tag.update(tags)
    logger.info("tags: %s", with_counts(sorted(of_tag), of_tag))
    return shares_of_languages(of_both, of_language), _tag_notes({*of_tag})


def _tag_notes(tags: set[str]) -> list[str]:
    """That tags such as BPER and IPER are no B-PER and I-PER."""
    glued = sorted(tag for tag in tags if len(tag) > 1 and tag.isalpha() and {f"B{tag[1:]}", f"I{tag[1:]}"} <= tags)
    kinds = f"Tags {', '.join(glued)} are entities of {len(glued)} kinds, because none has the form B-KIND or I-KIND. "
    return [f"{kinds}If they begin and continue one, write {glued[0][0]}-{glued[0][1:]} and so on."] if glued else []


def _are_texts(values: object) -> TypeGuard[list[str]]:
    return isinstance(values, list) and all(isinstance(each, str) for each in values)


def _records(args: TextArguments, file: str, bad: BadRows) -> Iterator[Record]:
    if kind_of_file(file) in RECORD_EXTENSIONS:
        yield from read_records(file, bad)
        return
    for line, words, tags in conll_sentences(file, bad):
        yield line, {args.text_column: words, args.label_columns: tags}
