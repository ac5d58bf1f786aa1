"""The health of a run's rows: what the tokenizer does to each language, and what rows repeat, contradict or give away.

`health.json` has these keys:

- `rows`: split -> number of rows; `languages`: a list of `LanguageHealth`, of the training rows.
- `labels`: a list of `language`, `label`, `count` and `share` (of the language's training rows).
- `findings`: a list of `name`, `language` (null: all), `share`, `count`, `of`, `examples` (texts), `note` (a sentence)
  and `warns` (whether the run warned of it). The names: `unknown_tokens`, `token_collisions`, `duplicate_rows`,
  `leaked_rows`, `near_duplicates`, `conflicting_labels`, `mojibake`, `escaped_texts`, `label_sources` and
  `labels_of_no_class`.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from indictune.config.plan import RunPlan
from indictune.console_text import shown_language, table
from indictune.data.bad_rows import file_and_line
from indictune.data.cache import StoredRows, are_pairs, build_with_facts, chosen_texts
from indictune.data.columns import BETWEEN_TEXTS, shortened
from indictune.data.health.encodings import DamagedTexts
from indictune.data.health.findings import MAX_EXAMPLES, Finding, label_balance, label_sources, near_duplicates
from indictune.data.labels import has_classes, names
from indictune.data.languages import NO_LETTERS, script_of
from indictune.data.text.cleaning import WORD
from indictune.errors import Problems, catalogue, problem

logger = logging.getLogger(__name__)

_MAX_TRAIN, _MAX_HELD_OUT = 50_000, 5_000  # rows whose texts are compared; two seconds
_MANY_NEAR = 0.01
_LIMITS = {
    "token_collisions": ("max_collision_share", "token-collisions"),
    "near_duplicates": ("max_near_duplicate_share", "near-duplicates"),
    "conflicting_labels": ("max_conflict_share", "conflicting-labels"),
}
_MAX_COLUMNS = 8  # labels of the table
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
        measured_rows: at most 1,000, drawn at random. `truncated_share` of conversations is of all rows.
        tokens_per_word: a word is what spaces separate.
        unknown_share: unknown tokens over all; `truncated_share`: rows that are cut.
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
    """What a tokenizer does not know of the texts in one language and script, such as `Malayalam`.

    `share` is of the measured tokens, `rows_share` that of the group in all rows.
    """

    language: str
    script: str
    share: float
    rows_share: float

    def __str__(self) -> str:
        return f"{shortened(shown_language(self.language))} ({self.script})"


def drawn_rows(languages: pa.ChunkedArray) -> list[tuple[str, int, list[int]]]:
    """Each language, the number of its rows, and at most 1,000 of them by number, drawn at random, ascending."""
    values = languages.unique()
    codes = pc.index_in(languages, value_set=values).to_numpy()
    order = np.random.default_rng(0).permutation(len(codes))
    drawn = [np.sort(order[codes[order] == code][:MEASURED_ROWS]).tolist() for code in range(len(values))]
    return list(zip(values.to_pylist(), np.bincount(codes).tolist(), drawn, strict=True))


def _are_among(rows: int, drawn: Iterable[tuple[str, int, list[int]]]) -> np.ndarray:
    """Which of so many rows are among the drawn ones, bool [rows]."""
    return np.isin(np.arange(rows), [number for *_, numbers in drawn for number in numbers])


def check_unknown(rows: StoredRows, tokenizer: PreTrainedTokenizerBase, plan: RunPlan[Any, Any]) -> None:
    """Refuse rows whose tokens are mostly unknown, and log the shares. `health` warns of fewer.

    Raises `UserError` where more tokens of a language and script, or of all rows, are unknown than the plan accepts.
    """
    measured = list(unknown_tokens(rows.texts, rows.table["language"], tokenizer))
    found = [each for each in measured if each.rows_share >= _MIN_ROWS_SHARE]
    found.sort(key=lambda each: -each.share)
    limit = plan.data.max_unknown_share
    stopping = {str(each): each.share for each in found if each.share > limit and each.script != NO_LETTERS}
    mean = sum(each.share * each.rows_share for each in measured)
    if not stopping and mean > limit:
        stopping = {"all languages": mean}
    name, cure = plan.model.model_name_or_path, _cure(rows.texts) if stopping else None
    Problems(
        problem("unknown-tokens", "--model_name_or_path", name, cure, share=share, group=group)
        for group, share in stopping.items()
    ).raise_any()
    shown = ", ".join(f"{each} {each.share:.1%}" for each in found[:_MAX_LISTED] if each.share >= _SHOWN_UNKNOWN)
    if shown:
        logger.info("unknown tokens, by language and script: %s", shown)


def _cure(texts: Iterable[str]) -> str | None:
    """The way out if some texts were decoded by the wrong encoding, which no tokenizer knows; None without them."""
    damaged = DamagedTexts()
    for text in texts:
        damaged.check(text, 0)
    if not damaged.mojibake:
        return None
    cure = f"{damaged.mojibake:,} texts were decoded by the wrong encoding: read their source as UTF-8, or mend them"
    return f"{cure} with {damaged.cure}. For other texts: {catalogue()['unknown-tokens']['way_out']}"


def unknown_tokens(
    texts: Iterable[str], languages: pa.ChunkedArray, tokenizer: PreTrainedTokenizerBase
) -> Iterator[UnknownTokens]:
    """The unknown tokens by language and script, measured on a sample of each language.

    A tokenizer without an unknown token, such as one of bytes, knows everything.
    """
    if tokenizer.unk_token_id is None:
        return
    drawn = drawn_rows(languages)
    text_of = chosen_texts(texts, _are_among(len(languages), drawn))
    for language, rows, numbers in drawn:
        sample = [text_of[number] for number in numbers]
        scripts = list(map(script_of, sample))
        tokens, unknown = Counter[str](), Counter[str]()
        for script, ids in zip(scripts, _ids_of_texts(sample, tokenizer), strict=True):
            tokens[script] += len(ids)
            unknown[script] += ids.count(tokenizer.unk_token_id)
        for script, count in Counter(scripts).items():
            rows_share = count / len(sample) * rows / len(languages)
            yield UnknownTokens(language, script, unknown[script] / max(tokens[script], 1), rows_share)


def language_health(
    language: str, rows: int, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, cut: float | int
) -> tuple[LanguageHealth, list[Finding]]:
    """The measures of a language with so many rows, from some of their texts, and what is to say of them.

    `cut` is the share of the rows that are cut; or, as a whole number, the tokens that a row may have.
    """
    ids = _ids_of_texts(texts, tokenizer)
    words = sum(len(text.replace(BETWEEN_TEXTS, " ").split()) for text in texts)
    if isinstance(cut, int):
        room = cut - tokenizer.num_special_tokens_to_add(are_pairs(texts))
        cut = sum(len(row) > room for row in ids) / len(ids)
    spelled = Counter(word for text in texts for word in _WORD.findall(text))
    findings = [_unknown(language, ids, spelled, tokenizer), _collisions(language, spelled, tokenizer)]
    shares = findings[0].share, cut, findings[1].share
    measured = LanguageHealth(language, rows, len(texts), sum(map(len, ids)) / max(words, 1), *shares)
    return measured, [each for each in findings if each.count]


def _unknown(
    language: str, ids: Sequence[list[int]], spelled: Counter[str], tokenizer: PreTrainedTokenizerBase
) -> Finding:
    tokens, unknown = sum(map(len, ids)), sum(row.count(tokenizer.unk_token_id) for row in ids)
    words = [word for word, _ in spelled.most_common()] if unknown else []
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
    parts = [text.split(BETWEEN_TEXTS) for text in texts]
    if not parts:  # which tokenizers do not take
        return []
    flat = list(chain.from_iterable(parts))
    ids = iter(tokenizer(flat, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"])
    return [list(chain.from_iterable(islice(ids, len(each)))) for each in parts]


def language_table(measured: Sequence[LanguageHealth]) -> str:
    """A line for each language."""
    header = ["language", "rows", "tokens/word", "unknown share", "truncated share", "collision share"]
    body = []
    for each in measured:
        shares = (f"{share:.1%}" for share in (each.unknown_share, each.truncated_share, each.collision_share))
        body.append([shown_language(each.language), f"{each.rows:,}", f"{each.tokens_per_word:.2f}", *shares])
    return table(header, body)


@dataclass(frozen=True)
class RowHealth:
    """The content of `health.json`: see above."""

    rows: dict[str, int]
    languages: list[LanguageHealth]
    labels: list[dict[str, Any]]
    findings: list[Finding]

    def as_json(self) -> dict[str, Any]:
        """Plain dicts and lists."""
        return asdict(self) | {"findings": [each.as_json() for each in self.findings]}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> RowHealth:
        """What `as_json` gave."""
        given = ({name: each[name] for name in each.keys() - {"share"}} for each in content["findings"])
        languages = [LanguageHealth(**each) for each in content["languages"]]
        return RowHealth(content["rows"], languages, content["labels"], [Finding(**each) for each in given])

    def __str__(self) -> str:
        """Tables of languages and labels, and a line for each finding."""
        parts = [language_table(self.languages)]
        shown = list(dict.fromkeys(each["label"] for each in self.labels))
        if 0 < len(shown) <= _MAX_COLUMNS:
            share = {(each["language"], each["label"]): f"{each['share']:.1%}" for each in self.labels}
            body = [
                [shown_language(each.language), *(share.get((each.language, label), "0.0%") for label in shown)]
                for each in self.languages
            ]
            parts.append(table(["labels", *map(shortened, shown)], body))
        findings = "\n".join(f"- {each.in_full}" for each in self.findings)
        return "\n\n".join([*parts, *filter(None, [findings])])


def check_health(health: RowHealth | None, configuration: Mapping[str, Any]) -> None:
    """Raise `UserError` for each finding above its limit in the configuration, such as `--max_collision_share`."""
    problems = Problems()
    for each in () if health is None else health.findings:
        flag, code = _LIMITS.get(each.name, ("", ""))
        limit = configuration.get(flag)
        if limit is not None and each.share > limit:
            problems.append(problem(code, f"--{flag}", limit, note=each.in_full))
    problems.raise_any()


def measured_once(parts: Sequence[object], make: Callable[[], RowHealth]) -> RowHealth:
    """What `make` gives on the first call with these parts, which say what it depends on."""
    content = build_with_facts("health", parts, "The health of the rows", lambda _: make().as_json())[1]
    return RowHealth.from_json(content)


def measure(
    splits: Mapping[str, StoredRows],
    tokenizer: PreTrainedTokenizerBase,
    cut: int | Mapping[str, float],
    found: Sequence[Finding],
    problem_type: str | None = None,
) -> RowHealth:
    """Measure the rows of a run. Of more than 50,000 training rows, a random sample is compared with the others.

    `cut` is the tokens that a row may have, or the share of each language's rows that is cut.
    """
    train = splits["train"]
    findings, measured = list(found), []
    drawn, compared = drawn_rows(train.table["language"]), _sample(len(train), _MAX_TRAIN)
    text_of = chosen_texts(train.texts, compared | _are_among(len(train), drawn))  # read once: they may be many
    for language, rows, numbers in sorted(drawn):
        of_rows = cut if isinstance(cut, int) else cut.get(language, 0.0)
        texts = [text_of[number] for number in numbers]
        health, more = language_health(language, rows, texts, tokenizer, of_rows)
        measured.append(health)
        findings += more
    are_classes = has_classes(train.table, problem_type)
    sample = {row: text for row, text in text_of.items() if compared[row]}
    for name, split in splits.items():
        findings += [] if name == "train" else _near_duplicates(name, split, train, sample, are_classes)
    balance: list[dict[str, Any]] = []
    if are_classes:
        balance, of_no_class = label_balance(train.table, problem_type)
        findings += [*of_no_class, *_sources(train, sample, problem_type)]
    return RowHealth({name: len(split) for name, split in splits.items()}, measured, balance, findings)


def _sample(rows: int, most: int) -> np.ndarray:
    """Which rows are in a random sample of at most `most`, bool [rows]."""
    return np.isin(np.arange(rows), np.random.default_rng(0).permutation(rows)[:most])


def _near_duplicates(
    name: str, rows: StoredRows, train: StoredRows, sample: Mapping[int, str], are_classes: bool
) -> Iterator[Finding]:
    texts = chosen_texts(rows.texts, _sample(len(rows), _MAX_HELD_OUT))
    pairs = near_duplicates(sample, texts).items()
    if not pairs:
        return
    places = [f"{rows.location(mine)} and {train.location(other)}" for mine, other in islice(pairs, MAX_EXAMPLES)]
    count, of, whole = len(pairs), len(texts), len(train)
    others = f"{len(sample):,} of {whole:,} training rows" if len(sample) < whole else "the training rows"
    labels = ""
    if are_classes:
        mine, theirs = rows.table["label"], train.table["label"]
        differ = sum(mine[one].as_py() != theirs[other].as_py() for one, other in pairs)
        labels = f", {differ:,} of them with another label" if differ else ""
    note = (
        f"{rows.source}: {count:,} of {of:,} {name} rows ({count / of:.1%}) nearly repeat one of {others}"
        f"{labels}, such as {places[0]}. Their scores will look too good."
    )
    yield Finding("near_duplicates", count, of, note, None, places, count / of >= _MANY_NEAR)


def _sources(rows: StoredRows, sample: Mapping[int, str], problem_type: str | None) -> list[Finding]:
    known = rows.table.select(["language", "label", "line"]).take(pa.array(list(sample))).to_pylist()
    for each in known if rows.files else ():
        each["file"] = file_and_line(rows.source, each["line"], rows.files)[0]
    sources = ({name: each[name] for name in ("language", "file") if name in each} for each in known)
    labels = (names([each["label"]], problem_type) for each in known)
    return label_sources(zip(sample.values(), sources, labels, strict=True))
