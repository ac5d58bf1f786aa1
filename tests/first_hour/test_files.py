"""Files as they lie about: each kind is read with the right rows, or refused with a way out."""

from __future__ import annotations

import csv
import gzip
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from indictune.config.arguments import DataArguments, TaggedDataArguments
from indictune.config.recipe import read_recipe
from indictune.data.bad_rows import BadRows
from indictune.data.cache import StoredRows
from indictune.data.load_rows import load_splits
from indictune.data.read import open_files, sheets
from indictune.data.read.read_files import read_records
from indictune.data.read.row_sources import file_source, text_sources
from indictune.data.row_choice import Splits
from indictune.data.sentences import Sentences, read_sentences, tag_reader
from indictune.errors import Problems, UserError
from indictune.preflight.derive import make_plan
from indictune.tasks.classification import Classification
from tests.first_hour.sheets import write_ods, write_parts, write_xlsx
from tests.problems import problems_raised
from tests.ranks.launching import ROOT, python, start

ROWS = [("अच्छी फिल्म", "good"), ("bad film, very bad", "bad"), ("ठीक है", "good")]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files have short names."""
    monkeypatch.chdir(tmp_path)


def load(*files: str, **arguments: Any) -> Splits[StoredRows]:
    return load_splits(DataArguments(train_file=files[0] if len(files) == 1 else list(files), **arguments))


def rows_of(splits: Splits[StoredRows], split: str = "train") -> list[tuple[str, str]]:
    table = splits.rows[split].table
    return list(zip(table["text"].to_pylist(), table["label"].to_pylist(), strict=True))


def refusal_of(*files: str, **arguments: Any) -> UserError:
    with pytest.raises(UserError) as raised:
        load(*files, **arguments)
    return raised.value


INPUTS = ROOT / "tests/inputs"
_LINES = (INPUTS / "excel_sep_line.csv").read_text(encoding="utf-8").splitlines()[2:]
EXPORTED = [(text, label) for text, label in (line.split(";") for line in _LINES)]


def delimited_rows(delimiter: str, header: str | None = "text,label") -> str:
    def field(text: str) -> str:
        return f'"{text}"' if delimiter in text else text

    lines = [*([header.replace(",", delimiter)] if header else []), *(delimiter.join(map(field, row)) for row in ROWS)]
    return "\n".join(lines) + "\n"


class TestDelimiters:
    @pytest.mark.parametrize("name", ["f.csv", "f.tsv"])
    @pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
    def test_each_is_found_and_reported_unless_it_is_the_extensions(self, name: str, delimiter: str) -> None:
        Path(name).write_text(delimited_rows(delimiter), encoding="utf-8")
        splits = load(name)
        assert rows_of(splits) == ROWS
        assert len(splits.notes) == (delimiter != {"f.csv": ",", "f.tsv": "\t"}[name])

    def test_it_is_found_without_a_header_by_the_number_of_names(self) -> None:
        Path("f.csv").write_text("a, b;x\nc;y\nd, e;x\n", encoding="utf-8")
        assert rows_of(load("f.csv", column_names=["text", "label"])) == [("a, b", "x"), ("c", "y"), ("d, e", "x")]

    def test_a_given_one_is_taken(self) -> None:
        Path("f.csv").write_text("text,more;label\na,b;x\nc,d;y\n", encoding="utf-8")
        splits = load("f.csv", delimiter=";", text_column="text,more")
        assert rows_of(splits) == [("a,b", "x"), ("c,d", "y")]

    @pytest.mark.parametrize("delimiter", [";", ",", "\t"])
    def test_that_of_excels_first_line_is_taken(self, delimiter: str) -> None:
        content = (INPUTS / "excel_sep_line.csv").read_text(encoding="utf-8").replace(";", delimiter)
        Path("f.csv").write_text(f"\ufeff{content}", encoding="utf-8", newline="\r\n")
        splits = load("f.csv")
        assert rows_of(splits) == EXPORTED
        assert splits.rows["train"].location(0) == "f.csv:3"
        assert splits.notes == []
        Path("g.csv").write_text(content.replace(f"text{delimiter}label\n", ""), encoding="utf-8")
        assert rows_of(load("g.csv", column_names=["text", "label"])) == EXPORTED

    def test_one_that_gives_one_column_is_refused(self) -> None:
        Path("f.csv").write_text(delimited_rows(","), encoding="utf-8")
        assert problems_raised(lambda: load("f.csv", delimiter=";")) == ["--train_file f.csv one-column"]
        given = {"delimiter": ";", "column_names": ["text", "label"]}
        assert problems_raised(lambda: load("f.csv", **given)) == ["--train_file f.csv one-column"]

    def test_one_that_a_file_has_no_use_for_is_ignored_with_a_note(self) -> None:
        Path("f.jsonl").write_text("".join(f"{json.dumps({'text': t, 'label': k})}\n" for t, k in ROWS))
        assert len(load("f.jsonl", delimiter=";").notes) == len(load("f.jsonl").notes) + 1


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
@pytest.mark.parametrize("name", ["f.csv", "f.tsv"])
def test_text_in_utf_16_is_read(name: str, encoding: str) -> None:
    """Excel saves "Unicode Text" so."""
    mark = "" if encoding == "utf-16" else "\ufeff"
    content = mark + delimited_rows("\t").replace("\n", "\r\n")
    Path(name).write_bytes(content.encode(encoding))
    splits = load(name)
    assert rows_of(splits) == ROWS
    assert splits.rows["train"].location(0) == f"{name}:2"
    Path("f.csv").write_bytes(content.encode(encoding) + b"\x00")
    assert refusal_of("f.csv").code == "row-unreadable"  # with half a letter more, it is no UTF-16


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_lines_that_end_in_carriage_returns_alone_are_read(kind: str) -> None:
    content = (INPUTS / "old_mac_lines.csv").read_bytes()
    assert b"\n" not in content
    if kind == "jsonl":
        content = "".join(f"{json.dumps({'text': t, 'label': k})}\r" for t, k in EXPORTED).encode()
    for end in (b"", b"\r"):
        Path(f"f.{kind}").write_bytes(content.removesuffix(b"\r") + end)
        splits = load(f"f.{kind}")
        assert rows_of(splits) == EXPORTED
        assert splits.rows["train"].location(1) == f"f.{kind}:{3 if kind == 'csv' else 2}"
    Path("f.csv").write_bytes(b'text,label\nc,y\n"a\rb",x')  # it has line feeds
    assert rows_of(load("f.csv")) == [("c", "y"), ("a b", "x")]


@pytest.mark.parametrize("name", ["f.json", "f.jsonl"])
def test_an_object_on_several_lines_is_one_problem(name: str) -> None:
    content = (INPUTS / "one_object.json").read_text(encoding="utf-8")
    for objects in (content, f"{content}\n{content}\n"):
        Path(name).write_text(objects, encoding="utf-8")
        with pytest.raises(UserError) as raised:
            list(read_records(name, BadRows(name)))
        assert [(each.code, each.details["lines"]) for each in raised.value.problems] == [("json-object-on-lines", 12)]


class TestHeaders:
    def test_names_are_given_in_one_word_or_several(self) -> None:
        Path("f.csv").write_text(delimited_rows(",", header=None), encoding="utf-8")
        for names in (["text,label"], ["text", "label"], ["text,", "label"]):
            splits = load("f.csv", column_names=names)
            assert rows_of(splits) == ROWS
            assert splits.rows["train"].location(0) == "f.csv:1"

    @pytest.mark.parametrize(
        ("content", "names"),
        [
            ("0,यह एक फिल्म है\n1,वह अच्छी थी\n0,ठीक\n", "label,text"),
            ("a fine film that I saw twice,good\nnot for me,bad\n", "text,label"),
            ("7,ok,good\n8,so so,bad\n9,fine,good\n", "column1,text,label"),
            ((INPUTS / "trailing_delimiter.csv").read_text(encoding="utf-8"), "text,label,column3"),
        ],
    )
    def test_a_first_row_of_data_is_named_with_names_to_give(self, content: str, names: str) -> None:
        Path("f.csv").write_text(content, encoding="utf-8")
        error = refusal_of("f.csv")
        assert [each.code for each in error.problems] == ["header-missing"]
        assert f"--column_names {names}" in error.message
        assert len(rows_of(load("f.csv", column_names=[names]))) == content.count("\n")

    def test_a_file_that_has_a_header_keeps_it(self) -> None:
        Path("t.csv").write_text("a,x\nb,y\n", encoding="utf-8")
        Path("v.csv").write_text("id,Sentence,category\n7,c,x\n", encoding="utf-8")
        write_xlsx("w.xlsx", [["label", "text"], ["x", "d"]])
        splits = load("t.csv", validation_file=["v.csv", "w.xlsx"], column_names=["text", "label"])
        assert rows_of(splits, "validation") == [("c", "x"), ("d", "x")]
        assert sum("--column_names" in note for note in splits.notes) == 2

    def test_columns_of_conversations_are_named_as_such(self) -> None:
        Path("f.csv").write_text("question,answer\na,b\n", encoding="utf-8")
        (found,) = refusal_of("f.csv").problems
        assert "--task chat" in str(found)

    def test_other_names_are_no_data(self) -> None:
        Path("f.csv").write_text("body,mood\na,b\n", encoding="utf-8")
        assert [each.code for each in refusal_of("f.csv").problems] == ["column-missing", "column-missing"]

    def test_three_names_for_five_fields_are_refused(self) -> None:
        Path("f.csv").write_text("1,2,3,a,x\n4,5,6,b,y\n", encoding="utf-8")
        error = refusal_of("f.csv", column_names=["id", "text", "label"])
        assert (error.code, error.problems[0].details["count"], error.problems[0].details["fields"]) == (
            "column-names-count",
            3,
            5,
        )

    @pytest.mark.parametrize(
        ("text", "label"),
        [("tweet", "sentiment"), ("Sentence", "Label"), ("comment", "category"), ("review", "sentiment")],
    )
    @pytest.mark.parametrize("name", ["f.csv", "f.jsonl", "f.parquet"])
    def test_usual_names_are_guessed_and_reported(self, name: str, text: str, label: str) -> None:
        rows = [{"id": "7", text: "a", label: "x"}, {"id": "8", text: "b", label: "y"}]
        if name == "f.parquet":
            pq.write_table(pa.Table.from_pylist(rows), name)
        else:
            csv = "".join(",".join(row) + "\n" for row in [list(rows[0]), *(list(row.values()) for row in rows)])
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            Path(name).write_text(csv if name == "f.csv" else lines, encoding="utf-8")
        splits = load(name)
        assert rows_of(splits) == [("a", "x"), ("b", "y")]
        (note,) = splits.notes
        assert text in note
        assert label in note

    @pytest.mark.parametrize("header", ["tweet,review,label", "text,sentiment,category"])
    def test_two_that_fit_are_not_guessed(self, header: str) -> None:
        Path("f.csv").write_text(f"{header}\na,b,c\nd,e,f\n", encoding="utf-8")
        assert [each.code for each in refusal_of("f.csv").problems] == ["column-missing"]

    def test_a_name_that_is_given_is_not_replaced(self) -> None:
        Path("f.csv").write_text("tweet,label\na,x\nb,y\n", encoding="utf-8")
        assert refusal_of("f.csv", text_column="body").code == "column-missing"

    def test_rows_that_disagree_with_the_guess_are_refused(self) -> None:
        Path("f.jsonl").write_text('{"tweet": "a", "label": 1}\n{"text": "b", "label": 0}\n', encoding="utf-8")
        assert refusal_of("f.jsonl").code == "columns-unclear"


class TestSeveralFiles:
    def test_names_and_patterns_are_read_in_order_each_file_once(self) -> None:
        for name, label in (("b.csv", "y"), ("a.csv", "x"), ("c.csv", "z")):
            Path(name).write_text(f"text,label\n{name},{label}\n", encoding="utf-8")
        assert rows_of(load("*.csv")) == [("a.csv", "x"), ("b.csv", "y"), ("c.csv", "z")]
        splits = load("c.csv", "[ac].csv")
        assert rows_of(splits) == [("c.csv", "z"), ("a.csv", "x")]
        assert [splits.rows["train"].location(row) for row in (0, 1)] == ["c.csv:2", "a.csv:2"]

    def test_a_file_whose_name_looks_like_a_pattern_is_that_file(self) -> None:
        Path("a[1].csv").write_text("text,label\na,x\nb,y\n", encoding="utf-8")
        assert rows_of(load("a[1].csv")) == [("a", "x"), ("b", "y")]

    def test_a_change_of_any_is_noticed(self) -> None:
        for name in ("a.csv", "b.csv"):
            Path(name).write_text("text,label\na,x\nb,y\n", encoding="utf-8")
        args, before = DataArguments(train_file=["a.csv", "b.csv"]), load("a.csv", "b.csv")
        fingerprint = text_sources(args, Problems())["train"].fingerprint
        Path("b.csv").write_text("text,label\na,x\nb,z\n", encoding="utf-8")
        assert text_sources(args, Problems())["train"].fingerprint != fingerprint
        assert load("a.csv", "b.csv").folder != before.folder
        assert load("a.csv", "b.csv").labels == ["x", "y", "z"]

    def test_a_pattern_without_files_and_a_folder_are_refused(self) -> None:
        Path("data").mkdir()
        Path("v.csv").write_text("text,label\na,x\nb,y\n", encoding="utf-8")
        found = problems_raised(lambda: load("data/*.csv", validation_file="data"))
        assert found == ["--train_file data/*.csv no-files-match", "--validation_file data folder-not-saved"]

    def test_files_with_other_columns_are_refused(self) -> None:
        Path("a.csv").write_text("text,label\na,x\nb,y\n", encoding="utf-8")
        Path("b.csv").write_text("body,mood\na,x\nb,y\n", encoding="utf-8")
        found = problems_raised(lambda: load("a.csv", "b.csv"))
        assert found == [*["--train_file b.csv column-missing"] * 2, "--train_file b.csv files-differ"]


def as_csv(path: str) -> None:
    Path(path).write_text(delimited_rows(","), encoding="utf-8")


def as_jsonl(path: str) -> None:
    rows = [{"text": text, "label": label} for text, label in ROWS]
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def as_json(path: str) -> None:
    Path(path).write_text(json.dumps([{"text": text, "label": label} for text, label in ROWS]), encoding="utf-8")


def as_parquet(path: str) -> None:
    pq.write_table(pa.table({"text": [text for text, _ in ROWS], "label": [label for _, label in ROWS]}), path)


WRITERS = {".csv": as_csv, ".jsonl": as_jsonl, ".json": as_json, ".parquet": as_parquet}


def packed(content: bytes, ending: str) -> bytes:
    return gzip.compress(content) if ending == ".gz" else pa.compress(content, "zstd", asbytes=True)


class TestPacked:
    @pytest.mark.parametrize("ending", [".gz", ".zst"])
    @pytest.mark.parametrize("extension", WRITERS)
    def test_every_kind_is_unpacked(self, extension: str, ending: str) -> None:
        WRITERS[extension]("plain")
        Path(f"f{extension}{ending}").write_bytes(packed(Path("plain").read_bytes(), ending))
        splits = load(f"f{extension}{ending}")
        assert rows_of(splits) == ROWS
        assert (":" in splits.rows["train"].location(0)) == (extension != ".parquet")

    @pytest.mark.parametrize("ending", [".gz", ".zst"])
    def test_a_bomb_is_refused(self, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(open_files, "MAX_UNPACKED_BYTES", 100_000)
        Path(f"f.csv{ending}").write_bytes(packed(b"text,label\n" + b"a,x\n" * 100_000, ending))
        found = problems_raised(lambda: load(f"f.csv{ending}", bad_rows="quarantine"))
        assert found == [f"--train_file f.csv{ending} unpacked-too-large"]

    @pytest.mark.parametrize("ending", [".gz", ".zst"])
    def test_a_damaged_one_is_refused(self, ending: str) -> None:
        whole = packed(delimited_rows(",").encode() * 100, ending)
        for content in (whole[:-9], b"no such file"):
            Path(f"f.csv{ending}").write_bytes(content)
            assert problems_raised(lambda: load(f"f.csv{ending}")) == [f"--train_file f.csv{ending} unpacking-failed"]


FEATURES = datasets.Features(
    {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["negative", "positive"])}
)
CLASSES = {"text": ["a", "b", "c"], "label": [1, 0, 1]}
NAMED = [("a", "positive"), ("b", "negative"), ("c", "positive")]


def saved_split() -> None:
    datasets.Dataset.from_dict(CLASSES, FEATURES).save_to_disk("set")


def saved_splits() -> None:
    splits = {"train": datasets.Dataset.from_dict(CLASSES, FEATURES)}
    splits["validation"] = datasets.Dataset.from_dict({"text": ["d"], "label": [0]}, FEATURES)
    datasets.DatasetDict(splits).save_to_disk("set")


def declared_parquet() -> None:
    datasets.Dataset.from_dict(CLASSES, FEATURES).to_parquet("set")
    Path("set").rename("set.parquet")


class TestDeclaredClasses:
    @pytest.mark.parametrize(
        ("write", "given"),
        [
            (saved_split, {"train_file": "set"}),
            (saved_split, {"dataset_name": "set"}),
            (saved_splits, {"train_file": "set"}),
            (saved_splits, {"dataset_name": "set"}),
            (declared_parquet, {"train_file": "set.parquet"}),
        ],
    )
    def test_their_names_are_the_labels(self, write: Callable[[], None], given: dict[str, str]) -> None:
        write()
        splits = load_splits(DataArguments(**given))  # type: ignore[arg-type]
        assert rows_of(splits) == NAMED
        assert splits.labels == ["negative", "positive"]

    def test_a_saved_dataset_has_its_validation_rows(self) -> None:
        saved_splits()
        splits = load_splits(DataArguments(dataset_name="set"))
        assert rows_of(splits, "validation") == [("d", "negative")]
        assert rows_of(load("set", validation_file="set"), "validation") == [("d", "negative")]
        assert problems_raised(lambda: load("set", test_file="set")) == ["--test_file set saved-split-missing"]

    def test_parts_of_a_saved_split_are_all_read(self) -> None:
        datasets.Dataset.from_dict(CLASSES, FEATURES).save_to_disk("set", num_shards=3)
        assert rows_of(load("set")) == NAMED

    def test_an_id_without_a_name_is_a_bad_row(self) -> None:
        table = datasets.Dataset.from_dict(CLASSES, FEATURES).data.table
        beyond = pa.table({"text": ["a", "b"], "label": pa.array([1, 7])})
        pq.write_table(beyond.replace_schema_metadata(table.schema.metadata), "f.parquet")
        assert problems_raised(lambda: load("f.parquet")) == ["--train_file f.parquet row 2 class-undeclared"]

    def test_dictionaries_are_read(self) -> None:
        labels = pa.array(["good", "bad", "good"]).dictionary_encode()
        pq.write_table(pa.table({"text": pa.array(["a", "b", "a"]).dictionary_encode(), "label": labels}), "f.parquet")
        assert rows_of(load("f.parquet")) == [("a", "good"), ("b", "bad"), ("a", "good")]


@pytest.mark.parametrize(
    "content",
    [
        {"text": {"0": "a", "1": "b"}, "label": {"0": 1, "1": 0.5}},
        {"text": ["a", "b"], "label": [1, 0.5]},
        {"label": {"5": 1, "7": 0.5}, "tweet": {"7": "b", "5": "a"}},
    ],
)
def test_json_by_columns_is_read(content: dict[str, Any]) -> None:
    Path("f.json").write_text(json.dumps(content), encoding="utf-8")
    assert rows_of(load("f.json")) == [("a", "1"), ("b", "0.5")]


SHEET: list[list[str | float | None]] = [
    ["id", "text", "label"],
    [1.0, "अच्छी फिल्म", 1.0],
    [],
    [2.0, "a < b", 0.5],
    [3.0, 7.0, 1.0],
]


# A cell at the end of the largest sheet, where only the library looks for it.
LAST_ROWS = [
    "<row r='1048576'><c r='XFD1048576'><v>1</v></c></row>",
    '<row><c r="XFD1048576"><v>1</v></c></row>',
    f'<row r="1048576"><c r="XFD1048576"><v>1</v></c></row><!--{" " * 1_100_000}-->',
]


class TestSheets:
    @pytest.mark.parametrize(("write", "name"), [(write_xlsx, "f.xlsx"), (write_ods, "f.ods")])
    def test_the_first_sheet_is_read(self, write: Callable[..., None], name: str) -> None:
        write(name, SHEET)
        splits = load(name)
        assert rows_of(splits) == [("अच्छी फिल्म", "1"), ("a < b", "0.5"), ("7", "1")]
        assert [splits.rows["train"].location(row) for row in (0, 1)] == [f"{name} row 2", f"{name} row 4"]
        assert splits.notes == []
        write(name, SHEET, [["other"]])
        write(name, SHEET, [["other"]], [["text", "label"], ["c", "x"], ["d", "y"]])
        (note,) = load(name).notes
        assert f"{name}: its sheet S1 is read, and not S2, S3 (--sheet)." in note
        named = load(name, sheet="S3")
        assert rows_of(named) == [("c", "x"), ("d", "y")]
        assert named.notes == []
        error = refusal_of(name, sheet="S4")
        assert (error.code, "one of S1, S2, S3," in error.message) == ("no-such-sheet", True)

    def test_one_without_a_header_takes_names_and_one_without_a_label_is_a_bad_row(self) -> None:
        write_xlsx("f.xlsx", [["a fine film", "good"], ["not for me", "bad"], ["why", "good"], ["so so", None]])
        assert refusal_of("f.xlsx").code == "header-missing"
        found = problems_raised(lambda: load("f.xlsx", column_names=["text", "label"]))
        assert found == ["--train_file f.xlsx row 4 no-label"]
        assert refusal_of("f.xlsx", column_names=["a", "b", "c"]).code == "column-names-count"

    @pytest.mark.parametrize(("write", "name"), [(write_xlsx, "f.xlsx"), (write_ods, "f.ods")])
    def test_a_damaged_one_is_refused(self, write: Callable[..., None], name: str) -> None:
        write(name, SHEET)
        whole = Path(name).read_bytes()
        changed = bytearray(whole)
        changed[len(whole) // 3] ^= 1
        for content in (whole[:-30], bytes(changed), b"text,label\na,b\n", b""):
            Path(name).write_bytes(content)
            assert problems_raised(lambda: load(name)) == [f"--train_file {name} sheet-damaged"]

    def test_one_with_a_password_is_refused(self) -> None:
        Path("f.xlsx").write_bytes(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(2000))
        assert problems_raised(lambda: load("f.xlsx")) == ["--train_file f.xlsx sheet-protected"]
        write_ods("f.ods", SHEET, has_password=True)
        assert problems_raised(lambda: load("f.ods")) == ["--train_file f.ods sheet-protected"]

    @pytest.mark.parametrize("last", LAST_ROWS)
    def test_one_that_would_end_its_library_is_refused_by_name(self, last: str) -> None:
        """1.5 kB aborted the process, because no machine has memory for 17 billion cells."""
        write_xlsx("f.xlsx", SHEET)
        with zipfile.ZipFile("f.xlsx") as archive:
            parts = {name: archive.read(name).decode() for name in archive.namelist()}
        sheet, relations = parts.pop("xl/worksheets/sheet1.xml"), parts["xl/_rels/workbook.xml.rels"]
        parts["xl/elsewhere/1.xml"] = sheet.replace("</sheetData>", f"{last}</sheetData>")
        parts["xl/_rels/workbook.xml.rels"] = relations.replace("worksheets/sheet1.xml", "elsewhere/1.xml")
        write_parts("f.xlsx", parts)
        assert Path("f.xlsx").stat().st_size < 5_000
        assert problems_raised(lambda: load("f.xlsx")) == ["--train_file f.xlsx sheet-too-large"]

    def test_one_that_takes_too_much_memory_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sheets, "_MEMORY_BYTES", 600 << 20)
        write_ods("f.ods", [*SHEET, [*[None] * 99, "far"]])
        assert len(rows_of(load("f.ods"))) == 3
        with zipfile.ZipFile("f.ods") as archive:
            parts = {name: archive.read(name).decode() for name in archive.namelist()}
        many = '<table:table-row table:number-rows-repeated="1000000">'
        parts["content.xml"] = parts["content.xml"].replace("<table:table-row>", many)
        write_parts("f.ods", parts)
        assert problems_raised(lambda: load("f.ods")) == ["--train_file f.ods sheet-too-large"]

    def test_a_packed_one_is_read(self) -> None:
        write_xlsx("f.xlsx", SHEET)
        Path("p.xlsx.gz").write_bytes(gzip.compress(Path("f.xlsx").read_bytes()))
        assert len(rows_of(load("p.xlsx.gz"))) == 3

    def test_a_bomb_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(open_files, "MAX_UNPACKED_BYTES", 100_000)
        write_xlsx("f.xlsx", [["text", "label"], ["a" * 1_000_000, "x"]])
        assert problems_raised(lambda: load("f.xlsx")) == ["--train_file f.xlsx unpacked-too-large"]


class TestSeveralLabels:
    MULTI: ClassVar[dict[str, Any]] = {"problem_type": "multi_label_classification"}

    @pytest.mark.parametrize(
        ("labels", "names", "first"),
        [
            (["[0, 0, 1]", "[1, 0, 1]", "[0, 0, 0]"], ["0", "2"], "2"),
            (["[0 0 1]", "[1 0 1]", "[0 1 0]"], ["0", "1", "2"], "2"),
            (["[0, 1]", "[1, 0]", "[1, 0]"], ["0", "1"], "1"),
            (["[3, 0]", "[1]", "[0]"], ["0", "1", "3"], "3|0"),
            (["['joy', 'anger']", '["joy"]', "[]"], ["anger", "joy"], "joy|anger"),
            (["joy|anger", "joy", "anger"], ["anger", "joy"], "joy|anger"),
        ],
    )
    def test_a_csv_may_list_them(self, labels: list[str], names: list[str], first: str) -> None:
        rows = [[f"text {number}", label] for number, label in enumerate(labels)]
        with open("f.csv", "w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([["text", "label"], *rows])
        assert refusal_of("f.csv").code == "labels-look-like-lists"
        splits = load("f.csv", **self.MULTI)
        assert splits.labels == names
        assert rows_of(splits)[0] == ("text 0", first)

    @pytest.mark.parametrize(
        ("labels", "flags", "taken", "metric"),
        [
            (["[0, 0, 1]", "[1, 0, 1]"], [], "multi_label_classification", "micro_f1"),
            (["joy|anger", "joy"], [], "multi_label_classification", "micro_f1"),
            (["joy|anger", "joy|fear"], [], "multi_label_classification", "micro_f1"),
            (["joy|anger", "fear"], [], None, "macro_f1"),
            (["joy", "anger"], [], None, "macro_f1"),
            (["joy|anger", "joy"], ["--problem_type", "single_label_classification"], None, "macro_f1"),
        ],
    )
    def test_a_run_takes_them_as_several(
        self, labels: list[str], flags: list[str], taken: str | None, metric: str
    ) -> None:
        rows = [[f"text {number}", label] for number, label in enumerate(labels)]
        with open("f.csv", "w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([["text", "label"], *rows])
        words = ["--train_file", "f.csv", "--output_dir", "out", *flags]
        plan, problems = make_plan(read_recipe(words, Classification.arguments), {}, Classification())
        assert problems == []
        assert plan.training.metric_for_best_model == metric
        assert plan.data.problem_type == (taken or (flags[-1] if flags else None))

    def test_lists_of_json_mean_the_same(self) -> None:
        Path("f.jsonl").write_text('{"text": "a", "label": [0, 0, 1]}\n{"text": "b", "label": [0, 1, 1]}\n')
        assert rows_of(load("f.jsonl", **self.MULTI)) == [("a", "2"), ("b", "1|2")]

    def test_validation_rows_are_spelled_as_the_training_rows(self) -> None:
        Path("t.csv").write_text('text,label\na,"[0, 0, 1]"\nb,"[1, 0, 0]"\n')
        Path("v.csv").write_text('text,label\nc,"[0, 0, 1]"\n')
        assert rows_of(load("t.csv", validation_file="v.csv", **self.MULTI), "validation") == [("c", "2")]

    def test_names_that_parquet_declares_for_lists_are_the_labels(self) -> None:
        kinds = datasets.List(datasets.ClassLabel(names=["anger", "joy"]))
        features = datasets.Features({"text": datasets.Value("string"), "label": kinds})
        datasets.Dataset.from_dict({"text": ["a", "b"], "label": [[1, 0], []]}, features).to_parquet("f.parquet")
        assert rows_of(load("f.parquet", **self.MULTI)) == [("a", "joy|anger"), ("b", "|")]

    def test_a_bar_in_the_name_of_a_class_is_allowed(self) -> None:
        Path("f.csv").write_text("text,label\na,on|off\nb,in|out\n")
        assert load("f.csv").labels == ["in|out", "on|off"]
        Path("f.csv").write_text("text,label\na,on|off\nb,off\n")
        assert load("f.csv", problem_type="single_label_classification").labels == ["off", "on|off"]


def test_quotes_that_mean_nothing_are_letters() -> None:
    Path("f.tsv").write_text('text\tlabel\n"a\tx\n"b" c\ty\nd"\tx\n', encoding="utf-8")
    assert refusal_of("f.tsv").code == "row-unreadable"
    assert rows_of(load("f.tsv", quoting="none")) == [('"a', "x"), ('"b" c', "y"), ('d"', "x")]


def sentences_of(named: str | list[str], **flags: Any) -> Sentences:
    given = TaggedDataArguments(train_file=named, **flags)
    return read_sentences(file_source(named, "--train_file", tag_reader(given), "train"))


def test_sentences_of_several_files_are_one_split_and_no_csv_flag_counts() -> None:
    Path("a.conll").write_text("Sita B-PER\nआई O\n", encoding="utf-8")
    Path("b.conll.gz").write_bytes(gzip.compress(b"Ravi B-PER\n"))
    read = sentences_of(["a.conll", "b.conll.gz"])
    assert read.table["words"].to_pylist() == [["Sita", "आई"], ["Ravi"]]
    assert [read.location(row) for row in (0, 1)] == ["a.conll:1", "b.conll.gz:1"]
    found = problems_raised(lambda: sentences_of("a.conll", delimiter=";", quoting="none"))
    assert found == ["--delimiter not-of-this-task", "--quoting not-of-this-task"]


def test_tags_that_parquet_declares_are_the_tags() -> None:
    tags = datasets.List(datasets.ClassLabel(names=["O", "B-PER"]))
    features = datasets.Features({"text": datasets.List(datasets.Value("string")), "label": tags})
    datasets.Dataset.from_dict({"text": [["Sita", "आई"]], "label": [[1, 0]]}, features).to_parquet("f.parquet")
    assert sentences_of("f.parquet").table["tags"].to_pylist() == [["B-PER", "O"]]


@pytest.mark.parametrize(("words", "tags"), [("tokens", "ner_tags"), ("words", "ner")])
def test_lists_with_usual_names_are_words_and_their_tags(words: str, tags: str) -> None:
    classes = datasets.List(datasets.ClassLabel(names=["O", "B-PER", "I-PER"]))
    texts = datasets.List(datasets.Value("string"))
    features = datasets.Features(
        {"id": datasets.Value("string"), words: texts, tags: classes, "text": datasets.Value("string")}
    )
    rows = {"id": ["0"], words: [["Sita", "आई"]], tags: [[1, 0]], "text": ["Sita आई"]}
    datasets.Dataset.from_dict(rows, features).to_parquet("f.parquet")
    assert sentences_of("f.parquet").table.select(["words", "tags"]).to_pylist() == [
        {"words": ["Sita", "आई"], "tags": ["B-PER", "O"]}
    ]
    Path("f.jsonl").write_text(json.dumps({words: ["Sita"], tags: ["B-PER"], "pos": ["NN"]}), encoding="utf-8")
    assert sentences_of("f.jsonl").table["tags"].to_pylist() == [["B-PER"]]


def test_a_long_list_of_bad_rows_is_cut_after_ten() -> None:
    lines = ["[]", "{", '{"text": {}}', '{"text": "a", "text": "b"}', "{} {}"]
    Path("f.jsonl").write_text('{"text": "a", "label": "x"}\n' + "".join(f"{line}\n" * 4 for line in lines))
    error = refusal_of("f.jsonl")
    listed = [each for each in error.problems if each.code != "more-bad-rows"]
    assert [str(each.value) for each in listed] == [f"f.jsonl:{line}" for line in range(2, 12)]
    more = {each.details["like"]: each.details["count"] for each in error.problems if each not in listed}
    assert more == {"invalid-json": 4, "value-of-wrong-type": 2, "key-duplicate": 4}


def test_a_run_and_its_evaluation_read_files_as_they_lie_about(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("good film;good\nbad film;bad\n" * 4, encoding="utf-8")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"fine film,good\npoor film,bad\n" * 4))
    write_xlsx(str(tmp_path / "v.xlsx"), [["Sentence", "category"], ["so so", "good"], ["so bad", "bad"]])
    script, out = str(ROOT / "scripts/train_sentiment.py"), str(tmp_path / "out")
    flags = ["--global_batch_size", "8", "--per_device_train_batch_size", "8", "--max_steps", "1", "--output_dir", out]
    files = ["--train_file", *(str(tmp_path / name) for name in ("a.csv", "b.csv.gz")), "--column_names", "text,label"]
    job = start([*python(), script, *flags, *files, "--validation_file", str(tmp_path / "v.xlsx")])
    assert job.returncode == 0, job.stderr
    assert "separated by ;" in job.stderr
    assert "reading column Sentence as the text and column category as the label" in job.stderr
    recipe = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["train_file"] == [str(tmp_path / "a.csv"), str(tmp_path / "b.csv.gz")]
    test = ["--test_file", str(tmp_path / "*.csv*")]
    job = start([*python(), "indictune/__main__.py", "evaluate", "--model", out, *test])
    assert job.returncode == 0, job.stderr
    scores = json.loads((tmp_path / "out" / "evaluation" / "_" / "metrics.json").read_text(encoding="utf-8"))
    assert scores["test"]["num_examples"] == 16


def test_tweets_of_sentimix_are_read_as_rows_with_one_label() -> None:
    file = str(ROOT / "tests/inputs/tweets_sentimix.txt")
    assert rows_of(load(file)) == [
        ("@ lata_d kya movie thi 😍", "positive"),
        ("bakwaas meta no tab here", "negative"),
        ("ok", "neutral"),
    ]
    assert load(file).rows["train"].location(1) == f"{file}:9"
    Path("t.txt").write_text("meta\t7\nacha\tHin\nmeta\t8\tpositive\nok\tEng\n\nlost\tEng\n", encoding="utf-8")
    with pytest.raises(UserError) as raised:
        load("t.txt")
    found = [(each.code, each.value) for each in raised.value.problems]
    assert found == [("tweet-without-meta", "t.txt:6"), ("no-label", "t.txt:1")]
    Path("t.txt").write_text("a text\n", encoding="utf-8")
    assert refusal_of("t.txt").code == "file-kind-unknown"
