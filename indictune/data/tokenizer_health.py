"""Measure how well a tokenizer serves each language: unknown tokens, and words that it cannot tell apart."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from transformers import PreTrainedTokenizerBase

from indictune.console_text import table
from indictune.data.findings import MAX_EXAMPLES, Finding
from indictune.data.rows import BETWEEN_MESSAGES
from indictune.data.text.cleaning import WORD

MEASURED_ROWS = 1_000  # of each language; enough for two digits
_MANY_COLLISIONS = 0.005
_MANY_UNKNOWN = 0.05
_WORD = re.compile(rf"[{WORD}]+")
_JOINERS = re.compile("[\u200c\u200d]")

Ids = list[list[int]]


@dataclass(frozen=True)
class LanguageHealth:
    """What the tokenizer does to the texts of a language; shares are between 0 and 1.

    Attributes:
        language: of the rows.
        rows: all of the language.
        measured_rows: at most 1,000, drawn at random. `truncated_share` of conversations is of all rows.
        tokens_per_word: a word is what spaces separate.
        unknown_share: unknown tokens over all.
        truncated_share: rows that are cut.
        collision_share: words in the texts whose tokens are those of another word that is more frequent.
    """

    language: str
    rows: int
    measured_rows: int
    tokens_per_word: float
    unknown_share: float
    truncated_share: float
    collision_share: float


def language_health(
    language: str, rows: int, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, cut: float | int
) -> tuple[LanguageHealth, list[Finding]]:
    """The measures of a language, and what is to say of them.

    Args:
        language: of the texts.
        rows: how many the language has.
        texts: of some of them; `BETWEEN_MESSAGES` separates those of a conversation.
        tokenizer: of the model.
        cut: share of the rows that are cut; or, as a whole number, the tokens that a row may have.
    """
    parts = [part for text in texts for part in text.split(BETWEEN_MESSAGES)]
    ids = _encoded(parts, tokenizer)
    tokens, words = sum(map(len, ids)), sum(len(part.split()) for part in parts)
    if isinstance(cut, int):
        room = cut - tokenizer.num_special_tokens_to_add()
        cut = sum(len(row) > room for row in ids) / len(ids)
    spelled = Counter(word for text in texts for word in _WORD.findall(text))
    findings = [
        _unknown(language, ids, spelled, tokenizer),
        _collisions(language, spelled, tokenizer),
    ]
    shares = findings[0].share, cut, findings[1].share
    measured = LanguageHealth(language, rows, len(texts), tokens / max(words, 1), *shares)
    return measured, [each for each in findings if each.count]


def _unknown(language: str, ids: Ids, spelled: Counter[str], tokenizer: PreTrainedTokenizerBase) -> Finding:
    tokens = sum(map(len, ids))
    unknown = sum(row.count(tokenizer.unk_token_id) for row in ids) if tokenizer.unk_token_id is not None else 0
    words: list[str] = []
    if unknown:
        words = [word for word, _ in spelled.most_common()]
        pairs = zip(words, _encoded(words, tokenizer), strict=True)
        words = [word for word, of_word in pairs if tokenizer.unk_token_id in of_word][:MAX_EXAMPLES]
    share = unknown / max(tokens, 1)
    note = f"{language}: the tokenizer does not know {share:.1%} of the tokens."
    return Finding("unknown_tokens", unknown, tokens, note, language, words, share >= _MANY_UNKNOWN)


def _collisions(language: str, spelled: Counter[str], tokenizer: PreTrainedTokenizerBase) -> Finding:
    """Words that become the tokens of a more frequent word. Case and joiners (U+200C, U+200D) make no other word."""
    groups: defaultdict[tuple[int, ...], Counter[str]] = defaultdict(Counter)
    for word, ids in zip(spelled, _encoded(list(spelled), tokenizer), strict=True):
        if tokenizer.unk_token_id not in ids:
            same = unicodedata.normalize("NFC", _JOINERS.sub("", word).casefold())
            groups[tuple(ids)][same] += spelled[word]
    several = [group.most_common() for group in groups.values() if len(group) > 1]
    several.sort(key=lambda group: -sum(count for _, count in group[1:]))
    lost, words = sum(count for group in several for _, count in group[1:]), spelled.total()
    examples = [" = ".join(word for word, _ in group[:MAX_EXAMPLES]) for group in several[:MAX_EXAMPLES]]
    note = (
        f"{language}: the tokenizer drops letters, and {lost / max(words, 1):.1%} of the words become the same tokens "
        "as another word."
    )
    warns = lost >= _MANY_COLLISIONS * words
    return Finding("token_collisions", lost, words, note, language, examples, warns)


def _encoded(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Ids:
    if not texts:
        return []
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    return cast(Ids, encoded["input_ids"])


def language_table(measured: Sequence[LanguageHealth]) -> str:
    """A line for each language."""
    header = ["language", "rows", "tokens/word", "unknown share", "truncated share", "collision share"]
    body = [
        [
            *(each.language, f"{each.rows:,}", f"{each.tokens_per_word:.2f}"),
            *(f"{share:.1%}" for share in (each.unknown_share, each.truncated_share, each.collision_share)),
        ]
        for each in measured
    ]
    return table(header, body)
