"""The row of the scoreboard that is bad numbers: what a run does about them, and what it saves."""

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

from benchmarks.fault_rows import Counts, Found
from benchmarks.fault_runs import MANY_STEPS, Contender, Job, logged, losses, status_of
from indictune.checkpoint import store
from indictune.train import bad_steps

BAD_NUMBERS = {
    "NaN in the loss": ("NAN", "loss"),
    "an infinite loss": ("INFINITE", "loss"),
    "NaN in the gradients": ("NAN_GRADIENT", "gradients"),
    "infinite gradients": ("INFINITE_GRADIENT", "gradients"),
}


def bad_numbers(contender: Contender, counts: Counts, work: Path) -> Found:
    """8: NaN or inf in loss or gradients of each of 20 steps; where there is a policy, by each."""
    found: Found = {}
    for policy in contender.policies or ("",):
        told = f", {policy}" if policy in contender.policies[1:] else ""
        job = Job(contender, work, kind=f"many steps{told}")
        for title, (event, place) in BAD_NUMBERS.items():
            cases = Counter[str]()
            for step in range(1, MANY_STEPS + 1, counts["every bad step"]):
                cases.update(_went_bad(job, f"{event}@{contender.places[place]}:{step}", step, policy))
            found[title + told] = dict(+cases)
    return found


def _went_bad(job: Job, event: str, step: int, policy: str) -> Counter[str]:
    folder = job.work / f"bad-{job.kind}-{event.partition('@')[0]}-{step}".replace(" ", "-")
    # Saved so that the bad step is, and of those before it as few as can be: a rollback takes back all since the last.
    every = largest_divisor(step) if policy == "rollback" else 1
    code, said = job.run(folder, event, "--save_steps", str(every))
    saved = [path for path in store.listed(folder) if store.step_of(path) >= step]
    found = Counter[str]()
    if policy:
        found[done_about(folder, step, policy, every, code, said)] += 1
    else:
        found["ended" if code == 0 else "hung" if code is None else "stopped"] += 1
    numbers = [*map(_numbers, store.listed(folder)), *map(_weights, folder.glob("model.safetensors"))]
    found["saved a number that is not finite"] += not all(map(_is_finite, numbers))
    found["saved after it, and stopped"] += code != 0 and bool(saved)
    found["told another loss of that step"] += not is_told(folder, step, event, losses(job.unbroken[0])[step - 1])
    shutil.rmtree(folder)
    return found


def is_told(folder: Path, step: int, event: str, loss: float) -> bool:
    """Whether the loss that a bad step had is told, in our record or the stock Trainer's log: what the event made of
    it, or what it was where the event spoilt the gradients alone."""
    noted = [(entry["step"], entry["loss"]) for entry in _noted(folder)]
    told = [each for at, each in noted or [entry[:2] for entry in logged(folder)] if at == step]
    if "GRADIENT" in event:
        return told == [loss]
    wrong = math.isnan if event.startswith("NAN") else math.isinf
    return len(told) == 1 and wrong(float(told[0]))


def largest_divisor(number: int) -> int:
    """But the number itself; of 1 it is 1."""
    return next((each for each in range(number // 2, 1, -1) if number % each == 0), 1)


def done_about(folder: Path, step: int, policy: str, every: int, code: int | None, said: str) -> str:
    """What ours has done about a bad step, which it must have noted, told and done; else how it has `failed`.

    Args:
        folder: of the run.
        step: that was bad.
        policy: by which it ran.
        every: how many steps it saved, this one among them.
        code: that it gave.
        said: by it.
    """
    noted = [(entry["step"], entry["action"]) for entry in _noted(folder)]
    state, message = status_of(folder)
    told = f"The loss or the gradient of step {step} is NaN or infinite; training has stopped"
    if code == 1 and noted == [(step, "stop")] and state == "failed" and message.startswith(told):
        return "stopped"
    told = f"warning: the loss or the gradient of step {step} is NaN or infinite: {policy}; its loss was "
    if (
        code == 0
        and noted == [(step, policy)]
        and told in said
        and _left_out(folder) == ([step] if step > every else [])
    ):
        return {"skip": "skipped", "rollback": "rolled back"}[policy]
    return f"failed: gave {code}, noted {noted}"


def _noted(folder: Path) -> list[dict[str, Any]]:
    record = folder / bad_steps.FILE
    lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
    return list(map(json.loads, lines))


def _left_out(folder: Path) -> list[int]:
    """The steps at which a run saved the very weights and optimizer states that it had saved before."""
    paths = store.listed(folder)[::-1]
    saved = [_numbers(path) for path in paths]
    same = [len(before) == len(now) and all(map(torch.equal, before, now)) for before, now in pairwise(saved)]
    return [store.step_of(path) for path, is_same in zip(paths[1:], same, strict=True) if is_same]


def _numbers(checkpoint: Path) -> list[torch.Tensor]:
    """Weights and the optimizer's states."""
    states = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"].values()
    return [*_weights(checkpoint / "model.safetensors"), *(each for state in states for each in state.values())]


def _weights(path: Path) -> list[torch.Tensor]:
    return list(load_file(path).values())


def _is_finite(numbers: list[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(each).all()) for each in numbers)
