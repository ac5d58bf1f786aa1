"""Find a finished run's classifier, and how its training read texts. No weights are read yet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from indictune.config.arguments import ModelArguments
from indictune.config.command_arguments import PredictArguments
from indictune.config.plan import unresolved
from indictune.config.recipe import configuration_of
from indictune.config.row_arguments import LongText, TextArguments
from indictune.errors import Problems, UserError
from indictune.files import METRICS, RECIPE, is_finished
from indictune.models.adapters import config_file, continues_texts
from indictune.models.classifier import TEMPERATURE, class_names, recorded_reading
from indictune.models.load import check_max_length, load_tokenizer, positions_of
from indictune.models.serving_tokenizer import without_cleaning
from indictune.models.trained import trained_config

_OF_A_RUN = ("train_log.jsonl", "status.json", "logs", RECIPE, "checkpoint-*")
_HEAD = "ForSequenceClassification"


@dataclass(frozen=True)
class Reading:
    """How texts are read, as in training unless a flag says otherwise.

    Attributes:
        text_column: column with the text.
        language_column: column with the language; None takes `language` if it exists, else detects it.
        max_length: tokens of a text, or of a window, at most; special ones included.
        long_text: how longer texts are read.
        bf16: compute in bf16.
        fp16: compute in fp16.
        temperature: by which logits are divided.
    """

    text_column: str
    language_column: str | None
    max_length: int
    long_text: LongText
    bf16: bool
    fp16: bool
    temperature: float = 1.0


@dataclass(frozen=True)
class ServedModel:
    """A finished run's classifier before its weights are read.

    Attributes:
        args: name the model.
        config: of the model.
        labels: names, in the order of the class ids.
        tokenizer: of the model, for cleaned texts.
        reading: how texts are read.
    """

    args: ModelArguments
    config: PreTrainedConfig
    labels: list[str]
    tokenizer: PreTrainedTokenizerBase
    reading: Reading


def served_model(asked: PredictArguments, problems: Problems) -> ServedModel | None:
    """The classifier that the flags name; None if `problems` got a reason why there is none."""
    args = ModelArguments(
        asked.model, trust_remote_code=asked.trust_remote_code, trust_checkpoint=asked.trust_checkpoint
    )
    config = problems.attempt(classifier_config, args)
    if config is None:
        return None
    reading = problems.attempt(reading_of, asked, config)
    labels = problems.attempt(class_names, config)
    tokenizer = problems.attempt(load_tokenizer, args, flag="--model")
    if reading is None or labels is None or tokenizer is None:
        return None
    without_cleaning(tokenizer)
    return ServedModel(args, config, labels, tokenizer, reading)


def reading_of(asked: PredictArguments, config: PreTrainedConfig) -> Reading:
    """How the training of a model read texts, by its `recipe.yaml`; flags override it.

    Raises:
        UserError: the recipe is unreadable, `--max_length` exceeds the model's positions, or the run fitted no
            temperature.
    """
    temperature = getattr(config, TEMPERATURE, None) if asked.calibrated else 1.0
    if temperature is None:
        raise UserError("not-calibrated", "--calibrated", "true", model=asked.model)
    trained = configuration_of(Path(asked.model))
    trained = recorded_reading(config) | trained
    default = unresolved(TextArguments, trained)
    max_length = asked.max_length or trained.get("max_length")
    if max_length is None:  # as after `indictune merge`, which keeps no recipe
        max_length = min(default.max_length, positions_of(config) or default.max_length)
    check_max_length(config, max_length)
    return Reading(
        text_column=asked.text_column or default.text_column,
        language_column=asked.language_column or default.language_column,
        max_length=max_length,
        long_text=default.long_text,
        bf16=trained.get("bf16", False) if asked.bf16 is None else asked.bf16,
        fp16=trained.get("fp16", False) if asked.fp16 is None else asked.fp16,
        temperature=temperature,
    )


def classifier_config(model: ModelArguments) -> PreTrainedConfig:
    """The configuration of a finished classifier.

    Raises:
        UserError: the folder holds no model, an unfinished run, or a model of another task.
    """
    folder = Path(model.model_name_or_path)
    check_finished(folder)
    config = trained_config(model)
    architectures = config.architectures or []
    if not any(name.endswith(_HEAD) for name in architectures):
        if continues_texts(architectures):
            raise UserError("predict-of-language-model", "--model", folder)
        raise UserError("predict-needs-classifier", "--model", folder, found=", ".join(architectures) or "none")
    return config


def check_finished(folder: Path) -> None:
    """Refuse a run that has not ended: its model may be missing, or that of an earlier run.

    Raises:
        UserError: `run-not-finished`, or `no-model`.
    """
    is_run = any(any(folder.glob(pattern)) for pattern in _OF_A_RUN)
    if not config_file(folder).is_file():
        raise UserError("run-not-finished" if is_run else "no-model", "--model", folder, missing="config.json")
    if (folder / "train_log.jsonl").is_file() and not is_finished(folder):
        raise UserError("run-not-finished", "--model", folder, missing=METRICS)
