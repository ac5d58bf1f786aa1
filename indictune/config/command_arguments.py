"""Arguments of the `indictune` commands."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from indictune.config.fields import Checked, flag
from indictune.config.row_arguments import BadRowArguments, FileFormArguments, TextArguments
from indictune.errors import Problem, problem


@dataclass
class InspectArguments(Checked):
    """What is shown of the rows. The other flags are those of the run."""

    show_mask: int = flag(3, "Show this many training rows, with the tokens that the loss counts marked.")
    json: bool = flag(False, "Print the health of the rows as JSON, as in health.json, and no rows.")


@dataclass
class PlanArguments(Checked):
    """The machine of a plan. The other flags are those of the run."""

    gpus: int = flag(1, "GPUs in all nodes.")
    nodes: int = flag(1, "Nodes with equally many GPUs.")
    gpu: str | None = flag(
        None, "Kind of GPU: a100, a100_40gb, h100, h200, l4, t4, rtx4090 and others. Default: the rates of an A100."
    )
    gpu_memory: str | None = flag(None, "Memory of a GPU, such as 80GB. Default: that of its data sheet.")
    host_memory: str | None = flag(None, "CPU memory of a node, such as 512GB. Default: as much as is needed.")
    interconnect: str | None = flag(
        None, "Link between the GPUs of a node: nvlink, pcie, or a generation such as pcie4. Default: the GPU's."
    )
    internode: str | None = flag(
        None, "Link of a node to the others, such as 200Gb (bits a second). Default: 400Gb for each GPU."
    )
    plot: str | None = flag(None, "Draw the memory of each strategy against the GPU's, into this PNG.")
    json: bool = flag(False, "Print all numbers as JSON.")

    def check(self) -> Iterator[Problem]:
        """Refuse a picture of another kind."""
        yield from super().check()
        if self.plot is not None and Path(self.plot).suffix.lower() != ".png":
            yield problem("plan-not-png", "--plot", self.plot)


@dataclass
class DoctorArguments(Checked):
    """How the machine is examined. The other flags are those of the run."""

    collective_timeout: int = flag(15, "Name the ranks that do not come to a collective within this many seconds.")
    json: bool = flag(False, "Print all checks as JSON.")


@dataclass
class ParityArguments(Checked):
    """Which strategies are compared with one process, and how. The other flags are those of the run."""

    strategies: str = flag("", "Strategies with commas between them: files of accelerate_configs/ by name, or others.")
    steps: int = flag(20, "Optimizer steps of each run.")
    num_processes: int | None = flag(
        None, "Processes of each strategy. Default: one for each GPU; without GPUs, as few as the file can have."
    )
    tolerance: float = flag(1e-4, "Largest relative difference of runs that agree.")
    plot: str | None = flag(None, "Gets a picture of the loss curves: png, svg or pdf.")
    json: bool = flag(False, "Print all numbers as JSON.")

    def check(self) -> Iterator[Problem]:
        """Refuse no strategy, a run without steps, and a picture of another kind."""
        yield from super().check()
        if not self.strategies:
            yield problem("parity-which", "--strategies")
        if self.plot is not None and Path(self.plot).suffix.lower() not in (".png", ".svg", ".pdf"):
            yield problem("parity-picture", "--plot", self.plot)


@dataclass
class EvaluateArguments(TextArguments, BadRowArguments):
    """Which finished model is evaluated on which rows. Other values default to those of its training."""

    model: str = flag("", "The --output_dir of a finished run.")
    test_file: str = flag("", "Rows in the form of the training rows, with answers.")
    columns: str | None = flag(None, "Rename columns of conversations: `instruction=question,output=answer`.")
    chat_template: str | None = flag(None, "How messages become text.")
    train_on_prompts: bool = flag(False, "Score all tokens, not only those of the answers.")
    num_sample_generations: int = flag(0, "Let a language model answer this many rows, and score what it writes.")
    max_new_tokens: int = flag(256, "Most tokens of such an answer.")
    output_dir: str = flag("", "Gets metrics.json. Default: MODEL/evaluation/<name of the test file>.")
    per_device_eval_batch_size: int = flag(64, "Rows of one batch on each process.")
    trust_remote_code: bool = flag(False, "Run Python code that comes with the model.")
    trust_checkpoint: bool = flag(False, "Read weights without a safetensors file: pickles, which can run code.")
    bf16: bool = flag(False, "Compute in bf16.")
    fp16: bool = flag(False, "Compute in fp16.")
    ddp_timeout: int = flag(1800, "End the command after the processes have waited this many seconds for one.")
    verbose: bool = flag(False, "Also show the messages of the other libraries.")
    lm_eval_tasks: list[str] = flag(
        [], "Score a language model on these tasks of lm-evaluation-harness instead, such as hellaswag."
    )
    lm_eval_include_path: str | None = flag(None, "Folder with tasks of your own, as YAML files.")
    lm_eval_limit: int | None = flag(None, "Score this many rows of each task. Default: all.")
    lm_eval_num_fewshot: int | None = flag(None, "Solved examples before each row. Default: as the task says.")
    compare: list[str] = flag([], "Compare the predictions in the folders of two runs instead of scoring a model.")
    json: bool = flag(False, "Print all numbers of --compare as JSON.")


@dataclass
class PredictArguments(BadRowArguments, FileFormArguments):
    """Which texts a finished classifier labels, and where the labels go. Other values default to its training's."""

    model: str = flag("", "The --output_dir of a finished run. May be given as a bare first word.")
    text: list[str] = flag([], "Texts to label. Default: standard input, one text a line.")
    input_file: str | None = flag(None, "Texts to label: a file as of --train_file, or txt with one text a line.")
    output_file: str | None = flag(
        None, "Gets the labels: csv, tsv, jsonl or parquet. Must not exist. Default: JSON lines on standard output."
    )
    text_column: str | None = flag(None, "Column with the text. Default: as in training.")
    language_column: str | None = flag(
        None, "Column with the language of each row. Default: as in training, else the language of the text."
    )
    keep_columns: list[str] = flag(
        [], "Columns of --input_file that the output repeats, such as an id. `label` becomes `input_label`."
    )
    max_length: int | None = flag(None, "Cut texts to this many tokens. Default: as in training.")
    max_tokens_per_device: int | None = flag(
        None, "Most tokens in a batch of one process. Default: 2048 on a CPU, 32768 on a GPU."
    )
    calibrated: bool = flag(
        False, "Divide logits by the temperature that the run fitted on its validation rows. Labels stay the same."
    )
    trust_remote_code: bool = flag(False, "Run Python code that comes with the model.")
    trust_checkpoint: bool = flag(False, "Read weights without a safetensors file: pickles, which can run code.")
    bf16: bool | None = flag(None, "Compute in bf16. Default: as in training.")
    fp16: bool | None = flag(None, "Compute in fp16. Default: as in training.")

    def check(self) -> Iterator[Problem]:
        """Refuse no model, and texts from two places."""
        yield from super().check()
        if not self.model:
            yield problem("predict-needs-model", "--model")
        if self.text and self.input_file is not None:
            yield problem("two-text-sources", "--text", other=f"--input_file {self.input_file}")
        if self.input_file is not None and glob.has_magic(self.input_file) and not Path(self.input_file).exists():
            yield problem("predict-one-file", "--input_file", self.input_file)
        if self.input_file is None and self.keep_columns:
            yield problem("no-columns-to-keep", "--keep_columns", " ".join(self.keep_columns))


@dataclass
class MergeArguments(Checked):
    """Which adapter becomes a complete model, and how it is written."""

    adapter: str = flag("", "Folder of the adapter. May be given as a bare first word.")
    output_dir: str = flag("", "Gets the merged model. Must not exist, or be empty.")
    base_model: str | None = flag(
        None, "The base model, as a folder or a Hub name. Default: the one the adapter was trained on."
    )
    base_revision: str | None = flag(
        None, "Branch, tag or commit of the base model. Default: the one the adapter was trained on."
    )
    base_weights: Literal["dequantised", "original"] | None = flag(
        None,
        "What an adapter of `--method qlora` is added to: `dequantised` (default) rounds the base model to 4 bit and "
        "back, as in training; `original` takes the weights of its checkpoint.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = flag(
        None, "Type of the merged weights. Default: that of the base model's checkpoint."
    )
    max_shard_size: str = flag("5GB", "Largest size of one file, such as 500MB or 5GB.")
    to_4bit: bool = flag(False, "Write the merged model in 4 bit, which rounds it again.")
    trust_remote_code: bool = flag(False, "Run Python code that comes with the model.")

    def check(self) -> Iterator[Problem]:
        """Refuse missing folders, and a malformed size."""
        yield from super().check()
        if not self.adapter:
            yield problem("adapter-missing", "--adapter")
        if not self.output_dir:
            yield problem("output-dir-missing", "--output_dir")
        if re.fullmatch(r"[1-9]\d*[KMGT]B", self.max_shard_size) is None:
            yield problem("shard-size", "--max_shard_size", self.max_shard_size)


@dataclass
class ExportArguments(Checked):
    """Which finished model is written for which other runtime."""

    model: str = flag("", "The --output_dir of a finished run, or a merged model. May be given as a bare first word.")
    format: Literal["onnx", "gguf"] = flag(
        "onnx", "`onnx`: a classifier for ONNX Runtime. `gguf`: a language model for llama.cpp."
    )
    output_dir: str = flag("", "Gets the exported model. Must not exist, or be empty. Default: MODEL/<format>.")
    int8: bool = flag(False, "Store the weights in 8 bit: q8_0 in GGUF.")
    input_file: str | None = flag(
        None, "Texts on which an ONNX model is compared with the model. Default: 1,000 built-in tweets."
    )
    trust_remote_code: bool = flag(False, "Run Python code that comes with the model.")
    trust_checkpoint: bool = flag(False, "Read weights without a safetensors file: pickles, which can run code.")

    def check(self) -> Iterator[Problem]:
        """Refuse no model."""
        yield from super().check()
        if not self.model:
            yield problem("predict-needs-model", "--model", way_out="Use: indictune export FOLDER")
        if self.format == "gguf" and self.input_file is not None:
            yield problem("no-effect", "--input_file", self.input_file, other="--format gguf")


@dataclass
class PushArguments(Checked):
    """Which finished model goes to which repository of the Hub."""

    folder: str = flag("", "The --output_dir of a finished run, or a merged model. May be given as a bare first word.")
    repo_id: str = flag("", "The repository, as you/name. It is made if it is missing. May be a bare second word.")
    private: bool = flag(False, "Make the repository private, if it is made.")
    revision: str | None = flag(None, "Branch, which is made if it is missing, or refs/pr/N. Default: main.")
    create_pr: bool = flag(False, "Open a pull request in a repository that exists. It needs no right to write there.")

    def check(self) -> Iterator[Problem]:
        """Refuse a missing folder or repository, and two targets."""
        yield from super().check()
        if not self.folder or not self.repo_id:
            yield problem("push-needs", "--repo_id" if self.folder else "--folder")
        if self.create_pr and self.revision is not None:
            yield problem("push-revision-or-pr", "--revision", self.revision)


@dataclass
class ReportArguments(Checked):
    """Which runs are reported on, and where."""

    runs: list[str] = flag(
        [], "Folders of runs or evaluations. Several are compared. May be given as bare first words."
    )
    output_file: str | None = flag(
        None, "HTML file to write. Default: report.html in the folder of one run, comparison.html for several."
    )
    texts: bool = flag(True, "Show texts of the rows, such as the worst mistakes. Use false for a report to share.")

    def check(self) -> Iterator[Problem]:
        """Refuse missing folders, and a file of another kind."""
        yield from super().check()
        if not self.runs:
            yield problem("report-needs", "--runs")
        if self.output_file is not None and Path(self.output_file).suffix.lower() not in (".html", ".htm"):
            yield problem("report-not-html", "--output_file", self.output_file)


@dataclass
class CheckpointArguments(Checked):
    """Which checkpoints are listed, or which one is converted."""

    folder: str = flag("", "A run's --output_dir or its checkpoint-<step>. May be given as a bare first word.")
    convert_to: str | None = flag(
        None,
        "Gets the checkpoint as a plain model. Must not exist, or be empty. Of a run, the best checkpoint is "
        "converted, or the newest if there is no best.",
    )
    trust_checkpoint: bool = flag(
        False,
        "Read pickles, which can run code: checkpoints outside a run's folder or that other users can write, and "
        "weights without a safetensors file, those of the base model included.",
    )
    trust_remote_code: bool = flag(False, "Run Python code that comes with the model.")

    def check(self) -> Iterator[Problem]:
        """Refuse a missing folder."""
        yield from super().check()
        if not self.folder:
            yield problem("checkpoint-folder-missing", "--folder")


@dataclass
class TalkArguments(Checked):
    """Which language model answers in the terminal, and how."""

    model: str = flag("", "The --output_dir of a finished run, or a merged model. May be given as a bare first word.")
    max_new_tokens: int = flag(256, "Most tokens of an answer.")
    temperature: float = flag(0.0, "0 takes the likeliest token each time. Above 0 tokens are drawn; 1 is usual.")
    chat_template: str | None = flag(
        None,
        "How messages become text: llama3, llama2, chatml, plain or a .jinja file. Default: that of the training.",
    )
    trust_remote_code: bool = flag(False, "Run Python code that comes with the model.")
    trust_checkpoint: bool = flag(False, "Read weights without a safetensors file: pickles, which can run code.")

    def check(self) -> Iterator[Problem]:
        """Refuse a missing folder."""
        yield from super().check()
        if not self.model:
            yield problem("evaluate-needs", "--model", way_out="Use: indictune chat FOLDER")
