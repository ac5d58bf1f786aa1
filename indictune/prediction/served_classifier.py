"""Find and load a finished run's classifier, which labels texts as its training read them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import send_to_device
from peft import PeftModel
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from indictune.config.arguments import ModelArguments
from indictune.config.plan import unresolved
from indictune.config.recipe import configuration_of
from indictune.config.shared_arguments import ClassifierArguments, LongText, TextArguments
from indictune.data.collation import JoinRows, PadToLongest, Row
from indictune.data.columns import BETWEEN_TEXTS
from indictune.data.text.pairs import read_pairs
from indictune.data.text.tokenisation import TYPES, Encoded, Windows, windows_of, words_with_spaces
from indictune.errors import Problems, UserError
from indictune.files import BASELINE_TYPE, METRICS, RECIPE, is_finished
from indictune.models import load
from indictune.models.adapters import config_file, continues_texts
from indictune.models.config_shapes import KINDS
from indictune.models.load import Model
from indictune.models.serving_model import can_pack, pack_weights, without_cleaning
from indictune.models.task_models import TEMPERATURE, class_names, recorded_reading
from indictune.models.unpadded import classify_unpadded, pads, uncounted_token
from indictune.tasks.loss import mean_of_windows

_OF_A_RUN = ("train_log.jsonl", "status.json", "logs", RECIPE, "checkpoint-*")
IN_MEMORY = "(in memory)"
_HEAD, _OF_WORDS = "ForSequenceClassification", "ForTokenClassification"
# Measured by benchmarks/predict.py: a CPU's caches hold a small batch, and a GPU needs a large one.
TOKENS_ON_CPU = 2_048
TOKENS_ON_ACCELERATOR = 32_768
_LEAST_TOKENS = 64


@dataclass(frozen=True)
class Reading:
    """How texts are read, as in training unless a flag says otherwise."""

    text_column: str
    text_pair_column: str | None  # of the second text, if the model labels pairs
    language_column: str | None  # None takes `language` if it exists, else detects it
    max_length: int  # tokens of a text, or of a window, at most; special ones included
    long_text: LongText
    bf16: bool
    fp16: bool
    temperature: float = 1.0  # by which logits are divided


@dataclass(frozen=True)
class ServedModel:
    """A finished run's classifier before its weights are read."""

    args: ModelArguments
    config: PreTrainedConfig
    labels: list[str]  # in the order of the class ids
    tokenizer: PreTrainedTokenizerBase  # for cleaned texts
    reading: Reading

    @property
    def tags_words(self) -> bool:
        """Whether each word gets a label."""
        return any(name.endswith(_OF_WORDS) for name in self.config.architectures or [])


def served_model(asked: ClassifierArguments, problems: Problems, may_tag: bool = False) -> ServedModel | None:
    """The classifier, of words only if it `may_tag`, that the flags name; None if `problems` got a reason."""
    args = ModelArguments(asked.model, trust_remote_code=asked.trust_remote_code)
    config = problems.attempt(classifier_config, args, may_tag)
    if config is None:
        return None
    reading = problems.attempt(reading_of, asked, config)
    labels = problems.attempt(class_names, config)
    tokenizer = problems.attempt(load.load_tokenizer, args, flag="--model")
    if reading is None or labels is None or tokenizer is None:
        return None
    if reading.text_pair_column is not None:
        problems.attempt(read_pairs, tokenizer, config, "--model")
    without_cleaning(tokenizer)
    return ServedModel(args, config, labels, tokenizer, reading)


def served_in_memory(model: Model, tokenizer: PreTrainedTokenizerBase, asked: ClassifierArguments) -> ServedModel:
    """A classifier in memory, with copies of its configuration and tokenizer; a `UserError` if it is none."""
    config, name = deepcopy(model.config), type(load.without_adapter(model)).__name__
    if not name.endswith((_HEAD, _OF_WORDS)):
        raise UserError("predict-needs-classifier", "model", IN_MEMORY, found=name)
    config.architectures, asked.model = [name], str(config.name_or_path or IN_MEMORY)
    tokenizer = deepcopy(tokenizer)
    without_cleaning(tokenizer)
    return ServedModel(ModelArguments(asked.model), config, class_names(config), tokenizer, reading_of(asked, config))


def reading_of(asked: ClassifierArguments, config: PreTrainedConfig) -> Reading:
    """How the training of a model read texts, by its `recipe.yaml`; flags override it."""
    temperature = getattr(config, TEMPERATURE, None) if asked.calibrated else 1.0
    if temperature is None:
        raise UserError("not-calibrated", "--calibrated", "true", model=asked.model)
    if recorded_reading(config).get("task") == "reward":
        raise UserError("model-rates-conversations", "--model", asked.model)
    trained = recorded_reading(config) | configuration_of(Path(asked.model))
    default = unresolved(TextArguments, trained)
    usual = min(default.max_length, load.positions_of(config) or default.max_length)
    max_length = asked.max_length or trained.get("max_length") or usual  # `indictune merge` keeps no recipe
    load.check_max_length(config, max_length)
    return Reading(
        text_column=default.text_column,
        text_pair_column=default.text_pair_column,
        language_column=default.language_column,
        max_length=max_length,
        long_text=default.long_text,
        bf16=trained.get("bf16", False) if asked.bf16 is None else asked.bf16,
        fp16=trained.get("fp16", False) if asked.fp16 is None else asked.fp16,
        temperature=temperature,
    )


def check_pairs(reading: Reading, are_pairs: bool, flag: str) -> None:
    """Refuse single texts for a model of pairs, and pairs for one of single texts; `flag` gives the second texts."""
    if are_pairs != (reading.text_pair_column is not None):
        raise UserError("pair-not-expected" if are_pairs else "pair-incomplete", flag)


def classifier_config(model: ModelArguments, may_tag: bool = False) -> PreTrainedConfig:
    """The configuration of a finished classifier; a `UserError` for no model, an unfinished run or another task."""
    folder = Path(model.model_name_or_path)
    check_finished(folder)
    config = load.trained_config(model)
    architectures = config.architectures or []
    if not any(name.endswith((_HEAD, _OF_WORDS) if may_tag else _HEAD) for name in architectures):
        if continues_texts(architectures):
            raise UserError("predict-of-language-model", "--model", folder)
        raise UserError("predict-needs-classifier", "--model", folder, found=", ".join(architectures) or "none")
    return config


def check_finished(folder: Path, flag: str = "--model") -> None:
    """Refuse a run that has not ended (`run-not-finished`, `no-model`): its model may be an earlier run's."""
    is_run = any(any(folder.glob(pattern)) for pattern in _OF_A_RUN)
    if not config_file(folder).is_file():
        raise UserError("run-not-finished" if is_run else "no-model", flag, folder, missing="config.json")
    if (folder / "train_log.jsonl").is_file() and not is_finished(folder):
        raise UserError("run-not-finished", flag, folder, missing=METRICS)


class Classifier:
    """A finished run's classifier, ready to label texts. `max_tokens` are those of a batch, padding included.

    A `model` in memory stays where it is and as it is. Else the weights are read.
    """

    def __init__(self, served: ServedModel, max_tokens: int | None = None, model: Model | None = None) -> None:
        self.served = served
        self._windows_of: Windows | None = None
        self._device = _device() if model is None else model.device
        self._max_tokens = max_tokens or (TOKENS_ON_CPU if self._device.type == "cpu" else TOKENS_ON_ACCELERATOR)
        args, config, tokenizer = served.args, served.config, served.tokenizer
        self._is_own = model is None
        if model is None:
            kind, _ = KINDS[_OF_WORDS if served.tags_words else _HEAD]
            model = load.load_trained(args.model_name_or_path, args.trust_remote_code, kind=kind)
        load.check_vocabulary(args, model, tokenizer, flag="--model")
        is_baseline = config.model_type == BASELINE_TYPE
        self._padded = not self._is_own or served.tags_words or is_baseline or pads("auto", args, config)
        self._collate: JoinRows | PadToLongest = JoinRows(uncounted_token(config), labels_of_tokens=False)
        if self._padded:
            # Models read a row's first token, or look for the last token that is no padding.
            side = tokenizer.padding_side if config.model_type == "xlnet" else "right"
            self._collate = PadToLongest(tokenizer.pad_token_id, side)
        else:
            classify_unpadded(model, trains=False)
        if self._is_own and not load.stored_quantisation(config):  # else bitsandbytes has put it there
            model.to(self._device)  # type: ignore[arg-type]
        self._model = model.eval()
        in_half = served.reading.bf16 or served.reading.fp16
        if not self._padded and not in_half and not isinstance(model, PeftModel) and can_pack(model):
            pack_weights(model)

    def logits(self, texts: Sequence[str]) -> np.ndarray:
        """The logits of texts of `clean_batch`, over the temperature, float32 [texts, labels]; NaN for a text without
        words or tokens.

        Raises:
            UserError: the model computes numbers that are not finite.
        """
        found = np.full((len(texts), len(self.served.labels)), np.nan, np.float32)
        reading = self.served.reading
        if self._windows_of is None:
            some = list(texts[:100])
            self._windows_of = windows_of(self.served.tokenizer, reading.max_length, some, reading.long_text)
        tokens = self._windows_of(list(texts))
        has_words = (text not in ("", BETWEEN_TEXTS) for text in texts)
        lengths = np.array([sum(map(len, row)) * has for row, has in zip(tokens.windows, has_words, strict=True)])
        batches = list(cut_by_tokens(lengths, self._max_tokens, self._padded))
        if not batches:
            return found
        try:
            with torch.inference_mode(), self._autocast():
                # They stay on the device until all are computed: fetching each would wait for it.
                computed = torch.cat([self._forward(tokens, batch) for batch in batches]).cpu().numpy()
        except (RuntimeError, MemoryError) as error:
            self._halve_batches(error)
            return self.logits(texts)
        if not np.isfinite(computed).all():
            raise UserError("logits-not-finite", "--model", self.served.args.model_name_or_path)
        found[np.concatenate(batches)] = computed / np.float32(reading.temperature)
        return found

    def _halve_batches(self, error: Exception) -> None:
        """Go on with batches of half as many tokens if memory ran out; else raise the error."""
        from indictune.planning.machine_failures import is_out_of_memory  # slow to import

        if not is_out_of_memory(error) or self._max_tokens <= _LEAST_TOKENS:
            raise error
        self._max_tokens //= 2
        print(f"warning: out of memory; going on with {self._max_tokens:,} tokens at once", file=sys.stderr)

    def tags(self, texts: Sequence[str | None]) -> list[list[str] | None]:
        """The tag of each word of a text, which spaces separate: empty for words without tokens, or cut off.

        None for a text without words. Raises `UserError` as `logits`.
        """
        words, served = [(text or "").split() for text in texts], self.served
        cut = {"truncation": True, "max_length": served.reading.max_length, "is_split_into_words": True}
        encoded = served.tokenizer(words_with_spaces(served.tokenizer, [row or ["-"] for row in words]), **cut)
        lengths = np.array([len(ids) if row else 0 for ids, row in zip(encoded["input_ids"], words, strict=True)])
        tokens = Encoded([[ids] for ids in encoded["input_ids"]])
        found: list[list[str] | None] = [None] * len(words)
        for batch in cut_by_tokens(lengths, self._max_tokens, padded=True):
            with torch.inference_mode(), self._autocast():
                computed = self._forward(tokens, batch).cpu()
            for logits, index in zip(computed, batch.tolist(), strict=True):
                if not torch.isfinite(logits[: lengths[index]]).all():
                    raise UserError("logits-not-finite", "--model", served.args.model_name_or_path)
                word_ids, best = encoded.word_ids(index), logits.argmax(-1).tolist()
                first = {word: served.labels[best[at]] for at, word in reversed([*enumerate(word_ids)])}
                found[index] = [first.get(number, "") for number in range(len(words[index]))]
        return found

    def _autocast(self) -> torch.autocast:
        reading = self.served.reading
        half = torch.bfloat16 if reading.bf16 else torch.float16
        return torch.autocast(self._device.type, half, enabled=reading.bf16 or reading.fp16)

    def _forward(self, tokens: Encoded, numbers: np.ndarray) -> torch.Tensor:
        """The logits of some texts by their numbers, float32 [numbers, labels] or [numbers, tokens, labels]."""
        rows = [tokens.windows[number] for number in numbers]
        given_rows: list[Row] = [
            {"input_ids": np.concatenate(row), "labels": 0, "seq_lengths": np.array(list(map(len, row)))}
            for row in rows
        ]
        if tokens.types is not None:
            types = (np.array(tokens.types[number]) for number in numbers)
            given_rows = [row | {TYPES: each} for row, each in zip(given_rows, types, strict=True)]
        batch = self._collate(given_rows)
        del batch["labels"]
        logits: torch.Tensor = self._model(**send_to_device(batch, self._device, non_blocking=True)).logits
        counts = torch.tensor(list(map(len, rows)), device=logits.device)
        return logits.float() if len(logits) == len(rows) else mean_of_windows(logits, counts)


def cut_by_tokens(lengths: np.ndarray, max_tokens: int, padded: bool) -> Iterator[np.ndarray]:
    """The numbers of the rows of each batch, int64 [rows of the batch], of rows of like length, the longest first.

    Args:
        lengths: tokens of each row, int64 [rows]. Rows without tokens are in no batch.
        max_tokens: of a batch, padding included; a longer row is alone.
        padded: whether rows are padded to the longest of their batch.
    """
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    start = 0
    while start < len(order):
        rest = lengths[order[start:]]
        tokens = rest[0] * np.arange(1, len(rest) + 1) if padded else rest.cumsum()
        rows = max(1, int(np.searchsorted(tokens, max_tokens, side="right")))
        yield order[start : start + rows]
        start += rows


def _device() -> torch.device:
    """The accelerator of this process's local rank, or the CPU."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(torch.accelerator.current_accelerator().type, index)  # type: ignore[union-attr]


def load_served_classifier(asked: ClassifierArguments) -> Classifier:
    """The classifier that the flags name; a `UserError` with every problem of the model. See `served_model`."""
    problems = Problems()
    served = served_model(asked, problems)
    problems.raise_any()
    assert served is not None
    return Classifier(served, asked.max_tokens_per_device)
