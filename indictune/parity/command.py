"""`indictune parity`: run a recipe under several strategy files, and compare each run with one process."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from indictune.config.command_arguments import ParityArguments
from indictune.config.read_words import read_flags
from indictune.config.recipe import read_arguments
from indictune.console_text import printable, table
from indictune.distributed.choose_launcher import Launcher, choose_launcher, fitting_launcher
from indictune.errors import Problems, UserError
from indictune.parity.compare import Comparison, Difference, compare
from indictune.parity.picture import draw
from indictune.parity.runs import Ended, exact_flags, problems_of_set, run
from indictune.train_command import read_asked, with_defaults

ONE = "one process"
_HEADER = ("strategy", "processes", "loss", "grad norm", "weights", "evaluation", "verdict")
_OWN = ("strategies", "steps", "num_processes", "tolerance", "plot", "json")


def parity_command(argv: Sequence[str]) -> int:
    """`indictune parity RECIPE.yaml --strategies A,B [flags of the run]`; returns the exit code, 1 if a run differs.

    Raises:
        UserError: all problems of the flags and the recipe, or one process cannot run it.
    """
    flags = read_flags(argv)
    own = [word for name in _OWN if name in flags for word in (f"--{name}", *flags[name])]
    args = read_arguments(own, ParityArguments, "--strategies")
    rest = [word for name, words in flags.items() if name not in _OWN for word in ([f"--{name}"] * bool(name) + words)]
    asked = read_asked(rest)
    problems = Problems(problems_of_set(asked))
    launchers = _launchers(args.strategies.split(","), args.num_processes, problems)
    keeps = "output_dir" in asked.flags
    if keeps:
        problems.attempt(_make_folder, "--output_dir", Path(asked.output_dir), must_be_empty=True)
    if args.plot:
        problems.attempt(_make_folder, "--plot", Path(args.plot).parent)
    problems.raise_any()
    with ExitStack() as stack:
        folder = Path(asked.output_dir if keeps else stack.enter_context(_temporary()))
        asked = exact_flags(with_defaults(asked), args.steps)
        reference = run(asked, ONE, choose_launcher(None, 1), folder / "one-process")
        if reference.state != "ok":
            raise UserError("parity-no-reference", value=reference.message)
        ended = [run(asked, name, launcher, folder / name) for name, launcher in launchers.items()]
        ok = [each for each in ended if each.state == "ok"]
        compared = [compare(reference.traced, each.traced, args.tolerance) for each in ok]
        losses = {each.name: each.traced.losses for each in (reference, *ok)}
        failed = [each for each in ended if each.state != "ok"]
    if args.plot:
        draw(losses, args.tolerance, Path(args.plot))
    if args.json:
        print(json.dumps(_record(args, losses, compared, failed), indent=1))
    else:
        print(printable(shown(len(losses[ONE]), args.tolerance, compared, failed)))
    agree = bool(compared) and all(each.agrees for each in compared)
    return 0 if agree and all(each.state == "user_error" for each in failed) else 1


def _make_folder(flag: str, folder: Path, must_be_empty: bool = False) -> None:
    """Make a folder that gets something at the end, before the runs take their time.

    Raises:
        UserError: it cannot be made or written, or it holds files and must not.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if must_be_empty and any(folder.iterdir()):
            raise UserError("folder-not-empty", flag, folder)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError("folder-not-writable", flag, folder, reason=error.strerror) from error


def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="indictune-parity-")


def _launchers(names: Sequence[str], processes: int | None, problems: Problems) -> dict[str, Launcher]:
    """The launcher of each strategy, by the name of its file. Strategies that do not exist are added to `problems`."""
    found, own = dict[str, Launcher](), Problems()
    for name in names:
        launcher = own.attempt(fitting_launcher, name.strip(), processes)
        if launcher is not None and launcher not in found.values():
            stem = launcher.config_file.stem
            found[f"{stem}-{len(found) + 1}" if stem in found else stem] = launcher
    problems.extend(replace(each, flag="--strategies") for each in own)
    return found


def shown(steps: int, tolerance: float, compared: Sequence[Comparison], failed: Sequence[Ended]) -> str:
    """The table, the causes, and the verdict."""
    lines = [f"Each run next to one process, {steps} steps; relative differences, tolerance {tolerance:g}"]
    body = [
        [each.name, str(each.processes), *map(_cell, each.parts.values()), "same" if each.agrees else "differs"]
        for each in compared
    ]
    lines += [table(list(_HEADER), body)] if body else []
    lines += [f"{each.name} differs by {cause}" for each in compared for cause in each.causes]
    for each in failed:
        verb = "cannot run it" if each.state == "user_error" else "failed"
        lines.append(f"{each.name} on {each.processes} processes {verb}: {each.message}")
    same = sum(each.agrees for each in compared)
    lines.append(f"{same} of {len(compared)} strategies that ran train the model of one process.")
    return "\n".join(lines)


def _cell(part: Difference) -> str:
    if part.first is None:
        return f"{part.largest:.1e}"
    place = f"step {part.first}" if isinstance(part.first, int) else part.first
    return f"{part.largest:.1e} ({place})"


def _record(
    args: ParityArguments, losses: dict[str, list[float]], compared: Sequence[Comparison], failed: Sequence[Ended]
) -> dict[str, Any]:
    runs = {
        each.name: {
            "processes": each.processes,
            "agrees": each.agrees,
            "causes": list(each.causes),
            "differences": {name: _numbers(part) for name, part in each.parts.items()},
        }
        for each in compared
    }
    stopped = {each.name: {"state": each.state, "message": each.message} for each in failed}
    return {"steps": len(losses[ONE]), "tolerance": args.tolerance, "runs": runs, "stopped": stopped, "losses": losses}


def _numbers(part: Difference) -> dict[str, Any]:
    largest = part.largest if math.isfinite(part.largest) else None
    return {"largest": largest, "first_beyond_tolerance": part.first}
