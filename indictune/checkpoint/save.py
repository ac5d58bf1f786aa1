"""Save the state of a training run, so that a checkpoint is whole or absent under every strategy."""

from __future__ import annotations

import logging
import shutil
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from indictune.checkpoint import disk_errors, flag_files, store
from indictune.checkpoint.store import UNFINISHED, FileDigest, Manifest
from indictune.checkpoint.train_state import Counters, TrainState
from indictune.config.arguments import IndicTrainingArguments
from indictune.distributed import async_shards, collectives, node_disks, sharding
from indictune.files import RECIPE
from indictune.progress import OWN_PROGRESS
from indictune.stop_signals import StopRequest
from indictune.versions import versions_of_steps

logger = logging.getLogger(__name__)


@dataclass
class RunFacts:
    """What every manifest of a run records; see `Manifest`.

    Attributes:
        strategy: of the launch, as in `accelerate_configs/`.
        steps_per_epoch: optimizer steps.
        data: digest of the training rows and their order.
        validation: digest of the rows that checkpoints are compared on; None without such rows.
    """

    strategy: str
    steps_per_epoch: int
    data: str
    validation: str | None


@dataclass(frozen=True)
class Unfinished:
    """A checkpoint that is being written.

    Attributes:
        folder: gets its files.
        manifest: of its step, without files.
        settled: digests of this rank's share of the files, once they are on the disk.
    """

    folder: Path
    manifest: Manifest
    settled: Future[dict[str, FileDigest]]


class Checkpoints:
    """Saves the checkpoints of one run. All ranks must call its methods.

    Args:
        args: of the run.
        state: that is saved.
        facts: of the run.
        request: to stop this rank.
        disks_group: the first rank of each disk, if there are several.
    """

    def __init__(
        self,
        args: IndicTrainingArguments,
        state: TrainState,
        facts: RunFacts,
        request: StopRequest,
        disks_group: ProcessGroup | None,
    ) -> None:
        self.args = args
        self.state = state
        self.facts = facts
        self.request = request
        self.disks_group = disks_group
        self.output_dir = Path(str(args.output_dir))
        self.unfinished: Unfinished | None = None

    @cached_property
    def writers(self) -> ProcessGroup | None:
        """A group of all ranks for writing in the background; None if they do not."""
        return async_shards.group_of_writers(self.args)

    @property
    def step(self) -> int:
        """The last step that is done."""
        return self.state.progress.global_step

    def save(self, counters: Counters) -> None:
        """Write a checkpoint and commit it. Under `--async_save` the shards may be written later.

        Every rank writes its part below a hidden folder. Then all ranks hash and sync a share of the files, and the
        first rank of each disk writes the manifest and renames the folder.

        Raises:
            SaveError: it cannot be written.
        """
        self.finish()
        folder = store.path_of(self.output_dir / UNFINISHED, self.step)
        self._name_best()
        with self._reporting_disk_errors(self.step):
            OWN_PROGRESS.passed("writing a checkpoint")
            self.state.write(folder, counters, with_shards=not self.args.async_save)
            if self.args.should_save:
                copy_recipe(self.output_dir, folder)
            if self.args.async_save:
                settled = self._write_in_background(folder)
            else:
                settled = Future()
                settled.set_result(self._settle(folder))
            self.unfinished = Unfinished(folder, self._manifest(), settled)
        if not self.args.async_save or self.request.agreed or self.request.evaluation_due:
            self.finish()

    def is_writing(self) -> bool:
        """Whether this rank has not yet written its part of a checkpoint."""
        return self.unfinished is not None and not self.unfinished.settled.done()

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is on the disk, and commit it.

        Raises:
            SaveError: it cannot be written.
        """
        unfinished, self.unfinished = self.unfinished, None
        if unfinished is None:
            return
        step = unfinished.manifest.step
        last = store.path_of(self.output_dir, step)
        with self._reporting_disk_errors(step):
            disk = node_disks.disk_of(self.args)
            mine = (disk, unfinished.settled.result(), self.request.asked, uuid.uuid4().hex)
            parts = collectives.gather_from_all(mine)
            if self.args.should_save:
                files = {name: found for where, part, *_ in parts if where == disk for name, found in part.items()}
                store.seal(unfinished.folder, replace(unfinished.manifest, files=files, save=parts[0][-1]))
            collectives.barrier()  # no disk renames its folder before all disks have sealed theirs
            if self.args.should_save:
                store.give_name(unfinished.folder, last)
                shutil.rmtree(self.output_dir / UNFINISHED, ignore_errors=True)
        collectives.barrier()
        if self.args.should_save:
            self._rotate(last)
        self.request.agreed |= any(asked for _, _, asked, _ in parts)

    def is_planned(self) -> bool:
        """Whether the run saves this step by its own flags, and not only because it is stopped."""
        strategy, progress = self.args.save_strategy, self.state.progress
        if strategy == SaveStrategy.BEST:
            return progress.best_global_step == progress.global_step
        if strategy == SaveStrategy.NO:
            return False
        every = progress.save_steps if strategy == SaveStrategy.STEPS else self.facts.steps_per_epoch
        return progress.global_step % every == 0 or progress.global_step >= progress.max_steps

    def is_compared(self) -> bool:
        """Whether the evaluation of this step may be the best: under `--load_best_model_at_end`, only of a planned
        step. Other weights are not kept, or only by a stop, which must not change the final model."""
        if not self.args.load_best_model_at_end or self.args.save_strategy != SaveStrategy.STEPS:
            return True
        return self.is_planned()

    def _name_best(self) -> None:
        step = self.state.progress.best_global_step
        if step:
            path = store.path_of(self.output_dir, step)
            if step == self.step or path.is_dir():
                self.state.best = path

    def _rotate(self, last: Path) -> None:
        """Delete checkpoints beyond `--save_total_limit`, but not the last, the best, or one to roll back to.

        An error only warns: `last` is saved.
        """
        kept = [last]
        if self.state.best is not None:
            kept.append(self.output_dir / self.state.best.name)
        if self.args.on_nonfinite == "rollback":
            kept += planned(self.output_dir)[:1]
        try:
            store.rotate(self.output_dir, self.args.save_total_limit, kept)
        except OSError as error:
            logger.warning("%s is saved, and an older checkpoint cannot be removed: %s", last.name, error)

    def _write_in_background(self, folder: Path) -> Future[dict[str, FileDigest]]:
        """Copy this rank's shards, and write the copies while the training continues."""
        copies, group = async_shards.copied(self.state.model.model, self.state.model.optimizer), self.writers

        def write_and_settle() -> dict[str, FileDigest]:
            async_shards.write(copies, folder, group, FileSystemWriter)
            return self._settle(folder, group)

        background = ThreadPoolExecutor(1)
        settled = background.submit(write_and_settle)
        background.shutdown(wait=False)
        return settled

    def _settle(self, folder: Path, group: ProcessGroup | None = None) -> dict[str, FileDigest]:
        """Sync this rank's share of the files when all ranks have written; returns their digests."""
        collectives.barrier(group)
        node_disks.give_files(folder, True, self.args, self.disks_group)
        return store.settle(folder, self._share(folder, group))

    def _share(self, folder: Path, group: ProcessGroup | None) -> list[str]:
        """The files that this rank hashes; one rank lists them for all that share its disk."""
        mine = (node_disks.disk_of(self.args), store.files_in(folder) if self.args.should_save else None)
        listed = collectives.gather_from_all(mine, group)
        names = next(names for disk, names in listed if disk == mine[0] and names is not None)
        return names[node_disks.share_of_files(self.args)]

    def _manifest(self) -> Manifest:
        """Of this step, without files."""
        recipe = self.output_dir / RECIPE
        # A resumed run may save its first step again, after an evaluation that was due.
        replaced = store.read_manifest(store.path_of(self.output_dir, self.step)) if self.args.should_save else None
        return Manifest(
            step=self.step,
            rows_of_epoch=(self.step % self.facts.steps_per_epoch) * self.args.global_batch_size,
            strategy=self.facts.strategy,
            world_size=self.args.world_size,
            global_batch_size=self.args.global_batch_size,
            save="",
            data=self.facts.data,
            recipe=store.digest(recipe).sha256 if recipe.exists() else "",
            versions=versions_of_steps(),
            evaluation_due=self.request.evaluation_due or self._epoch_is_evaluated_next(),
            files={},
            validation=self.facts.validation,
            planned=self.is_planned() or (replaced is not None and replaced.planned),
        )

    def _epoch_is_evaluated_next(self) -> bool:
        args, epoch = self.args, self.state.progress.epoch
        is_due = args.eval_strategy == IntervalStrategy.EPOCH and epoch is not None and args.eval_delay <= epoch
        return self.request.epoch_ends and is_due

    def _reporting_disk_errors(self, step: int) -> AbstractContextManager[None]:
        return disk_errors.reporting(self.output_dir, f"{store.PREFIX}{step}", UNFINISHED, self._needed_bytes)

    def _needed_bytes(self) -> int:
        """Size of the last checkpoint; of a first one an estimate, because most optimizers keep two moments."""
        manifests = map(store.read_manifest, store.listed(self.output_dir))
        of_last = next((manifest.bytes for manifest in manifests if manifest is not None), None)
        return 3 * sharding.whole_bytes(self.state.model.model) if of_last is None else of_last


def planned(output_dir: Path) -> list[Path]:
    """The checkpoints of a run that it saved by its own flags, or whose manifest is damaged; newest first."""
    manifests = {path: store.read_manifest(path) for path in store.listed(output_dir)}
    return [path for path, manifest in manifests.items() if manifest is None or manifest.planned]


def copy_recipe(output_dir: Path, folder: Path) -> None:
    """Copy the settings of a run into a checkpoint: those of the run may change later."""
    for name in (RECIPE, flag_files.NAME):
        if (output_dir / name).exists():
            shutil.copyfile(output_dir / name, folder / name)


def weights_are_finite(model: nn.Module, device: torch.device) -> bool:
    """Whether all trained weights on all ranks are finite. All ranks must call it."""
    bad = torch.zeros((), dtype=torch.int32, device=device)
    for held in (sharding.local_part(each) for each in model.parameters() if each.requires_grad):
        if held.numel():
            # A 27th of the time of `isfinite(held).all()`, on one core.
            extremes = torch.stack(torch.aminmax(held.detach()))
            bad |= (~torch.isfinite(extremes).all()).int().to(bad.device)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(bad, op=torch.distributed.ReduceOp.MAX)
    return not bad.item()
