"""Which checkpoint a run goes on from, and whether it may."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

from transformers import TrainingArguments

from indictune.errors import UserError
from indictune.strategy import handover, sharding
from indictune.strategy.launch import Launch
from indictune.training import checkpoints, settings
from indictune.training.output import AUTO

logger = logging.getLogger(__name__)


def candidates(output_dir: Path, resume_from_checkpoint: str | None) -> list[Path]:
    """The checkpoints that a run may go on from, the newest first; empty where it starts afresh.

    Nothing is read but manifests and the sizes of files.

    Args:
        output_dir: of the run.
        resume_from_checkpoint: the folder of one, `auto` for those of `output_dir`, or None.

    Raises:
        UserError: the named one is none, or not whole.
    """
    if resume_from_checkpoint is None:
        return []
    if resume_from_checkpoint == AUTO:
        return [path for path in checkpoints.listed(output_dir) if not damage(path, thorough=False)]
    named = Path(resume_from_checkpoint)
    if not (named / checkpoints.MANIFEST).is_file():
        raise UserError(
            f"--resume_from_checkpoint {named}: is no checkpoint (it has no {checkpoints.MANIFEST}). Name a "
            f"checkpoint-<step> folder, or type {AUTO} for the newest in --output_dir."
        )
    problems = damage(named, thorough=False)
    if problems:
        raise UserError(_damaged(named, problems))
    return [named]


def damage(checkpoint: Path, thorough: bool = True) -> list[str]:
    """`checkpoints.damage`, of the best checkpoint that it names too: the run would end with its weights."""
    problems = checkpoints.damage(checkpoint, thorough)
    if problems:
        return problems
    best = _best_beside(checkpoint)
    return [] if best is None else checkpoints.damage(best, thorough)


def _best_beside(checkpoint: Path) -> Path | None:
    """The best checkpoint as a whole one names it; None where there is none, or it is that itself."""
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    step, named = state.get("best_global_step"), state.get("best_model_checkpoint")
    if named is None or type(step) is not int or step < 1:
        return None
    best = checkpoints.path_of(checkpoint.parent, step)
    return None if best == checkpoint else best


def _damage_read_by_all(checkpoint: Path | None, args: TrainingArguments) -> list[str]:
    """`checkpoints.damage`, each rank of a disk reading its share of the files. All ranks must call it."""
    share = sharding.share_of_files(args)
    parts = sharding.from_all([] if checkpoint is None else checkpoints.damage(checkpoint, share=share))
    return list(dict.fromkeys(problem for part in parts for problem in part))  # all see what is missing


def _damaged(named: Path, problems: list[str]) -> str:
    return (
        f"--resume_from_checkpoint {named}: is damaged: {'; '.join(problems[:3])}. Name another, or type {AUTO} for "
        "the newest whole one."
    )


def check_trusted(
    checkpoint: Path, output_dir: Path, trust_checkpoint: bool, flag: str = "--resume_from_checkpoint"
) -> None:
    """Refuse to read what others may have written: a checkpoint holds pickles, which can run code when they are read.

    Args:
        checkpoint: to go on from.
        output_dir: of the run, whose checkpoints are its own.
        trust_checkpoint: the user vouches for it.
        flag: by which the user named it.

    Raises:
        UserError: it stands elsewhere, or a file of it, or `output_dir`, belongs to or can be written by somebody
            else.
    """
    if trust_checkpoint:
        return
    why = _why_not_own(checkpoint, output_dir)
    if why is not None:
        raise UserError(
            f"{flag} {checkpoint}: {why}, and it holds pickles, which can run code when they are "
            "read. If you trust whoever wrote it, add --trust_checkpoint true."
        )


def _why_not_own(checkpoint: Path, output_dir: Path) -> str | None:
    """Why others may have written a checkpoint; None where only this user can, by this run."""
    if checkpoint.resolve().parent != output_dir.resolve() or checkpoint.is_symlink():
        return f"it is not in this run's --output_dir {output_dir}"
    found = map(_open_to_others, (output_dir.resolve(), checkpoint, *sorted(checkpoint.rglob("*"))))
    return next(filter(None, found), None)


def _open_to_others(path: Path) -> str | None:
    """How others may write to a file or folder; None where they cannot."""
    found = path.lstat()
    if found.st_uid != os.getuid():
        return f"{path} belongs to another user"
    if path.is_symlink():
        return f"{path} is a link"
    if found.st_mode & 0o022:
        return f"{path} can be written by other users (`chmod go-w {path}` ends that)"
    return None


def doubts_to_come(output_dir: Path, trust_checkpoint: bool) -> list[str]:
    """What the user should know of a folder whose checkpoints `check_trusted` would refuse; at most one sentence."""
    why = None if trust_checkpoint else _open_to_others(output_dir.resolve())
    if why is None:
        return []
    return [f"--output_dir: {why}: its checkpoints would not be gone on from without --trust_checkpoint true."]


def check_fits(checkpoint: Path, launch: Launch, global_batch_size: int, optim: str) -> None:
    """Refuse a checkpoint whose state this launch cannot take over.

    Args:
        checkpoint: to go on from.
        launch: that would go on.
        global_batch_size: of this run.
        optim: `--optim` of this run.

    Raises:
        UserError: it was written by another strategy and one of the two is ZeRO, by another number of ZeRO's
            processes, with other global batches, or by another optimizer.
    """
    manifest = checkpoints.read_manifest(checkpoint)
    assert manifest is not None  # `candidates` has read it
    flag = f"--resume_from_checkpoint {checkpoint}"
    problems = []
    if manifest.global_batch_size != global_batch_size:
        problems.append(
            f"--global_batch_size {global_batch_size}: {checkpoint.name} was trained with "
            f"{manifest.global_batch_size}, and its place in the rows counts in them; give that, or start "
            "afresh in another --output_dir."
        )
    before = settings.other_optimizer(checkpoint, optim)
    if before is not None:
        problems.append(
            f"--optim {optim}: {checkpoint.name} was written with {before}, whose states are others; give "
            f"--optim {before}, or start afresh in another --output_dir."
        )
    if not handover.can_go_on(manifest.strategy, manifest.world_size, launch):
        command = handover.command(manifest.strategy, manifest.world_size, sys.argv)
        problems.append(
            f"{flag}: was written by {manifest.strategy} on {manifest.world_size} process(es), and this run is "
            f"{launch.strategy} on {launch.world_size}; ZeRO's states cannot be carried over. Go on with it by "
            f"`{command}`."
        )
    if problems:
        raise UserError(problems)
    wrote, goes_on = (manifest.strategy, manifest.world_size), (launch.family, launch.world_size)
    if wrote != goes_on:
        drawn = "" if wrote[1] == goes_on[1] else "; dropout draws other numbers than it would have"
        logger.warning(
            "%s was written by %s on %d process(es), and %s on %d go on with it: rows, weights and optimizer states "
            "go on where they were%s.",
            *(checkpoint.name, *wrote, *goes_on, drawn),
        )


def newest_whole(found: list[Path], asked: str | None, args: TrainingArguments) -> Path | None:
    """The first of `found` whose files are all as they were written, on every disk. All ranks must call it.

    Args:
        found: of them, in any order; other nodes may have found others.
        asked: `--resume_from_checkpoint`.
        args: of the run, whose process group is up.

    Raises:
        UserError: the named one is damaged.
    """
    mine = {checkpoints.step_of(path): path for path in found}
    for step in sorted(set.intersection(*map(set, sharding.from_all(list(mine)))), reverse=True):
        problems = _damage_read_by_all(mine[step], args)
        if not problems:
            problems = _damage_read_by_all(_best_beside(mine[step]), args)
        if not problems:
            return mine[step]
        if asked != AUTO:
            raise UserError(_damaged(mine[step], problems))
        for problem in problems[:3]:
            logger.warning("checkpoint-%d cannot be gone on from: %s", step, problem)
    return None
