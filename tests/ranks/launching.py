"""Start training scripts the way users do, and read what they leave.

The process that only shares out the tests imports this too. So torch, which takes ten seconds with all that comes with
it, is imported where it is used.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.ranks.forking import RANK, Forked, fork

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "scripts/train_sentiment.py"
BIN = Path(sys.executable).parent

EMBEDDING = "bert.embeddings.word_embeddings.weight"

_FOLDERS = ("scripts/", "tests/", "benchmarks/", "indictune/")
_LAUNCHERS = [str(BIN / name) for name in ("accelerate", "torchrun", "deepspeed")]

Weights = dict[str, "torch.Tensor"]


def path() -> str:
    """Where programs are looked for, as where this python's environment is active. Another ninja than its own, of the
    system, compiles all of DeepSpeed's anew, and each does so again after the other."""
    return f"{BIN}{os.pathsep}{os.environ['PATH']}"


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def python() -> list[str]:
    """The interpreter of the tests, by whatever name it has."""
    return [sys.executable]


def accelerate(strategy: str | Path, ranks: int) -> list[str]:
    """The launcher with a shipped file by its name, or with another file."""
    config = str(strategy) if isinstance(strategy, Path) else f"accelerate_configs/{strategy}.yaml"
    port = str(free_port())
    return [
        *(str(BIN / "accelerate"), "launch", "--config_file", config),
        *("--num_processes", str(ranks), "--main_process_port", port),
    ]


def torchrun(ranks: int) -> list[str]:
    return [str(BIN / "torchrun"), "--nproc_per_node", str(ranks), "--master_port", str(free_port())]


def deepspeed(ranks: int) -> list[str]:
    return [str(BIN / "deepspeed"), "--num_gpus", str(ranks), "--master_port", str(free_port())]


def start(
    command: list[str], variables: dict[str, str] | None = None, timeout_s: int = 300, anew: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a command from the repository's root, with one thread a process and no network.

    Args:
        command: a script or a program, or a launcher and the script that it launches.
        variables: of its environment.
        timeout_s: after which it is killed.
        anew: whether python starts anew for each process; else those of a launched script, and its launcher, are
            forked from one that has imported what they need; but for where there is a GPU, which one of the imports
            opens (bitsandbytes 0.50, by way of peft), and which no fork can use then.

    Raises:
        subprocess.TimeoutExpired: it took longer.
    """
    environment = {
        **os.environ,
        "PATH": path(),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        **(variables or {}),
    }
    words = [word.removeprefix(f"{ROOT}{os.sep}") for word in command]
    script = next((place for place, word in enumerate(words) if word.startswith(_FOLDERS) or word[-3:] == ".py"), None)
    if script is not None and words[script].startswith("scripts/train_") and "--report" not in words:
        command = [*command, "--report", "false"]  # it takes two seconds of a run
    if script is not None and not anew and not _has_gpu():
        if command[:script] == python():
            return fork(command[script:], environment, timeout_s)
        if command[0] in _LAUNCHERS:
            return fork([*command[:script], RANK, *command[script:]], environment, timeout_s)
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def begin(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str] | Forked:
    """Start a script in the background, forked where there is no GPU. Its output is kept.

    Args:
        command: the script, from the repository's root, and its flags.
        environment: of the process.
    """
    if not _has_gpu():
        return Forked(command, environment)
    nothing, kept = subprocess.DEVNULL, subprocess.PIPE
    return subprocess.Popen([*python(), *command], cwd=ROOT, env=environment, stdout=nothing, stderr=kept, text=True)


@contextmanager
def running(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str] | Forked]:
    """A script in the background, as of `begin`, which is killed at the end of the block."""
    process = begin(command, environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Run:
    """A finished run's folder."""

    folder: Path

    @property
    def metrics(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "metrics.json").read_text(encoding="utf-8")))

    @property
    def log(self) -> list[dict[str, float]]:
        lines = (self.folder / "train_log.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def series(self, name: str) -> list[float]:
        return [entry[name] for entry in self.log]

    @property
    def weights(self) -> Weights:
        """Of the final model."""
        from safetensors.torch import load_file

        return load_file(self.folder / "model.safetensors")

    def weights_at(self, step: int) -> Weights:
        """Of a checkpoint, whole or in shards; these have only the trained rows of an embedding."""
        import torch
        from safetensors.torch import load_file
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        from indictune.models.active_vocabulary import ROW_IDS

        checkpoint = self.folder / f"checkpoint-{step}"
        if (checkpoint / "model.safetensors").exists():
            return load_file(checkpoint / "model.safetensors")
        whole = checkpoint / "whole.pt"
        dcp_to_torch_save(checkpoint / "pytorch_model_fsdp_0", whole)
        model: Weights = torch.load(whole, weights_only=True)["model"]
        model = {_published(name): tensor for name, tensor in model.items()}
        if (checkpoint / ROW_IDS).exists():
            whole_embedding = self.weights[EMBEDDING].clone()
            whole_embedding[self.row_ids_at(step)] = model[EMBEDDING]
            model[EMBEDDING] = whole_embedding
        return model

    def row_ids_at(self, step: int) -> torch.Tensor:
        """The embedding rows that a checkpoint trains."""
        import torch

        from indictune.models.active_vocabulary import ROW_IDS

        path = self.folder / f"checkpoint-{step}" / ROW_IDS
        return torch.tensor(json.loads(path.read_text(encoding="utf-8")))


def _published(name: str) -> str:
    """The name that `save_pretrained` gives a weight; in memory BERT's norms keep those of its first release."""
    return name.replace("LayerNorm.beta", "LayerNorm.bias").replace("LayerNorm.gamma", "LayerNorm.weight")


def train(command: list[str], folder: Path, *flags: str, script: str = SCRIPT, **variables: str) -> Run:
    """Train to the end, or fail with what the run printed."""
    result = start([*command, script, *flags, "--output_dir", str(folder)], variables)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return Run(folder)


def distance(one: Weights, other: Weights) -> float:
    """Euclidean distance of two models' weights."""
    assert one.keys() == other.keys()
    return math.hypot(*(float((one[name].double() - other[name].double()).norm()) for name in one))
