"""The benchmarks of a GPU, tried on a CPU: all parts run, and stages are what they are called."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd.profiler_util import FunctionEventAvg
from transformers import TrainerControl, TrainerState, TrainingArguments
from trl.kernels import chunked_logprob

from benchmarks import classifier_gpu, llama
from benchmarks.classifier_losses import telling_its_label
from benchmarks.contenders import Contender, CountingTrainer, Job, compete, count_places
from benchmarks.curves import TurnsWithAttention, compare_curves, judge
from benchmarks.gpu import IN_ONE_GO, PARTS, SECONDS_TO_END, deadline_of, first_gpu, left_out, name_of
from benchmarks.parts import Plan
from benchmarks.row_lengths import TWEETS, draw_lengths
from benchmarks.speed import FP32, read_tweets, write_model, write_rows
from benchmarks.stages import StageProfiler, Steps, host, stage_of
from benchmarks.turns import Race, tell_whether_padding_is_seen
from indictune.data.batching import deal_epoch, smallest_accumulation
from indictune.data.collation import PadToLongest
from tests.train.tiny import answer_rows, tiny_llama, tiny_trainer

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("kernel", "stage"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "other matmuls"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "other matmuls"),
        ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128>>", "attention"),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)", "attention"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long>", "embedding"),
        ("void at::native::(anonymous namespace)::compute_grad_weight<float, int>", "embedding"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>", "rest"),
        ("void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>(float*, unsigned char*, float*)", "dequantisation"),
        ("void kOptimizerStatic8bit2StateBlockwise<__nv_bfloat16, 1, 256, 1>", "optimizer"),
        ("void at::native::(anonymous namespace)::indexing_backward_kernel<float, 4>", "rest"),
        ("aten::_safe_softmax", "rest"),
        ("aten::nll_loss_forward", "loss"),
        ("aten::addmm", "other matmuls"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
    ],
)
def test_kernels_are_told_apart(kernel: str, stage: str) -> None:
    assert stage_of(kernel) == stage


def test_trls_kernels_are_those_of_the_loss() -> None:
    """Where this fails, TRL has other ones, and they count as the rest."""
    for kernel in (chunked_logprob._forward_kernel, chunked_logprob._backward_kernel):
        assert stage_of(kernel.__name__) == "loss"


def test_only_the_waits_of_a_step_count_not_those_of_the_clock() -> None:
    events = []
    for name, calls in (("cudaStreamSynchronize", 20), ("cudaEventSynchronize", 10), ("cudaDeviceSynchronize", 2)):
        event = FunctionEventAvg()
        event.key, event.count, event.cpu_time_total = name, calls, 1_000 * calls
        events.append(event)
    waits = {name: value for name, value in host(events, 10).items() if name.startswith("waits")}
    assert waits == {"waits_for_gpu_ms": 3, "waits_for_gpu": 3}


def profiles(connection: Connection, trace: Path) -> None:
    """Five steps under the profiler's callback: two warm up, two are timed, one is profiled."""

    def tables(events: Any, steps: int, plain_s: float, profiled_s: float) -> dict[str, Any]:
        products = sum(event.count for event in events if event.key == "aten::matmul")
        return {"products": products, "steps": steps, "seconds": [plain_s, profiled_s], "late": trace.exists()}

    profiler = StageProfiler(connection, Steps(2, 2, 1), trace, tables)
    profiler.on_train_begin()
    for step in range(1, 6):
        torch.ones(100, 100) @ torch.ones(100, 100)
        profiler.on_step_end(TrainingArguments(), TrainerState(global_step=step), TrainerControl())


def test_the_time_of_a_step_is_told_before_anything_is_profiled_and_the_tables_before_the_trace(
    tmp_path: Path,
) -> None:
    ours, theirs = multiprocessing.Pipe()
    trace = tmp_path / "trace.json.gz"
    profiles(theirs, trace)
    assert ours.recv() == "ready"
    seconds, counted = ours.recv()
    assert seconds > 0
    assert counted == {}
    profiled_s, counted = ours.recv()
    assert counted == {"products": 1, "steps": 1, "seconds": [seconds / 2, profiled_s], "late": False}
    assert ours.recv() == {}
    assert trace.exists()


def test_what_all_need_may_take_all_the_time_and_the_others_share_what_is_left() -> None:
    chosen = ["device", "classifier", "losses"]
    assert deadline_of("device", chosen, 100.0, 620.0) == 620
    assert deadline_of("classifier", chosen, 100.0, 620.0) == 440  # 17 of 26
    assert deadline_of("losses", chosen, 300.0, 620.0) == 620


def test_what_is_not_measured_is_told_with_its_commands() -> None:
    command = "python -m benchmarks.gpu --parts"
    titles = ("compiled", "compiled_losses", "epoch", "llama_lora")
    own = " and ".join(f"`{command} {title}`" for title in titles) + "."
    assert left_out(IN_ONE_GO) == f"Not measured: {', '.join(titles)}. It takes {own}"
    others = "classifier stages llama_stages llama_losses"
    assert left_out(["device", "losses", "llama"]).endswith(f" It takes `{command} {others}` and {own}")
    assert left_out(list(PARTS)) == ""


def test_a_go_that_measures_something_else_has_another_name() -> None:
    device = ["device", "llama"]
    goes = [
        (parts, size, long) for parts in (IN_ONE_GO, device) for size in ("full", "tiny") for long in (False, True)
    ]
    names = [name_of(*go) for go in goes]
    assert names[:4] == ["gpu", "gpu-full-length", "gpu-tiny", "gpu-full-length-tiny"]
    assert names[4:6] == ["gpu-device-llama", "gpu-device-llama-full-length"]
    assert len(set(names)) == len(goes)


@pytest.mark.parametrize(("visible", "one"), [(None, "0"), ("0,1,2", "0"), ("2,3", "2"), ("5", "5"), ("", "")])
def test_one_gpu_is_used_of_those_that_are_visible(visible: str | None, one: str) -> None:
    assert first_gpu(visible) == one


def test_a_trainer_whose_batches_go_to_several_gpus_is_not_compared() -> None:
    """Its steps, of more rows than were asked for, would take longer, and be reckoned as if they had those alone."""
    trainer = object.__new__(CountingTrainer)
    trainer.args = TrainingArguments(per_device_train_batch_size=2, use_cpu=True)
    with pytest.raises(RuntimeError, match="A batch has 4 rows, and 2 were asked for: the Trainer splits it"):
        trainer.training_step(torch.nn.Linear(1, 1), {"attention_mask": torch.ones(4, 3)})


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--full_length",)])
def test_nothing_is_begun_without_what_all_need(tmp_path: Path, flags: tuple[str, ...]) -> None:
    done = gpu(tmp_path, *flags, minutes=(SECONDS_TO_END + 1) / 60)
    assert done.returncode == 1
    assert done.stderr.endswith(
        "All other parts need `device`, and were not begun. Mend it, or give more --minutes.\n"
    )
    (path,) = tmp_path.iterdir()
    results = json.loads(path.read_text(encoding="utf-8"))
    parts = results["parts"]
    assert results["not_measured"] == left_out(IN_ONE_GO)
    assert results["allocator"] == "expandable_segments:True"
    assert results["full_length"] is bool(flags)
    assert path.stem.endswith("-gpu-full-length-tiny" if flags else "-gpu-tiny")
    assert parts.keys() == {"device"}
    assert parts["device"]["error"] == "It was stopped after 1 s, its share of the time."


@pytest.mark.parametrize(("title", "rows"), [("trainer_defaults", 8 * 64), ("ours_fp32", 3 * 512), ("ours", 10 * 512)])
def test_rows_a_second_are_those_of_the_steps_of_its_laps_and_few_laps_are_told(
    capsys: pytest.CaptureFixture[str], title: str, rows: int
) -> None:
    race = Race(compete, 0.0, 0.0)
    race.counted[title] = {"padding_fraction": 0.0, "peak_memory_bytes": 1, "trained_vocabulary": 9}
    lines = []
    for laps in (4, 5):
        race.laps[title] = [2.0] * laps
        lines.append(classifier_gpu._line(title, classifier_gpu.SIZES["full"], race, 1.0, 1.0))
    assert [line["rows_per_second"] for line in lines] == [rows / 2, rows / 2]
    assert [line["few_laps"] for line in lines] == [True, False]
    assert ["mfu" in line for line in lines] == [title == "ours"] * 2  # of bf16's products
    classifier_gpu.show(lines)
    said = capsys.readouterr().out
    assert said.count("  of 4 laps alone, where 5 are enough\n") == 1
    assert "  2M rows, steps alone, s  " in said  # no epoch's time, which has a start and a preparation too


def test_all_padding_is_put_back_and_what_it_costs_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    size = classifier_gpu.SIZES["full"]
    (settings,) = (each.settings for each in classifier_gpu.contenders(size, ()) if each.title == "ours_padded")
    assert settings["padding_free"] == "off"
    lengths = torch.from_numpy(draw_lengths(TWEETS, size.rows, np.random.default_rng(0)))
    rows, limit = size.global_batch_size, settings["max_tokens_per_device"]
    assert smallest_accumulation(lengths, rows, 1, limit, seed=42, steps=len(lengths) // rows, padded=True) == 1
    places = deal_epoch(lengths, rows, 1, seed=42, epoch=0, padded=True).costs.sum()
    assert lengths.sum() / places < 0.3

    race = Race(compete, 0.0, 0.0)
    for title, seconds in (("ours", 2.0), ("ours_padded", 5.0)):
        race.laps[title] = [seconds] * 5
        race.counted[title] = {"padding_fraction": 0.0, "peak_memory_bytes": 1, "trained_vocabulary": 9}
    found = [classifier_gpu._line(title, size, race, 1.0, 1.0) for title in race.laps]
    assert [line["times_ours"] for line in classifier_gpu._with_ratios(found)] == [1.0, 0.4]
    classifier_gpu.show(found)
    header, _, padded, *_ = capsys.readouterr().out.strip("\n").splitlines()
    assert (header.split()[-2:], padded.split()[-1]) == (["x", "ours"], "0.40")


@pytest.mark.parametrize(
    ("paddings", "times", "seen"), [((0.0, 0.7), 0.4, True), ((0.0, 0.7), 0.98, False), ((0.2, 0.7), 0.4, False)]
)
def test_a_go_that_does_not_see_the_padding_says_so(
    capsys: pytest.CaptureFixture[str], paddings: tuple[float, float], times: float, seen: bool
) -> None:
    ours, padded = (
        {"contender": title, "rows_per_second": 100 * speed, "padding_fraction": padding}
        for title, padding, speed in zip(("ours", "ours_padded"), paddings, (1.0, times), strict=True)
    )
    assert tell_whether_padding_is_seen(ours, padded, "rows_per_second") is seen
    assert ("WARNING: padding is not seen" in capsys.readouterr().out) is not seen
    assert tell_whether_padding_is_seen(ours, {"contender": "ours_padded"}, "rows_per_second") is None


def test_padding_that_the_plan_does_not_know_of_is_counted(tmp_path: Path) -> None:
    rows = answer_rows(9, 5, 12, 7)
    trainer = tiny_trainer(tiny_llama(tmp_path), tmp_path, rows, padded=False, max_steps=1)
    trainer.collator = lambda evaluating: PadToLongest(0, "right")  # type: ignore[method-assign]
    places = count_places(trainer)
    trainer.train()
    assert sum(places) == 4 * 12 > sum(map(len, rows["input_ids"])) == sum(trainer.batches.counts(0, 0)[2:])


def test_a_llamas_few_laps_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(Path(), Path(), steps=6, steps_per_lap=1, folder=Path())
    race = Race(llama.compete, 0.0, 0.0)
    race.counted["one"] = {"tokens_of_steps": [10] * 6, "padding_fraction": 0.0, "peak_memory_bytes": 1}
    lines = []
    for laps in (4, 5):
        race.laps["one"] = [2.0] * laps
        lines.append(llama._line("one", job, race, 1.0))
    assert [line["few_laps"] for line in lines] == [True, False]
    llama.show(lines)
    assert capsys.readouterr().out.count("  of 4 laps alone, where 5 are enough\n") == 1


def test_a_llama_is_not_begun_in_the_last_third_of_its_part(tmp_path: Path) -> None:
    plan = Plan("tiny", tmp_path, tmp_path / "trace", False, start=time.time() - 70, deadline=time.time() + 30)
    runs = llama.contenders("lora", llama.SIZES["tiny"], np.arange(1, 49))
    found: dict[str, Any] = {}
    llama.run_race(runs, plan, Job(tmp_path, tmp_path, 2, 1, tmp_path), 1.0, found.update)
    assert [line["error"] for line in found["contenders"]] == ["No time was left to start it."] * 4
    assert found["padding_is_seen"] is None


def test_the_trainer_at_its_best_waits_for_no_batch(tmp_path: Path) -> None:
    runs = {each.title: each for each in classifier_gpu.contenders(classifier_gpu.SIZES["full"], ())}
    args = TrainingArguments(str(tmp_path), use_cpu=True, **runs["trainer_best"].settings)
    config: Any = args.accelerator_config
    assert config.non_blocking


def test_trl_gets_the_rows_of_each_step_of_ours() -> None:
    runs = {each.title: each for each in llama.contenders("lora", llama.SIZES["tiny"], np.arange(1, 49))}
    seeded = torch.Generator().manual_seed(runs["lora_ours_joined"].settings["data_seed"])
    steps = torch.randperm(48, generator=seeded).view(-1, 8)[:2].tolist()  # the plain shuffled recipe's
    order = runs["lora_trl"].order
    assert [sorted(order[:8]), sorted(order[8:])] == [sorted(step) for step in steps]


def errors_in(found: Any) -> Iterator[str]:
    if isinstance(found, dict):
        yield from ([str(found["error"])] if "error" in found else [])
        found = list(found.values())
    if isinstance(found, list):
        for each in found:
            yield from errors_in(each)


def gpu(results: Path, *flags: str, minutes: float = 10) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--size", "tiny", "--minutes", str(minutes)]
    return subprocess.run(
        [*command, "--results", str(results), *flags], cwd=ROOT, capture_output=True, text=True, check=False
    )


def parts_of_gpu(results: Path, name: str, *flags: str) -> dict[str, Any]:
    done = gpu(results, *flags)
    assert done.returncode == 0, done.stderr
    (path,) = results.glob(f"*-{name}.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    parts: dict[str, Any] = found["parts"]
    assert list(errors_in(parts)) == []
    assert found["not_measured"] == left_out(list(parts))
    assert f"{found['not_measured']}\nwritten to" in done.stdout
    return parts


@pytest.mark.slow
def test_nobody_is_the_first_to_import_what_all_import() -> None:
    listing = f"{classifier_gpu.WARM_UP}\nimport sys\nprint(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", listing], cwd=ROOT, capture_output=True, text=True, check=True)
    ours = {"indictune.train.classifier_trainer", "indictune.data.cache", "indictune.distributed.launch"}
    theirs = {"accelerate.data_loader", "datasets.arrow_dataset", "transformers.models.bert.modeling_bert"}
    assert ours | theirs | {"deepspeed.runtime.engine"} <= set(told.stdout.split())
    hidden = f"import sys\nsys.modules['deepspeed'] = None\n{listing}"  # as where it is not installed
    told = subprocess.run([sys.executable, "-c", hidden], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ours | theirs <= set(told.stdout.split())


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_a_compiled_model_is_measured_in_a_run_of_its_own(tmp_path: Path) -> None:
    parts = parts_of_gpu(tmp_path, "gpu-device-compiled-tiny", "--parts", "compiled")
    assert [line["times_ours"] > 0 for line in parts["compiled"]["contenders"]] == [True, True]


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_a_compiled_models_losses_are_compared_in_a_run_of_their_own(tmp_path: Path) -> None:
    parts = parts_of_gpu(tmp_path, "gpu-device-compiled_losses-tiny", "--parts", "compiled_losses")
    curve = parts["compiled_losses"]
    assert (curve["agrees"], curve["learned"]) == (True, True)
    assert (curve["rows"], curve["global_batch_size"]) == (256, 64)
    assert len(curve["bf16"]["compiled"]) == len(curve["compiled"]) == curve["steps"]
    assert curve["bf16"]["compiled"] != curve["compiled"]


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_a_whole_epoch_is_trained_on_rows_that_were_prepared_before(tmp_path: Path) -> None:
    parts = parts_of_gpu(tmp_path, "gpu-device-epoch-tiny", "--parts", "epoch")
    found = parts["epoch"]
    assert found["rows"] == 300
    assert found["preparation_s"] > 0
    assert found["process_s"] > found["train"]["runtime_s"]
    assert found["train"]["samples_per_second"] * found["train"]["runtime_s"] == pytest.approx(300)


def compared_with_trl(contenders: list[dict[str, Any]], method: str) -> None:
    """Each has its line, and all but those that pack have TRL's very rows, step by step."""
    names = ["ours_packed", "ours_joined", *["ours_fused"] * (method == "qlora"), "ours_padded", "trl"]
    assert [line["contender"] for line in contenders] == [f"{method}_{name}" for name in names]
    assert all(line["times_trl"] > 0 for line in contenders)
    _, *alike = [line["tokens_of_steps"] for line in contenders]
    assert alike == [alike[0]] * len(alike)
    assert [line["contender"] for line in contenders if line["padding_fraction"] > 0] == [
        f"{method}_ours_padded",
        f"{method}_trl",
    ]


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_lora_is_measured_in_a_run_of_its_own(tmp_path: Path) -> None:
    parts = parts_of_gpu(tmp_path, "gpu-device-llama_lora-tiny", "--parts", "llama_lora")
    compared_with_trl(parts["llama_lora"]["contenders"], "lora")
    assert parts["llama_lora"]["padding_is_seen"] in (True, False)


@pytest.mark.parametrize(
    ("last", "apart", "learned", "agrees"), [(0.5, 0.0, True, True), (1.0, 0.0, False, True), (0.5, 2e-4, True, False)]
)
def test_a_curve_that_shows_nothing_is_told(
    capsys: pytest.CaptureFixture[str], last: float, apart: float, learned: bool, agrees: bool
) -> None:
    ours = [1.0] * 9 + [last] * 3
    found = judge(ours, [*ours[:-1], last + apart])
    assert (found["learned"], found["agrees"]) == (learned, agrees)
    assert found["largest"] == pytest.approx(apart)
    said = capsys.readouterr().out
    assert ("WARNING: The loss fell from 1.000 to 1.000 only" in said) is not learned
    assert ("WARNING: The losses in fp32 are 2.0e-04 apart, not 1e-04 or less." in said) is not agrees


def test_a_row_of_a_curve_tells_its_label_and_is_as_long_as_before() -> None:
    row = {"text": "w100 w200 w300", "label": "positive", "language": "hi"}
    assert telling_its_label(row) == {**row, "text": "w7 w200 w7"}


def test_a_loss_that_is_no_number_agrees_with_none() -> None:
    assert not judge([1.0, 1.0], [1.0, float("nan")])["agrees"]


@pytest.mark.slow
def test_losses_in_fp32_are_told_where_the_trainer_fails_in_bf16(tmp_path: Path) -> None:
    rows = read_tweets(tmp_path)
    write_model(tmp_path / "model", rows, 2_000)
    job = Job(tmp_path / "model", write_rows(rows, tmp_path / "rows.jsonl"), 1, 1, tmp_path)
    settings: dict[str, dict[str, Any]] = {"": FP32, "_bf16": {**FP32, "bf16": True}}
    pairs = [
        (Contender(f"ours{kind}", settings=own), Contender(f"trainer{kind}", "longest", {**own, **wrong}))
        for (kind, own), wrong in zip(settings.items(), ({}, {"no_such_setting": 1}), strict=True)
    ]
    told: dict[str, Any] = {}
    with pytest.raises(RuntimeError, match="trainer_bf16 failed"):
        compare_curves("trainer", pairs, job, partial(compete, turns=TurnsWithAttention), told.update)
    assert told["largest"] < 1e-4
    assert len(told["ours"]) == len(told["trainer"]) == 1
    assert told["learned"] is False
    assert "bf16" not in told


def differ_in_bf16(curve: dict[str, Any], upstream: str) -> None:
    """The curves in bf16 are others than those in fp32, and near them; of each, its attention is told."""
    bf16 = curve["bf16"]
    for title in ("ours", upstream):
        assert bf16[title] != curve[title]
        assert bf16[title] == pytest.approx(curve[title], rel=0.02)
    mean = {title: sum(bf16[title]) / curve["steps"] for title in ("ours", upstream)}
    assert bf16[f"mean_of_ours_less_{upstream}"] == pytest.approx(mean["ours"] - mean[upstream])
    assert curve["attention"].keys() == {"ours", upstream, "ours_bf16", f"{upstream}_bf16"}
    for operations in curve["attention"].values():
        assert "aten::_scaled_dot_product_flash_attention_for_cpu" in operations


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_every_other_part_of_the_gpu_benchmark_runs_on_a_cpu_in_one_go(tmp_path: Path) -> None:
    parts = parts_of_gpu(tmp_path, "gpu-tiny")
    assert list(parts) == ["device", "classifier", "losses", "stages", "llama", "llama_stages", "llama_losses"]
    assert parts["device"]["bf16_matmul_tflops"] > 0
    lines = {line["contender"]: line for line in parts["classifier"]["contenders"]}
    assert len(lines) == 7
    for line in lines.values():
        assert line["rows_per_second"] > 0
        assert line["times_trainer_defaults"] > 0
        assert (line["laps"], line["few_laps"]) == (2, True)
    started_alone = ["trainer_defaults", "trainer_best", "ours"]
    assert [title for title, line in lines.items() if line.get("seconds_to_first_step", 0) > 0] == started_alone
    assert lines["ours"]["padding_fraction"] == 0 < lines["ours_padded"]["padding_fraction"]
    assert lines["ours_padded"]["times_ours"] > 0
    vocabulary = {title: line["trained_vocabulary"] for title, line in lines.items()}
    assert vocabulary["ours"] < vocabulary["ours_whole_vocabulary"] == vocabulary["trainer_best"] == 2_000
    assert parts["classifier"]["padding_is_seen"] in (True, False)  # two laps of a tiny model may lie either way
    assert lines["trainer_best"]["padding_fraction"] < lines["trainer_defaults"]["padding_fraction"]
    for upstream, curve in (("trainer", parts["losses"]), ("trl", parts["llama_losses"])):
        assert curve["largest"] < 1e-4
        assert (curve["agrees"], curve["learned"]) == (True, True)
        assert curve["padding"]["ours"] == 0 < curve["padding"][upstream]
        differ_in_bf16(curve, upstream)
    profiled = {**parts["stages"], **parts["llama_stages"]}
    for title in ("ours", "ours_without_dropout", "qlora_ours_joined"):
        assert sum(profiled[title]["share_of_busy_time"].values()) == pytest.approx(1, abs=0.01)
        assert profiled[title]["host"]["loading_and_collation_ms"] > 0
    for kind in ("gpu-tiny", "gpu-tiny.llama"):
        (trace,) = tmp_path.glob(f"*-{kind}.trace.json.gz")
        assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    compared_with_trl(parts["llama"]["contenders"], "qlora")
