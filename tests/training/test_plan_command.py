"""`indictune plan`: a ranking of the strategy files, and its refusals."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from transformers import LlamaConfig

from indictune.cli import main

LARGE = LlamaConfig(
    vocab_size=128_256, hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64,
    num_key_value_heads=8, architectures=["LlamaForCausalLM"],
)  # fmt: skip


def test_70_billion_parameters_are_planned_in_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LARGE.save_pretrained(tmp_path)
    words = ["--model", str(tmp_path), "--task", "chat", "--gpus", "32", "--nodes", "4", "--gpu", "h100"]
    words += [
        "--max_length",
        "2048",
        "--global_batch_size",
        "32",
        "--gradient_checkpointing",
        "true",
        "--bf16",
        "true",
    ]
    start = time.process_time()
    assert main(["plan", *words, "--json"]) == 0
    assert time.process_time() - start < 5
    found = {each["strategy"]: each for each in json.loads(capsys.readouterr().out)}
    assert found["fsdp2"]["fits"]
    assert not found["ddp"]["fits"]
    assert found["ddp"]["memory"]["optimizer_states"] > 500e9
    assert next(iter(found.values()))["fits"]
    assert main(["plan", *words]) == 0
    table = capsys.readouterr().out
    assert "not calibrated on a GPU" in table
    assert "ddp does not fit: " in table
    assert max(map(len, table.splitlines()[1:4])) <= 100


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([], "plan-of-what"),
        (["--model", "builtin:tiny-indic-bert", "--gpu", "voodoo"], "plan-unknown-gpu"),
        (["--model", "builtin:tiny-indic-bert", "--gpus", "3", "--nodes", "2"], "plan-uneven-nodes"),
        (["--model", "builtin:tiny-indic-bert", "--gpu_memory", "much"], "plan-memory"),
        (["--model", "builtin:tiny-indic-bert", "--gpus", "0"], "expected-at-least"),
    ],
)
def test_bad_input_is_refused(words: list[str], code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert f"[{code}]" in capsys.readouterr().err
