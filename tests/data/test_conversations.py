"""Conversations: the rows of a run from every kind of file, and every problem of them in one raise."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from indictune.config.chat_arguments import ChatDataArguments
from indictune.data import cache as rows_module
from indictune.data.bad_rows import REJECTED, BadRows
from indictune.data.chat import conversations
from indictune.data.chat.conversations import Conversations
from indictune.data.read import hub_datasets, read_files
from tests.data.chats import load, load_test_file
from tests.problems import problems_raised

Row = dict[str, Any]
Write = Callable[[str, list[Row]], str]


def of_file(path: str) -> Conversations:
    """The rows of a file that is evaluated."""
    return load_test_file(path)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.chdir(tmp_path)

    def write_file(name: str, rows: list[Row]) -> str:
        if name.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist(rows), name)
        else:
            text = json.dumps(rows) if name.endswith(".json") else "".join(json.dumps(row) + "\n" for row in rows)
            Path(name).write_text(text, encoding="utf-8")
        return name

    return write_file


def chat(prompt: str, answer: str, **others: Any) -> Row:
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **others}


def in_lists(row: Row, **others: Any) -> Row:
    """The same as prompt and completion."""
    return {"prompt": row["messages"][:-1], "completion": row["messages"][-1:], **others}


def texts_of(rows: Conversations) -> list[list[str]]:
    return [[message["content"] for message in messages] for messages in rows.table["messages"].to_pylist()]


def problems_of(**arguments: Any) -> list[str]:
    return problems_raised(lambda: load(ChatDataArguments(**arguments)))


def test_a_table_has_messages_languages_and_lines(write: Write) -> None:
    train = write("train.jsonl", [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}])
    splits = load(ChatDataArguments(train_file=train))
    assert splits.rows["train"].table.schema == pa.schema(
        [
            ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
            ("language", pa.string()),
            ("line", pa.int64()),
            ("as_written", pa.bool_()),
        ]
    )
    assert splits.rows["train"].table.to_pylist() == [
        {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "language": "und-Latn",
            "line": 1,
            "as_written": False,
        }
    ]
    assert (splits.rows["train"].source, splits.rows["train"].origin) == ("train.jsonl", "--train_file")
    assert not conversations.are_as_written(splits.rows)
    assert (list(splits.rows), splits.notes) == (["train"], [])


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("a.jsonl", ["a.jsonl:1", "a.jsonl:2"]),
        ("a.JSONL", ["a.JSONL:1", "a.JSONL:2"]),
        ("a.json", ["a.json:1", "a.json:1"]),
        ("a.parquet", ["a.parquet row 1", "a.parquet row 2"]),
    ],
)
@pytest.mark.parametrize(
    "rows",
    [
        [chat("a", "b", language=None), chat("c", "d", language="ta")],
        [{"prompt": "a", "completion": "b", "language": None}, {"prompt": "c", "completion": "d", "language": "ta"}],
        [in_lists(chat("a", "b"), language=None), in_lists(chat("c", "d"), language="ta")],
        [
            {"instruction": "a", "output": "b", "history": [], "language": None},
            {"instruction": "c", "output": "d", "history": None, "language": "ta"},
        ],
        [
            {"interactions": [["a", "b"]], "language": None},
            {"interactions": [["c", "d"], []], "language": "ta"},
        ],
        [
            {"prompt": "a", "chosen": chat("a", "b")["messages"], "language": None, **chat("a", "b")},
            {"prompt": "c", "chosen": chat("c", "d")["messages"], "language": "ta", **chat("c", "d")},
        ],
    ],
)
def test_every_kind_of_file_holds_every_form(write: Write, name: str, places: list[str], rows: list[Row]) -> None:
    loaded = of_file(write(name, rows))
    assert texts_of(loaded) == [["a", "b"], ["c", "d"]]
    assert loaded.table["language"].to_pylist() == ["und-Latn", "ta"]
    assert [loaded.location(index) for index in range(len(loaded))] == places
    assert loaded.origin == "--test_file"


def test_parquet_holds_typed_parts_and_history(write: Write) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": role, "content": parts} for role in ("user", "assistant")]
    assert texts_of(of_file(write("a.parquet", [{"messages": messages}]))) == [["ab", "ab"]]
    row = {"instruction": "c", "output": "d", "history": [["a", "b"]]}
    assert texts_of(of_file(write("b.parquet", [row]))) == [["a", "b", "c", "d"]]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_rejected_answer_is_reported_by_0_as_pandas_writes_it(write: Write, name: str) -> None:
    rows: list[Row] = [{"prompt": "a", "completion": "b", "label": label} for label in (1, 0)]
    location = "a.parquet row 2" if name == "a.parquet" else "a.jsonl:2"
    assert problems_raised(lambda: of_file(write(name, rows))) == [f"--test_file {location} answer-rejected"]


def test_json_may_hold_its_rows_as_data_and_numbers_are_texts(write: Write) -> None:
    write("a.json", [])
    Path("a.json").write_text('{"version": 1, "data": [\n{"prompt": 2,\n"completion": 4.0}\n]}')
    loaded = of_file("a.json")
    assert texts_of(loaded) == [["2", "4.0"]]
    assert loaded.location(0) == "a.json:2"


def test_only_plain_texts_are_as_written(write: Write) -> None:
    assert of_file(write("a.jsonl", [{"prompt": "a", "completion": "b"}])).table["as_written"].to_pylist() == [True]
    for row in (chat("a", "b"), in_lists(chat("a", "b")), {"instruction": "a", "output": "b"}):
        assert of_file(write("a.jsonl", [row])).table["as_written"].to_pylist() == [False]


def test_a_row_names_its_language_or_its_script_decides(write: Write) -> None:
    system = [{"role": "system", "content": "Answer in Hindi, please, whatever you are asked."}]
    rows = [
        chat("नमस्ते", "b", language=" mr "),
        chat("नमस्ते", "b", language=" "),
        chat("ab", "నచ్చింది", language=["te"]),
        {"messages": system + chat("வணக்கம்", "b")["messages"]},
    ]
    loaded = of_file(write("a.jsonl", rows))
    assert loaded.table["language"].to_pylist() == ["mr", "hi", "te", "ta"]


def test_order_and_lines_across_chunks(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "_CHUNK_ROWS", 2)
    monkeypatch.setattr(read_files, "CHUNK_ROWS", 3)
    rows = [chat(f"q{index}", "a") for index in range(7)]
    for name in ("a.jsonl", "a.parquet"):
        table = of_file(write(name, rows)).table
        assert [messages[0]["content"] for messages in table["messages"].to_pylist()] == [f"q{i}" for i in range(7)]
        assert table["line"].to_pylist() == [1, 2, 3, 4, 5, 6, 7]
        assert table["messages"].num_chunks == 4


def test_rows_in_train_and_held_out_are_reported(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "_CHUNK_ROWS", 2)
    monkeypatch.setattr(rows_module, "_LEAK_BATCHES", 1)
    system = {"role": "system", "content": "c"}
    with_system = {"messages": [system, *chat("a", "b")["messages"]]}
    train = [chat("a", "b"), chat("c", "d"), chat("a", "b"), chat("a", "x"), chat("ab", "c"), with_system]
    validation = [chat("e", "f"), chat("z", "z"), chat("a", "b")]
    splits = load(
        ChatDataArguments(
            train_file=write("train.jsonl", train),
            validation_file=write("val.jsonl", validation),
            test_file=write("test.jsonl", [{"instruction": "c", "output": "d"}, {"instruction": "a", "output": "bc"}]),
        )
    )
    assert splits.notes == [
        "train.jsonl: 2 of 6 training rows also stand in val.jsonl, whose scores will look too good; "
        "remove them from one of the two.",
        "train.jsonl: 1 of 6 training rows also stand in test.jsonl, whose scores will look too good; "
        "remove them from one of the two.",
    ]
    assert len(splits.rows["train"]) == 6


def test_a_second_call_reads_no_file_again(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ChatDataArguments(
        train_file=write("train.jsonl", [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]),
        test_file=write("test.jsonl", [{"prompt": "a", "completion": "b"}]),
    )
    first = load(args)
    assert len(first.notes) == 1  # of a row in both files
    monkeypatch.setattr(conversations, "messages_of", lambda *_: pytest.fail("read again"))
    second = load(args)
    assert second.folder == first.folder
    assert (second.notes, second.rows["train"].origin) == (first.notes, "--train_file")
    assert conversations.are_as_written(second.rows)
    assert second.rows["train"].table.equals(first.rows["train"].table)
    assert second.rows["train"].location(1) == "train.jsonl:2"
    assert texts_of(second.rows["test"]) == [["a", "b"]]


def test_rows_are_read_anew_when_a_file_changes(write: Write) -> None:
    args = ChatDataArguments(train_file=write("train.jsonl", [chat("a", "b")]))
    first = load(args)
    write("train.jsonl", [chat("a", "c")])
    second = load(args)
    assert second.folder != first.folder
    assert texts_of(second.rows["train"]) == [["a", "c"]]


def test_problems_are_reported_every_time(write: Write) -> None:
    files = {"train_file": write("train.jsonl", [chat("a", "")]), "test_file": write("test.jsonl", [chat("a", "b")])}
    first = problems_of(**files)
    assert len(first) == 1
    assert problems_of(**files) == first


def test_texts_and_messages_are_not_mixed(write: Write) -> None:
    plain = write("plain.jsonl", [{"prompt": "a", "completion": "b"}])
    chats = write("chats.jsonl", [chat("c", "d"), {"instruction": "e", "output": "f"}])
    assert problems_of(train_file=plain, validation_file=chats, test_file=plain) == [
        "--validation_file chats.jsonl:1 forms-mixed"
    ]
    mixed = write("mixed.jsonl", [{"prompt": "a", "completion": "b"}, in_lists(chat("a", "b"))])
    assert problems_of(train_file=mixed) == ["--train_file mixed.jsonl:2 forms-mixed"]
    splits = load(ChatDataArguments(train_file=chats))
    assert texts_of(splits.rows["train"]) == [["c", "d"], ["e", "f"]]


def test_all_problems_of_all_files_come_at_once(write: Write) -> None:
    train = write("train.jsonl", [chat("a", "b"), chat("a", ""), chat("", "b"), {"text": "a"}])
    with open(train, "a") as file:
        file.write("[1]\n{")
    validation = write("val.jsonl", [{"messages": []}])
    problems = problems_of(train_file=train, validation_file=validation, test_file="a.jsonl")
    assert problems == [
        "--train_file train.jsonl:2 no-answer",
        "--train_file train.jsonl:3 no-prompt",
        "--train_file train.jsonl:4 unknown-form",
        "--train_file train.jsonl:5 not-an-object",
        "--train_file train.jsonl:6 invalid-json",
        "--validation_file val.jsonl:1 answer-not-last",
        "--test_file a.jsonl no-such-file",
    ]


def test_five_rows_of_a_kind_are_listed_then_counted(write: Write) -> None:
    rows = [chat("a", "")] * 5 + [chat("", "b")] * 8 + [chat("a", "b")]
    problems = problems_of(train_file=write("train.jsonl", rows))
    assert problems == [
        *(f"--train_file train.jsonl:{line} no-answer" for line in range(1, 6)),
        *(f"--train_file train.jsonl:{line} no-prompt" for line in range(6, 11)),
        "--train_file train.jsonl more-bad-rows",
    ]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.csv", "prompt,completion\na,b\n", " file-kind-unknown"),
        ("a.tsv", "prompt\tcompletion\na\tb\n", " file-kind-unknown"),
        ("a.jsonl", "\n", " no-rows"),
        ("a.json", "[]", " no-rows"),
        ("a.json", '{"messages": []}', ":1 answer-not-last"),
        ("a.json", "[1]", ":1 not-an-object"),
        ("a.parquet", "PAR1 not", " rows-unreadable"),
    ],
)
def test_what_cannot_be_read_is_named(write: Write, name: str, content: str, problem: str) -> None:
    Path(name).write_text(content)
    assert problems_raised(lambda: of_file(name)) == [f"--test_file {name}{problem}"]


def test_an_empty_parquet_file_is_a_problem(write: Write) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), "a.parquet")
    assert problems_raised(lambda: of_file("a.parquet")) == ["--test_file a.parquet no-rows"]


def test_built_in_chats_have_three_splits_and_files_replace_them(write: Write) -> None:
    splits = load(
        ChatDataArguments(dataset_name="builtin:chats", test_file=write("own.jsonl", [chat("my own", "row")]))
    )
    assert set(splits.rows["train"].table["language"].to_pylist()) == {"hi", "te", "ta", "en"}
    assert splits.rows["train"].location(0).endswith("samples/chats/train.jsonl:1")
    assert splits.rows["train"].origin == "--dataset_name builtin:chats"
    assert texts_of(splits.rows["test"]) == [["my own", "row"]]
    assert splits.notes == []


def test_other_built_in_data_are_no_conversations() -> None:
    assert problems_of(dataset_name="builtin:tweets") == ["--dataset_name builtin:tweets no-such-name"]


@pytest.fixture
def hub_folder(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder laid out like a dataset on the Hub."""
    import datasets

    monkeypatch.setattr(hub_datasets, "CHUNK_ROWS", 2)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    Path("chats").mkdir()
    for split in ("train", "validation", "test"):
        write(f"chats/{split}.parquet", [chat(f"{split} {index}", "a", id=index) for index in range(3)])
    return "./chats"


def test_rows_of_a_hub_dataset(hub_folder: str, write: Write) -> None:
    own = write("own.jsonl", [chat("own", "a")])
    splits = load(ChatDataArguments(dataset_name=hub_folder, validation_file=own))
    assert texts_of(splits.rows["train"]) == [["train 0", "a"], ["train 1", "a"], ["train 2", "a"]]
    assert splits.rows["train"].table["line"].to_pylist() == [1, 2, 3]
    assert splits.rows["train"].location(2) == "./chats/train row 3"
    assert texts_of(splits.rows["validation"]) == [["own", "a"]]
    assert texts_of(splits.rows["test"])[0] == ["test 0", "a"]


def test_bad_rows_of_a_hub_dataset_are_named_by_split(hub_folder: str, write: Write) -> None:
    write("chats/test.parquet", [chat("a", "b"), chat("a", "")])
    assert problems_of(dataset_name=hub_folder) == ["--dataset_name ./chats ./chats/test row 2 no-answer"]


def test_a_hub_split_without_rows_is_a_problem() -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"messages": []}, split="validation")
    records = hub_datasets.HubSplit(rows).records(BadRows("validation"))
    assert problems_raised(lambda: next(records)) == ["validation no-rows"]


_SFT = Path(__file__).parents[3] / "shared" / "data" / "sft"


@pytest.mark.parametrize(
    ("name", "languages"),
    [
        ("alpaca_en_demo.json", {"en": 996, "und-Latn": 3}),
        ("v1_sft_demo.jsonl", {"en": 465, "und-Latn": 1, "und": 34}),
        ("xquad_hi.messages.jsonl", {"hi": 826}),
    ],
)
def test_real_conversations_are_read_whole(name: str, languages: dict[str, int]) -> None:
    path = _SFT / name
    if not path.exists():
        pytest.skip(f"no real data at {path}")
    loaded = of_file(str(path))
    assert Counter(loaded.table["language"].to_pylist()) == languages
    assert {len(messages) for messages in loaded.table["messages"].to_pylist()} == {2}
    assert loaded.table["messages"].null_count == 0


def test_each_instance_of_a_real_instruction_is_a_row() -> None:
    path = _SFT / "seed_tasks.jsonl"
    if not path.exists():
        pytest.skip(f"no real data at {path}")
    written = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    loaded = of_file(str(path))
    assert len(loaded) == sum(len(row["instances"]) for row in written) >= len(written) == 175


def test_bad_conversations_are_left_out_and_written_down(write: Write) -> None:
    rows = [chat("a", "b"), chat("a", ""), {"text": "क"}, {"instruction": "a", "output": ""}, chat("c", "d")]
    train = write("train.jsonl", rows)
    with open(train, "a") as file:
        file.write("[1]\n{")
    args = ChatDataArguments(train_file=train, bad_rows="quarantine", max_bad_fraction=0.8)
    for _ in range(2):  # the second time from the cache
        splits = load(args)
        assert texts_of(splits.rows["train"]) == [["a", "b"], ["c", "d"]]
        (note,) = splits.notes
        assert note.startswith("--train_file train.jsonl: 5 bad rows were left out, first train.jsonl:2")
        rejected = [json.loads(line) for line in (splits.folder / REJECTED).read_bytes().splitlines()]
        assert [(row["file"], row["line"]) for row in rejected] == [(train, line) for line in (2, 3, 4, 6, 7)]
        assert [row["read"] for row in rejected] == [*rows[1:4], ["1"], "{"]
        assert rejected[2]["reason"].endswith("[no-answer]")


def test_too_many_bad_conversations_stop_the_run(write: Write) -> None:
    train = write("train.jsonl", [chat("a", "b")] * 8 + [chat("a", "")] * 2)
    problems = problems_of(train_file=train, bad_rows="quarantine", max_bad_fraction=0.1)
    assert problems == [
        "--train_file train.jsonl:9 no-answer",
        "--train_file train.jsonl:10 no-answer",
        "--train_file train.jsonl too-many-bad-rows",
    ]
