"""Measure how well a tokenizer serves each language: unknown tokens, and words that it cannot tell apart."""

from __future__ import annotations

import logging
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress, islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from indictune.config.plan import RunPlan
from indictune.console_text import table
from indictune.data.cache import BETWEEN_MESSAGES
from indictune.data.columns import shortened
from indictune.data.health.findings import MAX_EXAMPLES, Finding, Mojibake
from indictune.data.languages import NO_LETTERS, script_of
from indictune.data.text.cleaning import WORD
from indictune.errors import Problems, catalogue, problem

logger = logging.getLogger(__name__)

MEASURED_ROWS = 1_000  # of each language; enough for two digits
_MANY_COLLISIONS = 0.005
_MANY_UNKNOWN = 0.05
_SHOWN_UNKNOWN = 0.001
_MIN_ROWS_SHARE = 0.01  # a few stray texts stop no run
_MAX_LISTED = 8
_WORD = re.compile(rf"[{WORD}]+")
_JOINERS = re.compile("[\u200c\u200d]")


@dataclass(frozen=True)
class LanguageHealth:
    """What the tokenizer does to the texts of a language; shares are between 0 and 1.

    Attributes:
        language: of the rows.
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


@dataclass(frozen=True)
class UnknownTokens:
    """What a tokenizer does not know of the texts in one language and script.

    Attributes:
        script: as Unicode names it, such as `Malayalam`.
        tokens: measured.
        unknown: of them.
        rows_share: share of the group in all rows.
    """

    language: str
    script: str
    tokens: int
    unknown: int
    rows_share: float

    @property
    def share(self) -> float:
        """Unknown tokens over all."""
        return self.unknown / max(self.tokens, 1)

    def __str__(self) -> str:
        return f"{shortened(self.language)} ({self.script})"


def sample_of_languages(languages: pa.ChunkedArray) -> dict[str, np.ndarray]:
    """Language -> at most 1,000 numbers of its rows, drawn at random, ascending int64."""
    values = languages.unique()
    codes = pc.index_in(languages, value_set=values).to_numpy()
    order = np.random.default_rng(0).permutation(len(codes))
    return {
        language: np.sort(order[codes[order] == code][:MEASURED_ROWS])
        for code, language in enumerate(values.to_pylist())
    }


def check_unknown(
    texts: Iterable[str], languages: pa.ChunkedArray, tokenizer: PreTrainedTokenizerBase, plan: RunPlan[Any, Any]
) -> None:
    """Refuse texts whose tokens are mostly unknown, and log the shares. `health` warns of fewer.

    Args:
        languages: of the same rows, as strings.
        plan: names the model, and has `--max_unknown_share`.

    Raises:
        UserError: of a language and script, or of all rows, more tokens are unknown than the plan accepts.
    """
    measured = list(unknown_tokens(texts, languages, tokenizer))
    found = [each for each in measured if each.rows_share >= _MIN_ROWS_SHARE]
    found.sort(key=lambda each: -each.share)
    limit = plan.data.max_unknown_share
    stopping = {str(each): each.share for each in found if each.share > limit and each.script != NO_LETTERS}
    mean = sum(each.share * each.rows_share for each in measured)
    if not stopping and mean > limit:
        stopping = {"all languages": mean}
    name, cure = plan.model.model_name_or_path, _cure(texts) if stopping else None
    Problems(
        problem("unknown-tokens", "--model_name_or_path", name, cure, share=share, group=group)
        for group, share in stopping.items()
    ).raise_any()
    shown = ", ".join(f"{each} {each.share:.1%}" for each in found[:_MAX_LISTED] if each.share >= _SHOWN_UNKNOWN)
    if shown:
        logger.info("unknown tokens, by language and script: %s", shown)


def _cure(texts: Iterable[str]) -> str | None:
    """The way out if some texts were decoded by the wrong encoding, which no tokenizer knows; None without them."""
    damaged = Mojibake()
    for text in texts:
        damaged.check(text, 0)
    if not damaged.count:
        return None
    return (
        f"{damaged.count:,} texts were decoded by the wrong encoding: read their source as UTF-8, or mend them with "
        f"ftfy.fix_encoding. For other texts: {catalogue()['unknown-tokens']['way_out']}"
    )


def unknown_tokens(
    texts: Iterable[str], languages: pa.ChunkedArray, tokenizer: PreTrainedTokenizerBase
) -> Iterator[UnknownTokens]:
    """The unknown tokens by language and script, measured on a sample of each language.

    A tokenizer without an unknown token, such as one of bytes, knows everything.
    """
    if tokenizer.unk_token_id is None:
        return
    chosen = sample_of_languages(languages)
    is_chosen = np.zeros(len(languages), np.bool_)
    is_chosen[np.concatenate(list(chosen.values()))] = True
    text_of = dict(zip(np.flatnonzero(is_chosen).tolist(), compress(texts, is_chosen), strict=True))
    rows_of = {each["values"]: each["counts"] for each in languages.value_counts().to_pylist()}
    for language, rows in chosen.items():
        sample = [text_of[row] for row in rows.tolist()]
        for each in unknown_by_script(language, sample, _ids_of_texts(sample, tokenizer), tokenizer):
            yield replace(each, rows_share=each.rows_share * rows_of[language] / len(languages))


def unknown_by_script(
    language: str, texts: Sequence[str], ids: Sequence[list[int]], tokenizer: PreTrainedTokenizerBase
) -> list[UnknownTokens]:
    """The unknown tokens among the `ids` of the texts of a language, by script; `rows_share` is of these texts."""
    scripts = list(map(script_of, texts))
    tokens, unknown = Counter[str](), Counter[str]()
    for script, row in zip(scripts, ids, strict=True):
        tokens[script] += len(row)
        unknown[script] += 0 if tokenizer.unk_token_id is None else row.count(tokenizer.unk_token_id)
    return [
        UnknownTokens(language, script, tokens[script], unknown[script], rows / len(texts))
        for script, rows in Counter(scripts).items()
    ]


def language_health(
    language: str, rows: int, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, cut: float | int
) -> tuple[LanguageHealth, list[Finding]]:
    """The measures of a language, and what is to say of them.

    Args:
        rows: how many the language has.
        texts: of some of them; `BETWEEN_MESSAGES` separates those of a conversation.
        cut: share of the rows that are cut; or, as a whole number, the tokens that a row may have.
    """
    ids = _ids_of_texts(texts, tokenizer)
    words = sum(len(text.replace(BETWEEN_MESSAGES, " ").split()) for text in texts)
    if isinstance(cut, int):
        room = cut - tokenizer.num_special_tokens_to_add()
        cut = sum(len(row) > room for row in ids) / len(ids)
    spelled = Counter(word for text in texts for word in _WORD.findall(text))
    by_script = unknown_by_script(language, texts, ids, tokenizer)
    findings = [_unknown(language, by_script, spelled, tokenizer), _collisions(language, spelled, tokenizer)]
    shares = findings[0].share, cut, findings[1].share
    measured = LanguageHealth(language, rows, len(texts), sum(map(len, ids)) / max(words, 1), *shares)
    return measured, [each for each in findings if each.count]


def _unknown(
    language: str, by_script: Sequence[UnknownTokens], spelled: Counter[str], tokenizer: PreTrainedTokenizerBase
) -> Finding:
    tokens, unknown = sum(each.tokens for each in by_script), sum(each.unknown for each in by_script)
    words: list[str] = []
    if unknown:
        words = [word for word, _ in spelled.most_common()]
        pairs = zip(words, _ids_of_texts(words, tokenizer), strict=True)
        words = [word for word, of_word in pairs if tokenizer.unk_token_id in of_word][:MAX_EXAMPLES]
    share = unknown / max(tokens, 1)
    note = f"{language}: the tokenizer does not know {share:.1%} of the tokens."
    return Finding("unknown_tokens", unknown, tokens, note, language, words, share >= _MANY_UNKNOWN)


def _collisions(language: str, spelled: Counter[str], tokenizer: PreTrainedTokenizerBase) -> Finding:
    """Words that become the tokens of a more frequent word. Case and joiners (U+200C, U+200D) make no other word."""
    groups: defaultdict[tuple[int, ...], Counter[str]] = defaultdict(Counter)
    for word, ids in zip(spelled, _ids_of_texts(list(spelled), tokenizer), strict=True):
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


def _ids_of_texts(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The tokens of each text, without special ones. The messages of a conversation are read one by one."""
    parts = [text.split(BETWEEN_MESSAGES) for text in texts]
    if not parts:  # which tokenizers do not take
        return []
    flat = list(chain.from_iterable(parts))
    ids = iter(tokenizer(flat, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"])
    return [list(chain.from_iterable(islice(ids, len(each)))) for each in parts]


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
