"""Configurations, splits and parts of a dataset: which rows a run takes, of which language, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest

from indictune.config.arguments import DataArguments
from indictune.config.chat_arguments import ChatDataArguments
from indictune.data.cache import StoredRows
from indictune.data.languages import language_named
from indictune.data.load_rows import load_splits
from indictune.data.read.row_sources import SplitPart, parts_named, text_sources
from indictune.errors import Problems
from tests.data.chats import load as load_chats
from tests.problems import problems_raised

CONFIGS = """---
configs:
- config_name: translation-hi
  data_files: [{split: train, path: hi.jsonl}, {split: test, path: hi.jsonl}]
- config_name: mix
  data_files: [{split: ta, path: ta.jsonl}, {split: train, path: ta.jsonl}, {split: validation, path: hi.jsonl}]
---
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    made = tmp_path / "set"
    made.mkdir()
    (made / "README.md").write_text(CONFIGS, encoding="utf-8")
    for language in ("hi", "ta"):
        rows = [{"text": f"{language} {n}", "label": "xy"[n % 2]} for n in range(10)]
        (made / f"{language}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return made


def load(config: Any, *parts: str) -> Mapping[str, StoredRows]:
    args = DataArguments(dataset_name="set", dataset_config_name=config, dataset_splits=list(parts))
    return load_splits(args).rows


def texts(rows: StoredRows) -> list[str]:
    return list(rows.texts)


@pytest.mark.parametrize("count", [0, 1, 7, 100])
@pytest.mark.parametrize(
    "slices", ["", "[:90%]", "[90%:]", "[33%:67%]", "[:3]", "[2:]", "[-3:]", "[:-2]", "[-10%:]", "[5:2]"]
)
def test_a_part_is_what_datasets_means_by_it(count: int, slices: str) -> None:
    (part,) = parts_named([f"train=hi{slices}"])["train"]
    rows = datasets.Dataset.from_dict({"n": list(range(count))})
    first, end = part.bounds(lambda: count)
    if slices == "[5:2]" or count < 7:
        assert list(range(count))[first:end] == list(range(count))[slice(*bounds_of(slices, count))]
        return
    reads = datasets.ReadInstruction.from_spec(f"hi{slices}").to_absolute({"hi": count})
    assert rows[first:end]["n"] == rows[reads[0].from_ : reads[0].to]["n"]


def bounds_of(slices: str, count: int) -> tuple[int, int]:
    """By the rules of Python's slices, shares rounded."""
    words = (slices or "[:]")[1:-1].split(":")
    numbers = [round(int(each[:-1]) * count / 100) if each.endswith("%") else int(each) for each in words if each]
    start, stop = (numbers[0] if words[0] else None), (numbers[-1] if words[1] else None)
    first, end, _ = slice(start, stop).indices(count)
    return first, end


def test_parts_of_several_splits_and_configurations() -> None:
    rows = load(
        "mix", "train=ta[:30%]+translation-hi/train[8:]", "validation=ta[30%:]", "test=translation-hi/test[-1:]"
    )
    assert texts(rows["train"]) == ["ta 0", "ta 1", "ta 2", "hi 8", "hi 9"]
    assert texts(rows["validation"]) == [f"ta {n}" for n in range(3, 10)]
    assert texts(rows["test"]) == ["hi 9"]
    assert rows["train"].table["language"].to_pylist() == ["ta"] * 3 + ["hi"] * 2
    assert [Path(rows["train"].location(n)).name for n in (0, 3)] == ["ta.jsonl:1", "hi.jsonl:9"]


def test_several_configurations_are_read_one_after_the_other() -> None:
    rows = load(["translation-hi", "mix"])
    assert texts(rows["train"]) == [f"hi {n}" for n in range(10)] + [f"ta {n}" for n in range(10)]
    assert set(rows["train"].table["language"].to_pylist()) == {"hi", "und-Latn"}
    assert len(rows["test"]) == len(rows["validation"]) == 10


def test_a_part_of_a_configuration_needs_no_other() -> None:
    rows = load(None, "train=translation-hi/train", "test=mix/ta")
    assert (len(rows["train"]), rows["test"].table["language"].to_pylist()[:1]) == (10, ["ta"])
    assert "validation" not in rows


def test_parts_of_conversations(folder: Path) -> None:
    rows = [{"prompt": f"p {n}", "completion": f"c {n}"} for n in range(10)]
    (folder / "ta.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    flags = {"dataset_config_name": "mix", "dataset_splits": ["train=ta[2:40%]+ta[-1:]", "validation=ta[7:8]"]}
    found = load_chats(ChatDataArguments(dataset_name="set", **flags)).rows  # type: ignore[arg-type]
    contents = [row[0]["content"] for row in found["train"].table["messages"].to_pylist()]
    assert contents == ["p 2", "p 3", "p 9"]
    assert found["train"].table["language"].to_pylist() == ["ta"] * 3
    assert Path(found["train"].location(2)).name == "ta.jsonl:10"
    assert len(found["validation"]) == 1


def test_a_row_that_names_its_language_keeps_it(folder: Path) -> None:
    rows = [{"text": "a", "label": "x", "language": "mr"}, {"text": "b", "label": "y", "language": " "}]
    (folder / "hi.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert load("translation-hi")["train"].table["language"].to_pylist() == ["mr", "hi"]


@pytest.mark.parametrize(
    ("name", "language"),
    [
        ("hi", "hi"),
        ("translation-ta", "ta"),
        ("iitp-mr.hi", "hi"),
        ("wiki_ur", "ur"),
        ("mr-IN", "mr"),
        ("npi_Deva", "ne"),
        ("tweets-hin", "hi"),
        ("IN", None),
        ("nmt-seed", None),
        ("train", None),
    ],
)
def test_the_language_that_a_name_names(name: str, language: str | None) -> None:
    assert language_named(name) == language


def test_the_rows_depend_on_parts_and_configurations() -> None:
    def fingerprint(config: Any, *parts: str) -> str:
        args = DataArguments(dataset_name="set", dataset_config_name=config, dataset_splits=list(parts))
        return text_sources(args, Problems())["train"].fingerprint

    found = [fingerprint("mix"), fingerprint("mix", "train=ta"), fingerprint("mix", "train=ta[:5]")]
    found += [
        fingerprint("mix", "train=ta[:6]"),
        fingerprint("translation-hi"),
        fingerprint(["translation-hi", "mix"]),
    ]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("config", "parts", "problem"),
    [
        ("nothing", [], "--dataset_config_name nothing dataset-config-unknown"),
        (None, [], "--dataset_config_name dataset-config-unknown"),
        ("mix", ["train=hi"], "--dataset_splits set/mix/hi dataset-split-missing"),
        ("mix", ["train=nothing/hi"], "--dataset_config_name nothing dataset-config-unknown"),
        ("mix", ["train=ta[1]"], "--dataset_splits train=ta[1] dataset-splits-form"),
        ("mix", ["training=ta"], "--dataset_splits training=ta dataset-splits-form"),
        ("mix", ["train=ta", "train=ta"], "--dataset_splits train=ta dataset-splits-form"),
        ("mix", ["train=ta[90%:]", "test=ta[10:]"], "set/test no-texts"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(config: str | None, parts: list[str], problem: str) -> None:
    assert problem in " ".join(problems_raised(lambda: load(config, *parts)))


def test_a_set_without_training_rows_names_what_it_has(folder: Path) -> None:
    (folder / "README.md").write_text(CONFIGS.replace("split: train", "split: dev"), encoding="utf-8")
    args = DataArguments(dataset_name="set", dataset_config_name="mix")
    found = Problems()
    text_sources(args, found)
    (missing,) = found
    assert missing.code == "train-split-missing"
    assert "--dataset_splits train=ta" in str(missing)
    assert "ta, dev, validation" in str(missing)


def test_flags_of_datasets_need_one() -> None:
    flags: dict[str, Any] = {
        "dataset_revision": "main",
        "dataset_splits": ["train=hi"],
        "dataset_config_name": ["a", "b"],
    }
    found = problems_raised(lambda: DataArguments(train_file="a.csv", **flags))
    assert sorted(each.rpartition(" ")[2] for each in found) == ["dataset-config-without-name"] * 3
    found = problems_raised(lambda: DataArguments(dataset_name="builtin:tweets", **flags))
    assert sorted(each.rpartition(" ")[2] for each in found) == ["no-effect"] * 3
    args = DataArguments(dataset_name="set", dataset_config_name="mix", dataset_revision="main")
    assert problems_raised(lambda: load_splits(args)) == ["--dataset_revision main no-effect"]


def test_bounds_need_no_count_where_they_can() -> None:
    def never() -> int:
        raise AssertionError

    assert SplitPart("hi", start="5").bounds(never)[0] == 5
