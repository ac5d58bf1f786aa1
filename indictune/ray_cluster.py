"""A Ray cluster: one that runs already, or one that starts and ends with a command; and the ranks of a run there."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from indictune.config.command_line import LAUNCHED_BY, STATUS_FILE
from indictune.errors import UserError
from indictune.files import AUTO, json_or_nothing, write_json
from indictune.stop_signals import EXIT_RESUMABLE, SIGNALS
from indictune.versions import script

_EXTRA = "ray"
_CONNECT_S = 5.0
_MOST_FAILURES = 3  # after which Ray starts the ranks no more
_REFUSED = 2  # exit code of a rank that no other start would help
_LOOK_EVERY_S = 0.5
_LOOKS_BEFORE_KILL = 60  # half a minute, as torchrun waits
_OF_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR")
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl


@contextmanager
def cluster(address: str | None, shows_output: bool = True) -> Iterator[None]:
    """A block in which this process is a driver of the cluster at an address, or at RAY_ADDRESS, else of a local one.

    What its workers print is shown with their names, or not at all.

    Raises:
        UserError: Ray is not installed, or there is no cluster that it can join.
    """
    if find_spec("ray") is None:
        raise UserError("extra-missing", "--engine ray", extra=_EXTRA, packages="ray")
    given = address or os.environ.get("RAY_ADDRESS")
    settings: dict[str, Any] = {"address": given, "logging_level": logging.ERROR, "log_to_driver": shows_output}
    if given is None:
        settings |= {"address": "local", "include_dashboard": False}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    else:
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # else Ray (2.60) tries for minutes
    import ray  # reads these variables; takes seconds

    try:
        if given not in (None, "auto"):
            _check_listens(str(given))
        ray.init(**settings)
    except (OSError, ValueError, RuntimeError) as error:
        if given is None:
            raise
        reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
        flag = "--ray_address" if address else "RAY_ADDRESS"
        raise UserError("no-ray-cluster", flag, given, reason=reason) from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_listens(address: str) -> None:
    """Raise an `OSError` or a `ValueError` if nobody listens there. Ray (2.60) itself would wait for a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError("expected auto or HOST:PORT")
    socket.create_connection((host, int(port)), _CONNECT_S).close()


def processors(flag: str, asked: int, of: Callable[[list[int]], int] = sum) -> tuple[str, list[int]]:
    """`GPU`, or `CPU` if the cluster has no GPUs, and how many of them each of its machines has.

    A `UserError` names a flag that asks for more than the `sum` or `max` of them.
    """
    import ray

    kind = "GPU" if ray.cluster_resources().get("GPU") else "CPU"  # type: ignore[no-untyped-call]
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    counts = [int(each["Resources"].get(kind, 0)) for each in nodes if each["Alive"]]
    if asked > of(counts):
        place = "the Ray cluster" if of is sum else "the largest machine of the Ray cluster"
        raise UserError("ray-cluster-small", flag, asked, place=place, kind=kind, has=of(counts))
    return kind, counts


@dataclass(frozen=True)
class RankCommand:
    """What each rank of a run starts.

    Attributes:
        name: of the training script, whose words follow.
        variables: that a launcher would add to the environment.
        output_dir: of the run.
        checkpoint: that the run resumes from, as the user named it.
        folder: in which the command was typed.
    """

    name: str
    words: Sequence[str]
    variables: Mapping[str, str]
    output_dir: str
    checkpoint: str
    folder: str

    def at_start(self, number: int) -> list[str]:
        """The words of a start: later ones resume from the newest checkpoint, or from the named one without any."""
        words = [sys.executable, str(script(self.name)), *self.words]
        has_saved = any(Path(self.folder, self.output_dir).glob("checkpoint-*"))
        # Of a flag that is given twice, the last value counts.
        return words + ["--resume_from_checkpoint", AUTO] * (number > 1 and (has_saved or not self.checkpoint))


class _Exchange:
    """What the ranks and the command tell each other: an actor on the machine of the command."""

    def __init__(self) -> None:
        self.starts, self.is_asked, self.code, self.status = 0, False, 0, dict[str, Any]()
        self.said: list[tuple[str, str]] = []

    def begin(self) -> int:
        """Count a start of all ranks."""
        self.starts += 1
        return self.starts

    def ask(self) -> None:
        """Ask all ranks to save and stop."""
        self.is_asked = True

    def say(self, stream: str, line: str) -> None:
        """Pass a line of a rank to the command."""
        self.said.append((stream, line))

    def report(self, code: int, status: dict[str, Any]) -> None:
        """Keep how a rank ended. A refusal counts most, then a stop. After a failure, Ray starts the ranks again."""
        self.status = status or self.status
        if code in (_REFUSED, EXIT_RESUMABLE) and self.code != _REFUSED:
            self.code = code
        elif code and self.is_asked:
            self.code = self.code or 1

    def end(self) -> tuple[bool, int]:
        """Whether the ranks were asked to stop, and the exit code with which all of them end, or 0."""
        return self.is_asked, self.code

    def taken(self) -> tuple[list[tuple[str, str]], dict[str, Any]]:
        """The lines since the last call, and the status of the run."""
        said, self.said = self.said, []
        return said, self.status


def run_ranks(command: RankCommand, ranks: int, kind: str) -> int:
    """Run a command on the cluster, one process a rank, each with a processor of a kind: `GPU` or `CPU`.

    Ray starts all of them again when one fails.

    Returns:
        The exit code of the run.
    """
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor: Any = ray.remote(_Exchange)
    exchange = actor.options(num_cpus=0, scheduling_strategy=here).remote()
    for number in SIGNALS:
        signal.signal(number, lambda *_: exchange.ask.remote())
    with TemporaryDirectory(prefix="indictune-") as folder, ThreadPoolExecutor(1) as thread:
        trainer = TorchTrainer(
            _run_rank,
            train_loop_config={"command": command, "exchange": exchange},
            torch_config=TorchConfig(backend="gloo"),  # the group of Ray's own workers needs no GPU memory
            scaling_config=ScalingConfig(num_workers=ranks, use_gpu=kind == "GPU"),
            run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=_MOST_FAILURES)),
        )
        fit, is_over = thread.submit(trainer.fit), False  # the main thread listens to signals
        while not is_over:
            is_over = bool(wait([fit], _LOOK_EVERY_S).done)
            said, status = ray.get(exchange.taken.remote())
            for stream, line in said:
                print(line, end="", file=getattr(sys, stream), flush=True)
    if (path := os.environ.get(STATUS_FILE)) and status:
        write_json(Path(path), status)
    error, code = fit.exception(), ray.get(exchange.end.remote())[1]
    if error is None:
        return int(code)
    if not isinstance(error, TrainingFailedError):
        raise error
    print(f"indictune: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
    return 1


def _run_rank(given: Mapping[str, Any]) -> None:
    """Run one rank in a process of its own. Raises if it failed: Ray then starts all ranks again."""
    import ray
    import torch

    command, exchange, rank = given["command"], given["exchange"], os.environ["RANK"]
    shared: list[Any] = [0, []]
    if rank == "0":
        with socket.socket() as probe:
            probe.bind(("", 0))
            shared = [probe.getsockname()[1], command.at_start(ray.get(exchange.begin.remote()))]
    torch.distributed.broadcast_object_list(shared)  # Ray's own group has the port of MASTER_PORT
    environ = {**os.environ, **command.variables, **{name: os.environ[name] for name in _OF_RANK}}
    environ |= {"MASTER_PORT": str(shared[0]), LAUNCHED_BY: str(os.getpid())}
    environ.pop("ACCELERATE_TORCH_DEVICE", None)
    with TemporaryDirectory(prefix="indictune-") as folder:
        status = Path(folder, "status.json")
        code = _code_of(shared[1], command.folder, {**environ, STATUS_FILE: str(status)}, exchange)
        ray.get(exchange.report.remote(code, json_or_nothing(status)))
    if code not in (0, _REFUSED, EXIT_RESUMABLE) and ray.get(exchange.end.remote()) == (False, 0):
        reason = f"rank {rank} on {socket.gethostname()} ended with exit code {code}"
        again = f"Ray starts all ranks again, at most {_MOST_FAILURES} times"
        exchange.say.remote("stderr", f"indictune: {reason}. {again}.\n")
        raise RuntimeError(reason)


def _code_of(words: Sequence[str], folder: str, environ: Mapping[str, str], exchange: Any) -> int:
    """The exit code of a rank, which gets a SIGTERM when the run ends, and dies with this process."""
    import ray

    def die_with_parent() -> None:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)

    def pass_on(stream: str) -> None:
        for line in getattr(rank, stream):
            exchange.say.remote(stream, line)

    pipe, looks = subprocess.PIPE, 0
    rank = subprocess.Popen(
        words, cwd=folder, env=environ, stdout=pipe, stderr=pipe, encoding="utf-8", preexec_fn=die_with_parent
    )
    with rank, ThreadPoolExecutor(2) as readers:
        readers.map(pass_on, ("stdout", "stderr"))
        while rank.poll() is None:
            is_asked, code = ray.get(exchange.end.remote())
            looks += bool(code)
            if is_asked or code:
                rank.send_signal(signal.SIGKILL if looks > _LOOKS_BEFORE_KILL else signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                rank.wait(_LOOK_EVERY_S)
    return rank.returncode
