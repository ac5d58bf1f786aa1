"""What a tokenizer does to the texts of a language."""

from __future__ import annotations

import pytest
from tokenizers import processors
from tokenizers.normalizers import Lowercase, Replace, Sequence
from transformers import AutoTokenizer

from indictune.config.arguments import ModelArguments
from indictune.data.health.findings import Finding
from indictune.data.health.row_health import LanguageHealth, language_health, language_table
from indictune.models.load import load_tokenizer
from tests.data.test_chat_tokens import byte_level_tokenizer
from tests.data.test_unknown_tokens import tokenizer_of
from tests.models.test_vowel_signs import albert_folder  # noqa: F401, a fixture


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {each.name: each for each in findings}


def test_a_tokenizer_that_drops_vowel_signs_is_caught(albert_folder: str) -> None:  # noqa: F811
    """As IndicBERT v1's, which keeps them only where it is loaded by us."""
    texts = ["में हिन्दी ज़िन्दगी", "म हिन्दी", "में कुछ", "भी भ भी"]
    measured, findings = language_health("hi", 4, texts, AutoTokenizer.from_pretrained(albert_folder), 128)
    found = by_name(findings)["token_collisions"]
    assert (found.count, found.of, found.warns) == (2, 10, True)
    assert set(found.examples) == {"में = म", "भी = भ"}
    assert measured.collision_share == 0.2
    measured, findings = language_health("hi", 4, texts, load_tokenizer(ModelArguments(albert_folder)), 128)
    assert (measured.collision_share, "token_collisions" in by_name(findings)) == (0, False)


def test_the_more_frequent_word_of_a_pair_is_not_counted() -> None:
    tokenizer = tokenizer_of("a", "b")
    tokenizer.backend_tokenizer.normalizer = Replace("aa", "a")
    found = by_name(language_health("x", 3, ["a aa aa", "aa b", "b"], tokenizer, 9)[1])["token_collisions"]
    assert (found.count, found.of, found.examples) == (1, 6, ["aa = a"])


def test_case_and_joiners_make_no_other_word_and_unknown_words_are_not_compared() -> None:
    tokenizer = tokenizer_of("good")
    tokenizer.backend_tokenizer.normalizer = Sequence([Lowercase(), Replace("\u200d", "")])
    _, findings = language_health("x", 1, ["Good good go\u200dod bad worse"], tokenizer, 9)
    found = by_name(findings)
    assert found.keys() == {"unknown_tokens"}
    assert (found["unknown_tokens"].count, found["unknown_tokens"].of) == (2, 5)
    assert (found["unknown_tokens"].examples, found["unknown_tokens"].warns) == (["bad", "worse"], True)


@pytest.mark.parametrize(("limit", "share"), [(5, 1 / 3), (4, 2 / 3), (0.25, 0.25)])
def test_rows_that_are_cut_are_measured_with_special_tokens_or_given(limit: float, share: float) -> None:
    tokenizer = tokenizer_of("a", "[CLS]")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", 2)]
    )
    measured, _ = language_health("x", 30, ["a a a a a", "a a a a", "a"], tokenizer, limit)
    assert measured.truncated_share == share
    assert (measured.rows, measured.measured_rows) == (30, 3)
    assert measured.tokens_per_word == 1


def test_tokens_per_word_leave_out_special_tokens_and_what_separates_messages() -> None:
    # Three bytes for each of అ and ఆ, one for the space between them, one for each letter x.
    tokenizer = byte_level_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    assert language_health("te", 1, ["అ ఆ\x00xx"], tokenizer, 5)[0].tokens_per_word == 3


def test_the_table_has_a_line_for_each_language() -> None:
    lines = language_table([LanguageHealth("hi", 2_000, 1_000, 1.5, 0.25, 0, 0.125)]).splitlines()
    assert lines[2].split() == ["hi", "2,000", "1.50", "25.0%", "0.0%", "12.5%"]
