"""Which checkpoint a run goes on from, and whether it may."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup
from transformers import TrainingArguments

from indictune.checkpoint import abandoned, compatibility, flag_files, store
from indictune.checkpoint.best import best_of
from indictune.config.plan import Launch
from indictune.distributed import collectives, merge_shards, node_disks, resume_rules
from indictune.distributed.launch import local_world_size_of, world_size_of
from indictune.errors import Problem, UserError, problem
from indictune.files import AUTO, NOTHING_TO_DO, is_finished

logger = logging.getLogger(__name__)


class Finished(Exception):  # noqa: N818, nothing is wrong
    """The run has ended already, on every disk."""


def end_if_finished(output_dir: Path, asked: str | None) -> None:
    """End a run that has nothing to do. All ranks must call it.

    Where it is finished on some disks alone, it goes on from its last checkpoint, and is finished on all.

    Args:
        output_dir: of the run.
        asked: `--resume_from_checkpoint`.

    Raises:
        Finished: on all ranks.
    """
    if asked == AUTO and all(collectives.gather_from_all(is_finished(output_dir))):
        raise Finished(f"{output_dir}: {NOTHING_TO_DO}")


def check_restarts(asked: str | None, max_restarts: int) -> None:
    """Refuse a launcher that starts a command again which would not go on then.

    Args:
        asked: `--resume_from_checkpoint`.
        max_restarts: how often the launcher may start the command again.

    Raises:
        UserError: it may, and the newest checkpoint would not be gone on from.
    """
    if not max_restarts or asked == AUTO:
        return
    if asked is None:
        raise UserError(
            f"--max-restarts {max_restarts}: what the launcher starts again has the same flags, and would be refused, "
            f"because its folder holds a run. Give --resume_from_checkpoint {AUTO} too, which also starts one."
        )
    raise UserError(
        f"--resume_from_checkpoint {asked}: with --max-restarts {max_restarts} each start would go on from there, and "
        "leave behind what the one before has trained. Go on from it without --max-restarts; when that has saved a "
        f"checkpoint, --resume_from_checkpoint {AUTO} goes on with --max-restarts."
    )


def candidate(output_dir: Path, resume_from_checkpoint: str | None) -> Path | None:
    """The newest checkpoint that a run may go on from; None where it starts afresh, or does not know yet.

    No file is read but manifests and what `check_fits` reads next, in which damage would look like a mistake of the
    user's; of all others the sizes count. `newest_whole` reads them, and names what is passed over here.

    Args:
        output_dir: of the run.
        resume_from_checkpoint: the folder of one, `auto` for those of `output_dir`, or None.

    Raises:
        UserError: the named one is none, or not whole.
    """
    if resume_from_checkpoint is None:
        return None
    if resume_from_checkpoint == AUTO:
        return next((path for path in store.listed(output_dir) if not _damage_at_a_glance(path)), None)
    named = Path(resume_from_checkpoint)
    why_none = _why_none(named)
    problems = [] if why_none is not None else _damage_at_a_glance(named)
    if why_none is None and not problems:
        return named
    if _may_come(named, output_dir):
        return None
    raise UserError(_refused(named, why_none, problems))


def _may_come(named: Path, output_dir: Path) -> bool:
    """Whether a checkpoint that is not whole here may be so once the ranks have met: the disk of another node may have
    what this one lacks, and one that a killed run was about to replace is given back."""
    is_of_the_run = abandoned.run_of(named).resolve() == output_dir.resolve()
    is_given = local_world_size_of(os.environ) < world_size_of(os.environ)
    return is_of_the_run and (is_given or store.step_of_replaced(named.parent) == store.step_of(named))


def _damage_at_a_glance(checkpoint: Path) -> list[str]:
    return store.damage(checkpoint, thorough=False, read=compatibility.READ)


def _why_none(named: Path) -> str | None:
    """Why a path is no checkpoint; None where it is one, damaged or not."""
    try:
        if not named.is_dir():
            return "there is no such folder"
        if (named / store.MANIFEST).is_file():
            return None
        held = [path.name for path in store.listed(named)[:3]]
        return f"is no checkpoint (it has no {store.MANIFEST}){', but holds ' * bool(held)}{', '.join(held)}"
    except OSError as error:
        return f"cannot be entered ({error.strerror})"


def _damage_read_by_all(
    checkpoint: Path, args: TrainingArguments, trust_checkpoint: bool, disks_group: ProcessGroup | None
) -> list[str]:
    """`store.damage`, each rank of a disk reading its share of the files. All ranks must call it.

    A disk that lacks files is given them before.
    """
    _give_to_all_disks(checkpoint, args, trust_checkpoint, disks_group)
    manifest = store.read_manifest(checkpoint)
    problems = store.damage(checkpoint, share=node_disks.share_of_files(args))
    parts = collectives.gather_from_all((problems, manifest.save if manifest else ""))
    if len({save for _, save in parts if save}) > 1:
        return [f"{checkpoint} is of another save on another node's disk"]
    return list(dict.fromkeys(problem for part, _ in parts for problem in part))  # all see what is missing


def _give_to_all_disks(
    checkpoint: Path, args: TrainingArguments, trust_checkpoint: bool, disks_group: ProcessGroup | None
) -> None:
    """Let a disk that lacks files have those of one that has them all, and to which nobody else can write."""
    if args.save_on_each_node:
        is_whole = not store.damage(checkpoint, thorough=False)
        gives = is_whole and (trust_checkpoint or _why_not_own(checkpoint, Path(str(args.output_dir))) is None)
        node_disks.give_files(checkpoint, gives, args, disks_group)
        collectives.barrier()


def _refused(named: Path, why_none: str | None, problems: list[str]) -> str:
    """What there is to say of a checkpoint that was named, and is none or damaged."""
    if why_none is not None:
        return (
            f"--resume_from_checkpoint {named}: {why_none}. Name a checkpoint-<step> folder, or type {AUTO} for the "
            "newest in --output_dir."
        )
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
    run, folder = output_dir.resolve(), checkpoint.resolve().parent
    left_behind = folder.parent == run and abandoned.number_of(folder) > 0
    if not (folder == run or left_behind) or checkpoint.is_symlink():
        return f"it is not in this run's --output_dir {output_dir}"
    found = map(_open_to_others, (run, folder, checkpoint, *sorted(checkpoint.rglob("*"))))
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


def check_fits(
    checkpoint: Path, launch: Launch, configuration: Mapping[str, Any], model: Mapping[str, Any]
) -> list[str]:
    """Refuse a checkpoint whose state this run cannot take over; returns notes for the user where it can.

    Args:
        checkpoint: to resume from.
        launch: that would resume.
        configuration: of this run, as for `recipe.yaml`, as far as it is known.
        model: the configuration of its model, as for `config.json`, and the `_commit_hash` of one from the Hub; empty
            where it is not known.

    Raises:
        UserError: its states cannot be carried over, or it was written with other global batches, another optimizer or
            kind of schedule, be it a DeepSpeed file's, weights of other shapes, or is an adapter on other weights.
    """
    manifest = store.read_manifest(checkpoint)
    assert manifest is not None  # `candidate` has read it
    rows, optim = configuration["global_batch_size"], configuration["optim"]
    problems: list[Problem | str] = []
    if manifest.global_batch_size != rows:
        before = manifest.global_batch_size
        flag = "--global_batch_size"
        problems.append(problem("resume-other-global-batch", flag, rows, checkpoint=checkpoint.name, before=before))
    other_optimizer = compatibility.other_optimizer(checkpoint, optim, manifest.strategy, launch)
    problems += other_optimizer
    problems += _other_model(checkpoint, configuration, model)
    for why in (compatibility.other_schedule, compatibility.misfits, compatibility.past_the_end):
        problems += why(checkpoint, configuration)
    written_with = None if other_optimizer else compatibility.settings_of(checkpoint).get("optim")
    lost = resume_rules.not_carried_over(manifest.strategy, manifest.world_size, launch, written_with)
    if lost is None:
        problems += flag_files.other_states(checkpoint, launch.deepspeed or {})
    else:
        launches = {"before": _launch_name(manifest), "now": f"{launch.strategy} x {launch.world_size}"}
        problems.append(
            problem("resume-other-strategy", "--resume_from_checkpoint", checkpoint, states=lost, **launches)
        )
    if problems:
        raise UserError(problems=problems)
    return _as_another_launch(checkpoint.name, manifest, launch)


def _other_model(checkpoint: Path, configuration: Mapping[str, Any], model: Mapping[str, Any]) -> list[Problem | str]:
    shape = compatibility.other_shape(checkpoint, model)
    if shape is not None:
        named = configuration.get("model_name_or_path")
        return [problem("resume-other-shape", "--model_name_or_path", named, checkpoint=checkpoint.name, shape=shape)]
    if not model:
        return []
    other = compatibility.other_base(checkpoint, configuration["model_name_or_path"], model.get("_commit_hash"))
    return [] if other is None else [other]


def _launch_name(manifest: store.Manifest) -> str:
    return f"{manifest.strategy} x {manifest.world_size}"


def _as_another_launch(name: str, manifest: store.Manifest, launch: Launch) -> list[str]:
    if (manifest.strategy, manifest.world_size) == (launch.strategy, launch.world_size):
        return []
    drawn = "" if manifest.world_size == launch.world_size else " Dropout draws other numbers than it would have."
    return [
        f"{name} was written by {_launch_name(manifest)}, and {launch.strategy} x {launch.world_size} resumes it: "
        f"rows, weights and optimizer states continue where they were.{drawn}"
    ]


def newest_whole(
    found: list[Path], asked: str | None, args: TrainingArguments, trust_checkpoint: bool
) -> tuple[Path | None, Path | None]:
    """The newest checkpoint that is whole on every disk, and the best one that it names. All ranks must call it.

    Under `--load_best_model_at_end` an older one whose best is whole comes first: the run would end with the best. It
    is forgotten where none is left that names a whole one, and everywhere where it lacks on a disk: ranks that do not
    agree on the best would not stop and save together.

    Args:
        found: of them, in any order; other nodes may have found others, and are given what they lack.
        asked: `--resume_from_checkpoint`.
        args: of the run, whose process group is up.
        trust_checkpoint: the user vouches for them.

    Returns:
        Both; None for what there is not.

    Raises:
        UserError: the named one is damaged, or on no disk.
    """
    disks_group = node_disks.group_of_disks(args)
    whole = _whole(found, asked, args, trust_checkpoint, disks_group)
    with_best = ((each, *_best_on_every_disk(each, args, trust_checkpoint, disks_group)) for each in whole)
    chosen = store.first_choice(with_best, lambda each: each[2])
    if chosen is None:
        return None, None
    checkpoint, best, has_best = chosen
    if not has_best:
        logger.warning("%s is gone on from all the same: no other is whole. Its best is forgotten.", checkpoint.name)
    return checkpoint, best


def to_roll_back_to(found: list[Path], args: TrainingArguments, trust_checkpoint: bool) -> Path | None:
    """The newest checkpoint that is whole on every disk, whatever its best is: a run that rolls back keeps its own.
    All ranks must call it; arguments as in `newest_whole`."""
    return next(_whole(found, AUTO, args, trust_checkpoint, node_disks.group_of_disks(args)), None)


def _whole(
    found: list[Path], asked: str | None, args: TrainingArguments, trust_checkpoint: bool, group: ProcessGroup | None
) -> Iterator[Path]:
    """Those that are whole on every disk, the newest first."""
    mine = {store.step_of(path): path for path in found}
    for step in sorted(set.union(*map(set, collectives.gather_from_all(list(mine)))), reverse=True):
        checkpoint = mine.get(step, store.path_of(Path(str(args.output_dir)), step))
        problems = _damage_read_by_all(checkpoint, args, trust_checkpoint, group)
        if problems and asked != AUTO:
            whys = collectives.gather_from_all(_why_none(checkpoint))
            raise UserError(_refused(checkpoint, None if None in whys else whys[0], problems))
        if problems:
            for problem in problems[:3]:
                logger.warning("checkpoint-%d cannot be gone on from: %s", step, problem)
        else:
            yield checkpoint


def _best_on_every_disk(
    checkpoint: Path, args: TrainingArguments, trust_checkpoint: bool, disks_group: ProcessGroup | None
) -> tuple[Path | None, bool]:
    """The best of a whole one; None where it lacks on a disk, or is damaged. And whether that is as it must be."""
    is_the_same = len(set(collectives.gather_from_all(store.best_step(checkpoint)))) == 1
    best, problems = best_of(checkpoint) if is_the_same else None, []
    if best is not None and best != checkpoint:
        if args.load_best_model_at_end:
            problems = _damage_read_by_all(best, args, trust_checkpoint, disks_group)
        else:
            _give_to_all_disks(best, args, trust_checkpoint, disks_group)
    if best is None or not problems:
        is_everywhere = all(collectives.gather_from_all(best is not None and best.is_dir()))
        return best if is_everywhere else None, True
    told = "%s is not the first to go on from, because its best checkpoint, %s, is damaged: %s"
    logger.warning(told, checkpoint.name, best.name, "; ".join(problems[:3]))
    return None, False


def can_load_best(
    best: Path, args: TrainingArguments, trust_checkpoint: bool, disks_group: ProcessGroup | None
) -> bool:
    """Whether the best checkpoint is whole on every disk, at the end of a run; a warning names what is not. All ranks
    must call it.

    Weights in safetensors run no code: a run in a folder that others can write to ends like any other.

    Raises:
        UserError: it holds its weights in pickles, which others may have written.
    """
    problems = _damage_read_by_all(best, args, trust_checkpoint, disks_group)
    if problems:
        logger.warning("%s, the best, cannot be loaded: %s", best.name, "; ".join(problems[:3]))
    elif merge_shards.is_in_parts(best) or not any(best.glob("*.safetensors")):
        flag = "--load_best_model_at_end from"
        check_trusted(best, Path(str(args.output_dir)), trust_checkpoint, flag)
    return not problems
