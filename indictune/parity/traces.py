"""What a finished run of `indictune parity` left in its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from indictune.files import METRICS

TRACE = "parity_trace.jsonl"


@dataclass(frozen=True)
class Traced:
    """A run and its trace.

    Attributes:
        name: of the strategy.
        folder: `--output_dir` of the run.
    """

    name: str
    folder: Path

    @cached_property
    def _log(self) -> list[dict[str, Any]]:
        return _lines(self.folder / "train_log.jsonl")

    @cached_property
    def _trace(self) -> list[dict[str, Any]]:
        return _lines(self.folder / TRACE)

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The content of `metrics.json`."""
        return dict(json.loads((self.folder / METRICS).read_text(encoding="utf-8")))

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [line["loss"] for line in self._log]

    @property
    def norms(self) -> list[float]:
        """The norm of each step's gradients, before clipping."""
        return [line["grad_norm"] for line in self._log]

    @property
    def start(self) -> Mapping[str, Any]:
        """What the run started from."""
        return self._trace[0]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """What each step followed from."""
        return self._trace[1:]

    @property
    def evaluation(self) -> dict[str, float]:
        """The metrics of all validation rows; empty without any."""
        return {name: value for name, value in self.metrics.get("eval", {}).items() if isinstance(value, float)}

    def weights(self) -> dict[str, Tensor]:
        """The final model."""
        files = sorted(self.folder.glob("*.safetensors"))
        return {name: weight for file in files for name, weight in load_file(file).items()}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
