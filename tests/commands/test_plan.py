"""`indictune plan`: a ranking of the strategy files, the command that starts a run, and refusals."""

from __future__ import annotations

import json
import shlex
import socket
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from indictune.cli import main
from indictune.commands.train import read_asked
from tests.ranks.test_tasks import JOB, write_answer_pairs

LARGE = LlamaConfig(
    vocab_size=128_256, hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64,
    num_key_value_heads=8, architectures=["LlamaForCausalLM"],
)  # fmt: skip
NODES = [
    "--task",
    "chat",
    "--gpus",
    "32",
    "--nodes",
    "4",
    "--gpu",
    "h100",
    "--max_length",
    "2048",
    "--global_batch_size",
    "32",
]
BERT = ["--model", "builtin:tiny-indic-bert"]
DEMO = "recipes/sentiment/demo.yaml"


def flags_of(layers: int, folder: Path) -> list[str]:
    """Flags of a LLaMA with layers as in the one of 70B, of which only config.json is there."""
    LlamaConfig(**{**LARGE.to_dict(), "num_hidden_layers": layers}).save_pretrained(folder)
    return ["--model", str(folder / "config.json"), *NODES, "--gradient_checkpointing", "true", "--bf16", "true"]


@pytest.fixture
def wide(tmp_path: Path) -> list[str]:
    """Flags of 5.5 billion parameters in 4 layers, which are planned fast."""
    return flags_of(4, tmp_path)


def planned(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == code
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return record


def shown(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["plan", *words]) == code
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    return text


def test_70_billion_parameters_are_planned_from_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every = planned(capsys, *flags_of(80, tmp_path), "--method", "full")["candidates"]
    assert every[0]["fits"]
    found = {each["strategy"]: each for each in every}
    assert not found["ddp"]["fits"]
    assert found["ddp"]["memory"]["optimizer_states"] == 8 * 70_553_706_496
    assert found["fsdp2"]["memory"]["optimizer_states"] == pytest.approx(8 * 70_553_706_496 / 32)
    assert sum(found["fsdp2"]["memory"].values()) == 2 * found["fsdp2"]["memory"]["total"]
    assert found["fsdp2"]["written"]["checkpoint"] == pytest.approx(12 * 70_553_706_496)
    assert found["zero3_offload"]["cpu_memory_of_a_node"]["offloaded"] == pytest.approx(18 * 70_553_706_496 / 4)


def test_the_text_ranks_what_fits_and_says_why_the_rest_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a short path: it is shown whole
    wide = flags_of(4, Path("model"))
    text = shown(capsys, *wide)
    (line,) = [each for each in text.splitlines() if each.startswith("  ddp: ")]
    assert line.endswith(" GB optimizer states")
    assert "not calibrated on a GPU" in text
    assert "\nlora, " in text
    assert "\nqlora, " in text
    text = shown(capsys, *wide, "--method", "lora")
    assert "qlora" not in text


def test_several_nodes_start_with_a_command_for_each(wide: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    best = planned(capsys, *wide, "--method", "full")["candidates"][0]
    words = shlex.split(best["command"].replace("\\\n", " "))
    values = dict(pairwise(words))
    assert words[:2] == ["accelerate", "launch"]
    assert values["--config_file"] == f"accelerate_configs/{best['strategy']}.yaml"
    assert (values["--num_machines"], values["--num_processes"], values["--machine_rank"]) == ("4", "32", "NODE")
    assert values["--per_device_train_batch_size"] == str(best["micro_batch"]["rows"])
    assert "scripts/train_llama.py" in words
    assert {"--train_file", "--output_dir", "--bf16"} < set(words)
    assert not {"--task", "--gpus", "--nodes", "--gpu", "--model"} & set(words)


def test_one_node_starts_by_the_command_of_this_package(capsys: pytest.CaptureFixture[str]) -> None:
    best = planned(capsys, DEMO, "--gpus", "8", "--max_length", "32")["candidates"][0]
    words = shlex.split(best["command"].replace("\\\n", " "))
    assert words[:3] == ["indictune", "train", DEMO]
    asked = read_asked(words[2:])
    assert (asked.launch.strategy, asked.launch.num_processes) == (best["strategy"], 8)
    assert asked.flags == {"max_length": ["32"], "per_device_train_batch_size": ["4"]}


def test_a_model_without_a_recipe_starts_by_its_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").touch()  # the reader's
    flags = ["--model", "builtin:tiny-indic-llama", "--task", "chat", "--method", "lora", "--max_length", "99"]
    best = planned(capsys, *flags)["candidates"][0]
    asked = read_asked(shlex.split(best["command"].replace("\\\n", " "))[2:])
    assert (asked.task, asked.launch.strategy) == ("chat", "single_gpu")
    given = {"model_name_or_path": "builtin:tiny-indic-llama", "method": "lora", "train_file": "FILE"}
    values = {**given, "max_length": "99", "per_device_train_batch_size": str(best["micro_batch"]["rows"])}
    assert asked.flags == {name: [value] for name, value in values.items()}


def test_gpus_without_bf16_are_planned_in_fp16(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "builtin:tiny-indic-llama", "--method", "full", "--gpus", "2", "--max_length", "99"]
    of_t4, of_l4 = (planned(capsys, *words, "--bf16", "true", "--gpu", gpu) for gpu in ("t4", "l4"))
    best = of_t4["candidates"][0]
    values = dict(pairwise(shlex.split(best["command"].replace("\\\n", " "))))
    assert (values["--bf16"], values["--fp16"]) == ("false", "true")
    assert best["memory"] == of_l4["candidates"][0]["memory"]
    assert "--fp16" not in of_l4["candidates"][0]["command"]
    refused = {each["strategy"] for each in of_t4["candidates"] if "fp16" in each.get("refused", "")}
    assert {"tp", "pipeline"} <= refused


def test_rows_that_are_there_give_the_time_of_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    record = planned(capsys, DEMO, "--gpus", "2")
    lengths = record["run"]["row_tokens"]
    assert lengths["rows"] == 1170
    assert 20 < lengths["mean"] < lengths["longest"] == 40
    best = record["candidates"][0]
    steps = -(-1170 // 32)
    assert best["hours_of_an_epoch"] == pytest.approx(steps * best["step"]["seconds"] / 3600)
    assert best["micro_batch"]["tokens"] == best["micro_batch"]["rows"] * 40


def test_packed_rows_have_the_tokens_and_the_attention_of_their_conversations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["recipes/llama/demo.yaml", "--method", "full", "--per_device_train_batch_size", "2"]
    packed, apart = (planned(capsys, *words, "--packing", choice) for choice in ("true", "false"))
    of_packed, of_apart = (each["run"]["row_tokens"] for each in (packed, apart))
    assert of_packed["rows"] < of_apart["rows"] / 2
    assert 200 < of_packed["mean"] <= of_packed["longest"] <= 256
    assert of_packed["rows"] * of_packed["mean"] == pytest.approx(of_apart["rows"] * of_apart["mean"])
    assert of_packed["attended"] == pytest.approx(of_apart["attended"])
    assert of_packed["attended"] < of_packed["mean"] / 2
    assert packed["candidates"][0]["micro_batch"]["tokens"] == 2 * of_packed["longest"]
    seconds = [run["rows"] / 4 * each["candidates"][0]["step"]["compute_s"] for run, each in
               ((of_packed, packed), (of_apart, apart))]  # fmt: skip
    assert seconds[0] == pytest.approx(seconds[1])


def test_only_the_used_rows_of_the_embedding_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    used, whole = (
        planned(capsys, DEMO, "--method", "full", "--active_vocabulary", choice)["candidates"][0]
        for choice in ("auto", "off")
    )
    rows = 5000 - 4041  # as the run prints it
    assert whole["memory"]["parameters"] - used["memory"]["parameters"] == rows * 128 * 4
    assert whole["written"]["model"] == used["written"]["model"]


def test_a_recipe_with_a_limit_of_tokens_is_planned_in_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    words = [DEMO, "--method", "full", "--per_device_train_batch_size", "2"]  # which does not count
    record = planned(capsys, *words, "--max_tokens_per_device", "80")
    best = record["candidates"][0]
    assert (best["micro_batch"]["tokens"], best["largest_micro_batch"]["tokens"]) == (80, 80)
    assert "--max_tokens_per_device 80" in best["command"]
    assert "per_device_train_batch_size" not in best["command"]


def test_nothing_fits(wide: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, *wide, "--gpu_memory", "1GB", code=1)
    assert "Nothing fits with --method full." in text
    assert "Nothing fits with --method qlora either." in text


def test_cpu_memory_that_is_too_small_is_the_reason(wide: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    every = planned(capsys, *wide, "--method", "full", "--host_memory", "30GB")["candidates"]
    found = {each["strategy"]: each for each in every}
    assert found["fsdp2"]["fits"]
    assert not found["zero3_offload"]["fits"]
    assert "CPU memory" in found["zero3_offload"]["why_not"]


def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.png"
    shown(capsys, *BERT, "--gpus", "8", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 20_000


def test_processes_that_no_file_can_use_are_no_question_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, *BERT, "--method", "full", "--max_length", "32", "--gpus", "7", code=1)
    assert "No file can run it" in text
    assert "Nothing fits" not in text


def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"hello": 1}', encoding="utf-8")
    assert main(["plan", "--model", str(path)]) == 2
    assert "[model-unreadable]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([], "argument-missing"),
        (["--gpu", "voodoo"], "plan-unknown-gpu"),
        (["--gpus", "8", "--nodes", "3"], "plan-uneven-nodes"),
        (["--gpu_memory", "much"], "plan-memory"),
        (["--gpu_memory", "1.2.3GB"], "plan-memory"),
        (["--host_memory", "0GB"], "plan-memory"),
        (["--interconnect", "nvlink", "--gpu", "l4"], "plan-interconnect"),
        (["--interconnect", "wire"], "plan-interconnect"),
        (["--gpus", "2", "--nodes", "2", "--internode", "fast"], "plan-internode"),
        (["--internode", "200Gb"], "no-effect"),
        (["--gpus", "0"], "expected-at-least"),
        (["--plot", "plan.pdf"], "picture-of-another-kind"),
        (["--plot", "no/such/folder/plan.png"], "plan-not-written"),
    ],
)
def test_bad_input_is_refused(words: list[str], code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *(BERT if words else []), *words]) == 2
    assert f"[{code}]" in capsys.readouterr().err


def test_all_problems_come_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpu", "voodoo", "--host_memory", "lots", "--gpus", "8", "--nodes", "3"]
    assert main(["plan", *BERT, *words]) == 2
    message = capsys.readouterr().err
    assert [
        code for code in ("plan-unknown-gpu", "plan-memory", "plan-uneven-nodes") if f"[{code}]" not in message
    ] == []
    assert max(map(len, message.splitlines())) <= 100


def test_flags_are_checked_before_a_model_is_looked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    for words, codes in (
        (["--lora_r", "0", "--gpus", "x"], ["wrong-type", "expected-at-least"]),
        (["--gpu", "voodoo", "--host_memory", "lots"], ["plan-unknown-gpu", "plan-memory"]),
    ):
        assert main(["plan", "--model", "no/such-model", *words]) == 2
        message = capsys.readouterr().err
        assert [code for code in codes if f"[{code}]" not in message] == []


@pytest.mark.parametrize(
    ("words", "task"),
    [
        (["--model", "builtin:tiny-indic-llama"], "chat"),
        (["--model", "builtin:tiny-indic-llama", "--task", "classification"], "classification"),
        (["--model", "builtin:tiny-indic-llama", "--padding_free", "off"], "classification"),  # which a chat has not
        (BERT, "classification"),
    ],
    ids=" ".join,
)
def test_the_head_of_a_model_decides_the_task(words: list[str], task: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(capsys, *words, "--method", "full", "--max_length", "32")["run"]["task"] == task


def test_a_missing_recipe_is_the_only_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "nothing.yaml", "--gpus", "8"]) == 2
    assert "nothing.yaml" in (message := capsys.readouterr().err)
    assert message.count("[") == 1


def test_a_pair_of_answers_is_two_conversations(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--task", "dpo", "--model", "builtin:tiny-indic-llama", "--max_length", "64", "--gpus", "2"]
    record = planned(capsys, *words, "--method", "full", "--global_batch_size", "8")
    assert record["run"]["row_tokens"] == {"mean": 128, "longest": 128, "attended": 64, "rows": 0, "read_first": 0}
    found = {each["strategy"]: each for each in record["candidates"]}
    assert found["ddp"]["micro_batch"]["tokens"] == 4 * 128
    assert found["ddp"]["command"].startswith("indictune train dpo ")
    assert "[pairs-over-context]" in found["fsdp2_cp"]["refused"]


def test_the_reference_of_pairs_takes_a_forward_pass_of_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step has its forward pass and twice as much for the gradients."""
    monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path))
    recipe = tmp_path / "job.yaml"
    recipe.write_text(JOB + write_answer_pairs(tmp_path), encoding="utf-8")
    record = planned(capsys, str(recipe), "--task", "dpo", "--gpus", "2", "--method", "full")
    (ddp,) = (each for each in record["candidates"] if each["strategy"] == "ddp")
    assert record["run"]["row_tokens"]["read_first"] == 101 + 53
    assert ddp["before_the_first_step_s"] == pytest.approx(ddp["step"]["compute_s"] / 3 * (101 + 53) / 24)
