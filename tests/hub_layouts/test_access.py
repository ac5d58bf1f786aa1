"""Models of the Hub that are gated, renamed or pinned, and a Hub that fails."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.faults.hub import Fault
from tests.hub_layouts.conftest import Place
from tests.hub_layouts.test_models import SHORT, TWEETS, codes

pytestmark = pytest.mark.more
MURIL = "google/muril-base-cased"


def train(
    place: Place, name: str, folder: Path, *flags: str, token: str | None = None, online: bool = True
) -> subprocess.CompletedProcess[str]:
    rows = place.rows("tweets.jsonl", TWEETS)
    given = ("--model_name_or_path", name, "--train_file", rows, "--output_dir", str(folder), *SHORT, *flags)
    return place.run("scripts/train_sentiment.py", *given, token=token, online=online)


@pytest.mark.parametrize("token", [None, "hf_NotLetInNotLetInNotLetInNotLetIn12"])
def test_a_gated_model_names_the_page_where_access_is_asked_for(
    place: Place, tmp_path: Path, token: str | None
) -> None:
    name = "google/gemma-3-1b-it"
    refused = train(place, name, tmp_path / "out", token=token)
    assert (refused.returncode, codes(refused.stderr)) == (2, ["model-gated"])
    assert f"https://huggingface.co/{name}" in refused.stderr
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_a_renamed_model_is_found_by_its_old_name(place: Place, tmp_path: Path) -> None:
    done = train(place, "xlm-roberta-base", tmp_path / "out")
    assert done.returncode == 0, done.stderr


def test_an_open_pull_request_is_not_asked_for(place: Place, tmp_path: Path) -> None:
    done = train(place, "ai4bharat/IndicBERTv2-MLM-only", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    asked = [path for path in place.hub.shelf.asked if "IndicBERTv2-MLM-only" in path]
    assert asked
    assert not [path for path in asked if "refs/pr" in path or "discussions" in path or "commits" in path]


def test_a_transfer_that_breaks_is_taken_up_again(place: Place, tmp_path: Path) -> None:
    files = dict(place.hub.shelf.repositories[0].commits[place.commits["ai4bharat/IndicBERTv2-MLM-only"]])
    place.hub.shelf.add("me/broken", files)
    place.hub.faults.append(Fault("/store/", "cut"))
    done = train(place, "me/broken", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert place.hub.faults[-1].times == 0


def test_a_model_of_nobody_and_a_revision_that_is_not_there_are_refused(place: Place, tmp_path: Path) -> None:
    nobody = train(place, "me/nothing", tmp_path / "a")
    assert (nobody.returncode, codes(nobody.stderr)) == (2, ["no-such-model"])
    revision = train(place, MURIL, tmp_path / "b", "--model_revision", "v9")
    assert (revision.returncode, codes(revision.stderr)) == (2, ["no-such-revision"])


def test_a_model_alone_trains_on_the_tweets_of_the_package(place: Place, tmp_path: Path) -> None:
    command = ("train", "sentiment", "--model_name_or_path", "ai4bharat/IndicBERTv2-MLM-only")
    brief = ("--output_dir", str(tmp_path / "out"), "--max_steps", "2", "--max_unknown_share", "1")
    done = place.run(*command, *brief)
    assert done.returncode == 0, done.stderr
    assert "builtin:tweets" in done.stderr


def test_an_index_of_safetensors_that_leads_outside_is_refused_before_rows_are_read(
    place: Place, tmp_path: Path
) -> None:
    files = dict(place.hub.shelf.repositories[0].commits[place.commits["ai4bharat/IndicBERTv2-MLM-only"]])
    index = {"metadata": {}, "weight_map": {"weight": "../../x.safetensors"}}
    place.hub.shelf.add("me/outside", files | {"model.safetensors.index.json": json.dumps(index).encode()})
    refused = train(place, "me/outside", tmp_path / "out")
    assert (refused.returncode, codes(refused.stderr)) == (2, ["index-outside-model"])
    assert "reading" not in refused.stderr


@pytest.mark.slow
def test_a_hub_that_counts_requests_is_told_of(place: Place, tmp_path: Path) -> None:
    files = dict(place.hub.shelf.repositories[0].commits[place.commits["ai4bharat/IndicBERTv2-MLM-only"]])
    place.hub.shelf.add("me/counted", files)
    waits = {"ratelimit": '"api";r=0;t=1', "ratelimit-policy": '"fixed window";"api";q=5;w=300'}
    place.hub.faults.append(Fault("me/counted", 429, times=1_000, headers=waits))
    refused = train(place, "me/counted", tmp_path / "out")
    place.hub.faults.clear()
    assert refused.returncode == 2, refused.stderr
    assert codes(refused.stderr) == ["hub-rate-limit"]
    done = train(place, "me/counted", tmp_path / "out")
    assert done.returncode == 0, done.stderr


def test_an_adapter_on_muril_is_merged_pushed_and_fetched_again(place: Place, tmp_path: Path) -> None:
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    done = train(place, MURIL, adapter, "--method", "lora")
    assert done.returncode == 0, done.stderr
    assert json.loads((adapter / "base_model.json").read_text())["commit_hash"] == place.commits[MURIL]
    done = place.run("merge", str(adapter), "--output_dir", str(merged), online=False)
    assert done.returncode == 0, done.stderr
    for folder, name in ((adapter, "me/adapter"), (merged, "me/merged")):
        place.hub.files.clear()
        pushed = place.run("push", str(folder), name)
        assert pushed.returncode == 0, pushed.stderr
        place.hub.shelf.add(name, dict(place.hub.files))
    again = place.run("predict", "--model", str(merged), "--text", "यह", online=False)
    assert again.returncode == 0, again.stderr
    second = train(place, "me/merged", tmp_path / "second")
    assert second.returncode == 0, second.stderr
