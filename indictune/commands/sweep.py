"""`indictune sweep`: try settings of a run, each by several seeds or folds, and compare them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from indictune.commands.train import (
    Asked,
    TrainFlags,
    chosen,
    command_of_run,
    fit_data_ranks,
    read_asked,
    with_defaults,
)
from indictune.config.command_line import DECIDED, flags_of, to_words
from indictune.config.plan import AnyPlan, unresolved
from indictune.config.recipe import DATA_SOURCE_FIELDS, read_arguments, read_recipe
from indictune.config.shared_arguments import Checked, check_ranges, flag
from indictune.console_text import printable
from indictune.credentials import holds_token, without_tokens
from indictune.distributed.choose_launcher import Launcher, choose_launcher
from indictune.errors import Problem, Problems, UserError, problem
from indictune.evaluation.breakdown import WORST, near_names
from indictune.files import AUTO, write_whole
from indictune.preflight.derive import has_score, plan_of_rows
from indictune.stop_signals import EXIT_RESUMABLE, Stopped
from indictune.supervise import run_folder
from indictune.sweep.definition import Dimension, Repeat, SweepPlan, Words, combinations, read_space
from indictune.sweep.folds import digest_of_files, files_of_folds, read_rows_of_folds, without_rows
from indictune.tasks.all_tasks import TASKS
from indictune.tasks.protocol import Task
from indictune.versions import check_extra

_TRIALS = 20
_LOGIN = "Leave the login out of the URL: PostgreSQL reads PGUSER and ~/.pgpass."


@dataclass
class SweepFlags(Checked):
    """What is tried, and how often. The other flags are those of the run."""

    seeds: int = flag(1, "Try each setting with this many seeds: --seed and those after it.")
    folds: int | None = flag(
        None,
        "Score each setting on all training rows: each of so many parts is held out by a run on the others.",
    )
    grid: list[str] = flag([], "Flags whose values are all combined: learning_rate=1e-4,3e-4 num_train_epochs=2,4.")
    search: list[str] = flag(
        [], "Flags whose values are searched: learning_rate=1e-5..3e-4 num_train_epochs=2..6 bf16=true,false."
    )
    trials: int | None = flag(None, "Settings that --search tries. More may be asked for later. Default: 20.")
    metric: str | None = flag(
        None,
        "Score of the validation rows or the folds that compares settings. Default: --metric_for_best_model.",
    )
    storage: str | None = flag(
        None,
        "URL of the database with the trials, which sweeps on several machines share, such as "
        "postgresql+psycopg://host/sweeps. Default: sweep.db in the folder of the sweep.",
    )
    prune: bool = flag(
        True, "End a setting of a search when an evaluation is worse than the median of earlier settings."
    )
    keep_models: bool = flag(False, "Keep checkpoints and weights of all settings. Default: those of the best.")
    strategy: str | None = flag(None, "A file of accelerate_configs/ that starts each run, as of `indictune train`.")
    num_processes: int | None = flag(None, "Processes of each run, as of `indictune train`.")

    def check(self) -> Iterator[Problem]:
        """Refuse a grid with a search, and flags of a search without one."""
        yield from super().check()
        if self.grid and self.search:
            yield problem("sweep-grid-and-search", "--grid", " ".join(self.grid))
        for name in [] if self.search else ["trials", "prune"]:
            if (value := getattr(self, name)) not in (None, True):
                yield problem("sweep-needs-search", f"--{name}", str(value).lower())


def run_sweep(flags: Mapping[str, list[str]]) -> int:
    """Run the sweep, or continue it."""
    check_extra("sweep", "sweep", "optuna")
    from indictune.sweep.results import results_text, write_results  # need the extra
    from indictune.sweep.trials import Trials

    plan = plan_of_sweep(flags)
    trials = Trials(plan)
    done = sum(each.state.is_finished() for each in trials.all())
    print(f"indictune: {plan.folder}: {done} of {plan.trials} settings are done", file=sys.stderr, flush=True)
    write_results(trials)

    def after_each() -> None:
        write_results(trials)
        ended = sum(each.state.is_finished() for each in trials.all())
        print(f"indictune: {ended} of {plan.trials} settings are done", file=sys.stderr, flush=True)

    try:
        trials.run_all(after_each)
    except Stopped:
        print("indictune: stopped, and nothing is lost. The same command continues the sweep.", file=sys.stderr)
        return EXIT_RESUMABLE
    write_results(trials)
    print(printable(without_tokens(results_text(trials))))
    return 0 if trials.ranked() else 1


def plan_of_sweep(flags: Mapping[str, list[str]]) -> SweepPlan:
    """The sweep that the flags describe; a `UserError` with all problems. Rows are read only if there are folds."""
    args, asked, dimensions, launcher = _asked(flags)
    problems, task, whole, folder = Problems(), _task_of(asked), whole_flags(asked), Path(asked.output_dir)
    first = {**whole, **{each.name: [each.ends[0]] for each in dimensions}}
    run, found = plan_of_rows(read_recipe({name: [*words] for name, words in first.items()}, task.arguments), task)
    problems.extend(found)
    problems.attempt(_check_folder, folder)
    scored, rows = problems.attempt(_metric, args, run, task), problems.attempt(digest_of_files, run)
    problems.raise_any()
    assert scored is not None
    seed, folds, files = run.training.seed, [dict[str, list[str]]()], dict[Path, str]()
    if args.folds is not None:
        read = read_rows_of_folds(run.recipe, task, args.folds)
        folds, files, rows = files_of_folds(folder, read.splits.rows, args.folds, seed)
    named = {name: words for name, words in whole.items() if name != "output_dir"}
    space = {each.name: ",".join(each.values) or "..".join(each.ends) for each in dimensions}
    definition: dict[str, Any] = {"task": task.name, "flags": named, "rows": rows}
    definition |= {"search" if args.search else "grid": space}
    prunes, repeats = bool(args.search) and args.prune, _repeats(args, whole, dimensions, folds, seed)
    definition |= {"seeds": args.seeds, "folds": args.folds, "metric": scored[0], "prune": prunes}
    plan = SweepPlan(
        folder=folder,
        definition=definition,
        dimensions=dimensions,
        is_grid=not args.search,
        trials=(args.trials or _TRIALS) if args.search else len(combinations(dimensions)),
        repeats=repeats,
        metric=scored[0],
        maximises=scored[1],
        prunes=prunes,
        keeps_models=args.keep_models,
        storage=args.storage or f"sqlite:///{folder.absolute() / 'sweep.db'}",
        command=partial(_command, asked, launcher, without_rows(whole) if args.folds else whole),
        recipe={**whole, **({} if args.folds else repeats[0].flags), "output_dir": [str(folder / "best")]},
    )
    plan.check_definition()
    for path, content in files.items():
        write_whole(path, content)
    return plan


def _asked(flags: Mapping[str, list[str]]) -> tuple[SweepFlags, Asked, list[Dimension], Launcher]:
    """What was typed: the command's own flags, those of the run, the flags that vary, and how each run is started."""
    problems, own = Problems(), {each.name for each in fields(SweepFlags)}
    if holds_token(" ".join(flags.get("storage", []))):
        raise UserError("token-in-the-open", "--storage", way_out=_LOGIN)
    args = problems.attempt(read_arguments, {name: flags[name] for name in own & flags.keys()}, SweepFlags, "grid")
    asked = problems.attempt(read_asked, {name: words for name, words in flags.items() if name not in own})
    if args is None or asked is None:
        raise UserError(problems=problems)
    dimensions = _space(args, asked, problems)
    launcher = problems.attempt(_launcher, args)
    problems.raise_any()
    asked = with_defaults(_with_folder(asked))
    if args.strategy == "auto":
        asked = chosen(replace(asked, launch=TrainFlags(args.strategy, args.num_processes)))
        launcher = choose_launcher(asked.launch.strategy, asked.launch.num_processes)
    assert launcher is not None
    return args, asked, dimensions, launcher


def _space(args: SweepFlags, asked: Asked, problems: Problems) -> list[Dimension]:
    """The flags that vary. Problems: those that are typed too or that the sweep sets, and values that no run reads."""
    known, types = flags_of(asked.task), _task_of(asked).arguments
    given = "--search" if args.search else "--grid"
    dimensions = read_space(given, args.search or args.grid, known, problems)
    names = [each.name for each in dimensions]
    for name in sorted({*names}):
        if name in asked.flags:
            problems.append(problem("sweep-typed-too", f"--{name}", " ".join(asked.flags[name]), space=given))
        if names.count(name) > 1:
            problems.append(problem("sweep-twice", given, name))
    if args.seeds > 1 and "seed" in names:
        problems.append(problem("sweep-sets", given, "seed", name="seed"))
    for name in ("resume_from_checkpoint", "push_to_hub"):
        if name in asked.flags:
            problems.append(problem("sweep-sets-flag", f"--{name}", " ".join(asked.flags[name])))
    for name, value in ((each.name, value) for each in dimensions for value in each.ends):
        read = read_recipe({name: [value]}, types)
        ranges = [each for kind in types for each in check_ranges(unresolved(kind, read.values))]
        found = [*read.problems, *(each for each in ranges if each.flag == f"--{name}")]
        problems.extend(each for each in found if each not in problems)
    return dimensions


def _task_of(asked: Asked) -> Task[Any, Any, Any]:
    return next(each for each in TASKS if each.name == asked.task)


def _launcher(args: SweepFlags) -> Launcher:
    launcher = choose_launcher(None if args.strategy == "auto" else args.strategy, args.num_processes)
    if launcher.machines > 1:
        raise UserError("sweep-several-machines", "--strategy", launcher.config_file, machines=launcher.machines)
    return launcher


def _with_folder(asked: Asked) -> Asked:
    """The same with a folder of its own. That of the recipe is for a run."""
    if "output_dir" in asked.flags:
        return asked
    folder = Path("outputs", f"{asked.task if asked.recipe is None else asked.recipe.stem}-sweep")
    print(f"indictune: no --output_dir given: {folder}", file=sys.stderr)
    return replace(asked, flags={**asked.flags, "output_dir": [str(folder)]})


def whole_flags(asked: Asked) -> dict[str, list[str]]:
    """The recipe and the flags of a run, all as flags. Rows that are named by flags replace those of the recipe."""
    content = {name: value for name, value in asked.content.items() if value is not None and name != DECIDED}
    if asked.flags.keys() & {*DATA_SOURCE_FIELDS} - {"dataset_config_name", "dataset_revision", "dataset_splits"}:
        content = {name: value for name, value in content.items() if name not in DATA_SOURCE_FIELDS}
    words = {name: to_words(value) for name, value in content.items()}
    return {name: each for name, each in words.items() if each} | {name: [*each] for name, each in asked.flags.items()}


def _check_folder(folder: Path) -> None:
    if run_folder.holds_files(folder):
        raise UserError("sweep-folder-of-run", "--output_dir", folder)
    run_folder.make_folder("--output_dir", folder)


def _metric(args: SweepFlags, plan: AnyPlan, task: Task[Any, Any, Any]) -> tuple[str, bool]:
    """The metric that compares settings, and whether the highest is the best."""
    values = plan.recipe.values
    given = args.metric or values.get("metric_for_best_model") or task.metrics(plan)[0]
    name, flag_of_it = given.removeprefix("eval_"), "--metric" if args.metric else "--metric_for_best_model"
    if args.folds is None and not plan.training.do_eval and _holds_nothing_out(values):
        raise UserError("sweep-without-validation", flag_of_it, name)
    if has_score(task, plan, name):
        return name, not name.removeprefix(WORST).startswith(task.lower_is_better)
    if not plan.training.metrics:
        raise UserError("metric-unknown", flag_of_it, name, near=near_names(name, task.metrics(plan)))
    if "greater_is_better" not in values:
        raise UserError("metric-without-direction", flag_of_it, name)
    return name, bool(values["greater_is_better"])


def _holds_nothing_out(values: Mapping[str, Any]) -> bool:
    named = values.get("validation_file") or values.get("dataset_name")
    return not named and values.get("validation_split") == 0


def _repeats(
    args: SweepFlags, whole: Words, dimensions: Sequence[Dimension], of_folds: Sequence[Words], first: int
) -> list[Repeat]:
    """The runs of each setting. Where training rows are held out, all seeds hold out the same."""
    is_searched = any(each.name == "seed" for each in dimensions)
    varies = (args.seeds > 1 or is_searched) and args.folds is None
    fixed = {"data_seed": [str(first)]} if varies and not {"validation_file", "data_seed"} & whole.keys() else {}
    found = []
    for fold, flags in enumerate(of_folds):
        for seed in range(first, first + args.seeds):
            names = [f"fold-{fold}"] if args.folds else []
            names += [f"seed-{seed}"] if args.seeds > 1 or not args.folds else []
            own = {**flags, **fixed, **({} if is_searched else {"seed": [str(seed)]})}
            found.append(Repeat("-".join(names), own, fold if args.folds else None, seed))
    return found


def _command(asked: Asked, launcher: Launcher, base: Words, flags: Words, folder: Path) -> list[str]:
    """The command of a run by flags beside the `base`; without a report and a baseline, unless they were typed."""
    known = flags_of(asked.task)
    fitted = fit_data_ranks(replace(asked, flags={**asked.flags, **flags}), launcher).flags
    rows = {name: words for name, words in fitted.items() if name == "per_device_train_batch_size"}
    quick = {name: ["false"] for name in ("report", "baseline") if name in known and name not in base}
    whole = {**base, **quick, **rows, **flags, "push_to_hub": ["false"], "resume_from_checkpoint": [AUTO]}
    if "validation_file" in flags:  # that a dataset brought
        whole.pop("validation_split", None)
    return command_of_run(replace(asked, recipe=None, content={}, flags=whole), launcher, folder)
