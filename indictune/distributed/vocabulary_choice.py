"""Whether a run has an active vocabulary, and what that saves under its strategy."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.training_args import OptimizerNames

from indictune.config.arguments import SentimentTrainingArguments
from indictune.config.plan import Launch
from indictune.distributed.collectives import gather_from_all
from indictune.distributed.communication import sent_bytes
from indictune.distributed.launch_check import came_up
from indictune.distributed.sharding import gathered
from indictune.errors import UserError
from indictune.models import builtin
from indictune.models.active_vocabulary import (
    ActiveEmbedding,
    began_with_others,
    obstacle,
    obstacle_of_optimizer,
    resumed_row_ids,
    used_ids,
)
from indictune.models.load import Model

logger = logging.getLogger(__name__)

WORTH_IT = 0.1  # share of unused rows from which on `auto` leaves them out: a judgement, not a measurement

# What a strategy splits over the processes, of weights, gradient and optimizer states.
SPLIT = {
    "zero1": ("states",),
    "zero2": ("states", "gradient"),
    "zero3": ("states", "gradient", "weights"),
    "fsdp2": ("states", "gradient", "weights"),
}

# Types of an optimizer in a DeepSpeed file, in small letters, that change each weight by its own gradient alone. LAMB,
# for one, looks at the length of a whole weight.
ELEMENTWISE_TYPES = ("adam", "adamw", "sgd", "adagrad")


def check_active_vocabulary(active_vocabulary: str, method: str, optim: str, launch: Launch) -> None:
    """Refuse before anything is loaded an active vocabulary that cannot be.

    Raises:
        UserError: it is asked for, and the method trains no embedding or the optimizer does not suit.
    """
    problems = []
    if active_vocabulary == "on" and method != "full":
        problems.append(
            f"--active_vocabulary on: --method {method} does not train the embedding. Leave one of them out."
        )
    against = _obstacle_of_optimizer(optim, _type_in_file(launch.deepspeed or {}))
    if active_vocabulary == "on" and against is not None:
        problems.append(f"--active_vocabulary on: {against}. Leave one of them out.")
    if problems:
        raise UserError(problems)


def _type_in_file(deepspeed: Mapping[str, Any]) -> str | None:
    """Of the optimizer that a DeepSpeed file names; it takes the place of `--optim`."""
    optimizer = deepspeed.get("optimizer")
    return str(optimizer["type"]) if isinstance(optimizer, Mapping) and "type" in optimizer else None


def _obstacle_of_optimizer(optim: str, type_in_file: str | None) -> str | None:
    """Why rows without a gradient would matter to the optimizer, in words; None where they do not."""
    if type_in_file is None:
        return obstacle_of_optimizer(optim)
    if type_in_file.lower() in ELEMENTWISE_TYPES:
        return None
    return (
        f"optimizer.type = {type_in_file} of the DeepSpeed file is not known to change each weight by its own "
        f"gradient alone ({', '.join(ELEMENTWISE_TYPES)} are)"
    )


def use_active_vocabulary(
    model: Model,
    args: SentimentTrainingArguments,
    datasets: Iterable[Dataset | None],
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: Path | None,
) -> None:
    """Leave the embedding's unused rows out of training, as `args.active_vocabulary` says. All ranks must call it.

    Args:
        model: loaded, and not given to a Trainer yet. Its embedding is replaced.
        args: of the run.
        datasets: all rows that the model will see, with `input_ids`.
        tokenizer: of the model.
        checkpoint: that the run goes on from, or None.

    Raises:
        UserError: it cannot be `on` for this model, the rows have tokens that the checkpoint does not train, it began
            with another model's rows, or the tokenizer is not the model's.
    """
    row_ids = _chosen(model, args, datasets, tokenizer)
    if checkpoint is not None:
        row_ids = resumed_row_ids(checkpoint, row_ids, may_train_all=args.active_vocabulary == "auto")
    if row_ids is None:
        return
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    with gathered(embedding.weight):
        active = ActiveEmbedding(embedding.weight, row_ids, embedding.padding_idx, keeps_start=args.should_save)
    if checkpoint is not None and began_with_others(checkpoint, gather_from_all(active.unused)[0]):
        name = builtin.name_of(str(model.name_or_path))
        raise UserError(
            f"--resume_from_checkpoint {checkpoint}: it began with other weights than --model_name_or_path {name} has "
            "now: the rows of the embedding that no text uses would be of another model than those that were trained. "
            "Give the weights that it began with (of the Hub by --model_revision), or start afresh in another "
            "--output_dir."
        )
    model.set_input_embeddings(active)
    logger.info("%s", _in_words(active, args))


def _chosen(
    model: Model,
    args: SentimentTrainingArguments,
    datasets: Iterable[Dataset | None],
    tokenizer: PreTrainedTokenizerBase,
) -> torch.Tensor | None:
    """The rows that are trained, ascending; None for all."""
    if args.active_vocabulary == "off":
        return None
    type_in_file = _type_in_file(_deepspeed_file(args))
    against = obstacle(model) or _obstacle_of_optimizer(OptimizerNames(args.optim).value, type_in_file)
    if against is not None:
        if args.active_vocabulary == "on":
            raise UserError(f"--active_vocabulary on: {against}. Leave it out, or type --active_vocabulary off.")
        logger.info("active vocabulary: not used: %s", against)
        return None
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    row_ids = used_ids(datasets, tokenizer, embedding)
    if args.active_vocabulary == "auto" and len(row_ids) > (1 - WORTH_IT) * embedding.num_embeddings:
        return None
    return row_ids


def _in_words(active: ActiveEmbedding, args: SentimentTrainingArguments) -> str:
    rows, width = active.weight.shape
    unused = (len(active.position_of) - rows) * width
    memory, traffic = saved_bytes(unused, args)
    kinds = "weights, gradient and AdamW's states" if _has_two_states(args) else "weights and gradient"
    sent = f", {_size(traffic)} less to send at each step" if args.world_size > 1 else ""
    start = len(active.position_of) * width * active.weight.element_size()
    decay = (
        f". Rows that no text uses keep their start, where --weight_decay {args.weight_decay:g} would shrink them"
        if args.weight_decay > 0
        else ""
    )
    return (
        f"active vocabulary: {rows:,} of {len(active.position_of):,} rows of {width}: {_size(memory)} less for "
        f"{kinds} on each process{sent}; {_size(start)} more memory of the CPU where models are saved{decay}"
    )


def saved_bytes(unused: int, args: SentimentTrainingArguments) -> tuple[int, int]:
    """What each process does not store where it trains, and does not send in a step. On a CPU it sends over gloo.

    Those that save models keep the embedding's `start` beside, in memory of the CPU.

    Args:
        unused: numbers in the rows that are left out.
        args: of the run.
    """
    family = came_up(args)
    # DeepSpeed trains in half precision and keeps the weights in fp32 beside; mixed precision elsewhere is fp32.
    in_half = family.startswith("zero") and (args.bf16 or args.fp16)
    states = 8 * _has_two_states(args) + 4 * in_half
    each = {"weights": 2 if in_half else 4, "gradient": 2 if in_half else 4, "states": states}
    split = SPLIT.get(family, ())
    memory = sum(size / (args.world_size if kind in split else 1) for kind, size in each.items())
    weights = unused * (2 if args.bf16 or args.fp16 else 4)
    traffic = sent_bytes(
        family,
        args.world_size,
        gradients=unused * getattr(torch, args.reduce_dtype).itemsize,
        weights=weights,
        weights_again=weights,  # accelerate makes the embedding a unit of FSDP2's like the blocks
        accumulation_steps=args.gradient_accumulation_steps,
        gpu=args.device.type != "cpu",
    )
    return round(unused * memory), round(traffic)


def _has_two_states(args: SentimentTrainingArguments) -> bool:
    """AdamW's, in fp32: the Trainer keeps an embedding's states from being cut to 8 bit."""
    return "adam" in (_type_in_file(_deepspeed_file(args)) or str(args.optim)).lower()


def _deepspeed_file(args: SentimentTrainingArguments) -> Mapping[str, Any]:
    """Its content; empty where there is none."""
    plugin = args.deepspeed_plugin
    return {} if plugin is None else cast(Mapping[str, Any], plugin.deepspeed_config)


def _size(number: int) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e9 / 10 else f"{number / 1e6:.2f} MB"
