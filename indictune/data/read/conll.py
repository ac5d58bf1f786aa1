"""Read CoNLL files, with a word and its tag on each line, and the tweets of SentiMix, which are laid out like them.

Unless columns are named, the word is the first field of a line and the tag the last one. A line with more or fewer
fields than the first one is refused, because its last field is another column.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby

from indictune.config.shared_arguments import TagArguments
from indictune.data.bad_rows import BadRows
from indictune.data.columns import Wanted, existing_columns, shortened
from indictune.data.read.open_files import decoded_lines
from indictune.errors import UserError
from indictune.files import kind_of_file

Sentence = tuple[int, list[str], list[str]]

# Usual names of columns, as `column_key` writes them.
WORDS = frozenset(["word", "token", "form", "text"])
TAGS = frozenset(["tag", "label", "ner", "nertag", "nerlabel", "entity", "entitie", "namedentity", "iob", "bio"])
_SENTENCES = frozenset(["sentence", "sentenceid", "sentid", "sentenceno", "sentencenumber"])
_OTHERS = frozenset(["id", "index", "number", "no", "sent", "lemma", "po", "upo", "xpo", "chunk", "named"])
_HEADERS = WORDS | TAGS | _SENTENCES | _OTHERS  # words of names
_OF_ENTITIES = re.compile("O|[BIESLU]-.+")
_CONLL_U_COLUMNS = 10
_MANY_WORDS = 10  # of which some have the same tag
_LONG_SENTENCE = 100  # words; longer ones are many sentences without blank lines
_SPACES = re.compile("[ \t]+")


def column_key(name: str) -> str:
    """Equal for names of columns that differ in case, in spaces and signs, or by a plural's s."""
    return re.sub(r"[\W_]+", "", name.lower()).removesuffix("s")


# The numbers of the fields `word`, `tag` and `sentence`, from 0, and whether the first line has names of fields.
_Layout = tuple[int, int, int | None, bool]


def conll_sentences(file: str, args: TagArguments, bad: BadRows) -> Iterator[Sentence]:
    """The first line of each sentence, its words and its tags. Lines that are not in this form are added to `bad`.

    Fields are separated by commas in a csv file, by tabs if the first line of a word has one, else by spaces, or by
    commas if there are none. So words may hold no-break spaces, and between tabs other spaces. A first line with usual
    names of columns, or with those of `args`, says which columns are read. A sentence ends at a blank line, or where
    the value in the column of its number changes.

    Raises `UserError` for unclear names of columns, numbers as words, too many tags, or one long sentence.
    """
    kinds, counts = set[str](), Counter[str]()
    sentences = begin = 0
    for is_sentence, group in groupby(_lines(file, args, bad), lambda each: each[1] is not None):
        lines = [(number, pair) for number, pair in group if pair is not None]
        words, tags = [word for _, (word, _) in lines], [tag for _, (_, tag) in lines]
        if is_sentence and all(words):
            begin = begin or lines[0][0]
            yield lines[0][0], words, tags
        kinds.update(words)
        counts.update(tags)
        sentences += is_sentence
    if begin and not (bad.count or bad.problems):
        _check_whole(bad.location(begin), file, kinds, counts, sentences)


def _lines(file: str, args: TagArguments, bad: BadRows) -> Iterator[tuple[int, tuple[str, str] | None]]:
    """The number of each line, and its word and tag: both are empty in a bad line, and None ends a sentence."""
    layout: _Layout | None = None
    columns, between, in_sentence = 0, "", ""
    for number, (line, byte) in enumerate(decoded_lines(file), 1):
        if byte:
            bad.add(number, "not-utf8", line, byte=byte)
        holds_word = _holds_word(line)
        between = between or (_delimiter(file, line) if holds_word else "")
        fields = _fields(line, between, columns) if holds_word else []
        if not any(fields):  # a blank row of a spreadsheet has commas
            yield number, None
            continue
        if layout is None:
            layout, columns = _layout(fields, args, bad, number), len(fields)
            if layout[-1]:
                continue
        word, tag, sentence, _ = layout
        if len(fields) != columns:
            bad.add(number, "conll-columns-differ", line, found=len(fields), columns=columns)
        elif not (fields[word] and fields[tag]):
            bad.add(number, "tags-do-not-match", line)
        elif not byte:
            its_sentence = "" if sentence is None else fields[sentence]
            if its_sentence and its_sentence != in_sentence:
                in_sentence = its_sentence
                yield number, None
            yield number, (fields[word], fields[tag])
            continue
        yield number, ("", "")


def _delimiter(file: str, first: str) -> str:
    if kind_of_file(file) == ".csv":
        return ","
    return "\t" if "\t" in first.rstrip() else " " if " " in first.strip() or "," not in first else ","


def _fields(line: str, between: str, columns: int) -> list[str]:
    """The fields of a line; empty ones at its end are left out if it has more than `columns`."""
    line = line.rstrip("\r\n")
    if between == ",":
        fields = next(csv.reader([line]), [])
    else:
        fields = line.split("\t") if between == "\t" else _SPACES.split(line.rstrip(" \t"))
    fields = [field.strip(" ") for field in fields]
    while len(fields) > columns and not fields[-1]:
        fields.pop()
    return fields


def _layout(first: Sequence[str], args: TagArguments, bad: BadRows, number: int) -> _Layout:
    """Which fields are read, and whether the first line has their names. Raises `UserError` if it is neither."""
    place, named = bad.location(number), (args.word_column, args.tag_column, args.sentence_column)
    if first[0] == "meta" and len(first) in (2, 3):
        raise UserError("conll-of-tweets", value=place)
    if len(first) == 1:
        raise UserError("tags-do-not-match", value=place)
    words = {column_key(word) for word in re.findall(r"[^\W_]+", " ".join(first))}
    keys = {*map(column_key, first)}
    is_usual = bool(words and words <= _HEADERS) or bool(keys & WORDS and keys & TAGS)
    has_names = is_usual or any(name in first for name in named if name)
    if not has_names and not any(named) and len(first) == _CONLL_U_COLUMNS and first[0].isdecimal():
        raise UserError("conll-u", value=place)
    usual = (WORDS, TAGS, _SENTENCES) if has_names else ((), (), ())
    each_role = zip(("word", "tag", "sentence"), named, usual, strict=True)
    word, tag, sentence = (_column(*each, first, place) for each in each_role)
    if not has_names:
        word, tag = 0 if word is None else word, len(first) - 1 if tag is None else tag
    if word is None or tag is None or word == tag:
        raise UserError("conll-header", value=place, columns=", ".join(map(shortened, first)))
    if has_names:
        by = "blank lines" if sentence is None else shortened(first[sentence])
        bad.remark(f"{place}: words by column {shortened(first[word])}, tags {shortened(first[tag])}, sentences {by}.")
    return word, tag, sentence, has_names


def _column(role: str, named: str | None, usual: Collection[str], first: Sequence[str], place: str) -> int | None:
    """The number of a column, from 0: that of its name, or its number from 1; else of the only usual name."""
    if named is None:
        fitting = [at for at, name in enumerate(first) if column_key(name) in usual]
        return fitting[0] if len(fitting) == 1 else None
    at = first.index(named) if named in first else int(named) - 1 if named.isdecimal() else -1
    if not 0 <= at < len(first):
        shown, option = ", ".join(map(shortened, first)), f"--{role}_column"
        raise UserError("column-missing", value=place, column=shortened(named), option=option, columns=shown)
    return at


def _check_whole(place: str, file: str, words: set[str], tags: Counter[str], sentences: int) -> None:
    """Refuse a file whose kinds of words and tags, and number of words and sentences, are not those of tagged text."""
    first, *others = tags
    are_entities = {*others} > {"O"} and all(map(_OF_ENTITIES.fullmatch, others))
    if are_entities and tags[first] == 1 and not _OF_ENTITIES.fullmatch(first):
        raise UserError("conll-header", value=place, columns=f"..., {shortened(first)}")
    if all(map(str.isdecimal, words)):
        raise UserError("conll-u", value=place)
    if len(tags) > len(words) or len(tags) == tags.total() >= _MANY_WORDS:
        raise UserError("tags-like-words", value=file, tags=len(tags), words=len(words))
    if sentences == 1 and tags.total() > _LONG_SENTENCE:
        raise UserError("conll-one-sentence", value=file, words=tags.total(), tags=", ".join([*tags][:5]))
    if sentences == tags.total() >= _LONG_SENTENCE:
        raise UserError("conll-lone-words", value=file, words=tags.total())


def _holds_word(line: str) -> bool:
    """False for a blank line, the begin of a document, and a comment such as MultiCoNER's `# id 7 domain=train`."""
    is_comment = line.startswith("# ") and "=" in line
    return line.split()[:1] not in ([], ["-DOCSTART-"]) and not is_comment


TWEETS = (".txt", ".conll")


def holds_tweets(file: str) -> bool:
    """Whether a text file begins like SentiMix (SemEval-2020, task 9): with the line `meta<tab>id<tab>label`."""
    lines = (line for line, _ in decoded_lines(file) if line.strip())
    return next(lines, "").startswith("meta\t")


def tweet_rows(file: str, wanted: Wanted, bad: BadRows) -> Iterator[tuple[int, tuple[str | None, ...]]]:
    """The first line of each tweet of SentiMix, and its cells of the wanted columns: `id`, `label` and `text`.

    A line below `meta` has a word, and mostly a tab and its language. The text is the words with spaces. `bad` gets
    words that follow no `meta`.
    """
    names = existing_columns(file, ("id", "label", "text"), wanted, bad)
    start, cells, words = 0, dict[str, str | None](), list[str]()

    def row() -> tuple[int, tuple[str | None, ...]]:
        tweet = cells | {"text": " ".join(words)}
        return start, tuple(tweet.get(names.get(role, "")) for role in wanted.roles)

    for number, (line, byte) in enumerate(decoded_lines(file), 1):
        if byte:
            bad.add(number, "not-utf8", line, byte=byte)
        fields = [field.strip() for field in line.split("\t")]
        # The word `meta` of a tweet has a language, and no label.
        is_meta = fields[0] == "meta" and len(fields) in ((3,) if start else (2, 3))
        if start and (is_meta or not any(fields)):
            yield row()
            start, words = 0, []
        if is_meta:
            start, cells = number, {"id": fields[1], "label": "".join(fields[2:]) or None}
        elif any(fields) and start:
            words.append(fields[0])
        elif any(fields):
            bad.add(number, "tweet-without-meta", line)
    if start:
        yield row()
