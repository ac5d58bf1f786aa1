"""Save the state of a training run: a checkpoint is whole or absent, and an error names the disk."""

from __future__ import annotations

import errno
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from indictune.checkpoint import compatibility, model_state, store
from indictune.checkpoint.snapshots import Snapshots, copy_snapshot
from indictune.checkpoint.store import UNFINISHED, FileDigest, Manifest, Unfinished
from indictune.checkpoint.train_state import Counters, TrainState
from indictune.config.arguments import IndicTrainingArguments
from indictune.distributed import collectives, sharding
from indictune.files import NO_ROOM, RECIPE
from indictune.run import OWN_PROGRESS
from indictune.stop_signals import StopRequest
from indictune.versions import versions_of_steps

logger = logging.getLogger(__name__)


class SaveError(RuntimeError):
    """A checkpoint or the model could not be written. The checkpoints before it are whole."""


@contextmanager
def reporting(output_dir: Path, what: str, unfinished: Path, needed_bytes: Callable[[], int]) -> Iterator[None]:
    """A block that writes `checkpoint-<step>` or `the model`. If it fails, the unfinished folder is removed.

    Raises:
        SaveError: with the error in the library's words, and the needed and the free bytes.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch's own is no Exception
        free = shutil.disk_usage(unfinished.parent).free
        shutil.rmtree(unfinished, ignore_errors=True)
        if not isinstance(error, OSError):
            logger.exception("%s could not be written", what)
        needed, reason = needed_bytes(), _reason(error)
        if not isinstance(error, OSError) and "os error" not in reason:  # torch's C++ does not say it
            reason += _refusal(unfinished.parent, needed)
        raise SaveError(
            f"{what} could not be written to {unfinished.parent}: {reason}. It needs about {needed:,} bytes, and "
            f"{free:,} are free. {_way_out(output_dir, what)}"
        ) from error


def message_of(error: OSError, output_dir: Path) -> str | None:
    """The message for a file of a run that could not be written; None for any other error."""
    if error.filename is None:
        return None
    is_closed = error.errno in (errno.EACCES, errno.EPERM) and Path(error.filename).is_relative_to(output_dir)
    if error.errno not in {*NO_ROOM, errno.EROFS} and not is_closed:
        return None
    return f"{error.filename} could not be written: {error.strerror}. {_way_out(output_dir)}"


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:  # torch's own, around those of the ranks
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _refusal(folder: Path, size_bytes: int) -> str:
    """Why a folder takes no file of that size; empty if it seems to take it."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(size_bytes)
    except OSError as error:
        return f" ({error.strerror})"
    return ""


def _way_out(output_dir: Path, unwritten: str = "") -> str:
    """How to continue. `unwritten` may be there, whole, and gone after the next power cut."""
    others = [path for path in store.checkpoints_in(output_dir) if path.name != unwritten]
    whole = [path.name for path in others if not store.damage(path, thorough=False)]
    last = f"{whole[0]} is whole" if whole else "There is no earlier checkpoint"
    return f"{last}. When it can be written, --resume_from_checkpoint auto continues the run."


@dataclass
class ManifestFacts:
    """What every manifest of a run records, as in `Manifest`, and the optimizer steps of an epoch."""

    strategy: str
    steps_per_epoch: int
    data: str
    validation: str | None
    axes: str = ""


@dataclass(eq=False)
class Checkpoints:
    """Saves the checkpoints of one run. All ranks must call its methods.

    Attributes:
        request: to stop this rank.
        disks_group: the first rank of each disk, if there are several.
        snapshots: None without `--snapshot_steps`.
        snapshot_seconds: for which each snapshot held up this rank.
        unfinished: the checkpoint that is being written.
    """

    args: IndicTrainingArguments
    state: TrainState
    facts: ManifestFacts
    request: StopRequest
    disks_group: ProcessGroup | None
    snapshots: Snapshots | None
    snapshot_seconds: list[float] = field(default_factory=list)
    unfinished: Unfinished | None = None

    def __post_init__(self) -> None:
        self.output_dir = Path(str(self.args.output_dir))

    @cached_property
    def writers(self) -> ProcessGroup | None:
        """A group of all ranks for writing in the background."""
        return collectives.group_of(list(range(self.args.world_size)), self.args)

    @property
    def step(self) -> int:
        """The last step that is done."""
        return self.state.progress.global_step

    @property
    def is_snapshot(self) -> bool:
        """Whether a save of this step is for `--snapshot_steps` alone, and does not wait for the disk."""
        asked = self.request.agreed or self.request.evaluation_due
        return self.snapshots is not None and not asked and not self.is_planned()

    def save(self, counters: Counters) -> None:
        """Write a checkpoint and commit it. It may be committed later: under `--async_save`, or if it is a snapshot.

        Every rank writes its part below a hidden folder. Then all ranks hash and sync a share of the files, and the
        first rank of each disk writes the manifest and renames the folder. A `SaveError` says why that failed.
        """
        if not self.is_snapshot:
            self.finish()
        self._name_best()
        if self.snapshots is not None:
            self._save_in_memory(self.snapshots, counters)
        else:
            self._save_on_disk(counters)
        waits = self.snapshots is None and not self.args.async_save
        if waits or self.request.agreed or self.request.evaluation_due:
            self.finish()

    def _save_on_disk(self, counters: Counters) -> None:
        folder = store.path_of(self.output_dir / UNFINISHED, self.step)
        with self._reporting_disk_errors(self.step):
            self._write(folder, counters, with_shards=not self.args.async_save)
            if self.args.async_save:
                copies = model_state.copy_shards(self.state.model.model, self.state.model.optimizer)
                write = partial(model_state.write_shards, copies, folder, self.writers, FileSystemWriter)
                settled = self._in_background(write, folder)
            else:
                settled = Future()
                settled.set_result(store.sync_share(folder, self.args, self.disks_group))
            self.unfinished = Unfinished(folder, self._manifest(), settled)

    def _save_in_memory(self, snapshots: Snapshots, counters: Counters) -> None:
        """Write a snapshot. Copy it to the disk in the background, unless an older one is being copied."""
        began = time.perf_counter()
        copied = None if self.unfinished is None else self.unfinished.manifest.step
        snapshots.make_room(copied)
        manifest, written = self._manifest(), snapshots.unfinished(self.step)
        with reporting(self.output_dir, written.name, written.parent, self._needed_bytes):
            self._write(written, counters, with_shards=True)
            mine = snapshots.complete(manifest)
        self.snapshot_seconds.append(time.perf_counter() - began)
        if copied is None:
            folder = store.path_of(self.output_dir / UNFINISHED, self.step)
            copy = partial(copy_snapshot, mine, store.path_of(snapshots.folder, self.step), folder)
            self.unfinished = Unfinished(folder, manifest, self._in_background(copy, folder))

    def _write(self, folder: Path, counters: Counters, with_shards: bool) -> None:
        OWN_PROGRESS.passed("writing a checkpoint")
        self.state.write(folder, counters, with_shards=with_shards)
        if self.args.should_save:  # those of the run may change later
            for path in (self.output_dir / RECIPE, self.output_dir / compatibility.FLAG_FILES):
                if path.exists():
                    shutil.copyfile(path, folder / path.name)

    def is_writing(self) -> bool:
        """Whether this rank has not yet written its part of a checkpoint."""
        return self.unfinished is not None and not self.unfinished.settled.done()

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is on the disk, and commit it; or raise a `SaveError`."""
        unfinished, self.unfinished = self.unfinished, None
        if unfinished is None:
            return
        with self._reporting_disk_errors(unfinished.manifest.step):
            last = store.commit(unfinished, self.args)
        collectives.barrier()
        if self.args.should_save:
            self._rotate(last, unfinished.manifest.planned)
        if self.snapshots is not None:
            self.snapshots.drop_until(unfinished.manifest.step)
        self.request.agreed |= any(collectives.gather_from_all(self.request.asked))

    def end(self) -> None:
        """Commit the last checkpoint. The run needs no snapshot any more."""
        self.finish()
        if self.snapshots is not None:
            self.snapshots.end()

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
        ends_with_best = self.args.load_best_model_at_end and self.args.save_strategy == SaveStrategy.STEPS
        return not ends_with_best or self.is_planned()

    def _name_best(self) -> None:
        step = self.state.progress.best_global_step
        if step:
            path = store.path_of(self.output_dir, step)
            if (step == self.step and not self.is_snapshot) or path.is_dir():
                self.state.best = path

    def _rotate(self, last: Path, is_planned: bool) -> None:
        """Delete checkpoints beyond `--save_total_limit`, but not the last, the best, or one to roll back to.

        Under `--snapshot_steps`, others than planned ones are deleted first, and do not count.
        An error only warns: `last` is saved.
        """
        kept = [last]
        if self.state.best is not None:
            kept.append(self.output_dir / self.state.best.name)
        if self.args.on_nonfinite == "rollback":
            kept += planned_checkpoints(self.output_dir)[:1]
        try:
            if self.snapshots is not None:
                others = set(store.checkpoints_in(self.output_dir)) - {*kept, *planned_checkpoints(self.output_dir)}
                for each in others:
                    store.remove(each)
            if self.snapshots is None or is_planned:
                store.rotate(self.output_dir, self.args.save_total_limit, kept)
        except OSError as error:
            logger.warning("%s is saved, and an older checkpoint cannot be removed: %s", last.name, error)

    def _in_background(self, write: Callable[[], None], folder: Path) -> Future[dict[str, FileDigest]]:
        group = self.writers

        def write_and_settle() -> dict[str, FileDigest]:
            write()
            return store.sync_share(folder, self.args, self.disks_group, group)

        background = ThreadPoolExecutor(1)
        settled = background.submit(write_and_settle)
        background.shutdown(wait=False)
        return settled

    def _manifest(self) -> Manifest:
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
            recipe=store.file_digest(recipe).sha256 if recipe.exists() else "",
            versions=versions_of_steps(),
            evaluation_due=self.request.evaluation_due or self._epoch_is_evaluated_next(),
            files={},
            validation=self.facts.validation,
            planned=self.is_planned() or (replaced is not None and replaced.planned),
            axes=self.facts.axes,
        )

    def _epoch_is_evaluated_next(self) -> bool:
        args, epoch = self.args, self.state.progress.epoch
        is_due = args.eval_strategy == IntervalStrategy.EPOCH and epoch is not None and args.eval_delay <= epoch
        return self.request.epoch_ends and is_due

    def _reporting_disk_errors(self, step: int) -> AbstractContextManager[None]:
        unfinished = self.output_dir / UNFINISHED
        return reporting(self.output_dir, f"{store.PREFIX}{step}", unfinished, self._needed_bytes)

    def _needed_bytes(self) -> int:
        """Size of the last checkpoint; of a first one an estimate, because most optimizers keep two moments."""
        manifests = map(store.read_manifest, store.checkpoints_in(self.output_dir))
        of_last = next((manifest.bytes for manifest in manifests if manifest is not None), None)
        return 3 * sharding.whole_bytes(self.state.model.model) if of_last is None else of_last


def planned_checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoints of a run that it saved by its own flags, or whose manifest is damaged; newest first."""
    manifests = {path: store.read_manifest(path) for path in store.checkpoints_in(output_dir)}
    return [path for path, manifest in manifests.items() if manifest is None or manifest.planned]
