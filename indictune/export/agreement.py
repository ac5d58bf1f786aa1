"""Compare the labels of an exported classifier with those of the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from indictune.config.command_arguments import ExportArguments, PredictArguments
from indictune.data.bad_rows import BadRows
from indictune.data.labels import REGRESSION
from indictune.models.classifier import class_names
from indictune.models.tiny_models import sample_rows
from indictune.prediction.labelled_rows import labels_and_scores
from indictune.prediction.served_model import reading_of
from indictune.prediction.texts import text_file

_MOST_TEXTS = 1_000
_BATCH_ROWS = 16
ROUNDING = 1e-3  # the order of the sums differs in float32, and with it the last digits of a logit


class Agreement(NamedTuple):
    """How two classifiers agree.

    Attributes:
        texts: that were compared.
        equal: texts with equal labels; of a classifier of tokens, with equal labels of all tokens.
        largest_difference: of two logits.
    """

    texts: int
    equal: int
    largest_difference: float


def texts_to_compare(args: ExportArguments, source: Path, config: PreTrainedConfig) -> tuple[list[str], int]:
    """Up to 1,000 texts of `--input_file`, else of the built-in tweets; and the most tokens of a text.

    Raises:
        UserError: the file cannot be read, or holds no text.
    """
    asked = PredictArguments(model=str(source), input_file=args.input_file)
    reading = reading_of(asked, config)
    if args.input_file is None:
        return [str(row["text"]) for row in sample_rows("train.jsonl")[:_MOST_TEXTS]], reading.max_length
    texts: list[str] = []
    for window in text_file(asked, reading).windows(BadRows(args.input_file)):
        texts += [text for text in window["text"].to_pylist() if text and text.strip()]
        if len(texts) >= _MOST_TEXTS:
            break
    return texts[:_MOST_TEXTS], reading.max_length


def compare(
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
        near: np.ndarray = np.abs(expected - found)[:, 0] <= ROUNDING
        return near
    names = class_names(config)
    labels = (labels_and_scores(config, names, logits)["label"].to_pylist() for logits in (expected, found))
    return np.array([ours == theirs for ours, theirs in zip(*labels, strict=True)])
