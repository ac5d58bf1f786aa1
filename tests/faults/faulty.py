"""Run a training script and let something hit it at a place that is always the same.

    faulty.py SIGTERM@indictune.training.callbacks.every_step:StepFlags.on_step_end:3 SCRIPT FLAGS...
    ... SIGKILL@os:fsync:7@1 ...
    ... SIGKILL@os:fsync:7@1@0 ...
    ... SIGKILL@after:2.5 ...

A signal comes just before the third call of the function; in the second example before the 7th call on rank 1 alone;
in the third so too, but not when torchrun has started it again; in the last after so many seconds, wherever the run
is. `NAN`, `INFINITE` and `LARGE` spoil what the call gives, `NAN_GRADIENT` and so on what goes back from the loss
that it gives, or else what a trainer's method leaves in the model. `FLIPPED` changes the optimizer's states in the
newest checkpoint of the trainer whose method it is, `OPENED` lets other users write to them; `FLIPPED_BEST` and
`OPENED_BEST` do so to the weights of the best one, or to the index of its shards. `SLOW` holds the call up, `STUCK`
for ever and deaf to signals, `HELD` all of Python's threads too; `REFUSED` is a `UserError`. From `FULL` on no file
grows large; from `READ_ONLY` on the system opens, makes and renames nothing in the run's folder, until that is
unmounted; from `EROFS` on, or any other name of an error, each call fails with it, but for those that name paths
elsewhere, which do not count. `OUT_OF_MEMORY` is what torch raises for a GPU. Two events are joined by `+`. A file
that `SIGNALLED` in the environment names gets the time of the signal or of the error, by the clock that all processes
have (`time.monotonic`).
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from indictune.checkpoint import store
from indictune.errors import UserError

SLOW_S = 5
SIGNALLED = "SIGNALLED"
FOLDER = "TEST_FOLDER"  # as `runs.FOLDER`: this is a script, which may not be able to import the package
FULL_BYTES = 200_000
WEIGHTS = ("model.safetensors", "pytorch_model_fsdp_0/.metadata")
BAD_NUMBERS = {"NAN": float("nan"), "INFINITE": float("inf"), "LARGE": 1e5}


def _wait_in_c(libc: ctypes.CDLL) -> None:
    """As NCCL waits for a rank that does not come: no signal handler of Python's runs."""
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def spoil(path: Path, how: str) -> None:
    """Change one byte of a file, or let others do so."""
    if how.startswith("OPENED"):
        path.chmod(0o666)
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def spoilt(trainer: Any, how: str) -> Path:
    """The file of a trainer's checkpoint that is to be spoilt."""
    if not how.endswith("_BEST"):
        return store.checkpoints_in(Path(trainer.args.output_dir))[0] / "optimizer.pt"
    best: Path = trainer.checkpoints.state.best
    return next(path for path in map(best.joinpath, WEIGHTS) if path.is_file())


def spoil_gradient(trainer: Any, loss: Any, number: float) -> None:
    """Of all weights, where the loss has yet to go back; else, of the first that has one, what is there."""
    if loss.requires_grad:
        loss.register_hook(lambda gradient: gradient * number)
    else:
        next(each.grad for each in trainer.model.parameters() if each.grad is not None).fill_(number)


def mount_read_only(folder: str) -> None:
    """Over itself: a file system in which a file is open for writing, as a log is, is not made so by a remount."""
    subprocess.run(["mount", "-o", "bind,ro", folder, folder], check=True)


def is_elsewhere(given: Sequence[Any]) -> bool:
    """Whether a call names paths, none of them in the run's folder (if that is given)."""
    folder = os.environ.get(FOLDER)
    paths = [each for each in given if isinstance(each, str | Path)]
    return bool(folder and paths) and not any(Path(each).is_relative_to(str(folder)) for each in paths)


def send(name: str) -> None:
    """A signal to this process."""
    note_time()
    os.kill(os.getpid(), signal.Signals[name])
    time.sleep(0.3)  # a thread receives it, and the test expects this step to be the last


def note_time() -> None:
    """The time of what hits it, to the file that gets it."""
    if SIGNALLED in os.environ:
        with open(os.environ[SIGNALLED], "w", encoding="ascii") as file:
            file.write(str(time.monotonic()))


def hit(event: str) -> None:
    """Arrange for it."""
    name, place, *where = event.split("@")
    if where != [os.environ.get(each, "0") for each in ("RANK", "TORCHELASTIC_RESTART_COUNT")][: len(where)]:
        return
    if place.startswith("after:"):
        timer = threading.Timer(float(place.removeprefix("after:")), send, [name])
        timer.daemon = True  # a run that has ended before is not waited for
        timer.start()
        return
    module, path, count = place.split(":")
    *owners, function = path.split(".")
    owner: Any = reduce(getattr, owners, importlib.import_module(module))
    original = getattr(owner, function)
    calls = 0

    def counted(*args: Any, **settings: Any) -> Any:
        nonlocal calls
        if name in errno.errorcode.values() and is_elsewhere(args):
            return original(*args, **settings)
        calls += 1
        now = calls == int(count)
        if now and name in signal.Signals.__members__:
            send(name)
        if now and name == "SLOW":
            time.sleep(SLOW_S)
        if now and name == "STUCK":
            _wait_in_c(ctypes.CDLL(None))
        if now and name == "HELD":
            _wait_in_c(ctypes.PyDLL(None))
        if now and name == "OUT_OF_MEMORY":
            import torch  # the run sets its environment first

            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if now and name == "REFUSED":
            raise UserError("no-such-file", "--train_file", "refused by this rank alone")
        if calls >= int(count) and name in errno.errorcode.values():
            if settings.get("ignore_errors") or (settings.get("exist_ok") and os.path.isdir(args[0])):
                return None  # as of a real disk: it would not be heard, or asked for nothing
            note_time()
            number = getattr(errno, name)
            named = args[:1] if args and isinstance(args[0], str | Path) else ()  # as the system tells the path
            raise OSError(number, os.strerror(number), *map(str, named))
        if now and name == "FULL":
            resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, resource.RLIM_INFINITY))
        if now and name == "READ_ONLY":
            mount_read_only(os.environ[FOLDER])
        if now and name.removesuffix("_BEST") in ("FLIPPED", "OPENED"):
            spoil(spoilt(args[0], name), name)
        result = original(*args, **settings)
        if now and name in BAD_NUMBERS:
            return result * BAD_NUMBERS[name]
        if now and name.removesuffix("_GRADIENT") in BAD_NUMBERS:
            spoil_gradient(args[0], result, BAD_NUMBERS[name.removesuffix("_GRADIENT")])
        return result

    setattr(owner, function, counted)


if __name__ == "__main__":
    for each in sys.argv[1].split("+"):
        hit(each)
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
