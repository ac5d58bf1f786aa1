"""What a run is: a dataclass for each concern. Each field is documented where it is declared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import TrainingArguments

from indictune.config.shared_arguments import (
    BadRowArguments,
    Checked,
    MaskArguments,
    OneOrMore,
    RawTextForm,
    TagArguments,
    TextArguments,
    flag,
)
from indictune.errors import Problem, problem

Method = Literal["full", "lora", "qlora"]
# One file or several. In this order `HfArgumentParser` (5.23) takes each word for a text.
Files = list[str] | str | None
ProblemType = Literal["single_label_classification", "regression", "multi_label_classification"]
VALIDATION_SHARE = 0.1

# Learning rate schedules that react to evaluations.
BY_EVALUATIONS = ("reduce_lr_on_plateau", "greedy")


@dataclass
class ModelArguments(Checked):
    """Which weights are fine-tuned, and how."""

    model_name_or_path: str = flag(
        "builtin:tiny-indic-bert",
        "A Hub name or a folder, or `builtin:tiny-indic-bert`, a small BERT that needs no network.",
    )
    model_revision: str = flag("main", "Branch, tag or commit of the model on the Hub.")
    trust_remote_code: bool = flag(
        False, "Run Python code that comes with the model, or that --metrics names. Use it only for authors you trust."
    )
    trust_checkpoint: bool = flag(
        False, "Read checkpoints of another run, or that other users can write. They hold pickles, which can run code."
    )
    method: Method = flag(
        "full", "`full` trains all weights, `lora` an adapter, `qlora` an adapter on a base model in 4-bit NF4."
    )
    lora_r: int = flag(16, "Rank of the LoRA matrices.")
    lora_alpha: int = flag(32, "LoRA scale: the update is multiplied by alpha / r.")
    lora_dropout: float = flag(0.05, "Dropout in front of the LoRA matrices.")
    lora_target_modules: list[str] = flag(
        ["all-linear"], "Names of the modules that get LoRA matrices. `all-linear` is every linear layer."
    )
    use_dora: bool = flag(False, "Weight-decomposed LoRA (DoRA): also train the magnitude of each output.")
    use_rslora: bool = flag(False, "Rank-stabilised LoRA: scale by alpha / sqrt(r) instead of alpha / r.")
    modules_to_save: list[str] = flag(
        [], "Modules to train in full and save with the adapter, such as embed_tokens lm_head."
    )
    attn_implementation: str | None = flag(
        None, "Attention of transformers: eager, sdpa, flash_attention_2, ... Default: the model's own."
    )
    device_map: str | None = flag(
        None, "auto, balanced or sequential: spread a process's layers over all its GPUs. One process a GPU is faster."
    )
    vocabulary_from_train: int | None = flag(
        None,
        "Learn a word-piece vocabulary of at most this many entries from the training texts. A piece is in five "
        "different texts. Only for `builtin:tiny-indic-bert`, whose own vocabulary comes from the built-in tweets.",
    )
    dropout: float | None = flag(
        None,
        "Set every dropout of the model to this probability. With 0, runs can be compared exactly. On the 1,422 "
        "built-in tweets it raised macro-F1 by 0.013.",
    )

    def check(self) -> Iterator[Problem]:
        """Refuse options of adapters without an adapter."""
        yield from super().check()
        for name in ("use_dora", "use_rslora", "modules_to_save"):
            if self.method == "full" and (value := getattr(self, name)):
                way_out = "Use --method lora or qlora, or leave it out."
                given = " ".join(value) if isinstance(value, list) else "true"
                yield problem("no-effect", f"--{name}", given, way_out, other="--method full")


def file_words(files: Files) -> str:
    """The value of a flag of files, as it is typed."""
    return files if isinstance(files, str) else " ".join(files or ())


@dataclass
class SourceArguments(BadRowArguments):
    """Which task a run learns, and where its rows come from."""

    task: Literal["classification", "tokens", "mlm", "chat", "clm", "dpo", "kto", "reward"] | None = flag(
        None, "Task of the recipe. A script of another task refuses it; `indictune train` picks the script by it."
    )
    dataset_name: str | None = flag(
        None,
        "A dataset on the Hub, or one of this package: `builtin:tweets` (Hindi, Telugu, Tamil), `builtin:chats` "
        "(instructions and answers in these and in English) or `builtin:names` (sentences with tagged names).",
    )
    dataset_config_name: Files = flag(
        None,
        "Configuration of the dataset, or several, whose rows are read one after the other. One that names a language "
        "(hi, translation-hi) is that of its rows.",
        nargs="+",
        action=OneOrMore,
    )
    dataset_revision: str | None = flag(None, "Branch, tag or commit of the dataset on the Hub. Default: main.")
    dataset_splits: list[str] = flag(
        [],
        "Which parts of the dataset are train, validation and test, as `datasets` writes them: train=hi "
        "'validation=validation[:90%]' test=hi+ta, or CONFIG/SPLIT. Default: the splits of these names.",
    )
    train_file: Files = flag(
        None,
        "Files of training rows: names, patterns such as 'data/*.csv' or 'data/{language}.csv', folders, and URLs "
        "(https://, hf://datasets/, s3://). json, jsonl, parquet and arrow; for a classifier and raw text csv, tsv, "
        "xlsx, ods and txt (SentiMix's, or of raw text). Each may be packed: .gz or .zst.",
        nargs="+",
        action=OneOrMore,
    )
    train_files: list[str] = flag(
        [],
        "Several sources of training rows instead of --train_file: in a recipe a list of `path`, and if you like "
        "`weight` (how often each row comes in an epoch) and `language` (of rows that name none); as a flag, paths or "
        "such entries as JSON.",
    )
    language_sampling_alpha: float = flag(
        1.0,
        "Give a language with n training rows a share of each epoch in proportion to n to the power of this. 1: as "
        "the rows are. 0: the same share for every language. 0.3 to 0.7 is usual.",
    )
    validation_file: Files = flag(
        None, "Rows for the evaluations during a run, as --train_file.", nargs="+", action=OneOrMore
    )
    test_file: Files = flag(
        None, "Rows for one evaluation at the end of the run, as --train_file.", nargs="+", action=OneOrMore
    )
    validation_split: float = flag(
        VALIDATION_SHARE,
        "Without validation rows, hold out this share of the training rows, by label and language. 0: none.",
    )
    max_unknown_share: float = flag(
        0.3,
        "Stop if the tokenizer does not know more than this share of the tokens of a language and script, or of all "
        "rows. 1: never.",
    )
    max_collision_share: float | None = flag(
        None, "Stop if the tokenizer reads more than this share of a language's words as another word. Default: warn."
    )
    max_near_duplicate_share: float | None = flag(
        None, "Stop if more than this share of the held-out rows nearly repeat a training row. Default: warn."
    )

    def check(self) -> Iterator[Problem]:
        """Refuse no source of training rows or two, and a split that is not needed."""
        yield from super().check()
        if self.validation_file is not None and self.validation_split not in (0, VALIDATION_SHARE):
            other, way_out = f"--validation_file {file_words(self.validation_file)}", "Leave it out, or give 0."
            yield problem("no-effect", "--validation_split", self.validation_split, way_out, other=other)
        named = {name: file_words(getattr(self, name)) for name in ("dataset_name", "train_file", "train_files")}
        given = [(f"--{name}", value) for name, value in named.items() if value]
        for name, value in given[1:]:
            yield problem("two-data-sources", *given[0], other=f"{name} {value}")
        if not given:
            yield problem("no-training-rows", "--train_file")
        if not 0 <= self.language_sampling_alpha <= 1:
            yield problem("alpha-out-of-range", "--language_sampling_alpha", self.language_sampling_alpha)
        for name in ("dataset_config_name", "dataset_revision", "dataset_splits"):
            word = file_words(getattr(self, name))
            if word and self.dataset_name is None:
                yield problem("dataset-config-without-name", f"--{name}", word)
            elif word and str(self.dataset_name).startswith("builtin:"):
                other = f"--dataset_name {self.dataset_name}"
                yield problem("no-effect", f"--{name}", word, "Leave it out.", other=other)


@dataclass
class DataArguments(TextArguments, SourceArguments):
    """Which labelled texts are trained on, and how they are read."""

    # A number from the moment the rows are tokenised.
    max_length: int | str = flag(  # type: ignore[assignment]
        128,
        "Cut texts to this many tokens, special ones included. `auto`: the 99th percentile of the training rows' "
        "tokens (of a tagger the 99.5th), within the model's positions.",
    )
    drop_leaked_rows: bool = flag(False, "Remove training rows whose text is also in the validation or test rows.")
    max_conflict_share: float | None = flag(
        None, "Stop if more than this share of the texts have several labels in several rows. Default: warn."
    )
    problem_type: ProblemType | None = flag(
        None,
        "What a label is: one class (the default), a number, or several classes (`a|b`, or a list in json and "
        "parquet). Give single_label_classification if your classes look like scores.",
    )


@dataclass
class TaggedDataArguments(DataArguments, TagArguments):
    """Which tagged sentences are trained on, and how they are read."""


@dataclass
class RawTextArguments(RawTextForm, SourceArguments):
    """Which raw texts a language model learns, and how they are read."""

    max_length: int = flag(
        256, "Tokens of a row, special ones included: longer documents are cut into pieces, and shorter ones packed."
    )


@dataclass
class MaskedTextArguments(MaskArguments, RawTextArguments):
    """Which raw texts a masked language model learns, and how they are read."""


@dataclass
class CausalTextArguments(RawTextArguments):
    """Which raw texts a causal language model learns. The run records its task, which the model does not show."""

    task: Literal["clm"] | None = flag(
        "clm", "Task of the recipe. A script of another task refuses it; `indictune train` picks the script by it."
    )


@dataclass
class IndicTrainingArguments(TrainingArguments):
    """How every task is trained: transformers' `TrainingArguments` with other defaults and a few more fields."""

    per_device_eval_batch_size: int = flag(64, "Rows of one evaluation batch on each process.")
    metric_for_best_model: str | None = flag("loss", "Metric of the validation rows that compares checkpoints.")
    metrics: list[str] = flag(
        [], "Metrics of `evaluate` to add: Hub names or files. Code, so they need --trust_remote_code true."
    )
    load_best_model_at_end: bool = flag(True, "Keep the checkpoint with the best metric as the final model.")
    eval_strategy: str = flag("epoch", "When to evaluate: no, steps or epoch.")
    save_strategy: str = flag("epoch", "When to save: no, steps, epoch or best.")
    save_total_limit: int | None = flag(2, "How many checkpoints to keep.")
    logging_nan_inf_filter: bool = flag(
        False, "Must stay off: it hides NaN losses and waits for the GPU at every batch."
    )
    report_to: list[str] = flag(
        ["none"], "Loggers in addition to train_log.jsonl: tensorboard, wandb, trackio or none."
    )
    logging_steps: float = flag(
        0.02, "Log every this many optimizer steps; below 1: this share of the run. The default makes about 50 lines."
    )
    report: bool = flag(True, "Write report.html and its pictures when the run has finished.")
    async_save: bool = flag(False, "Write checkpoints in shards, from copies in CPU memory, while training continues.")
    snapshot_steps: int = flag(
        0,
        "Every this many steps, write a checkpoint to the node's memory (/dev/shm), with a copy on the next node, and "
        "from there to --output_dir while training continues. 0: none.",
    )
    global_batch_size: int = flag(
        64, "Rows of one optimizer step over all processes, from which gradient_accumulation_steps follows."
    )
    min_steps: int = flag(
        0,
        "Raise --num_train_epochs until the run has this many optimizer steps. Three of its ten evaluations without a "
        "better metric end it, unless a flag says when to evaluate, save or stop. --max_steps wins.",
    )
    max_tokens_per_device: int | None = flag(
        None,
        "Most tokens in a micro-batch of one process, padding included. gradient_accumulation_steps is the smallest "
        "number that keeps to it in all steps. Replaces per_device_train_batch_size.",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = flag(
        "float32", "Type in which gradients are summed over processes. bfloat16 sends half the bytes."
    )
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved"] = flag(
        "1f1b",
        "Order in which the stages of a pipeline compute micro-batches. gpipe: all forward passes first, which keeps "
        "the most activations. interleaved: two stages a process, for half the waiting and twice the messages.",
    )
    restore_callback_states_from_checkpoint: bool = flag(True, "Must stay on: early stopping resumes its count.")
    hub_strategy: Literal["end", "every_save"] = flag(
        "end", "When --push_to_hub pushes. every_save: the model of each checkpoint too, while the training continues."
    )
    hub_license: str | None = flag(
        None, "Licence of the model, such as apache-2.0, for its card. Default: that of its base, as the Hub has it."
    )
    on_nonfinite: Literal["stop", "skip", "rollback"] = flag(
        "stop",
        "What to do at a NaN or infinite loss or gradient. stop: end the run. skip: leave out the step. rollback: "
        "restore weights and states from the last regular checkpoint, and continue with the next rows. skip and "
        "rollback wait for the GPU at every step.",
    )
    max_nonfinite_steps: int = flag(10, "How many steps may be skipped or rolled back before the run ends.")
    early_stopping_patience: int | None = flag(None, "Stop after this many evaluations without a better metric.")
    allow_cpu: bool = flag(
        False, "Train on the CPU what is meant for GPUs, even if that is expected to take more than an hour."
    )
    profile_steps: int = flag(
        0, "Profile so many steps after the third: a trace per process and a table of times, in OUTPUT_DIR/profile."
    )
    divergence_check_steps: int = flag(
        0,
        "Every this many steps, and before each save, compare the copies of weights and optimizer states that ranks "
        "must have alike, and their random generators. The run stops if they differ. 0: never.",
    )
    verbose: bool = flag(False, "Also show the messages of DeepSpeed, torch and the other libraries.")

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        if torch.backends.cuda.matmul.fp32_precision == "tf32":
            # transformers (5.23, `enable_tf32`) sets only this. torch 2.13's compiler reads the older setting in
            # `--torch_compile_mode max-autotune`, and raises if the two differ.
            torch.set_float32_matmul_precision("high")


@dataclass
class SentimentTrainingArguments(IndicTrainingArguments):
    """How a classifier is trained."""

    metric_for_best_model: str | None = flag(
        "macro_f1", "Metric of the validation rows that compares checkpoints. Default: the task's own."
    )
    padding_free: Literal["auto", "on", "off"] = flag(
        "auto", "Train on rows end to end, without padding. auto: for models that are known to give the same result."
    )
    class_weights: str | None = flag(
        None, "`balanced` (n / (classes x count)), or a JSON or YAML file of label: weight."
    )
    pretrain: str | None = flag(
        None,
        "Recipe of the task mlm. `indictune train` runs it first, on the training texts without their labels, and "
        "starts from its model, OUTPUT_DIR-pretrained. Raised the macro-F1 of 3,000 Hinglish tweets by 0.019.",
    )
    soft_label_column: str | None = flag(
        None,
        "Column of parquet files with a teacher's logits, in the order of the model's labels. They are learned, not "
        "--label_column. `indictune distil` writes such files.",
    )
    soft_label_temperature: float = flag(
        2.0, "Temperature, 1 or more, that divides the logits of teacher and model: a higher one shows more of them."
    )
    baseline: bool = flag(
        True, "Compare the model of one label a text with logistic regression on character n-grams of the same rows."
    )
    regression_loss: Literal["mse", "huber"] = flag(
        "mse", "Loss of --problem_type regression. huber grows linearly for errors above 1."
    )
    active_vocabulary: Literal["auto", "on", "off"] = flag(
        "auto",
        "Train only the embedding rows of tokens that the data uses; saved models have all rows. `auto`: if the "
        "embedding is trained and at least a tenth of its rows is unused.",
    )
