"""The card of a pushed model: the one of transformers for all tasks, with its mistakes corrected.

TRL's card (1.16) says less of a run, and has mistakes: an adapter is a model of transformers, the licence is
"license", and a model from a folder was trained from "[None](https://huggingface.co/None)".
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from peft import PeftModel
from transformers import Trainer
from transformers.modelcard import TrainingSummary

from indictune.config.arguments import IndicTrainingArguments
from indictune.distributed import sharding
from indictune.files import write_whole
from indictune.models import builtin
from indictune.models.load import Model
from indictune.models.text_reading import recorded_reading

# What transformers (5.23) writes of every base that is a folder. It is true of built-in models only: random weights.
FROM_SCRATCH = "This model was trained from scratch on"
FROM_A_FOLDER = "This model is a fine-tuned version of one that is not on the Hub, on"


def write_card(trainer: Trainer, model_name: str) -> None:
    """Write `README.md` in the folder of a finished run, on one process.

    Args:
        trainer: of the run, after its last evaluation.
        model_name: for the title.
    """
    args, model = cast(IndicTrainingArguments, trainer.args), cast(Model, sharding.unwrapped(trainer))
    folder = Path(str(args.output_dir))
    tags = list(getattr(model, "model_tags", None) or [])
    # Without `dataset_tags` it writes "on the None dataset" (5.23).
    summary: TrainingSummary = TrainingSummary.from_trainer(  # type: ignore[no-untyped-call]
        trainer, model_name=model_name, tags=tags, dataset_tags=[]
    )
    # Its own number multiplies the rows of a micro-batch, and some have fewer (--max_tokens_per_device).
    summary.hyperparameters = (summary.hyperparameters or {}) | {"total_train_batch_size": args.global_batch_size}
    text: str = summary.to_model_card()  # type: ignore[no-untyped-call]
    base = str(model.config._name_or_path)
    if builtin.name_of(base) == base:
        text = text.replace(FROM_SCRATCH, FROM_A_FOLDER)
    write_whole(folder / "README.md", text + long_texts(recorded_reading(model.config)))
    if isinstance(model, PeftModel):
        model.create_or_update_model_card(str(folder))


def long_texts(reading: Mapping[str, Any]) -> str:
    """The section of the card on how the model reads long texts; empty for one that cuts them."""
    if not reading:
        return ""
    parts = {
        "head_tail": "Of a longer text it reads the first and the last tokens, half of the limit each.",
        "window": "It reads a longer text in windows of that size, which overlap by a quarter, and takes the mean of "
        "their logits.",
    }
    return f"""
## Long texts

The model reads {reading["max_length"]} tokens at once, special ones included. {parts[reading["long_text"]]}
`indictune predict` and `indictune evaluate` do the same.
`pipeline("text-classification")` reads the first tokens only.
"""
