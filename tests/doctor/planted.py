"""Run doctor with faults on some ranks, under a launcher: `planted.py [RANK:FAULT ...] doctor FLAGS...`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from indictune.cli import main
from indictune.doctor import rank_checks

FOLDER = Path(__file__).resolve().parent
SKEW_S = 5.0


def another_seed() -> None:
    sys.argv += ["--seed", "7"]


def no_recipe() -> None:
    """Its node lacks the file."""
    sys.argv += ["--config", "nowhere.yaml"]


def another_dataset() -> None:
    place = sys.argv.index("--train_file") + 1
    rows = Path(sys.argv[place])
    other = rows.with_name("other.jsonl")
    other.write_text(rows.read_text(encoding="utf-8").replace("good", "poor", 1), encoding="utf-8")
    sys.argv[place] = str(other)


def stale_package() -> None:
    """Another version of trl, found first."""
    folder = Path(os.environ["PLANTED"], "trl-0.9.dist-info")
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 0.9\n", encoding="utf-8")
    sys.path.insert(0, os.environ["PLANTED"])


def slow() -> None:
    product = torch.Tensor.__matmul__

    def slowed(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)
        return product(left, right)

    torch.Tensor.__matmul__ = slowed  # type: ignore[method-assign,assignment]


def never_enters() -> None:
    """It comes to the all-reduce, and does not take part."""
    torch.distributed.all_reduce = _sleeps  # type: ignore[assignment]


def never_arrives() -> None:
    """It does not come to the next collective."""
    rank_checks.compute_s = _sleeps  # type: ignore[assignment]


def stopped() -> None:
    """It never arrives, as never_arrives, and nobody in it can say why."""
    rank_checks.compute_s = lambda _: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[assignment,return-value]


def wrong_sum() -> None:
    right = torch.distributed.all_reduce

    def wrong(tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
        done = right(tensor, *args, **named)
        tensor[0] += 1
        return done

    torch.distributed.all_reduce = wrong


def fast_clock() -> None:
    right = time.time
    time.time = lambda: right() + SKEW_S


def slow_link_to_0() -> None:
    send = torch.distributed.batch_isend_irecv

    def slowed(requests: list[Any]) -> Any:
        if requests[0].peer == 0:
            time.sleep(0.3)
        return send(requests)

    torch.distributed.batch_isend_irecv = slowed  # type: ignore[assignment]


def dies() -> None:
    """It is gone when the others send to it."""
    torch.distributed.reduce_scatter_single = lambda *_: os._exit(9)


def _sleeps(*_: Any) -> Any:
    time.sleep(600)


FAULTS: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        *(another_seed, no_recipe, another_dataset, stale_package, slow),
        *(never_enters, never_arrives, stopped, wrong_sum, fast_clock, slow_link_to_0, dies),
    )
}

if __name__ == "__main__":
    end = sys.argv.index("doctor")
    planted, sys.argv = sys.argv[1:end], [sys.argv[0], *sys.argv[end + 1 :]]
    for rank, name in (each.split(":") for each in planted):
        if rank == os.environ["RANK"]:
            FAULTS[name]()
    sys.exit(main(["doctor", *sys.argv[1:]]))
