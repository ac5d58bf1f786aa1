"""What a run is: one dataclass a concern, every field documented once, beside itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import TrainingArguments

from indictune.errors import Problems, UserError, problem

Method = Literal["full", "lora", "qlora"]
ProblemType = Literal["single_label_classification", "regression", "multi_label_classification"]
MAX_BAD_FRACTION = 0.01

# Learning rate schedules that react to evaluations.
BY_EVALUATIONS = ("reduce_lr_on_plateau", "greedy")


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
    trust_checkpoint: bool = field(
        default=False,
        metadata={
            "help": "Read pickles, which can run code when they are read: weights without a safetensors file, or a "
            "checkpoint that is not this run's own or that others could have written."
        },
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
    use_dora: bool = field(
        default=False, metadata={"help": "Weight-decomposed LoRA (DoRA): a trained length for each output, too."}
    )
    use_rslora: bool = field(
        default=False, metadata={"help": "Rank-stabilised LoRA: scale by alpha / sqrt(r) instead of alpha / r."}
    )
    modules_to_save: list[str] = field(
        default_factory=list,
        metadata={"help": "Modules that are trained whole and saved with the adapter, such as embed_tokens lm_head."},
    )
    attn_implementation: str | None = field(
        default=None,
        metadata={"help": "transformers' attention: eager, sdpa, flash_attention_2, ... Default: the model's own."},
    )
    device_map: str | None = field(
        default=None,
        metadata={
            "help": "auto, balanced or sequential: spread one process's model over all its GPUs, layer by layer. For "
            "more speed, start one process a GPU instead."
        },
    )
    dropout: float | None = field(
        default=None,
        metadata={"help": "Set every dropout of the model to this probability. 0 makes runs comparable exactly."},
    )

    def __post_init__(self) -> None:
        problems = Problems()
        for name in ("use_dora", "use_rslora", "modules_to_save"):
            if self.method == "full" and getattr(self, name):
                problems.append(problem("option-needs-adapter", f"--{name}"))
        for name in ("dropout", "lora_dropout"):
            share = getattr(self, name)
            if share is not None and not 0.0 <= share < 1.0:
                problems.append(problem("probability-expected", f"--{name}", share))
        for name in ("lora_r", "lora_alpha"):
            if getattr(self, name) < 1:
                problems.append(problem("expected-at-least", f"--{name}", getattr(self, name), smallest=1))
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
            raise UserError("max-length-too-small", "--max_length", self.max_length, smallest=3)  # two are special


@dataclass
class BadRowArguments:
    """What becomes of rows that cannot be used.

    Raises:
        UserError: a value is out of its range, or has no effect.
    """

    bad_rows: Literal["stop", "quarantine"] = field(
        default="stop",
        metadata={
            "help": "What rows that cannot be used do: `stop` the run, or be left out and written with the reason to "
            "rejected.jsonl in --output_dir (`quarantine`)."
        },
    )
    max_bad_fraction: float = field(
        default=MAX_BAD_FRACTION,
        metadata={"help": "With --bad_rows quarantine, stop if more than this share of a file's rows is bad."},
    )

    def __post_init__(self) -> None:
        problems = Problems()
        if not 0.0 <= self.max_bad_fraction < 1.0:
            problems.append(problem("share-expected", "--max_bad_fraction", self.max_bad_fraction))
        if self.bad_rows == "stop" and self.max_bad_fraction != MAX_BAD_FRACTION:
            problems.append(
                problem(
                    *("no-effect", "--max_bad_fraction", self.max_bad_fraction, "Use --bad_rows quarantine."),
                    other="--bad_rows stop",
                )
            )
        problems.raise_any()


@dataclass
class SourceArguments(BadRowArguments):
    """Where the rows of a run come from.

    Raises:
        UserError: no training rows are named, or they are named twice, or a value is out of its range.
    """

    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "A dataset on the Hub, or one of the package's own: `builtin:tweets` in Hindi, Telugu and Tamil, "
            "`builtin:chats` with instructions and answers in these and English."
        },
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the Hub dataset."})
    train_file: str | None = field(
        default=None, metadata={"help": "json, jsonl or parquet file; csv and tsv too for a classifier."}
    )
    validation_file: str | None = field(default=None, metadata={"help": "Rows for the evaluations of a run."})
    test_file: str | None = field(default=None, metadata={"help": "Rows evaluated once, at the end of the run."})

    def __post_init__(self) -> None:
        problems = Problems()
        with problems.collecting():
            BadRowArguments.__post_init__(self)
        if self.dataset_name is not None and self.train_file is not None:
            other = f"--train_file {self.train_file}"
            problems.append(problem("two-data-sources", "--dataset_name", self.dataset_name, other=other))
        if self.dataset_name is None and self.train_file is None:
            problems.append(problem("no-training-rows", "--train_file"))
        if self.dataset_config_name is not None and self.dataset_name is None:
            problems.append(problem("dataset-config-without-name", "--dataset_config_name", self.dataset_config_name))
        problems.raise_any()


@dataclass
class DataArguments(TextArguments, SourceArguments):
    """Which labelled texts are trained on, and how they are read.

    Raises:
        UserError: a value is out of its range, or no training rows are named.
    """

    drop_leaked_rows: bool = field(
        default=False, metadata={"help": "Remove training rows whose text also stands in the validation or test rows."}
    )
    problem_type: ProblemType | None = field(
        default=None,
        metadata={
            "help": "What a label is: one class (the default), a number, or several classes (`a|b`, or a list in json "
            "and parquet). Give single_label_classification if your classes look like scores."
        },
    )

    def __post_init__(self) -> None:
        problems = Problems()
        with problems.collecting():
            TextArguments.__post_init__(self)
        with problems.collecting():
            SourceArguments.__post_init__(self)
        problems.raise_any()


@dataclass
class IndicTrainingArguments(TrainingArguments):
    """How it is trained, for every task: transformers' `TrainingArguments` with our defaults and a few fields more."""

    per_device_eval_batch_size: int = field(
        default=64, metadata={"help": "Rows of one evaluation batch on each process."}
    )
    metric_for_best_model: str | None = field(
        default="loss", metadata={"help": "Metric of the validation rows by which checkpoints are compared."}
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
    async_save: bool = field(
        default=False, metadata={"help": "Write checkpoints in shards from copies in CPU memory, beside the training."}
    )
    global_batch_size: int = field(
        default=64,
        metadata={
            "help": "Rows of one optimizer step over all processes. gradient_accumulation_steps follows from it, the "
            "number of processes and per_device_train_batch_size."
        },
    )
    max_tokens_per_device: int | None = field(
        default=None,
        metadata={
            "help": "Tokens that one process trains on at once, padding included; gradient_accumulation_steps is the "
            "smallest that keeps to it all through the run. Replaces per_device_train_batch_size."
        },
    )
    reduce_dtype: Literal["float32", "bfloat16"] = field(
        default="float32",
        metadata={"help": "Type in which gradients are summed over processes. bfloat16 sends half the bytes."},
    )
    restore_callback_states_from_checkpoint: bool = field(
        default=True, metadata={"help": "Must stay on: early stopping goes on counting where it was."}
    )
    hub_strategy: str = field(default="end", metadata={"help": "Must stay `end`: the finished model is pushed once."})
    on_nonfinite: Literal["stop", "skip", "rollback"] = field(
        default="stop",
        metadata={
            "help": "What a NaN or infinite loss or gradient does. stop: it ends the run. skip: the step changes "
            "nothing. rollback: weights and states go back to the last checkpoint that is not of a stop, rows go on. "
            "The last two wait for the GPU at every step."
        },
    )
    max_nonfinite_steps: int = field(
        default=10, metadata={"help": "How many steps may be skipped or rolled back before the run ends."}
    )
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "Stop after this many evaluations without a better metric."}
    )
    verbose: bool = field(
        default=False, metadata={"help": "Show the messages of DeepSpeed, torch and the other libraries too."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        if torch.backends.cuda.matmul.fp32_precision == "tf32":
            # transformers (5.23, `enable_tf32`) sets this alone. A compiler that tries several kernels (torch 2.13,
            # `--torch_compile_mode max-autotune`) asks for the older setting, which is refused until it says the same.
            torch.set_float32_matmul_precision("high")


@dataclass
class SentimentTrainingArguments(IndicTrainingArguments):
    """How a classifier is trained."""

    metric_for_best_model: str | None = field(
        default="macro_f1",
        metadata={"help": "Metric of the validation rows by which checkpoints are compared. Default: the task's own."},
    )
    padding_free: Literal["auto", "on", "off"] = field(
        default="auto",
        metadata={
            "help": "Train on rows end to end instead of padding them, which changes nothing but the speed. auto: "
            "where the model is known to give the same result."
        },
    )
    class_weights: str | None = field(
        default=None,
        metadata={"help": "`balanced` (n / (classes x count)), or a JSON or YAML file of label: weight."},
    )
    regression_loss: Literal["mse", "huber"] = field(
        default="mse", metadata={"help": "Loss of --problem_type regression. huber grows linearly for errors above 1."}
    )
    active_vocabulary: Literal["auto", "on", "off"] = field(
        default="auto",
        metadata={
            "help": "Train only the embedding rows of tokens that the data uses; saved models have all rows. `auto`: "
            "where the embedding is trained and at least a tenth of its rows is unused."
        },
    )
