"""Row 8 of the fault scoreboard: NaN and infinite numbers, and what a run does about them."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.fault_contenders import MANY_STEPS, Contender
from benchmarks.fault_runs import Counts, Found, Job, logged, losses, status_of
from indictune.checkpoint import store
from indictune.training import bad_steps

BAD_NUMBERS = {
    "NaN in the loss": ("NAN", "loss"),
    "an infinite loss": ("INFINITE", "loss"),
    "NaN in the gradients": ("NAN_GRADIENT", "gradients"),
    "infinite gradients": ("INFINITE_GRADIENT", "gradients"),
}
ACTIONS = {"stop": "stopped", "skip": "skipped", "rollback": "rolled back"}


def bad_numbers(contender: Contender, counts: Counts, work: Path) -> Found:
    """Row 8: a bad number in each of 20 steps, under each policy of the contender."""
    found: Found = {}
    for policy in contender.policies or ("",):
        suffix = f", {policy}" if policy in contender.policies[1:] else ""
        job = Job(contender, work, kind=f"many steps{suffix}")
        for title, (event, place) in BAD_NUMBERS.items():
            cases = Counter[str]()
            for step in range(1, MANY_STEPS + 1, counts["every bad step"]):
                cases.update(_outcomes_of(job, f"{event}@{contender.places[place]}:{step}", step, policy))
            found[title + suffix] = dict(+cases)
    return found


def _outcomes_of(job: Job, event: str, step: int, policy: str) -> Counter[str]:
    folder = job.work / f"bad-{job.kind}-{event.partition('@')[0]}-{step}".replace(" ", "-")
    # The bad step is due to be saved; a rollback undoes all steps since the last save, so it saves seldom.
    every = largest_divisor(step) if policy == "rollback" else 1
    code, _ = job.run(folder, event, "--save_steps", str(every))
    saved = [path for path in store.checkpoints_in(folder) if store.step_of(path) >= step]
    found = Counter[str]()
    if policy:
        found[action_taken(folder, step, policy, every, code)] += 1
    else:
        found["ended" if code == 0 else "hung" if code is None else "stopped"] += 1
    numbers = [*map(_states, store.checkpoints_in(folder)), *map(_weights, folder.glob("model.safetensors"))]
    found["saved a non-finite number"] += not all(map(_is_finite, numbers))
    found["saved after it, and stopped"] += code != 0 and bool(saved)
    found["logged another loss"] += not logs_the_loss(folder, step, event, losses(job.unbroken[0])[step - 1])
    shutil.rmtree(folder)
    return found


def logs_the_loss(folder: Path, step: int, event: str, loss: float) -> bool:
    """Whether our record, or the stock log, has the true loss of a bad step: `loss` if only gradients were bad."""
    noted = [(entry["step"], entry["loss"]) for entry in _record(folder)]
    found = [each for at, each in noted or [entry[:2] for entry in logged(folder)] if at == step]
    if "GRADIENT" in event:
        return found == [loss]
    is_wrong = math.isnan if event.startswith("NAN") else math.isinf
    return len(found) == 1 and is_wrong(float(found[0]))


def largest_divisor(number: int) -> int:
    """The largest divisor below the number; 1 for 1."""
    return next((each for each in range(number // 2, 1, -1) if number % each == 0), 1)


def action_taken(folder: Path, step: int, policy: str, every: int, code: int | None) -> str:
    """What our run did about a bad step if it recorded and did what the policy says; else how it `failed`.

    Args:
        folder: of the run.
        step: the bad one.
        policy: of the run.
        every: steps between saves; the bad step is saved.
        code: exit code.
    """
    noted = [(entry["step"], entry["action"]) for entry in _record(folder)]
    if policy == "stop":
        state, message = status_of(folder)
        did_it = code == 1 and state == "failed" and f"step {step}" in message
    else:
        did_it = code == 0 and _unchanged_saves(folder) == ([step] if step > every else [])
    return ACTIONS[policy] if did_it and noted == [(step, policy)] else f"failed: exit code {code}, recorded {noted}"


def _record(folder: Path) -> list[dict[str, Any]]:
    record = folder / bad_steps.FILE
    return list(map(json.loads, record.read_text(encoding="utf-8").splitlines())) if record.exists() else []


def _unchanged_saves(folder: Path) -> list[int]:
    """Steps that saved the weights and optimizer states of the save before."""
    paths = store.checkpoints_in(folder)[::-1]
    saved = [_states(path) for path in paths]
    same = [len(before) == len(now) and all(map(torch.equal, before, now)) for before, now in pairwise(saved)]
    return [store.step_of(path) for path, is_same in zip(paths[1:], same, strict=True) if is_same]


def _states(checkpoint: Path) -> list[torch.Tensor]:
    """Weights and optimizer states."""
    states = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"].values()
    return [*_weights(checkpoint / "model.safetensors"), *(each for state in states for each in state.values())]


def _weights(path: Path) -> list[torch.Tensor]:
    return list(load_file(path).values())


def _is_finite(numbers: list[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(each).all()) for each in numbers)
