"""Write a classifier as ONNX, with its tokenizer and configuration."""

from __future__ import annotations

import logging
import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from indictune.config.arguments import ModelArguments
from indictune.config.command_arguments import ExportArguments
from indictune.errors import UserError
from indictune.export.agreement import ROUNDING, Agreement, compare, texts_to_compare
from indictune.files import EXPORTED, write_json
from indictune.models.atomic_folder import TOKENIZER_FILES, copy_model_files
from indictune.models.load_errors import first_line
from indictune.models.trained import load_trained, trained_config
from indictune.versions import check_extra, versions_of

GRAPH = "model.onnx"
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_LARGEST_FILE_BYTES = 1_800_000_000  # protobuf holds 2 GB; larger weights stand in model.onnx.data
_HEADS: dict[str, type[Any]] = {
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForTokenClassification": AutoModelForTokenClassification,
}


def check_installed() -> None:
    """Refuse an environment without the packages.

    Raises:
        UserError: `extra-missing`.
    """
    check_extra("export --format onnx", "export", *PACKAGES)


def write(args: ExportArguments, source: Path, folder: Path) -> str:
    """Write the graph, the tokenizer and the configuration of a model. Returns a line for the user.

    Args:
        args: of the command.
        source: folder of the whole model.
        folder: for the files.

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
    found = compare(model, graph, tokenizer, texts, max_length)
    if not args.int8 and found.equal < found.texts and found.largest_difference > ROUNDING:
        raise UserError("export-differs", "--model", args.model, equal=found.equal, texts=found.texts)
    write_json(folder / EXPORTED, {"format": "onnx", "int8": args.int8, **found._asdict(), **_versions()})
    size = sum(path.stat().st_size for path in folder.glob(f"{GRAPH}*")) / 1e6
    form = "ONNX in 8 bit" if args.int8 else "ONNX"
    return f"{form}, {size:,.1f} MB. {_agreement(found)}"


def _agreement(found: Agreement) -> str:
    return f"Labels equal those of the model in {found.equal:,} of {found.texts:,} texts."


def _versions() -> dict[str, Any]:
    return {"versions": versions_of(["torch", "transformers", *PACKAGES])}


def _model(args: ExportArguments, source: Path) -> PreTrainedModel:
    """The model in float32, with attention in plain operators.

    Raises:
        UserError: `export-not-a-classifier`, or the weights are unreadable.
    """
    names = trained_config(ModelArguments(str(source), trust_remote_code=args.trust_remote_code)).architectures or []
    kind = next((kind for head, kind in _HEADS.items() if any(name.endswith(head) for name in names)), None)
    if kind is None:
        raise UserError("export-not-a-classifier", "--model", args.model, found=", ".join(names) or "none")
    model: Any = load_trained(source, args.trust_remote_code, args.trust_checkpoint, "cpu", kind)
    model.set_attn_implementation("eager")
    traced: PreTrainedModel = model.eval()
    return traced


class _Logits(nn.Module):
    """A classifier that returns its logits alone."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Logits [rows, labels], or [rows, tokens, labels]; the inputs are [rows, tokens]."""
        segments = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, **segments).logits
        return logits


def _trace(args: ExportArguments, model: PreTrainedModel, inputs: list[str], graph: Path) -> None:
    """Write the graph of a model, for any number of rows and tokens.

    Raises:
        UserError: `export-not-traced`.
    """
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
