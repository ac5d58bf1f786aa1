"""scripts/train_sentiment.py with one thing broken or taken out; the variable MUTANT says which."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import runpy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import DistributedType, PartialState
from torch.distributed.tensor import DTensor
from transformers import set_seed

from indictune.config.plan import Launch
from indictune.data.batching import NO_ROW, MicroBatch, TrainingBatches
from indictune.data.collation import IndexedRows
from indictune.distributed import fsdp, process_group, sharding
from indictune.distributed.parallelism import TENSOR
from indictune.tasks.loss import ExactLoss
from indictune.training import start
from indictune.training.callbacks.every_step import EpochShuffle, StepFlags
from indictune.training.exact_trainer import ExactTrainer


def scaled_gradients() -> None:
    """Gradients twice too large; the Trainer logs the loss that it had before."""
    backward = Accelerator.backward
    Accelerator.backward = lambda self, loss, **kwargs: backward(self, 2 * loss, **kwargs)


def scaled_loss() -> None:
    """The N-fold loss of a mean over each rank's own rows."""
    share: Callable[..., torch.Tensor] = ExactLoss.__call__
    ranks = int(os.environ["WORLD_SIZE"])

    def scaled(self: ExactLoss, *args: Any, **kwargs: Any) -> torch.Tensor:
        return ranks * share(self, *args, **kwargs)

    ExactLoss.__call__ = scaled  # type: ignore[method-assign, assignment]


def same_order_every_epoch() -> None:
    """What happens when nobody tells the sampler of the epoch."""
    EpochShuffle.on_epoch_begin = lambda self, *args, **kwargs: None  # type: ignore[method-assign]


def lost_row() -> None:
    """Rank 1 leaves out the last row of every epoch."""
    batches: Callable[[TrainingBatches], Iterator[MicroBatch]] = TrainingBatches.__iter__

    def without_last(self: TrainingBatches) -> Iterator[MicroBatch]:
        *all_but_last, last = batches(self)
        yield from all_but_last
        yield last if self.rank == 0 else last[:-1] or [NO_ROW]

    TrainingBatches.__iter__ = without_last  # type: ignore[method-assign]


MUTANTS = {mutant.__name__: mutant for mutant in (scaled_gradients, scaled_loss, same_order_every_epoch, lost_row)}


def without_mended_names() -> None:
    """ZeRO-3 as transformers leaves it."""
    sharding._forget_unused_renamings = lambda model: None


def without_borrowed_type() -> None:
    """FSDP on the CPU as accelerate leaves it: the type that the fallback sets is reset at once."""
    start = process_group.start_on_gloo

    def and_back(launch: Launch, timeout_s: int) -> dict[str, Any]:
        fields = start(launch, timeout_s)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_CPU
        return fields

    process_group.start_on_gloo = and_back


def without_chosen_blocks() -> None:
    """FSDP2 wraps what transformers names, BERT's embeddings among it."""
    fsdp.repeated_blocks = lambda model: ["BertEmbeddings", "BertLayer"]


def without_released_parameters() -> None:
    """What ZeRO-3 has begun to gather stays on its way."""
    engine_class = importlib.import_module("deepspeed").DeepSpeedEngine
    engine_class.empty_partition_cache = lambda engine: None


def without_its_code() -> None:
    """The code that transformers takes for that of a split model."""
    sharding.save_code = lambda model, folder: None


# Workarounds of upstream faults. Where one of these runs well, upstream has mended its own, and ours can go.
WITHOUT = {
    each.__name__: each
    for each in (
        without_mended_names,
        without_borrowed_type,
        without_chosen_blocks,
        without_released_parameters,
        without_its_code,
    )
}


def noted_sums() -> None:
    """DeepSpeed's collectives of sums write their names and numbers to the file of the variable NOTES."""
    comm = importlib.import_module("deepspeed.comm")

    def noted(name: str, position: int) -> None:
        collective = getattr(comm, name)

        def note(*args: Any, **kwargs: Any) -> Any:
            with open(os.environ["NOTES"], "a", encoding="ascii") as notes:
                notes.write(f"{name} {args[position].numel()}\n")
            return collective(*args, **kwargs)

        setattr(comm, name, note)

    noted("all_reduce", 0)
    noted("reduce_scatter_fn", 1)


def slow_reading() -> None:
    """Rank 1 takes 0.02 s longer to read a row."""
    read = IndexedRows.__getitem__

    def slowly(self: IndexedRows, index: int) -> Any:
        time.sleep(0.02 if torch.distributed.get_rank() == 1 else 0)
        return read(self, index)

    IndexedRows.__getitem__ = slowly  # type: ignore[method-assign]


def other_rows_in_a_group() -> None:
    """Rank 1 of a tensor group has the rows of a micro-batch in another order than rank 0."""
    batches: Callable[[TrainingBatches], Iterator[MicroBatch]] = TrainingBatches.__iter__

    def turned(self: TrainingBatches) -> Iterator[MicroBatch]:
        for first, *others in batches(self):
            yield [*others, first] if os.environ["RANK"] == "1" else [first, *others]

    TrainingBatches.__iter__ = turned  # type: ignore[method-assign]


def unsplit_weights() -> None:
    """Each rank writes digests of its part of the weights that a tensor group does not split, to a file of its own."""
    finish = ExactTrainer._finalize_training

    def and_note(self: ExactTrainer, *args: Any, **settings: Any) -> Any:
        found = {
            name: hashlib.sha256(sharding.local_part(each).detach().numpy().tobytes()).hexdigest()
            for name, each in sharding.unwrapped(self).named_parameters()
            if not isinstance(each, DTensor) or TENSOR not in (each.device_mesh.mesh_dim_names or ())
        }
        Path(f"{os.environ['NOTES']}-{os.environ['RANK']}").write_text(json.dumps(found), encoding="utf-8")
        return finish(self, *args, **settings)  # type: ignore[no-untyped-call]

    ExactTrainer._finalize_training = and_note  # type: ignore[method-assign, assignment]


def shuffled_rank() -> None:
    """The last rank shuffles by another seed: some rows come twice in a step and others never."""
    batches: Callable[[TrainingBatches], Iterator[MicroBatch]] = TrainingBatches.__iter__

    def reseeded(self: TrainingBatches) -> Iterator[MicroBatch]:
        self.seed += self.rank == self.world_size - 1
        return batches(self)

    TrainingBatches.__iter__ = reseeded  # type: ignore[method-assign]


def other_start() -> None:
    """The weights that are not read are drawn by another seed."""

    def set_next(seed: int) -> None:
        set_seed(seed + 1)

    vars(start)["set_seed"] = set_next


def unclipped() -> None:
    """The norm is measured, and the gradients stay as they are."""
    clip = Accelerator.clip_grad_norm_
    Accelerator.clip_grad_norm_ = lambda self, parameters, max_norm: clip(self, parameters, float("inf"))


def other_masks() -> None:
    """The last rank draws the masks of dropout by another seed."""
    begin = EpochShuffle.on_epoch_begin

    def reseed(self: EpochShuffle, args: Any, *more: Any, **settings: Any) -> None:
        begin(self, args, *more, **settings)
        if args.process_index == args.world_size - 1:
            torch.manual_seed(5)

    EpochShuffle.on_epoch_begin = reseed  # type: ignore[method-assign]


def flipped_bit() -> None:
    """After step 3, the last rank's memory has another bit in a norm's weight."""
    take = StepFlags.on_step_end

    def and_flip(self: StepFlags, args: Any, state: Any, control: Any, **more: Any) -> None:
        take(self, args, state, control, **more)
        if state.global_step == 3 and args.process_index == args.world_size - 1:
            named = sharding.unwrapped(self.trainer).named_parameters()
            norm = next(each for name, each in named if "LayerNorm" in name)
            norm.detach().view(torch.int32)[0] ^= 1

    StepFlags.on_step_end = and_flip  # type: ignore[method-assign]


def memory_of_nan() -> None:
    """New memory holds NaN, as it may whatever was there before."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch 2.13 fills it then


if __name__ == "__main__":
    notes = (noted_sums, unsplit_weights)
    looks = {each.__name__: each for each in (*notes, memory_of_nan, slow_reading, other_rows_in_a_group, flipped_bit)}
    looks |= {each.__name__: each for each in (shuffled_rank, other_start, unclipped, other_masks)}
    {**MUTANTS, **WITHOUT, **looks}[os.environ["MUTANT"]]()
    runpy.run_path("scripts/train_sentiment.py", run_name="__main__")
