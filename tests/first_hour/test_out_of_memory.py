"""A run that is out of memory, or misses something else of the machine, says so in one line with a way out."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import BertConfig, LlamaConfig, PreTrainedConfig

from indictune import stop_signals
from indictune.cli import main
from indictune.config.arguments import DataArguments
from indictune.config.plan import AnyPlan, Axes, Launch, unresolved
from indictune.distributed.choose_launcher import Launcher
from indictune.planning import hardware
from indictune.planning.machine_failures import check_interfaces, compared, estimated, out_of_memory, smallest_change
from indictune.planning.memory import Memory
from indictune.run import Progress, Run
from indictune.stop_signals import SIGNALS
from indictune.supervise.execute import execute
from indictune.supervise.watchdog import Ranks
from tests.conftest import FinishedRun
from tests.plans import codes_of, plan_of
from tests.ranks.launching import SCRIPT, accelerate, python, start
from tests.supervise.test_execute import refused

ENCODER = BertConfig(vocab_size=250_000)  # 278 million parameters: 4.4 GB of weights, gradients and states
LLAMA_8B = LlamaConfig(vocab_size=128_256, num_key_value_heads=8, intermediate_size=14_336)
ALONE = Launch("single")
DDP = Launch("ddp", world_size=4, local_world_size=4)
FSDP2 = replace(DDP, strategy="fsdp2", axes=Axes(is_sharded=True))
GIB = 2**30
CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 512.00 MiB is "
    "free. Including non-PyTorch memory, this process has 78.5 GiB memory in use."
)


def plan_for(config: PreTrainedConfig, max_length: int, method: str = "full", **given: Any) -> AnyPlan:
    launch, gpus = given.pop("launch", ALONE), given.pop("gpus", 1)
    plan = plan_of(given, {"method": method}, launch, gpus=gpus)
    data = unresolved(DataArguments, {"max_length": max_length})
    head = "ForCausalLM" if isinstance(config, LlamaConfig) else "ForSequenceClassification"
    return replace(plan, data=data, model_config=config, head=head)


ONE_ROW: dict[str, Any] = {"bf16": True, "per_device_train_batch_size": 1}
KEPT: dict[str, Any] = {**ONE_ROW, "gradient_checkpointing": True}


def rows_at_once(rows: int, at_once: int, launch: Launch = ALONE) -> AnyPlan:
    sizes: dict[str, Any] = {"global_batch_size": rows, "per_device_train_batch_size": at_once}
    return plan_for(ENCODER, 512, launch=launch, **sizes)


@pytest.mark.parametrize(
    ("plan", "capacity", "flags"),
    [
        (rows_at_once(64, 64), 12, "--per_device_train_batch_size 16 ("),
        (rows_at_once(48, 12, DDP), 8, "--per_device_train_batch_size 6 ("),
        (plan_for(ENCODER, 512, max_tokens_per_device=8192), 8, "--max_tokens_per_device 4096 ("),
        (plan_for(LLAMA_8B, 8192, "lora", **ONE_ROW), 40, "--gradient_checkpointing true ("),
        (plan_for(LLAMA_8B, 2048, launch=DDP, **KEPT), 80, "--strategy fsdp2 (accelerate_configs/fsdp2.yaml)"),
        (plan_for(LLAMA_8B, 2048, launch=FSDP2, gradient_accumulation_steps=16, **KEPT), 48, "--strategy zero3 "),
        (plan_for(LLAMA_8B, 2048, launch=replace(DDP, strategy="zero3"), **KEPT), 24, "--strategy zero3_offload "),
        (plan_for(LLAMA_8B, 2048, **KEPT), 24, "--method lora ("),
        (plan_for(LLAMA_8B, 2048, "lora", **KEPT), 12, "--method qlora ("),
    ],
)  # fmt: skip
def test_the_smallest_change_that_fits_is_named(plan: AnyPlan, capacity: int, flags: str) -> None:
    """The capacity is in GiB. The estimates are in tests/planning/test_memory.py."""
    needed = estimated(plan)
    assert needed is not None
    assert smallest_change(plan, needed, capacity * GIB).startswith(f"Use {flags}")


def test_processes_on_one_cpu_share_its_memory() -> None:
    given: dict[str, Any] = {"global_batch_size": 64, "per_device_train_batch_size": 16, "gpus": 0}
    alone, of_four = plan_for(ENCODER, 512, **given), plan_for(ENCODER, 512, launch=DDP, **given)
    for plan, capacity in ((alone, 8), (of_four, 32)):
        needed = estimated(plan)
        assert needed is not None
        assert "--per_device_train_batch_size 8 (" in smallest_change(plan, needed, capacity * GIB)


def test_without_a_change_that_fits_none_is_named() -> None:
    plan = plan_for(LLAMA_8B, 2048, "qlora", **KEPT)
    needed = estimated(plan)
    assert needed is not None
    assert "--" not in smallest_change(plan, needed, GIB)


def test_the_answer_has_what_was_asked_for_and_free_and_the_largest_term() -> None:
    answer = str(out_of_memory(torch.OutOfMemoryError(CUDA_TEXT), rows_at_once(64, 64), 3, "a backward pass"))
    where, _, numbers = answer.partition(": ")
    assert where == "Out of memory on the GPU after step 3 (a backward pass)"
    assert numbers.startswith("2.1 GB were asked for, 536.9 MB of 84.9 GB were free. ")
    assert " is activations, 20.5 GB (" in answer
    assert answer.endswith("[out-of-memory]")


def test_an_evaluation_gets_its_own_flag() -> None:
    plan = plan_for(ENCODER, 512, per_device_eval_batch_size=64)
    answer = out_of_memory(torch.OutOfMemoryError(CUDA_TEXT), plan, 3, "evaluating a batch")
    assert str(answer.details["change"]).startswith("Use --per_device_eval_batch_size 32;")


def ask_torch(run: Run) -> None:
    torch.empty(2**46, dtype=torch.uint8)


def ask_numpy(run: Run) -> None:
    np.empty(2**46, dtype=np.uint8)


def ask_python(run: Run) -> None:
    bytearray(2**46)


def lose_a_worker(run: Run) -> None:
    words = "It is possible that dataloader's workers are out of shared memory."
    raise RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly") from RuntimeError(words)


@pytest.mark.parametrize(
    ("main", "says", "code"),
    [
        (ask_torch, "70,368.7 GB were asked for, ", "out-of-memory"),
        (ask_numpy, "70,368.7 GB were asked for, ", "out-of-memory"),
        (ask_python, "an unknown amount was asked for, ", "out-of-memory"),
        (lose_a_worker, "/dev/shm is too small: ", "shared-memory-full"),
    ],
)  # fmt: skip
def test_it_ends_with_one_line(
    main: Any,
    says: str,
    code: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("indictune.planning.machine_failures.OWN_PROGRESS", Progress())
    assert execute(main, refused("--output_dir", str(tmp_path / "out"))) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("indictune: ")
    assert says in line
    assert line.endswith(f"[{code}]")
    status = json.loads((tmp_path / "out/status.json").read_text(encoding="utf-8"))
    assert status == {"state": "failed", "message": line.removeprefix("indictune: ")}


def test_a_run_without_memory_for_its_second_step_is_answered(finished_run: FinishedRun, tmp_path: Path) -> None:
    sizes = ("--global_batch_size", "16", "--per_device_train_batch_size", "16")
    flags = ("--config", str(finished_run.recipe), "--output_dir", str(tmp_path / "out"), *sizes)
    event = "ENOMEM@indictune.training.exact_trainer:ExactTrainer.training_step:2"
    result = start([*python(), "tests/faults/faulty.py", event, SCRIPT, *flags])
    assert result.returncode == 1
    message = json.loads((tmp_path / "out/status.json").read_text(encoding="utf-8"))["message"]
    assert result.stderr.splitlines()[-1] == f"indictune: {message}"
    assert "Traceback" not in result.stderr
    assert message.startswith("Out of memory on the CPU after step 1 (reading rows): ")
    assert "Use --per_device_train_batch_size 8 (" in message
    assert message.endswith("[out-of-memory]")


PAIR = re.compile(r"(parameters|gradients|optimizer states) ([\d.]+) MB, ([\d.]+) MB")
TRAINER, RUNNER = "training.exact_trainer:ExactTrainer", "distributed.pipeline.runner:Runner"
STAGES = ("--megatron_lm_pp_degree", "2", "--megatron_lm_use_custom_fsdp", "true")  # in shards


@pytest.mark.parametrize(
    ("strategy", "place"),
    [
        ("single", f"{TRAINER}._get_grad_norm:2"),
        # Between micro-batches, and before the last backward pass of the first and the last stage.
        pytest.param("fsdp2", f"{TRAINER}.training_step:4@1", marks=pytest.mark.slow),
        pytest.param("zero3", f"{TRAINER}.training_step:4@1", marks=pytest.mark.slow),
        pytest.param("pipeline", f"{RUNNER}._backward:8@0", marks=pytest.mark.slow),
        pytest.param("pipeline", f"{RUNNER}._backward:8@3", marks=pytest.mark.slow),
    ],
    ids=["single", "fsdp2", "zero3", "first stage", "last stage"],
)
def test_what_a_rank_held_stands_beside_what_was_predicted(
    strategy: str, place: str, finished_run: FinishedRun, tmp_path: Path
) -> None:
    rank, in_stages = place.partition("@")[2], strategy == "pipeline"
    launch = [*accelerate(strategy, 4), *STAGES] if in_stages else accelerate(strategy, 2) if rank else python()
    sizes = ("--global_batch_size", "8", "--per_device_train_batch_size", "1" if in_stages else "2")
    flags = ("--config", str(finished_run.recipe), "--output_dir", str(tmp_path / "out"), *sizes)
    result = start([*launch, "tests/faults/faulty.py", f"OUT_OF_MEMORY@indictune.{place}", SCRIPT, *flags])
    assert result.returncode == 1
    message = json.loads((tmp_path / "out/status.json").read_text(encoding="utf-8"))["message"]
    assert message.startswith(f"[rank {rank}] Out of memory" if rank in ("1", "3") else "Out of memory on the GPU")
    assert message.count("[out-of-memory]") == 1
    found = PAIR.findall(message)
    assert len(found) == 3
    for _, predicted, held in found:
        assert float(predicted) == pytest.approx(float(held), rel=0.05, abs=0.11)  # of one decimal


def test_all_else_is_what_no_term_has() -> None:
    predicted = Memory(10**9, 2 * 10**9, 3 * 10**9, activations=5 * 10**9, working_copies=10**8)
    held = {"parameters": 10**9, "gradients": 0, "optimizer_states": 3 * 10**9}
    *parts, rest = compared(predicted, held, used=11 * 10**9).split("; ")
    assert parts == ["parameters 1.0 GB, 1.0 GB", "gradients 2.0 GB, 0.0 MB", "optimizer states 3.0 GB, 3.0 GB"]
    assert rest == "all else 5.1 GB (activations 5.0 GB, working copies 100.0 MB), 7.0 GB"


@pytest.mark.more
def test_a_port_in_use_is_named(finished_run: FinishedRun, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        variables = {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        flags = ("--config", str(finished_run.recipe), "--output_dir", str(tmp_path / "out"))
        result = start([*python(), SCRIPT, *flags], variables)
    line = result.stderr.splitlines()[-1]
    assert line.startswith(f"indictune: MASTER_PORT {port} is in use")
    status = json.loads((tmp_path / "out/status.json").read_text(encoding="utf-8"))
    assert status == {"state": "failed", "message": line.removeprefix("indictune: ")}
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("variables", "gpus", "refused"),
    [
        ({"GLOO_SOCKET_IFNAME": "missing0"}, 0, ["GLOO_SOCKET_IFNAME"]),
        ({"NCCL_SOCKET_IFNAME": "missing"}, 4, ["NCCL_SOCKET_IFNAME"]),
        ({"NCCL_SOCKET_IFNAME": "=l"}, 4, ["NCCL_SOCKET_IFNAME"]),
        ({"NCCL_SOCKET_IFNAME": "missing"}, 0, []),
        ({"NCCL_SOCKET_IFNAME": "missing,l", "GLOO_SOCKET_IFNAME": "lo"}, 4, []),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, 4, []),
        ({"NCCL_SOCKET_IFNAME": "=lo"}, 4, []),
    ],
)
def test_an_interface_that_is_missing_is_named(variables: dict[str, str], gpus: int, refused: list[str]) -> None:
    found = codes_of(check_interfaces, plan_of(launch=DDP, gpus=gpus, environ=variables))
    assert found == [("network-interface-missing", each) for each in refused]
    assert check_interfaces(plan_of(gpus=gpus, environ=variables)) == []  # one process uses none


def killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int) -> None:
    monkeypatch.setattr(stop_signals, "COUNTS", tmp_path / "vmstat")
    (tmp_path / "vmstat").write_text(f"oom_kill_others 9\noom_kill {count}\n", encoding="ascii")


@pytest.mark.more
@pytest.mark.parametrize("kills", [pytest.param(0, marks=pytest.mark.more), 1])
def test_a_killed_rank_is_put_down_to_memory_if_the_kernel_says_so(
    kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is a process that has ended; rank 1 sees a broken connection."""
    monkeypatch.chdir(tmp_path)
    killed(monkeypatch, tmp_path, 3)
    monkeypatch.setenv("WORLD_SIZE", "2")
    other = Ranks.of_launch(Path("out/logs"), os.environ)
    with subprocess.Popen(["true"]) as process:
        other.mine.pid = process.pid
    Path("out/logs").mkdir(parents=True)
    other.begin()
    monkeypatch.setenv("RANK", "1")

    def fail(run: Run) -> None:
        killed(monkeypatch, tmp_path, 3 + kills)
        raise ConnectionResetError("by peer")

    assert execute(fail, refused("--output_dir", "out")) == 1
    message = json.loads(Path("out/status.json").read_text(encoding="utf-8"))["message"]
    assert "is gone" in message
    assert message.endswith("[rank-killed-for-memory]") == (kills > 0)


def test_the_tightest_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(tmp_path / "max", tmp_path / "now"), (tmp_path / "missing", tmp_path / "now")]
    monkeypatch.setattr(hardware, "CONTROL_GROUPS", limits)
    (tmp_path / "now").write_text("400\n", encoding="ascii")
    for limit, found in (("1000\n", (600, 1000)), ("max\n", psutil.virtual_memory().total)):
        (tmp_path / "max").write_text(limit, encoding="ascii")
        assert found in (hardware.free_and_capacity(), hardware.free_and_capacity()[1])


@pytest.mark.parametrize("kills", [0, 1])
def test_a_lone_process_that_the_kernel_kills_is_answered_for(
    kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    killed(monkeypatch, tmp_path, 3)
    count = f"open('vmstat', 'w').write('oom_kill {3 + kills}')"
    command = [sys.executable, "-c", f"import os; {count}; os.kill(os.getpid(), 9)"]
    monkeypatch.setattr(Launcher, "command", lambda self, script, words: command)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        code = main(["train", "sentiment", "--output_dir", "out", "--num_processes", "1"])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert code == 128 + signal.SIGKILL
    assert ("[rank-killed-for-memory]" in capsys.readouterr().err) == (kills > 0)
    assert (tmp_path / "out/status.json").exists() == (kills > 0)
