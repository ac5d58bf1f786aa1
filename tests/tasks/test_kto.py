"""KTO and reward models: losses and gradients are those of plain torch, and no split changes them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from indictune.config.arguments import ModelArguments
from indictune.config.chat_arguments import RewardTrainingArguments
from indictune.models.load import load_tokenizer
from indictune.models.task_models import load_classifier
from indictune.tasks.kto import MarkedAnswers, RatedLoss
from indictune.tasks.reward import PairRewards
from indictune.training.evaluation import measured_rows
from indictune.training.exact_trainer import IndicTrainer
from tests.tasks.test_preferences import (
    RATE,
    STEPS,
    answers_alone,
    losses_of,
    pair_rows,
    pair_trainer,
    training_arguments,
)
from tests.training.tiny import tiny_llama, trained_weights

KTO = RatedLoss(0.4, good_weight=1.5, bad_weight=0.5)
SPLITS = [{"per_device_train_batch_size": 1}, {"global_batch_size": 4}, {"padded": True}]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama(tmp_path_factory.mktemp("base"))


def rated_rows() -> Dataset:
    """The better answers of `pair_rows`, one marked bad. Each prompt also has the answer of the row before."""
    rows, made = list(pair_rows()), []
    for number, row in enumerate(rows):
        end, before = row["chosen_length"], rows[number - 1]
        begins = [next(place for place, label in enumerate(each["labels"]) if label != -100) for each in (row, before)]
        own = {name: row[name][:end] for name in ("input_ids", "labels")}
        others = {
            f"other_{name}": row[name][: begins[0]] + before[name][begins[1] : before["chosen_length"]] for name in own
        }
        made.append(own | others | {"length": end, "language": row["language"], "is_good": int(number != 2)})
    return Dataset.from_list(made)


def plain_kto(policy: Any, frozen: Any, rows: Dataset) -> tuple[torch.Tensor, float]:
    """The mean loss as the paper writes it, and the estimate of the divergence."""
    ratios = []
    for row in rows:
        both = {name: row[name] + row[f"other_{name}"] for name in ("input_ids", "labels")}
        both["chosen_length"] = row["length"]
        with torch.no_grad():
            before = [log_prob for log_prob, _ in answers_alone(frozen, both)]
        ratios.append([now - then for (now, _), then in zip(answers_alone(policy, both), before, strict=True)])
    divergence = max(0.0, float(np.mean([other.item() for _, other in ratios])))
    losses = []
    for (own, _), good in zip(ratios, rows["is_good"], strict=True):
        value = torch.sigmoid(0.4 * (own - divergence)) if good else torch.sigmoid(0.4 * (divergence - own))
        losses.append((1.5 if good else 0.5) * (1 - value))
    return torch.stack(losses).mean(), divergence


def test_kto_is_that_of_plain_torch(base: str, tmp_path: Path) -> None:
    """The gradients of a step are seen in the losses of the next ones, and in the weights at the end."""
    rows, expected = rated_rows(), list[float]()
    policy, frozen = (AutoModelForCausalLM.from_pretrained(base) for _ in range(2))
    optimizer = torch.optim.SGD(policy.parameters(), 0.3)
    for _ in range(STEPS):
        loss, divergence = plain_kto(policy, frozen, rows)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        expected.append(loss.item())
    trainer = pair_trainer(base, tmp_path, rows, KTO, learning_rate=0.3)
    assert losses_of(trainer) == pytest.approx(expected, rel=1e-4)
    assert isinstance(trainer.objective, MarkedAnswers)
    assert trainer.objective.divergence.item() == pytest.approx(divergence, rel=1e-3)
    assert divergence > 0.01
    moved = trained_weights(trainer)
    for weight, right in policy.named_parameters():
        torch.testing.assert_close(moved[weight], right.detach(), rtol=1e-4, atol=1e-5, msg=weight)
    trainer.evaluate()
    found, (loss, _) = trainer.detailed_metrics["eval"], plain_kto(policy, frozen, rows)
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert found["good_tokens"] + found["bad_tokens"] == sum(1 + number % 3 for number in range(5))


def test_scores_of_some_rows_are_those_of_all(base: str, tmp_path: Path) -> None:
    """The lines of a large file are made in parts. A group without good answers has no reward of them."""
    rows = rated_rows()
    trainer = pair_trainer(base, tmp_path, rows, KTO, learning_rate=0.3)
    trainer.train()
    results = measured_rows(trainer, rows)
    whole = list(trainer.objective.predictions(rows, results))
    parts = (trainer.objective.predictions(rows.select([at]), [each[[at]] for each in results]) for at in range(5))
    assert [line for part in parts for line in part] == list(map(pytest.approx, whole))
    found = trainer.objective.breakdown(rows, results)
    assert len({each["loss"] for each in whole}) == 5
    only_bad = trainer.objective.breakdown(rows.select([2]), [each[[2]] for each in results])
    assert math.isnan(only_bad.overall.scores["chosen_reward"].value)
    assert not math.isnan(found.overall.scores["chosen_reward"].value)


@pytest.mark.parametrize("settings", [*SPLITS, {"method": "lora"}], ids=str)
def test_micro_batches_and_padding_change_nothing_in_kto(base: str, tmp_path: Path, settings: dict[str, Any]) -> None:
    of_both = {name: settings[name] for name in settings if name in ("method", "global_batch_size")}
    rate = {"learning_rate": 0.3}
    whole = losses_of(pair_trainer(base, tmp_path / "whole", rated_rows(), KTO, **rate, **of_both))
    split = {"per_device_train_batch_size": 2} | rate | settings
    assert losses_of(pair_trainer(base, tmp_path / "split", rated_rows(), KTO, **split)) == pytest.approx(
        whole, rel=1e-4
    )


def reward_trainer(base: str, folder: Path, rows: Dataset, **settings: Any) -> IndicTrainer:
    padded, args = settings.pop("padded", False), ModelArguments(base, dropout=0.0)
    torch.manual_seed(0)
    tokenizer = load_tokenizer(args)
    model = load_classifier(args, ["reward"], tokenizer, "regression")
    training = training_arguments(RewardTrainingArguments, folder, len(rows), **settings)
    assert tokenizer.pad_token_id is not None
    return IndicTrainer(model, training, rows, rows, tokenizer, PairRewards(tokenizer.pad_token_id, padded), padded)


def test_a_reward_model_learns_as_in_plain_torch(base: str, tmp_path: Path) -> None:
    rows, expected = pair_rows(), list[float]()
    trainer = reward_trainer(base, tmp_path, rows)
    trainer.save_model(str(tmp_path / "start"))
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "start")
    optimizer = torch.optim.SGD(model.parameters(), RATE)

    def margins() -> torch.Tensor:
        found = []
        for row in rows:
            end, ids = row["chosen_length"], torch.tensor(row["input_ids"])
            chosen, rejected = (model(input_ids=each[None]).logits[0, 0] for each in (ids[:end], ids[end:]))
            found.append(chosen - rejected)
        return torch.stack(found)

    for _ in range(STEPS):
        loss = -functional.logsigmoid(margins()).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        expected.append(loss.item())
    assert losses_of(trainer) == pytest.approx(expected, rel=1e-4)
    moved = trained_weights(trainer)
    for weight, right in model.named_parameters():
        torch.testing.assert_close(moved[weight], right.detach(), rtol=1e-4, atol=1e-5, msg=weight)
    trainer.evaluate()
    found = trainer.detailed_metrics["eval"]
    assert found["reward_margin"] == pytest.approx(margins().mean().item(), rel=1e-4)
    assert found["reward_accuracy"] == (margins() > 0).float().mean().item()


@pytest.mark.parametrize("settings", SPLITS, ids=str)
def test_micro_batches_and_padding_change_no_reward_model(base: str, tmp_path: Path, settings: dict[str, Any]) -> None:
    of_both = {name: settings[name] for name in settings if name == "global_batch_size"}
    whole = losses_of(reward_trainer(base, tmp_path / "whole", pair_rows(), **of_both))
    split = {"per_device_train_batch_size": 2} | settings
    parts = losses_of(reward_trainer(base, tmp_path / "split", pair_rows(), **split))
    assert parts == pytest.approx(whole, rel=1e-4)
