"""Preferences: a causal language model learns which of two answers is the better one (DPO)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from indictune.config.chat_arguments import AlignedModelArguments, PairArguments, PreferenceArguments
from indictune.config.plan import RunPlan
from indictune.data.chat import answer_pairs
from indictune.data.chat.conversations import Conversations
from indictune.data.collation import IGNORED_LABEL, JoinRows, PadToLongest, PairRows
from indictune.data.columns import BETWEEN_TEXTS
from indictune.errors import Problem, problem
from indictune.evaluation.breakdown import WORST, WRITTEN, Breakdown, Group, block_of, break_down, mean_loss
from indictune.evaluation.uncertainty import RESAMPLES, Estimate, ratio_of_sums
from indictune.files import known_digest
from indictune.models import builtin
from indictune.tasks.chat import Answers, Chat, ChatRows, RowTexts, Tokenised, compute_dtype
from indictune.tasks.protocol import Batch, Collator, Objective, Results, Scripts, joined_messages, row_facts
from indictune.upstream import commit_of

if TYPE_CHECKING:
    from datasets import Dataset

    from indictune.data.chat.messages import Message

SCORES = ("loss", "reward_accuracy", "reward_margin", "chosen_reward")
_FILES = (".bin", ".json", ".py", ".safetensors")  # of a model


@dataclass(frozen=True)
class PairLoss:
    """The loss of a pair, whose sum is exact for every split of a global batch.

    The difference is how much more likely the better answer has become than the worse one, in nats: log-probabilities
    minus those of the reference. The fields are those of `PreferenceArguments`.

    - `sigmoid`: Rafailov et al., "Direct Preference Optimization" (2023), equation 7.
    - `ipo`: Azar et al., "A General Theoretical Paradigm to Understand Learning from Human Preferences" (2023),
      equation 17, with log-probabilities a token as its authors and TRL (1.16) compute it.
    - `hinge`: Zhao et al., "SLiC-HF" (2023), with rewards in place of log-probabilities, as Liu et al., "Statistical
      Rejection Sampling Improves Preference Optimization" (2023) have it.
    - `robust`: Ray Chowdhury et al., "Provably Robust DPO" (2024), equation 12.
    - `sft_weight`: Pang et al., "Iterative Reasoning Preference Optimization" (2024), equation 1, which divides the
      loss of the better answer by its tokens. TRL divides by those of a micro-batch, which depends on its split.
    """

    kind: str = "sigmoid"
    beta: float = 0.1
    length_normalised: bool = False
    flipped_share: float = 0.0
    sft_weight: float = 0.0

    def rewards(self, log_probs: Tensor, tokens: Tensor, reference: Tensor) -> Tensor:
        """Of both answers of each pair; all are float [pairs, 2]. `tokens` are those of each answer."""
        by = tokens.clamp(min=1) if self.length_normalised or self.kind == "ipo" else 1
        return self.beta * (log_probs - reference) / by

    def each(self, log_probs: Tensor, tokens: Tensor, reference: Tensor) -> Tensor:
        """The loss of each pair, float [pairs]; arguments as of `rewards`."""
        rewards = self.rewards(log_probs, tokens, reference)
        difference = rewards[:, 0] - rewards[:, 1]
        if self.kind == "ipo":
            losses = (difference / self.beta - 1 / (2 * self.beta)) ** 2
        elif self.kind == "hinge":
            losses = functional.relu(1 - difference)
        else:
            flipped = self.flipped_share if self.kind == "robust" else 0.0
            right, wrong = functional.logsigmoid(difference), functional.logsigmoid(-difference)
            losses = (flipped * wrong - (1 - flipped) * right) / (1 - 2 * flipped)
        return losses - self.sft_weight * log_probs[:, 0] / tokens[:, 0].clamp(min=1)


class Preferences(Answers):
    """Both answers of each pair, read in one pass of the model.

    Attributes:
        pair_loss: `PairLoss`, or that of another task.
        made_from: what the reference depends on besides rows and code.
        references: the reference of each dataset, by its `id`; float32 [pairs, 2].
        reference: that of the training rows, on the device.
    """

    METRICS = SCORES
    sums_rows = True
    reference: Tensor

    def __init__(
        self, pad_token_id: int, dtype: torch.dtype, padded: bool, made_from: list[object], pair_loss: Any
    ) -> None:
        super().__init__(pad_token_id, dtype, padded)
        self.pair_loss, self.made_from, self.references = pair_loss, made_from, dict[int, np.ndarray]()

    def collator(self, evaluating: bool) -> Collator:
        return self.pair_rows()

    def pair_rows(self, keeps_apart: bool = False) -> PairRows:
        """The collator of both conversations of each row."""
        return PairRows(PadToLongest(self.pad_token_id, "right") if self.padded else JoinRows(), keeps_apart)

    def cached_as(self, digest: str) -> tuple[str, list[object]]:
        """Kind and parts, as of `kept_folder`, of the reference of rows with a digest."""
        return "reference", [*self.made_from, digest]

    def measure(self, model: nn.Module, inputs: Batch) -> tuple[Tensor, ...]:
        """The log-probabilities of the answers of each row, and their tokens, [rows, answers] each."""
        rows, labels = len(inputs.pop("labels")), inputs.pop("answer_labels")
        of_tokens = model(**inputs, labels=labels, use_cache=False, fused_lm_head=True).log_probs.float()
        counted = (labels[:, 1:] != IGNORED_LABEL).float()
        return tuple(self.summed(each, inputs).view(rows, -1) for each in (of_tokens, counted))

    def summed(self, of_tokens: Tensor, inputs: Batch) -> Tensor:
        """The sum over each conversation, [conversations], of a value of each token but the first, [rows, tokens]."""
        if self.padded:
            return of_tokens.sum(-1)
        lengths = inputs["cu_seq_lens_q"].diff().long()  # `unsafe` skips a check of them, which waits for the GPU
        return torch.segment_reduce(functional.pad(of_tokens, (1, 0))[0], "sum", lengths=lengths, unsafe=True)

    def total(self, model: nn.Module, inputs: Batch) -> Tensor:
        rows = inputs.pop("row_numbers")
        is_pair = inputs["labels"][:, 1] != IGNORED_LABEL
        log_probs, tokens = self.measure(model, inputs)
        losses: Tensor = self.pair_loss.each(log_probs, tokens, self.reference[rows])
        return (losses * is_pair).sum()

    def known(self, dataset: Dataset, measured: Results) -> Results:
        return [each for key, each in self.references.items() if key == id(dataset)]

    def scored(self, results: Results) -> dict[str, np.ndarray]:
        """The scores of each row, [rows] each, of what was measured and is known; NaN where a row has none."""
        given = [torch.from_numpy(each).double() for each in results]
        return scores_of_pairs(self.pair_loss.each(*given), self.pair_loss.rewards(*given))

    def tokens(self, results: Results) -> dict[str, np.ndarray]:
        """The tokens of the better and the worse answer of each row, int64 [rows] each; 0 where it has none."""
        return {f"{name}_tokens": results[1][:, side].astype(np.int64) for side, name in enumerate(_SIDES)}

    def predictions(self, dataset: Dataset, results: Results) -> Iterator[dict[str, Any]]:
        columns = self.scored(results) | self.tokens(results)
        for values in zip(*(column.tolist() for column in columns.values()), strict=True):
            yield {name: value for name, value in zip(columns, values, strict=True) if not math.isnan(value)}

    def breakdown(self, dataset: Dataset, results: Results, scripts: Scripts = None, draws: int = 0) -> Breakdown:
        scored, tokens = self.scored(results), self.tokens(results)

        def scorer(rows: np.ndarray, draws: int = RESAMPLES) -> Group:
            scores = {}
            for name in (*SCORES[1:], "loss"):
                column = scored[name][rows]
                column = column[~np.isnan(column)]
                none = Estimate(math.nan, math.nan, math.nan)
                scores[name] = ratio_of_sums(column, np.ones(len(column)), draws) if len(column) else none
            return Group(len(rows), scores, counts={name: int(each[rows].sum()) for name, each in tokens.items()})

        loss = mean_loss(scored["loss"])
        return break_down("preferences", row_facts(dataset, scripts), scorer, loss=loss, draws=draws)

    def metrics(self, found: Breakdown) -> dict[str, Any]:
        return block_of(found, lambda group: group.counts | {name: group.scores[name].value for name in SCORES})


def scores_of_pairs(losses: Tensor, rewards: Tensor) -> dict[str, np.ndarray]:
    """`SCORES` of each pair, of its loss [pairs] and the rewards of its answers [pairs, 2]."""
    return as_scores(losses, rewards[:, 0] - rewards[:, 1], rewards[:, 0])


def as_scores(losses: Tensor, margins: Tensor, rewards: Tensor) -> dict[str, np.ndarray]:
    """`SCORES` of each row, of its loss, its margin and the reward of its better answer, [rows] each."""
    columns = losses, (margins > 0).double(), margins, rewards
    return {name: column.numpy() for name, column in zip(SCORES, columns, strict=True)}


_SIDES = "chosen", "rejected"


def _pair_texts(messages: list[Message], rejected: str) -> str:
    """The prompt, the better and the worse answer."""
    *prompt, chosen = messages
    return BETWEEN_TEXTS.join((joined_messages(prompt), chosen["content"], rejected))


Plan = RunPlan[PairArguments, PreferenceArguments]


class Preference(Chat):
    """A model learns which of two answers is the better one. What it has learned is evaluated as a chat."""

    arguments = (AlignedModelArguments, PairArguments, PreferenceArguments)  # type: ignore[assignment]
    name = "dpo"
    scores: tuple[str, ...] = (*SCORES, f"{WORST}{SCORES[1]}", *WRITTEN, f"{WORST}{WRITTEN[0]}")
    lower_is_better = ("loss",)
    rows_type: type[Conversations] = answer_pairs.Pairs
    tokenised: Tokenised = (answer_pairs.tokenised_pairs, answer_pairs.TOKENS)
    texts: RowTexts = (("messages", "rejected"), _pair_texts)
    row_scores = SCORES

    def check(self, plan: Plan) -> list[Problem]:  # type: ignore[override]
        asked, found = plan.training, super().check(plan) + check_positive(plan.training, beta=0.1)
        if not 0 <= asked.flipped_share < 0.5:
            found.append(problem("flipped-share-out-of-range", "--flipped_share", asked.flipped_share))
        if asked.flipped_share and asked.preference_loss != "robust":
            other = f"--preference_loss {asked.preference_loss}"
            found.append(problem("no-effect", "--flipped_share", asked.flipped_share, other=other))
        if asked.length_normalised and asked.preference_loss == "ipo":
            found.append(problem("no-effect", "--length_normalised", "true", other="--preference_loss ipo"))
        if not asked.sft_weight >= 0:
            found.append(problem("sft-weight-negative", "--sft_weight", asked.sft_weight))
        return found

    def start_of(self, plan: Plan) -> list[object]:  # type: ignore[override]
        """The files of the model or its commit, and how it is computed."""
        model, name = plan.model, builtin.resolve(plan.model.model_name_or_path)
        files = sorted(each for each in Path(name).glob("*") if each.suffix in _FILES)
        content: list[object] = [[each.name, known_digest(str(each))] for each in files]
        commit = None if plan.model_config is None else commit_of(plan.model_config)
        return [content or [name, commit or model.model_revision], model.method, model.attn_implementation]

    def objective(
        self,
        args: PreferenceArguments,  # type: ignore[override]
        config: PreTrainedConfig,
        tokenizer: Tokenizer,
        padded: bool,
        rows: ChatRows | None,
    ) -> Objective:
        loss = PairLoss(args.preference_loss, args.beta, args.length_normalised, args.flipped_share, args.sft_weight)
        return Preferences(*of_answers(args, tokenizer, padded, rows), pair_loss=loss)

    def can_evaluate(self, config: Mapping[str, Any]) -> bool:
        return False


def check_positive(training: Any, **defaults: float) -> list[Problem]:
    """Refuse flags that are not above 0."""
    wrong = [name for name in defaults if not getattr(training, name) > 0]
    return [problem("not-above-zero", f"--{name}", getattr(training, name), default=defaults[name]) for name in wrong]


def of_answers(
    args: Any, tokenizer: Tokenizer, padded: bool, rows: ChatRows | None
) -> tuple[int, torch.dtype, bool, list[object]]:
    """The first arguments of `Preferences`."""
    assert tokenizer.pad_token_id is not None
    assert rows is not None
    dtype = compute_dtype(args)
    return tokenizer.pad_token_id, dtype, padded, [*rows.start, str(dtype), padded]
