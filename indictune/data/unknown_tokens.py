"""Measure which share of the texts a tokenizer cannot read: it replaces what it does not know by one unknown token."""

from __future__ import annotations

import logging
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from indictune.config.plan import RunPlan
from indictune.data.columns import shortened
from indictune.data.mojibake import Mojibake
from indictune.errors import Problems, catalogue, problem

logger = logging.getLogger(__name__)

_MEASURED_ROWS = 1_000  # of each language; enough for two digits
_SHOWN = 0.001
_MIN_ROWS_SHARE = 0.01  # a few stray texts stop no run
_MAX_LISTED = 8
_NO_LETTERS = "no letters"


@dataclass(frozen=True)
class Unknown:
    """What a tokenizer does not know of the texts in one language and script.

    Attributes:
        language: as the rows have it.
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


def check_unknown(
    texts: Iterable[str], languages: pa.ChunkedArray, tokenizer: PreTrainedTokenizerBase, plan: RunPlan[Any, Any]
) -> None:
    """Refuse texts whose tokens are mostly unknown, and log the shares. `health` warns of fewer.

    Args:
        texts: of the training rows.
        languages: of the same rows, as strings.
        tokenizer: of the model.
        plan: names the model, and has `--max_unknown_share`.

    Raises:
        UserError: of a language and script, or of all rows, more tokens are unknown than the plan accepts.
    """
    measured = list(unknown_tokens(texts, languages, tokenizer))
    found = [each for each in measured if each.rows_share >= _MIN_ROWS_SHARE]
    found.sort(key=lambda each: -each.share)
    limit = plan.data.max_unknown_share
    stopping = {str(each): each.share for each in found if each.share > limit and each.script != _NO_LETTERS}
    mean = sum(each.share * each.rows_share for each in measured)
    if not stopping and mean > limit:
        stopping = {"all languages": mean}
    name, cure = plan.model.model_name_or_path, _cure(texts) if stopping else None
    Problems(
        problem("unknown-tokens", "--model_name_or_path", name, cure, share=share, group=group)
        for group, share in stopping.items()
    ).raise_any()
    shown = ", ".join(f"{each} {each.share:.1%}" for each in found[:_MAX_LISTED] if each.share >= _SHOWN)
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
) -> Iterator[Unknown]:
    """The unknown tokens by language and script, measured on the first 1,000 rows of each language.

    A tokenizer without an unknown token, such as one of bytes, knows everything.
    """
    if tokenizer.unk_token_id is None:
        return
    codes = pc.index_in(languages, value_set=languages.unique()).to_numpy()
    rows_of = np.bincount(codes)
    samples: dict[int, list[str]] = {code: [] for code in range(len(rows_of))}
    for code, text in zip(codes.tolist(), texts, strict=True):
        if len(samples[code]) < _MEASURED_ROWS:
            samples[code].append(text)
    for language, count, sample in zip(
        languages.unique().to_pylist(), rows_of.tolist(), samples.values(), strict=True
    ):
        ids = tokenizer(sample, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        scripts = list(map(script_of, sample))
        rows, tokens, unknown = Counter(scripts), Counter[str](), Counter[str]()
        for script, row in zip(scripts, ids, strict=True):
            tokens[script] += len(row)
            unknown[script] += row.count(tokenizer.unk_token_id)
        for script, of_script in rows.items():
            share = of_script / len(sample) * count / len(codes)
            yield Unknown(language, script, tokens[script], unknown[script], share)


def script_of(text: str) -> str:
    """The script of most letters of a text, as Unicode names it, such as `Malayalam`."""
    scripts: Counter[str] = Counter()
    for character, count in Counter(text).items():
        if character.isalpha():
            scripts[_script(character)] += count
    return max(scripts, key=scripts.__getitem__, default=_NO_LETTERS)


@cache
def _script(letter: str) -> str:
    return unicodedata.name(letter, "other").split()[0].capitalize()
