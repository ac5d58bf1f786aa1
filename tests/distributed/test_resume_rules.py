"""Which launch goes on with another one's state, and the command that is told where none does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from indictune.config.arguments import IndicTrainingArguments
from indictune.config.plan import Launch
from indictune.config.recipe import read_recipe
from indictune.distributed.async_shards import check_async_save
from indictune.distributed.deepspeed_config import check_bad_steps
from indictune.distributed.resume_rules import can_go_on, command, doubt, refused_flags

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("before", ["single", "ddp", "fsdp2"])
@pytest.mark.parametrize("now", [Launch("single"), Launch("ddp", 3), Launch("fsdp2", 1), Launch("fsdp2_offload", 4)])
def test_what_torch_keeps_goes_over_to_any_number_of_processes(before: str, now: Launch) -> None:
    assert can_go_on(before, 2, now)


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_zeros_states_stay_with_as_many_processes_of_the_same_stage(stage: str) -> None:
    assert can_go_on(stage, 2, Launch(stage, 2))
    assert can_go_on(stage, 2, Launch(f"{stage}_offload", 2))
    assert can_go_on(f"{stage}_offload", 2, Launch(stage, 2))
    assert not can_go_on(stage, 2, Launch(stage, 1))
    for other in ("single", "ddp", "fsdp2", "zero0"):
        assert not can_go_on(stage, 2, Launch(other, 2))
        assert not can_go_on(other, 2, Launch(stage, 2))


def test_the_command_is_what_was_typed_under_another_launcher() -> None:
    typed = [
        "scripts/train.py",
        "--local_rank=0",
        "--deepspeed",
        "z.json",
        "--max_length",
        "48",
        "--text_column",
        "a b",
    ]
    zero = Launch("zero2", 4, 4)
    assert command("single", 1, typed, zero) == "python scripts/train.py --max_length 48 --text_column 'a b'"
    assert command("fsdp2", 4, ["s.py", "--deepspeed=z.json", "--deepspeed"], zero) == (
        "accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 4 s.py"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--hub_token", "anything"],
        ["--hub-token", "anything"],
        ["--hub_token=anything"],
        ["--run_name", f"hf_{'x' * 34}"],
        [f"--run_name=hf_{'x' * 34}"],
        ["--dataset_name", "https://me:anything@huggingface.co/me/set"],
        [f"--hf_{'x' * 34}"],
    ],
)
def test_the_command_repeats_no_token(words: list[str]) -> None:
    typed = ["s.py", "--max_length", "48", *words, "--report_to", "none", "tensorboard"]
    assert command("single", 1, typed, Launch("zero2", 4, 4)) == (
        "python s.py --max_length 48 --report_to none tensorboard"
    )


STRATEGIES = ("ddp", "fsdp2_offload", "zero1_offload", "zero2_offload", "zero3_offload")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("typed_in", [ROOT, ROOT / "scripts", ROOT / "tests" / "distributed", Path("/")])
@pytest.mark.parametrize("is_absolute", [False, True])
def test_the_command_names_a_file_that_is_there_wherever_it_is_typed(
    monkeypatch: pytest.MonkeyPatch, strategy: str, typed_in: Path, is_absolute: bool
) -> None:
    monkeypatch.chdir(typed_in)
    script = ROOT / "scripts" / "train_sentiment.py"
    typed = str(script) if is_absolute else os.path.relpath(script, typed_in)
    words = command(strategy, 2, [typed, "--seed", "1"], Launch("single")).split()
    (config,) = (Path(word) for word in words if word.endswith((".json", ".yaml")))
    assert config.is_file()
    assert config.is_absolute() == is_absolute
    assert config.stem == strategy or strategy == "zero1_offload"


def test_the_command_has_the_deepspeed_file_of_a_run_of_the_same_stage() -> None:
    """Another number of processes is all that it changes."""
    refused = Launch("zero2", 4, 4, deepspeed_source="mine.json")
    typed = ["s.py", "--deepspeed", "mine.json", "--seed", "1"]
    assert command("zero2_offload", 2, typed, refused) == (
        "torchrun --nproc_per_node 2 s.py --seed 1 --deepspeed mine.json"
    )
    assert command("zero3", 4, typed, refused) == (
        "torchrun --nproc_per_node 4 s.py --seed 1 --deepspeed ds_configs/zero3.json"
    )
    assert doubt("zero2_offload", 2, refused, typed) == ""
    assert doubt("ddp", 2, refused, typed) == doubt("single", 1, refused, typed) == ""
    assert doubt("zero3", 4, refused, typed) == " If it was trained with a DeepSpeed file of your own, give that one."
    assert doubt("ddp", 2, refused, ["s.py", "--config", "r.yaml"]) == " Take deepspeed out of the recipe before."


@pytest.mark.parametrize(
    ("processes", "gpus", "launch", "nodes"),
    [
        (2, 0, Launch("single"), None),  # a machine without a GPU takes any number
        (2, 8, Launch("single"), None),
        (8, 8, Launch("zero3", 16, 8), None),
        (16, 8, Launch("zero3", 8, 8), "--nnodes 2 --nproc_per_node 8"),
        (16, 1, Launch("zero3", 4, 4), "--nnodes 4 --nproc_per_node 4"),  # each sees its own GPU alone
        (16, 0, Launch("zero3", 8, 4), "--nnodes 4 --nproc_per_node 4"),
        (12, 8, Launch("zero3", 8, 8), "--nnodes NODES --nproc_per_node PROCESSES"),
    ],
)
def test_the_command_has_the_nodes_that_the_processes_need(
    monkeypatch: pytest.MonkeyPatch, processes: int, gpus: int, launch: Launch, nodes: str | None
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    if nodes is None:
        places, told = f"--nproc_per_node {processes}", ""
        machines = ""
    else:
        places = f"{nodes} --rdzv_backend c10d --rdzv_endpoint HOST:29500"
        told = f" Type it on every node, {processes} processes in all, with the name of the first for HOST."
        count = nodes.split()[1]
        machines = f" --num_machines {count} --machine_rank RANK --main_process_ip HOST --main_process_port 29500"
    assert command("zero3", processes, ["s.py"], launch) == f"torchrun {places} s.py --deepspeed ds_configs/zero3.json"
    own_file = " If it was trained with a DeepSpeed file of your own, give that one."
    assert doubt("zero3", processes, launch, ["s.py"]) == told + own_file
    file = "--config_file accelerate_configs/fsdp2.yaml"
    assert command("fsdp2", processes, ["s.py"], launch) == (
        f"accelerate launch {file} --num_processes {processes}{machines} s.py"
    )
    assert doubt("fsdp2", processes, launch, ["s.py"]) == told.replace(
        "for HOST", "for HOST and the node's number, from 0, for RANK"
    )


@pytest.mark.parametrize(
    "typed", [["--per_device_train_batch_size", "8"], ["--per-device-train-batch-size=8"], ["--seed", "1"]]
)
def test_the_command_has_the_micro_batch_that_fits_in_place_of_the_given_one(typed: list[str]) -> None:
    given = ["s.py", *typed, "--gradient-accumulation-steps", "1"]
    words = command("zero2", 2, given, Launch("ddp", 2, 2), {"--per_device_train_batch_size": "4"}).split()
    assert not any("-" in word.removeprefix("--") for word in words if word.startswith("--"))
    assert words.count("--per_device_train_batch_size") == 1
    assert words[words.index("--per_device_train_batch_size") + 1] == "4"
    assert "--gradient_accumulation_steps" not in words
    assert " ".join(["s.py", *typed]) in command("zero2", 2, ["s.py", *typed], Launch("ddp", 2, 2))


OF_BOTH = ["--async_save", "true", "--on-nonfinite=skip"]


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("is_typed", [True, False])
@pytest.mark.parametrize(
    ("strategy", "world_size"), [("single", 1), ("ddp", 2), ("fsdp2", 1), ("fsdp2_offload", 2), ("zero3", 2)]
)
def test_the_strategy_of_the_command_takes_its_flags(
    strategy: str, world_size: int, is_typed: bool, method: str
) -> None:
    """Wherever they are given: what is not typed is in the recipe file."""
    given: dict[str, Any] = {"async_save": True, "on_nonfinite": "skip"}
    changed = refused_flags(strategy, world_size, {**given, "method": method})
    typed = ["s.py", *(OF_BOTH if is_typed else []), "--seed", "1"]
    words = command(strategy, world_size, typed, Launch("ddp", 2, 2), changed).split()
    recipe = read_recipe(words[words.index("s.py") + 1 :], (IndicTrainingArguments,))
    assert not recipe.problems
    effective = {**given, **recipe.values}
    if effective["async_save"]:
        check_async_save(Launch(strategy, world_size), method)
    check_bad_steps(strategy, effective["on_nonfinite"])
    assert effective["async_save"] == (strategy == "fsdp2_offload" and method == "full")
    assert effective["on_nonfinite"] == ("rollback" if strategy == "zero3" else "skip")


@pytest.mark.parametrize(
    ("there", "method", "is_refused"),
    [
        (("single", 1), "full", True),
        (("ddp", 2), "full", False),
        (("fsdp2", 2), "lora", True),
        (("ddp", 2), "lora", False),
    ],
)
def test_a_type_of_sums_that_the_strategy_of_the_command_does_not_take_is_changed(
    there: tuple[str, int], method: str, is_refused: bool
) -> None:
    asked = {"async_save": False, "on_nonfinite": "stop", "reduce_dtype": "bfloat16", "method": method}
    assert refused_flags(*there, asked) == ({"--reduce_dtype": "float32"} if is_refused else {})


def test_flags_that_the_strategy_of_the_command_takes_are_left_as_they_are() -> None:
    assert refused_flags("zero3", 2, {"async_save": False, "on_nonfinite": "rollback"}) == {}
    assert refused_flags("zero3", 2, {"async_save": False, "on_nonfinite": "stop"}) == {}
    assert refused_flags("fsdp2", 2, {"async_save": True, "on_nonfinite": "skip"}) == {}
