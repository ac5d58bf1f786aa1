"""Raw text for a causal language model: it predicts each token of a document from those before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from indictune.config.arguments import CausalTextArguments, ModelArguments
from indictune.config.chat_arguments import LlamaModelArguments
from indictune.config.chat_arguments import LlamaTrainingArguments as Args
from indictune.config.plan import RunPlan
from indictune.errors import Problem, problems_of
from indictune.models.adapters import continues_texts
from indictune.models.load import Model
from indictune.models.task_models import PACKED_ATTENTION, PACKED_MODELS, check_causal, load_causal, load_causal_config
from indictune.tasks.chat import Answers, compute_dtype
from indictune.tasks.protocol import Batch, Objective
from indictune.tasks.raw_text import GuessedTokens, RawText, TextRows

Plan = RunPlan[CausalTextArguments, Args]


class CausalText(RawText[CausalTextArguments, Args]):
    """A model continues texts, which are read as they are written."""

    arguments = (LlamaModelArguments, CausalTextArguments, Args)
    name = "clm"
    head = "ForCausalLM"
    kept_apart = PACKED_MODELS, PACKED_ATTENTION

    def read_config(self, args: ModelArguments) -> PreTrainedConfig:
        return load_causal_config(args)

    def check(self, plan: Plan) -> list[Problem]:
        assert plan.model_config is not None
        return super().check(plan) + problems_of(check_causal, plan.model, plan.model_config)

    def load_model(self, plan: Plan, args: Args, rows: TextRows, reads_weights: bool) -> Model:
        tokenizer = rows.cutter.tokenizer
        ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        return load_causal(plan.model, tokenizer, compute_dtype(args), ends, reads_weights)

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
