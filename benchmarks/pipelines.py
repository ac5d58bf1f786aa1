"""Seconds of a training step in a pipeline: this package's runner, and the schedules of torch.distributed.pipelining.

    OMP_NUM_THREADS=1 python -m benchmarks.pipelines

A BERT of 8 layers reads rows as long as real tweets: 64 a step, in 8 micro-batches. The runner takes micro-batches of
any shape: joined rows ("unpadded"), or rows of like length, padded to the longest of their micro-batch. torch's
schedules want one shape for a step, so its rows are padded to the longest of the step. They also want one shape for
all steps: here each width has a schedule of its own, made before the clock runs. `bubble` is the measured share of
waiting.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.environment import environment, write_results
from benchmarks.row_lengths import TWEETS, draw_lengths
from indictune.console_text import table
from indictune.data.batching import TrainingBatches
from indictune.data.collation import JoinRows, PadToLongest
from indictune.distributed.pipeline.layout import SCHEDULES, bubble, chunks_of
from indictune.distributed.pipeline.runner import Batch, IdleTime, Runner, StageLinks
from indictune.distributed.pipeline.stages import Stages
from indictune.models.unpadded import classify_unpadded
from tests.ranks.launching import torchrun

ROWS, MICRO_BATCHES, STEPS, WARM_UP = 64, 8, 7, 2
CONFIG: dict[str, Any] = {"vocab_size": 4000, "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4}
UNPADDED, BY_LENGTH, TORCH = "runner, unpadded", "runner, padded to the micro-batch", "torch, padded to the step"


def row_of(tokens: int, label: int) -> dict[str, Any]:
    """A row of so many tokens."""
    return {"input_ids": [5] * tokens, "labels": label, "seq_lengths": [tokens]}


def steps_of(padded: bool) -> list[list[list[dict[str, Any]]]]:
    """The rows of each micro-batch of each step, dealt as in training."""
    lengths = draw_lengths(TWEETS, ROWS * (STEPS + WARM_UP), np.random.default_rng(0))
    settings = {"global_batch_size": ROWS, "accumulation_steps": MICRO_BATCHES, "rank": 0, "world_size": 1, "seed": 0}
    batches = TrainingBatches(lengths, **settings, padded=padded)  # type: ignore[arg-type]
    dealt = [[row_of(int(lengths[row]), row % 3) for row in each] for each in batches]
    return [dealt[first : first + MICRO_BATCHES] for first in range(0, len(dealt), MICRO_BATCHES)]


def stages_of(schedule: str) -> tuple[BertForSequenceClassification, Stages]:
    """The rank's part of the model."""
    torch.manual_seed(0)
    config = BertConfig(**CONFIG, intermediate_size=1024)
    config.update({"num_labels": 3})
    model = BertForSequenceClassification(config).train()
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return model, Stages(model, rank, ranks, chunks_of(schedule))


def timed(steps: list[Callable[[], object]]) -> list[float]:
    """Seconds of each step after the first ones."""
    seconds = []
    for step in steps:
        torch.distributed.barrier()
        began = time.perf_counter()
        step()
        torch.distributed.barrier()
        seconds.append(time.perf_counter() - began)
    return seconds[WARM_UP:]


def run_runner(schedule: str, padded: bool) -> dict[str, Any]:
    """Seconds of each step by the runner, tokens a step, and the median bubble of this rank."""
    model, stages = stages_of(schedule)
    if not padded:
        classify_unpadded(model)
    links, waits = StageLinks([range(stages.ranks)], chunks_of(schedule) > 1), IdleTime(torch.device("cpu"))
    runner = Runner(stages, links, schedule, nullcontext, waits)
    collate = PadToLongest(0, "right") if padded else JoinRows(labels_of_tokens=False)
    batches = [[collate(rows) for rows in step] for step in steps_of(padded)]
    shares = list[float]()

    def loss(batch: Batch) -> Tensor:
        logits = model(**{name: each for name, each in batch.items() if name != "labels"}).logits
        return functional.cross_entropy(logits, batch["labels"], reduction="sum")

    def step(micro_batches: list[Batch]) -> None:
        runner.train(micro_batches, loss, torch.autograd.backward)
        shares.append(waits.share())
        model.zero_grad()

    seconds = timed([lambda each=each: step(each) for each in batches])  # type: ignore[misc]
    tokens = sum(each["input_ids"].numel() for micro_batches in batches[WARM_UP:] for each in micro_batches)
    return {"seconds": seconds, "tokens": tokens / STEPS, "bubble": statistics.median(shares[WARM_UP:])}


class TorchStage(nn.Module):
    """A stage as torch's schedules call it."""

    def __init__(self, model: nn.Module, stages: Stages, number: int) -> None:
        super().__init__()
        self.model, self.stages, self.number = model, stages, number

    def forward(self, states: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        received = states if self.number else None
        if self.stages.has_next(self.number):
            return self.stages.states(self.number, received, inputs)
        self.stages.show(self.number, received)
        logits: Tensor = self.model(**inputs).logits
        return logits


def run_torch(schedule: str) -> dict[str, Any]:
    """Seconds of each step by torch's schedule, and tokens a step."""
    model, stages = stages_of(schedule)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    made: dict[int, Any] = {}

    def schedule_of(width: int) -> Any:
        if width not in made:
            device = torch.device("cpu")
            parts = [
                PipelineStage(TorchStage(model, stages, each), each, stages.count, device) for each in stages.numbers
            ]
            settings = {
                "n_microbatches": MICRO_BATCHES,
                "loss_fn": lambda logits, labels: functional.cross_entropy(logits, labels, reduction="sum"),
                "scale_grads": False,
            }
            kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}[schedule]
            made[width] = kind(parts if schedule == "interleaved" else parts[0], **settings)
        return made[width]

    def step(batch: Batch) -> None:
        labels, inputs = batch["labels"], {name: batch[name] for name in ("input_ids", "attention_mask")}
        first = (batch["input_ids"].float(),) if rank == 0 else ()
        target = {"target": labels, "losses": []} if rank == ranks - 1 else {}
        schedule_of(batch["input_ids"].shape[1]).step(*first, **inputs, **target)
        model.zero_grad()

    batches = [PadToLongest(0, "right")([row for rows in step for row in rows]) for step in steps_of(padded=True)]
    for batch in batches:  # torch finds out shapes in a schedule's first step
        step(batch)
    seconds = timed([lambda each=each: step(each) for each in batches])  # type: ignore[misc]
    return {"seconds": seconds, "tokens": sum(each["input_ids"].numel() for each in batches[WARM_UP:]) / STEPS}


def measure_rank() -> None:
    """On one rank: print a line of JSON for each contender and schedule."""
    torch.distributed.init_process_group("gloo")
    contenders: dict[str, Callable[[str], dict[str, Any]]] = {
        UNPADDED: lambda schedule: run_runner(schedule, padded=False),
        BY_LENGTH: lambda schedule: run_runner(schedule, padded=True),
        TORCH: run_torch,
    }
    for schedule in SCHEDULES:
        for name, run in contenders.items():
            found = run(schedule)
            if torch.distributed.get_rank() == 0:
                print(json.dumps({"schedule": schedule, "contender": name, **found}), flush=True)
    torch.distributed.destroy_process_group()


def main() -> None:
    """Measure and print all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="stages' processes; each keeps a core busy")
    ranks = parser.parse_args().ranks
    done = subprocess.run([*torchrun(ranks), __file__], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"schedule"')]
    rows = [
        [
            each["schedule"],
            each["contender"],
            f"{each['tokens']:,.0f}",
            f"{1000 * statistics.median(each['seconds']):.0f}",
            f"{each['bubble']:.1%}" if "bubble" in each else "",
            f"{bubble(ranks, MICRO_BATCHES, chunks_of(each['schedule'])):.1%}",
        ]
        for each in found
    ]
    print(table(["schedule", "contender", "tokens a step", "ms a step", "bubble", "formula"], rows))
    write_results(f"pipelines-{ranks}", {"environment": environment(), "ranks": ranks, "measured": found})


if __name__ == "__main__":
    if "RANK" in os.environ:
        measure_rank()
    else:
        main()
