"""The tests of test_preferences.py and test_kto.py fail a loss with one thing broken."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from indictune.data.collation import IGNORED_LABEL, PairRows
from indictune.tasks.preferences import PairLoss, Preferences
from indictune.tasks.reward import BradleyTerryLoss
from indictune.training import evaluation
from indictune.training.chat_trainer import LlamaTrainer
from tests.tasks import test_kto, test_preferences
from tests.tasks.test_preferences import base  # noqa: F401, a fixture

Patch = Callable[[Any, str, Callable[..., Any]], None]

IN_PLAIN_TORCH = test_preferences.test_losses_and_gradients_are_those_of_plain_torch
IN_MICRO_BATCHES = partial(
    test_preferences.test_micro_batches_and_padding_change_nothing, settings={"per_device_train_batch_size": 2}
)
IN_MICRO_BATCHES_OF_KTO = partial(
    test_kto.test_micro_batches_and_padding_change_nothing_in_kto, settings={"per_device_train_batch_size": 2}
)


def reference_not_frozen(patch: Patch) -> None:
    """Rewards are measured from the model as it is now."""
    each = PairLoss.each
    patch(PairLoss, "each", lambda self, found, tokens, _: each(self, found, tokens, found.detach()))


def averaged_log_probabilities(patch: Patch) -> None:
    """All pairs of a micro-batch have its mean log-probabilities."""
    measure = Preferences.measure

    def averaged(self: Preferences, *args: Any) -> tuple[torch.Tensor, ...]:
        log_probs, tokens = measure(self, *args)
        return log_probs.mean(0).expand_as(log_probs), tokens

    patch(Preferences, "measure", averaged)


def mean_of_means(patch: Patch) -> None:
    """A step's loss is the mean over micro-batches of the mean over their pairs, as TRL has it."""

    def mean(self: LlamaTrainer, model: Any, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        pairs = (inputs["labels"][:, 1] != IGNORED_LABEL).sum()
        total: torch.Tensor = self.objective.total(model, dict(inputs))
        mean: torch.Tensor = total / pairs / self.args.gradient_accumulation_steps
        return mean

    patch(LlamaTrainer, "_own_loss", mean)


def counted_prompts(patch: Patch) -> None:
    """An answer has the tokens of its prompt too."""
    collate = PairRows.__call__
    patch(PairRows, "__call__", lambda self, rows: _with_prompts(collate(self, rows)))


def _with_prompts(batch: dict[str, Any]) -> dict[str, Any]:
    return batch | {"answer_labels": batch["input_ids"]}


def exchanged_answers(patch: Patch) -> None:
    """The rejected answer is taken for the better one."""
    each = PairLoss.each
    patch(PairLoss, "each", lambda self, *of_both: each(self, *(values.flip(1) for values in of_both)))


def divergence_of_a_micro_batch(patch: Patch) -> None:
    """KTO compares all rewards of a step with those of its first micro-batch."""
    whole = evaluation.measure_divergence

    def of_first(trainer: Any, objective: Any, batches: list[dict[str, Any]]) -> None:
        whole(trainer, objective, batches[:1])
        for batch in batches[1:]:
            del batch["others"]

    patch(evaluation, "measure_divergence", of_first)


def exchanged_rewards(patch: Patch) -> None:
    """A reward model learns that the rejected answer is the better one."""
    each = BradleyTerryLoss.each
    patch(BradleyTerryLoss, "each", staticmethod(lambda rewards: each(rewards.flip(1))))


@pytest.mark.parametrize(
    ("mutant", "shown"),
    [
        (reference_not_frozen, partial(IN_PLAIN_TORCH, name="sigmoid")),
        (averaged_log_probabilities, partial(IN_PLAIN_TORCH, name="sigmoid")),
        (counted_prompts, partial(IN_PLAIN_TORCH, name="ipo")),
        (exchanged_answers, partial(IN_PLAIN_TORCH, name="sigmoid")),
        (mean_of_means, IN_MICRO_BATCHES),
        (divergence_of_a_micro_batch, IN_MICRO_BATCHES_OF_KTO),
        (exchanged_rewards, test_kto.test_a_reward_model_learns_as_in_plain_torch),
    ],
)
def test_a_broken_loss_is_seen(
    base: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mutant: Callable[[Patch], None],
    shown: Callable[..., None],
) -> None:
    mutant(monkeypatch.setattr)
    with pytest.raises(AssertionError):
        shown(base=base, tmp_path=tmp_path)
