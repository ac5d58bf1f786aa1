"""Bytes that each of two ranks sends in a step over gloo, beside the formula: under every strategy, in both types.

Gradients are sent in either type, and weights in that in which they are computed with: bfloat16 with `--bf16 true`.

    python -m benchmarks.communication

Counted by the kernel for each process (`wchar` of /proc/<pid>/io), so that other traffic of the machine does not show;
the first step, which opens connections, is left out. "trainer" is DDP with the settings of transformers' Trainer;
"whole vocabulary" has `--active_vocabulary off`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from benchmarks.environment import environment, write_results
from indictune.console_text import table
from indictune.distributed.communication import sent_bytes

ROOT = Path(__file__).parents[1]
RANKS = 2
JOB = (
    *("--model_name_or_path", "builtin:tiny-indic-bert", "--dataset_name", "builtin:tweets", "--max_length", "32"),
    *("--global_batch_size", "16", "--per_device_train_batch_size", "8", "--max_steps", "8", "--logging_steps", "100"),
    *("--eval_strategy", "no", "--load_best_model_at_end", "false", "--save_strategy", "no"),
)
STRATEGIES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
BYTES = {"float32": 4, "bfloat16": 2}
TRAINER, WHOLE = "trainer", "whole vocabulary"


@dataclass(frozen=True)
class Count:
    """What one rank noted.

    Attributes:
        bytes_of_steps: sent in each step but the first.
        seconds_of_steps: likewise.
        peak_memory_bytes: of the process.
        elements: of all trained parameters.
        elements_in_units: of those that FSDP gathers block by block, and again in the backward pass.
    """

    bytes_of_steps: list[int]
    seconds_of_steps: list[float]
    peak_memory_bytes: int
    elements: int
    elements_in_units: int

    @property
    def sent(self) -> float:
        """Bytes of a step, in the middle of all."""
        return statistics.median(self.bytes_of_steps)


def expected_bytes(
    strategy: str, count: Count, reduce_dtype: str, weight_dtype: str, accumulation_steps: int, gpu: bool = False
) -> float:
    """What a rank sends in a step.

    Args:
        strategy: `ddp`, `fsdp2`, `zero1`, `zero2` or `zero3`.
        count: tells the sizes of the parameters.
        reduce_dtype: of gradients.
        weight_dtype: of weights as they are computed with.
        accumulation_steps: micro-batches of a step.
        gpu: NCCL scatters sums; torch's gloo (2.13) sends whole sums to all, and each rank keeps its share.
    """
    return sent_bytes(
        strategy,
        RANKS,
        gradients=count.elements * BYTES[reduce_dtype],
        weights=count.elements * BYTES[weight_dtype],
        weights_again=count.elements_in_units * BYTES[weight_dtype],
        accumulation_steps=accumulation_steps,
        gpu=gpu,
    )


def in_types(reduce_dtype: str, weight_dtype: str) -> tuple[str, ...]:
    """Flags of a run that sends gradients, and computes with weights, in these types."""
    return ("--reduce_dtype", reduce_dtype, "--bf16", str(weight_dtype == "bfloat16").lower())


def count_bytes(strategy: str, folder: Path, *flags: str, as_trainer: bool = False) -> list[Count]:
    """Train a small job on two ranks, and return what each noted.

    Args:
        strategy: a file in `accelerate_configs/`.
        folder: gets the run.
        flags: beside `JOB`.
        as_trainer: with the communication settings of transformers' Trainer.
    """
    command = [
        *(str(Path(sys.executable).with_name("accelerate")), "launch", "--num_processes", str(RANKS)),
        *("--config_file", f"accelerate_configs/{strategy}.yaml", "--main_process_port", str(_free_port())),
        *("--module", "benchmarks.counted_run", *JOB, *flags, "--output_dir", str(folder / "run")),
    ]
    variables = {"COUNTS": str(folder), "OMP_NUM_THREADS": "1", "AS_TRAINER": "yes" if as_trainer else ""}
    result = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{result.stdout}\n{result.stderr}")
    return [_read(folder / f"rank-{rank}.json") for rank in range(RANKS)]


def _read(path: Path) -> Count:
    noted = json.loads(path.read_text(encoding="utf-8"))
    sizes = [(math.prod(each["shape"]), each["in_a_unit"]) for each in noted["parameters"]]
    return Count(
        bytes_of_steps=_differences(noted["bytes"]),
        seconds_of_steps=_differences(noted["seconds"]),
        peak_memory_bytes=noted["peak_memory_bytes"],
        elements=sum(size for size, _ in sizes),
        elements_in_units=sum(size for size, inside in sizes if inside),
    )


def _differences(values: list[Any]) -> list[Any]:
    return [after - before for before, after in pairwise(values)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(strategy: str, reduce_dtype: str, weight_dtype: str = "float32", variant: str = "") -> dict[str, Any]:
    """One line of the table; `variant` is `trainer`, `whole vocabulary` or none."""
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = ("--active_vocabulary", "off" if variant == WHOLE else "on")
        flags = (*in_types(reduce_dtype, weight_dtype), *vocabulary)
        count = count_bytes(strategy, Path(folder), *flags, as_trainer=variant == TRAINER)[0]
    expected = expected_bytes(strategy, count, reduce_dtype, weight_dtype, accumulation_steps=1)
    on_gpus = expected_bytes(strategy, count, reduce_dtype, weight_dtype, accumulation_steps=1, gpu=True)
    return {
        "strategy": f"{strategy}, {variant}" if variant else strategy,
        "reduce_dtype": reduce_dtype,
        "weight_dtype": weight_dtype,
        "bytes_a_step": count.sent,
        "formula_bytes": expected,
        "formula_bytes_on_gpus": on_gpus,
        "parameter_bytes": 4 * count.elements,
        "step_s": statistics.median(count.seconds_of_steps),
        "peak_memory_bytes": count.peak_memory_bytes,
    }


def main() -> None:
    """Measure, print the table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduce_dtypes", nargs="+", choices=BYTES, default=list(BYTES))
    dtypes = parser.parse_args().reduce_dtypes
    lines = [measure("ddp", "float32", variant=TRAINER)]
    lines += [measure(each, "float32", variant=WHOLE) for each in ("ddp", "fsdp2")]
    lines += [measure(each, *types) for each in STRATEGIES for types in product(dtypes, BYTES)]
    body = [
        [
            line["strategy"],
            line["reduce_dtype"],
            line["weight_dtype"],
            f"{line['bytes_a_step']:,.0f}",
            f"{line['formula_bytes']:,.0f}",
            f"{line['bytes_a_step'] / line['formula_bytes']:.4f}",
            f"{line['formula_bytes_on_gpus']:,.0f}",
            f"{line['peak_memory_bytes'] / 1e6:,.0f}",
        ]
        for line in lines
    ]
    header = [
        "strategy",
        "gradients in",
        "weights in",
        "bytes a step",
        "formula",
        "ratio",
        "formula on GPUs",
        "peak MB",
    ]
    print(table(header, body), end="\n\n")
    name = "communication" if len(dtypes) == len(BYTES) else f"communication-{'-'.join(dtypes)}"
    path = write_results(name, {"environment": environment(), "ranks": RANKS, "strategies": lines})
    print(f"written to {path}")


if __name__ == "__main__":
    main()
