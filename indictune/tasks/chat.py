"""Causal language models: one learns the answers of conversations, or predicts each token of raw text."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from indictune.config.arguments import CausalTextArguments, ModelArguments
from indictune.config.chat_arguments import ChatDataArguments, LlamaModelArguments
from indictune.config.chat_arguments import LlamaTrainingArguments as Args
from indictune.config.plan import RunPlan
from indictune.config.shared_arguments import EvaluationArguments
from indictune.data.bad_rows import keep_rejected
from indictune.data.chat.chat_tokens import SCHEMA as TOKENS
from indictune.data.chat.chat_tokens import answer_ends, choose_template, template_notes, tokenised_chats
from indictune.data.chat.conversations import (
    Conversations,
    are_as_written,
    chat_sources,
    evaluated_file,
    load_conversations,
)
from indictune.data.chat.prepare_chats import Chats, check_template, set_template, tokenise_chat_splits
from indictune.data.collation import IGNORED_LABEL, JoinRows, PadToLongest
from indictune.data.health.row_health import check_unknown
from indictune.data.row_choice import Splits, mixture_of, split_of
from indictune.errors import Problem, Problems, problem, problems_of
from indictune.evaluation.breakdown import WORST, WRITTEN, Breakdown, Group, block_of, break_down
from indictune.evaluation.scorers import answers
from indictune.models import task_models
from indictune.models.adapters import continues_texts
from indictune.models.load import Model, load_tokenizer, positions_of, without_adapter
from indictune.models.unpadded import pads_causal
from indictune.tasks.protocol import (
    Batch,
    Collator,
    EvaluationPlan,
    Inputs,
    Objective,
    Results,
    Samples,
    Scripts,
    Task,
    TestTokens,
    Tokens,
    joined_messages,
    row_facts,
)
from indictune.tasks.raw_text import GuessedTokens, RawText, TextRows, origins_of, tokens_of

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

Plan = RunPlan[ChatDataArguments, Args]
Tokenised = tuple[Callable[..., Iterator[pa.RecordBatch]], pa.Schema]
RowTexts = tuple[tuple[str, ...], Callable[..., str]]
_SCORED_AT_ONCE = 1024  # tokens
ANSWER_SCORES = ("loss", "answer_token_accuracy")


@dataclass(frozen=True)
class ChatRows:
    """The conversations of a run, and the tokenizer and template that write them out."""

    splits: Splits[Any]  # of `Conversations`
    tokenizer: Tokenizer
    template: str
    start: Sequence[object] = ()  # what the model before training is, for a task that compares with it


class Chat(Task[ChatRows, ChatDataArguments, Args]):
    """A model answers the last message of a conversation.

    Attributes:
        rows_type: of the rows that are read.
        tokenised: how these become tokens, and the columns of the tokens.
        texts: of a row, as of `origins_of`.
        row_scores: the scores of a group of rows.
    """

    rows_type: type[Conversations] = Conversations
    tokenised: Tokenised = (tokenised_chats, TOKENS)
    texts: RowTexts = (("messages",), joined_messages)
    row_scores: tuple[str, ...] = ANSWER_SCORES
    arguments = (LlamaModelArguments, ChatDataArguments, Args)
    packages: tuple[str, ...] = ("trl",)
    writes_answers = True
    head = "ForCausalLM"
    name = "chat"
    scores: tuple[str, ...] = (*ANSWER_SCORES, "perplexity", "worst_language_loss", *WRITTEN, f"{WORST}{WRITTEN[0]}")
    lower_is_better: tuple[str, ...] = ("loss", "perplexity")

    def read_config(self, args: ModelArguments) -> PreTrainedConfig:
        return task_models.load_causal_config(args)

    def check(self, plan: Plan) -> list[Problem]:
        found = problems_of(task_models.check_causal, plan.model, plan.model_config)
        if plan.data.packing:
            found += problems_of(task_models.check_packing, plan.model, plan.model_config)
        metric = str(plan.training.metric_for_best_model).removeprefix("eval_").removeprefix(WORST)
        if metric.startswith(WRITTEN) and not plan.data.num_sample_generations:
            found.append(problem("metric-needs-samples", "--metric_for_best_model", metric))
        return found

    def open(self, plan: Plan, problems: Problems) -> Inputs:
        sources = problems.attempt(chat_sources, plan.data, problems, self.rows_type)
        tokenizer = problems.attempt(load_tokenizer, plan.model)
        if tokenizer is not None and sources is not None:
            problems.attempt(check_template, tokenizer, plan.data, sources)
        return Inputs(tokenizer, sources)

    def read(self, plan: Plan, inputs: Inputs, problems: Problems) -> ChatRows | None:
        if inputs.sources is None:
            return None
        with problems.collecting():
            of_rows = inputs.sources, plan.data, problems, split_of(plan), mixture_of(plan)
            splits = load_conversations(*of_rows, self.rows_type)
            if inputs.tokenizer is not None:
                check_unknown(splits.rows["train"], inputs.tokenizer, plan)
                template = set_template(inputs.tokenizer, splits.rows, plan.data)
                return ChatRows(splits, inputs.tokenizer, template, self.start_of(plan))
        return None

    def start_of(self, plan: Plan) -> Sequence[object]:
        """What the model before training is, if the task compares with it."""
        return ()

    def tokenise(self, plan: Plan, rows: ChatRows) -> Tokens:
        of_rows = rows.splits, rows.tokenizer, rows.template, plan.data, positions_of(plan.model_config)
        chats: Chats = tokenise_chat_splits(*of_rows, *self.tokenised)
        notes = template_notes(rows.tokenizer, rows.template, plan.data.train_on_prompts)
        tokens = tokens_of(chats, rows.splits, rows.tokenizer, notes, *self.texts)
        return replace(tokens, scores=self.row_scores, samples=_samples(chats, plan.data, rows.template))

    def compares(self, plan: Plan | EvaluationPlan) -> str | None:
        return "texts" if plan.data.num_sample_generations else None

    def group_scores(self, plan: Plan) -> tuple[str, ...]:
        return self.row_scores + WRITTEN

    def pads(self, plan: Plan) -> bool:
        return not plan.data.packing and pads_causal(plan.model, plan.known_config)

    def objective(
        self, args: Args, config: PreTrainedConfig, tokenizer: Tokenizer, padded: bool, rows: ChatRows | None
    ) -> Objective:
        assert tokenizer.pad_token_id is not None
        return Answers(tokenizer.pad_token_id, compute_dtype(args), padded)

    def load_model(self, plan: Plan, args: Args, rows: ChatRows, reads_weights: bool) -> Model:
        ends = answer_ends(rows.tokenizer, rows.template)
        return task_models.load_causal(plan.model, rows.tokenizer, compute_dtype(args), ends, reads_weights)

    def can_evaluate(self, config: Mapping[str, Any]) -> bool:
        return continues_texts(config.get("architectures"))

    def tokenise_test(self, plan: EvaluationPlan, tokenizer: Tokenizer | None, problems: Problems) -> TestTokens:
        asked, template = plan.data, None
        source = problems.attempt(evaluated_file, asked.test_file, asked.columns, self.rows_type)
        of_rows = source, asked, problems, None, None, self.rows_type
        test = problems.attempt(load_conversations, *of_rows) if source else None
        if tokenizer is not None and (asked.chat_template is not None or test is not None):
            as_written = test is not None and are_as_written(test.rows)
            template = problems.attempt(
                choose_template, tokenizer, asked.chat_template, as_written, asked.train_on_prompts
            )
        problems.raise_any()
        assert tokenizer is not None
        assert test is not None
        assert template is not None
        positions = positions_of(plan.model_config)
        chats = tokenise_chat_splits(test, tokenizer, template, asked, positions, *self.tokenised)
        keep_rejected(chats.folder, plan.output_dir, plan.launch.rank)
        notes, samples = [*test.notes, *chats.notes], _samples(chats, asked, template)
        return TestTokens(chats.datasets["test"], notes, origins_of(chats, "test", *self.texts), samples)


def _samples(chats: Chats, asked: ChatDataArguments | EvaluationArguments, template: str) -> Samples | None:
    """The conversations that the model answers, if any are asked for."""
    if not asked.num_sample_generations:
        return None
    messages, rows = chats.samples(asked.num_sample_generations)
    if not messages:  # all are marked bad
        logger.warning("No answer of the %s rows is marked good, so the model writes none.", chats.sampled_split)
        return None
    return Samples(chats.sampled_split, messages, rows, template, asked.max_new_tokens)


class Answers(Objective):
    """The tokens of the answers. The loss is TRL's, in pieces that never hold all logits."""

    kind: type[Any] = AutoModelForCausalLM
    METRICS: tuple[str, ...] = ("num_tokens", "loss", "perplexity", "answer_token_accuracy")
    sums_rows = False  # whether `total` is the loss of a training, also where TRL has one

    def __init__(self, pad_token_id: int, dtype: torch.dtype, padded: bool) -> None:
        self.pad_token_id = pad_token_id
        self.dtype = dtype
        self.padded = padded

    def prepare(self, model: nn.Module, padded: bool) -> None:
        """Without TRL, whose trainer would prepare the model."""
        score_labels(without_adapter(model))

    def collator(self, evaluating: bool) -> Collator:
        if not (self.padded or evaluating):
            return JoinRows()
        return PadToLongest(self.pad_token_id, "right", with_row_numbers=evaluating)

    def total(self, model: nn.Module, inputs: Batch) -> torch.Tensor:
        """The summed loss of a micro-batch, a scalar. The Trainer counts `labels` of the global batch to divide by."""
        losses: torch.Tensor = -model(**inputs, use_cache=False, fused_lm_head=True).log_probs
        return losses.sum()

    def measure(self, model: nn.Module, inputs: Batch) -> tuple[torch.Tensor, ...]:
        """The summed loss, the tokens that count and the right ones."""
        outputs = model(**inputs, fused_lm_head=True)
        return -outputs.log_probs.float().sum(-1), outputs.label_mask.sum(-1), outputs.is_top1.sum(-1)

    def predictions(self, dataset: Dataset, results: Results) -> Iterator[dict[str, Any]]:
        for loss, tokens, right in zip(*(each.tolist() for each in results), strict=True):
            yield {"loss": loss / max(tokens, 1), "num_tokens": tokens, "num_right": right}

    def breakdown(self, dataset: Dataset, results: Results, scripts: Scripts = None, draws: int = 0) -> Breakdown:
        scorer, facts = answers(*results), row_facts(dataset, scripts)
        return break_down("answers", facts, scorer, lower_is_better=True, draws=draws)

    def metrics(self, found: Breakdown) -> dict[str, Any]:
        return block_of(found, _answer_metrics)

    def flatten(self, block: dict[str, Any]) -> dict[str, float]:
        return {name: block[name] for name in self.METRICS if name != "num_tokens"}


def score_labels(model: Any) -> None:
    """Let a causal model give, without gradients, what TRL's `add_fused_lm_head` (1.16) lets it give with them.

    The backbone reads a batch once. The model's own forward then makes logits of some tokens after others.
    """
    own, backbone = model.forward, model.base_model

    def forward(*args: Any, labels: Any = None, fused_lm_head: bool = False, **inputs: Any) -> Any:
        if not fused_lm_head:
            return own(*args, labels=labels, **inputs)
        read, read_batch = backbone(*args, **inputs, use_cache=False), backbone.forward
        hidden, next_ids = read.last_hidden_state[:, :-1], labels[:, 1:]
        mask = next_ids != IGNORED_LABEL
        log_probs, is_top1 = torch.zeros_like(next_ids, dtype=torch.float32), torch.zeros_like(mask)
        backbone.forward = lambda *_, **__: read
        for places in (piece.unbind(1) for piece in mask.nonzero().split(_SCORED_AT_ONCE)):
            read.last_hidden_state, right = hidden[places][None], next_ids[places]
            logits = own(*args, **inputs, use_cache=False).logits[0].float()
            log_probs[places] = logits.log_softmax(-1).gather(-1, right[:, None])[:, 0]
            is_top1[places] = logits.argmax(-1) == right
        backbone.forward = read_batch
        return SimpleNamespace(log_probs=log_probs, is_top1=is_top1, label_mask=mask)

    model.forward = forward


def _answer_metrics(group: Group) -> dict[str, float]:
    """The tokens that count, loss (nats a token), its exponential and accuracy: NaN without a token."""
    count = group.counts["num_tokens"]
    loss, accuracy = (group.scores[name].value if count else math.nan for name in ANSWER_SCORES)
    with np.errstate(over="ignore"):  # infinite where Python's own exp would fail
        perplexity = float(np.exp(loss))
    return {"num_tokens": count, "loss": loss, "perplexity": perplexity, "answer_token_accuracy": accuracy}


def compute_dtype(args: Args) -> torch.dtype:
    """The type in which activations are computed."""
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if args.fp16 else torch.float32


TextPlan = RunPlan[CausalTextArguments, Args]


class CausalText(RawText[CausalTextArguments, Args]):
    """A model continues texts, which are read as they are written."""

    arguments = (LlamaModelArguments, CausalTextArguments, Args)
    packages = ("trl",)
    name = "clm"
    head = "ForCausalLM"
    kept_apart = task_models.PACKED_MODELS, task_models.PACKED_ATTENTION

    def read_config(self, args: ModelArguments) -> PreTrainedConfig:
        return task_models.load_causal_config(args)

    def check(self, plan: TextPlan) -> list[Problem]:
        return super().check(plan) + problems_of(task_models.check_causal, plan.model, plan.model_config)

    def load_model(self, plan: TextPlan, args: Args, rows: TextRows, reads_weights: bool) -> Model:
        tokenizer = rows.cutter.tokenizer
        ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        return task_models.load_causal(plan.model, tokenizer, compute_dtype(args), ends, reads_weights)

    def objective(
        self, args: Args, config: PreTrainedConfig, tokenizer: Tokenizer, padded: bool, rows: TextRows | None
    ) -> Objective:
        assert tokenizer.pad_token_id is not None
        return ContinuedTokens(tokenizer.pad_token_id, compute_dtype(args), padded)

    def can_evaluate(self, config: Mapping[str, Any]) -> bool:
        return continues_texts(config.get("architectures"))


class ContinuedTokens(GuessedTokens, Answers):
    """All tokens of a document but its first. The loss is that of `Answers`."""

    def measure(self, model: nn.Module, inputs: Batch) -> tuple[torch.Tensor, ...]:
        return Answers.measure(self, model, inputs)[:2]
