"""`--train_files` and `--language_sampling_alpha`: several sources of rows, in a mix that every rank has alike."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml

from indictune.config.arguments import DataArguments
from indictune.config.chat_arguments import ChatDataArguments
from indictune.config.recipe import read_recipe
from indictune.data.cache import StoredRows, map_table, write_table
from indictune.data.chat import conversations
from indictune.data.load_rows import load_splits
from indictune.data.read import row_sources
from indictune.data.read.row_sources import entries_of
from indictune.data.row_choice import Mixture, Splits, ValidationSplit
from indictune.errors import Problems
from tests.problems import problems_raised
from tests.ranks.launching import Run, accelerate, distance, python, train
from tests.refusals import refused

AS_IT_IS = Mixture(alpha=1, seed=5)


def write(folder: Path, name: str, rows: int, **columns: Any) -> str:
    """A file of texts `<name> 0`, `<name> 1`, ...; every second one is good."""
    made = [{"text": f"{name} {n}", "label": ["good", "bad"][n % 2], **columns} for n in range(rows)]
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, made)), encoding="utf-8")
    return str(folder / f"{name}.jsonl")


def entry(path: str, **keys: Any) -> str:
    return json.dumps({"path": path, **keys})


def mixed(mixture: Mixture, *entries: str) -> Splits[StoredRows]:
    return load_splits(DataArguments(train_files=list(entries)), mixture=mixture)


def times(splits: Splits[StoredRows], column: str = "text") -> Counter[str]:
    """How often each text, or its first word, or its language, comes."""
    return Counter(splits.rows["train"].table[column].to_pylist())


def of_files(splits: Splits[StoredRows]) -> Counter[str]:
    return Counter(text.split()[0] for text in splits.rows["train"].table["text"].to_pylist())


def test_a_weight_says_how_often_each_row_comes(tmp_path: Path) -> None:
    files = [write(tmp_path, "one", 10), write(tmp_path, "two", 10), write(tmp_path, "half", 10)]
    splits = mixed(AS_IT_IS, files[0], entry(files[1], weight=2.5), entry(files[2], weight=0.5))
    assert of_files(splits) == {"one": 10, "two": 25, "half": 5}
    assert sorted(times(splits)[f"two {n}"] for n in range(10)) == [2] * 5 + [3] * 5
    assert {times(splits)[f"one {n}"] for n in range(10)} == {1}


def test_the_draw_follows_the_seed_alone(tmp_path: Path) -> None:
    file = entry(write(tmp_path, "some", 40), weight=0.5)
    drawn = [times(mixed(Mixture(1, seed), file)) for seed in (5, 5, 6)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert [each.total() for each in drawn] == [20, 20, 20]


@pytest.mark.parametrize(
    ("alpha", "expected"), [(1.0, [900, 100]), (0.5, [750, 250]), (0.0, [500, 500])], ids=["as-is", "root", "even"]
)
def test_a_language_gets_a_share_by_the_power_of_its_rows(alpha: float, expected: list[int]) -> None:
    rows = np.array([[900, 100]])
    assert Mixture(alpha, 0).wanted(rows, [1.0]).tolist() == [expected]


def test_languages_are_balanced_over_files_after_their_weights() -> None:
    """After weights, language 0 has 100 + 2 x 100 rows and language 1 has 2 x 50: 300 and 100, which become 200."""
    rows = np.array([[100, 0], [100, 50]])
    assert Mixture(0, 0).wanted(rows, [1.0, 2.0]).tolist() == [[67, 0], [133, 200]]


@pytest.mark.more
def test_the_language_of_an_entry_is_that_of_rows_without_one(tmp_path: Path) -> None:
    named = entry(write(tmp_path, "named", 3, language="te"), language="mr")
    unnamed = entry(write(tmp_path, "unnamed", 4), language="mr")
    assert times(mixed(AS_IT_IS, named, unnamed, write(tmp_path, "none", 2)), "language")["te"] == 3
    assert times(mixed(AS_IT_IS, named, unnamed), "language")["mr"] == 4


def test_conversations_are_mixed_alike(tmp_path: Path) -> None:
    rows = [{"instruction": f"ask {n}", "output": "answer"} for n in range(6)]
    (tmp_path / "chats.json").write_text(json.dumps(rows), encoding="utf-8")
    args = ChatDataArguments(train_files=[entry(str(tmp_path / "chats.json"), weight=2, language="mr")])
    problems = Problems()
    sources = conversations.chat_sources(args, problems)
    found = conversations.load_conversations(sources, args, problems, None, AS_IT_IS)
    assert len(found.rows["train"]) == 12
    assert found.rows["train"].table["language"].unique().to_pylist() == ["mr"]


def test_each_label_keeps_a_row(tmp_path: Path) -> None:
    schema = pa.schema([("label", pa.string()), ("language", pa.string()), ("line", pa.int64())])
    rows = [{"label": "rare" if n == 7 else "usual", "language": "hi", "line": n + 1} for n in range(30)]
    file = tmp_path / "train.arrow"
    entries = entries_of([entry(write(tmp_path, "few", 1), weight=0.1)])
    for seed in range(10):
        write_table(file, schema, [pa.RecordBatch.from_pylist(rows, schema)])
        Mixture(1, seed).apply(tmp_path, entries, keeps_labels=True)
        assert {"rare", "usual"} == set(map_table(file)["label"].to_pylist())


def test_rows_keep_the_place_they_come_from(tmp_path: Path) -> None:
    files = [entry(write(tmp_path, "one", 2)), entry(write(tmp_path, "two", 2), weight=2)]
    rows = mixed(AS_IT_IS, *files).rows["train"]
    assert [rows.location(index) for index in range(6)] == [
        *(f"{tmp_path}/one.jsonl:{line}" for line in (1, 2)),
        *(f"{tmp_path}/two.jsonl:{line}" for line in (1, 1, 2, 2)),
    ]


def test_held_out_rows_are_none_of_the_mix(tmp_path: Path) -> None:
    args = DataArguments(train_files=[entry(write(tmp_path, "some", 50), weight=3)])
    splits = load_splits(args, validation_split=ValidationSplit(0.2, 1), mixture=AS_IT_IS)
    texts = {split: set(rows.table["text"].to_pylist()) for split, rows in splits.rows.items()}
    assert (len(splits.rows["train"]), len(splits.rows["validation"])) == (120, 10)
    assert not texts["train"] & texts["validation"]


def test_patterns_stand_for_their_files(tmp_path: Path) -> None:
    for name, rows in (("a-1", 2), ("a-2", 3), ("b", 1)):
        write(tmp_path, name, rows)
    splits = mixed(AS_IT_IS, entry(f"{tmp_path}/a-*.jsonl", weight=2), f"{tmp_path}/b.jsonl")
    assert of_files(splits) == {"a-1": 4, "a-2": 6, "b": 1}


@pytest.mark.parametrize(
    "word",
    [
        '{"path": "a.csv", "wieght": 2}',
        '{"weight": 2}',
        '{"path": "a.csv", "weight": 0}',
        '{"path": "a.csv", "weight": true}',
        '{"path": "a.csv", "weight": "2"}',
        '{"path": "a.csv", "language": 3}',
        '{"path": "a.csv"',
    ],
)
def test_an_entry_that_cannot_be_meant_is_refused(word: str) -> None:
    with refused("train-files-entry", word, flag="--train_files"):
        entries_of([word])


def test_a_file_in_two_entries_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "same", 1)
    with refused("file-in-two-entries", file):
        entries_of([file, f"{tmp_path}/*.jsonl"])


def test_all_entries_are_reported_together(tmp_path: Path) -> None:
    words = ["{", str(tmp_path / "none-*.csv")]
    args, problems = DataArguments(train_files=words), Problems()
    row_sources.text_sources(args, problems)
    assert [each.code for each in problems] == ["train-files-entry", "no-files-match"]


def test_one_source_of_training_rows_is_named() -> None:
    assert problems_raised(lambda: DataArguments(train_file="a.csv", train_files=["b.csv"])) == [
        "--train_file a.csv two-data-sources"
    ]
    assert problems_raised(lambda: DataArguments(train_files=["b.csv"], dataset_name="builtin:tweets")) == [
        "--dataset_name builtin:tweets two-data-sources"
    ]
    assert problems_raised(lambda: DataArguments()) == ["--train_file no-training-rows"]
    for alpha in (-0.1, 1.5, float("nan")):
        with refused("alpha-out-of-range", flag="--language_sampling_alpha"):
            DataArguments(train_file="a.csv", language_sampling_alpha=alpha)


JOB = """
model_name_or_path: builtin:tiny-indic-bert
language_sampling_alpha: 0.5
dropout: 0
max_length: 16
global_batch_size: 16
per_device_train_batch_size: 8
max_steps: 6
learning_rate: 1e-3
lr_scheduler_type: constant
logging_steps: 1
eval_strategy: 'no'
load_best_model_at_end: false
save_strategy: 'no'
validation_split: 0
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    files = [
        {"path": write(folder, "hindi", 41, language="hi")},
        {"path": write(folder, "marathi", 9), "weight": 1.5, "language": "mr"},
    ]
    (folder / "job.yaml").write_text(JOB + yaml.safe_dump({"train_files": files}), encoding="utf-8")
    return folder / "job.yaml"


@pytest.mark.more
def test_two_ranks_train_on_the_mix_of_one(job: Path, tmp_path: Path) -> None:
    alone = train(python(), tmp_path / "alone", "--config", str(job))
    both = train(accelerate("ddp", 2), tmp_path / "both", "--config", str(job))
    assert both.series("loss") == pytest.approx(alone.series("loss"), abs=1e-5)
    assert distance(both.weights, alone.weights) < 1e-3
    again = read_recipe(["--config", str(alone.folder / "recipe.yaml")], (DataArguments,))
    assert [json.loads(word) for word in again.values["train_files"]][1]["weight"] == 1.5
    assert said_mix(alone) == ["hindi.jsonl hi 41 35 63.6%", "marathi.jsonl mr 9 20 36.4%"]


@pytest.mark.more
def test_a_resumed_run_mixes_as_the_first_one_did(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--config", str(job), "--save_strategy", "steps", "--save_steps", "3"]
    whole = train(python(), tmp_path / "whole", *flags)
    shutil.copytree(whole.folder, tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoint-6")
    for name in ("metrics.json", "model.safetensors"):
        (tmp_path / "again" / name).unlink()  # as if it had been killed after step 3
    monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path / "cache"))  # the mix is made anew
    again = train(python(), tmp_path / "again", *flags, "--resume_from_checkpoint", "auto")
    assert distance(again.weights, whole.weights) == 0


def said_mix(run: Run) -> list[str]:
    """The table of the mix in the log, a line for each file and language, without the folders."""
    log = (run.folder / "logs" / "rank-0.log").read_text(encoding="utf-8").splitlines()
    lines = [line.split() for line in log if ".jsonl" in line and line.rstrip().endswith("%")]
    return [" ".join([Path(words[-5]).name, *words[-4:]]) for words in lines]
