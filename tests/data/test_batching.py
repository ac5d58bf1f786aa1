"""Which rows form which batch on which rank."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import SkipBatchSampler
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from transformers import Trainer, TrainingArguments

from indictune.data import batching
from indictune.data.batching import (
    NO_ROW,
    EvaluationBatches,
    TrainingBatches,
    deal_by_length,
    deal_by_tokens,
    deal_epoch,
    lengths_of,
    smallest_accumulation,
)
from indictune.data.collation import IndexedRows, PadToLongest, PairRows

MicroBatches = list[list[int]]

worlds = st.integers(1, 4)
lengths_of_rows = st.lists(st.integers(1, 90), min_size=1, max_size=60)
cut = (lengths_of_rows, st.integers(1, 20), st.integers(1, 3), worlds, st.booleans())


def training(
    lengths: list[int], batch: int, accumulation: int, world: int, padded: bool = False, epoch: int = 0, seed: int = 7
) -> list[MicroBatches]:
    """The micro-batches of each rank in one epoch."""
    ranks = []
    for rank in range(world):
        batches = TrainingBatches(lengths, batch, accumulation, rank, world, seed, padded)
        batches.set_epoch(epoch)
        ranks.append(list(batches))
        assert len(ranks[-1]) == len(batches)
    return ranks


def of_step(ranks: list[MicroBatches], step: int, accumulation: int) -> MicroBatches:
    return [micro_batch for rank in ranks for micro_batch in rank[step * accumulation : (step + 1) * accumulation]]


def rows_of_step(ranks: list[MicroBatches], step: int, accumulation: int) -> set[int]:
    return {row for micro_batch in of_step(ranks, step, accumulation) for row in micro_batch} - {NO_ROW}


def groups(part_of: torch.Tensor, lengths: list[int]) -> list[list[int]]:
    """The lengths that each part got, of one batch."""
    return [
        [length for length, mine in zip(lengths, part_of.tolist(), strict=True) if mine == part] for part in range(4)
    ]


class TestDealing:
    def test_by_tokens_the_longest_goes_first_and_each_to_the_lightest_part(self) -> None:
        lengths = [[9, 7, 6, 5, 4], [8, 1, 1, 1, 1]]
        part_of = deal_by_tokens(torch.tensor(lengths), parts=2)
        assert groups(part_of[0], lengths[0])[:2] == [[9, 5], [7, 6, 4]]
        assert groups(part_of[1], lengths[1])[:2] == [[8], [1, 1, 1, 1]]

    def test_by_length_each_part_is_a_run_and_the_largest_is_as_small_as_can_be(self) -> None:
        lengths = [9, 8, 3, 3, 3, 3, 2, 2]
        part_of = deal_by_length(torch.tensor([lengths]), parts=3)[0]
        assert groups(part_of, lengths)[:3] == [[9], [8, 3], [3, 3, 3, 2, 2]]
        part_of = deal_by_length(torch.tensor([lengths]), parts=4)[0]
        assert groups(part_of, lengths) == [[9], [8], [3, 3, 3], [3, 2, 2]]

    @given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(1, 4))
    def test_by_length_no_other_cut_into_runs_needs_fewer_tokens(self, lengths: list[int], parts: int) -> None:
        lengths.sort(reverse=True)
        part_of = deal_by_length(torch.tensor([lengths]), parts)[0].tolist()
        assert part_of == sorted(part_of)
        places = itertools.combinations_with_replacement(range(len(lengths) + 1), parts - 1)
        best = min(self.cost_of_runs(lengths, [0, *cuts, len(lengths)]) for cuts in places)
        ends = [part_of.index(part) if part in part_of else None for part in range(parts)]
        assert self.cost_of_runs(lengths, [*(end for end in ends if end is not None), len(lengths)]) == best

    @staticmethod
    def cost_of_runs(lengths: list[int], cuts: list[int]) -> int:
        return max((end - start) * lengths[start] for start, end in itertools.pairwise(cuts) if end > start)

    @given(st.lists(st.integers(1, 90), min_size=1, max_size=60), st.integers(1, 8))
    def test_by_tokens_no_part_has_more_than_its_share_and_one_row(self, lengths: list[int], parts: int) -> None:
        lengths.sort(reverse=True)
        tokens = torch.zeros(parts, dtype=torch.int64)
        tokens.scatter_add_(0, deal_by_tokens(torch.tensor([lengths]), parts)[0], torch.tensor(lengths))
        assert tokens.sum() == sum(lengths)
        assert tokens.max() <= sum(lengths) / parts + (1 - 1 / parts) * lengths[0] + 1e-9

    @given(lengths_of_rows, st.integers(1, 20), st.integers(90, 300), worlds, st.booleans(), st.data())
    def test_the_fewest_accumulation_steps_hold_for_the_whole_run(
        self, lengths: list[int], batch: int, most: int, world: int, padded: bool, data: st.DataObject
    ) -> None:
        """Of which the last epoch may be a part."""
        rows = torch.tensor(lengths)
        steps = data.draw(st.integers(1, 3 * -(-len(lengths) // batch)))

        def largest(micro_batches: int) -> int:
            deals = [deal_epoch(rows, batch, micro_batches * world, 7, epoch, padded).costs for epoch in range(3)]
            return int(torch.cat(deals)[: steps * micro_batches * world].max())

        found = smallest_accumulation(rows, batch, world, most, 7, steps, padded)
        assert largest(found) <= most
        assert found == 1 or largest(found - 1) > most


@pytest.mark.parametrize("rows_at_once", [1, 8, 20, 24, 30])
def test_an_epoch_is_dealt_in_pieces_as_at_once(monkeypatch: pytest.MonkeyPatch, rows_at_once: int) -> None:
    lengths = torch.randint(1, 30, (43,), generator=torch.Generator().manual_seed(0))
    whole = deal_epoch(lengths, 8, 3, 7, 1, padded=False)
    monkeypatch.setattr(batching, "ROWS_AT_ONCE", rows_at_once)
    pieces = deal_epoch(lengths, 8, 3, 7, 1, padded=False)
    for name in ("rows", "ends", "costs"):
        assert torch.equal(getattr(pieces, name), getattr(whole, name))


class TestTrainingBatches:
    @given(*cut)
    def test_each_row_comes_exactly_once_an_epoch(
        self, lengths: list[int], batch: int, accumulation: int, world: int, padded: bool
    ) -> None:
        ranks = training(lengths, batch, accumulation, world, padded)
        counts = Counter(row for rank in ranks for micro_batch in rank for row in micro_batch)
        del counts[NO_ROW]
        assert counts == dict.fromkeys(range(len(lengths)), 1)

    @given(*cut)
    def test_every_rank_takes_part_in_every_micro_batch(
        self, lengths: list[int], batch: int, accumulation: int, world: int, padded: bool
    ) -> None:
        ranks = training(lengths, batch, accumulation, world, padded)
        steps = -(-len(lengths) // batch)
        assert [len(rank) for rank in ranks] == [steps * accumulation] * world
        assert all(micro_batch for rank in ranks for micro_batch in rank)

    @given(*cut, st.integers(0, 3))
    def test_a_global_batch_holds_the_rows_of_the_plain_recipe_at_any_split(
        self, lengths: list[int], batch: int, accumulation: int, world: int, padded: bool, epoch: int
    ) -> None:
        shuffle = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(7 + epoch)).tolist()
        ranks = training(lengths, batch, accumulation, world, padded, epoch)
        for step in range(-(-len(lengths) // batch)):
            assert rows_of_step(ranks, step, accumulation) == set(shuffle[step * batch : (step + 1) * batch])

    @given(*cut, st.integers(0, 59))
    def test_a_pass_that_goes_on_after_any_step_holds_the_rest_of_the_shuffle_each_row_once(
        self, lengths: list[int], batch: int, accumulation: int, world: int, padded: bool, step: int
    ) -> None:
        """At any split, as the run goes on: by what accelerate (1.15) puts around the batches."""
        step %= -(-len(lengths) // batch)
        shuffle = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(7)).tolist()
        left = Counter[int]()
        for rank in range(world):
            batches = TrainingBatches(lengths, batch, accumulation, rank, world, 7, padded)
            for micro_batch in SkipBatchSampler(batches, skip_batches=step * batches.accumulation_steps):
                left.update(micro_batch)
        del left[NO_ROW]
        assert left == dict.fromkeys(shuffle[step * batch :], 1)

    @given(*cut)
    def test_a_micro_batch_without_a_row_holds_nothing_else(
        self, lengths: list[int], batch: int, accumulation: int, world: int, padded: bool
    ) -> None:
        ranks = training(lengths, batch, accumulation, world, padded)
        for step in range(-(-len(lengths) // batch)):
            here = of_step(ranks, step, accumulation)
            assert all(NO_ROW not in micro_batch or micro_batch == [NO_ROW] for micro_batch in here)
            rows_here = min(batch, len(lengths) - step * batch)
            if not padded:
                assert here.count([NO_ROW]) == max(0, len(here) - rows_here)

    @given(*cut)
    def test_the_longest_row_of_a_micro_batch_comes_first(
        self, lengths: list[int], batch: int, accumulation: int, world: int, padded: bool
    ) -> None:
        for rank in training(lengths, batch, accumulation, world, padded):
            for micro_batch in rank:
                here = [lengths[row] for row in micro_batch if row != NO_ROW]
                assert here == sorted(here, reverse=True)

    @given(*cut, st.integers(0, 2))
    def test_the_micro_batches_of_a_step_are_those_that_the_ranks_get(
        self, lengths: list[int], batch: int, accumulation: int, world: int, padded: bool, epoch: int
    ) -> None:
        ranks = training(lengths, batch, accumulation, world, padded, epoch)
        anyone = TrainingBatches(lengths, batch, accumulation, 0, world, 7, padded)
        for step in range(anyone.steps_per_epoch):
            assert sorted(anyone.micro_batches(epoch, step)) == sorted(of_step(ranks, step, accumulation))

    @given(*cut, st.integers(0, 2))
    def test_a_step_is_counted_with_its_padding(
        self, lengths: list[int], batch: int, accumulation: int, world: int, padded: bool, epoch: int
    ) -> None:
        batches = TrainingBatches(lengths, batch, accumulation, 0, world, 7, padded)
        for step in range(batches.steps_per_epoch):
            real = [[lengths[row] for row in mb if row != NO_ROW] for mb in batches.micro_batches(epoch, step)]
            tokens = sum(map(sum, real))
            with_padding = sum(len(rows) * max(rows, default=0) for rows in real) if padded else tokens
            assert batches.counts(epoch, step) == (sum(map(len, real)), tokens, with_padding)

    def test_a_ragged_last_batch_of_two_ranks_with_accumulation_two(self) -> None:
        # 9 rows in global batches of 8: the last one has one row for four micro-batches.
        first, second = training([1] * 9, batch=8, accumulation=2, world=2)
        assert [len(micro_batch) for micro_batch in first + second] == [2, 2, 1, 1] * 2
        assert [first[3], *second[2:]] == [[NO_ROW]] * 3
        assert first[2] != [NO_ROW]

    def test_each_epoch_has_its_own_order_and_gives_it_again(self) -> None:
        (epoch_0,), (epoch_1,), (again,) = (training([1] * 50, 10, 1, 1, epoch=epoch) for epoch in (0, 1, 0))
        assert epoch_0 != epoch_1
        assert epoch_0 == again
        assert sorted(row for micro_batch in epoch_1 for row in micro_batch) == list(range(50))

    def test_the_order_is_a_shuffle_of_the_seed(self) -> None:
        (seed_7,), (seed_8,) = training([1] * 50, 50, 1, 1, seed=7), training([1] * 50, 50, 1, 1, seed=8)
        assert seed_7 != seed_8
        assert seed_7 != [list(range(50))]

    def test_set_epoch_counts_from_the_next_pass(self) -> None:
        batches = TrainingBatches([1] * 50, 10, 1, 0, 1, seed=7)
        first = list(batches)
        assert list(batches) == first
        batches.set_epoch(1)
        assert [list(batches)] == training([1] * 50, 10, 1, 1, epoch=1)

    def test_a_look_at_another_epoch_does_not_disturb_the_present_one(self) -> None:
        batches = TrainingBatches([1] * 50, 10, 1, 0, 1, seed=7)
        passing = iter(batches)
        begun = next(passing)
        batches.micro_batches(epoch=3, step=0)
        assert [[begun, *passing]] == training([1] * 50, 10, 1, 1)


class TestEvaluationBatches:
    @staticmethod
    def ranks(lengths: list[int], batch: int, world: int) -> list[MicroBatches]:
        samplers = [EvaluationBatches(lengths, batch, rank, world) for rank in range(world)]
        ranks = [list(sampler) for sampler in samplers]
        assert [len(sampler) for sampler in samplers] == [len(rank) for rank in ranks]
        return ranks

    @given(st.lists(st.integers(1, 9), min_size=1, max_size=60), st.integers(1, 8), worlds)
    def test_each_row_comes_once_over_all_ranks(self, lengths: list[int], batch: int, world: int) -> None:
        counts = Counter(row for rank in self.ranks(lengths, batch, world) for mb in rank for row in mb)
        dummies = counts.pop(NO_ROW, 0)
        assert counts == dict.fromkeys(range(len(lengths)), 1)
        assert dummies < world  # only in the last step, and there less than one a rank

    @given(st.lists(st.integers(1, 9), min_size=1, max_size=60), st.integers(1, 8), worlds)
    def test_all_ranks_have_the_same_number_of_rows_at_each_step(
        self, lengths: list[int], batch: int, world: int
    ) -> None:
        ranks = self.ranks(lengths, batch, world)
        for step in zip(*ranks, strict=True):
            sizes = {len(rows) for rows in step}
            assert len(sizes) == 1
            assert 1 <= sizes.pop() <= batch

    def test_rows_of_like_length_come_together_longest_first(self) -> None:
        assert self.ranks([3, 9, 5, 9, 1], 2, 1) == [[[1, 3], [2, 0], [4]]]

    def test_two_ranks_share_each_step(self) -> None:
        # Longest first: rows 4, 3, 2, 1, 0.
        assert self.ranks([1, 2, 3, 4, 5], 2, 2) == [[[4, 3], [0]], [[2, 1], [NO_ROW]]]

    def test_a_last_step_is_no_larger_than_its_rows_need(self) -> None:
        assert self.ranks([1] * 6, 4, 2) == [[[0, 1, 2]], [[3, 4, 5]]]
        assert self.ranks([1] * 7, 4, 2) == [[[0, 1, 2, 3]], [[4, 5, 6, NO_ROW]]]


@pytest.mark.parametrize(("seed", "data_seed"), [(42, None), (7, 3)])
def test_global_batches_are_those_of_transformers_trainer(tmp_path: Path, seed: int, data_seed: int | None) -> None:
    """The plain shuffled recipe, which the loss curve is compared with."""
    args = TrainingArguments(
        str(tmp_path),
        seed=seed,
        data_seed=data_seed,
        per_device_train_batch_size=4,
        remove_unused_columns=False,
        use_cpu=True,
        report_to="none",
    )
    rows = Dataset.from_dict({"input_ids": [[number] for number in range(13)]})
    loader: Any = Trainer(torch.nn.Linear(1, 1), args, train_dataset=rows).get_train_dataloader()
    ours = TrainingBatches([1] * 13, 4, 1, 0, 1, seed if data_seed is None else data_seed)
    orders = []
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        ours.epoch = epoch
        plain = [set(batch["input_ids"][:, 0].tolist()) for batch in loader]
        assert [set(batch) - {NO_ROW} for batch in ours] == plain
        orders.append(plain)
    assert orders[0] != orders[1]


def test_pairs_that_are_padded_keep_within_the_limit_of_tokens() -> None:
    """Both conversations of each pair are padded to the longest one of the micro-batch."""
    sides = [(3, 9), (8, 2), (5, 5), (1, 7), (6, 4)]
    one_token = {"input_ids": 1, "labels": 1}
    rows = [
        {name: [value] * (a + b) for name, value in one_token.items()} | {"length": a + b, "chosen_length": a}
        for a, b in sides
    ]
    dataset = Dataset.from_list(rows)
    lengths, tokens = lengths_of(dataset, padded=True), lengths_of(dataset)
    assert (lengths.tolist(), tokens.tolist()) == ([18, 16, 10, 14, 12], [12, 10, 10, 8, 10])
    count = smallest_accumulation(lengths, 5, 1, max_tokens=36, seed=0, steps=1, padded=True)
    batches = TrainingBatches(lengths, 5, count, 0, 1, seed=0, tokens=tokens)
    read, collate = IndexedRows(dataset), PairRows(PadToLongest(0, "right"))
    sizes = [collate([read[row] for row in each])["input_ids"].numel() for each in batches]
    assert max(sizes) <= 36
    assert batches.counts(epoch=0, step=0) == (5, 50, sum(sizes))
