"""`indictune inspect FILE --show_mask N`: rows as the model sees them, the learned tokens marked."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from indictune.cli import main
from indictune.commands.inspect import pieces
from indictune.models import builtin
from tests.ranks.launching import ROOT

DOLLY = {"instruction": "किसने लिखा?", "context": "गोदान प्रेमचंद ने लिखा।", "response": "प्रेमचंद ✍🏽", "id": "7"}
ASKED = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nकिसने लिखा?\n\nगोदान प्रेमचंद ने लिखा।<|eot_id|>"
OPENED = "<|start_header_id|>assistant<|end_header_id|>\n\n"
TEMPLATES = ROOT / "indictune/data/chat_templates"
MARKED = re.compile(r"«(.*?)»", re.DOTALL)

Show = Callable[..., list[str]]


@pytest.fixture
def show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Show:
    """The rows that the command shows, without what it prints before them."""
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text(f"{json.dumps(DOLLY)}\n" * 4)

    def run(*words: str) -> list[str]:
        assert main(["inspect", *words]) == 0
        _, *rows = re.split(r"\n\n(?=\S+:\d+[:,] )", capsys.readouterr().out.rstrip("\n"))
        return rows

    return run


def test_an_answer_is_marked_token_by_token(show: Show) -> None:
    (row,) = show("chats.jsonl", "--show_mask", "1")
    place, text = row.split("\n", 1)
    assert MARKED.sub(r"\1", text) == f"{ASKED}{OPENED}प्रेमचंद ✍🏽<|eot_id|>"
    assert "".join(MARKED.findall(text)) == "प्रेमचंद ✍🏽<|eot_id|>"
    assert text.endswith("«<|eot_id|>»")
    tokenizer = AutoTokenizer.from_pretrained(builtin.resolve("builtin:tiny-indic-llama"))
    answer = tokenizer("प्रेमचंद ✍🏽<|eot_id|>", add_special_tokens=False)["input_ids"]
    assert f" {len(answer)} of them" in place
    assert place.startswith("chats.jsonl:1: ")


@pytest.mark.more
def test_three_rows_are_shown_unless_another_number_is_given(show: Show) -> None:
    assert len(show("chats.jsonl", "--validation_split", "0")) == 3
    assert show("chats.jsonl", "--show_mask", "0") == []


def test_the_flags_of_the_run_count(show: Show) -> None:
    (row,) = show("chats.jsonl", "--show_mask", "1", "--train_on_prompts", "true", "--max_length", "20")
    place, text = row.split("\n", 1)
    assert "20 tokens, cut from " in place
    assert text.startswith("<|begin_of_text|>«<|start_header_id|>»«us»«er»")
    assert len(MARKED.findall(text)) <= 19
    (row,) = show("chats.jsonl", "--show_mask", "1", "--chat_template", "plain")
    assert MARKED.sub(r"\1", row).split("\n", 1)[1].startswith("<|begin_of_text|>किसने लिखा?\n\nगोदान")


def test_answers_of_a_template_without_marks_are_marked_alike(show: Show) -> None:
    unmarked = re.sub(r"\{%- (end)?generation %\}", "", (TEMPLATES / "llama3.jinja").read_text(encoding="utf-8"))
    Path("unmarked.jinja").write_text(unmarked, encoding="utf-8")
    assert "generation %}" not in unmarked
    rows = [show("chats.jsonl", "--show_mask", "1", "--chat_template", each) for each in ("llama3", "unmarked.jinja")]
    assert rows[0] == rows[1]
    assert "«<|eot_id|>»" in rows[0][0]


def test_thoughts_are_learned_unless_they_are_not_to_be(show: Show) -> None:
    Path("chats.jsonl").write_text(json.dumps({"instruction": "a", "output": "<think>b</think>c"}))
    for flags, learned in (((), "<think>b</think>c"), (("--train_on_thinking", "false"), "c")):
        (row,) = show("chats.jsonl", *flags)
        assert "".join(MARKED.findall(row)) == f"{learned}<|eot_id|>"


@pytest.mark.usefixtures("show")
def test_an_end_token_that_is_never_learned_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    template = str(ROOT / "tests/inputs/template_end_unlearned.jinja")
    assert main(["inspect", "chats.jsonl", "--show_mask", "0", "--chat_template", template]) == 0
    assert "<|eot_id|> after an answer, but outside its marks" in capsys.readouterr().err


def test_a_recipe_names_the_rows(show: Show) -> None:
    rows = show("--config", str(ROOT / "recipes/llama/demo.yaml"), "--show_mask", "2")
    assert ["train.jsonl:" in row for row in rows] == [True, True]


@pytest.mark.more
def test_a_terminal_gets_colours_unless_they_are_unwanted(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    (row,) = show("chats.jsonl", "--show_mask", "1")
    assert row.endswith("\x1b[1;32m<|eot_id|>\x1b[0m")
    assert "«" not in row
    monkeypatch.setenv("NO_COLOR", "1")
    (row,) = show("chats.jsonl", "--show_mask", "1")
    assert "\x1b" not in row
    assert row.endswith("«<|eot_id|>»")


def test_control_characters_of_a_row_are_escaped(show: Show) -> None:
    Path("chats.jsonl").write_text(json.dumps({"instruction": "a\x1b[2J", "output": "b"}))
    (row,) = show("chats.jsonl")
    assert "a\\x1b[2J" in row


def test_rows_of_other_tasks_are_shown_by_their_files(show: Show) -> None:
    Path("t.csv").write_text("text,label\nअच्छा फोन @raju,pos\nbad,neg\n", encoding="utf-8")
    first, _ = show("t.csv", "--validation_split", "0")
    place, text = first.split("\n", 1)
    assert place.startswith("t.csv:2: ")
    assert place.endswith("label: pos")
    assert re.fullmatch(r"\[CLS\] अच्छा फोन @ ?user \[SEP\]", text)
    Path("p.csv").write_text("Sentence1,Sentence2,Label\nअच्छा फोन,#फोन,P\na,b,NP\n", encoding="utf-8")
    columns = ["--text_column", "Sentence1", "--text_pair_column", "Sentence2", "--label_column", "Label"]
    first, _ = show("p.csv", "--validation_split", "0", *columns)
    assert first.endswith("label: P\n[CLS] अच्छा फोन [SEP] फोन [SEP]")
    Path("t.conll").write_text("Sita B-PER\nआई O\n\nRavi B-PER\n", encoding="utf-8")
    first, *_ = show("t.conll", "--validation_split", "0")
    assert "2 of them" in first
    assert len(MARKED.findall(first)) == 2
    assert first.endswith("[SEP]")


@pytest.mark.parametrize(("rows", "shown"), [(49, "neg 49"), (50, "")])
def test_what_to_expect_of_few_rows_is_said(
    rows: int, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [f"row {number} is here,{'neg' if number < rows else 'pos'}" for number in range(rows + 60)]
    Path("t.csv").write_text("\n".join(["text,label", *lines]), encoding="utf-8")
    assert main(["inspect", "t.csv", "--show_mask", "0", "--validation_split", "0", "--max_unknown_share", "1"]) == 0
    said = capsys.readouterr().out
    assert ("small_data.yaml" in said) == bool(shown)
    assert shown in said
    # Half of the 95% interval of a share of one half: 0.98 over the root of the rows.
    assert ("uncertain by 14%" in said) == bool(shown)


@pytest.mark.usefixtures("show")
def test_a_folder_without_folds_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.csv").write_text("text,label\nachha hai yeh,pos\nbura hai yeh,neg\n", encoding="utf-8")
    assert main(["inspect", "t.csv", "--from_folds", "."]) == 2
    assert "no-out-of-fold" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["none.jsonl"], "no-such-file"),
        ([], "no-training-rows"),
        (["chats.jsonl", "--show_mask", "-1"], "expected-at-least"),
        (["chats.jsonl", "--task", "chat", "--columns", "instruction=q"], "columns-missing"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    show: Show, words: list[str], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", *words]) == 2
    assert f"[{code}]" in capsys.readouterr().err


def test_pieces_are_the_text_and_letters_of_several_tokens_stay_whole() -> None:
    text = "क्षेत्र 👨‍👩‍👧 మంచి ok ॐ"
    for name in ("builtin:tiny-indic-llama", "builtin:tiny-indic-bert"):
        tokenizer = AutoTokenizer.from_pretrained(builtin.resolve(name))
        ids = tokenizer(text)["input_ids"]
        shown = list(pieces(ids, [index % 2 == 0 for index in range(len(ids))], tokenizer))
        assert "".join(piece for piece, _ in shown) == tokenizer.decode(ids)
        assert "\ufffd" not in "".join(piece for piece, _ in shown)
        assert any(is_counted for _, is_counted in shown)
        assert not all(is_counted for _, is_counted in shown)
