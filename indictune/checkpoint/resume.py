"""Choose the checkpoint that a run resumes from, and refuse one that somebody else may have written."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import ProcessGroup
from transformers import TrainingArguments

from indictune.checkpoint import model_state, store
from indictune.distributed import collectives
from indictune.errors import UserError
from indictune.files import AUTO

logger = logging.getLogger(__name__)


def check_trusted(
    checkpoint: Path, output_dir: Path, trust_checkpoint: bool, flag: str = "--resume_from_checkpoint"
) -> None:
    """Refuse a checkpoint that is not in the run's `output_dir`, or that others can write to, unless it is trusted."""
    why = None if trust_checkpoint else why_not_own(checkpoint, output_dir)
    if why is not None:
        raise UserError("checkpoint-not-trusted", flag, checkpoint, reason=why)


def why_not_own(checkpoint: Path, output_dir: Path) -> str | None:
    """Why others may have written a checkpoint; None if only this user's run can."""
    run = output_dir.resolve()
    if checkpoint.resolve().parent != run or checkpoint.is_symlink():
        return f"it is not in this run's --output_dir {output_dir}"
    found = map(_open_to_others, (run, checkpoint, *sorted(checkpoint.rglob("*"))))
    return next(filter(None, found), None)


def _open_to_others(path: Path) -> str | None:
    found = path.lstat()
    if found.st_uid != os.getuid():
        return f"{path} belongs to another user"
    if path.is_symlink():
        return f"{path} is a link"
    if found.st_mode & 0o022:
        return f"{path} can be written by other users (`chmod go-w {path}` ends that)"
    return None


class Finished(Exception):  # noqa: N818, nothing is wrong
    """The run has ended already, on every disk."""


@dataclass(frozen=True)
class ResumePoint:
    """What a run continues.

    Attributes:
        checkpoint: to resume from; None if the run starts afresh.
        best: the best checkpoint until then; None if there is none, or it is damaged.
        damaged: checkpoints that are newer than `checkpoint`, and damaged.
    """

    checkpoint: Path | None = None
    best: Path | None = None
    damaged: Sequence[Path] = ()
    warnings: Sequence[str] = ()


class DamageReader:
    """Looks for damage in checkpoints, from one process; reads each once, `thorough` or not as `store.damage`."""

    def __init__(self, thorough: bool = True) -> None:
        self.thorough = thorough
        self._known: dict[Path, list[str]] = {}

    def listed(self, found: list[Path]) -> list[Path]:
        """The checkpoints of a run, newest first, of which this process has found some."""
        return found

    def damage(self, checkpoint: Path) -> list[str]:
        """What is wrong with a checkpoint, as `store.damage`."""
        if checkpoint not in self._known:
            self._known[checkpoint] = store.damage(checkpoint, self.thorough)
        return self._known[checkpoint]

    def best(self, checkpoint: Path) -> Path | None:
        """The best checkpoint that a whole one names, as `best_of`."""
        return best_of(checkpoint)


class AllRanksReader(DamageReader):
    """Looks for damage from all ranks, on all disks. All ranks must call its methods.

    Each rank of a disk reads its share of the files. A disk that lacks files gets them from another one, by
    `disks_group`, the first ranks of several disks.
    """

    def __init__(self, args: TrainingArguments, trust_checkpoint: bool, disks_group: ProcessGroup | None) -> None:
        super().__init__()
        self.args, self.trust_checkpoint, self.disks_group = args, trust_checkpoint, disks_group

    def listed(self, found: list[Path]) -> list[Path]:
        """The checkpoints in the run's folder that any rank has found, newest first."""
        steps = set[int]().union(*collectives.gather_from_all([store.step_of(path) for path in found]))
        return [store.path_of(Path(str(self.args.output_dir)), step) for step in sorted(steps, reverse=True)]

    def damage(self, checkpoint: Path) -> list[str]:
        if self.args.save_on_each_node:
            self._give_to_other_disks(checkpoint)
        manifest = store.read_manifest(checkpoint)
        problems = store.damage(checkpoint, share=collectives.share_of_files(self.args))
        parts = collectives.gather_from_all((problems, manifest.save if manifest else ""))
        if len({save for _, save in parts if save}) > 1:
            return [f"{checkpoint} is of another save on another node's disk"]
        return list(dict.fromkeys(problem for part, _ in parts for problem in part))  # all ranks see a missing file

    def best(self, checkpoint: Path) -> Path | None:
        """As `best_of`. Where one disk has a sibling, the best is the sibling on all."""
        best = best_of(checkpoint)
        is_sibling = best is not None and best.parent == checkpoint.parent
        return checkpoint.parent / best.name if any(collectives.gather_from_all(is_sibling)) and best else best

    def _give_to_other_disks(self, checkpoint: Path) -> None:
        """Give the files to disks that lack them, from one that has them all and that nobody else can write to."""
        output_dir = Path(str(self.args.output_dir))
        is_whole = not store.damage(checkpoint, thorough=False)
        gives = is_whole and (self.trust_checkpoint or why_not_own(checkpoint, output_dir) is None)
        collectives.give_files(checkpoint, gives, self.args, self.disks_group)
        collectives.barrier()


def choose_resume_point(output_dir: Path, asked: str, reader: DamageReader) -> ResumePoint:
    """Choose the checkpoint that a run resumes from. Nothing is changed.

    `auto` takes the newest whole checkpoint of `output_dir`. A named one must be that, or be whole and stand elsewhere
    while `output_dir` holds none: else, and if it is damaged or missing, it is refused.
    """
    flag = "--resume_from_checkpoint"
    candidates = reader.listed(store.checkpoints_in(output_dir))
    named = None if asked == AUTO else Path(asked)
    if named is not None and named.parent.resolve() == output_dir.resolve():
        named = output_dir / named.name
    elif named is not None and candidates:
        raise UserError("resume-not-newest", flag, named, output_dir=output_dir)
    if named is not None and named not in candidates:
        candidates = [named]
    checkpoint, damaged = newest_whole(candidates, reader)
    if named in damaged:
        raise UserError("resume-damaged", flag, asked, reason="; ".join(damaged[named][:3]))
    if named is not None and checkpoint != named:
        raise UserError("resume-not-newest", flag, named, output_dir=output_dir)
    warnings = [f"Passed over {path.name}: {'; '.join(problems[:3])}." for path, problems in damaged.items()]
    best = None if checkpoint is None else reader.best(checkpoint)
    if best is not None and best != checkpoint and (problems := reader.damage(best)):
        warnings.append(f"The best checkpoint so far, {best.name}, is forgotten: {'; '.join(problems[:3])}.")
        best = None
    return ResumePoint(checkpoint, best, list(damaged), warnings)


def newest_whole(candidates: Sequence[Path], reader: DamageReader) -> tuple[Path | None, dict[Path, list[str]]]:
    """The first whole checkpoint, or None; and what is wrong with those before it."""
    damaged: dict[Path, list[str]] = {}
    for each in candidates:
        problems = reader.damage(each)
        if not problems:
            return each, damaged
        damaged[each] = problems
    return None, damaged


def best_of(checkpoint: Path) -> Path | None:
    """The best checkpoint that a whole one names: a sibling, or where it was if the run came from another folder.

    The state's `best_global_step` is not it: that step may have been evaluated and not saved.
    """
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        named = Path(state["best_model_checkpoint"])
        sibling = checkpoint.parent / named.name
        if store.step_of(named) <= 0:
            return None
        return named if named.is_dir() and not sibling.is_dir() else sibling
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def can_load_best(best: Path, reader: AllRanksReader) -> bool:
    """Whether the best checkpoint is whole on every disk at the end of a run. All ranks must call it.

    Weights in safetensors run no code, so others may be able to write to them; pickles of others are refused.
    """
    problems = reader.damage(best)
    if problems:
        logger.warning("%s, the best, cannot be loaded: %s", best.name, "; ".join(problems[:3]))
    elif model_state.is_in_parts(best) or not any(best.glob("*.safetensors")):
        output_dir = Path(str(reader.args.output_dir))
        check_trusted(best, output_dir, reader.trust_checkpoint, "--load_best_model_at_end from")
    return not problems
