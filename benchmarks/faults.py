"""What happens to runs that something happens to: ours and the stock Trainer's, as a scoreboard.

    OMP_NUM_THREADS=1 python -m benchmarks.faults [--counts short|full]

Faults: kills (1), corruptions of the newest checkpoint's files (3), SIGTERM (4) and bad numbers (8), of the sixteen
that the tests in tests/faults go through. Each run trains the built-in BERT for 8 steps on one process
and saves each. After a fault it is started again, with nobody lending a hand, until it ends or has failed three times.
`exact`: it ended with the very weights of the run that nothing happened to. `stuck`: it did not end. `wrong`: it ended
with others.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import environment, write_results
from indictune.layout import table
from tests.distributed.launching import SCRIPT, python, start
from tests.faults.runs import FAULTY

COUNTS = {"short": {"kills": 10, "stops": 10}, "full": {"kills": 200, "stops": 50}}
TRIES = 3
OURS = (
    *(SCRIPT, "--model_name_or_path", "builtin:tiny-indic-bert", "--dataset_name", "builtin:tweets"),
    *("--max_length", "32", "--max_steps", "8", "--global_batch_size", "8", "--per_device_train_batch_size", "8"),
    *("--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "20", "--eval_strategy", "no"),
    *("--load_best_model_at_end", "false", "--dropout", "0.1", "--resume_from_checkpoint", "auto", "--output_dir"),
)


@dataclass(frozen=True)
class Contender:
    """Who is started again and again.

    Attributes:
        title: of its column.
        command: to which the folder is added.
        nan_at: a function whose result is the loss of a micro-batch.
    """

    title: str
    command: tuple[str, ...]
    nan_at: str

    def run(self, folder: Path, event: str | None = None) -> tuple[int, str]:
        """Exit code, and what it said."""
        words = [*python(), *((FAULTY, event) if event else ()), *self.command, str(folder)]
        done = start(words, timeout_s=120)
        return done.returncode, done.stdout + done.stderr

    def until_it_ends(self, folder: Path) -> str:
        """Start it until it has saved its model: the digest of that, or `stuck`."""
        for _ in range(TRIES):
            self.run(folder)
            if (folder / "model.safetensors").exists():
                return weights(folder)
        return "stuck"


CONTENDERS = (
    Contender("ours", OURS, "indictune.training.loss:ExactLoss.__call__"),
    Contender("stock Trainer", ("benchmarks/stock_trainer.py",), "transformers.trainer:Trainer.compute_loss"),
)


def weights(folder: Path) -> str:
    """Digest of the saved model."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def judged(found: str, expected: str) -> str:
    """In a word."""
    return "stuck" if found == "stuck" else "exact" if found == expected else "wrong"


def signals(contender: Contender, name: str, count: int, seconds: float, expected: str, work: Path) -> Counter[str]:
    """Send a signal at random times of a run that takes so many seconds."""
    draw, found = random.Random(0), Counter[str]()
    for number in range(count):
        folder = work / f"{name}-{number}"
        code, _ = contender.run(folder, f"{name}@after:{draw.uniform(0, seconds):.3f}")
        if name == "SIGTERM" and not (folder / "model.safetensors").exists():
            found["told by the exit code"] += code not in (0, -15)
        found[judged(contender.until_it_ends(folder), expected)] += 1
        shutil.rmtree(folder, ignore_errors=True)
    return found


def flipped(content: bytes) -> bytes:
    """With one bit in the middle changed."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


CORRUPTIONS: dict[str, Callable[[bytes], bytes | None]] = {
    "deleted": lambda _: None,
    "empty": lambda _: b"",
    "cut": lambda content: content[: len(content) // 2],
    "longer": lambda content: content + b"0",
    "zeros": lambda content: bytes(len(content)),
    "reversed": lambda content: content[::-1],
    "bit flipped": flipped,
}


def corruptions(contender: Contender, expected: str, work: Path, every: int) -> Counter[str]:
    """Corrupt each file of the newest of two checkpoints in each way; `every`: of how many one is tried."""
    whole = work / "whole"
    contender.run(whole)
    for path in whole.iterdir():
        if path.name.startswith("checkpoint-") and path.name not in ("checkpoint-3", "checkpoint-4"):
            shutil.rmtree(path)
    for name in ("model.safetensors", "metrics.json"):
        (whole / name).unlink(missing_ok=True)
    return _corrupted(contender, expected, whole, every)


def _corrupted(contender: Contender, expected: str, whole: Path, every: int) -> Counter[str]:
    found = Counter[str]()
    for name, corrupt in list(_cases(whole))[::every]:
        folder = whole.with_name("corrupted")
        shutil.copytree(whole, folder)
        path = folder / "checkpoint-4" / name
        content = corrupt(path.read_bytes())
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        _, said = contender.run(folder)
        found["named the file"] += name in said
        ended = weights(folder) if (folder / "model.safetensors").exists() else "stuck"
        found[judged(ended, expected)] += 1
        shutil.rmtree(folder)
    return found


def _cases(whole: Path) -> Iterator[tuple[str, Callable[[bytes], bytes | None]]]:
    checkpoint = whole / "checkpoint-4"
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file():
            for corrupt in CORRUPTIONS.values():
                yield path.relative_to(checkpoint).as_posix(), corrupt


def bad_numbers(contender: Contender, work: Path, every: int) -> Counter[str]:
    """A NaN in the loss of each step."""
    found = Counter[str]()
    for step in range(1, 9, every):
        folder = work / f"nan-{step}"
        code, _ = contender.run(folder, f"NAN@{contender.nan_at}:{step}")
        saved = [path for path in folder.glob("checkpoint-*") if int(path.name.rpartition("-")[2]) >= step]
        found["stopped"] += code != 0
        found["saved after it"] += bool(saved)
    return found


def scoreboard(contender: Contender, counts: dict[str, int], every: int, work: Path) -> dict[str, dict[str, int]]:
    """All rows of one contender."""
    since = time.monotonic()
    contender.run(work / "unbroken")
    seconds, expected = time.monotonic() - since, weights(work / "unbroken")
    rows: dict[str, Counter[str]] = {
        "1: SIGKILL": signals(contender, "SIGKILL", counts["kills"], seconds, expected, work),
        "3: corrupted file": corruptions(contender, expected, work, every),
        "4: SIGTERM": signals(contender, "SIGTERM", counts["stops"], seconds, expected, work),
        "8: NaN": bad_numbers(contender, work, every=1),
    }
    return {name: dict(found) for name, found in rows.items()}


def main() -> None:
    """Print the scoreboard and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", choices=COUNTS, default="short")
    chosen = parser.parse_args().counts
    every = 1 if chosen == "full" else 7
    results: dict[str, Any] = {}
    for contender in CONTENDERS:
        with tempfile.TemporaryDirectory() as work:
            results[contender.title] = scoreboard(contender, COUNTS[chosen], every, Path(work))
    body = [
        [
            row,
            *(", ".join(f"{count} {word}" for word, count in results[each.title][row].items()) for each in CONTENDERS),
        ]
        for row in results[CONTENDERS[0].title]
    ]
    print(table(["fault", *(contender.title for contender in CONTENDERS)], body))
    print(write_results("faults", {"environment": environment(), "counts": COUNTS[chosen], "faults": results}))


if __name__ == "__main__":
    main()
