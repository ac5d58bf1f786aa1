"""Following instructions: a causal language model learns the answers of conversations."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from indictune.config.arguments import ModelArguments
from indictune.config.chat_arguments import ChatDataArguments, LlamaModelArguments, LlamaTrainingArguments
from indictune.config.plan import RunPlan
from indictune.data.chat_tokens import answer_ends
from indictune.data.conversations import Conversations, ConversationSplits, load_conversations, sources_of
from indictune.data.prepare_chats import Chats, check_template, set_template, tokenise_splits
from indictune.errors import Problem, Problems, problems_of
from indictune.models.adapters import check_precision
from indictune.models.causal import check_causal, check_packing, load_causal, load_causal_config
from indictune.models.load import Model, load_tokenizer
from indictune.models.unpadded import pads_causal
from indictune.tasks.protocol import Inputs, Task, Tokens

Plan = RunPlan[ChatDataArguments, LlamaTrainingArguments]


@dataclass(frozen=True)
class ChatRows:
    """The conversations of a run.

    Attributes:
        splits: training, validation and test conversations.
        tokenizer: of the model.
        template: writes a conversation out as one text.
    """

    splits: ConversationSplits
    tokenizer: PreTrainedTokenizerBase
    template: str


@dataclass(frozen=True)
class ChatTokens(Tokens):
    """The tokenised conversations.

    Attributes:
        chats: as they were tokenised.
    """

    chats: Chats = field(kw_only=True)

    @property
    def samples(self) -> Conversations:
        """Conversations whose answers the trained model writes."""
        return self.chats.samples


class Chat(Task[ChatRows, ChatDataArguments, LlamaTrainingArguments]):
    """A model answers the last message of a conversation."""

    model_arguments = LlamaModelArguments
    data_arguments = ChatDataArguments
    training_arguments = LlamaTrainingArguments

    def read_config(self, args: ModelArguments) -> PreTrainedConfig:
        return load_causal_config(args)

    def check(self, plan: Plan) -> list[Problem]:
        assert plan.model_config is not None
        found = problems_of(check_causal, plan.model, plan.model_config)
        if plan.data.packing:
            found += problems_of(check_packing, plan.model, plan.model_config)
        return found + problems_of(check_precision, plan.model, lambda name: getattr(plan.training, name))

    def open(self, plan: Plan, problems: Problems) -> Inputs:
        sources = problems.attempt(sources_of, plan.data, problems)
        tokenizer = problems.attempt(load_tokenizer, plan.model)
        if tokenizer is not None and sources is not None:
            problems.attempt(check_template, tokenizer, plan.data, sources)
        return Inputs(tokenizer, sources)

    def read(self, plan: Plan, inputs: Inputs, problems: Problems) -> ChatRows | None:
        if inputs.sources is None:
            return None
        with problems.collecting():
            splits = load_conversations(plan.data, problems, inputs.sources)
            if inputs.tokenizer is not None:
                return ChatRows(splits, inputs.tokenizer, set_template(inputs.tokenizer, splits, plan.data))
        return None

    def tokenise(self, plan: Plan, rows: ChatRows) -> ChatTokens:
        chats: Chats = tokenise_splits(rows.splits, rows.tokenizer, rows.template, plan.data)
        notes = [*rows.splits.notes, *chats.notes]
        return ChatTokens(
            *(chats.train, chats.validation, chats.test, chats.place, chats.folder, notes, chats.summary),
            chats=chats,
        )

    def pads(self, plan: Plan) -> bool:
        assert plan.model_config is not None
        return not plan.data.packing and pads_causal(plan.model, plan.model_config)

    def load_model(self, plan: Plan, args: LlamaTrainingArguments, rows: ChatRows, reads_weights: bool) -> Model:
        ends = answer_ends(rows.tokenizer, rows.template)
        return load_causal(plan.model, rows.tokenizer, compute_dtype(args), ends, reads_weights)


def compute_dtype(args: LlamaTrainingArguments) -> torch.dtype:
    """The type in which activations are computed."""
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if args.fp16 else torch.float32
