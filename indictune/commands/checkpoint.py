"""`indictune checkpoint`: list the checkpoints of a run, or convert one of them to a plain model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from indictune.checkpoint import store
from indictune.checkpoint.resume import DamageReader, ResumePoint, best_of, check_trusted, choose_resume_point
from indictune.config.recipe import read_arguments
from indictune.config.shared_arguments import Checked, flag
from indictune.console_text import in_one_line, printable, shown_bytes, table
from indictune.errors import UserError
from indictune.files import AUTO, is_finished

HEADER = ("step", "strategy", "size", "rows of the epoch", "state", "")


@dataclass
class CheckpointFlags(Checked):
    """Which checkpoints are listed, or which one is converted."""

    needed = ("model", "indictune checkpoint FOLDER [--convert_to FOLDER]")

    model: str = flag("", "A run's --output_dir or its checkpoint-<step>. May be given as a bare first word.")
    convert_to: str | None = flag(
        None,
        "Gets the checkpoint as a plain model. Must not exist, or be empty. Of a run, the best checkpoint is "
        "converted, or the newest if there is no best.",
    )
    trust_checkpoint: bool = flag(
        False,
        "Read checkpoints outside a run's folder, or that other users can write. They hold pickles, which can run "
        "code.",
    )
    trust_remote_code: bool = flag(False, "Run Python code that comes with the model.")


def run_checkpoint(flags: Mapping[str, list[str]]) -> int:
    """List checkpoints or convert one; exit code 1 if a checkpoint is damaged."""
    args = read_arguments(flags, CheckpointFlags, "model")
    folder, reader = Path(os.path.abspath(args.model)), DamageReader()
    found = checkpoints_of(folder)
    if args.convert_to is None:
        print(printable(checkpoint_table(folder, found, reader)))
        return int(any(map(reader.damage, found)))
    from indictune.checkpoint.plain_model import convert  # torch is slow to import
    from indictune.hub.card import write_card

    chosen = best_checkpoint(found, reader) or found[0]
    target, trust = Path(args.convert_to), (args.trust_remote_code, args.trust_checkpoint)
    print(printable(convert(chosen, reader.damage(chosen), target, *trust)))
    write_card(target)  # without scores, which are those of another step
    return 0


def checkpoints_of(folder: Path) -> list[Path]:
    """The checkpoints of a run, newest first; or the folder itself, if it is named like one."""
    if folder.is_dir():
        os.listdir(folder)  # `glob` takes a folder that is closed to this user for an empty one
    found = store.checkpoints_in(folder) or ([folder] if folder.is_dir() and store.step_of(folder) >= 0 else [])
    if not found:
        raise UserError("no-checkpoints", "indictune checkpoint", folder)
    return found


def best_checkpoint(found: Sequence[Path], reader: DamageReader) -> Path | None:
    """The best checkpoint by the newest whole one; None if nothing was compared."""
    newest = next((each for each in found if not reader.damage(each)), None)
    best = None if newest is None else best_of(newest)
    return best if best in found else None


def checkpoint_table(folder: Path, found: Sequence[Path], reader: DamageReader) -> str:
    """A table of the checkpoints, their damage, and what `auto` would do."""
    best = best_checkpoint(found, reader)
    resumes = folder not in found and not is_finished(folder)
    point = choose_resume_point(folder, AUTO, reader) if resumes else ResumePoint()
    body, damage = [], []
    for each in found:
        problems = reader.damage(each)
        notes = ["best"] * (each == best) + ["auto"] * (each == point.checkpoint)
        about, manifest = ("-", "-", "-"), store.read_manifest(each)
        if manifest is not None:
            ranks = f"{manifest.strategy} x {manifest.world_size}"
            about = (ranks, shown_bytes(manifest.bytes), f"{manifest.rows_of_epoch:,}")
        body.append([str(store.step_of(each)), *about, "damaged" if problems else "whole", ", ".join(notes)])
        damage += [in_one_line(f"damaged: {problem}") for problem in problems]
    lines = [table(HEADER, body), *damage]
    if is_finished(folder):
        lines.append("The run is finished: --resume_from_checkpoint auto trains nothing.")
    elif resumes:
        lines.append(_next_start(folder, point.checkpoint))
    return "\n".join(lines)


def _next_start(folder: Path, checkpoint: Path | None) -> str:
    if checkpoint is None:
        return "None is whole: --resume_from_checkpoint auto starts afresh."
    try:
        check_trusted(checkpoint, folder, False, "--resume_from_checkpoint auto would be refused:")
    except UserError as error:
        return error.message
    return f"--resume_from_checkpoint auto resumes {checkpoint.name}."
