"""Learn pieces of words from texts, as joins of the tokens that a tokenizer splits them into."""

from __future__ import annotations

import heapq
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from indictune.data.text.cleaning import PRIVATE

MIN_TEXTS = 5  # that a piece is in: who reads a published tokenizer learns no word of few people
SPACE, INNER = "▁", "##"  # before a token that begins a word, and before one that does not
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # of a character that a SentencePiece vocabulary lacks
_LETTERS: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]  # of bytes, in BPE of bytes
_BYTES = {letter: byte for byte, letter in _LETTERS.items()}
_JOINERS = "\u200c\u200d"


@dataclass
class Counted:
    """How often a word occurs, and the numbers of the first texts that have it."""

    count: int = 0
    texts: set[int] = field(default_factory=set)

    def add(self, text: int) -> None:
        """Count the word in a text."""
        self.count += 1
        if len(self.texts) < MIN_TEXTS:
            self.texts.add(text)


class LearnedPiece(NamedTuple):
    """A new token: its text as the tokenizer writes it, the tokens that it replaces, and the pair that it joins.

    A character that had several tokens joins no pair.
    """

    text: str
    parts: tuple[int, ...]
    pair: tuple[str, str] | None = None


Symbol = tuple[str, tuple[int, ...]]  # a text and its tokens
Form = Literal["WordPiece", "Unigram", "BPE", "bytes"]  # of a tokenizer; the last one is BPE of bytes


def learn_pieces(
    texts: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    wanted: int,
    is_learned: Callable[[str], bool],
    form: Form,
) -> list[LearnedPiece]:
    """At most so many pieces, each the join of two neighbours that are most frequent, as byte-pair encoding learns.

    A piece has letters and signs alone, is in five different texts, and comes from no user name. None is a token of
    the tokenizer. Without merges, those are left out of which no word is made in the end. `is_learned` says of a word
    whether pieces come from it.
    """
    words = defaultdict[tuple[Symbol, ...], Counted](Counted)
    seen, backend = set[int](), tokenizer.backend_tokenizer
    for number, text in enumerate(texts):
        if (key := hash(text)) in seen:
            continue
        seen.add(key)
        for word in words_of(backend.encode(PRIVATE.sub(" ", text), add_special_tokens=False), form):
            if is_learned("".join(bare(each) for each, _ in word)):
                words[tuple(word)].add(number)
    joins = _Joins(words, {*tokenizer.get_vocab()}, form == "bytes")
    found, used = joins.learn(wanted), joins.used()
    return [each for each in found if form == "BPE" or each.text in used]


def bare(token: str) -> str:
    """A token without what says where it stands in a word."""
    return token.removeprefix(SPACE).removeprefix(INNER).strip()


def words_of(encoding: Any, form: Form) -> Iterator[list[Symbol]]:
    """The words of a text that are letters and signs alone, each as its tokens, bytes put together to characters."""
    word: list[Symbol] = []
    for symbol in _symbols(zip(encoding.tokens, encoding.ids, strict=True), form == "bytes"):
        text = symbol[0]
        is_word = bool(bare(text)) and all(map(_is_letter, bare(text)))
        begins = not text.startswith(INNER) if form == "WordPiece" else text.startswith((SPACE, " "))
        if word and (begins or not is_word):
            yield word
            word = []
        word = [*word, symbol] if is_word else word
    if word:
        yield word


def _symbols(tokens: Iterable[tuple[str, int]], of_bytes: bool) -> Iterator[Symbol]:
    held, ids = b"", list[int]()
    for token, number in tokens:
        match = _BYTE.fullmatch(token)
        if not (of_bytes or match):
            if held:  # no whole character
                yield "\ufffd", tuple(ids)
                held, ids = b"", []
            yield token, (number,)
            continue
        own = bytes([int(match[1], 16)]) if match else bytes(_BYTES.get(letter, 0) for letter in token)
        if held == b" " == own[:1]:
            yield " ", tuple(ids)
            held, ids = b"", []
        held, ids = held + own, [*ids, number]
        with suppress(UnicodeDecodeError):
            if (text := held.decode()) != " ":  # which is a part of the word that follows
                yield text, tuple(ids)
                held, ids = b"", []


def _is_letter(character: str) -> bool:
    return unicodedata.category(character)[0] in "LM" or character in _JOINERS


class _Joins:
    """Joins the most frequent neighbours in words, again and again."""

    def __init__(self, words: dict[tuple[Symbol, ...], Counted], known: Collection[str], of_bytes: bool) -> None:
        self._counted = list(words.values())
        self._words = [[text for text, _ in word] for word in words]
        self._parts = {text: ids for word in words for text, ids in word}
        alphabet = {text: "".join(map(_LETTERS.__getitem__, text.encode())) for text in self._parts}
        self._of_bytes, self._known = of_bytes, known
        self._has = {text for text in self._parts if (alphabet[text] if of_bytes else text) in known}
        self._where = defaultdict[tuple[str, str], set[int]](set)
        self._counts = Counter[tuple[str, str]]()

    def learn(self, wanted: int) -> list[LearnedPiece]:
        """At most so many pieces."""
        found = self._characters(wanted)
        for number in range(len(self._words)):
            self._count(number, 1)
        heap = [(-count, pair) for pair, count in self._counts.items()]
        heapq.heapify(heap)
        made = {piece.text for piece in found}
        while heap and len(made) < wanted:
            count, pair = heapq.heappop(heap)
            if -count != self._counts[pair] or not count:
                continue
            text = pair[0] + pair[1].removeprefix(INNER)
            if self._is_token(text) or not {*pair} <= self._has or self._texts(self._where[pair]) < MIN_TEXTS:
                self._counts[pair] = 0
                continue
            self._parts.setdefault(text, self._parts[pair[0]] + self._parts[pair[1]])
            self._has.add(text)
            made.add(text)
            found.append(LearnedPiece(text, self._parts[text], pair))
            for changed in self._join(pair, text):
                heapq.heappush(heap, (-self._counts[changed], changed))
        return found

    def used(self) -> set[str]:
        """The texts that words are made of in the end."""
        return {text for word in self._words for text in word}

    def _is_token(self, text: str) -> bool:
        written = "".join(map(_LETTERS.__getitem__, text.encode())) if self._of_bytes else text
        return written in self._known

    def _characters(self, wanted: int) -> list[LearnedPiece]:
        """The characters of several tokens, the most frequent first."""
        counts, where = Counter[str](), defaultdict[str, set[int]](set)
        for number, word in enumerate(self._words):
            for text in {*word} - self._has:
                counts[text] += self._counted[number].count
                where[text].add(number)
        ordered = sorted(counts, key=lambda text: (-counts[text], text))
        chosen = [text for text in ordered if self._texts(where[text]) >= MIN_TEXTS][:wanted]
        self._has.update(chosen)
        return [LearnedPiece(text, self._parts[text]) for text in chosen]

    def _texts(self, numbers: Iterable[int]) -> int:
        """In how many texts one of the words is; counted up to the least that is needed."""
        found: set[int] = set()
        for number in numbers:
            found |= self._counted[number].texts
            if len(found) >= MIN_TEXTS:
                break
        return len(found)

    def _count(self, number: int, sign: int) -> None:
        """Add a word's pairs to the counts, or take them away."""
        word = self._words[number]
        for pair in pairwise(word):
            self._counts[pair] += sign * self._counted[number].count
            if sign > 0:
                self._where[pair].add(number)

    def _join(self, pair: tuple[str, str], text: str) -> set[tuple[str, str]]:
        """Join a pair in all words; returns the pairs whose counts have changed."""
        changed: set[tuple[str, str]] = set()
        for number in self._where.pop(pair):
            self._count(number, -1)
            before, joined, at = self._words[number], list[str](), 0
            while at < len(before):
                is_pair = tuple(before[at : at + 2]) == pair
                joined.append(text if is_pair else before[at])
                at += 2 if is_pair else 1
            self._words[number] = joined
            self._count(number, 1)
            changed.update(pairwise(before))
            changed.update(pairwise(joined))
        return changed - {pair}
