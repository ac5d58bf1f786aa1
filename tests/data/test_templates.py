"""The chat template of a run: which it is, and what it must be able to."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from indictune.data.chat.chat_tokens import choose_template, template_notes
from indictune.errors import UserError
from tests.data.test_chat_tokens import MARKED, UNMARKED, byte_level_tokenizer
from tests.models.tiny import words_tokenizer
from tests.problems import summaries
from tests.ranks.launching import ROOT

INPUTS = ROOT / "tests/inputs"


@pytest.fixture(scope="module")
def byte_level() -> PreTrainedTokenizerFast:
    return byte_level_tokenizer()


def with_template(template: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_the_tokenizers_own_template_is_the_default() -> None:
    assert choose_template(with_template(MARKED), None, False, False) == MARKED
    assert choose_template(with_template(UNMARKED), None, False, True) == UNMARKED


def test_an_own_template_that_trl_knows_gets_its_marks_from_trl() -> None:
    from trl.chat_template_utils import llama3_chat_template, llama3_training_chat_template

    assert choose_template(with_template(llama3_chat_template), None, False, False) == llama3_training_chat_template
    assert choose_template(with_template(llama3_chat_template), None, False, True) == llama3_chat_template


def test_a_file_may_hold_the_template(byte_level: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(MARKED, encoding="utf-8")
    assert choose_template(byte_level, str(path), False, False) == MARKED


def refusal(tokenizer: PreTrainedTokenizerBase, name: str | None, train_on_prompts: bool = False) -> UserError:
    with pytest.raises(UserError) as refused:
        choose_template(tokenizer, name, False, train_on_prompts)
    return refused.value


def test_a_name_that_is_none_is_refused(byte_level: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    for name in ("lama3", str(tmp_path / "gone.jinja")):
        assert summaries(refusal(byte_level, name)) == [f"--chat_template {name} no-such-name"]
    broken = tmp_path / "broken.jinja"
    broken.write_bytes(b"\xff")
    assert summaries(refusal(byte_level, str(broken))) == [f"--chat_template {broken} unreadable"]


def test_a_tokenizer_without_a_template_needs_a_name() -> None:
    assert summaries(refusal(words_tokenizer(), None)) == ["--chat_template chat-template-missing"]


def test_a_template_without_marks_needs_none(tmp_path: Path) -> None:
    assert choose_template(with_template(UNMARKED), None, False, False) == UNMARKED
    (note,) = template_notes(with_template(UNMARKED), UNMARKED, False)
    assert "no end token" in note


def test_a_template_whose_marks_are_around_no_answer_is_refused(tmp_path: Path) -> None:
    tokenizer = with_template(UNMARKED)
    path = tmp_path / "own.jinja"
    path.write_text(UNMARKED + "{% if false %}{% generation %}{% endgeneration %}{% endif %}", encoding="utf-8")
    assert summaries(refusal(tokenizer, str(path))) == [f"--chat_template {path} chat-template-without-marks"]


@pytest.mark.parametrize(
    ("jinja", "reason"),
    [
        ("{% for %}", "Expected an expression, got 'end of statement block'."),
        ("{{ raise_exception('no luck') }}", "no luck"),
    ],
)
def test_broken_jinja_is_refused(tmp_path: Path, byte_level: PreTrainedTokenizerFast, jinja: str, reason: str) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(jinja, encoding="utf-8")
    error = refusal(byte_level, str(path), train_on_prompts=True)
    assert summaries(error) == [f"--chat_template {path} chat-template-fails"]
    assert reason in error.message
    assert "\n" not in error.message


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("chatml", "<|im_end|>, <|im_start|>"),
        ("llama3", "<|begin_of_text|>, <|end_header_id|>, <|eot_id|>, <|start_header_id|>"),
    ],
)
def test_special_tokens_that_the_tokenizer_would_cut_to_pieces_are_refused(name: str, tokens: str) -> None:
    error = refusal(words_tokenizer(), name, train_on_prompts=True)
    assert summaries(error) == [f"--chat_template {name} chat-template-tokens"]
    assert error.problems[0].details["tokens"] == tokens


def test_a_tokenizer_that_cannot_end_a_text_is_refused_where_the_template_ends_one() -> None:
    tokenizer = words_tokenizer()
    tokenizer.eos_token = None
    error = refusal(tokenizer, "plain")
    assert error.code == "chat-template-tokens"
    assert "eos_token" in error.problems[0].details["tokens"]


def test_markers_of_turns_that_the_tokenizer_would_cut_to_pieces_are_refused_where_no_other_token_ends_an_answer(
    byte_level: PreTrainedTokenizerFast,
) -> None:
    path = str(INPUTS / "template_other_markers.jinja")
    for train_on_prompts in (False, True):
        error = refusal(byte_level, path, train_on_prompts)
        assert summaries(error) == [f"--chat_template {path} chat-template-tokens"]
        assert error.problems[0].details["tokens"] == "<turn_begin>, <turn_end>"
    known = byte_level_tokenizer()
    known.add_tokens(["<turn_begin>", "<turn_end>"])
    assert template_notes(known, choose_template(known, path, False, False), False) == []


def test_markers_that_begin_a_turn_may_be_cut_to_pieces_which_a_note_says(byte_level: PreTrainedTokenizerFast) -> None:
    answer = "{% generation %}{{ messages[1].content }}<|eot_id|>{% endgeneration %}"
    template = f"<human>{{{{ messages[0].content }}}}<bot>{answer}"
    assert choose_template(with_template(template), None, False, False) == template
    (note,) = template_notes(byte_level, template, False)
    assert "<bot>, <human>" in note


def test_an_end_token_that_is_never_learned_is_noted(byte_level: PreTrainedTokenizerFast) -> None:
    template = choose_template(byte_level, str(INPUTS / "template_end_unlearned.jinja"), False, False)
    (note,) = template_notes(byte_level, template, False)
    assert "<|eot_id|>" in note
    assert template_notes(byte_level, template, True) == []  # the loss counts all tokens
    (note,) = template_notes(byte_level, template.replace("<|eot_id|>", ""), True)
    assert "no end token" in note


@pytest.mark.parametrize("name", ["llama3", "chatml", "plain"])
def test_a_template_that_teaches_its_end_has_no_notes(byte_level: PreTrainedTokenizerFast, name: str) -> None:
    assert template_notes(byte_level, choose_template(byte_level, name, False, False), False) == []
