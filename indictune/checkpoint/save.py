"""Saves a training run's state so that a checkpoint is whole or not there, whichever strategy holds it in parts."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pyarrow as pa
import torch
from datasets import Dataset
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import IntervalStrategy

from indictune.checkpoint import disk_errors, flag_files, save_schedule, store
from indictune.checkpoint.store import UNFINISHED, FileDigest, Manifest
from indictune.data.batching import TrainingBatches
from indictune.distributed import async_shards, node_disks, sharding
from indictune.models.active_vocabulary import save_row_ids, save_whole_vocabulary
from indictune.models.adapters import save_adapter_extras
from indictune.models.model_description import save_description
from indictune.progress import HERE
from indictune.supervise.run_folder import RECIPE
from indictune.supervise.signals import Stopped
from indictune.train.callbacks.throughput import throughput_of
from indictune.versions import versions_of_steps

if TYPE_CHECKING:
    from indictune.train.exact_trainer import ExactTrainer

logger = logging.getLogger(__name__)

# The loss of each rank since the last logged step, so that a resumed run logs what it would have logged.
UNLOGGED = "unlogged_{rank}.json"


@dataclass(frozen=True)
class Unfinished:
    """A checkpoint that is being written.

    Attributes:
        folder: it is written to.
        manifest: of the step at which it was begun, without its files.
        settled: digests of this rank's share of the files, once all files are on the disk.
    """

    folder: Path
    manifest: Manifest
    settled: Future[dict[str, FileDigest]]


def save_checkpoint(trainer: ExactTrainer, write: Callable[[], None]) -> None:
    """Write a checkpoint and commit it; under `--async_save` the rest of it may come later. All ranks must call it.

    Every rank writes its part below a hidden folder, then all of them read back, digest and settle a share of the
    files; the first rank of each disk writes the manifest and renames the folder.

    Args:
        trainer: whose state it is.
        write: the Trainer's own saving, into `unfinished_folder`.

    Raises:
        NonFiniteLossError: a weight is NaN or infinite; nothing was saved.
        SaveError: the disk does not take it.
        Stopped: a rank was asked to stop; the checkpoint is there.
    """
    finish(trainer)
    check_weights(trainer)
    step, request = trainer.state.global_step, trainer.stop_request
    output_dir = Path(str(trainer.args.output_dir))
    folder = store.path_of(output_dir / UNFINISHED, step)
    with disk_errors.telling(output_dir, step, _bytes_in_memory(trainer)):
        HERE.passed("writing a checkpoint")
        with async_shards.telling():
            write()
        if trainer.args.async_save:
            trainer.unfinished = Unfinished(folder, _manifest(trainer), _written_beside(trainer, folder))
        else:
            settled: Future[dict[str, FileDigest]] = Future()
            settled.set_result(_settle(trainer, folder, trainer.disks_group))
            trainer.unfinished = Unfinished(folder, _manifest(trainer), settled)
    if not trainer.args.async_save or request.agreed or request.evaluation_due:
        finish(trainer)
    # At the end of an epoch something more may be due, and the end of the run then comes after it.
    if request.agreed and not request.epoch_ends:
        raise stopped_after(step)


def write_model(trainer: ExactTrainer, folder: Path, write: Callable[[], None]) -> None:
    """Write a model, with six things mended. All ranks must call it.

    Where checkpoints are kept in shards, the Trainer writes nothing here, and then looks whether the folder of the
    best checkpoint is there, each rank for itself (5.23, `_save_checkpoint`). It may be there for one rank and not
    yet for another: seen is one rank loading the best model at the end while the other waited for it, for ever. So
    such a checkpoint would not say what model it is of. peft leaves out an adapter's configuration. A split model's
    own code is saved (`sharding.save_code`). A saved model has all rows of its embedding. And rank 0 alone writes:
    the Trainer would write on every disk, where no other rank has whole weights ("KeyError", or an adapter of empty
    tensors). `nodes.give_files` brings the model to the other disks.

    Args:
        trainer: whose model it is.
        folder: gets it; it is made on every disk.
        write: the Trainer's own saving, into `folder`.
    """
    args = trainer.args
    if args.should_save:
        folder.mkdir(parents=True, exist_ok=True)
    with node_disks.rank_0_alone_saves(args):
        model = sharding.bare(trainer)
        if args.should_save:
            sharding.save_code(model, folder)
        write()
        if args.should_save:
            save_adapter_extras(model, folder)
            save_whole_vocabulary(model, folder)
            if folder.name.startswith(store.PREFIX):
                save_row_ids(model, folder)
                if not list(folder.glob("*.safetensors")):
                    tokenizer = cast(PreTrainedTokenizerBase, trainer.processing_class)
                    save_description(model, sharding.architecture_of(model), tokenizer, folder)


def is_writing(trainer: ExactTrainer) -> bool:
    """Whether this rank has not yet written its part of a checkpoint."""
    return trainer.unfinished is not None and not trainer.unfinished.settled.done()


def finish(trainer: ExactTrainer) -> None:
    """Wait until the checkpoint that is being written is on the disk, and commit it. All ranks must call it.

    Raises:
        SaveError: the disk does not take it.
    """
    unfinished, trainer.unfinished = trainer.unfinished, None
    if unfinished is None:
        return
    args, step = trainer.args, unfinished.manifest.step
    output_dir = Path(str(args.output_dir))
    last = store.path_of(output_dir, step)
    with disk_errors.telling(output_dir, step, _bytes_in_memory(trainer)):
        disk = node_disks.disk_of(args)
        mine = (disk, unfinished.settled.result(), trainer.stop_request.asked, uuid.uuid4().hex)
        parts = sharding.from_all(mine)
        if args.should_save:
            files = {name: found for where, part, *_ in parts if where == disk for name, found in part.items()}
            save = parts[0][-1]
            store.seal(unfinished.folder, replace(unfinished.manifest, files=files, save=save))
        sharding.barrier()  # no disk of several gives the name before all hold what it is given to
        if args.should_save:
            store.give_name(unfinished.folder, last)
            shutil.rmtree(output_dir / UNFINISHED, ignore_errors=True)
    sharding.barrier()
    if args.should_save:
        _rotate(trainer, output_dir, last)
    trainer.stop_request.agreed |= any(asked for _, _, asked, _ in parts)


def _rotate(trainer: ExactTrainer, output_dir: Path, last: Path) -> None:
    """Delete what `--save_total_limit` leaves no room for: never `last`, the one just committed, the best, and the one
    that a bad step would go back to. A disk that refuses ends no run: `last` is there."""
    kept = [last]
    # Not `best_global_step`: it may be a step that was evaluated and not saved.
    if trainer.state.best_model_checkpoint is not None:
        kept.append(output_dir / Path(trainer.state.best_model_checkpoint).name)
    if trainer.args.on_nonfinite == "rollback":
        kept += save_schedule.planned(output_dir)[:1]
    try:
        store.rotate(output_dir, trainer.args.save_total_limit, kept)
    except OSError as error:
        logger.warning("%s is saved, and an older checkpoint cannot be removed: %s", last.name, error)


def _written_beside(trainer: ExactTrainer, folder: Path) -> Future[dict[str, FileDigest]]:
    """Copy this rank's shards, and write and settle the copies beside the training."""
    copies, group = (
        async_shards.copied(cast(nn.Module, trainer.model), cast(Optimizer, trainer.optimizer)),
        trainer.writers,
    )
    disks_group = trainer.disks_group

    def write_and_settle() -> dict[str, FileDigest]:
        async_shards.write(copies, folder, group)
        return _settle(trainer, folder, disks_group, group)

    beside = ThreadPoolExecutor(1)
    settled = beside.submit(write_and_settle)
    beside.shutdown(wait=False)
    return settled


def _settle(
    trainer: ExactTrainer, folder: Path, disks_group: ProcessGroup | None, group: ProcessGroup | None = None
) -> dict[str, FileDigest]:
    """Let this rank's share of the files reach the disk, when all ranks have written; returns their digests."""
    sharding.barrier(group)
    node_disks.give_files(folder, True, trainer.args, disks_group)
    return store.settle(folder, _share(trainer, folder, group))


def stopped_after(step: int) -> Stopped:
    """The end of a run that has saved this step."""
    return Stopped(f"stopped after step {step}, which is saved.")


def unfinished_folder(output_dir: str) -> str:
    """In which the Trainer makes `checkpoint-<step>`."""
    return str(Path(output_dir) / UNFINISHED)


def copy_recipe(output_dir: Path, folder: Path) -> None:
    """Keep in a checkpoint with which settings it was written; those of the run may change."""
    for name in (RECIPE, flag_files.NAME):
        if (output_dir / name).exists():  # which `resume.train` writes
            shutil.copyfile(output_dir / name, folder / name)


def write_unlogged(trainer: ExactTrainer, folder: Path) -> None:
    """Keep what this rank has summed up since it was last logged, what was counted since the run began, and how many
    bad steps were left out until now."""
    throughput = throughput_of(trainer)
    # A float32 is exact as the float that JSON writes.
    noted = {
        "loss": trainer._tr_loss.item(),
        "since_step": trainer._globalstep_last_logged,
        "task": trainer.unlogged(),
        "left_out": trainer.bad_steps.count,
        "throughput": {} if throughput is None else throughput.counted(),
    }
    (folder / UNLOGGED.format(rank=trainer.args.process_index)).write_text(json.dumps(noted), encoding="utf-8")


def data_digest(dataset: Dataset, batches: TrainingBatches) -> str:
    """Of the rows, as tokens and labels, and of the order in which they are dealt."""
    return _rows_digest([batches.global_batch_size, batches.seed], dataset)


def validation_digest(dataset: Dataset) -> str:
    """Of the rows, as tokens, labels and languages, that a run compares its checkpoints on."""
    return _rows_digest(dataset["language"][:], dataset)


def _rows_digest(beside: Sequence[object], dataset: Dataset) -> str:
    digest = hashlib.sha256(json.dumps(beside).encode())
    for name in ("length", "input_ids", "labels"):
        for chunk in dataset.data[name].chunks:
            values = chunk.flatten() if pa.types.is_list(chunk.type) else chunk
            digest.update(values.to_numpy(zero_copy_only=False).tobytes())
    return digest.hexdigest()


def _manifest(trainer: ExactTrainer) -> Manifest:
    """Of this step, without files."""
    args, batches, step = trainer.args, trainer.batches, trainer.state.global_step
    rows = (step % batches.steps_per_epoch) * args.global_batch_size
    recipe = Path(str(args.output_dir), RECIPE)
    # What a run from another folder begins with. Who commits nothing does not look: a client of NFS would remember for
    # up to a minute that there is none.
    replaced = store.read_manifest(store.path_of(recipe.parent, step)) if args.should_save else None
    return Manifest(
        step=step,
        rows_of_epoch=rows,
        strategy=trainer.strategy,
        world_size=args.world_size,
        global_batch_size=args.global_batch_size,
        save="",
        data=trainer.data_digest,
        recipe=store.digest(recipe).sha256 if recipe.exists() else "",
        versions=versions_of_steps(),
        evaluation_due=trainer.stop_request.evaluation_due or _epoch_is_evaluated_next(trainer),
        files={},
        validation=trainer.validation_digest,
        planned=save_schedule.has_this_step(trainer) or (replaced is not None and replaced.planned),
    )


def _epoch_is_evaluated_next(trainer: ExactTrainer) -> bool:
    args, epoch = trainer.args, trainer.state.epoch
    is_due = args.eval_strategy == IntervalStrategy.EPOCH and epoch is not None and args.eval_delay <= epoch
    return trainer.stop_request.epoch_ends and is_due


def check_weights(trainer: ExactTrainer) -> None:
    """Refuse to save weights that are NaN or infinite, whichever rank holds them. All ranks must call it.

    Raises:
        NonFiniteLossError: there is one.
    """
    bad = torch.zeros((), dtype=torch.int32, device=trainer.args.device)
    for held in map(sharding.held_part, _parameters(trainer)):
        if held.numel():
            # A 27th of the time of `isfinite(held).all()`, on one core.
            extremes = torch.stack(torch.aminmax(held.detach()))
            bad |= (~torch.isfinite(extremes).all()).int().to(bad.device)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(bad, op=torch.distributed.ReduceOp.MAX)
    if bad.item():
        raise trainer.bad_steps.stop_by_weights(trainer.state.global_step)


def _parameters(trainer: ExactTrainer) -> Iterator[nn.Parameter]:
    assert trainer.model is not None
    return (parameter for parameter in trainer.model.parameters() if parameter.requires_grad)


def _share(trainer: ExactTrainer, unfinished: Path, group: ProcessGroup | None) -> list[str]:
    """The files that this rank reads back, of those on its disk; one rank lists them for all that share it."""
    args = trainer.args
    mine = (node_disks.disk_of(args), store.files_in(unfinished) if args.should_save else None)
    names = next(listed for disk, listed in sharding.from_all(mine, group) if disk == mine[0] and listed is not None)
    return names[node_disks.share_of_files(args)]


def _bytes_in_memory(trainer: ExactTrainer) -> int:
    """Of this rank's weights and the two states of each."""
    trained = [sharding.held_part(each) for each in _parameters(trainer)]
    return sum(each.nbytes + 8 * each.numel() for each in trained)
