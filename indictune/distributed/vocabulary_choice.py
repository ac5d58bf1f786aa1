"""Choose whether a run has an active vocabulary."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.training_args import OptimizerNames

from indictune.config.arguments import SentimentTrainingArguments
from indictune.config.plan import AnyPlan
from indictune.data.cache import forget_mapped
from indictune.distributed.collectives import gather_from_all
from indictune.distributed.sharding import whole_parameter
from indictune.errors import Problem, UserError, problem
from indictune.models.active_vocabulary import (
    ActiveEmbedding,
    began_with_others,
    obstacle,
    obstacle_of_optimizer,
    resumed_row_ids,
    used_ids,
)
from indictune.models.config_shapes import meta_model
from indictune.models.load import Model

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

FLAG = "--active_vocabulary"
_ROWS_AT_ONCE = 100_000
LEAST_UNUSED_SHARE = 0.1  # of the rows, for `auto`: a judgement, not a measurement


def check_active_vocabulary(active_vocabulary: str, method: str, optim: str) -> list[Problem]:
    """Problems of `--active_vocabulary on` that show before anything is loaded."""
    if active_vocabulary != "on":
        return []
    reasons = [obstacle_of_optimizer(optim)]
    if method != "full":
        reasons.append(f"--method {method} does not train the embedding")
    return [problem("active-vocabulary-impossible", FLAG, "on", reason=reason) for reason in reasons if reason]


def use_active_vocabulary(
    model: Model,
    args: SentimentTrainingArguments,
    datasets: Iterable[Dataset | None],
    tokenizer: Tokenizer,
    checkpoint: Path | None,
) -> None:
    """Train only the used rows of the embedding, if `--active_vocabulary` says so. All ranks must call it.

    The embedding is replaced before a Trainer has the model. The datasets have the `input_ids` of all rows that the
    model will see.

    Raises:
        UserError: `on` is impossible for this model, the checkpoint does not train a row that the data uses, or it
            was trained from another model.
    """
    row_ids = rows_to_train(model, args, datasets, tokenizer)
    if checkpoint is not None:
        row_ids = resumed_row_ids(checkpoint, row_ids, may_train_all=args.active_vocabulary == "auto")
    if row_ids is None:
        return
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    with whole_parameter(embedding.weight):
        active = ActiveEmbedding(embedding.weight, row_ids, embedding.padding_idx, keeps_start=args.should_save)
    if checkpoint is not None and began_with_others(checkpoint, gather_from_all(active.unused)[0]):
        raise UserError("checkpoint-of-other-weights", "--resume_from_checkpoint", checkpoint)
    model.set_input_embeddings(active)
    logger.info(f"active vocabulary: {len(row_ids):,} of {len(active.position_of):,} embedding rows are trained")


def rows_to_train(
    model: Model, args: SentimentTrainingArguments, datasets: Iterable[Dataset | None], tokenizer: Tokenizer
) -> torch.Tensor | None:
    """The rows that are trained, ascending; None for all."""
    if args.active_vocabulary == "off":
        return None
    reason = obstacle(model) or obstacle_of_optimizer(OptimizerNames(args.optim).value)
    if reason is not None:
        if args.active_vocabulary == "on":
            raise UserError("active-vocabulary-impossible", FLAG, "on", reason=reason)
        logger.debug("active vocabulary: not used: %s", reason)
        return None
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    row_ids = used_ids(_in_parts(datasets), tokenizer, embedding)
    if args.active_vocabulary == "auto" and len(row_ids) > (1 - LEAST_UNUSED_SHARE) * embedding.num_embeddings:
        return None
    return row_ids


def _in_parts(datasets: Iterable[Dataset | None]) -> Iterator[Dataset]:
    """Some rows of each dataset at a time; the memory of those that were read is released."""
    for dataset in filter(None, datasets):
        for start in range(0, len(dataset), _ROWS_AT_ONCE):
            yield dataset.select(range(start, min(start + _ROWS_AT_ONCE, len(dataset))))
            forget_mapped()


def with_learned_vocabulary(plan: AnyPlan, tokenizer: Tokenizer) -> AnyPlan:
    """The plan with a row of the embedding for each token, where `--vocabulary_from_train` has made the tokenizer."""
    if plan.model.vocabulary_from_train is None:
        return plan
    config = copy.deepcopy(plan.known_config)
    config.vocab_size = len(tokenizer)
    return replace(plan, model_config=config)


def count_active_rows(plan: AnyPlan, datasets: Iterable[Dataset | None], tokenizer: Tokenizer) -> int | None:
    """How many rows of the embedding a run would train, without its weights; None for all."""
    if "active_vocabulary" not in plan.configuration or plan.model.method != "full":
        return None
    own = meta_model(plan.model, plan.known_config, plan.head).own
    row_ids = rows_to_train(own, cast(SentimentTrainingArguments, plan.training), datasets, tokenizer)
    return None if row_ids is None else len(row_ids)
