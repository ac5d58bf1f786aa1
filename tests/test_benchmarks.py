"""The benchmarks start, and measure what they say. Nothing heavy is imported here: parts start from this module."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.parts import Note, Part, Plan, run_part
from benchmarks.row_lengths import ANSWERS, PERCENT, PROMPTS, TWEETS, draw_lengths

ROOT = Path(__file__).parents[1]


def plan(folder: Path, seconds: float) -> Plan:
    now = time.time()
    return Plan("tiny", folder, folder / "trace.json.gz", False, now, now + seconds)


def run(part: Part, folder: Path, seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    run_part(part, plan(folder, seconds), found.update)
    return found


def breaks(_plan: Plan, note: Note) -> None:
    note({"first": 1})
    raise ValueError("no such thing")


def tells(_plan: Plan, note: Note) -> None:
    note({"first": 1})


def dies(_plan: Plan, note: Note) -> None:
    note({"first": 1})
    os._exit(3)


def has_a_contender_that_failed(_plan: Plan, note: Note) -> None:
    note({"contenders": [{"contender": "one"}, {"contender": "two", "error": "no"}]})


def has_losses_that_are_wrong(_plan: Plan, note: Note) -> None:
    note({"agrees": False, "learned": True, "padding_is_seen": False})


def hangs(_plan: Plan, note: Note) -> None:
    child = subprocess.Popen(["sleep", "600"])
    note({"child": child.pid})
    child.wait()


def test_a_part_that_breaks_keeps_what_it_found_and_tells_why(tmp_path: Path) -> None:
    found = run(breaks, tmp_path, 60)
    assert found["first"] == 1
    assert found["error"].splitlines()[-1] == "ValueError: no such thing"


def test_a_part_that_dies_tells_its_exit_code(tmp_path: Path) -> None:
    assert run(dies, tmp_path, 60) == {"first": 1, "error": "It ended with the exit code 3."}


def test_a_part_that_hangs_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    since = time.time()
    found = run(hangs, tmp_path, 4)
    assert time.time() - since < 15
    assert found["error"] == "It was stopped after 4 s, its share of the time."
    while is_alive(found["child"]):
        assert time.time() - since < 30
        time.sleep(0.1)


def test_a_go_ends_with_the_names_of_what_failed_when_all_parts_have_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import gpu

    for name in ("CUDA_VISIBLE_DEVICES", gpu.ALLOCATOR):  # which it sets
        monkeypatch.setenv(name, "")
    parts = {
        "device": (tells, 0),
        "first": (breaks, 1),
        "wrong": (has_losses_that_are_wrong, 1),
        "last": (has_a_contender_that_failed, 1),
    }
    monkeypatch.setattr(gpu, "PARTS", parts)
    command = ["gpu", "--size", "tiny", "--results", str(tmp_path), "--parts"]
    monkeypatch.setattr(sys, "argv", [*command, "first", "wrong", "last"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == "Failed: first, wrong (losses do not agree), last (two)."  # python ends with 1 then
    (path,) = tmp_path.iterdir()
    written = json.loads(path.read_text(encoding="utf-8"))["parts"]
    assert len(written["last"]["contenders"]) == 2
    assert written["wrong"]["agrees"] is False


class DaysThatPass(datetime.date):
    """Today is another day each time."""

    asked = 0

    @classmethod
    def today(cls) -> DaysThatPass:
        cls.asked += 1
        return cls(2026, 11, cls.asked)


def test_a_go_that_lasts_past_midnight_leaves_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import gpu

    for name in ("CUDA_VISIBLE_DEVICES", gpu.ALLOCATOR):  # which it sets
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(datetime, "date", DaysThatPass)
    monkeypatch.setattr(gpu, "PARTS", {"device": (tells, 0)})
    monkeypatch.setattr(sys, "argv", ["gpu", "--size", "tiny", "--results", str(tmp_path), "--parts", "device"])
    gpu.main()
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text(encoding="utf-8"))
    assert path.name.startswith(found["environment"]["date"])
    assert found["parts"]["device"].keys() == {"first", "seconds"}


def test_a_part_that_shows_nothing_has_failed() -> None:
    from benchmarks.gpu import failures

    sound = {"agrees": True, "learned": True, "padding_is_seen": None}  # where a contender had no lap
    parts = {"device": {"first": 1}, "losses": sound, "last": {"contenders": [{"contender": "one"}]}}
    assert failures(parts, "full") == []
    parts = {"losses": {**sound, "learned": False}, "classifier": {"padding_is_seen": False}}
    assert failures(parts, "full") == ["losses (nothing is learned)", "classifier (padding is not seen)"]
    assert failures(parts, "tiny") == ["losses (nothing is learned)"]  # two laps of a tiny model may lie either way


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("missing", ["git", "checkout"])
def test_of_a_copy_is_said_what_its_maker_says(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import environment

    if missing == "git":
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setattr(environment, "RESULTS", tmp_path / "results")
    about = environment.environment()
    assert (about["commit"], about["changed_since"]) == (None, None)
    monkeypatch.setenv("BENCHMARK_COMMIT", "2c5147b")
    assert environment.environment()["commit"] == "2c5147b"


def commits_in(found: Any) -> set[str]:
    """Those that a result file names, in any of its parts."""
    if isinstance(found, list):
        return set().union(*map(commits_in, found))
    if not isinstance(found, dict):
        return set()
    own = {found["commit"]} if isinstance(found.get("commit"), str) else set()
    return own.union(*map(commits_in, found.values()))


def test_every_result_is_of_a_commit_that_everybody_has() -> None:
    """Else nobody could run again what was measured."""
    from benchmarks.environment import RESULTS, _git

    is_shallow = _git("rev-parse", "--is-shallow-repository")
    if is_shallow != "false":
        pytest.skip("without git, or its checkout, no commit is known" if is_shallow is None else "a shallow clone")
    known = set(str(_git("rev-list", "HEAD")).split())
    named = {path.name: commits_in(json.loads(path.read_text(encoding="utf-8"))) for path in RESULTS.glob("*.json")}
    assert set().union(*named.values())
    assert {name for name, commits in named.items() if commits - known} == set()


@pytest.mark.parametrize(("percentiles", "mean"), [(TWEETS, 30), (PROMPTS, 22), (ANSWERS, 169)])
def test_lengths_are_those_of_real_rows(percentiles: tuple[int, ...], mean: float) -> None:
    assert len(percentiles) == len(PERCENT)
    drawn = draw_lengths(percentiles, 20_000, np.random.default_rng(0))
    assert (drawn.min(), drawn.max()) == (percentiles[0], percentiles[-1])
    assert drawn.mean() == pytest.approx(mean, rel=0.02)


def test_a_row_of_tweets_has_as_many_tokens_as_was_drawn(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from benchmarks.classifier_gpu import SIZES, write_model, write_rows

    write_model(tmp_path / "model", SIZES["tiny"].model)
    lengths = write_rows(tmp_path / "rows.jsonl", SIZES["tiny"])
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    ids = AutoTokenizer.from_pretrained(tmp_path / "model")([row["text"] for row in rows])["input_ids"]
    assert [len(row) for row in ids] == lengths.tolist()
    inner = np.concatenate([row[1:-1] for row in ids])
    assert inner.min() >= 5  # no special token, nothing unknown
    counts = np.sort(np.bincount(inner, minlength=2_000))[::-1]
    assert counts[0] / len(inner) == pytest.approx(1 / (1 / np.arange(1, 501)).sum(), rel=0.1)  # Zipf's law
    assert 400 < (counts > 0).sum() <= 500


def test_a_chat_has_as_many_tokens_as_was_drawn(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from benchmarks.llama import write_rows
    from indictune.models import builtin

    lengths = write_rows(tmp_path / "rows.jsonl", 50, 100_000, full_length=False)
    tokenizer = AutoTokenizer.from_pretrained(builtin.resolve("builtin:tiny-indic-llama"))
    rows = [json.loads(line)["messages"] for line in (tmp_path / "rows.jsonl").read_text("utf-8").splitlines()]
    counted = [sum(len(tokenizer(turn["content"])["input_ids"]) for turn in row) for row in rows]
    assert counted == lengths.tolist()
    assert write_rows(tmp_path / "full.jsonl", 3, 1024, full_length=True).tolist() == [1024] * 3


def test_a_model_that_a_stopped_part_was_writing_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    from benchmarks import llama

    def is_stopped(**_: Any) -> None:
        raise TimeoutError

    monkeypatch.setenv("INDICTUNE_CACHE", os.environ["INDICTUNE_CACHE"])  # which is changed
    with monkeypatch.context() as patch:
        patch.setattr(llama, "LlamaConfig", is_stopped)  # which it asks for when the tokenizer is written
        with pytest.raises(TimeoutError):
            llama.write_inputs(plan(tmp_path, 60))
    model, rows, lengths = llama.write_inputs(plan(tmp_path, 60))
    assert LlamaForCausalLM.from_pretrained(model).num_parameters() > 0
    assert len(rows.read_text(encoding="utf-8").splitlines()) == len(lengths)
    written = (model / "model.safetensors").stat().st_mtime_ns
    assert llama.write_inputs(plan(tmp_path, 60))[0] == model
    assert (model / "model.safetensors").stat().st_mtime_ns == written


def test_a_token_of_bert_costs_what_the_goal_counts_with() -> None:
    from transformers import BertConfig, LlamaConfig

    from benchmarks.flops import adapter_flops, classifier_flops

    # 12 layers of 4 x 768^2 + 2 x 768 x 3072 weights, with biases and norms.
    assert classifier_flops(BertConfig(vocab_size=250_000), np.array([1])) == 6 * 85_054_464 + 12 * 12 * 768
    rows = np.array([10, 20])
    assert classifier_flops(BertConfig(), rows) == 6 * 85_054_464 * 30 + 12 * 12 * 768 * 500
    # q and o of 8 x 8, k and v of 8 x 4, three of 8 x 16, and the output layer of 8 x 100.
    llama = LlamaConfig(
        vocab_size=100,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    assert adapter_flops(llama, rows) == 4 * (2 * 64 + 2 * 32 + 3 * 128 + 800) * 30 + 6 * 8 * 500


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("aten::addmm", "matmul"),
        ("aten::bmm", "attention"),
        ("aten::_softmax_backward_data", "attention"),
        ("aten::_safe_softmax", "attention"),
        ("aten::_log_softmax", "elementwise and other"),
        ("aten::native_layer_norm", "elementwise and other"),
        ("aten::linalg_vector_norm", "optimizer"),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("aten::scatter_add_", "copies and gathers"),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "loader"),
        ("autograd::engine::evaluate_function: AddmmBackward0", "between operations"),
    ],
)
def test_operations_are_told_apart(operation: str, kind: str) -> None:
    from benchmarks.cpu_stages import kind_of

    assert kind_of(operation) == kind


def test_the_differences_of_all_kinds_sum_to_that_of_the_step() -> None:
    import torch
    from torch.profiler import profile

    from benchmarks.cpu_stages import BEST, KINDS, OTHER, OURS, by_kind, differences

    rounds = []
    for extra_s in (0.1, 0.3):
        found = {}
        for title, products, plain_s in ((BEST, 2, 0.5), (OURS, 5, 0.8)):
            since = time.perf_counter()
            with profile() as profiler:
                for _ in range(products):
                    torch.randn(200, 200) @ torch.randn(200, 200)
            seconds = time.perf_counter() - since + (extra_s if title == OURS else 0)
            found[title] = {**by_kind(profiler.key_averages(), 2, plain_s, seconds), "places": 1000 * products}
        assert found[OURS]["kinds"]["matmul"] > 0
        rounds.append(found)
    of = differences(rounds)
    for column in (BEST, OURS, "difference"):
        assert sum(of[kind][column] for kind in [*KINDS, OTHER]) == pytest.approx(of["step"][column], abs=0.1)
    assert of["step"]["least"] < of["step"]["difference"] < of["step"]["largest"]
    assert of["between operations"]["difference"] > 80  # ms of a step: 200 ms more in two
    assert of["step without the profiler"]["difference"] == 150
    assert of["places"]["difference"] == 3000


@pytest.mark.slow
def test_both_contenders_tell_where_their_steps_go(tmp_path: Path) -> None:
    from benchmarks.cpu_stages import BEST, KINDS, OURS, compare
    from benchmarks.speed import read_tweets

    (found,) = compare(read_tweets(tmp_path), 2000, tmp_path, steps=1, rounds=1)
    assert found.keys() == {BEST, OURS}
    for told in found.values():
        assert told["kinds"].keys() >= KINDS.keys()
        assert sum(told["kinds"].values()) == pytest.approx(told["step_ms"])


def test_only_the_tokens_of_timed_steps_count() -> None:
    from benchmarks.contenders import Job
    from benchmarks.llama import _line, compete
    from benchmarks.turns import Race

    race = Race(compete, 0.0, 0.0)
    race.laps["one"] = [2.0, 1.0]
    # Laps of three steps: one to warm up, and two. The first lap does not count.
    job = Job(Path(), Path(), steps=12, steps_per_lap=2, folder=Path(), warm_up_steps=1)
    tokens = [1_000, 1_000, 1_000, 1_000, 10, 20, 1_000, 40, 50]
    race.counted["one"] = {"tokens_of_steps": tokens, "padding_fraction": 0.0, "peak_memory_bytes": 1}
    line = _line("one", job, race, 0.001)
    assert line["slowest_and_fastest_lap"] == [15.0, 90.0]
    assert line["laps"] == 2
    assert line["mfu"] == 0.0525
    race.errors["two"] = "no"
    assert _line("two", job, race, 0.001) == {"contender": "two", "error": "no"}


def test_the_order_of_rows_goes_on_in_the_next_epoch() -> None:
    from benchmarks.contenders import order_of
    from indictune.data.batching import TrainingBatches

    order = order_of(TrainingBatches([3] * 10, 4, 1, 0, 1, seed=0, padded=False), 7)  # three steps an epoch
    first, second, third = order[:10], order[10:20], order[20:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert len(third) == 4


@pytest.mark.parametrize(("shift", "inside"), [(0.005, True), (0.02, False), (-0.02, False)])
def test_a_setting_is_inside_where_seeds_differ_more(shift: float, inside: bool) -> None:
    from benchmarks.seeds import compare

    ends = [0.50, 0.51, 0.52, 0.49, 0.48]  # with a standard deviation of 0.016
    curves = {
        name: [[1.0] * 24 + [end + extra] * 12 for end in ends] for name, extra in {"fp32": 0.0, "bf16": shift}.items()
    }
    found = compare(curves)
    assert found["fp32"]["spread"] == pytest.approx(0.0158, abs=1e-4)
    assert found["bf16"]["difference"] == pytest.approx(shift)
    assert found["bf16"]["inside"] is inside


def test_seeds_that_have_not_learned_compare_nothing() -> None:
    from benchmarks.seeds import compare

    with pytest.raises(RuntimeError, match=r"from 1\.0000 to 0\.9900 only"):
        compare({"fp32": [[1.0] * 24 + [0.99] * 12] * 5})


@pytest.mark.parametrize("gpus", [1, 2])
def test_seeds_need_no_second_gpu(gpus: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    from benchmarks import seeds
    from tests.ranks.launching import python

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    alone = gpus == 1
    assert (seeds.launcher() == python()) is alone
    assert ("launch" in seeds.launcher()) is not alone
    assert seeds.settings().keys() == {"fp32", "bf16"} | (set() if alone else {"reduce_dtype"})
    flags = seeds.job_flags(ROOT / "no such folder", tmp_path, steps=1)
    assert flags[flags.index("--per_device_train_batch_size") + 1] == ("64" if alone else "32")


@pytest.mark.parametrize(("shift", "inside"), [(0.005, True), (0.02, False), (-0.02, False)])
def test_packing_is_inside_where_the_seeds_of_plain_rows_differ_more(shift: float, inside: bool) -> None:
    from benchmarks.llama_seeds import PACKED, PLAIN, compare

    ends = [0.50, 0.51, 0.52, 0.49, 0.48]
    learned = {"at_first": 1.0, "at_last": 0.5}
    found = [{PLAIN: {"held_out": end, **learned}, PACKED: {"held_out": end + shift, **learned}} for end in ends]
    compared = compare(found, PLAIN, PACKED)
    assert compared["difference"] == pytest.approx(shift)
    assert compared["inside"] is inside
    found[3][PACKED]["at_last"] = 0.99
    with pytest.raises(RuntimeError, match=r"packing, seed 3: the loss fell from 1\.0000 to 0\.9900 only"):
        compare(found, PLAIN, PACKED)


@pytest.mark.slow
def test_plain_rows_take_as_many_steps_as_packs(tmp_path: Path) -> None:
    from benchmarks.llama_seeds import PACKED, PLAIN, with_packing

    found = with_packing(tmp_path, 1, epochs=0.5)
    assert found[PLAIN]["steps"] == found[PACKED]["steps"] > 5
    assert 10 < found[PLAIN]["rows"] < 20
    assert found[PLAIN]["held_out"] != found[PACKED]["held_out"]


@pytest.mark.slow
def test_an_optimizer_of_8_bits_trains_otherwise(tmp_path: Path) -> None:
    from benchmarks.llama_seeds import EIGHT_BITS, FULL, with_optimizers

    found = with_optimizers(tmp_path, 1, epochs=0.5)
    assert found[FULL]["held_out"] != found[EIGHT_BITS]["held_out"]
    assert found[FULL]["held_out"] == pytest.approx(found[EIGHT_BITS]["held_out"], rel=0.01)


@pytest.mark.slow
def test_each_setting_of_the_seeds_trains_otherwise(tmp_path: Path) -> None:
    from benchmarks.seeds import job_flags, losses, settings

    job = job_flags(ROOT / "no such folder", tmp_path, steps=3)
    curves = {name: losses(job, tmp_path / name, 1, *flags) for name, flags in settings().items()}
    assert curves.keys() == {"fp32", "bf16", "reduce_dtype"}
    assert {len(curve) for curve in curves.values()} == {3}
    assert len({tuple(curve) for curve in curves.values()}) == len(curves)
    assert curves["bf16"] == pytest.approx(curves["fp32"], rel=0.02)


@pytest.mark.parametrize("warm_up_steps", [0, 2])
def test_laps_of_batches_by_length_are_like_a_whole_epoch(tmp_path: Path, warm_up_steps: int) -> None:
    from benchmarks.speed import grouped_by_length, read_tweets
    from indictune.models.tiny_bert import train_tokenizer

    rows = read_tweets(tmp_path)
    tokenizer = train_tokenizer([row["text"] for row in rows], 2_000, 128)
    tokenizer.save_pretrained(tmp_path)
    order = grouped_by_length(tmp_path, rows, 5, 3, 16, warm_up_steps)
    lengths = np.array([len(tokenizer(row["text"])["input_ids"]) for row in rows])
    batches = np.array(order).reshape(5, warm_up_steps + 3, 16)
    timed = batches[:, warm_up_steps:]
    places = lengths[timed].max(axis=2)
    assert (np.diff(places) <= 0).all()  # the longest first, as the sampler's
    np.testing.assert_array_equal(batches[:, :warm_up_steps], timed[:, :warm_up_steps])
    assert places.mean(axis=1).max() / places.mean(axis=1).min() < 1.03
    assert lengths[timed].mean() == pytest.approx(lengths.mean(), rel=0.03)


def test_what_the_padding_costs_is_told_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.speed import BASELINES, show, with_ratios

    common = {"rows_per_second": 1.0, "padding_fraction": 0.0, "tokens_per_row": 1.0, "peak_memory_bytes": 1}
    laps = {"trainer_defaults": [1.0, 1.0], "trainer_best": [5.0, 5.0], "ours_fp32": [8.0, 10.0]}
    laps["ours_padded"] = [4.0, 7.0]
    lines = with_ratios(
        [{"contender": name, "rows_per_second_of_each_lap": speeds, **common} for name, speeds in laps.items()]
    )
    assert lines[-1]["times_ours_fp32"] == [0.5, 0.7]
    assert [lines[-1][f"times_{name}"] for name in BASELINES[:2]] == [[4.0, 7.0], [0.8, 1.4]]
    show(30_000, lines)
    header, *_, padded = capsys.readouterr().out.strip().splitlines()
    assert (header.split()[-3:], padded.split()[-2:]) == (["x", "ours", "fp32"], ["0.60", "(0.50-0.70)"])


@pytest.mark.parametrize(
    ("ratios", "padding", "told"),
    [
        ([0.5, 0.8, 1.1], 0.0, ""),
        ([0.98, 0.93, 0.7], 0.0, r"ours_padded is 0\.93 \("),
        ([0.5, 0.8, 1.1], 0.3, r"\['ours_fp32', 'ours_padded'\] pad"),
    ],
)
def test_a_benchmark_that_does_not_see_the_padding_fails(ratios: list[float], padding: float, told: str) -> None:
    from benchmarks.speed import check_padding_is_seen

    lines = [
        {"contender": "trainer_best", "times_ours_fp32": [1.0] * 3, "padding_fraction": 0.1},
        {"contender": "ours_fp32", "times_ours_fp32": [1.0] * 3, "padding_fraction": padding},
        {"contender": "ours_padded", "times_ours_fp32": ratios, "padding_fraction": 0.3},
    ]
    with pytest.raises(RuntimeError, match=told) if told else nullcontext():
        check_padding_is_seen(lines)


def test_what_shows_nothing_is_written_before_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import speed
    from benchmarks.environment import write_results

    lines = [
        {"contender": "ours_fp32", "times_ours_fp32": [1.0], "padding_fraction": 0.0},
        {"contender": "ours_padded", "times_ours_fp32": [0.5], "padding_fraction": 0.3},
    ]
    flat = {"ours": [1.0] * 6, "largest": 0.0}
    found: dict[str, Any] = {"speed": {30_000: lines}, "losses": {30_000: flat}}
    monkeypatch.setattr(sys, "argv", ["speed", "--data", str(tmp_path)])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which it sets
    monkeypatch.setattr(speed, "compare_speeds", lambda *_: found)
    monkeypatch.setattr(speed, "write_results", partial(write_results, folder=tmp_path))
    with pytest.raises(RuntimeError, match=r"fell from 1\.000 to 1\.000 only"):
        speed.main()
    lines[1]["times_ours_fp32"] = [1.0]
    with pytest.raises(RuntimeError, match=r"ours_padded is 1\.00"):
        speed.main()
    lines[1]["times_ours_fp32"] = [0.5]
    for largest in (1e-3, float("nan")):
        found["losses"][30_000] = {"ours": [1.0] * 3 + [0.5] * 3, "largest": largest}
        with pytest.raises(RuntimeError, match=rf"The losses in fp32 are {largest:.1e} apart, not 1e-04 or less"):
            speed.main()
    found["losses"][30_000]["largest"] = 1e-4
    speed.main()
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text(encoding="utf-8"))["speed"]["30000"] == lines


@pytest.mark.parametrize("name", ["speed", "speed-laps-of-6"])
def test_the_benchmark_sees_the_padding(name: str) -> None:
    """In what it has found last, each lap."""
    path = max((ROOT / "benchmarks/results").glob(f"*-{name}.json"))  # they begin with the date
    for lines in json.loads(path.read_text(encoding="utf-8"))["speed"].values():
        laps = {line["contender"]: line["rows_per_second_of_each_lap"] for line in lines}
        assert all(padded < 0.9 * ours for padded, ours in zip(laps["ours_padded"], laps["ours_fp32"], strict=True))


@pytest.mark.slow
def test_padding_is_put_back_in_the_contender_that_says_so_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it costs is seen in the results alone: tests assert no times."""
    from benchmarks import speed

    monkeypatch.setattr(speed, "LAPS", 1)
    lines = speed.compare(speed.read_tweets(tmp_path), 30_000, tmp_path, steps_per_lap=2, compiled=False)
    padding = {line["contender"]: line["padding_fraction"] for line in lines}
    assert padding["ours_padded"] > 0.2
    assert padding["trainer_defaults"] > padding["ours_padded"]
    ours = [name for name in padding if name.startswith("ours")]
    assert [name for name in ours if padding[name] > 0] == ["ours_padded"]
    trained = {line["contender"]: line["trained_vocabulary"] for line in lines}
    whole = {"trainer_defaults", "trainer_best", "ours_whole_vocabulary"}
    assert {name for name in trained if trained[name] == 30_000} == whole
    assert 1_000 < trained["ours_fp32"] == trained["ours_bf16"] == trained["ours_padded"] < 27_000
    tokens = {line["tokens_per_row"] for line in lines if line["contender"] in ours}
    assert len(tokens) == 1  # the same rows


def test_every_batch_of_tweets_is_whole(tmp_path: Path) -> None:
    from benchmarks.contenders import BATCH_SIZE
    from benchmarks.speed import read_tweets

    assert len(read_tweets(tmp_path)) == 1170 // BATCH_SIZE * BATCH_SIZE


def test_the_memory_of_a_child_is_its_own() -> None:
    from benchmarks.preparation import watched_children

    ours = np.ones(300_000_000, np.uint8)
    with watched_children() as peaks:
        program = "import time; large = bytearray(b'1' * 20_000_000) * 3; time.sleep(1)"
        child = subprocess.Popen([sys.executable, "-c", program])
        assert child.wait() == 0
    assert 60_000_000 < peaks[str(child.pid)] < len(ours)  # other tests may have left children of their own


def test_the_result_files_of_a_bench_are_named_with_their_content(tmp_path: Path) -> None:
    from benchmarks.bench import written_since

    for name, age_s in (("before.json", 60), ("after.json", 20), ("note.txt", 20)):
        (tmp_path / name).write_text("{}")
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    found = written_since(time.time() - 40, tmp_path)
    assert found.keys() == {"after.json"}
    (tmp_path / "after.json").write_text("{ }")
    assert written_since(time.time() - 40, tmp_path)["after.json"] != found["after.json"]


def test_a_program_of_a_bench_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import bench
    from benchmarks.environment import write_results

    monkeypatch.setattr(bench, "PROGRAMS", {"no_such_program": ((), False), "row_lengths": ((), True)})
    monkeypatch.setattr(bench, "write_results", partial(write_results, folder=tmp_path))
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == "Failed: no_such_program."
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["exit_codes"] == {"no_such_program": 1, "row_lengths": 0}
    assert found["seconds"].keys() == {"no_such_program", "row_lengths", "all"}


def test_a_bench_prepares_each_number_of_rows_once_and_a_comparison_is_of_five_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import bench, preparation
    from benchmarks.environment import write_results

    prepared: list[tuple[str, bool]] = []

    def measure_once(rows: Path, _tokenizer: Path, stages: list[str]) -> dict[str, dict[str, float]]:
        prepared.append((rows.stem, "plain_map" in stages))
        return {"ours_tokenise": dict.fromkeys(["peak_bytes", "imported_bytes", "largest_child_bytes", "seconds"], 1)}

    for name in ("write_tokenizer", "write_rows"):
        monkeypatch.setattr(preparation, name, lambda *_: None)
    monkeypatch.setattr(preparation, "measure_once", measure_once)
    monkeypatch.setattr(preparation, "write_results", partial(write_results, folder=tmp_path))
    flags, _ = bench.PROGRAMS["preparation"]
    monkeypatch.setattr(sys, "argv", ["preparation", *flags])
    preparation.main()
    assert prepared == [("100000", False), ("500000", False), ("2000000", False)]
    prepared.clear()
    monkeypatch.setattr(sys, "argv", ["preparation", "--rows", "100000", "--vocabularies", "30000"])
    preparation.main()
    assert prepared == [("100000", True)] * 5


SMALL_CHECKPOINTS = """
import sys
from functools import partial
from pathlib import Path
from benchmarks import checkpoints
checkpoints.write_results = partial(checkpoints.write_results, folder=Path(sys.argv.pop()))
checkpoints.main()
"""


@pytest.mark.slow
def test_the_benchmark_of_checkpoints_compares_the_saves(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SMALL_CHECKPOINTS, "--laps", "1", "--width", "32", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["checkpoint_bytes"] > 1_000_000
    assert all(seconds > 0 for pair in found["seconds_and_seconds_of_cores"].values() for seconds in pair)
