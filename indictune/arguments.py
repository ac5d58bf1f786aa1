"""What a run is: one dataclass a concern, every field documented once, beside itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import TrainingArguments

from indictune.errors import Problems, UserError

Method = Literal["full", "lora", "qlora"]


@dataclass
class ModelArguments:
    """Which weights are fine-tuned, and which part of them.

    Raises:
        UserError: a value is out of its range.
    """

    model_name_or_path: str = field(
        default="builtin:tiny-indic-bert",
        metadata={"help": "A Hub name or a folder, or `builtin:tiny-indic-bert`, a small BERT that needs no network."},
    )
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of the model on the Hub."})
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run Python code that comes with the model. Only for authors you trust."}
    )
    method: Method = field(
        default="full",
        metadata={"help": "`full` trains all weights, `lora` an adapter, `qlora` an adapter on a base in NF4."},
    )
    lora_r: int = field(default=16, metadata={"help": "Rank of the LoRA matrices."})
    lora_alpha: int = field(default=32, metadata={"help": "LoRA scale: the update is multiplied by alpha / r."})
    lora_dropout: float = field(default=0.05, metadata={"help": "Dropout in front of the LoRA matrices."})
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"],
        metadata={"help": "Names of the modules that get LoRA matrices; `all-linear` takes every linear layer."},
    )
    dropout: float | None = field(
        default=None,
        metadata={"help": "Set every dropout of the model to this probability. 0 makes runs comparable exactly."},
    )

    def __post_init__(self) -> None:
        problems = Problems()
        if self.dropout is not None and not 0.0 <= self.dropout < 1.0:
            problems.append(f"--dropout {self.dropout}: expected a probability from 0 up to, not including, 1.")
        if not 0.0 <= self.lora_dropout < 1.0:
            problems.append(f"--lora_dropout {self.lora_dropout}: expected a probability from 0 up to 1.")
        for name in ("lora_r", "lora_alpha"):
            if getattr(self, name) < 1:
                problems.append(f"--{name} {getattr(self, name)}: expected a whole number of at least 1.")
        problems.raise_any()


@dataclass
class TextArguments:
    """How the rows of a file are read.

    Raises:
        UserError: a value is out of its range.
    """

    text_column: str = field(default="text", metadata={"help": "Column with the text."})
    label_column: str = field(default="label", metadata={"help": "Column with the label."})
    language_column: str | None = field(
        default=None,
        metadata={
            "help": "Column with the language of each row. Default: `language` where there is such a column, "
            "else the script of the text decides."
        },
    )
    max_length: int = field(
        default=128, metadata={"help": "Texts are cut to this many tokens, special ones included."}
    )

    def __post_init__(self) -> None:
        if self.max_length < 3:
            raise UserError(f"--max_length {self.max_length}: expected at least 3 tokens (two of them are special).")


@dataclass
class DataArguments(TextArguments):
    """Which rows are trained on, and how they are read.

    Raises:
        UserError: a value is out of its range, or no training rows are named.
    """

    dataset_name: str | None = field(
        default=None,
        metadata={"help": "A dataset on the Hub, or `builtin:tweets`, the package's own Hindi, Telugu and Tamil set."},
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the Hub dataset."})
    train_file: str | None = field(default=None, metadata={"help": "csv, tsv, json, jsonl or parquet file."})
    validation_file: str | None = field(default=None, metadata={"help": "Rows for the evaluations of a run."})
    test_file: str | None = field(default=None, metadata={"help": "Rows evaluated once, at the end of the run."})
    drop_leaked_rows: bool = field(
        default=False, metadata={"help": "Remove training rows whose text also stands in the validation or test rows."}
    )

    def __post_init__(self) -> None:
        problems = Problems()
        with problems.collecting():
            super().__post_init__()
        if self.dataset_name is not None and self.train_file is not None:
            problems.append(
                f"--dataset_name {self.dataset_name} and --train_file {self.train_file}: rows come from one of them; "
                "leave one out."
            )
        if self.dataset_name is None and self.train_file is None:
            problems.append(
                "No training rows: give --train_file FILE or --dataset_name NAME (builtin:tweets needs no file)."
            )
        if self.dataset_config_name is not None and self.dataset_name is None:
            problems.append(f"--dataset_config_name {self.dataset_config_name}: has no effect without --dataset_name.")
        problems.raise_any()


@dataclass
class EvaluateArguments(TextArguments):
    """Which finished model is evaluated on which rows. What is not given is as it was in training."""

    model: str = field(default="", metadata={"help": "The --output_dir of a finished run."})
    test_file: str = field(default="", metadata={"help": "csv, tsv, json, jsonl or parquet file with labels."})
    output_dir: str = field(
        default="", metadata={"help": "Gets metrics.json. Default: MODEL/evaluation/<name of the test file>."}
    )
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Rows of one batch on each process."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run Python code that comes with the model."})
    bf16: bool = field(default=False, metadata={"help": "Compute in bf16."})
    fp16: bool = field(default=False, metadata={"help": "Compute in fp16."})
    verbose: bool = field(default=False, metadata={"help": "Show the messages of the other libraries too."})


@dataclass
class IndicTrainingArguments(TrainingArguments):
    """How it is trained: transformers' `TrainingArguments` with our defaults and a few fields more."""

    per_device_eval_batch_size: int = field(
        default=64, metadata={"help": "Rows of one evaluation batch on each process."}
    )
    metric_for_best_model: str | None = field(
        default="macro_f1", metadata={"help": "Metric of the validation rows by which checkpoints are compared."}
    )
    load_best_model_at_end: bool = field(
        default=True, metadata={"help": "Keep the checkpoint with the best metric as the final model."}
    )
    eval_strategy: str = field(default="epoch", metadata={"help": "When to evaluate: no, steps or epoch."})
    save_strategy: str = field(default="epoch", metadata={"help": "When to save: no, steps, epoch or best."})
    save_total_limit: int | None = field(default=2, metadata={"help": "How many checkpoints to keep."})
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Must stay off: it hides NaN losses and waits for the GPU at every batch."}
    )
    report_to: list[str] = field(
        default_factory=lambda: ["none"],
        metadata={"help": "Loggers beside train_log.jsonl: tensorboard, wandb, trackio or none."},
    )
    logging_steps: float = field(default=10, metadata={"help": "Log every so many optimizer steps."})
    global_batch_size: int = field(
        default=64,
        metadata={
            "help": "Rows of one optimizer step over all processes. gradient_accumulation_steps follows from it, the "
            "number of processes and per_device_train_batch_size."
        },
    )
    class_weights: str | None = field(
        default=None,
        metadata={"help": "`balanced` (n / (classes x count)), or a JSON or YAML file of label: weight."},
    )
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "Stop after this many evaluations without a better metric."}
    )
    verbose: bool = field(
        default=False, metadata={"help": "Show the messages of DeepSpeed, torch and the other libraries too."}
    )


# The exact batches, loss and evaluation rest on these.
FIXED = {
    "average_tokens_across_devices": (True, "the loss is exact over all processes"),
    "dataloader_drop_last": (False, "every row is used once an epoch"),
    "auto_find_batch_size": (False, "--global_batch_size fixes the batch"),
    "train_sampling_strategy": ("random", "the rows of a global batch are the same under every strategy"),
    "logging_nan_inf_filter": (False, "NaN losses stop the run instead of being hidden"),
    "prediction_loss_only": (False, "evaluations need the predictions"),
    "batch_eval_metrics": (False, "metrics are computed once, over all rows"),
    "ignore_data_skip": (False, "a resumed run goes on where it stopped"),
}


def check_fixed(planned: Callable[[str], Any]) -> None:
    """Refuse settings of the Trainer that would break what the run promises.

    Args:
        planned: the value that a field of the training arguments will have.

    Raises:
        UserError: all fields that were given another value, each with the reason.
    """
    problems = [
        f"--{name} {planned(name)}: must stay {value}, because {reason}; leave it out."
        for name, (value, reason) in FIXED.items()
        if planned(name) != value
    ]
    if problems:
        raise UserError(problems)


METRICS = ("loss", "accuracy", "macro_f1", "worst_language_macro_f1")


def check_values(planned: Callable[[str], Any]) -> None:
    """Refuse values that transformers or torch would fail on later, or that would train nothing.

    Args:
        planned: the value that a field of the training arguments will have.

    Raises:
        UserError: all such values.
    """
    epochs = planned("num_train_epochs") if planned("max_steps") < 0 else planned("max_steps")
    at_least = {
        "per_device_eval_batch_size": (planned("per_device_eval_batch_size"), 1),
        "early_stopping_patience": (planned("early_stopping_patience"), 1),
        "learning_rate": (planned("learning_rate"), 0),
        "weight_decay": (planned("weight_decay"), 0),
        "warmup_steps": (planned("warmup_steps"), 0),
    }
    problems = [
        f"--{name} {value}: expected at least {smallest}."
        for name, (value, smallest) in at_least.items()
        if value is not None and value < smallest
    ]
    if not epochs > 0:
        problems.append(f"--num_train_epochs {planned('num_train_epochs')}: nothing would be trained.")
    smoothing = planned("label_smoothing_factor")
    if not 0 <= smoothing < 1:
        problems.append(f"--label_smoothing_factor {smoothing}: expected a share from 0 up to, not including, 1.")
    metric = str(planned("metric_for_best_model")).removeprefix("eval_")
    if metric not in METRICS and not metric.startswith("macro_f1_"):
        problems.append(f"--metric_for_best_model {metric}: expected {', '.join(METRICS)} or macro_f1_<language>.")
    if planned("early_stopping_patience") is not None and str(planned("eval_strategy")) == "no":
        problems.append("--early_stopping_patience: nothing to compare, because --eval_strategy is no.")
    if problems:
        raise UserError(problems)
