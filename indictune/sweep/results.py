"""What a sweep has found: its table, its verdict, its page, and the recipe of the best setting."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from indictune.config.recipe import TRUST_FIELDS
from indictune.console_text import table
from indictune.data.health.likely_wrong import HEADER_OF_WRONG, OUT_OF_FOLD, read_out_of_fold, wrong_labels
from indictune.files import write_json, write_whole, write_yaml
from indictune.hub.public_text import without_folders
from indictune.report.report_page import REPORT, Verdict, rendered
from indictune.report.reported_run import Table
from indictune.sweep.definition import BEST_RECIPE, RECORD
from indictune.sweep.scored import difference, write_out_of_fold
from indictune.sweep.trials import Trials

_ENOUGH = 4  # different values, to say which flag mattered
_STATES = {
    TrialState.COMPLETE: "done",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}


def write_results(trials: Trials) -> None:
    """Write all that is known so far: `sweep.json`, the page, the best recipe, and predictions out of fold."""
    plan, best = trials.plan, next(iter(trials.ranked()), None)
    if best is not None:
        if plan.has_folds:
            write_out_of_fold(plan, best.number)
        flags = {**plan.recipe, **{name: [value] for name, value in setting_of(best).items()}}
        values = {name: _plain(words[0]) if len(words) == 1 else list(words) for name, words in flags.items()}
        kept = {name: value for name, value in values.items() if name not in TRUST_FIELDS}
        write_yaml(plan.folder / BEST_RECIPE, kept, kept)
    verdict, importances = verdict_of(trials), importances_of(trials)
    content = {
        "definition": plan.definition,
        "study_name": plan.study_name,
        "metric": plan.metric,
        "best": None if best is None else best.number,
        "verdict": vars(verdict),
        "importances": importances,
        "trials": [_record(each) for each in trials.all()],
    }
    write_json(plan.folder / RECORD, content)
    write_whole(plan.folder / REPORT, _page(trials, verdict, importances))


def setting_of(trial: FrozenTrial) -> dict[str, str]:
    """The flags of a trial, as they are typed."""
    return dict(trial.user_attrs.get("setting") or {})


def _plain(word: str) -> str | int | bool:
    """A word of a command line as YAML writes it without quotes."""
    if word in ("true", "false"):
        return word == "true"
    return int(word) if word.isdecimal() and str(int(word)) == word else word


def _record(trial: FrozenTrial) -> dict[str, Any]:
    found = {"number": trial.number, "setting": setting_of(trial), "state": _STATES[trial.state]}
    found["value"] = trial.value if trial.state == TrialState.COMPLETE else None
    known = {name: trial.user_attrs.get(name) for name in ("values", "interval", "seconds", "message", "owner")}
    return {**found, **known, "evaluations": trial.intermediate_values}


def settings_table(trials: Trials) -> Table:
    """A row for each trial, the best first, then those without a value."""
    ranked, body = trials.ranked(), []
    names = [each.name for each in trials.plan.dimensions]
    for trial in [*ranked, *(each for each in trials.all() if each not in ranked)]:
        known, scores = trial.user_attrs, ["", "", ""]
        if trial in ranked:
            values, interval = list(known["values"].values()), known["interval"]
            scores = [f"{trial.value:.4f}", f"{statistics.stdev(values):.4f}" if len(values) > 1 else ""]
            scores.append("" if interval is None else f"{interval[0]:.4f} to {interval[1]:.4f}")
        setting = [setting_of(trial).get(name, "") for name in names]
        body.append([str(trial.number), *setting, *scores, _STATES[trial.state], f"{known.get('seconds', 0):,.0f}"])
    header = ["trial", *names, trials.plan.metric, "spread", "95% interval", "state", "seconds"]
    return Table("Settings, the best first", header, body)


def failures(trials: Trials) -> list[str]:
    """A sentence for each trial that failed."""
    failed = [each for each in trials.all() if each.state == TrialState.FAIL]
    return [f"Trial {each.number} failed: {each.user_attrs.get('message', 'nothing says why')}" for each in failed]


def importances_of(trials: Trials) -> dict[str, float]:
    """The share of the spread of values that each flag explains (fANOVA); empty for one flag, or for few trials."""
    if len(trials.plan.dimensions) > 1 and len({each.value for each in trials.ranked()}) >= _ENOUGH:
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=trials.plan.first_seed)
        with suppress(RuntimeError, ValueError):  # all values of a flag may be the same
            return dict(optuna.importance.get_param_importances(trials.study, evaluator=evaluator))
    return {}


def verdict_of(trials: Trials) -> Verdict:
    """Whether the best setting is better than the second by more than chance."""
    ranked = trials.ranked()
    if not ranked:
        return Verdict("No setting has a value", "No trial has ended well so far.", "warning")
    settings = [", ".join(f"{name} {value}" for name, value in setting_of(each).items()) for each in ranked[:2]]
    names = [
        f"trial {each.number}{f' ({setting})' if setting else ''}"
        for each, setting in zip(ranked, settings, strict=False)
    ]
    if len(ranked) == 1:
        return Verdict(f"{trials.plan.metric} {ranked[0].value:.4f}", f"Only {names[0]} has a value.")
    found, best = difference(trials.plan, ranked[1].number, ranked[0].number), f"The best is {names[0]}, "
    best += f"the second {names[1]}."
    if isinstance(found, str):
        return Verdict("Best and second are not compared", f"{best} The reason: {found}.", "warning")
    gap = found.difference
    interval = f"The difference in macro-F1 is {gap.value:+.4f}, its 95% interval {gap.low:+.4f} to {gap.high:+.4f}"
    if gap.low > 0:
        title = "The best setting is better than the second by more than chance"
        return Verdict(title, f"{best} {interval}, which excludes 0.", "good")
    return Verdict("The best two settings tie", f"{best} {interval}: it may be chance.", "warning")


def results_text(trials: Trials) -> str:
    """What the command prints at its end."""
    found, verdict = settings_table(trials), verdict_of(trials)
    lines = [table(found.header, found.rows), "", *failures(trials), f"{verdict.title}. {verdict.reason}"]
    if shares := [f"{name} {share:.0%}" for name, share in importances_of(trials).items()]:
        lines.append(f"Share of the spread that a flag explains: {', '.join(shares)}")
    running = [each for each in trials.all() if not each.state.is_finished()]
    if owners := sorted({str(each.user_attrs.get("owner")) for each in running}):
        lines.append(f"Trials still run: {', '.join(owners)}. The same command shows them when they have ended.")
    lines.append(f"Written to {trials.plan.folder}: {REPORT}, {RECORD}{f', {BEST_RECIPE}' if trials.ranked() else ''}")
    return "\n".join(lines)


def _page(trials: Trials, verdict: Verdict, importances: Mapping[str, float]) -> str:
    plan, out_of_fold = trials.plan, trials.plan.folder / OUT_OF_FOLD
    wrong = wrong_labels(read_out_of_fold(out_of_fold)) if plan.has_folds and out_of_fold.exists() else None
    flags = [[name, without_folders(" ".join(words))] for name, words in sorted(plan.recipe.items())]
    shares = [[name, f"{share:.0%}"] for name, share in importances.items()]
    return rendered(
        "sweep.html.jinja",
        title=plan.folder.absolute().name,
        verdicts=[verdict],
        repeats=", ".join(each.name for each in plan.repeats),
        settings=settings_table(trials),
        messages=list(map(without_folders, failures(trials))),
        importances=Table("Share of the spread", ["flag", "share"], shares) if shares else None,
        wrong=wrong,
        wrong_table=None if wrong is None else Table("Likely wrong", HEADER_OF_WRONG, wrong.table_rows()),
        configuration=Table("Flags of each run", ["flag", "value"], flags),
    )
