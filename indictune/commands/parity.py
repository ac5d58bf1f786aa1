"""`indictune parity`: run a recipe under several strategy files, and compare each run with one process."""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from indictune.commands.train import Asked, fit_data_ranks, read_asked, with_defaults
from indictune.config.command_line import PARITY_TRACE, SCRIPTS, flags_of
from indictune.config.recipe import read_arguments
from indictune.config.shared_arguments import Checked, flag
from indictune.console_text import printable, table
from indictune.distributed.choose_launcher import Launcher, choose_launcher, fitting_launcher
from indictune.errors import Problem, Problems, UserError, problem
from indictune.parity_traces import TRACE, RunComparison, RunDifference, Traced, compare_traces, draw_losses
from indictune.supervise import run_folder
from indictune.versions import as_seen_from_here, script

ONE = "one process"
_HEADER = ("strategy", "processes", "loss", "grad norm", "weights", "evaluation", "verdict")
# What makes runs comparable, unless the user asks for something else.
_EXACT = {
    **dict.fromkeys(("dropout", "snapshot_steps", "num_sample_generations"), "0"),
    **dict.fromkeys(("eval_strategy", "save_strategy"), "no"),
    **dict.fromkeys(("bf16", "fp16", "tf32", "load_best_model_at_end", "push_to_hub", "report"), "false"),
}
# What the trace needs: every step is logged, and rows are read in the process that trains.
_TRACED = {"dataloader_num_workers": "0", "logging_strategy": "steps", "logging_steps": "1"}
_SET = ("max_steps", "num_train_epochs", *_TRACED)


@dataclass
class ParityFlags(Checked):
    """Which strategies are compared with one process, and how. The other flags are those of the run."""

    needed = (
        "strategies",
        "indictune parity RECIPE.yaml --strategies A,B, with names of strategy files that `indictune recipes` lists.",
    )

    strategies: str = flag("", "Strategies with commas between them: files of accelerate_configs/ by name, or others.")
    steps: int = flag(20, "Optimizer steps of each run.")
    num_processes: int | None = flag(
        None, "Processes of each strategy. Default: one for each GPU; without GPUs, as few as the file can have."
    )
    tolerance: float = flag(1e-4, "Largest relative difference of runs that agree.")
    plot: str | None = flag(None, "Gets a picture of the loss curves: png, svg or pdf.")
    json: bool = flag(False, "Print all numbers as JSON.")

    def check(self) -> Iterator[Problem]:
        """Refuse a picture of another kind."""
        yield from super().check()
        if self.plot is not None and Path(self.plot).suffix.lower() not in (".png", ".svg", ".pdf"):
            kinds = "a png, an svg or a pdf"
            yield problem("picture-of-another-kind", "--plot", self.plot, kinds=kinds, example="curves.png")


@dataclass(frozen=True)
class Ended:
    """How the run of a strategy ended."""

    name: str
    processes: int
    folder: Path
    state: str  # of `status.json`: ok, user_error, failed or resumable
    message: str  # why it is not ok


def run_parity(flags: Mapping[str, list[str]]) -> int:
    """Compare the runs of a recipe; exit code 1 if a run differs."""
    own = [each.name for each in fields(ParityFlags)]
    args = read_arguments({name: flags[name] for name in own if name in flags}, ParityFlags, "strategies")
    asked = read_asked({name: words for name, words in flags.items() if name not in own})
    given = [(f"--{name}", " ".join(asked.flags[name])) for name in _SET if name in asked.flags]
    problems = Problems(problem("parity-sets", *each) for each in given)
    launchers = _launchers(args.strategies.split(","), args.num_processes, problems)
    keeps = "output_dir" in asked.flags
    if keeps:
        problems.attempt(run_folder.make_folder, "--output_dir", Path(asked.output_dir), must_be_empty=True)
    if args.plot:
        problems.attempt(run_folder.make_folder, "--plot", Path(args.plot).parent)
    problems.raise_any()
    place: AbstractContextManager[str] = nullcontext(asked.output_dir)
    with place if keeps else tempfile.TemporaryDirectory(prefix="indictune-parity-") as given_or_made:
        folder = Path(given_or_made)
        asked = exact_flags(with_defaults(asked), args.steps)
        reference = run_one(asked, ONE, choose_launcher(None, 1), folder / "one-process")
        if reference.state != "ok":
            raise UserError("parity-no-reference", value=reference.message)
        ended = [run_one(asked, name, launcher, folder / name) for name, launcher in launchers.items()]
        ok = [each for each in ended if each.state == "ok"]
        traced = {each.name: Traced(each.name, each.folder) for each in (reference, *ok)}
        compared = [compare_traces(traced[ONE], traced[each.name], args.tolerance) for each in ok]
        losses = {name: each.losses for name, each in traced.items()}
        failed = [each for each in ended if each.state != "ok"]
    if args.plot:
        draw_losses(losses, args.tolerance, Path(args.plot))
    if args.json:
        print(json.dumps(_record(args, losses, compared, failed), indent=1))
    else:
        print(printable(parity_text(len(losses[ONE]), args.tolerance, compared, failed)))
    agree = bool(compared) and all(each.agrees for each in compared)
    return 0 if agree and all(each.state == "user_error" for each in failed) else 1


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


def parity_text(steps: int, tolerance: float, compared: Sequence[RunComparison], failed: Sequence[Ended]) -> str:
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


def _cell(part: RunDifference) -> str:
    if part.first is None:
        return f"{part.largest:.1e}"
    place = f"step {part.first}" if isinstance(part.first, int) else part.first
    return f"{part.largest:.1e} ({place})"


def _record(
    args: ParityFlags, losses: dict[str, list[float]], compared: Sequence[RunComparison], failed: Sequence[Ended]
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


def _numbers(part: RunDifference) -> dict[str, Any]:
    largest = part.largest if math.isfinite(part.largest) else None
    return {"largest": largest, "first_beyond_tolerance": part.first}


def exact_flags(asked: Asked, steps: int) -> Asked:
    """The same with the flags that make runs comparable; those that were typed stay."""
    known = flags_of(asked.task)
    added: Mapping[str, Sequence[str]] = {name: [value] for name, value in _EXACT.items() if name in known}
    fixed = {name: [value] for name, value in _TRACED.items()}
    return replace(asked, flags={**added, **asked.flags, **fixed, "max_steps": [str(steps)]})


def run_one(asked: Asked, name: str, launcher: Launcher, folder: Path) -> Ended:
    """Train under a strategy in a folder of its own, and wait for the end. Its console goes to a file there."""
    folder.mkdir(parents=True)
    asked = fit_data_ranks(replace(asked, flags={**asked.flags, "output_dir": [str(folder)]}), launcher)
    command = launcher.command(as_seen_from_here(script(SCRIPTS[asked.task])), asked.words())
    began = time.time()
    end = run_folder.run_in_folder(command, folder, {PARITY_TRACE: str((folder / TRACE).absolute())})
    kept = "" if end.state == "ok" or not end.message.startswith("exit code") else " --output_dir keeps what it said."
    print(f"indictune: {name} ran for {time.time() - began:.0f} s: {end.state}", file=sys.stderr, flush=True)
    return Ended(name, launcher.processes, folder, end.state, f"{end.message}{kept}")
