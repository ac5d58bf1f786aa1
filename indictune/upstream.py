"""Versions and private names of other libraries, all but those of `distributed/upstream.py`.

tests/training/test_contract.py holds every name, and says what to do when one goes. Libraries are imported inside the
functions: `config` imports this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import httpx2
    import torch
    from accelerate import Accelerator
    from datasets import Dataset
    from optuna.trial import FrozenTrial
    from sacrebleu.metrics.chrf import CHRF
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments
    from transformers.trainer_utils import TrainOutput
    from trl.trainer.sft_trainer import SFTTrainer


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Package -> version, without packages that are not installed: some exist on Linux only."""
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def note_commit(config: PreTrainedConfig, revision: str | None) -> None:
    """Let a configuration remember the commit on the Hub that it came from, if it did.

    transformers (5.23) no longer sets the attribute, but still leaves it out of `to_dict`.

    Args:
        revision: as transformers' `resolve_revision` gives it.
    """
    from huggingface_hub import ResolvedRevision

    vars(config)["_commit_hash"] = revision.resolved if isinstance(revision, ResolvedRevision) else None


def commit_of(config: PreTrainedConfig) -> str | None:
    """The commit on the Hub that a configuration came from, as `note_commit` noted it; None for a folder."""
    return cast("str | None", vars(config).get("_commit_hash"))


def check_combination(training: TrainingArguments) -> None:
    """Let transformers (5.23) raise a `ValueError` for the combination of arguments before the rows are prepared."""
    training._validate_args()  # type: ignore[no-untyped-call]


def numbers_in(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with the numbers that stand in strings, as transformers (5.23) reads `--lr_scheduler_kwargs`."""
    from transformers.training_args import _convert_str_dict

    return dict(_convert_str_dict(settings))


def id_in_storage(trial: FrozenTrial) -> int:
    """The number by which Optuna's storages (5.0) know a trial; it has another one in its study."""
    return int(trial._trial_id)


def digest_of_split(rows: Dataset) -> str:
    """The digest that `datasets` (5.2) computes from the files of a split, their commit and how they are read."""
    return str(rows._fingerprint)


def hub_client() -> httpx2.Client:
    """A client as huggingface_hub (2.4) makes it. Its public `set_client_factory` takes a factory and gives none."""
    from huggingface_hub.utils._http import default_client_factory

    return default_client_factory()


def chrf_counts(metric: CHRF, answers: Sequence[str], references: Sequence[str]) -> list[list[int]]:
    """Counts of n-grams of each answer, [rows][counts]. sacreBLEU (2.6) gives only scores of a whole corpus."""
    return cast("list[list[int]]", metric._extract_corpus_statistics(answers, [references]))


def chrf_of(metric: CHRF, counts: list[Any]) -> float:
    """chrF from 0 to 100 of summed `chrf_counts`, [counts]."""
    return metric._compute_f_score(counts)


def attention_of(config: PreTrainedConfig) -> str | None:
    """The attention function of a model by its name. transformers (5.23) has a public setter and no public getter."""
    return cast("str | None", config._attn_implementation)


def weight_conversions(model: nn.Module) -> list[Any]:
    """What transformers (5.23) did to the weights of a checkpoint when it read them. Saving reverses it."""
    return vars(model).get("_weight_conversions") or []


def set_weight_conversions(model: PreTrainedModel, conversions: list[Any] | None) -> None:
    """Decide what saving reverses; None is nothing."""
    vars(model)["_weight_conversions"] = conversions


def flash_attention(*given: Any, **settings: Any) -> torch.Tensor:
    """The operation below torch's `varlen_attn`, which itself has no dropout (torch 2.13)."""
    import torch

    return cast("torch.Tensor", torch.ops.aten._flash_attention_forward(*given, **settings)[0])


def packed_weight(weight: torch.Tensor) -> torch.Tensor:
    """A weight [out_features, in_features] in the order of oneDNN, which torch (2.13) offers only to its compiler."""
    import torch

    return cast("torch.Tensor", torch.ops.mkldnn._reorder_linear_weight(weight, None))


def packed_linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor:
    """A linear layer by a `packed_weight`, and the activation after it: `none` or `gelu`, by the error function.

    [rows, in_features] to [rows, out_features].
    """
    import torch

    return cast("torch.Tensor", torch.ops.mkldnn._linear_pointwise(rows, weight, bias, activation, [], "none"))


def unlogged_loss_of(trainer: Trainer) -> tuple[float, int]:
    """This rank's sum of losses since the last logged step, and that step; waits for the device.

    The Trainer's own checkpoints (5.23) lack both.
    """
    return float(trainer._tr_loss.item()), int(trainer._globalstep_last_logged)


def carry_loss(trainer: Trainer, loss: float, since_step: int, mean_of_ranks: float) -> None:
    """Begin with this rank's sum of losses that a checkpoint had not logged yet (transformers 5.23).

    The mean of the whole training leaves out `mean_of_ranks`: it is of this start's steps alone.
    """
    trainer._tr_loss += loss
    trainer._total_loss_scalar -= mean_of_ranks
    trainer._globalstep_last_logged = since_step


def forget_nan_loss(trainer: Trainer) -> None:
    """Sum the losses anew after a NaN was logged. The Trainer (5.23) subtracts the sum from itself."""
    trainer._tr_loss.nan_to_num_(0.0, 0.0, 0.0)


def evaluate_as_in_training(trainer: Trainer) -> None:
    """Evaluate, tell the schedule, and compare with the best so far, as the public `evaluate` does not (5.23)."""
    trainer._determine_best_metric(trainer._evaluate(None, None), None)


def end_training(trainer: Trainer) -> TrainOutput:
    """End a training without a step: load the best weights, and call `on_train_end` (transformers 5.23)."""
    return cast("TrainOutput", trainer._finalize_training(None, 0, time.time()))  # type: ignore[no-untyped-call]


def has_prepared_model(accelerator: Accelerator) -> bool:
    """Whether accelerate (1.15) has prepared a model."""
    return bool(accelerator._models)


def loss_scale(scaler: torch.amp.GradScaler) -> torch.Tensor | None:
    """The scale of fp16's losses, on the device; None before the first. `get_scale` waits for it (torch 2.13)."""
    return scaler._scale


def means_of_log(trainer: SFTTrainer) -> dict[str, list[float]]:
    """What TRL (1.16) logs the means of: numbers of each micro-batch since the last logged step, by name."""
    return cast("dict[str, list[float]]", trainer._metrics["train"])


def trained_tokens(trainer: SFTTrainer) -> int:
    """Tokens of all steps so far, which TRL (1.16) logs as `num_tokens`."""
    return trainer._total_train_tokens


def set_trained_tokens(trainer: SFTTrainer, tokens: int) -> None:
    """Go on counting from the tokens of a checkpoint."""
    trainer._total_train_tokens = tokens


def count_tokens_once(trainer: SFTTrainer, ranks_of_a_row: int) -> None:
    """Make TRL (1.16) count a row's tokens once, though several ranks have the row.

    It reads their number from accelerate's `parallelism_config`, which knows no matrices that are split without FSDP2.
    """
    trainer._tp_size = ranks_of_a_row


def without_progress_bar() -> AbstractContextManager[None]:
    """A block in which transformers shows no progress, of reading weights."""
    from transformers.utils import logging

    return _hidden(logging.is_progress_bar_enabled(), logging.disable_progress_bar, logging.enable_progress_bar)


def without_bars_of_rows() -> AbstractContextManager[None]:
    """A block in which datasets shows no progress, of writing rows."""
    import datasets

    are_shown = not datasets.are_progress_bars_disabled()
    return _hidden(are_shown, datasets.disable_progress_bars, datasets.enable_progress_bars)


@contextmanager
def _hidden(is_shown: bool, hide: Callable[[], None], show: Callable[[], None]) -> Iterator[None]:
    hide()
    try:
        yield
    finally:
        if is_shown:
            show()
