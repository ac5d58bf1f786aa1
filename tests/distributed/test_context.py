"""Tokens of a row over several ranks: which rank has which, that they compute what one does, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, Gemma2Config, LlamaConfig, PreTrainedConfig

from indictune.config.plan import Axes, Launch
from indictune.data.collation import IGNORED_LABEL, JoinRows, PadToLongest, Row
from indictune.distributed.context import PART, OwnTokens, Part, check_context
from indictune.distributed.parallelism import Parallelism
from indictune.models.unpadded import CAUSAL
from indictune.planning.memory import micro_batch_tokens
from tests.distributed import token_sharing
from tests.plans import codes, plan_of
from tests.ranks.launching import start, torchrun

ROUNDING = 1e-5


@pytest.mark.parametrize(("tokens", "ranks"), [(16, 2), (17, 2), (23, 3), (3, 3)])
def test_each_token_is_of_one_rank(tokens: int, ranks: int) -> None:
    parts = [Part((0, tokens), rank, ranks) for rank in range(ranks)]
    owned = [token for part in parts for piece in part.pieces_of(part.rank) for token in piece]
    assert sorted(owned) == list(range(tokens))
    counts = [sum(count for count, _ in part.seen) for part in parts]
    assert max(counts) == parts[0].most_tokens <= min(counts) + 2


def test_each_rank_computes_as_much() -> None:
    """Pairs of a token and one that it sees."""

    def pairs(part: Part) -> int:
        return sum(count * len(seen) - count * (count - 1) // 2 for count, seen in part.seen)

    assert len({pairs(Part((0, 64), rank, 4)) for rank in range(4)}) == 1


def test_a_token_sees_its_document_up_to_itself() -> None:
    first, second = (Part((0, 3, 8), rank, 2) for rank in range(2))  # pieces: 0-1, 2-3, 4-5, 6-7
    assert first.seen == [(2, range(2)), (2, range(3, 8))]
    assert second.seen == [(1, range(3)), (1, range(3, 4)), (2, range(3, 6))]


def rows(*lengths: int) -> list[Row]:
    """Tokens count from 10, 20, ..."""
    starts = range(10, 10 * len(lengths) + 1, 10)
    numbered = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    return [
        {"input_ids": each, "labels": each, "seq_lengths": np.array([len(each)]), "row": number}
        for number, each in enumerate(numbered)
    ]


def test_labels_are_shifted_before_rows_are_split() -> None:
    first, second = (OwnTokens(JoinRows(), rank, 2)(rows(3, 5)) for rank in range(2))
    assert first["input_ids"].tolist() == [[10, 11, 23, 24]]
    assert first["position_ids"].tolist() == [[0, 1, 3, 4]]
    assert first["shift_labels"].tolist() == [[11, 12, 24, IGNORED_LABEL]]
    assert second["input_ids"].tolist() == [[12, 20, 21, 22]]
    assert second["shift_labels"].tolist() == [[20, 21, 22, 23]]
    assert first[PART].boundaries == second[PART].boundaries == (0, 3, 8)


def test_evaluated_rows_keep_their_numbers() -> None:
    batch = OwnTokens(PadToLongest(0, "right", with_row_numbers=True), 1, 2)(rows(4, 2))
    assert batch["row_numbers"].tolist() == [0, 1]
    assert batch["input_ids"].tolist() == [[11, 12], [21, 0]]
    assert batch["position_ids"].tolist() == [[1, 2]] * 2
    assert batch["shift_labels"].tolist() == [[12, 13], [IGNORED_LABEL] * 2]


def test_no_rank_is_without_a_token() -> None:
    batches = [OwnTokens(JoinRows(), rank, 4)(rows(2)) for rank in range(4)]
    assert [each["input_ids"].shape for each in batches] == [(1, 1)] * 4
    labels = torch.cat([each["shift_labels"][0] for each in batches])
    assert sorted(labels.tolist()) == [IGNORED_LABEL] * 3 + [11]


def test_ranks_of_a_group_have_different_parts_of_the_same_rows() -> None:
    launches = [Launch("fsdp2_cp", 4, 4, rank, axes=Axes(context=2, is_sharded=True)) for rank in range(4)]
    ranks: list[Any] = [SimpleNamespace(context=True, launch=each) for each in launches]
    collators = [Parallelism.own_tokens(each, JoinRows()) for each in ranks]
    assert [vars(each)["rank"] for each in collators] == [0, 1, 0, 1]
    assert [each.data_rank for each in launches] == [0, 0, 1, 1]


def compared(ranks: int, *models: str, **variables: str) -> list[dict[str, Any]]:
    """What the first rank of the script prints."""
    result = start([*torchrun(ranks), "tests/distributed/token_sharing.py", *models], variables, timeout_s=120)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


@pytest.mark.more
@pytest.mark.parametrize(
    ("ranks", "models"), [(3, ["llama", "mistral"]), pytest.param(2, [*CAUSAL], marks=pytest.mark.slow)]
)
def test_ranks_compute_what_one_process_does(ranks: int, models: list[str]) -> None:
    """Log-probabilities and gradients of joined and padded rows; of Mistral, with a sliding window."""
    lines = compared(ranks, *models)
    assert len(lines) == 2 * len(models)
    assert all(each["parameters"] > 10 for each in lines)
    assert max(max(each["log_probs"], each["gradients"]) for each in lines) < ROUNDING, lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "differs"),
    [
        (token_sharing.unsummed_gradients, "gradients"),
        (token_sharing.one_document, "log_probs"),
        (token_sharing.labels_shifted_after, "log_probs"),
    ],
)
def test_the_comparison_sees_a_broken_split(mutant: Callable[[], None], differs: str) -> None:
    joined, _ = compared(2, "llama", MUTANT=mutant.__name__)
    assert joined[differs] > 1000 * ROUNDING


def found(config: PreTrainedConfig, head: str = "ForCausalLM", context: int = 2, **values: Any) -> list[Any]:
    """Code and flag of the problems of a model under context parallelism."""
    training = {name: values.pop(name) for name in ("torch_compile",) if name in values}
    launch = Launch("fsdp2_cp", 2, 2, axes=Axes(context=context, is_sharded=True))
    plan = plan_of(training=training, model=values, launch=launch)
    return codes(check_context(replace(plan, model_config=config, head=head)))


def test_models_and_flags_that_are_refused() -> None:
    of_model = [("not-under-context", "--model_name_or_path")]
    assert found(LlamaConfig()) == []
    assert found(BertConfig(), "ForSequenceClassification") == of_model
    assert found(BertConfig(), "ForSequenceClassification", context=1) == []
    assert found(Gemma2Config()) == of_model  # caps its scores
    assert found(LlamaConfig(), attn_implementation="eager") == [("not-under-context", "--attn_implementation")]
    assert found(LlamaConfig(), torch_compile=True) == [("not-under-context", "--torch_compile")]


def test_a_process_has_its_part_of_a_micro_batch() -> None:
    launch = Launch("fsdp2_cp", 2, 2, axes=Axes(context=2, is_sharded=True))
    plan = plan_of({"per_device_train_batch_size": 3}, launch=launch)
    assert micro_batch_tokens(plan, longest=81) == 122
