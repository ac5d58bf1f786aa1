"""The picture of `indictune plan --plot`: the memory of each strategy against the GPU's."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from indictune.distributed.planning.hardware import assumed
from indictune.errors import UserError
from indictune.training.ranking import Ranking

# Of the terms of `Memory`, in its order. Distinct for the colour-blind too (Okabe and Ito).
_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#F0E442", "#CC79A7", "#999999")
_MOST = 1.6  # times the GPU's memory; longer bars are cut, and say how long they are
_GB = 1e9


def draw(ranking: Ranking, path: Path) -> None:
    """Draw a bar for each strategy that can run the plan, with its terms, and a line at what a GPU has for it.

    Raises:
        UserError: `plan-not-written`.
    """
    from matplotlib.figure import Figure  # slow

    found = [each for each in ranking.own if each.memory is not None]
    terms = [{name: size / _GB for name, size in asdict(each.memory).items()} for each in found if each.memory]
    limit = ranking.machine.usable_bytes / _GB
    end = min(_MOST * limit, 1.3 * max([limit, *(sum(each.values()) for each in terms)]))
    figure = Figure(figsize=(10, 1.8 + 0.36 * len(found)), layout="constrained")
    axes = figure.subplots()
    names, starts = [each.strategy for each in found], [0.0] * len(found)
    for colour, name in zip(_COLOURS, terms[0] if terms else (), strict=False):
        sizes = [each[name] for each in terms]
        if any(sizes):
            axes.barh(names, sizes, left=starts, color=colour, label=name.replace("_", " "))
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    for place, (each, total) in enumerate(zip(found, starts, strict=True)):
        why = "does not fit" if total > limit else "too little CPU memory"
        text = f"{total:,.1f} GB" + ("" if each.fits else f", {why}") + (" →" if total > end else "")
        is_cut = total > 0.82 * end
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.85} if is_cut else None
        axes.text(min(total, end) + (-0.01 if is_cut else 0.01) * end, place, text, va="center",
                  ha="right" if is_cut else "left", fontsize=9, bbox=box)  # fmt: skip
    axes.axvline(
        limit,
        color="black",
        linestyle="--",
        linewidth=1.2,
        label=f"{assumed('of_memory'):.0%} of a GPU: {limit:,.0f} GB",
    )
    axes.set(xlim=(0, end), xlabel="GB of a GPU, estimated")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    plan, model = ranking.plan, Path(ranking.plan.model.model_name_or_path)
    axes.set_title(
        f"{model.parent.name if model.suffix == '.json' else model.name}, --method {plan.model.method}, "
        f"{ranking.machine.gpus} GPU{'s' * (ranking.machine.gpus > 1)}: the fastest on top",
        loc="left",
    )
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise UserError("plan-not-written", "--plot", path, reason=error.strerror) from error
