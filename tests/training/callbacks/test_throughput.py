"""Rows and tokens a second, and the share of padding."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from transformers import TrainerControl, TrainerState

from indictune.config.arguments import IndicTrainingArguments
from indictune.data.batching import TrainingBatches
from indictune.training.callbacks.every_step import Throughput

LENGTHS = [3, 5, 7, 11, 13]


@pytest.fixture
def args(tmp_path: Path) -> IndicTrainingArguments:
    return IndicTrainingArguments(output_dir=str(tmp_path), use_cpu=True)


def run_steps(throughput: Throughput, args: IndicTrainingArguments, first: int, last: int) -> None:
    for step in range(first, last + 1):
        throughput.on_step_end(args, TrainerState(global_step=step), TrainerControl())


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_epoch_counts_every_row_of_all_ranks_once(world_size: int, args: IndicTrainingArguments) -> None:
    throughput = Throughput(TrainingBatches(LENGTHS, 4, 2, 0, world_size, seed=1))
    run_steps(throughput, args, 1, 2)
    assert (throughput.rows, throughput.tokens) == (5, 39)
    run_steps(throughput, args, 3, 4)
    assert (throughput.rows, throughput.tokens) == (10, 78)


def test_padding_is_what_a_micro_batch_adds_to_its_shorter_rows(args: IndicTrainingArguments) -> None:
    whole = Throughput(TrainingBatches(LENGTHS, 5, 1, 0, 1, seed=1))
    run_steps(whole, args, 1, 1)
    assert whole.padding_fraction == pytest.approx(1 - 39 / (5 * 13))
    in_two = Throughput(TrainingBatches(LENGTHS, 5, 2, 0, 1, seed=1))
    run_steps(in_two, args, 1, 1)
    assert in_two.padding_fraction == pytest.approx(1 - 39 / (2 * 13 + 3 * 7))


def test_rows_that_are_joined_have_no_padding(args: IndicTrainingArguments) -> None:
    padded, joined = (
        Throughput(TrainingBatches([5, 3, 2, 2], 4, 1, 0, 1, seed=0, padded=padded)) for padded in (True, False)
    )
    for throughput in (padded, joined):
        run_steps(throughput, args, 1, 1)
    assert (padded.padding_fraction, joined.padding_fraction) == (1 - 12 / 20, 0.0)


def test_a_row_that_stands_for_nothing_is_not_counted(args: IndicTrainingArguments) -> None:
    throughput = Throughput(TrainingBatches([6], 4, 2, 0, 2, seed=1))
    run_steps(throughput, args, 1, 1)
    assert (throughput.rows, throughput.tokens, throughput.padding_fraction) == (1, 6, 0.0)


def test_a_step_of_a_later_epoch_counts_that_epochs_rows(args: IndicTrainingArguments) -> None:
    batches = TrainingBatches(LENGTHS, 2, 1, 0, 1, seed=1)
    throughput = Throughput(batches)
    run_steps(throughput, args, 5, 5)  # a resumed run begins here: step 1 of epoch 1, counted from 0
    (rows,) = batches.micro_batches(epoch=1, step=1)
    assert throughput.tokens == sum(LENGTHS[row] for row in rows)


def test_nothing_trained_has_no_padding() -> None:
    assert Throughput(TrainingBatches(LENGTHS, 5, 1, 0, 1, seed=1)).padding_fraction == 0.0


def test_a_lap_gives_the_rates_since_the_last_one(args: IndicTrainingArguments) -> None:
    throughput = Throughput(TrainingBatches(LENGTHS, 5, 1, 0, 1, seed=1))
    throughput.on_train_begin()
    began = time.perf_counter()
    run_steps(throughput, args, 1, 4)
    time.sleep(0.05)
    first = throughput.lap()
    elapsed = time.perf_counter() - began
    assert first.keys() == {"samples_per_second", "tokens_per_second"}
    assert 20 / elapsed * 0.99 <= first["samples_per_second"] <= 20 / 0.05
    assert first["tokens_per_second"] / first["samples_per_second"] == pytest.approx(39 / 5)
    time.sleep(0.05)
    assert throughput.lap() == {"samples_per_second": 0.0, "tokens_per_second": 0.0}


def test_a_later_start_counts_on(args: IndicTrainingArguments) -> None:
    first, second, whole = (Throughput(TrainingBatches(LENGTHS, 4, 2, 0, 1, seed=1)) for _ in range(3))
    first.on_train_begin()
    run_steps(first, args, 1, 3)
    counted = first.counted()
    second.on_train_begin()
    second.count_on(counted)
    assert second.lap() == {"samples_per_second": 0.0, "tokens_per_second": 0.0}
    assert second.seconds_before == counted["seconds"] > 0
    run_steps(second, args, 4, 4)
    run_steps(whole, args, 1, 4)
    assert (second.rows, second.tokens) == (whole.rows, whole.tokens)
    assert second.padding_fraction == whole.padding_fraction
    assert second.seconds_to_first_step == first.seconds_to_first_step
    second.count_on({})  # of a checkpoint that holds none
    assert second.rows == whole.rows
