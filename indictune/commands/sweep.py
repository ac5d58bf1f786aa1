"""`indictune sweep`: try settings of a run, each by several seeds or folds, and compare them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from indictune.commands.train import Asked, read_asked, with_defaults
from indictune.config.command_line import DATA_SOURCE_FIELDS, DECIDED, FILES_OF_ROWS, flags_of, to_words
from indictune.config.plan import AnyPlan
from indictune.config.recipe import read_arguments, read_recipe
from indictune.config.shared_arguments import EngineArguments, flag
from indictune.console_text import printable
from indictune.credentials import without_tokens
from indictune.doctor.run_files import row_digests
from indictune.errors import Problem, Problems, UserError, problem
from indictune.evaluation.breakdown import WORST, near_names
from indictune.files import AUTO
from indictune.preflight.derive import plan_of_rows
from indictune.ray_cluster import cluster
from indictune.stop_signals import EXIT_RESUMABLE, Stopped
from indictune.supervise.run_folder import check_free, make_folder
from indictune.sweep.definition import SweepPlan, Words, check_definition, ends_of, read_space
from indictune.sweep.folds import OF_ROWS, rows_of_folds, write_folds
from indictune.tasks.all_tasks import TASKS
from indictune.tasks.protocol import Task
from indictune.versions import check_extra

_TRIALS = 20
_OF_EACH_RUN = {"resume_from_checkpoint", "push_to_hub"}
_LAUNCH = {"strategy", "num_processes"}


@dataclass
class SweepFlags(EngineArguments):
    """What is tried, and how often. The other flags are those of the run."""

    seeds: int = flag(1, "Try each setting with this many seeds: --seed and those after it.")
    folds: int | None = flag(None, "Score settings on all training rows: a run holds out each of so many parts.")
    grid: list[str] = flag([], "Flags whose values are combined: learning_rate=1e-4,3e-4 num_train_epochs=2,4.")
    search: list[str] = flag([], "Flags that Optuna searches: learning_rate=1e-5..3e-4 bf16=true,false.")
    trials: int | None = flag(None, "Settings that --search tries. More may be asked for later. Default: 20.")
    metric: str | None = flag(None, "Score that compares settings. Default: --metric_for_best_model.")
    storage: str | None = flag(None, "URL of a database that sweeps share. Default: sweep.db in the sweep's folder.")
    strategy: str | None = flag(None, "A file of accelerate_configs/ that starts each run, as of `indictune train`.")
    num_processes: int | None = flag(None, "Processes of each run, as of `indictune train`; on a Ray cluster 1.")

    def check(self) -> Iterator[Problem]:
        """Refuse a grid with a search, and flags of a search without one."""
        yield from super().check()
        if self.grid and self.search:
            yield problem("sweep-grid-and-search", "--grid", " ".join(self.grid))
        if self.trials is not None and not self.search:
            yield problem("sweep-needs-search", "--trials", self.trials)


def run_sweep(flags: Mapping[str, list[str]]) -> int:
    """Run the sweep, or continue it."""
    check_extra("sweep", "sweep", "optuna")
    from indictune.sweep.results import results_text, write_results  # need the extra
    from indictune.sweep.trials import Trials

    plan = plan_of_sweep(flags)
    trials = Trials(plan)

    def show_and_write() -> None:
        ended = sum(each.state.is_finished() for each in trials.all())
        print(f"indictune: {ended} of {plan.trials} settings are done", file=sys.stderr, flush=True)
        write_results(trials)

    show_and_write()
    try:
        if flags.get("engine") == ["ray"]:
            with cluster(" ".join(flags.get("ray_address", [])) or None, shows_output=False):
                trials.run_all_on_cluster(show_and_write, int(flags.get("num_processes", ["1"])[0]))
        else:
            trials.run_all(show_and_write)
    except Stopped:
        print("indictune: stopped, and nothing is lost. The same command continues the sweep.", file=sys.stderr)
        return EXIT_RESUMABLE
    print(printable(without_tokens(results_text(trials))))
    return 0 if trials.ranked() else 1


def plan_of_sweep(flags: Mapping[str, list[str]]) -> SweepPlan:
    """The sweep that the flags describe; a `UserError` with all problems. Rows are read only if there are folds."""
    args, asked = _asked(flags)
    task = next(each for each in TASKS if each.name == asked.task)
    words, whole, folder = args.search or args.grid, _whole_flags(asked), Path(asked.output_dir)
    given, space = _given_and_space("--search" if args.search else "--grid", words, asked, task)
    first = {**whole, **{name: [ends_of(values)[0]] for name, values in given.items()}}
    run, problems = plan_of_rows(read_recipe(first, task.arguments), task)
    problems.attempt(check_free, folder, None)
    problems.attempt(make_folder, "--output_dir", folder)
    metric = problems.attempt(_metric, args, run, task)
    problems.raise_any()
    assert metric is not None
    tried = {"task": task.name, "tried": " ".join(words), "seeds": str(args.seeds), "folds": str(args.folds)}
    tried["storage"] = without_tokens(args.storage or "its own")
    definition = {name: " ".join(typed) for name, typed in whole.items() if name != "output_dir"} | tried
    definition |= {"metric": metric, **row_digests(run.recipe.values)}
    check_definition(folder, definition)
    if args.folds is None and not {"validation_file", "data_seed"} & whole.keys():
        whole["data_seed"] = [str(run.training.seed)]  # all seeds hold out the same rows
    grid = [dict(zip(given, values, strict=True)) for values in product(*map(ends_of, given.values()))]
    launch = {name: flags[name] for name in _LAUNCH & flags.keys()}
    return SweepPlan(
        folder=folder,
        definition=definition,
        space=space,
        grid=[] if args.search else grid,
        trials=(args.trials or _TRIALS) if args.search else len(grid),
        repeats=_repeats(args, run, task, folder / "folds"),
        metric=metric,
        maximises=not metric.removeprefix(WORST).startswith(task.lower_is_better),
        storage=args.storage or f"sqlite:///{folder.absolute() / 'sweep.db'}",
        command=partial(_command, replace(asked, recipe=None, content={}), {**whole, **launch}),
        recipe={"task": [task.name], **whole, "output_dir": [f"{folder}/best"]},
    )


def _given_and_space(
    flag: str, words: Sequence[str], asked: Asked, task: Task[Any, Any, Any]
) -> tuple[dict[str, str], dict[str, Any]]:
    """The flags that vary, as they are typed and as Optuna has them; a `UserError` with all that cannot vary."""
    pairs, problems = (word.partition("=") for word in words), Problems()
    given = {name.removeprefix("--").replace("-", "_"): values for name, _, values in pairs}
    space = read_space(flag, given, flags_of(task.name), problems)
    if len(given) < len(words) or given.keys() & asked.flags.keys():
        problems.append(problem("sweep-given-twice", flag, " ".join(words)))
    for name in _OF_EACH_RUN & asked.flags.keys():
        problems.append(problem("sweep-sets", f"--{name}", " ".join(asked.flags[name]), name=name))
    for name in space:
        for value in ends_of(given[name]):
            problems.extend(read_recipe({name: [value]}, task.arguments).problems)
    problems.raise_any()
    return given, space


def _asked(flags: Mapping[str, list[str]]) -> tuple[SweepFlags, Asked]:
    """What was typed: the command's own flags, and those of a run."""
    problems, own = Problems(), {each.name for each in fields(SweepFlags)}
    args = problems.attempt(read_arguments, {name: flags[name] for name in own & flags.keys()}, SweepFlags, "grid")
    asked = problems.attempt(read_asked, {name: words for name, words in flags.items() if name not in own - _LAUNCH})
    if args is None or asked is None:
        raise UserError(problems=problems)
    if "output_dir" not in asked.flags:  # that of the recipe is for a run
        folder = f"outputs/{asked.task if asked.recipe is None else asked.recipe.stem}-sweep"
        print(f"indictune: no --output_dir given: {folder}", file=sys.stderr)
        asked = replace(asked, flags={**asked.flags, "output_dir": [folder]})
    return args, with_defaults(asked)


def _whole_flags(asked: Asked) -> dict[str, list[str]]:
    """The recipe and the flags of a run, all as flags. Rows that are named by flags replace those of the recipe."""
    replaced = DATA_SOURCE_FIELDS if asked.flags.keys() & {*FILES_OF_ROWS, "dataset_name"} else ()
    content = {name: value for name, value in asked.content.items() if name not in (*replaced, DECIDED, "task")}
    words = {name: to_words(value) for name, value in content.items() if value is not None} | dict(asked.flags)
    return {name: [*each] for name, each in words.items() if each or name in asked.flags}


def _metric(args: SweepFlags, plan: AnyPlan, task: Task[Any, Any, Any]) -> str:
    """The metric that compares settings."""
    values = plan.recipe.values
    name = (args.metric or values.get("metric_for_best_model") or task.metrics(plan)[0]).removeprefix("eval_")
    has_rows = values.get("validation_file") or values.get("dataset_name") or values.get("validation_split") != 0
    if args.folds is None and not has_rows:
        raise UserError("sweep-without-validation", "--metric", name)
    if name not in task.metrics(plan):
        raise UserError("metric-unknown", "--metric", name, near=near_names(name, task.metrics(plan)))
    return str(name)


def _repeats(args: SweepFlags, run: AnyPlan, task: Task[Any, Any, Any], folder: Path) -> dict[str, Words]:
    """The flags of each run of a setting, by its name. The rows of folds are written to the folder."""
    seeds = [str(run.training.seed + number) for number in range(args.seeds)]
    if args.folds is None:
        return {f"seed-{seed}": {"seed": [seed]} for seed in seeds}
    of_folds = enumerate(write_folds(folder, rows_of_folds(run.recipe, task, args.folds), args.folds, int(seeds[0])))
    return {f"fold-{fold}-seed-{seed}": {**rows, "seed": [seed]} for (fold, rows), seed in product(of_folds, seeds)}


def _command(asked: Asked, base: Words, flags: Words, folder: Path) -> list[str]:
    """The command of a run by its flags and the `base`; without a report and a baseline, unless they were typed."""
    quick = {name: ["false"] for name in ("report", "baseline") if name in flags_of(asked.task)}
    fixed = {"push_to_hub": ["false"], "resume_from_checkpoint": [AUTO], "output_dir": [str(folder)]}
    left_out = OF_ROWS if "test_file" in flags else set()  # of a fold
    left_out = left_out | ({"validation_split"} if "validation_file" in flags else set())
    whole = {name: words for name, words in {**quick, **base}.items() if name not in left_out}
    words = replace(asked, flags={**whole, **flags, **fixed}).words()
    return [sys.executable, "-m", "indictune", "train", asked.task, *words]
