"""The training runs that `benchmarks/speed.py` and `benchmarks/gpu.py` compare, each in a separate process."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from indictune.data.batching import TrainingBatches

MAX_LENGTH = 128
BATCH_SIZE = 64


@dataclass(frozen=True)
class Contender:
    """One run.

    Attributes:
        title: in the table.
        padding: of transformers' Trainer: `max_length` or `longest`; None for indictune.
        settings: of the Trainer, or flags of our script.
        order: row numbers in the order in which the Trainer takes them; empty for its own shuffle.
    """

    title: str
    padding: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class Job:
    """What all contenders share.

    Attributes:
        model: folder.
        train_file: jsonl.
        steps: of the whole run.
        steps_per_lap: that are timed together.
        folder: for outputs and logs.
    """

    model: Path
    train_file: Path
    steps: int
    steps_per_lap: int
    folder: Path


class Laps(TrainerCallback):
    """Waits for the parent before each lap; then sends its seconds and the counts so far.

    A lap includes making its next batch. The last step's loss is known at the end of training, so the counts are sent
    once more then.

    Args:
        connection: to the parent.
        job: has the steps of a lap.
        counted: returns `padding_fraction` and other counts.
    """

    def __init__(self, connection: Connection, job: Job, counted: Callable[[], dict[str, Any]]) -> None:
        self.connection = connection
        self.job = job
        self.counted = counted
        self.losses: list[float] = []
        self.first_step_s = 0.0
        self._since = 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.connection.send("ready")
        self._wait(control)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step == 1:
            self.first_step_s = synchronized_time() - self._since
        if state.global_step % self.job.steps_per_lap == 0:
            self.connection.send((synchronized_time() - self._since, self._so_far()))
            self._wait(control)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        if "loss" in others["logs"]:
            self.losses.append(others["logs"]["loss"])

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.connection.send(self._so_far())
        sys.exit()  # what follows training is not compared

    def _so_far(self) -> dict[str, Any]:
        common = {"peak_memory_bytes": peak_memory_bytes(), "losses": self.losses, "first_step_s": self.first_step_s}
        return {**common, **self.counted()}

    def _wait(self, control: TrainerControl) -> None:
        control.should_training_stop = self.connection.recv() == "stop"
        self._since = time.perf_counter()


def synchronized_time() -> float:
    """Seconds of the clock, after the GPU has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_memory_bytes() -> int:
    """Peak memory of this process: on the GPU, else on the CPU (Linux)."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def compete(contender: Contender, job: Job, connection: Connection) -> None:
    """Run a contender in a child process."""
    write_to_log(contender, job)
    if contender.padding is None:
        train_by_indictune(contender, job, connection)
    else:
        train_by_transformers(contender, job, connection)


def write_to_log(contender: Contender, job: Job) -> None:
    """Redirect this process's output to `<title>.log`."""
    log = os.open(job.folder / f"{contender.title}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)


def count_positions(trainer: Any) -> list[int]:
    """A list that grows by the token positions, padding included, of each micro-batch of our trainer."""
    positions, step = [], trainer.training_step

    def training_step(model: torch.nn.Module, inputs: dict[str, Any], *others: Any) -> torch.Tensor:
        positions.append(inputs["input_ids"].numel())
        loss: torch.Tensor = step(model, inputs, *others)
        return loss

    trainer.training_step = training_step
    return positions


def train_by_indictune(contender: Contender, job: Job, connection: Connection) -> None:
    """Run scripts/train_sentiment.py with the callback `Laps`."""

    def callback(trainer: Any, throughput: Any) -> Laps:
        positions = count_positions(trainer)

        def counted() -> dict[str, Any]:
            order = order_of(trainer.batches, trainer.state.global_step)
            return {
                "padding_fraction": 1 - throughput.tokens / sum(positions),
                "tokens_per_row": throughput.tokens / throughput.rows,
                "trained_vocabulary": trainer.model.get_input_embeddings().num_embeddings,
                "order": order,
            }

        return Laps(connection, job, counted)

    run_sentiment(contender, job, callback)


def order_of(batches: TrainingBatches, steps: int) -> list[int]:
    """Row numbers of the first steps, over epochs."""
    positions = (divmod(step, batches.steps_per_epoch) for step in range(steps))
    return [row for epoch, step in positions for each in batches.micro_batches(epoch, step) for row in each]


def run_sentiment(contender: Contender, job: Job, callback: Callable[[Any, Any], TrainerCallback]) -> None:
    """Run scripts/train_sentiment.py with a contender's settings; `callback` as in `run_task`."""
    from indictune.tasks.classification import Classification

    settings = {
        "model_name_or_path": job.model,
        "train_file": job.train_file,
        "validation_split": 0,
        "max_length": MAX_LENGTH,
        "global_batch_size": BATCH_SIZE,
        "per_device_train_batch_size": BATCH_SIZE,
        "max_steps": job.steps,
        "logging_steps": 500,  # as the Trainer's default
        "eval_strategy": "no",
        "save_strategy": "no",
        "load_best_model_at_end": "false",
        "output_dir": job.folder / contender.title,
        **contender.settings,
    }
    run_task(Classification(), settings, callback)


def run_task(task: Any, settings: dict[str, Any], callback: Callable[[Any, Any], TrainerCallback]) -> None:
    """Run a task as its script does, with an additional callback.

    Args:
        task: of the run.
        settings: flags and values.
        callback: makes the callback from the trainer and its throughput.
    """
    import indictune.before_imports  # noqa: F401, this import defers signals
    from indictune.config.recipe import read_recipe
    from indictune.supervise.execute import execute
    from indictune.training import run_task

    train = vars(run_task)["train_model"]

    def add_and_train(trainer: Any, *args: Any) -> Any:
        trainer.add_callback(callback(trainer, trainer.throughput))
        return train(trainer, *args)

    setattr(run_task, "train_model", add_and_train)  # noqa: B010
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    execute(partial(run_task.run_task, task), read_recipe(flags, task.arguments))


class CountingTrainer(Trainer):
    """transformers' Trainer with counts that stay on the device, so that no step waits for them."""

    rows = positions = 0
    tokens: int | torch.Tensor = 0

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *others: Any) -> torch.Tensor:
        mask = inputs["attention_mask"]
        if len(mask) > self.args.per_device_train_batch_size:
            raise RuntimeError("The Trainer uses all visible GPUs. Show it one with CUDA_VISIBLE_DEVICES.")
        self.rows += len(mask)
        self.positions += mask.numel()
        self.tokens = self.tokens + mask.sum()
        return super().training_step(model, inputs, *others)

    def counted(self) -> dict[str, Any]:
        """Counts of all steps so far."""
        model: Any = self.model
        return {
            "padding_fraction": 1 - int(self.tokens) / self.positions,
            "tokens_per_row": int(self.tokens) / self.rows,
            "trained_vocabulary": model.get_input_embeddings().num_embeddings,
        }


def train_by_transformers(contender: Contender, job: Job, connection: Connection) -> None:
    """Train as transformers' `run_classification.py` does: rows padded in preparation or in the collator."""
    from datasets import load_dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

    settings = dict(contender.settings)
    dropout = settings.pop("dropout", None)
    changes = {} if dropout is None else {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    model = AutoModelForSequenceClassification.from_pretrained(job.model, **changes)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    cache = job.folder / f"cache-{contender.title}"  # its own, so that each start prepares
    rows = load_dataset("json", data_files=str(job.train_file), split="train", cache_dir=str(cache))

    class_id = {label: number for number, label in model.config.id2label.items()}

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        padding = contender.padding == "max_length" and "max_length"
        encoded = tokenizer(batch["text"], truncation=True, max_length=MAX_LENGTH, padding=padding)
        return {**encoded, "labels": [class_id[label] for label in batch["label"]]}

    rows = rows.map(encode, batched=True, remove_columns=rows.column_names)
    if contender.order:
        rows = rows.select(contender.order)
        settings["train_sampling_strategy"] = "sequential"
    args = TrainingArguments(
        output_dir=str(job.folder / contender.title),
        max_steps=job.steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        **{"per_device_train_batch_size": BATCH_SIZE, **settings},
    )
    trainer = CountingTrainer(model, args, train_dataset=rows, data_collator=DataCollatorWithPadding(tokenizer))
    trainer.add_callback(Laps(connection, job, trainer.counted))
    trainer.train()
