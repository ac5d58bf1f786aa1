"""Act as a run for a sweep: steps, evaluations, checkpoints, a stop by signal, and a resume, without a model.

python acting_run.py FOLDER MANIFESTS --learning_rate X --seed N [--ends how]
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sys
import time
from pathlib import Path

from filelock import FileLock

STEPS, EVERY, STEP_S = 6, 2, 0.02
LABELS = ("neg", "pos")


def main() -> int:
    """Train by acting; returns the exit code of a run."""
    folder, manifests = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    flags = dict(zip(sys.argv[3::2], sys.argv[4::2], strict=True))
    rate, seed, ends = float(flags.get("--learning_rate", "1e-3")), int(flags["--seed"]), flags.get("--ends", "well")
    parent, stopped = os.getppid(), list[int]()
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    with FileLock(folder / ".lock"):
        (folder / ".lock").write_text(f"process {os.getpid()} here\nname", encoding="utf-8")
        if ends != "well":
            return say(ends, f"it ends as {ends}")
        if (folder / "metrics.json").exists():
            return 0
        steps = [int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*")]
        history = []
        if steps:
            state = folder / f"checkpoint-{max(steps)}/trainer_state.json"
            history = json.loads(state.read_text(encoding="utf-8"))["log_history"]
        for step in range(max(steps, default=0) + 1, STEPS + 1):
            time.sleep(STEP_S)
            if step % EVERY == 0:
                history.append({"step": step, "eval_macro_f1": quality(rate, seed) * step / STEPS})
                save(folder, step, history, manifests[f"{step} planned"])
            if stopped or os.getppid() != parent:
                if step % EVERY:
                    save(folder, step, history, manifests[f"{step} asked"])
                return say("resumable", "stopped")
        finish(folder, rate, seed)
    return 0


def quality(rate: float, seed: int) -> float:
    """The score of a setting: the best learning rate is 1e-3."""
    return 0.9 - 0.1 * abs(math.log10(rate) + 3) + 0.001 * (seed % 7)


def say(state: str, message: str) -> int:
    """Write how it ended; returns the exit code."""
    Path(os.environ["INDICTUNE_STATUS_FILE"]).write_text(
        json.dumps({"state": state, "message": message}), encoding="utf-8"
    )
    return {"resumable": 75, "user_error": 2}.get(state, 1)


def save(folder: Path, step: int, history: list[dict[str, float]], manifest: str) -> None:
    """Write a checkpoint, whole or not at all."""
    unfinished = folder / f".unfinished-checkpoint-{os.getpid()}"
    unfinished.mkdir(exist_ok=True)
    state = {"log_history": history, "max_steps": STEPS}
    (unfinished / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    (unfinished / "model.safetensors").write_bytes(b"weights")
    (unfinished / "manifest.json").write_text(manifest, encoding="utf-8")
    unfinished.rename(folder / f"checkpoint-{step}")


def finish(folder: Path, rate: float, seed: int) -> None:
    """Write predictions of 200 rows, and the metrics last."""
    draw = random.Random(f"{rate} {seed}")
    with (folder / "predictions.jsonl").open("w", encoding="utf-8") as file:
        for row in range(200):
            label = LABELS[row % 2]
            predicted = label if draw.random() < quality(rate, seed) else LABELS[1 - row % 2]
            about = {"split": "eval", "number": row, "row": f"v.csv:{row + 2}", "id": str(row), "language": "hi"}
            file.write(json.dumps({**about, "label": label, "predicted": predicted, "scores": {}}) + "\n")
    (folder / "model.safetensors").write_bytes(b"weights")
    metrics = folder / ".metrics.json"
    metrics.write_text(json.dumps({"eval": {"macro_f1": quality(rate, seed)}}), encoding="utf-8")
    metrics.rename(folder / "metrics.json")


if __name__ == "__main__":
    sys.exit(main())
