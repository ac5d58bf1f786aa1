"""Each published layout of a dataset, by real runs that ask a Hub on this machine: a table of `docs`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.faults.hub import hub
from tests.hub_layouts.conftest import TOKEN, Place
from tests.hub_layouts.data_sets import GATED, GITHUB, SETS, Published, fill, tweets
from tests.hub_layouts.shelf import CONVERTED

RESULTS = Path(__file__).parent / "datasets.json"
pytestmark = pytest.mark.more
Commands = Mapping[str, tuple[str, ...]]


@pytest.fixture(scope="module")
def rows_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A Hub with all datasets of `data_sets.py`."""
    with hub() as kept:
        made = fill(kept.shelf)
        kept.shelf.let_in.add(f"Bearer {TOKEN}")
        commits = {name: each.refs.get(CONVERTED, each.refs["main"]) for name, each in made.items()}
        yield Place(kept, tmp_path_factory.mktemp("place"), commits)


def read(place: Place, commands: Commands, **settings: Any) -> tuple[dict[str, Any], str]:
    """The rows of each command, or the codes of its refusal; and what was logged."""
    typed = json.dumps(commands).replace(GITHUB, f"{place.hub.url}/raw")
    done = place.run("tests/hub_layouts/read_sets.py", typed, anew=True, **settings)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("results: ")[2]), done.stderr


def pinned(each: Published, commits: Mapping[str, str]) -> tuple[str, ...]:
    """The command of a set, at the commit that its rows are read from."""
    commit, name = commits[each.repository], each.repository
    if "--dataset_name" in each.command:
        return (*each.command, "--dataset_revision", commit)
    places = {f"{name}/data": f"{name}@{commit}/data", f"{name}/main": f"{name}/{commit}"}
    return tuple(reduce(lambda word, place: word.replace(*place), places.items(), word) for word in each.command)


@pytest.fixture(scope="module")
def results(rows_place: Place) -> dict[str, Any]:
    return results_of(rows_place)


def results_of(rows_place: Place) -> dict[str, Any]:
    """What each set gives: its rows; and whether they are the same offline, and at a commit that is no longer new."""
    commands = {name: each.command for name, each in SETS.items()}
    online, _ = read(rows_place, commands)
    of_hub = {name: words for name, words in commands.items() if GITHUB not in " ".join(words)}
    offline, _ = read(rows_place, of_hub, online=False)
    before = [(each, dict(each.refs)) for each in rows_place.hub.shelf.repositories if each.kind == "datasets"]
    for repository, refs in before:
        for ref in refs:
            repository.commit(tweets(), ref)
    try:
        at_commit, _ = read(rows_place, {name: pinned(each, rows_place.commits) for name, each in SETS.items()})
    finally:
        for repository, refs in before:
            repository.refs.update(refs)
    return {
        name: {"quirk": SETS[name].quirk, "command": list(SETS[name].command), "rows": rows}
        | {"offline": offline.get(name) == rows, "pinned": at_commit[name] == rows}
        for name, rows in online.items()
    }


@pytest.mark.parametrize("name", SETS)
def test_a_set(results: dict[str, Any], name: str) -> None:
    assert results[name] == json.loads(RESULTS.read_text(encoding="utf-8"))[name]


REFUSED: Mapping[str, tuple[tuple[str, ...], str, str]] = {
    "gated": (("sentiment", "--dataset_name", GATED), "dataset-gated", f"/datasets/{GATED}"),
    "missing": (("sentiment", "--dataset_name", "someone/nothing"), "dataset-missing", "someone/nothing"),
    "revision": (
        ("sentiment", "--dataset_name", "someone/tweets", "--dataset_revision", "v9"),
        *("dataset-revision-missing", "--dataset_revision v9"),
    ),
    "config": (
        ("llama", "--dataset_name", "ai4bharat/indic-instruct-data-v0.1", "--dataset_config_name", "doly"),
        *("dataset-config-unknown", "anudesh"),
    ),
    "no config": (
        ("sentiment", "--dataset_name", "Divyanshu/indicxnli", "--text_column", "premise"),
        *("dataset-config-unknown", "as, hi, ta"),
    ),
    "no training rows": (
        ("sentiment", "--dataset_name", "ai4bharat/IndicSentiment-Translated"),
        *("train-split-missing", "--dataset_splits train="),
    ),
    "split": (
        (
            *("llama", "--dataset_name", "ai4bharat/indic-instruct-data-v0.1", "--dataset_config_name", "nmt-seed"),
            *("--dataset_splits", "train=en"),
        ),
        *("dataset-split-missing", "the dataset has hi"),
    ),
    "script": (("sentiment", "--dataset_name", "ai4bharat/IndicSentiment"), "dataset-script", "hf://datasets/"),
    "script at a revision": (
        ("ner", "--dataset_name", "ai4bharat/naamapadam", "--dataset_revision", "main"),
        *("dataset-script", "leave out --dataset_revision"),
    ),
    "a gated file": (
        ("sentiment", "--train_file", f"hf://datasets/{GATED}/train.csv"),
        "dataset-gated",
        f"/datasets/{GATED},",
    ),
    "no file": (("sentiment", "--train_file", "hf://datasets/someone/tweets/x.csv"), "no-such-file", "tweets/x.csv"),
}


@pytest.fixture(scope="module")
def refusals(rows_place: Place) -> dict[str, Any]:
    """Of somebody without a token, and with an empty cache."""
    place = replace(rows_place, folder=rows_place.folder / "stranger")
    return read(place, {name: command for name, (command, *_) in REFUSED.items()}, token=None)[0]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(refusals: dict[str, Any], name: str) -> None:
    _, code, part = REFUSED[name]
    assert refusals[name]["refused"] == [code]
    assert part in refusals[name]["said"]


def test_offline_without_a_copy(rows_place: Place) -> None:
    place = replace(rows_place, folder=rows_place.folder / "elsewhere")
    commands = {
        "by name": ("sentiment", "--dataset_name", "someone/tweets"),
        "by url": ("sentiment", "--train_file", "hf://datasets/someone/tweets/train.csv"),
    }
    found, _ = read(place, commands, online=False)
    assert found["by name"]["refused"] == ["dataset-unreachable"]
    assert found["by url"]["refused"] == ["url-not-fetched"]


def run(place: Place, *words: str) -> subprocess.CompletedProcess[str]:
    done = place.run(*words, anew=True)
    assert done.returncode == 0, done.stderr
    return done


FEW_STEPS = ("--max_steps", "2", "--max_length", "48", "--report", "false", "--baseline", "false")


def test_names_from_a_script_set_are_trained(rows_place: Place, results: dict[str, Any]) -> None:
    out = rows_place.folder / "names"
    done = run(rows_place, "train", *SETS["ai4bharat/naamapadam"].command, "--output_dir", str(out), *FEW_STEPS[:-2])
    commit = rows_place.commits["ai4bharat/naamapadam"]
    assert (
        f"naamapadam.py is not run. Reading what the Hub made of its rows: --dataset_revision {CONVERTED}"
        in done.stderr
    )
    recipe = yaml.safe_load((out / "recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["decided"]["dataset_commit"] == commit
    assert {"f1", "loss"} <= json.loads((out / "metrics.json").read_text(encoding="utf-8"))["test"].keys()


def test_one_set_is_trained_and_thirteen_languages_are_scored(rows_place: Place, results: dict[str, Any]) -> None:
    out = rows_place.folder / "zero-shot"
    command = SETS["ai4bharat/IndicSentiment"].command
    run(rows_place, "train", *command, "--output_dir", str(out), *FEW_STEPS)
    scores = json.loads((out / "metrics.json").read_text(encoding="utf-8"))["test"]["per_language"]
    assert list(scores) == sorted(results["ai4bharat/IndicSentiment"]["rows"]["test"])
    assert len(scores) == 13
    recipe = yaml.safe_load((out / "recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["test_file"].endswith("{language}.json")
