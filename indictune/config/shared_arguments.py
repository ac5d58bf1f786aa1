"""Arguments that several programs share, and how a field of an argument dataclass becomes a flag and is checked."""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from indictune.errors import Problem, Problems, problem

ENOUGH_STEPS = 600  # optimizer steps in which a small file can be learned
AUTO = "auto"  # in place of a number: the run finds it

_AT_LEAST_1 = (
    *("lora_r", "lora_alpha", "gpus", "steps", "num_processes", "nodes", "max_new_tokens"),
    *("global_batch_size", "per_device_train_batch_size", "per_device_eval_batch_size"),
    *("max_tokens_per_device", "max_batch_size", "max_texts", "max_characters", "max_request_bytes"),
    *("early_stopping_patience", "ddp_timeout", "collective_timeout", "dataloader_prefetch_factor"),
    *("eval_accumulation_steps", "save_total_limit", "request_timeout", "seeds", "trials", "layers"),
    *("soft_label_temperature", "num_proc"),
)
_AT_LEAST_0 = (
    *("num_sample_generations", "show_mask", "tolerance", "port", "requests_per_minute", "drain_seconds"),
    *("min_steps", "max_nonfinite_steps", "profile_steps", "snapshot_steps", "divergence_check_steps"),
    *("dataloader_num_workers", "seed", "learning_rate", "temperature", "weight_decay", "warmup_steps"),
)
# The smallest value of a field, in whichever dataclass it is. None is allowed.
AT_LEAST = {
    "tokens": 1,  # that a vocabulary gets
    "max_length": 3,  # two tokens are special
    "folds": 2,
    "vocabulary_from_train": 2_000,  # single characters take half of it
    **dict.fromkeys(_AT_LEAST_1, 1),
    **dict.fromkeys(_AT_LEAST_0, 0),
}

# Fields that hold a share or a probability, below 1. None is allowed.
SHARES = (
    *("dropout", "lora_dropout", "max_bad_fraction", "label_smoothing_factor", "validation_split"),
    "mlm_probability",
)

# Fields that hold the largest share that is accepted: 1 accepts all. None is allowed.
LIMITS = ("max_unknown_share", "max_collision_share", "max_near_duplicate_share", "max_conflict_share")


class OneOrMore(argparse.Action):
    """Store one word as a text, and several as a list."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


def flag(default: Any, help: str, **more: Any) -> Any:
    """A dataclass field that is a flag. `help` is its entry in `--help` and docs/flags.md; `more` goes to argparse."""
    metadata = {"help": help, **more}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_ranges(values: Mapping[str, Any]) -> list[Problem]:
    """Refuse single values, by field, that `AT_LEAST`, `SHARES` and `LIMITS` exclude, NaN included."""
    given = {name: value for name, value in values.items() if value not in (None, AUTO)}
    low = [name for name in AT_LEAST if name in given and not given[name] >= AT_LEAST[name]]
    found = [problem("expected-at-least", f"--{name}", given[name], smallest=AT_LEAST[name]) for name in low]
    wrong = {name: "up to, not including, 1" for name in SHARES if name in given and not 0 <= given[name] < 1}
    wrong |= {name: "to 1, which accepts all" for name in LIMITS if name in given and not 0 <= given[name] <= 1}
    return found + [problem("share-expected", f"--{name}", given[name], range=text) for name, text in wrong.items()]


class Checked:
    """A base of argument dataclasses that reports all their problems at once."""

    needed: ClassVar[tuple[str, str] | None] = None  # a flag that must be given, and what to type

    def check(self) -> Iterator[Problem]:
        """The problems of the values. A subclass adds its own to those of `super().check()`."""
        yield from check_ranges(vars(self))
        if self.needed is not None and not getattr(self, self.needed[0]):
            yield problem("argument-missing", f"--{self.needed[0]}", usage=self.needed[1])

    def __post_init__(self) -> None:
        """Refuse a value that is out of its range, or contradicts another one."""
        Problems(self.check()).raise_any()


LongText = Literal["truncate", "head_tail", "window"]
MAX_BAD_FRACTION = 0.01


@dataclass
class FileFormArguments(Checked):
    """How csv and tsv files are laid out."""

    delimiter: Literal["auto", ",", ";", "tab", "|"] = flag(
        "auto", "Character between the columns of a csv or tsv file. `auto`: the extension's, unless another one fits."
    )
    column_names: list[str] = flag(
        [], "Names of all columns of a csv, tsv, xlsx or ods file that has no header, in order, such as text,label."
    )
    quoting: Literal["standard", "none"] = flag(
        "standard", "`none`: quotes in a csv or tsv file are letters like others, and do not enclose a field."
    )
    sheet: str | None = flag(None, "Name of the sheet to read of an xlsx or ods file. Default: the first one.")


@dataclass
class TextColumns(FileFormArguments):
    """Which columns hold the texts and their languages."""

    text_column: str = flag("text", "Column with the text.")
    language_column: str | None = flag(
        None, "Column with the language of each row. Default: `language` if it exists, else the language of the text."
    )
    num_proc: int | None = flag(None, "Processes that clean texts. Default: one for each usable core, up to 8.")


@dataclass
class TextArguments(TextColumns):
    """How the rows of a file are read."""

    text_pair_column: str | None = flag(
        None, "Column with a second text, such as a hypothesis: the model reads both, and labels the pair."
    )
    label_column: list[str] | str = flag(
        "label", "Column with the label. Or several columns of 0 and 1, each a label.", nargs="+", action=OneOrMore
    )
    label_map: list[str] = flag(
        [], "Rename labels, and so join them: pos=positive neg=negative. N/A= leaves out the rows of a label."
    )
    keep_label_spellings: bool = flag(
        False, "Keep labels apart that differ in case, or in spaces, underscores and hyphens between their words."
    )
    max_length: int = flag(128, "Cut texts to this many tokens, special ones included.")
    long_text: LongText = flag(
        "truncate",
        "How a longer text is read. truncate: its first tokens. head_tail: its first and its last ones. window: all, "
        "in windows of --max_length tokens that overlap by a quarter; the mean of their logits is the text's.",
    )

    @property
    def label_columns(self) -> str:
        """The name of the label's column, or the names of several, for messages."""
        return self.label_column if isinstance(self.label_column, str) else " ".join(self.label_column)

    def check(self) -> Iterator[Problem]:
        """Refuse words of `--label_map` without one `=`, a label that has two names, and pairs that cannot be read."""
        yield from super().check()
        if self.text_pair_column == self.text_column:
            yield problem("pair-of-one-column", "--text_pair_column", self.text_pair_column)
        if self.text_pair_column is not None and self.long_text != "truncate":
            yield problem("long-text-of-pairs", "--long_text", self.long_text, column=self.text_pair_column)
        old = [word.partition("=")[0].strip() for word in self.label_map]
        for word, name in zip(self.label_map, old, strict=True):
            if word.count("=") != 1 or not name or old.count(name) > 1:
                yield problem("label-map-form", "--label_map", word)


@dataclass
class TagArguments(Checked):
    """Which columns of a file of tagged words are read. A column has a name in the first line, or a number from 1."""

    word_column: str | None = flag(
        None, "Column with a tagger's words. Default: the one of a usual name, such as word or tokens, or the first."
    )
    tag_column: str | None = flag(
        None, "Column with their tags. Default: the one of a usual name, such as tag or ner_tags, or the last."
    )
    sentence_column: str | None = flag(
        None, "Column with the number of the sentence. Default: that named sentence_id or so, else blank lines count."
    )


@dataclass
class MaskArguments(Checked):
    """What a masked language model has to guess."""

    mlm_probability: float = flag(0.15, "Share of the tokens that are masked, as whole words, at least one in a row.")


@dataclass
class BadRowArguments(Checked):
    """What happens to rows that cannot be used."""

    bad_rows: Literal["stop", "quarantine"] = flag(
        "stop",
        "`stop` ends the run at rows that cannot be used. `quarantine` leaves them out and writes them, with the "
        "reason, to rejected.jsonl in --output_dir; `predict` to OUTPUT.rejected.jsonl, for --output_file OUTPUT.",
    )
    max_bad_fraction: float = flag(
        MAX_BAD_FRACTION, "With --bad_rows quarantine, stop if more than this share of a file's rows is bad."
    )

    def check(self) -> Iterator[Problem]:
        """Refuse a limit of quarantined rows without quarantine."""
        yield from super().check()
        if self.bad_rows == "stop" and self.max_bad_fraction != MAX_BAD_FRACTION:
            way_out = "Use --bad_rows quarantine."
            yield problem("no-effect", "--max_bad_fraction", self.max_bad_fraction, way_out, other="--bad_rows stop")


@dataclass
class RawTextForm(TextColumns, BadRowArguments):
    """How files hold documents of raw text."""

    txt_documents: Literal["blocks", "lines"] = flag(
        "blocks", "What a document of a txt file of raw text is: a block between blank lines, or a line."
    )


@dataclass
class FinishedModelArguments(Checked):
    """A finished model, and whose code may run when it is read."""

    model: str = flag("", "The --output_dir of a finished run. May be given as a bare first word.")
    trust_remote_code: bool = flag(False, "Run Python code that comes with the model.")


@dataclass
class ClassifierArguments(FinishedModelArguments):
    """How a finished classifier reads texts. Values that are not given are those of its training."""

    max_length: int | None = flag(None, "Cut texts to this many tokens. Default: as in training.")
    max_tokens_per_device: int | None = flag(
        None, "Most tokens that are computed at once. Default: 2048 on a CPU, 32768 on a GPU."
    )
    calibrated: bool = flag(
        False, "Divide logits by the temperature that the run fitted on its validation rows. Labels stay the same."
    )
    bf16: bool | None = flag(None, "Compute in bf16. Default: as in training.")
    fp16: bool | None = flag(None, "Compute in fp16. Default: as in training.")


@dataclass
class TextFileArguments(ClassifierArguments, BadRowArguments, FileFormArguments):
    """Which column of a file holds the texts that a finished classifier labels."""

    input_file: str | None = flag(
        None,
        "Texts to label: a file as of --train_file, or txt with one text a line. `predict` takes a pattern such as "
        "'tweets/*.parquet', a folder, and a URL such as s3://bucket/tweets/ too.",
    )
    text_column: str | None = flag(None, "Column with the text. Default: as in training.")
    text_pair_column: str | None = flag(None, "Column with the second text of each pair. Default: as in training.")
    language_column: str | None = flag(
        None, "Column with the language of each row. Default: as in training, else the language of the text."
    )
    keep_columns: list[str] = flag(
        [], "Columns of --input_file that the output repeats, such as an id. `label` becomes `input_label`."
    )

    def check(self) -> Iterator[Problem]:
        """Refuse columns of no file."""
        yield from super().check()
        if self.input_file is None and self.keep_columns:
            yield problem("no-columns-to-keep", "--keep_columns", " ".join(self.keep_columns))


@dataclass
class EvaluationArguments(TextArguments, RawTextForm, TagArguments, MaskArguments):
    """Which finished model is scored on which rows. Values that are not given are those of its training."""

    model: str = flag("", "The --output_dir of a finished run. May be given as a bare first word.")
    test_file: str = flag("", "Rows in the form of the training rows, with answers.")
    columns: str | None = flag(None, "Rename columns of conversations: `instruction=question,output=answer`.")
    chat_template: str | None = flag(None, "How messages become text.")
    train_on_prompts: bool = flag(False, "Score all tokens, not only those of the answers.")
    train_on_thinking: bool = flag(True, "Score thoughts too, from `<think>` to `</think>`.")
    num_sample_generations: int = flag(0, "Let a language model answer this many rows, and score what it writes.")
    max_new_tokens: int = flag(256, "Most tokens of such an answer.")
    metrics: list[str] = flag(
        [], "Metrics of `evaluate` to add: Hub names or files. Code, so they need --trust_remote_code true."
    )
    output_dir: str = flag("", "Gets metrics.json. Default: MODEL/evaluation/<name of the test file>.")
    per_device_eval_batch_size: int = flag(64, "Rows of one batch on each process.")
    trust_remote_code: bool = flag(False, "Run Python code that comes with the model, or that --metrics names.")
    bf16: bool = flag(False, "Compute in bf16.")
    fp16: bool = flag(False, "Compute in fp16.")
    ddp_timeout: int = flag(1800, "End the command after the processes have waited this many seconds for one.")
    verbose: bool = flag(False, "Also show the messages of the other libraries.")
    problem_type: str | None = field(init=False, default=None, metadata={"help": "That of the model."})


@dataclass
class MachineArguments(Checked):
    """The GPUs that a run is planned for."""

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


@dataclass
class EngineArguments(Checked):
    """What starts the processes of a command."""

    engine: Literal["local", "ray"] = flag("local", "What starts the processes: this machine alone, or a Ray cluster.")
    ray_address: str | None = flag(
        None,
        "Address of a Ray cluster: `auto` or HOST:PORT. Default: RAY_ADDRESS, else a new one of this machine.",
    )

    def check(self) -> Iterator[Problem]:
        """Refuse the address of a cluster that is not used."""
        yield from super().check()
        if self.ray_address is not None and self.engine == "local":
            yield problem("no-effect", "--ray_address", self.ray_address, "Use --engine ray.", other="--engine local")


@dataclass
class RequestLimits(Checked):
    """What a client of `indictune serve` may send, and how long the server takes for it."""

    max_batch_size: int = flag(64, "Most texts that are labelled together. They may come from several requests.")
    max_texts: int = flag(256, "Most texts of a request.")
    max_characters: int = flag(10_000, "Most characters of a text.")
    max_request_bytes: int = flag(1_000_000, "Largest body of a request, in bytes.")
    max_waiting_texts: int = flag(
        10_000, "Most texts that wait, else status 503. An address gets half of the room that others leave."
    )
    requests_per_minute: int = flag(6_000, "Most requests of a client in a minute; 0 for no limit.")
    request_timeout: int = flag(60, "Most seconds from the head of a request to its answer, else status 503.")
    allowed_hosts: list[str] = flag(
        [],
        "Names by which clients reach the server, as in the header Host: `a.org`, `*.a.org`, or `*` for any. The "
        "address and loopback are always allowed.",
    )
    trusted_proxy: list[str] = flag([], "Addresses or networks of proxies whose X-Forwarded-For names the client.")
    api_key_file: str | None = flag(
        None, "File of keys, one a line. /predict and /metrics then need `Authorization: Bearer KEY`."
    )
    drain_seconds: int = flag(30, "Most seconds to answer accepted requests after SIGTERM or Ctrl-C.")
    access_log: bool = flag(True, "Write a line for each request to standard error, without its texts.")

    def check(self) -> Iterator[Problem]:
        """Refuse a queue that is too short for one request, and proxies that are no addresses."""
        yield from super().check()
        for each in self.trusted_proxy:
            try:
                ipaddress.ip_network(each)
            except ValueError as error:
                yield problem("proxy-not-an-address", "--trusted_proxy", each, reason=error)
        if self.max_waiting_texts < self.max_texts:
            yield problem("fewer-wait-than-come", "--max_waiting_texts", self.max_waiting_texts, texts=self.max_texts)
