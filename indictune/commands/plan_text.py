"""A ranking of the strategy files for a run, and what `indictune plan` prints of it."""

from __future__ import annotations

import shlex
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from indictune.config.command_line import SCRIPTS, WORDS, flag_words, flags_of
from indictune.config.plan import AnyPlan
from indictune.console_text import in_columns, in_one_line, shown_bytes, table
from indictune.planning.candidates import Candidate
from indictune.planning.hardware import Machine, assumed
from indictune.planning.memory import CALIBRATION, calibration
from indictune.planning.step_time import RowLengths
from indictune.versions import as_seen_from_here, script, strategies

MICRO_BATCHES = ("max_tokens_per_device", "per_device_train_batch_size")
OF_FP16 = {"bf16": False, "fp16": True}  # of a run on GPUs without bf16
# Flags that are not passed on as they were typed.
_DECIDED = {"config", "task", "method", *MICRO_BATCHES, *flags_of("indictune plan")}
_WIDTH = 100
_GB = 1e9
_TOKENS = 1e6  # for which time is given where no rows are read


@dataclass(frozen=True)
class Ranking:
    """The strategy files for a run."""

    task: str
    plan: AnyPlan  # without a launch
    machine: Machine
    lengths: RowLengths  # of the training rows
    # Those that fit first, the fastest of them first; the run's own method comes first.
    by_method: Mapping[str, Sequence[Candidate]]

    @property
    def own(self) -> Sequence[Candidate]:
        """Those of the run's own method."""
        return self.by_method[self.plan.model.method]

    @property
    def best(self) -> Candidate | None:
        """The fastest that fits."""
        return self.own[0] if self.own[0].fits else None


def micro_batch_name(plan: AnyPlan) -> str:
    """The flag of micro-batches that counts in a run."""
    return MICRO_BATCHES[plan.training.max_tokens_per_device is None]


def micro_batch_flag(ranking: Ranking, each: Candidate) -> dict[str, str]:
    """The flag of a micro-batch, with its value."""
    name = micro_batch_name(ranking.plan)
    return {name: str(each.tokens if name == MICRO_BATCHES[0] else each.rows)}


def plan_text(ranking: Ranking, rates: str, flags: Mapping[str, list[str]]) -> str:
    """The answer for a terminal, in lines of at most 100 columns; `rates` are of the machine, in words."""
    parts = [*_about(ranking, rates), *_of_best(ranking, flags), *other_methods(ranking), *_rest(ranking)]
    return "\n".join([*parts, f"The estimates are {calibration()}."])


def record(ranking: Ranking, rates: str, flags: Mapping[str, list[str]]) -> dict[str, Any]:
    """All numbers: bytes, seconds and rows."""
    plan = ranking.plan
    found = [each for some in ranking.by_method.values() for each in some]
    return {
        "run": {
            "task": ranking.task,
            "model": plan.model.model_name_or_path,
            "method": plan.model.method,
            "global_batch_size": plan.training.global_batch_size,
            "row_tokens": asdict(ranking.lengths),
        },
        "machine": asdict(ranking.machine) | {"rates": rates},
        "calibrated_on_a_gpu": CALIBRATION.exists(),
        "candidates": [_record(ranking, each, flags) for each in found],
    }


def _record(ranking: Ranking, each: Candidate, flags: Mapping[str, list[str]]) -> dict[str, Any]:
    named = {"strategy": each.strategy, "method": each.method}
    if each.memory is None or each.step is None or each.node is None or each.written is None:
        return named | {"refused": each.refused}
    rows, of_step = ranking.lengths.rows, ranking.plan.training.global_batch_size
    of_what = "an_epoch" if rows else "a_million_tokens"
    steps = -(-rows // of_step) if rows else _TOKENS / (of_step * ranking.lengths.mean)
    return {
        **named,
        "fits": each.fits,
        "why_not": "" if each.fits else why_not(ranking, each),
        "micro_batch": None if each.micro_batch is None else asdict(each.micro_batch),
        "largest_micro_batch": None if each.largest is None else asdict(each.largest),
        "memory": asdict(each.memory) | {"total": each.memory.total_bytes},
        "cpu_memory_of_a_node": asdict(each.node) | {"needed": each.node.needed},
        "written": asdict(each.written),
        "step": asdict(each.step) | {"seconds": each.step.seconds, "sent_s": each.step.sent_s},
        "mfu": each.mfu,
        "before_the_first_step_s": each.before_s,
        f"hours_of_{of_what}": steps * each.step.seconds / 3600,
        "command": command_of(ranking, each, flags),
    }


def why_not(ranking: Ranking, each: Candidate) -> str:
    """Which memory is too small, and the largest term of what a GPU needs."""
    memory, node, machine = each.memory, each.node, ranking.machine
    assert memory is not None
    assert node is not None
    if memory.total_bytes > machine.usable_bytes:
        largest = getattr(memory, memory.largest.replace(" ", "_"))
        return f"{shown_bytes(memory.total_bytes)} of a GPU, of which {shown_bytes(largest)} {memory.largest}"
    is_loading = node.loading > node.offloaded + node.reading_back
    kept = "offloaded states and the saved model" if node.offloaded else "the saved model, which is read back"
    term = "whole weights while they are read" if is_loading else kept
    return f"{shown_bytes(node.needed)} of a node's CPU memory, for {term}"


def _about(ranking: Ranking, rates: str) -> Iterator[str]:
    plan, lengths = ranking.plan, ranking.lengths
    rows = f"{plan.training.global_batch_size} rows a step"
    tokens = f"{lengths.rows:,} rows of {lengths.mean:,.0f} tokens, {lengths.longest:,} at most"
    tokens = tokens if lengths.rows else f"each of {lengths.longest:,} tokens"
    yield from _wrapped(f"{plan.model.model_name_or_path}, --method {plan.model.method}; {rows}; {tokens}")
    yield from _wrapped(rates)
    yield ""


def _of_best(ranking: Ranking, flags: Mapping[str, list[str]]) -> Iterator[str]:
    fitting = [each for each in ranking.own if each.fits]
    if not fitting:
        yield f"{_what_is_wrong(ranking.own)} with --method {ranking.plan.model.method}."
        return
    yield table(header(ranking), [line(ranking, each) for each in fitting])
    yield f"A file fits if it takes at most {assumed('of_memory'):.0%} of a GPU's memory."
    best = fitting[0]
    assert best.memory is not None
    assert best.written is not None
    terms = ", ".join(
        f"{name.replace('_', ' ')} {shown_bytes(size)}" for name, size in asdict(best.memory).items() if size
    )
    yield ""
    yield from _wrapped(f"{best.strategy} takes {shown_bytes(best.memory.total_bytes)} of each GPU: {terms}.")
    model, checkpoint = shown_bytes(best.written.model), shown_bytes(best.written.checkpoint)
    yield f"On disk: {checkpoint} for a checkpoint with all states, {model} for the saved model."
    if best.before_s:
        yield from _wrapped(
            f"Before the first step, the model reads {ranking.lengths.read_first:,} rows once, for about "
            f"{_short(best.before_s)} s. Their numbers are cached."
        )
    nodes = ranking.machine.nodes
    yield f"It starts with{f', on each NODE from 0 to {nodes - 1}' if nodes > 1 else ''}:"
    yield textwrap.indent(command_of(ranking, best, flags), "  ")


def header(ranking: Ranking) -> list[str]:
    """Titles of the columns of a table."""
    batch = "tokens" if ranking.plan.training.max_tokens_per_device is not None else "rows"
    return ["strategy", "GPU GB", batch, "at most", "uncalibrated s a step", "idle", "GB sent", "CPU GB"]


def line(ranking: Ranking, each: Candidate) -> list[str]:
    """A line of a table, of a candidate that fits."""
    memory, step, node, largest = each.memory, each.step, each.node, each.largest
    assert memory is not None
    assert step is not None
    assert node is not None
    assert largest is not None
    of_tokens, least = ranking.plan.training.max_tokens_per_device is not None, float(assumed("least_step_s"))
    batches = [each.tokens, largest.tokens] if of_tokens else [each.rows, largest.rows]
    seconds = f"<{least:g}" if step.seconds < least else _short(step.seconds)
    return [
        *(each.strategy, f"{memory.total_bytes / _GB:,.1f}", *(f"{size:,}" for size in batches)),
        *(seconds, f"{step.bubble:.0%}", _short(step.sent_bytes / _GB), f"{node.needed / _GB:,.0f}"),
    ]


def other_methods(ranking: Ranking) -> Iterator[str]:
    """The fastest file of each other method, or that nothing fits."""
    others = [some for method, some in ranking.by_method.items() if method != ranking.plan.model.method]
    if not others:
        return
    best = [some[0] for some in others if some[0].fits]
    yield ""
    if best:
        titles = ["other methods", *header(ranking)[1:]]
        yield table(titles, [[f"{each.method}, {each.strategy}", *line(ranking, each)[1:]] for each in best])
    for some in others:
        if not some[0].fits:
            yield f"{_what_is_wrong(some)} with --method {some[0].method} either."


def _what_is_wrong(found: Sequence[Candidate]) -> str:
    return "No file can run it" if all(each.refused for each in found) else "Nothing fits"


def _rest(ranking: Ranking) -> Iterator[str]:
    """Why other files do not fit or cannot run it; those with one reason together."""
    too_large = [each for each in ranking.own if each.memory is not None and not each.fits]
    refused = defaultdict[str, list[str]](list)
    for each in ranking.own:
        if each.refused:
            refused[each.refused].append(each.strategy)
    if too_large:
        yield "\nDoes not fit:"
    for each in too_large:
        yield from _wrapped(f"  {each.strategy}: {why_not(ranking, each)}")
    if refused:
        yield "\nCannot run it:"
    for reason, names in refused.items():
        yield from _wrapped(f"  {', '.join(names)}: {reason}")
    yield ""


def _wrapped(text: str) -> list[str]:
    return in_columns(in_one_line(text), _WIDTH).splitlines()


def _short(number: float) -> str:
    if 0 < number < 0.001:
        return "<0.001"
    return f"{number:,.0f}" if number >= 100 else f"{float(f'{number:.3g}'):.10f}".rstrip("0").rstrip(".")


def command_of(ranking: Ranking, each: Candidate, typed: Mapping[str, list[str]]) -> str:
    """The command, in lines of at most 100 columns if its words allow. On several nodes each one takes it.

    `typed` are flags of `indictune plan`, with `config` and `model_name_or_path`.
    """
    flags, machine, own = dict(typed), ranking.machine, ranking.plan.model.method
    recipe = flags.get("config", [])
    if (model := Path(" ".join(flags.get("model_name_or_path", [])))).is_file():  # a configuration alone
        flags["model_name_or_path"] = [str(model.parent)]
    asked = {} if "method" not in flags and each.method == own else {"method": [each.method]}
    asked |= {name: [value] for name, value in micro_batch_flag(ranking, each).items()}
    asked |= {name: given for name, given in flags.items() if name not in _DECIDED}
    asked |= {name: [str(ranking.plan.derived[name]).lower()] for name in OF_FP16 if name in ranking.plan.derived}
    asked |= {} if ranking.lengths.rows else {"train_file": ["FILE"]}
    if machine.nodes == 1:
        words = {name: word for word, name in WORDS.items()}
        what = recipe or [words.get(ranking.task, ranking.task)]
        launch = {"strategy": [each.strategy], "num_processes": [str(machine.gpus)]}
        return _in_lines(["indictune", "train", *what], launch | asked)
    start = {
        "config_file": [str(as_seen_from_here(strategies()[each.strategy]))],
        "num_machines": [str(machine.nodes)],
        "num_processes": [str(machine.gpus)],
        "machine_rank": ["NODE"],
        "main_process_ip": ["HOST_OF_NODE_0"],
        "main_process_port": ["29500"],
    }
    to_script = ({"config": recipe} if recipe else {}) | {"output_dir": ["FOLDER"]} | asked
    named = str(as_seen_from_here(script(SCRIPTS[ranking.task])))
    return f"{_in_lines(['accelerate', 'launch'], start)} \\\n    {_in_lines([named], to_script)}"


def _in_lines(start: Sequence[str], flags: Mapping[str, Sequence[str]]) -> str:
    """A command whose lines end in a backslash, where they would be too long."""
    lines = [shlex.join(start)]
    for name, values in flags.items():
        flag = shlex.join(flag_words(name, values))
        if len(lines[-1]) + len(flag) + 3 > _WIDTH - 4:
            lines[-1] += " \\"
            lines.append(f"    {flag}")
        else:
            lines[-1] += f" {flag}"
    return "\n".join(lines)
