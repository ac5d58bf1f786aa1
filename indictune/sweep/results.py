"""What a sweep has found: its table, its verdict, its page, and the recipe of the best setting."""

from __future__ import annotations

import statistics
from contextlib import suppress

import optuna
from optuna.trial import FrozenTrial

from indictune.config.recipe import TRUST_FIELDS
from indictune.console_text import table
from indictune.data.health.likely_wrong import HEADER_OF_WRONG, OUT_OF_FOLD, read_out_of_fold, wrong_labels
from indictune.files import write_json, write_whole, write_yaml
from indictune.hub.public_text import without_folders
from indictune.report.report_page import REPORT, Verdict, rendered
from indictune.report.reported_run import Table
from indictune.sweep.definition import RECORD, typed
from indictune.sweep.folds import write_out_of_fold
from indictune.sweep.trials import Trials, macro_f1

BEST_RECIPE = "best.yaml"
_ENOUGH = 4  # different values, to say which flag mattered


def write_results(trials: Trials) -> None:
    """Write all that is known so far: `sweep.json`, the page, the best recipe, and predictions out of fold."""
    plan, ranked, wrong = trials.plan, trials.ranked(), None
    if ranked:
        flags = {**plan.recipe, **{name: [value] for name, value in _setting(ranked[0]).items()}}
        values = {name: _plain(words[0]) if len(words) == 1 else list(words) for name, words in flags.items()}
        kept = {name: value for name, value in values.items() if name not in TRUST_FIELDS}
        write_yaml(plan.folder / BEST_RECIPE, kept, kept)
        if plan.block == "test":
            write_out_of_fold(plan, ranked[0].number)
            if (file := plan.folder / OUT_OF_FOLD).exists():
                wrong = wrong_labels(read_out_of_fold(file))
    verdicts = _verdicts(trials)
    content = {
        "definition": plan.definition,
        "best": ranked[0].number if ranked else None,
        "verdicts": [vars(each) for each in verdicts],
        "trials": [
            {"number": each.number, "setting": _setting(each), "state": each.state.name.lower(), "value": each.value}
            | {**each.user_attrs, "evaluations": each.intermediate_values}
            for each in trials.all()
        ],
    }
    write_json(plan.folder / RECORD, content)
    page = rendered(
        "sweep.html.jinja",
        title=plan.folder.absolute().name,
        verdicts=verdicts,
        repeats=", ".join(plan.repeats),
        settings=_settings_table(trials),
        wrong=wrong,
        wrong_table=None if wrong is None else Table("Likely wrong", HEADER_OF_WRONG, wrong.counts),
    )
    write_whole(plan.folder / REPORT, page)


def _setting(trial: FrozenTrial) -> dict[str, str]:
    """The flags of a trial, as they are typed."""
    return {name: typed(value) for name, value in trial.params.items()}


def _plain(word: str) -> str | int | bool:
    """A word of a command line as YAML writes it without quotes."""
    return word == "true" if word in ("true", "false") else int(word) if word.isdecimal() else word


def _settings_table(trials: Trials) -> Table:
    """A row for each trial, the best first, then those without a value."""
    ranked, body = trials.ranked(), []
    for trial in [*ranked, *(each for each in trials.all() if each not in ranked)]:
        known, scores, state = trial.user_attrs, ["", "", ""], trial.state.name.lower()
        if trial in ranked:
            values = known["values"].values()
            scores = [f"{trial.value:.4f}", f"{statistics.stdev(values):.4f}" if len(values) > 1 else ""]
            scores.append(known["interval"])
        elif "message" in known:
            state += f": {without_folders(known['message'])}"
        setting = _setting(trial)
        body.append([str(trial.number), *(setting.get(name, "") for name in trials.plan.space), *scores, state])
    header = ["trial", *trials.plan.space, trials.plan.metric, "spread", "95% interval", "state"]
    return Table("Settings, the best first", header, body)


def _verdicts(trials: Trials) -> list[Verdict]:
    """Whether the best setting is better than the second by more than chance, and which flag mattered."""
    ranked = trials.ranked()
    if len(ranked) < 2:
        found = f"The only one is trial {ranked[0].number}: {ranked[0].value:.4f}." if ranked else "There is none."
        return [Verdict("Fewer than two settings have a value", found, "fact" if ranked else "warning")]
    names = [" ".join([f"trial {each.number}", *map("=".join, _setting(each).items())]) for each in ranked[:2]]
    best, gap = f"The best is {names[0]}, the second {names[1]}.", macro_f1(trials.plan, *ranked[1::-1])
    if gap is None:
        why = "Only macro-F1 is tested, by predictions of one label a row that are both in this folder."
        return [Verdict("Best and second are not compared", f"{best} {why}", "warning"), *_what_mattered(trials)]
    reason = f"{best} Their macro-F1 differs by {gap.value:+.4f}, 95% interval {gap.low:+.4f} to {gap.high:+.4f}."
    verdict = Verdict("The best two settings tie", f"{reason} It may be chance.", "warning")
    if gap.low > 0:
        verdict = Verdict("The best setting is better than the second by more than chance", reason, "good")
    return [verdict, *_what_mattered(trials)]


def _what_mattered(trials: Trials) -> list[Verdict]:
    """The share of the spread of values that each flag explains; none for one flag, or for few trials."""
    if len(trials.plan.space) > 1 and len({each.value for each in trials.ranked()}) >= _ENOUGH:
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        with suppress(RuntimeError, ValueError):  # all values of a flag may be the same
            found = optuna.importance.get_param_importances(trials.study, evaluator=evaluator)
            shares = ", ".join(f"{name} {share:.0%}" for name, share in found.items())
            return [Verdict("What mattered", f"Of the spread between settings, by fANOVA, each explains: {shares}.")]
    return []


def results_text(trials: Trials) -> str:
    """What the command prints at its end."""
    found, plan = _settings_table(trials), trials.plan
    lines = [table(found.header, found.rows), "", *(f"{each.title}. {each.reason}" for each in _verdicts(trials))]
    files = [REPORT, RECORD, *([BEST_RECIPE] if trials.ranked() else [])]
    return "\n".join([*lines, f"Written to {plan.folder}: {', '.join(files)}"])
