"""The GPU benchmark, tried on a CPU. Nothing heavy is imported at the top: parts start from this module."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.timed_parts import Note, Part, Plan, run_part

ROOT = Path(__file__).parents[1]


def plan(folder: Path, seconds: float) -> Plan:
    return Plan("tiny", folder, time.time() + seconds)


def run(part: Part, folder: Path, seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    run_part(part, plan(folder, seconds), found.update)
    return found


def raises(_plan: Plan, note: Note) -> None:
    note({"first": 1})
    raise ValueError("no such thing")


def succeeds(_plan: Plan, note: Note) -> None:
    note({"first": 1})


def dies(_plan: Plan, note: Note) -> None:
    note({"first": 1})
    os._exit(3)


def has_a_failed_contender(_plan: Plan, note: Note) -> None:
    note({"contenders": [{"contender": "one"}, {"contender": "two", "error": "no"}]})


def has_wrong_losses(_plan: Plan, note: Note) -> None:
    note({"agrees": False, "learned": True})


def hangs(_plan: Plan, note: Note) -> None:
    child = subprocess.Popen(["sleep", "600"])
    note({"child": child.pid})
    child.wait()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_a_part_that_raises_keeps_its_findings_and_reports_the_error(tmp_path: Path) -> None:
    found = run(raises, tmp_path, 60)
    assert found["first"] == 1
    assert found["error"].splitlines()[-1] == "ValueError: no such thing"


def test_a_part_that_dies_reports_its_exit_code(tmp_path: Path) -> None:
    assert run(dies, tmp_path, 60) == {"first": 1, "error": "It ended with exit code 3."}


@pytest.mark.more
def test_a_part_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    since = time.time()
    found = run(hangs, tmp_path, 4)
    assert time.time() - since < 15
    assert found["error"] == "It was stopped at its time limit."
    while is_alive(found["child"]):
        assert time.time() - since < 30
        time.sleep(0.1)


def test_the_program_runs_all_parts_and_names_those_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import gpu

    for name in ("CUDA_VISIBLE_DEVICES", gpu.ALLOCATOR):  # restores them
        monkeypatch.setenv(name, "")
    parts = {
        "inputs": (succeeds, 0),
        "first": (raises, 1),
        "wrong": (has_wrong_losses, 1),
        "last": (has_a_failed_contender, 1),
    }
    monkeypatch.setattr(gpu, "PARTS", parts)
    command = ["gpu", "--size", "tiny", "--results", str(tmp_path), "--parts"]
    monkeypatch.setattr(sys, "argv", [*command, "first", "wrong", "last"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == "Failed: first, wrong (losses do not agree), last (two)."
    (path,) = tmp_path.iterdir()
    written = json.loads(path.read_text(encoding="utf-8"))["parts"]
    assert len(written["last"]["contenders"]) == 2
    assert written["wrong"]["agrees"] is False


def test_a_part_that_shows_nothing_has_failed() -> None:
    from benchmarks.gpu import failures

    sound = {"agrees": True, "learned": True}
    assert failures({"inputs": {"first": 1}, "losses": sound}) == []
    assert failures({"losses": {**sound, "learned": False}}) == ["losses (nothing is learned)"]


def test_each_part_gets_its_share_of_the_time_that_is_left() -> None:
    from benchmarks.gpu import DEFAULT_PARTS, PARTS, deadline_of

    assert deadline_of("inputs", DEFAULT_PARTS, 0.0, 100.0) == 100
    chosen = ["inputs", "losses", "llama_losses"]
    shares = [PARTS[title][1] for title in chosen[1:]]
    assert deadline_of("losses", chosen, 10.0, 100.0) == pytest.approx(10 + 90 * shares[0] / sum(shares))
    assert deadline_of("llama_losses", chosen, 50.0, 100.0) == 100


def test_the_first_visible_gpu_is_used() -> None:
    from benchmarks.gpu import first_gpu

    assert [first_gpu(visible) for visible in (None, "2,3", "")] == ["0", "2", ""]


def test_rows_have_the_drawn_number_of_tokens(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from benchmarks import llama
    from benchmarks.classifier_gpu import SIZES, write_model, write_rows
    from indictune.models import builtin

    write_model(tmp_path / "model", SIZES["tiny"].model)
    lengths = write_rows(tmp_path / "rows.jsonl", SIZES["tiny"])
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    ids = AutoTokenizer.from_pretrained(tmp_path / "model")([row["text"] for row in rows])["input_ids"]
    assert [len(row) for row in ids] == lengths.tolist()
    assert np.concatenate([row[1:-1] for row in ids]).min() >= 5  # no special token, nothing unknown

    lengths = llama.write_rows(tmp_path / "chats.jsonl", 50, 100_000)
    tokenizer = AutoTokenizer.from_pretrained(builtin.resolve("builtin:tiny-indic-llama"))
    chats = [json.loads(line)["messages"] for line in (tmp_path / "chats.jsonl").read_text("utf-8").splitlines()]
    counted = [sum(len(tokenizer(turn["content"])["input_ids"]) for turn in chat) for chat in chats]
    assert counted == lengths.tolist()


def test_a_model_whose_writing_was_stopped_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    from benchmarks import llama

    def stop(**_: Any) -> None:
        raise TimeoutError

    monkeypatch.setenv("INDICTUNE_CACHE", os.environ["INDICTUNE_CACHE"])  # restores it
    with monkeypatch.context() as patch:
        patch.setattr(llama, "LlamaConfig", stop)
        with pytest.raises(TimeoutError):
            llama.write_inputs(plan(tmp_path, 60))
    model, rows, lengths = llama.write_inputs(plan(tmp_path, 60))
    assert LlamaForCausalLM.from_pretrained(model).num_parameters() > 0
    assert len(rows.read_text(encoding="utf-8").splitlines()) == len(lengths)


def test_only_tokens_of_timed_steps_count() -> None:
    from benchmarks.contenders import Job
    from benchmarks.llama import line_of
    from benchmarks.runner import Measured

    job = Job(Path(), Path(), steps=6, steps_per_lap=2, folder=Path())
    counted = {"tokens_of_steps": [1_000, 1_000, 10, 20, 40, 50], "padding_fraction": 0.0, "peak_memory_bytes": 1}
    line = line_of(Measured("one", [2.0, 1.0], counted), job)
    assert line["slowest_and_fastest_lap"] == [15.0, 90.0]
    assert line_of(Measured("two", error="no"), job) == {"contender": "two", "error": "no"}


@pytest.mark.parametrize(("title", "rows"), [("trainer_defaults", 10 * 64), ("ours", 10 * 512)])
def test_rows_a_second_are_those_of_the_batch_size(title: str, rows: int) -> None:
    from benchmarks.classifier_gpu import SIZES, line_of, with_ratios
    from benchmarks.runner import Measured

    counted = {"padding_fraction": 0.0, "peak_memory_bytes": 1, "trained_vocabulary": 9}
    line = line_of(Measured(title, [2.0] * 5, counted), SIZES["full"])
    assert line["rows_per_second"] == rows / 2
    assert with_ratios([line])[0][f"times_{title}"] == 1


def test_padding_that_the_plan_does_not_know_is_counted(tmp_path: Path) -> None:
    from benchmarks.contenders import count_positions
    from indictune.data.collation import PadToLongest
    from tests.training.tiny import answer_rows, tiny_llama, tiny_trainer

    rows = answer_rows(9, 5, 12, 7)
    trainer = tiny_trainer(tiny_llama(tmp_path), tmp_path, rows, padded=False, max_steps=1)
    trainer.objective.collator = lambda evaluating: PadToLongest(0, "right")  # type: ignore[method-assign]
    positions = count_positions(trainer)
    trainer.train()
    assert sum(positions) == 4 * 12 > sum(map(len, rows["input_ids"]))


def test_trl_gets_the_rows_of_each_of_our_steps() -> None:
    import torch

    from benchmarks import llama

    trl, joined, *_ = llama.contenders("lora", llama.SIZES["tiny"], np.arange(1, 49))
    seeded = torch.Generator().manual_seed(joined.settings["data_seed"])
    steps = torch.randperm(48, generator=seeded).view(-1, 8)[:2].tolist()  # the plain shuffled recipe's
    assert [sorted(trl.order[:8]), sorted(trl.order[8:])] == [sorted(step) for step in steps]


def errors_in(found: Any) -> Iterator[str]:
    if isinstance(found, dict):
        yield from ([str(found["error"])] if "error" in found else [])
        found = list(found.values())
    if isinstance(found, list):
        for each in found:
            yield from errors_in(each)


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    from benchmarks.gpu import PARTS

    command = [sys.executable, "-m", "benchmarks.gpu", "--size", "tiny", "--minutes", "20", "--parts", *PARTS]
    done = subprocess.run(
        [*command, "--results", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*.json")
    parts = json.loads(path.read_text(encoding="utf-8"))["parts"]
    assert list(errors_in(parts)) == []
    lines = {line["contender"]: line for line in parts["classifier"]["contenders"]}
    assert lines["ours"]["padding_fraction"] == 0 < lines["ours_padded"]["padding_fraction"]
    assert lines["ours"]["trained_vocabulary"] < lines["trainer_best"]["trained_vocabulary"] == 2_000
    for part in ("losses", "llama_losses"):
        assert (parts[part]["agrees"], parts[part]["learned"]) == (True, True)
        assert parts[part]["padding"]["ours"] == 0
    assert parts["epoch"]["rows"] == 300
    assert parts["epoch"]["process_s"] > parts["epoch"]["train"]["runtime_s"]
    for part in ("llama", "llama_lora"):
        trl, joined, padded, _ = (line["tokens_of_steps"] for line in parts[part]["contenders"])
        assert trl == joined == padded
