"""DPO: the losses are those of a reference in plain torch and of TRL's DPOTrainer, and no split changes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from datasets import Dataset
from torch.nn import functional
from transformers import AutoModelForCausalLM
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer

from indictune.config.arguments import ModelArguments
from indictune.config.chat_arguments import LlamaTrainingArguments, PreferenceArguments
from indictune.config.recipe import Recipe
from indictune.errors import Problems
from indictune.models.load import load_tokenizer
from indictune.models.task_models import load_causal
from indictune.preflight.derive import make_plan
from indictune.tasks.kto import MarkedAnswers, RatedAnswers, RatedLoss
from indictune.tasks.preferences import PairLoss, Preference, Preferences
from indictune.training.chat_trainer import LlamaTrainer
from indictune.training.task_trainer import TaskTrainer
from tests.training.tiny import VOCABULARY, tiny_llama, trained_weights

STEPS, RATE = 3, 0.03
LOSSES = {
    "sigmoid": PairLoss("sigmoid", 0.3),
    "ipo": PairLoss("ipo", 0.3),
    "hinge": PairLoss("hinge", 0.3),
    "robust": PairLoss("robust", 0.3, flipped_share=0.2),
    "normalised": PairLoss("sigmoid", 0.5, length_normalised=True),
    "with_sft": PairLoss("sigmoid", 0.3, sft_weight=0.7),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama(tmp_path_factory.mktemp("base"))


def pair_rows(count: int = 5) -> Dataset:
    """Pairs of random tokens: a prompt of 2 to 6, and answers of different lengths."""
    rng = torch.Generator().manual_seed(0)
    rows = []
    for number in range(count):
        prompt, chosen, rejected = (
            torch.randint(3, VOCABULARY, (length,), generator=rng).tolist()
            for length in (2 + number, 1 + number % 3, 4 - number % 2)
        )
        ignored = [-100] * len(prompt)
        rows.append(
            {
                "input_ids": [*prompt, *chosen, *prompt, *rejected],
                "labels": [*ignored, *chosen, *ignored, *rejected],
                "chosen_length": len(prompt) + len(chosen),
                "length": 2 * len(prompt) + len(chosen) + len(rejected),
                "language": ("hi", "ta")[number % 2],
            }
        )
    return Dataset.from_list(rows)


def pair_trainer(base: str, folder: Path, rows: Dataset, loss: PairLoss | RatedLoss, **settings: Any) -> LlamaTrainer:
    """A trainer whose steps take all rows each, by plain gradient descent."""
    padded, method = settings.pop("padded", False), settings.pop("method", "full")
    args = ModelArguments(base, method=method, dropout=0.0, lora_dropout=0.0)
    torch.manual_seed(0)
    tokenizer = load_tokenizer(args)
    model = load_causal(args, tokenizer, torch.float32, ends=[2])
    kind = MarkedAnswers if isinstance(loss, RatedLoss) else Preferences
    assert tokenizer.pad_token_id is not None
    objective = kind(tokenizer.pad_token_id, torch.float32, padded, [base, padded, kind.__name__], loss)
    training = training_arguments(PreferenceArguments, folder, len(rows), **settings)
    return LlamaTrainer(model, training, rows, rows, tokenizer, padded, objective=objective)


Training = TypeVar("Training", bound=LlamaTrainingArguments)


def training_arguments(kind: type[Training], folder: Path, rows: int, **settings: Any) -> Training:
    """Steps of all rows each, by plain gradient descent."""
    of_step = settings.pop("global_batch_size", rows)
    size = settings.get("per_device_train_batch_size", of_step)
    given: dict[str, Any] = {
        "use_cpu": True,
        "bf16": False,
        "optim": "sgd",
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "max_steps": STEPS,
        "logging_steps": 1,
        "disable_tqdm": True,
        "eval_strategy": "no",
        "save_strategy": "no",
        "load_best_model_at_end": False,
        "global_batch_size": of_step,
        "per_device_train_batch_size": size,
        "gradient_checkpointing": False,
        "gradient_accumulation_steps": -(-of_step // size),
    }
    return kind(output_dir=str(folder), **{**given, **settings})


def losses_of(trainer: TaskTrainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def answers_alone(model: Any, row: dict[str, Any]) -> list[tuple[torch.Tensor, int]]:
    """The log-probability and the tokens of both answers, each read alone."""
    found, end = [], row["chosen_length"]
    for part in (slice(end), slice(end, None)):
        ids, labels = (torch.tensor(row[name][part]) for name in ("input_ids", "labels"))
        answer = labels[1:] != -100
        log_probs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        found.append((log_probs[torch.arange(len(ids) - 1), ids[1:]][answer].sum(), int(answer.sum())))
    return found


def plain_loss(name: str, policy: Any, frozen: Any, row: dict[str, Any]) -> torch.Tensor:
    """Of one pair, as the papers write it."""
    (better, longs), (worse, others) = answers_alone(policy, row)
    with torch.no_grad():
        (better_before, _), (worse_before, _) = answers_alone(frozen, row)
    up, down = better - better_before, worse - worse_before
    if name == "ipo":
        return (up / longs - down / others - 1 / (2 * 0.3)) ** 2
    if name == "hinge":
        return torch.clamp(1 - 0.3 * (up - down), min=0)
    if name == "normalised":
        return torch.log(1 + torch.exp(-0.5 * (up / longs - down / others)))
    right, wrong = (torch.log(1 + torch.exp(-sign * 0.3 * (up - down))) for sign in (1, -1))
    if name == "robust":
        return (0.8 * right - 0.2 * wrong) / 0.6
    return right - 0.7 * better / longs if name == "with_sft" else right


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_those_of_plain_torch(base: str, tmp_path: Path, name: str) -> None:
    """The gradients of a step are seen in the losses of the next ones, and in the weights at the end."""
    rows = pair_rows()
    policy, frozen = (AutoModelForCausalLM.from_pretrained(base) for _ in range(2))
    optimizer, expected = torch.optim.SGD(policy.parameters(), RATE), []
    for _ in range(STEPS):
        loss = torch.stack([plain_loss(name, policy, frozen, row) for row in rows]).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        expected.append(loss.item())
    trainer = pair_trainer(base, tmp_path, rows, LOSSES[name])
    assert losses_of(trainer) == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0]
    moved = trained_weights(trainer)
    for weight, right in policy.named_parameters():
        torch.testing.assert_close(moved[weight], right.detach(), rtol=1e-4, atol=1e-5, msg=weight)


@pytest.mark.parametrize(
    "settings",
    [{"per_device_train_batch_size": 1}, {"global_batch_size": 4}, {"padded": True}, {"method": "lora"}],
    ids=str,
)
def test_micro_batches_and_padding_change_nothing(base: str, tmp_path: Path, settings: dict[str, Any]) -> None:
    """Global batches of 4 leave one pair for the next two micro-batches: the other one has none."""
    loss, of_both = LOSSES["with_sft"], {"method", "global_batch_size"}
    shared = {name: value for name, value in settings.items() if name in of_both}
    whole = losses_of(pair_trainer(base, tmp_path / "whole", pair_rows(), loss, **shared))
    split = {"per_device_train_batch_size": 2} | settings
    other = losses_of(pair_trainer(base, tmp_path / "split", pair_rows(), loss, **split))
    assert other == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("name", ["sigmoid", "ipo", "hinge", "robust", "normalised"])
def test_the_loss_is_that_of_trl(base: str, tmp_path: Path, name: str) -> None:
    """On one batch of one process, where nothing is averaged twice; `sft` of TRL is a mean over a batch's tokens."""
    texts = {"prompt": ["a b c", "d"], "chosen": [" e f", " g"], "rejected": [" h", " a b c"]}
    types = {"normalised": "sigmoid_norm"}
    config = DPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        beta=LOSSES[name].beta,
        loss_type=[types.get(name, name)],
        label_smoothing=0.2 if name == "robust" else 0.0,
        per_device_train_batch_size=2,
        report_to=[],
    )
    tokenizer = load_tokenizer(ModelArguments(base))
    models = [AutoModelForCausalLM.from_pretrained(base) for _ in range(2)]
    with torch.no_grad():
        for weight in models[0].parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    trl: Any = DPOTrainer(
        models[0], models[1], config, train_dataset=Dataset.from_dict(texts), processing_class=tokenizer
    )
    batch = next(iter(trl.get_train_dataloader()))
    expected = trl.compute_loss(trl.model, dict(batch))
    labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
    order = torch.tensor([0, 2, 1, 3])  # TRL has all chosen answers first
    inputs = {"input_ids": batch["input_ids"][order], "attention_mask": batch["attention_mask"][order]}
    measured = [
        objective_of(LOSSES[name]).measure(model, inputs | {"labels": order[:2], "answer_labels": labels[order]})
        for model in (trl.model, trl.ref_model)
    ]
    (log_probs, tokens), (reference, _) = measured
    torch.testing.assert_close(LOSSES[name].each(log_probs, tokens, reference).mean(), expected, rtol=1e-5, atol=1e-6)


def objective_of(loss: PairLoss) -> Preferences:
    return Preferences(0, torch.float32, True, [], loss)


def test_an_evaluation_counts_each_pair_once(base: str, tmp_path: Path) -> None:
    rows = pair_rows()
    trainer = pair_trainer(base, tmp_path, rows, LOSSES["sigmoid"], per_device_eval_batch_size=2)
    trainer.train()
    trainer.evaluate()
    found = trainer.detailed_metrics["eval"]
    frozen, model = AutoModelForCausalLM.from_pretrained(base), trainer.model
    margins, losses = [], []
    with torch.no_grad():
        for row in rows:
            (better, _), (worse, _) = answers_alone(model, row)
            (better_before, _), (worse_before, _) = answers_alone(frozen, row)
            margins.append(0.3 * float(better - better_before - worse + worse_before))
            losses.append(float(-functional.logsigmoid(torch.tensor(margins[-1]))))
    assert found["num_examples"] == 5
    assert found["loss"] == pytest.approx(sum(losses) / 5, rel=1e-4)
    assert found["reward_margin"] == pytest.approx(sum(margins) / 5, rel=1e-4)
    assert found["reward_accuracy"] == sum(margin > 0 for margin in margins) / 5
    of_hindi = [loss for loss, row in zip(losses, rows, strict=True) if row["language"] == "hi"]
    assert found["per_language"]["hi"]["loss"] == pytest.approx(sum(of_hindi) / len(of_hindi), rel=1e-4)
    assert (found["chosen_tokens"], found["rejected_tokens"]) == (9, 18)


@pytest.mark.parametrize(
    ("task", "flags", "found"),
    [
        (
            Preference(),
            {"beta": 0.0, "sft_weight": -1.0},
            {"--beta": "not-above-zero", "--sft_weight": "sft-weight-negative"},
        ),
        (
            Preference(),
            {"preference_loss": "robust", "flipped_share": 0.5},
            {"--flipped_share": "flipped-share-out-of-range"},
        ),
        (Preference(), {"flipped_share": 0.1}, {"--flipped_share": "no-effect"}),
        (Preference(), {"preference_loss": "ipo", "length_normalised": True}, {"--length_normalised": "no-effect"}),
        (
            RatedAnswers(),
            {"beta": -1.0, "undesirable_weight": 0.0},
            {"--beta": "not-above-zero", "--undesirable_weight": "not-above-zero"},
        ),
    ],
)
def test_values_that_cannot_be_meant_are_refused_together(
    base: str, task: Any, flags: dict[str, Any], found: dict[str, str]
) -> None:
    values = {"model_name_or_path": base, "output_dir": "out", "train_file": "p.jsonl", **flags}
    plan, problems = make_plan(Recipe(values, Problems()), {}, task)
    codes = {each.flag: each.code for each in (*problems, *task.check(plan))}
    assert found.items() <= codes.items()
