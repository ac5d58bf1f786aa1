"""The benchmarks measure what their names say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import environment as about
from benchmarks.compare_curves import judge, problems
from benchmarks.flipped_labels import flipped, found_at
from benchmarks.row_lengths import ANSWERS, PERCENT, PROMPTS, TWEETS, draw_lengths

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("missing", ["git", "checkout"])
def test_a_copy_without_git_reports_the_commit_of_its_environment(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "git":
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setattr(about, "RESULTS", tmp_path / "results")
    found = about.environment()
    assert (found["commit"], found["changed_since"]) == (None, None)
    monkeypatch.setenv("BENCHMARK_COMMIT", "2c5147b")
    assert about.environment()["commit"] == "2c5147b"


def commits_in(found: Any) -> set[str]:
    """All commits that a result file names."""
    if isinstance(found, list):
        return set().union(*map(commits_in, found))
    if not isinstance(found, dict):
        return set()
    own = {found["commit"]} if isinstance(found.get("commit"), str) else set()
    return own.union(*map(commits_in, found.values()))


def test_every_result_is_of_a_commit_in_the_history() -> None:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("no git checkout, or a shallow clone")
    known = set(git("rev-list", "HEAD").split())
    named = {path.name: commits_in(json.loads(path.read_text("utf-8"))) for path in about.RESULTS.glob("*.json")}
    assert set().union(*named.values())
    assert {name for name, commits in named.items() if commits - known} == set()


@pytest.mark.parametrize(("percentiles", "mean"), [(TWEETS, 30), (PROMPTS, 22), (ANSWERS, 169)])
def test_lengths_are_those_of_real_rows(percentiles: tuple[int, ...], mean: float) -> None:
    assert len(percentiles) == len(PERCENT)
    drawn = draw_lengths(percentiles, 20_000, np.random.default_rng(0))
    assert (drawn.min(), drawn.max()) == (percentiles[0], percentiles[-1])
    assert drawn.mean() == pytest.approx(mean, rel=0.02)


def test_the_order_of_rows_continues_in_the_next_epoch() -> None:
    from benchmarks.contenders import order_of
    from indictune.data.batching import TrainingBatches

    order = order_of(TrainingBatches([3] * 10, 4, 1, 0, 1, seed=0, padded=False), 7)  # three steps an epoch
    first, second, third = order[:10], order[10:20], order[20:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert len(third) == 4


@pytest.mark.parametrize(("shift", "inside"), [(0.005, True), (0.02, False), (-0.02, False)])
def test_a_setting_is_inside_the_spread_of_seeds(shift: float, inside: bool) -> None:
    from benchmarks.seeds import compare

    ends = [0.50, 0.51, 0.52, 0.49, 0.48]
    fell = {"first": 1.0, "last": 0.5}
    found = compare("bf16", [({"compared": end, **fell}, {"compared": end + shift, **fell}) for end in ends])
    assert found["spread"] == pytest.approx(0.0158, abs=1e-4)
    assert found["difference"] == pytest.approx(shift)
    assert found["inside"] is inside
    with pytest.raises(RuntimeError, match="packing, seed 0"):
        compare("packing", [({"compared": 1.0, "first": 1.0, "last": 0.99}, {"compared": 1.0, **fell})])


@pytest.mark.slow
def test_seeds_train_with_each_setting(tmp_path: Path) -> None:
    from benchmarks.seeds import CLASSIFIER, classifier_flags, train_classifier, with_packing

    job = classifier_flags(ROOT / "no such folder", tmp_path, steps=3)
    settings = {"exact": (), **CLASSIFIER}
    losses = {name: train_classifier(job, tmp_path / name, 1, *flags)["compared"] for name, flags in settings.items()}
    assert len(set(losses.values())) == len(losses)
    assert losses["bf16"] == pytest.approx(losses["exact"], rel=0.02)
    plain, packed = with_packing(tmp_path, 1, epochs=0.5)
    assert plain["compared"] != packed["compared"]


def test_one_gpu_has_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from benchmarks.seeds import ranks

    for gpus, processes in ((0, 2), (1, 1), (2, 2)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert ranks() == processes


def test_laps_of_batches_by_length_are_like_an_epoch(tmp_path: Path) -> None:
    from benchmarks.contenders import BATCH_SIZE
    from benchmarks.speed import grouped_by_length, read_tweets
    from indictune.models.builtin import learn_vocabulary, make_tokenizer

    rows = read_tweets(tmp_path)
    assert len(rows) == 1170 // BATCH_SIZE * BATCH_SIZE
    tokenizer = make_tokenizer(learn_vocabulary([row["text"] for row in rows], 2_000), 128)
    tokenizer.save_pretrained(tmp_path)
    order = grouped_by_length(tmp_path, rows, 5, 3, 16)
    lengths = np.array([len(tokenizer(row["text"])["input_ids"]) for row in rows])
    batches = np.array(order).reshape(5, 3, 16)
    padded = lengths[batches].max(axis=2)
    assert (np.diff(padded) <= 0).all()  # the longest first, as the sampler's
    assert padded.mean(axis=1).max() / padded.mean(axis=1).min() < 1.03
    assert lengths[batches].mean() == pytest.approx(lengths.mean(), rel=0.03)


@pytest.mark.parametrize(
    ("last", "apart", "learned", "agrees"),
    [(0.5, 0.0, True, True), (1.0, 0.0, False, True), (0.5, 2e-4, True, False), (0.5, float("nan"), True, False)],
)
def test_curves_must_agree_and_fall(last: float, apart: float, learned: bool, agrees: bool) -> None:
    ours = [1.0] * 9 + [last] * 3
    found = judge(ours, [*ours[:-1], last + apart])
    assert (found["learned"], found["agrees"]) == (learned, agrees)
    assert len(problems(found)) == (not learned) + (not agrees)


@pytest.mark.parametrize(
    ("ratios", "padding", "count"), [([0.5, 0.8, 1.1], 0.0, 0), ([0.98, 0.93, 0.7], 0.0, 1), ([0.5, 0.8, 1.1], 0.3, 1)]
)
def test_speed_reports_padding_that_costs_nothing(ratios: list[float], padding: float, count: int) -> None:
    from benchmarks.speed import padding_problems, problems_of, with_ratios

    speeds = {"trainer_best": [5.0] * 3, "ours_fp32": [10.0] * 3, "ours_padded": [10 * ratio for ratio in ratios]}
    paddings = {"trainer_best": 0.1, "ours_fp32": padding, "ours_padded": 0.3}
    lines = with_ratios(
        [
            {"contender": name, "rows_per_second_of_each_lap": laps, "padding_fraction": paddings[name]}
            for name, laps in speeds.items()
        ]
    )
    assert lines[-1]["times_trainer_best"] == pytest.approx([2 * ratio for ratio in ratios])
    assert len(padding_problems(lines)) == count
    flat = judge([1.0] * 6, [1.0] * 6)
    assert len(problems_of({"speed": {1: lines}, "losses": {1: flat}})) == count + 1


@pytest.mark.slow
def test_speed_pads_only_in_the_contenders_that_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import speed

    monkeypatch.setattr(speed, "LAPS", 1)
    lines = speed.compare(speed.read_tweets(tmp_path), 30_000, tmp_path, steps_per_lap=2, compiled=False)
    padding = {line["contender"]: line["padding_fraction"] for line in lines}
    assert padding["trainer_defaults"] > padding["ours_padded"] > 0.2
    ours = [name for name in padding if name.startswith("ours")]
    assert [name for name in ours if padding[name] > 0] == ["ours_padded"]
    trained = {line["contender"]: line["trained_vocabulary"] for line in lines}
    whole = {"trainer_defaults", "trainer_best", "ours_whole_vocabulary"}
    assert {name for name in trained if trained[name] == 30_000} == whole
    assert 1_000 < trained["ours_fp32"] == trained["ours_bf16"] == trained["ours_padded"] < 27_000
    assert len({line["tokens_per_row"] for line in lines if line["contender"] in ours}) == 1  # the same rows


@pytest.mark.more
def test_the_memory_of_a_child_is_its_own() -> None:
    from benchmarks.preparation import watched_children

    ours = np.ones(300_000_000, np.uint8)
    with watched_children() as peaks:
        program = "import time; large = bytearray(b'1' * 20_000_000) * 3; time.sleep(1)"
        child = subprocess.Popen([sys.executable, "-c", program])
        assert child.wait() == 0
    assert 60_000_000 < peaks[str(child.pid)] < len(ours)  # other tests may have children too


@pytest.mark.slow
def test_preparation_measures_stages_of_ours_and_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import preparation

    monkeypatch.setattr(preparation, "write_results", partial(about.write_results, folder=tmp_path))
    flags = ["--rows", "300", "--vocabularies", "4000", "--repeats", "1", "--stages"]
    stages = ["ours_read_and_clean", "plain_read", "ours_tokenise", "plain_map", "ours_health"]
    monkeypatch.setattr(sys, "argv", ["preparation", *flags, *stages])
    preparation.main()
    (path,) = tmp_path.glob("*-preparation-300-vocabulary-4000.json")
    measured = json.loads(path.read_text("utf-8"))["vocabularies"]["4000"]["rows"]["300"]
    assert list(measured) == stages
    assert all(each["seconds"] > 0 for each in measured.values())


def test_bench_lists_the_result_files_that_it_wrote(tmp_path: Path) -> None:
    from benchmarks.bench import written_since

    for name, age_s in (("before.json", 60), ("after.json", 20), ("note.txt", 20)):
        (tmp_path / name).write_text("{}")
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    assert written_since(time.time() - 40, tmp_path) == ["after.json"]


def test_a_failed_program_does_not_stop_the_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import bench

    monkeypatch.setattr(bench, "PROGRAMS", {"no_such_program": ((), False), "row_lengths": ((), True)})
    monkeypatch.setattr(bench, "write_results", partial(about.write_results, folder=tmp_path))
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == "Failed: no_such_program."
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["exit_codes"] == {"no_such_program": 1, "row_lengths": 0}


SMALL_CHECKPOINTS = """
import sys
from functools import partial
from pathlib import Path
from benchmarks import checkpoints
checkpoints.write_results = partial(checkpoints.write_results, folder=Path(sys.argv.pop()))
checkpoints.main()
"""


@pytest.mark.slow
def test_checkpoints_compares_the_saves(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SMALL_CHECKPOINTS, "--laps", "1", "--width", "32", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["checkpoint_bytes"] > 1_000_000
    assert all(seconds > 0 for pair in found["seconds_and_seconds_of_cores"].values() for seconds in pair)


def test_flipped_labels_are_other_ones_and_counted_by_rank() -> None:
    rows = [{"text": str(at), "label": "abc"[at % 3]} for at in range(200)]
    changed, chosen = flipped(rows, 0.05, seed=1)
    assert {at for at, (old, new) in enumerate(zip(rows, changed, strict=True)) if old != new} == chosen
    assert len(chosen) == 10
    assert flipped(rows, 0.05, seed=1) == (changed, chosen) != flipped(rows, 0.05, seed=2)
    assert found_at(["a", "b", "c"], {"a", "c"}) == {"precision": 0.5, "recall": 0.5}
    assert found_at(["c"], {"a", "c"}) == {"precision": 1.0, "recall": 0.5}
