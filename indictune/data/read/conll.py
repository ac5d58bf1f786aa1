"""Read CoNLL files: a word and its tag on each line, a blank line between sentences.

The word is the first field of a line and the tag the last one; what stands between them, such as a part of speech, is
not read. A line that has not the number of fields of the first one is refused, because its last field is another
column.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import groupby

from indictune.data.bad_rows import BadRows
from indictune.data.read.open_files import decoded_lines, kind_of_file
from indictune.data.read.read_files import checked_extension
from indictune.errors import UserError

Sentence = tuple[int, list[str], list[str]]

_SPACES, _TAB = re.compile("[ \t]+"), re.compile("\t")
_NAMES = """
word words token tokens text form lemma id index number sentence sent pos upos xpos chunk tag tags label labels ner
named entity entities iob bio
"""
_HEADERS = frozenset(_NAMES.split())
_OF_ENTITIES = re.compile("O|[BIESLU]-.+")
_CONLL_U_COLUMNS = 10
_MANY_WORDS = 10  # of which some have the same tag
_LONG_SENTENCE = 100  # words; longer ones are many sentences without blank lines


def conll_sentences(file: str, bad: BadRows) -> Iterator[Sentence]:
    """The first line of each sentence, its words and its tags. Lines that are not in this form are added to `bad`.

    Fields are separated by tabs if the first line of a word has one, else by spaces. So words may hold no-break
    spaces, and between tabs other spaces.

    Raises:
        UserError: the file is a table, has names of columns, numbers as words, too many tags, or one long sentence.
    """
    if kind_of_file(file) == ".csv":
        raise UserError("conll-is-csv", value=file)
    checked_extension(file)
    kinds, counts = set[str](), Counter[str]()
    sentences = begin = 0
    for is_sentence, group in groupby(_lines(file, bad), lambda each: each[1] is not None):
        lines = [(number, pair) for number, pair in group if pair is not None]
        words, tags = [word for _, (word, _) in lines], [tag for _, (_, tag) in lines]
        if is_sentence and all(words):
            begin = begin or lines[0][0]
            yield lines[0][0], words, tags
        kinds.update(words)
        counts.update(tags)
        sentences += is_sentence
    if begin and not (bad.count or bad.problems):
        _check_whole(file, begin, kinds, counts, sentences)


def _lines(file: str, bad: BadRows) -> Iterator[tuple[int, tuple[str, str] | None]]:
    """The number of each line, and its word and tag: both are empty in a bad line, and None stands for no word."""
    columns, between = 0, _SPACES
    for number, (line, byte) in enumerate(decoded_lines(file), 1):
        if byte:
            bad.add(number, "not-utf8", line, byte=byte)
        if not _holds_word(line):
            yield number, None
            continue
        line = line.rstrip(" \t\r\n")
        if not columns and "\t" in line:
            between = _TAB
        fields = [field.strip(" ") for field in between.split(line)]
        if not columns and (code := _other_form(fields)):
            bad.stop(number, code)
            return
        columns = columns or len(fields)
        if len(fields) != columns:
            bad.add(number, "conll-columns-differ", line, found=len(fields), columns=columns)
        elif not (fields[0] and fields[-1]):
            bad.add(number, "tags-do-not-match", line)
        elif not byte:
            yield number, (fields[0], fields[-1])
            continue
        yield number, ("", "")


def _other_form(fields: list[str]) -> str | None:
    """The code of the problem of a file that begins with these fields; None if they are a word and its tag."""
    if len(fields) == 1:
        return "tags-do-not-match"
    if len(fields) == _CONLL_U_COLUMNS and fields[0].isdecimal():
        return "conll-u"
    names = set(re.findall(r"[^\W_]+", " ".join(fields).lower()))
    return "conll-header" if names and names <= _HEADERS else None


def _check_whole(file: str, begin: int, words: set[str], tags: Counter[str], sentences: int) -> None:
    """Refuse a file whose kinds of words and tags, and number of words and sentences, are not those of tagged text."""
    first, *others = tags
    are_entities = {*others} > {"O"} and all(map(_OF_ENTITIES.fullmatch, others))
    if are_entities and tags[first] == 1 and not _OF_ENTITIES.fullmatch(first):
        raise UserError("conll-header", value=f"{file}:{begin}")
    if all(map(str.isdecimal, words)):
        raise UserError("conll-u", value=f"{file}:{begin}")
    if len(tags) > len(words) or len(tags) == tags.total() >= _MANY_WORDS:
        raise UserError("tags-like-words", value=file, tags=len(tags), words=len(words))
    if sentences == 1 and tags.total() > _LONG_SENTENCE:
        raise UserError("conll-one-sentence", value=file, words=tags.total())


def _holds_word(line: str) -> bool:
    """False for a blank line, the begin of a document, and a comment such as MultiCoNER's `# id 7 domain=train`."""
    is_comment = line.startswith("# ") and "=" in line
    return line.split()[:1] not in ([], ["-DOCSTART-"]) and not is_comment
