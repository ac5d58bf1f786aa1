"""Which rows form which batch on which rank."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indictune.data.batching import NO_ROW, EvaluationBatches, TrainingBatches, split_evenly

MicroBatches = list[list[int]]

worlds = st.integers(1, 4)


def training(
    rows: int, batch: int, accumulation: int, world: int, epoch: int = 0, seed: int = 7
) -> list[MicroBatches]:
    """The micro-batches of each rank in one epoch."""
    ranks = []
    for rank in range(world):
        batches = TrainingBatches(rows, batch, accumulation, rank, world, seed)
        batches.set_epoch(epoch)
        ranks.append(list(batches))
        assert len(ranks[-1]) == len(batches)
    return ranks


def rows_of_step(ranks: list[MicroBatches], step: int, accumulation: int) -> set[int]:
    mine = [rank[step * accumulation : (step + 1) * accumulation] for rank in ranks]
    return {row for micro_batches in mine for micro_batch in micro_batches for row in micro_batch} - {NO_ROW}


@pytest.mark.parametrize(
    ("rows", "parts", "expected"),
    [
        ([5, 6, 7], 1, [[5, 6, 7]]),
        ([5, 6, 7], 2, [[5, 6], [7]]),
        ([5, 6, 7, 8], 2, [[5, 6], [7, 8]]),
        ([5, 6, 7, 8, 9], 3, [[5, 6], [7, 8], [9]]),
        ([5], 3, [[5], [NO_ROW], [NO_ROW]]),
    ],
)
def test_rows_are_cut_evenly(rows: list[int], parts: int, expected: MicroBatches) -> None:
    assert split_evenly(rows, parts) == expected


class TestTrainingBatches:
    @given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 3), worlds)
    def test_each_row_comes_exactly_once_an_epoch(self, rows: int, batch: int, accumulation: int, world: int) -> None:
        ranks = training(rows, batch, accumulation, world)
        counts = Counter(row for rank in ranks for micro_batch in rank for row in micro_batch)
        del counts[NO_ROW]
        assert counts == dict.fromkeys(range(rows), 1)

    @given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 3), worlds)
    def test_every_rank_takes_part_in_every_micro_batch(
        self, rows: int, batch: int, accumulation: int, world: int
    ) -> None:
        ranks = training(rows, batch, accumulation, world)
        steps = -(-rows // batch)
        assert [len(rank) for rank in ranks] == [steps * accumulation] * world
        assert all(micro_batch for rank in ranks for micro_batch in rank)

    @given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 3), worlds, st.integers(0, 3))
    def test_a_global_batch_holds_the_same_rows_at_any_split(
        self, rows: int, batch: int, accumulation: int, world: int, epoch: int
    ) -> None:
        whole = training(rows, batch, 1, 1, epoch)
        ranks = training(rows, batch, accumulation, world, epoch)
        for step in range(-(-rows // batch)):
            assert rows_of_step(ranks, step, accumulation) == rows_of_step(whole, step, 1)

    @given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 3), worlds)
    def test_a_micro_batch_without_a_row_stands_only_where_rows_run_out(
        self, rows: int, batch: int, accumulation: int, world: int
    ) -> None:
        ranks = training(rows, batch, accumulation, world)
        for step in range(-(-rows // batch)):
            here = [mb for rank in ranks for mb in rank[step * accumulation : (step + 1) * accumulation]]
            rows_here = min(batch, rows - step * batch)
            assert here.count([NO_ROW]) == max(0, len(here) - rows_here)
            assert all(NO_ROW not in micro_batch or micro_batch == [NO_ROW] for micro_batch in here)
            sizes = [len(micro_batch) for micro_batch in here if micro_batch != [NO_ROW]]
            assert max(sizes) - min(sizes) <= 1

    @given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 3), worlds, st.integers(0, 2))
    def test_the_micro_batches_of_a_step_are_those_that_the_ranks_get(
        self, rows: int, batch: int, accumulation: int, world: int, epoch: int
    ) -> None:
        ranks = training(rows, batch, accumulation, world, epoch)
        anyone = TrainingBatches(rows, batch, accumulation, 0, world, 7)
        for step in range(anyone.steps_per_epoch):
            dealt = [mb for rank in ranks for mb in rank[step * accumulation : (step + 1) * accumulation]]
            assert sorted(anyone.micro_batches(epoch, step)) == sorted(dealt)

    def test_a_ragged_last_batch_of_two_ranks_with_accumulation_two(self) -> None:
        # 9 rows in global batches of 8: the last one has one row for four micro-batches.
        first, second = training(rows=9, batch=8, accumulation=2, world=2)
        assert [len(micro_batch) for micro_batch in first + second] == [2, 2, 1, 1] * 2
        assert [first[3], *second[2:]] == [[NO_ROW]] * 3
        assert first[2] != [NO_ROW]

    def test_each_epoch_has_its_own_order_and_gives_it_again(self) -> None:
        (epoch_0,), (epoch_1,), (again,) = (training(50, 10, 1, 1, epoch) for epoch in (0, 1, 0))
        assert epoch_0 != epoch_1
        assert epoch_0 == again
        assert sorted(row for micro_batch in epoch_1 for row in micro_batch) == list(range(50))

    def test_the_order_is_a_shuffle_of_the_seed(self) -> None:
        (seed_7,), (seed_8,) = training(50, 50, 1, 1, seed=7), training(50, 50, 1, 1, seed=8)
        assert seed_7 != seed_8
        assert seed_7 != [list(range(50))]

    def test_set_epoch_counts_from_the_next_pass(self) -> None:
        batches = TrainingBatches(50, 10, 1, 0, 1, seed=7)
        first = list(batches)
        assert list(batches) == first
        batches.set_epoch(1)
        assert [list(batches)] == training(50, 10, 1, 1, epoch=1)

    def test_a_look_at_another_epoch_does_not_disturb_the_present_one(self) -> None:
        batches = TrainingBatches(50, 10, 1, 0, 1, seed=7)
        passing = iter(batches)
        begun = next(passing)
        batches.micro_batches(epoch=3, step=0)
        assert [[begun, *passing]] == training(50, 10, 1, 1)


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
