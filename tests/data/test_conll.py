"""CoNLL files are read as they are meant, or refused at the line that is not in their form."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from indictune.cli import main
from indictune.errors import UserError
from indictune.tasks.tokens import TaggedRows
from tests.ranks.launching import ROOT
from tests.refusals import refused as refusal
from tests.tasks import test_tokens

INPUTS = ROOT / "tests/inputs"


def rows_of(path: Path) -> TaggedRows:
    """The sentences of a training file, of which none is held out."""
    return test_tokens.rows_of("--train_file", str(path), "--validation_split", "0")


def words_of(path: Path) -> list[list[str]]:
    words: list[list[str]] = rows_of(path).splits["train"].table["words"].to_pylist()
    return words


@pytest.mark.parametrize(
    ("name", "code", "line"),
    [
        ("ner_sentence_ids.txt", "conll-header", 1),
        ("ner_header_line.conll", "conll-header", 1),
        ("ner_line_without_tag.conll", "conll-columns-differ", 8),
        ("ner_ten_columns.conllu", "conll-u", 2),
        ("ner_tag_first.conll", "tags-like-words", None),
        ("ner_one_tag.conll", "one-tag", None),
        ("ner_bad_line_deep.conll", "tags-do-not-match", 31),
        ("ner_long_table.csv", "conll-is-csv", None),
    ],
)
def test_what_is_no_word_and_tag_a_line_is_refused(name: str, code: str, line: int | None) -> None:
    place = str(INPUTS / name) + (f":{line}" if line else "")
    with refusal(code, place, "--train_file"):
        rows_of(INPUTS / name)


def test_words_between_tabs_hold_spaces() -> None:
    assert "Old Kochi Fort" in [word for words in words_of(INPUTS / "ner_words_with_spaces.conll") for word in words]


@pytest.mark.parametrize("between", ["\t", " ", "  "])
def test_a_no_break_space_is_part_of_a_word(tmp_path: Path, between: str) -> None:
    lines = ["न\u00a0ई", "दिल्ली", "है"]
    tags = ["B-LOC", "I-LOC", "O"]
    path = tmp_path / "t.conll"
    text = "\n".join(between.join([word, tag]) for word, tag in zip(lines, tags, strict=True))
    path.write_text(f"{text}\n", encoding="utf-8")
    assert words_of(path) == [lines]


def test_numbers_with_a_point_are_no_tags(tmp_path: Path) -> None:
    path = tmp_path / "t.conll"
    path.write_text("a O\n\nSita 1.0\nRavi 2.0\n", encoding="utf-8")
    with refusal("tags-are-numbers", f"{path}:3", "--train_file"):
        rows_of(path)


def test_a_tag_of_its_own_for_each_word_and_a_sentence_without_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.conll"
    path.write_text("".join(f"word{n} tag{n}\n\n" for n in range(10)), encoding="utf-8")
    with refusal("tags-like-words", str(path), "--train_file"):
        rows_of(path)
    path.write_text("".join(f"word{n} {'BO'[n % 2]}\n" for n in range(301)), encoding="utf-8")
    with refusal("conll-one-sentence", str(path), "--train_file"):
        rows_of(path)


def test_all_lines_that_differ_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "t.conll"
    path.write_text("a X O\nb O\n\nc X O\nd X Y O\n", encoding="utf-8")
    with pytest.raises(UserError) as raised:
        rows_of(path)
    assert [each.value for each in raised.value.problems] == [f"{path}:2", f"{path}:5"]


def test_tags_are_counted_and_those_without_a_dash_told(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = INPUTS / "ner_glued_prefixes.conll"
    flags = ["--task", "tokens", "--model_name_or_path", "builtin:tiny-indic-bert", "--train_file", str(path)]
    assert main(["inspect", *flags, "--validation_split", "0", "--json"]) == 0
    counted = Counter[str]()
    for each in json.loads(capsys.readouterr().out)["labels"]:
        counted[each["label"]] += each["count"]
    tags = [line.split()[-1] for line in path.read_text(encoding="utf-8").splitlines() if line]
    assert counted == Counter(tags)
    assert main(["inspect", *flags, "--validation_split", "0"]) == 0
    assert "Tags BORG, BPER, IORG, IPER are entities of 4 kinds" in capsys.readouterr().err
    assert all(f"{tag} {count}" in caplog.text for tag, count in counted.items())


def test_tags_with_a_dash_are_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model_name_or_path", "builtin:tiny-indic-bert", "--dataset_name", "builtin:names"]
    assert main(["inspect", "--task", "tokens", *flags]) == 0
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "code", "line"),
    [
        ("1\tSita\tB-PER\n2\tcame\tO\n\n1\tRavi\tB-PER\n", "conll-u", 1),
        ("\n0 Sita PER\n1 came O\n", "conll-u", 2),
        ("Word\tNER Tag\nSita\tB-PER\ncame\tO\n", "conll-header", 1),
        ("Sentence #\tWord\tPOS\tTag\n1\tSita\tN\tB-PER\n", "conll-header", 1),
        ("शब्द\tटैग\nसीता\tB-PER\nआई\tO\n", "conll-header", 1),
    ],
)
def test_numbers_of_words_and_names_of_columns_are_refused(tmp_path: Path, lines: str, code: str, line: int) -> None:
    path = tmp_path / "t.conll"
    path.write_text(lines, encoding="utf-8")
    with refusal(code, f"{path}:{line}", "--train_file"):
        rows_of(path)


def test_a_first_tag_that_comes_once_is_no_header(tmp_path: Path) -> None:
    path = tmp_path / "t.conll"
    for tags in (["NN", "VB", "VB"], ["PER", "O", "O"], ["X", "O", "B-Y", "Z"], ["B-PER", "O", "O"]):
        path.write_text("".join(f"word{n} {tag}\n" for n, tag in enumerate(tags)), encoding="utf-8")
        assert len(words_of(path)[0]) == len(tags)
