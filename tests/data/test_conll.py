"""CoNLL files are read as they are meant, or refused at the line that is not in their form."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from seqeval.metrics.sequence_labeling import get_entities

from indictune.cli import main
from indictune.errors import UserError
from indictune.tasks.tokens import TaggedRows
from tests.ranks.launching import ROOT
from tests.refusals import refused as refusal
from tests.tasks import test_tokens

INPUTS = ROOT / "tests/inputs"


def rows_of(path: Path, *flags: str) -> TaggedRows:
    """The sentences of a training file, of which none is held out."""
    return test_tokens.rows_of("--train_file", str(path), "--validation_split", "0", *flags)


def words_of(path: Path, *flags: str) -> list[list[str]]:
    words: list[list[str]] = rows_of(path, *flags).splits["train"].table["words"].to_pylist()
    return words


def tags_of(path: Path, *flags: str) -> list[list[str]]:
    tags: list[list[str]] = rows_of(path, *flags).splits["train"].table["tags"].to_pylist()
    return tags


@pytest.mark.parametrize(
    ("name", "code", "line"),
    [
        ("ner_line_without_tag.conll", "conll-columns-differ", 8),
        ("ner_ten_columns.conllu", "conll-u", 2),
        ("ner_tag_first.conll", "tags-like-words", None),
        ("ner_one_tag.conll", "one-tag", None),
        ("ner_bad_line_deep.conll", "tags-do-not-match", 31),
        ("tweets_sentimix.txt", "conll-of-tweets", 1),
    ],
)
def test_what_is_no_word_and_tag_a_line_is_refused(name: str, code: str, line: int | None) -> None:
    place = str(INPUTS / name) + (f":{line}" if line else "")
    with refusal(code, place, "--train_file"):
        rows_of(INPUTS / name)


FIRST = [["लता", "नागपुर", "पहुँची"], ["Kiran", "Rao", "visits", "Kochi"]]
FIRST_TAGS = [["B-PER", "B-LOC", "O"], ["B-PER", "I-PER", "O", "B-LOC"]]


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("ner_sentence_ids.txt", ()),
        ("ner_header_line.conll", ()),
        ("ner_long_table.csv", ()),
        ("ner_tag_first.conll", ("--word_column", "2", "--tag_column", "1")),
        ("ner_glued_prefixes.conll", ()),
    ],
)
def test_the_layouts_of_published_files_are_read(name: str, flags: tuple[str, ...]) -> None:
    assert words_of(INPUTS / name, *flags)[:2] == FIRST
    assert tags_of(INPUTS / name, *flags)[:2] == FIRST_TAGS


def test_conll_u_is_read_by_the_numbers_of_its_columns() -> None:
    flags = "--word_column", "2", "--tag_column", "4"
    assert words_of(INPUTS / "ner_ten_columns.conllu", *flags)[1][:2] == ["Kiran", "Rao"]
    assert tags_of(INPUTS / "ner_ten_columns.conllu", *flags)[0] == ["PROPN", "PROPN", "NOUN"]


def test_sentences_end_where_their_number_changes_and_glued_prefixes_are_told() -> None:
    found = rows_of(INPUTS / "ner_glued_ids.txt")
    train = found.splits["train"]
    assert train.table["words"].to_pylist() == [
        ["लता", "देशमुख", "मुख्यमंत्री", "होत्या"],
        ["सोमवारी", "पुण्यात", "पाऊस"],
        ["मुंबई", "शहर", "उपायुक्त", "साहेब"],
    ]
    assert train.table["tags"].to_pylist() == [
        ["B-NEP", "I-NEP", "B-ED", "O"],
        ["B-NETI", "B-NEL", "O"],
        ["B-NEL", "I-NEL", "B-ED", "I-ED"],
    ]
    assert [train.location(row).rpartition(":")[2] for row in range(3)] == ["2", "6", "9"]
    assert (found.scheme.count, found.scheme.of, found.scheme.warns) == (3, 3, True)
    assert "IOB2 (BX, IX)" in found.scheme.note


@pytest.mark.parametrize(
    ("header", "flags"),
    [
        ("शब्द,वाक्य,टैग", ("--word_column", "शब्द", "--tag_column", "टैग", "--sentence_column", "वाक्य")),
        ("", ("--word_column", "1", "--sentence_column", "2")),
        ("Word,Sentence #,POS,NER", ()),
        ("token sent_id tags", ()),
    ],
)
def test_columns_stand_in_any_order_between_commas_and_spaces(
    tmp_path: Path, header: str, flags: tuple[str, ...]
) -> None:
    between = " " if " sent_id" in header else ","
    tag = f"NN{between}" * ("POS" in header)
    rows = [("सीता", "7", "B-PER"), ('","' if between == "," else ",", "7", "O"), ("पुणे", "9", "B-LOC")]
    lines = [f"{word}{between}{number}{between}{tag}{name}" for word, number, name in rows]
    path = tmp_path / ("t.csv" if "#" in header else "t.txt")
    path.write_text("\n".join([*filter(None, [header]), *lines]), encoding="utf-8")
    assert words_of(path, *flags) == [["सीता", ","], ["पुणे"]]
    assert tags_of(path, *flags) == [["B-PER", "O"], ["B-LOC"]]


def test_a_line_with_names_of_words_and_tags_is_a_header_whatever_else_it_names(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("words\tlabels\tsource\nSita\tB-PER\tnews\ncame\tO\tnews\n\nNo\tO\tweb\n", encoding="utf-8")
    assert (words_of(path), tags_of(path)) == ([["Sita", "came"], ["No"]], [["B-PER", "O"], ["O"]])


def test_unclear_and_missing_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.tsv"
    path.write_text("word\ttag\tner\nSita\tNN\tB-PER\nआई\tVB\tO\n", encoding="utf-8")
    with refusal("conll-header", f"{path}:1", "--train_file"):
        rows_of(path)
    assert tags_of(path, "--tag_column", "ner") == [["B-PER", "O"]]
    for wrong in ("pos", "0", "4"):
        with refusal("column-missing", f"{path}:1", "--train_file"):
            rows_of(path, "--tag_column", wrong)


WRITTEN = [
    # IOB1: B only between two entities of one kind.
    ("I-PER I-PER O I-LOC B-LOC", "B-PER I-PER O B-LOC B-LOC", "IOB1 (B-X, I-X)"),
    ("I-PER O I-LOC I-PER", "B-PER O B-LOC B-PER", "IOB1 (I-X)"),
    ("B-PER I-PER O I-LOC", "B-PER I-PER O B-LOC", "IOB2, in which 1 entities begin with I, (B-X, I-X)"),
    ("B-PER E-PER S-LOC B-PER I-PER E-PER O", "B-PER I-PER B-LOC B-PER I-PER I-PER O", "IOBES (B-X, E-X, I-X, S-X)"),
    ("S-PER S-PER O", "B-PER B-PER O", "IOBES (S-X)"),
    ("B-PER E-PER I-PER I-PER O", "B-PER I-PER B-PER I-PER O", "IOBES (B-X, E-X, I-X)"),
    ("B-PER L-PER U-LOC O", "B-PER I-PER B-LOC O", "BILOU (B-X, L-X, U-X)"),
    ("PER-B PER-I LOC-B O", "B-PER I-PER B-LOC O", "IOB2 (X-B, X-I)"),
    ("PER_B PER_I LOC_B O", "B-PER I-PER B-LOC O", "IOB2 (X_B, X_I)"),
    ("B_PER I_PER B_LOC O", "B-PER I-PER B-LOC O", "IOB2 (B_X, I_X)"),
    ("BPER IPER BLOC O", "B-PER I-PER B-LOC O", "IOB2 (BX, IX)"),
    ("B-PER I-PER O B-LOC B-LOC", "B-PER I-PER O B-LOC B-LOC", "IOB2 (B-X, I-X)"),
    ("B-PER I-PER Other B-LOC", "B-PER I-PER O B-LOC", "; Other is O"),
    ("BPER IPER _ BLOC", "B-PER I-PER O B-LOC", "; _ is O"),
]


def rows_of_tags(folder: Path, tags: list[str]) -> TaggedRows:
    path = folder / "t.jsonl"
    path.write_text(json.dumps({"text": list("abcdefg"[: len(tags)]), "label": tags}), encoding="utf-8")
    return rows_of(path)


@pytest.mark.parametrize(("given", "expected", "scheme"), WRITTEN)
def test_tags_of_every_scheme_become_one_with_the_same_entities(
    tmp_path: Path, given: str, expected: str, scheme: str
) -> None:
    tags = given.split()
    found = rows_of_tags(tmp_path, tags)
    assert found.splits["train"].table["tags"].to_pylist() == [expected.split()]
    assert scheme in found.scheme.note
    assert found.scheme.warns == (given != expected)
    if "-" in tags[0][1]:  # seqeval reads these forms itself
        written = [tag.replace("L-", "E-").replace("U-", "S-") for tag in tags]
        assert get_entities(written) == get_entities(expected.split())


@pytest.mark.parametrize("given", ["BRAND INDIA O", "PER LOC O", "B_PER O", "B-PER LOC O", "NN VB", "B I O"])
def test_tags_that_may_be_names_stay_as_they_are(tmp_path: Path, given: str) -> None:
    tags = given.split()
    found = rows_of_tags(tmp_path, tags)
    assert found.splits["train"].table["tags"].to_pylist() == [tags]
    assert (found.scheme.count, found.scheme.warns) == (0, False)


@pytest.mark.parametrize("given", ["B-PER I-PER XX O", "BPER IPER BLOC XX O", "B-PER E-PER Other O"])
def test_a_tag_of_another_form_than_the_others_is_told(tmp_path: Path, given: str) -> None:
    tags = given.split()
    found = rows_of_tags(tmp_path, tags)
    assert found.splits["train"].table["tags"].to_pylist() == [tags]
    assert found.scheme.warns
    assert tags[-2] in found.scheme.note


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
    path.write_text("".join(f"word{n % 9} {'BO'[n % 2]} {n}\n" for n in range(301)), encoding="utf-8")
    with refusal("conll-lone-words", str(path), "--train_file"):
        rows_of(path, "--tag_column", "2", "--sentence_column", "3")


def test_all_lines_that_differ_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "t.conll"
    path.write_text("a X O\nb O\n\nc X O\nd X Y O\n", encoding="utf-8")
    with pytest.raises(UserError) as raised:
        rows_of(path)
    assert [each.value for each in raised.value.problems] == [f"{path}:2", f"{path}:5"]


def test_tags_are_counted_and_their_scheme_is_told(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = INPUTS / "ner_glued_prefixes.conll"
    flags = ["--task", "tokens", "--model_name_or_path", "builtin:tiny-indic-bert", "--train_file", str(path)]
    assert main(["inspect", *flags, "--validation_split", "0", "--json"]) == 0
    health = json.loads(capsys.readouterr().out)
    counted = Counter[str]()
    for each in health["labels"]:
        counted[each["label"]] += each["count"]
    tags = [line.split()[-1] for line in path.read_text(encoding="utf-8").splitlines() if line]
    assert counted == Counter(tag if tag == "O" else f"{tag[0]}-{tag[1:]}" for tag in tags)
    (told,) = [each["note"] for each in health["findings"] if each["name"] == "tag_scheme"]
    assert "IOB2 (BX, IX)" in told
    assert main(["inspect", *flags, "--validation_split", "0"]) == 0
    assert told in capsys.readouterr().out
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
        ("Word\tID\nSita\tB-PER\ncame\tO\n", "conll-header", 1),
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
