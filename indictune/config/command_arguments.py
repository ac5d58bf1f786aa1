"""What the commands take, but for those that take a run's own flags."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from indictune.config.arguments import BadRowArguments, TextArguments
from indictune.errors import Problems, UserError, problem


@dataclass
class EvaluateArguments(TextArguments, BadRowArguments):
    """Which finished model is evaluated on which rows. What is not given is as it was in training, but for bad rows.

    Raises:
        UserError: a value is out of its range.
    """

    model: str = field(default="", metadata={"help": "The --output_dir of a finished run."})
    test_file: str = field(default="", metadata={"help": "Rows in the form of the training rows, with answers."})
    chat_template: str | None = field(default=None, metadata={"help": "How messages are written out."})
    train_on_prompts: bool = field(default=False, metadata={"help": "Score every token, not the answers alone."})
    output_dir: str = field(
        default="", metadata={"help": "Gets metrics.json. Default: MODEL/evaluation/<name of the test file>."}
    )
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Rows of one batch on each process."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run Python code that comes with the model."})
    trust_checkpoint: bool = field(
        default=False,
        metadata={"help": "Read weights without a safetensors file: pickles, which can run code when they are read."},
    )
    bf16: bool = field(default=False, metadata={"help": "Compute in bf16."})
    fp16: bool = field(default=False, metadata={"help": "Compute in fp16."})
    ddp_timeout: int = field(
        default=1800, metadata={"help": "Seconds after which a process that the others wait for ends the command."}
    )
    verbose: bool = field(default=False, metadata={"help": "Show the messages of the other libraries too."})

    def __post_init__(self) -> None:
        problems = Problems()
        with problems.collecting():
            TextArguments.__post_init__(self)
        with problems.collecting():
            BadRowArguments.__post_init__(self)
        for name in ("per_device_eval_batch_size", "ddp_timeout"):
            if (value := getattr(self, name)) < 1:
                problems.append(problem("expected-at-least", f"--{name}", value, smallest=1))
        problems.raise_any()


@dataclass
class MergeArguments:
    """Which adapter becomes a whole model, and how it is written.

    Raises:
        UserError: what must be named is missing, or a value cannot be used.
    """

    adapter: str = field(default="", metadata={"help": "Folder of the adapter; may be given as a bare first word."})
    output_dir: str = field(default="", metadata={"help": "Gets the merged model; must not exist, or be empty."})
    base_model: str | None = field(
        default=None, metadata={"help": "The base as a folder or a Hub name. Default: the one it was trained on."}
    )
    base_revision: str | None = field(
        default=None, metadata={"help": "Branch, tag or commit of the base. Default: the one it was trained on."}
    )
    base_weights: Literal["dequantised", "original"] | None = field(
        default=None,
        metadata={
            "help": "What an adapter of `--method qlora` is added to: `dequantised` (default) rounds the base to 4 "
            "bit and back, as it was in training; `original` takes the checkpoint's own weights."
        },
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = field(
        default=None, metadata={"help": "Type of the merged weights. Default: that of the base's checkpoint."}
    )
    max_shard_size: str = field(default="5GB", metadata={"help": "Size of one file at most, such as 500MB or 5GB."})
    to_4bit: bool = field(default=False, metadata={"help": "Write the merged model in 4 bit, which rounds it again."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run Python code that comes with the model."})

    def __post_init__(self) -> None:
        problems = Problems()
        if not self.adapter:
            problems.append(problem("adapter-missing", "--adapter"))
        if not self.output_dir:
            problems.append(problem("output-dir-missing", "--output_dir"))
        if re.fullmatch(r"[1-9]\d*[KMGT]B", self.max_shard_size) is None:
            problems.append(problem("shard-size", "--max_shard_size", self.max_shard_size))
        problems.raise_any()


@dataclass
class CheckpointArguments:
    """Which checkpoints are looked at, and what one of them becomes.

    Raises:
        UserError: the folder is not named.
    """

    folder: str = field(
        default="",
        metadata={"help": "A run's --output_dir or one checkpoint-<step> of it; may be given as a bare first word."},
    )
    convert_to: str | None = field(
        default=None,
        metadata={
            "help": "Gets the checkpoint as a plain model; must not exist, or be empty. Of a run, the best one is "
            "taken, or the newest where none is."
        },
    )
    trust_checkpoint: bool = field(
        default=False,
        metadata={
            "help": "Read pickles of a checkpoint that is not in a run's folder, or that others could have written, "
            "and weights that are a .bin, also those of the base that it names. They can run code when they are read."
        },
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run Python code that comes with the model."})

    def __post_init__(self) -> None:
        if not self.folder:
            raise UserError("checkpoint-folder-missing", "--folder")
