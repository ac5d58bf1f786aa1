"""Read sentences whose words have tags: from CoNLL files, and from lists in json, jsonl and parquet files."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeGuard

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from indictune.config.arguments import TaggedDataArguments
from indictune.config.plan import RunPlan
from indictune.config.shared_arguments import EvaluationArguments
from indictune.data.bad_rows import BadRows, Record
from indictune.data.cache import StoredRows, with_column
from indictune.data.collation import IGNORED_LABEL
from indictune.data.columns import Wanted, existing_columns, seen, shortened, wanted_columns
from indictune.data.health.findings import Finding, shares_of_languages
from indictune.data.labels import with_counts
from indictune.data.languages import language_of
from indictune.data.read.conll import TAGS, WORDS, column_key, conll_sentences
from indictune.data.read.read_files import RECORD_EXTENSIONS, SplitFiles, checked_extension, read_records
from indictune.data.read.row_sources import Read, Source, SplitRows
from indictune.data.row_choice import split_of
from indictune.data.text.tokenisation import check_lengths, words_with_spaces
from indictune.errors import Problems, UserError, attributed_to, problem
from indictune.files import kind_of_file

if TYPE_CHECKING:
    from datasets import Dataset

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


def tag_reader(args: TaggedDataArguments | EvaluationArguments) -> Read[Record]:
    """Read the sentences of a split as objects of `words`, `tags` and `language`, not checked yet.

    Raises `UserError` for flags of csv files that do not count here.
    """
    given = wanted_columns(args).given_layout()
    Problems(problem("not-of-this-task", f"--{name}") for name in given).raise_any()

    def of_file(file: str, bad: BadRows) -> Iterator[Record]:
        if kind_of_file(file) in RECORD_EXTENSIONS:
            yield from _named(args, read_records(file, bad), bad)
            return
        checked_extension(file)
        for line, words, tags in conll_sentences(file, args, bad):
            yield line, {"words": words, "tags": tags}

    def read(rows: SplitRows, bad: BadRows) -> Iterator[Record]:
        if isinstance(rows, SplitFiles):
            return rows.records(bad, of_file)
        return _named(args, rows.records(bad), bad)

    return read


def _named(
    args: TaggedDataArguments | EvaluationArguments, records: Iterable[Record], bad: BadRows
) -> Iterator[Record]:
    """Rows of lists with the columns that the flags name, or else those with usual names."""
    language = args.language_column
    for line, record in records:
        words = args.word_column or _list_of(record, args.text_column, "text", WORDS)
        tags = args.tag_column or _list_of(record, args.label_columns, "label", TAGS)
        wanted = {"word": words, "tag": tags} | ({} if language is None else {"language": language})
        existing_columns(bad.location(line), list(record), Wanted(wanted, {}))
        if (words, tags) != (args.text_column, args.label_columns):
            bad.remark(f"{bad.source}: words in column {shortened(words)}, tags in {shortened(tags)}.")
        yield line, {"words": record[words], "tags": record[tags], "language": record.get(language or "language")}


def _list_of(record: Mapping[str, object], name: str, default: str, usual: Collection[str]) -> str:
    """The column of that name; if nobody gave it and it holds no list, the only list with a usual name."""
    if name != default or isinstance(record.get(name), list):
        return name
    fitting = [each for each, value in record.items() if column_key(each) in usual and isinstance(value, list)]
    return fitting[0] if len(fitting) == 1 else name


def read_sentences(source: Source[Record]) -> Sentences:
    """Read the sentences of a split; raises `UserError` for a missing file or column, or the first bad sentences."""
    rows: list[dict[str, Any]] = []
    with attributed_to(source.origin):
        bad = BadRows(source.name)
        for line, record in source.read(bad):
            words, tags = record["words"], record["tags"]
            if isinstance(tags, list):
                tags = [seen(str(each)) if isinstance(each, str | int) else each for each in tags]
            if not (_are_texts(words) and _are_texts(tags) and 0 < len(words) == len(tags)):
                bad.add(line, "tags-do-not-match", record)
            elif numbers := [tag for tag in tags if _NUMBER.fullmatch(tag)]:
                bad.add(line, "tags-are-numbers", record, seen=", ".join(map(shortened, numbers[:3])))
            else:
                language = str(record.get("language") or "").strip() or language_of(" ".join(words))
                rows.append({"words": words, "tags": tags, "language": language, "line": line})
        bad.finish(len(rows))
        if not rows:
            raise UserError("no-rows", value=source.name)
    for remark in bad.remarks:
        logger.info("%s %s", source.origin, remark)
    return Sentences(pa.Table.from_pylist(rows), source.name, source.origin, bad.files)


# How a tag may be written, of which the first that fits all tags is taken. Only the first needs no kind with two
# prefixes: B_PER, PER-B and BPER alone may be names of their own.
_FORMS = {
    "B-X": re.compile("(?P<prefix>[BIESLU])-(?P<kind>.+)"),
    "B_X": re.compile("(?P<prefix>[BIESLU])_(?P<kind>.+)"),
    "X-B": re.compile("(?P<kind>.+)-(?P<prefix>[BIESLU])"),
    "X_B": re.compile("(?P<kind>.+)_(?P<prefix>[BIESLU])"),
    "BX": re.compile("(?P<prefix>[BI])(?P<kind>[^-_].*)"),
}
OUTSIDE = "O"
_OUTSIDE_TOO = frozenset(["o", "other", "others", "outside", "none", "_"])  # in lower case
_Tag = tuple[str, str]  # of a word in an entity: its prefix (B, I, E, S, L or U) and the kind


def with_one_scheme(splits: dict[str, Sentences], known: Collection[str]) -> tuple[dict[str, Sentences], Finding]:
    """The splits with tags of the form B-X and I-X (IOB2), whichever scheme they have, and what was read.

    Tags that name entities in no known form stay, and so do those of IOBES and BILOU that are among the `known` ones,
    which are the tags of the model that learns or is scored. Without O, `Other` and its like stand for it.
    """
    tags = {tag for each in splits.values() for tag in each.tags()}
    outside = [OUTSIDE] if OUTSIDE in tags else [tag for tag in tags - {*known} if tag.lower() in _OUTSIDE_TOO]
    form, parts = _form_of(tags.difference(outside), known)
    others = sorted(tags.difference(outside, parts))
    prefixes = {prefix for prefix, _ in parts.values()}
    if others or not form or (tags <= {*known} and not prefixes <= {"B", "I"}):
        shown = ", ".join(map(shortened, (others or sorted(tags))[:4]))
        note = f"The tags are no other form of B-X and I-X ({shown}, ...), and stay as they are written."
        if form and others:
            note = f"The tags are of the form {form}, but not {shown}. "
            note += "All stay as written, and these are entities too."
        return splits, Finding("tag_scheme", 0, sum(map(len, splits.values())), note, warns=bool(form and others))
    made, changed, begun = dict[str, Sentences](), 0, Counter[str]()
    for split, each in splits.items():
        given = each.table["tags"].to_pylist()
        found = [_as_iob2(row, parts, begun) for row in given]
        changed += sum(map(list.__ne__, given, found))
        table = with_column(each.table, "tags", pa.array(found, pa.list_(pa.string())))
        made[split] = Sentences(table, each.source, each.origin, each.files)
    examples = ", ".join(form.replace("B", prefix) for prefix in sorted(prefixes))
    become = ", and become B-X and I-X" if changed else ""
    become += f"; {shortened(outside[0])} is O" if [OUTSIDE] != outside != [] else ""
    note = f"The tags are read as {_scheme(prefixes, begun)} ({examples}){become}."
    logger.info(note)
    return made, Finding("tag_scheme", changed, sum(map(len, splits.values())), note, warns=changed > 0)


def _form_of(tags: Collection[str], known: Collection[str]) -> tuple[str, dict[str, _Tag]]:
    """The form that all tags have, or most of them, and the parts of these tags; an empty form if none is sure."""
    most: tuple[str, dict[str, _Tag]] = "", {}
    for form, pattern in _FORMS.items():
        matches = {tag: pattern.fullmatch(tag) for tag in tags}
        parts = {tag: (match["prefix"], match["kind"]) for tag, match in matches.items() if match}
        kinds = Counter(kind for _, kind in parts.values())
        is_sure = form == "B-X" or max(kinds.values(), default=0) > 1 or any(f"B-{kind}" in known for kind in kinds)
        if is_sure and len(parts) > max(len(most[1]), len(tags) / 2):
            most = form, parts
    return most


def _as_iob2(tags: Sequence[str], parts: Mapping[str, _Tag], begun: Counter[str]) -> list[str]:
    """The tags as B-X, I-X and O, of equal entities as seqeval reads them. `begun` counts how entities begin."""
    made, before = list[str](), (OUTSIDE, "")
    for tag in tags:
        prefix, kind = parts.get(tag, (OUTSIDE, ""))
        is_new = kind != before[1] or before[0] in "ESLU"
        begins = is_new or prefix in "BSU"
        made.append(f"{'B' if begins else 'I'}-{kind}" if kind else OUTSIDE)
        begun[prefix if is_new else "between"] += begins and kind != ""
        before = prefix, kind
    return made


def _scheme(prefixes: Collection[str], begun: Mapping[str, int]) -> str:
    """The name of a scheme: in IOB1 an entity begins with I, unless it follows one of its kind."""
    if named := [name for name, its in {"IOBES": "ES", "BILOU": "LU"}.items() if {*its} & {*prefixes}]:
        return named[0]
    if not begun.get("I"):
        return "IOB2"
    return f"IOB2, in which {begun['I']:,} entities begin with I," if begun.get("B") else "IOB1"


def divided(splits: dict[str, Sentences], plan: RunPlan[Any, Any]) -> dict[str, Sentences]:
    """The splits of a run, with validation sentences that are held out of `train` if the plan asks for it."""
    if (split := split_of(plan)) is None or "validation" in splits:
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


def tag_balance(sentences: Sentences) -> list[dict[str, Any]]:
    """Words of each language and tag with their share of the language's words. Logs the tags."""
    of_language, of_both, of_tag = Counter[str](), Counter[tuple[str, str]](), Counter[str]()
    columns = (sentences.table[name].to_pylist() for name in ("language", "tags"))
    for language, tags in zip(*columns, strict=True):
        of_language[language] += len(tags)
        of_both.update((language, tag) for tag in tags)
        of_tag.update(tags)
    logger.info("tags: %s", with_counts(sorted(of_tag), of_tag))
    return shares_of_languages(of_both, of_language)


def _are_texts(values: object) -> TypeGuard[list[str]]:
    return isinstance(values, list) and all(isinstance(each, str) for each in values)


def tokenised_sentences(
    splits: Mapping[str, Sentences], tag_names: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> dict[str, Dataset]:
    """By split: `input_ids`, `labels` (one a token), `length`, `language`, and of each word `tags` and `is_read`.

    `is_read` is False for words that `max_length` cuts off.
    """
    from datasets import Dataset  # slow to import

    ids = {tag: index for index, tag in enumerate(tag_names)}
    datasets = {}
    for split, sentences in splits.items():
        words = sentences.table["words"].to_pylist()
        tags = [[ids[tag] for tag in row] for row in sentences.table["tags"].to_pylist()]
        given = words_with_spaces(tokenizer, words)
        encoded = tokenizer(given, is_split_into_words=True, truncation=True, max_length=max_length)
        labels, is_read = [], []
        for number, row in enumerate(tags):
            begun = [None if word == before else word for before, word in pairwise([None, *encoded.word_ids(number)])]
            labels.append([IGNORED_LABEL if word is None else row[word] for word in begun])
            is_read.append([word in begun for word in range(len(row))])
        columns = {"input_ids": encoded["input_ids"], "labels": labels, "length": list(map(len, labels))}
        columns |= {"tags": tags, "is_read": is_read, "language": sentences.table["language"].to_pylist()}
        datasets[split] = Dataset.from_dict(columns)
    check_lengths(splits, datasets, max_length)
    return datasets
