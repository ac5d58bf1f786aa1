"""Readers: a cell is what stands in the file, and what is broken is named by file and line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from indictune.data.bad_rows import BadRows, Record, row_location
from indictune.data.columns import Wanted, normalise_label, text_batches
from indictune.data.read import read_files
from indictune.errors import UserError
from tests.data.tables import read_table

COLUMNS = {"text": "text", "label": "label"}
Write = Callable[[str, str | bytes], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write_file


def rows_of(path: str, optional: dict[str, str] | None = None) -> list[tuple[object, ...]]:
    return [tuple(row.values()) for row in read_table(path, COLUMNS, optional or {}).to_pylist()]


def read_records(path: str) -> Iterator[Record]:
    return read_files.read_records(path, BadRows(path))


def problems_of(path: str, columns: dict[str, str] | None = None) -> list[str]:
    """Line and code of each problem."""
    with pytest.raises(UserError) as raised:
        read_table(path, columns or COLUMNS)
    return [f"{str(each.value).removeprefix(path)} {each.code}" for each in raised.value.problems]


def test_csv_cells_are_text_and_keep_commas_quotes_and_line_breaks(write: Write) -> None:
    path = write(
        "a.csv",
        '\ufefflabel, text ,id\r\n1,NA,7\r\n\r\n1e5,"वाह, ""क्या""\nबात",8\r\nnull,,9\r\n2,"x",',
    )
    assert rows_of(path) == [("NA", "1", 2), ('वाह, "क्या"\nबात', "1e5", 4), ("", "null", 6), ("x", "2", 7)]


def test_a_table_has_string_columns_by_role_and_int64_lines(write: Write) -> None:
    path = write("a.csv", "tweet,mood,language\na,b,hi\n")
    table = read_table(path, {"text": "tweet", "label": "mood"}, {"language": "language"})
    expected = pa.schema(
        [("text", pa.string()), ("label", pa.string()), ("language", pa.string()), ("line", pa.int64())]
    )
    assert table.schema == expected
    assert table.to_pylist() == [{"text": "a", "label": "b", "language": "hi", "line": 2}]


def test_an_optional_column_that_is_absent_is_null(write: Write) -> None:
    for path in (write("a.csv", "text,label\na,b\n"), write("a.jsonl", '{"text": "a", "label": "b"}')):
        assert rows_of(path, {"language": "language"})[0][2] is None


def test_one_column_can_play_two_roles(write: Write) -> None:
    path = write("a.csv", "text\nhello\n")
    table = read_table(path, {"text": "text", "label": "text"})
    assert table.to_pylist() == [{"text": "hello", "label": "hello", "line": 2}]


def test_tsv_is_split_at_tabs_alone(write: Write) -> None:
    assert rows_of(write("a.TSV", 'text\tlabel\na, b\tc\n"d\te"\tf\n')) == [("a, b", "c", 2), ("d\te", "f", 3)]


def test_a_cell_may_be_longer_than_the_csv_modules_own_limit(write: Write) -> None:
    long = "क" * 200_000
    assert rows_of(write("a.csv", f"text,label\n{long},1\n")) == [(long, "1", 2)]


def test_rows_keep_their_order_across_chunks(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_files, "CHUNK_ROWS", 3)
    path = write("a.csv", "text,label\n" + "".join(f"t{index},{index}\n" for index in range(8)))
    assert rows_of(path) == [(f"t{index}", str(index), index + 2) for index in range(8)]


def test_jsonl_values_are_the_text_they_are_written_as(write: Write) -> None:
    lines = [
        '{"text": "NA", "label": 1}',
        "",
        '{"label": 1.0, "text": 1e5, "other": [1]}',
        '{"text": null, "label": true}',
        '{"text": "a\u2028b", "label": NaN}',
        '{"text": -0, "label": Infinity}',
        '{"text": "\\ud83d\\ude02", "label": null}',
    ]
    assert rows_of(write("a.jsonl", "\ufeff" + "\r\n".join(lines))) == [
        ("NA", "1", 1),
        ("1e5", "1.0", 3),
        (None, "true", 4),
        ("a\u2028b", None, 5),
        ("-0", "Infinity", 6),
        ("\U0001f602", None, 7),
    ]


def test_a_key_that_an_object_lacks_is_null(write: Write) -> None:
    path = write("a.jsonl", '{"text": "a"}\n{"label": 1}\n')
    assert rows_of(path) == [("a", None, 1), (None, "1", 2)]


def test_broken_lines_and_missing_columns_come_together(write: Write) -> None:
    found = problems_of(write("a.jsonl", '{"text": "a"}\n{"text"\n'))
    assert found == [":2 invalid-json", " column-missing"]


@pytest.mark.parametrize("opening", ["", '{"data": ', '{"version": "1", "data":\n'])
def test_json_is_a_list_of_objects_or_holds_one_as_data(write: Write, opening: str) -> None:
    closing = "}" if opening else ""
    path = write(
        "a.json", f'{opening}[\n{{"text": "[,]",\n"label": 0}},\n\n {{"text": 2, "label": "b"}}\n]{closing}\n'
    )
    first = 2 + opening.count("\n")
    assert rows_of(path) == [("[,]", "0", first), ("2", "b", first + 3)]


def test_spaces_in_an_object_cost_linear_time(write: Write) -> None:
    """64 KiB of them took 7 s."""
    path = write("a.json", "{" + " " * 200_000)
    begin = time.process_time()
    assert problems_of(path) == [":1 invalid-json"]
    assert time.process_time() - begin < 1


def test_parquet_columns_of_any_scalar_type_become_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_files, "CHUNK_ROWS", 2)
    path = str(tmp_path / "a.parquet")
    texts = pa.array(["a", None, "NA"]).dictionary_encode()
    labels = pa.array([1.0, 0.5, float("nan")])
    pq.write_table(pa.table({"label": labels, "text": texts, "flag": [True, False, None]}), path)
    table = read_table(path, {"text": "text", "label": "flag"}, {"score": "label", "language": "language"})
    assert table["text"].to_pylist() == ["a", None, "NA"]
    assert table["label"].to_pylist() == ["true", "false", None]
    assert [normalise_label(score) for score in table["score"].to_pylist()] == ["1", "0.5", None]
    assert table["language"].to_pylist() == [None] * 3
    assert table["line"].to_pylist() == [1, 2, 3]
    assert row_location(path, 3) == f"{path} row 3"


def test_a_dictionary_of_numbers_becomes_text() -> None:
    scores = pa.array([0.5, float("nan"), 0.5]).dictionary_encode()
    read = pa.record_batch([scores], names=["score"])
    (batch,) = text_batches([read], {"label": "score"}, Wanted({"label": "score"}, {}), "here")
    assert batch.to_pydict() == {"label": ["0.5", None, "0.5"], "line": [1, 2, 3]}


def test_records_of_parquet_with_two_columns_of_a_name_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "f.parquet")
    arrays = [pa.array(["a"]), pa.array(["b"]), pa.array(["c"])]
    pq.write_table(pa.Table.from_arrays(arrays, names=["prompt", "completion", "completion"]), path)
    with pytest.raises(UserError) as raised:
        list(read_records(path))
    assert (raised.value.code, raised.value.problems[0].details["column"]) == ("column-duplicate", "completion")


def test_the_case_of_an_extension_does_not_matter(write: Write) -> None:
    assert rows_of(write("a.JSONL", '{"text": "a", "label": "b"}')) == [("a", "b", 1)]
    assert rows_of(write("a.Json", '[{"text": "a", "label": "b"}]')) == [("a", "b", 1)]


@pytest.mark.parametrize(
    ("label", "spelling"),
    [
        ("1", "1"),
        ("1.0", "1"),
        ("0.50", "0.50"),
        ("-1.0", "-1"),
        ("-0.0", "-0"),
        ("10", "10"),
        ("100.0", "100"),
        ("True", "true"),
        ("FALSE", "false"),
        (" Positive ", "Positive"),
        ("01", "01"),
        ("1.0.0", "1.0.0"),
        ("v1.0", "v1.0"),
        ("NA", "NA"),
        ("e\u0301", "\u00e9"),
        ("", None),
        (" ", None),
        (None, None),
    ],
)
def test_labels_have_one_spelling(label: str | None, spelling: str | None) -> None:
    assert normalise_label(label) == spelling


def test_the_same_labels_from_every_kind_of_file_are_equal(write: Write, tmp_path: Path) -> None:
    parquet = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["a", "b"], "label": [1.0, 0.5]}), parquet)
    rows = [{"text": "a", "label": 1}, {"text": "b", "label": 0.5}]
    paths = [
        parquet,
        write("a.csv", "text,label\na,1\nb,0.5\n"),
        write("b.csv", "text,label\na,1.0\nb,0.5\n"),
        write("a.jsonl", "\n".join(map(json.dumps, rows))),
        write("a.json", json.dumps(rows)),
    ]
    for path in paths:
        assert [normalise_label(str(row[1])) for row in rows_of(path)] == ["1", "0.5"]


@pytest.mark.parametrize(
    ("name", "content", "problems"),
    [
        (
            "a.csv",
            'text,label\na,1\nb,2,3\n"c\nd"\ne,4\n',
            [
                ":3 field-count",
                ":4 row-of-many-lines",
            ],
        ),
        (
            "a.csv",
            'text,label\na,1\ntext, label\nb,label\n\ufeff"text",label\nc,2\n\ufefftext,label\n',
            [
                ":3 header-repeated",
                ":5 header-repeated",
                ":7 header-repeated",
            ],
        ),
        ("a.tsv", "text\tlabel\na\n", [":2 field-count"]),
        ("a.csv", 'text,label\na,1\n"b" c,2\n', [":3 row-unreadable"]),
        ("a.csv", 'text,label\na,1\n"b,2\nc,3\n', [":3 row-unreadable"]),
        (
            "a.csv",
            b"text,label\na,1\nb\xe0\xa4,2\n\xff,3\n",
            [":3 not-utf8", ":4 not-utf8"],
        ),
        ("a.csv", b"\xff\xfet\x00\x00\xd8", [":1 not-utf8"]),
        ("a.csv", "text,label,text\na,1,b\n", [" column-duplicate"]),
        ("a.csv", "text,label\n\n", [" no-rows"]),
        ("a.csv", "", [" no-rows"]),
        ("a.jsonl", "\n \n", [" no-rows"]),
        (
            "a.jsonl",
            '{"text": "a", "label": 1}\n{"text": "b", "la\n[1]\n{"text": ["d"], "label": 2}\n',
            [
                ":2 invalid-json",
                ":3 not-an-object",
                ":4 value-of-wrong-type",
            ],
        ),
        ("a.jsonl", b'{"text": "a", "label": 1}\n{"text": "\xe0", "label": 2}', [":2 not-utf8"]),
        ("a.jsonl", '{"text": "a", "label": 1} {}', [":1 invalid-json"]),
        ("a.jsonl", "[" * 100_000, [":1 invalid-json"]),
        ("a.jsonl", '{"text": {"a": 1}, "label": 1}', [":1 value-of-wrong-type"]),
        ("a.json", "[]", [" no-rows"]),
        ("a.json", '[{"text": "a", "label": 1},\n{"text": "b" "label": 2}]', [":2 invalid-json"]),
        (
            "a.json",
            '[{"text": "a", "label": 1}\n{"text": "b", "label": 2}]',
            [":1 invalid-json"],
        ),
        ("a.json", '[{"text": "a", "label": 1},\n]', [":1 invalid-json"]),
        ("a.json", '[{"text": "a", "label": 1}', [":1 invalid-json"]),
        ("a.json", '[{"text": "a", "label": 1}] x', [":1 invalid-json"]),
        ("a.json", '{"data": [{"text": "a", "label": 1}]', [":1 invalid-json"]),
        ("a.json", '[{"text": "a", "label": 1},\n null]', [":2 not-an-object"]),
        ("a.json", '{"x": {"y": 1, "data": [{"text": "a", "label": 1}]}}', [" json-list-missing"]),
        ("a.parquet", "PAR1 not", [" rows-unreadable"]),
        ("a.docx", "x", [" file-kind-unknown"]),
    ],
)
def test_what_cannot_be_read_is_named_by_file_and_line(
    write: Write, name: str, content: str | bytes, problems: list[str]
) -> None:
    found = problems_of(write(name, content))
    assert len(found) >= len(problems)
    assert found[: len(problems)] == problems


def test_the_first_five_broken_lines_are_listed_and_the_others_counted(write: Write) -> None:
    good = '{"text": "a", "label": 1}\n'
    assert problems_of(write("a.jsonl", good + "{\n" * 4)) == [f":{line} invalid-json" for line in (2, 3, 4, 5)]
    many = problems_of(write("a.jsonl", good + "{\n" * 9))
    assert len(many) == 6
    assert many[5] == " more-bad-rows"


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.json", "a.parquet"])
def test_a_missing_column_is_reported_with_the_existing_columns(write: Write, tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name)
    if name.endswith("parquet"):
        pq.write_table(pa.table({"body": ["a"], "mood": ["b"]}), path)
    else:
        write(
            name,
            {"a.csv": "body,mood\na,b\n"}.get(name, '[{"body": "a", "mood": "b"}]'.strip("[]" * (name[-1] == "l"))),
        )
    assert problems_of(path) == [
        " column-missing",
        " column-missing",
    ]


def test_a_file_without_a_header_line_is_not_quoted_at_length(write: Write) -> None:
    path = write("a.csv", f"{'secret ' * 20},1\nb,2\n")
    with pytest.raises(UserError) as raised:
        read_table(path, COLUMNS)
    assert max(map(len, raised.value.problems[0].details["columns"].split(", "))) <= 30


def test_parquet_columns_that_hold_no_scalars_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": [["a"]], "label": [b"x"]}), path)
    found = problems_of(path)
    assert found == [" column-type", " column-type"]


def test_missing_files_and_folders(write: Write, tmp_path: Path) -> None:
    write("train.csv", "x")
    assert problems_of(str(tmp_path / "trian.csv")) == [" no-such-file"]
    assert problems_of(str(tmp_path / "no" / "a.csv")) == [" no-such-file"]
    (tmp_path / "b.csv").mkdir()
    assert problems_of(str(tmp_path / "b.csv")) == [" unreadable"]


def test_records_keep_lists_and_objects_and_have_lines(write: Write, tmp_path: Path) -> None:
    rows = [{"a": [{"b": "c", "d": None}]}, {"a": []}]
    parquet = str(tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist(rows), parquet)
    assert list(read_records(write("a.jsonl", f"{json.dumps(rows[0])}\n\n{json.dumps(rows[1])}"))) == [
        (1, rows[0]),
        (3, rows[1]),
    ]
    assert list(read_records(write("a.JSON", f"[{json.dumps(rows[0])},\n{json.dumps(rows[1])}]"))) == [
        (1, rows[0]),
        (2, rows[1]),
    ]
    assert list(read_records(parquet)) == [(1, rows[0]), (2, rows[1])]
    assert list(read_records(write("b.jsonl", '{"a": [1.50, true, NaN]}'))) == [(1, {"a": ["1.50", True, None]})]


def test_broken_records_are_reported_after_the_others(write: Write) -> None:
    bad = BadRows("a.jsonl")
    records = read_files.read_records(write("a.jsonl", '[]\n{"a": 1}\n{\n{"b": "c"}'), bad)
    assert [next(records), next(records)] == [(2, {"a": "1"}), (4, {"b": "c"})]
    assert list(records) == []
    with pytest.raises(UserError) as raised:
        bad.finish(2)
    assert [each.code for each in raised.value.problems] == ["not-an-object", "invalid-json"]
    assert raised.value.problems[0].value.endswith("a.jsonl:1")


def test_records_are_not_read_from_columns_of_text(write: Write) -> None:
    with pytest.raises(UserError) as raised:
        next(read_records(write("a.csv", "a\nb\n")))
    assert raised.value.code == "file-kind-unknown"


_SENTIMENT = Path(__file__).parents[3] / "shared" / "data" / "sentiment"


@pytest.mark.parametrize(
    ("name", "rows", "labels"),
    [
        ("hinglish_tweets.train", 13_540, 3),
        ("hinglish_tweets.validation", 1_591, 3),
        ("tamil_codemix.train", 31_694, 5),
        ("tamil_codemix.validation", 3_522, 5),
        ("marathi_tweets.train", 12_000, 3),
        ("marathi_tweets.validation", 1_500, 3),
    ],
)
def test_real_tweets_are_read_whole(name: str, rows: int, labels: int) -> None:
    path = _SENTIMENT / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"no real data at {path}")
    table = read_table(str(path), COLUMNS)
    assert table.num_rows == rows
    assert table["line"].to_pylist() == list(range(1, rows + 1))
    assert len(table["label"].unique()) == labels
    assert table["text"].null_count == 0
