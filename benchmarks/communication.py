"""Bytes that each of two ranks sends in a step over gloo, next to the formula: each strategy, in fp32 and bf16.

    python -m benchmarks.communication

Gradients have either type; weights have the type of the computation, bfloat16 with `--bf16 true`. The kernel counts
the bytes of each process (`wchar` of /proc/<pid>/io). The first step, which opens connections, does not count.
"trainer" is DDP with the settings of transformers' Trainer; "whole vocabulary" has `--active_vocabulary off`.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import tempfile
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from benchmarks.environment import environment, write_results
from indictune.console_text import table
from indictune.planning.step_time import bytes_gathered, bytes_scattered, bytes_summed
from tests.ranks.launching import accelerate, start

RANKS = 2
TWEETS = ("--dataset_name", "builtin:tweets")
JOB = (
    *("--model_name_or_path", "builtin:tiny-indic-bert", "--max_length", "32"),
    *("--global_batch_size", "16", "--per_device_train_batch_size", "8", "--max_steps", "8", "--logging_steps", "100"),
    *("--eval_strategy", "no", "--load_best_model_at_end", "false", "--save_strategy", "no"),
)
STRATEGIES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
BYTES = {"float32": 4, "bfloat16": 2}
# Columns of query, key, value and intermediate, with their biases; rows of what follows them, whose biases are added
# once (Shoeybi et al. 2019, section 3).
SPLIT = re.compile(
    r"encoder\.layer\.\d+\.(?:(?:attention\.self\.\w+|intermediate\.dense)\.(?:weight|bias)"
    r"|(?:attention\.)?output\.dense\.weight)$"
)
TRAINER, WHOLE = "trainer", "whole vocabulary"


@dataclass(frozen=True)
class Count:
    """What one rank counted.

    Attributes:
        bytes_of_steps: sent in each step but the first.
        elements: of all trained parameters.
        elements_in_units: of parameters that FSDP gathers block by block, and again in the backward pass.
        elements_split: of parameters that the tensor axis splits, in the plan of BERT.
        kept: bytes of its `parameters`, `gradients` and `optimizer_states` before the optimizer's last step.
        between: bytes of gradients between micro-batches.
        layers: of the whole model.
        hidden: values of a token between them.
        key_values: values of a token's keys in a layer.
    """

    bytes_of_steps: list[int]
    elements: int
    elements_in_units: int
    elements_split: int
    kept: dict[str, int]
    between: int
    layers: int
    hidden: int
    key_values: int

    @property
    def sent(self) -> float:
        """Median bytes of a step."""
        return statistics.median(self.bytes_of_steps)


def expected_bytes(
    strategy: str,
    count: Count,
    reduce_dtype: str,
    weight_dtype: str,
    accumulation_steps: int,
    gpu: bool = False,
    ranks: int = RANKS,
) -> float:
    """Bytes that a rank sends in a step, by the formula.

    Args:
        strategy: `ddp`, `fsdp2`, `zero1`, `zero2` or `zero3`.
        count: has the sizes of the parameters.
        reduce_dtype: of gradients.
        weight_dtype: of weights in the computation.
        accumulation_steps: micro-batches of a step.
        gpu: with NCCL instead of gloo.
        ranks: that share the batch.
    """
    gradients, weights = count.elements * BYTES[reduce_dtype], count.elements * BYTES[weight_dtype]
    weights_again = count.elements_in_units * BYTES[weight_dtype]  # FSDP2 gathers a unit in the backward pass too
    # DeepSpeed 0.19: ZeRO-1 and 2 sum whole buckets and keep their share, ZeRO-1 once a step. ZeRO-3 scatters sums and
    # gathers once a micro-batch: all weights are fewer than `stage3_max_reuse_distance` (1e9), and stay for the
    # backward pass.
    sent = {
        "ddp": bytes_summed(gradients, ranks),
        "fsdp2": bytes_scattered(gradients, ranks, gpu)
        + accumulation_steps * bytes_gathered(weights + weights_again, ranks),
        "zero1": bytes_summed(gradients, ranks) + bytes_gathered(weights, ranks),
        "zero2": accumulation_steps * bytes_summed(gradients, ranks) + bytes_gathered(weights, ranks),
        "zero3": accumulation_steps * (bytes_scattered(gradients, ranks, gpu) + bytes_gathered(weights, ranks)),
    }
    return sent[strategy]


def in_types(reduce_dtype: str, weight_dtype: str) -> tuple[str, ...]:
    """Flags for the types of gradients and weights."""
    return ("--reduce_dtype", reduce_dtype, "--bf16", str(weight_dtype == "bfloat16").lower())


def count_bytes(
    strategy: str,
    folder: Path,
    *flags: str,
    ranks: int = RANKS,
    as_trainer: bool = False,
    rows: tuple[str, ...] = TWEETS,
    options: tuple[str, ...] = (),
    task: str = "sentiment",
    anew: bool = True,
) -> list[Count]:
    """Train a small job; return the count of each rank.

    Args:
        strategy: a file in `accelerate_configs/`.
        folder: for the run.
        flags: in addition to `JOB`.
        ranks: processes.
        as_trainer: with the communication settings of transformers' Trainer.
        rows: flags that name them.
        options: of the launcher.
        task: `sentiment` or `llama`.
        anew: as in `start`.

    Raises:
        RuntimeError: the run failed.
    """
    program = ("--module", "benchmarks.counted_run") if anew else ("benchmarks/counted_run.py",)
    run = (*program, *JOB, *rows, *flags, "--output_dir", str(folder / "run"))
    variables = {"COUNTS": str(folder), "AS_TRAINER": "yes" if as_trainer else "", "TASK": task}
    result = start([*accelerate(strategy, ranks), *options, *run], variables, timeout_s=900, anew=anew)
    if result.returncode != 0:
        raise RuntimeError(f"{strategy}, {flags}:\n{result.stdout}\n{result.stderr}")
    return [_read(folder / f"rank-{rank}.json") for rank in range(ranks)]


def count_peak(folder: Path, *flags: str, task: str, anew: bool = True) -> int:
    """Train a small job with one process; the peak of memory in bytes, on a GPU or else of torch's CPU allocator.

    Raises:
        RuntimeError: the run failed.
    """
    program = ("--module", "benchmarks.counted_run") if anew else ("benchmarks/counted_run.py",)
    run = (*program, *JOB, *flags, "--output_dir", str(folder / "run"))
    variables = {"COUNTS": str(folder), "TASK": task, "PEAK": "yes"}
    result = start([*accelerate("single_gpu", 1), *run], variables, timeout_s=900, anew=anew)
    if result.returncode != 0:
        raise RuntimeError(f"{flags}:\n{result.stdout}\n{result.stderr}")
    peak: int = json.loads((folder / "rank-0.json").read_text(encoding="utf-8"))["peak"]
    return peak


def _read(path: Path) -> Count:
    noted = json.loads(path.read_text(encoding="utf-8"))
    sizes = [(math.prod(each["shape"]), each["in_a_unit"], each["name"]) for each in noted["parameters"]]
    return Count(
        bytes_of_steps=[after - before for before, after in pairwise(noted["bytes"])],
        elements=sum(size for size, _, _ in sizes),
        elements_in_units=sum(size for size, inside, _ in sizes if inside),
        elements_split=sum(size for size, _, name in sizes if SPLIT.search(name)),
        kept=noted["kept"],
        between=noted["between"],
        layers=noted["layers"],
        hidden=noted["hidden"],
        key_values=noted["key_values"],
    )


def measure(strategy: str, reduce_dtype: str, weight_dtype: str = "float32", variant: str = "") -> dict[str, Any]:
    """One line of the table; `variant` is `trainer`, `whole vocabulary` or empty."""
    vocabulary = ("--active_vocabulary", "off" if variant == WHOLE else "on")
    with tempfile.TemporaryDirectory() as folder:
        flags = (*in_types(reduce_dtype, weight_dtype), *vocabulary)
        count = count_bytes(strategy, Path(folder), *flags, as_trainer=variant == TRAINER)[0]
    types = (reduce_dtype, weight_dtype)
    return {
        "strategy": f"{strategy}, {variant}" if variant else strategy,
        "reduce_dtype": reduce_dtype,
        "weight_dtype": weight_dtype,
        "bytes_a_step": count.sent,
        "formula_bytes": expected_bytes(strategy, count, *types, accumulation_steps=1),
        "formula_bytes_on_gpus": expected_bytes(strategy, count, *types, accumulation_steps=1, gpu=True),
        "parameter_bytes": 4 * count.elements,
    }


def main() -> None:
    """Measure, print the table and write the result file."""
    about = environment()
    lines = [measure("ddp", "float32", variant=TRAINER)]
    lines += [measure(each, "float32", variant=WHOLE) for each in ("ddp", "fsdp2")]
    lines += [measure(each, *types) for each in STRATEGIES for types in product(BYTES, BYTES)]
    names = ("bytes_a_step", "formula_bytes", "formula_bytes_on_gpus")
    body = [
        [line["strategy"], line["reduce_dtype"], line["weight_dtype"], *(f"{line[name]:,.0f}" for name in names)]
        for line in lines
    ]
    header = ["strategy", "gradients in", "weights in", "bytes a step", "formula", "formula on GPUs"]
    print(table(header, body), end="\n\n")
    print(f"written to {write_results('communication', {'environment': about, 'ranks': RANKS, 'strategies': lines})}")


if __name__ == "__main__":
    main()
