"""Read sentences whose words have tags: from CoNLL files, and from lists in json, jsonl and parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, TypeGuard

import pyarrow as pa

from indictune.config.arguments import SourceArguments
from indictune.config.plan import RunPlan
from indictune.config.shared_arguments import TextArguments
from indictune.data.bad_rows import BadRows
from indictune.data.cache import StoredRows
from indictune.data.columns import existing_columns, wanted_columns
from indictune.data.languages import language_of
from indictune.data.read.open_files import decoded_lines, files_named, kind_of_file
from indictune.data.read.read_files import RECORD_EXTENSIONS, Record, SplitFiles, checked_extension, read_records
from indictune.data.read.row_sources import SPLITS, builtin_files
from indictune.data.row_choice import split_of
from indictune.errors import Problems, UserError, attributed_to, problem

BUILTIN = "builtin:names"


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
            words, tags = record[args.text_column], record[args.label_column]
            if not (_are_texts(words) and _are_texts(tags) and 0 < len(words) == len(tags)):
                bad.add(line, "tags-do-not-match", record)
            elif any(tag.isdecimal() for tag in tags):
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


def _are_texts(values: object) -> TypeGuard[list[str]]:
    return isinstance(values, list) and all(isinstance(each, str) for each in values)


def _records(args: TextArguments, file: str, bad: BadRows) -> Iterator[Record]:
    is_conll = kind_of_file(file) not in RECORD_EXTENSIONS
    return _conll_records(file, bad, args) if is_conll else read_records(file, bad)


def _conll_records(file: str, bad: BadRows, args: TextArguments) -> Iterator[Record]:
    """The first line of each sentence, and its words and tags: the first and the last field of each line."""
    checked_extension(file)
    for is_sentence, group in groupby(enumerate(decoded_lines(file), 1), lambda each: _holds_word(each[1][0])):
        lines = list(group)
        for number, (line, byte) in lines:
            if byte:
                bad.add(number, "not-utf8", line, byte=byte)
        if is_sentence:
            fields = [line.split() for _, (line, _) in lines]
            tags = [each[-1] for each in fields if each[1:]]
            yield lines[0][0], {args.text_column: [each[0] for each in fields], args.label_column: tags}


def _holds_word(line: str) -> bool:
    """False for a blank line, the begin of a document, and a comment such as MultiCoNER's `# id 7 domain=train`."""
    is_comment = line.startswith("# ") and "=" in line
    return line.split()[:1] not in ([], ["-DOCSTART-"]) and not is_comment
