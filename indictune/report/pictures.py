"""Draw a report: curves, scores by language, confusion and calibration, as SVG in the page's colours and as PNG."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from indictune.console_text import shown_language
from indictune.evaluation.breakdown import Breakdown, Group
from indictune.evaluation.uncertainty import BINS, Calibration
from indictune.hub.public_text import harmless
from indictune.report.reported_run import Curve, ReportedRun, largest_languages, spaced, titled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colours of the light page. The page names each `--NAME`, and has another one for the dark.
# The series are Okabe and Ito's, darker: colour-blind readers can tell them apart, and all have a contrast of 3.
INK, GRID, PAPER = "#1b1c1e", "#d4d7db", "#ffffff"
SERIES = ("#0b62a8", "#b25100", "#00795a", "#96487c", "#6b6b00", "#5d5f63")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
VARIABLES = {INK: "ink", GRID: "grid", PAPER: "paper"} | {each: f"series-{at}" for at, each in enumerate(SERIES, 1)}

_DPI = 160
_LAST_DRAWN = 0x250  # code points that the font of matplotlib has; it draws others as boxes
_LONGEST_NAME = 18
_STYLE = {
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    **dict.fromkeys(("font.size", "axes.titlesize"), 10),
    "axes.facecolor": "none",
    "figure.facecolor": PAPER,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "svg.fonttype": "none",
    "text.parse_math": False,  # a label may hold dollars
}
_WIDTH = 4.6  # inches; letters are readable when it is as wide as a phone
_CURVES = (
    ("loss", "Training loss", "loss"),
    ("learning_rate", "Learning rate", "learning rate"),
    ("samples_per_second", "Throughput", "rows a second"),
)
_MOST_LANGUAGES = 24
_MOST_MATRICES = 12
_MOST_NUMBERED = 8  # labels of a matrix whose cells have numbers
_MOST_NAMED = 16  # and whose rows have names


@dataclass(frozen=True)
class Picture:
    """A picture of a page."""

    name: str  # of its PNG, without the ending
    title: str
    alt: str  # what it shows, in words
    svg: Markup  # in the page's colours
    png: bytes  # the light one


@contextmanager
def drawing() -> Iterator[None]:
    """A block whose figures have the style of the pages."""
    import matplotlib as mpl  # slow

    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]
        yield


def draw_curves(runs: Sequence[ReportedRun]) -> Iterator[Picture]:
    """Loss, learning rate and throughput of each run, one above the other."""
    for name, title, unit in _CURVES:
        if any(run.curve(name) for run in runs):
            figure, words = curve_figure(runs, name, title, unit)
            yield _picture(figure, name, title, words)


def curve_figure(
    runs: Sequence[ReportedRun], name: str = "loss", title: str = "Training loss", unit: str = "loss"
) -> tuple[Figure, str]:
    """A value of each logged step of the runs, the validation loss with the loss, and the same in words."""
    figure = _figure(2.7)
    axes = figure.subplots()
    words = []
    for number, (run, curve) in enumerate((run, curve) for run in runs if (curve := run.curve(name)) is not None):
        style = {"color": SERIES[number % len(SERIES)], "linestyle": DASHES[number % len(DASHES)]}
        marker = "o" if len(curve.steps) == 1 else ""
        shown = "training" if len(runs) == 1 else _drawn_name(run.name, number + 1)
        axes.plot(curve.steps, curve.values, label=shown, linewidth=1.4, marker=marker, **style)  # type: ignore[arg-type]
        words.append(_in_words(run.name if len(runs) > 1 else title, curve))
        evaluated = run.curve("eval_loss", run.evaluations) if name == "loss" else None
        if evaluated is not None:
            label = "validation" if len(runs) == 1 else None
            colour = SERIES[1] if len(runs) == 1 else SERIES[number % len(SERIES)]
            axes.plot(evaluated.steps, evaluated.values, "o", color=colour, markersize=4, label=label)
            words.append(_in_words("Validation loss", evaluated))
    axes.set(xlabel="step", ylabel=unit)
    axes.locator_params("x", integer=True)
    if name == "samples_per_second":
        axes.set_ylim(bottom=0)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(fontsize=9)
    return figure, " ".join(words)


def _in_words(name: str, curve: Curve) -> str:
    known = np.isfinite(curve.values)
    if not known.any():
        return f"{name}: no finite value."
    steps, values = curve.steps[known], curve.values[known]
    ends = f"{values[0]:.3g} at step {steps[0]:.0f}, {values[-1]:.3g} at step {steps[-1]:.0f}"
    return f"{name}: {ends}; lowest {values.min():.3g}, highest {values.max():.3g}."


def draw_languages(runs: Sequence[ReportedRun]) -> Picture | None:
    """Bars of the main score of each language with 95% intervals, a bar for each run; None without scores.

    A single run has its baseline's scores as diamonds.
    """
    found = [(run, run.breakdown) for run in runs if run.breakdown is not None]
    if not found:
        return None
    score = found[0][1].score
    found = [(run, each) for run, each in found if each.score == score]
    counts = {name: group.num_examples for _, each in found for name, group in each.by["language"].items()}
    names = sorted(sorted(counts, key=lambda name: -counts[name])[:_MOST_LANGUAGES])
    shown = ["all", *(_drawn_name(shown_language(name), at + 1) for at, name in enumerate(names))]
    figure = _figure(1.1 + (0.34 + 0.16 * (len(found) - 1)) * len(shown))
    axes = figure.subplots()
    thick, words = 0.74 / len(found), []
    for number, (run, each) in enumerate(found):
        groups = [each.overall, *(each.by["language"].get(name) for name in names)]
        at = np.arange(len(shown)) + (number - (len(found) - 1) / 2) * thick
        label = "model" if len(runs) == 1 else _drawn_name(run.name, number + 1)
        _bars(axes, at, groups, score, thick, SERIES[number % len(SERIES)], label)
        prefix = f"{run.name}, " if len(runs) > 1 else ""
        named = zip(["all", *names], groups, strict=True)
        scores = ((name, group.scores[score]) for name, group in named if group)
        spoken = ((shown_language(name), of) for name, of in scores)
        words += [f"{prefix}{name}: {of.value:.3f} ({of.low:.3f} to {of.high:.3f})." for name, of in spoken]
    if len(runs) == 1:
        _baseline(axes, runs[0], names, score)
    axes.set_yticks(range(len(shown)), shown)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(spaced(score))
    if not found[0][1].lower_is_better:
        axes.set_xlim(right=1)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return _picture(figure, "languages", f"{titled(score)} by language, with 95% intervals", " ".join(words))


def _bars(axes: Axes, at: np.ndarray, groups: Sequence[Group | None], score: str, thick: float, colour: str,
          label: str) -> None:  # fmt: skip
    here = [(place, group.scores[score]) for place, group in zip(at, groups, strict=True) if group is not None]
    places, values = [place for place, _ in here], np.array([each.value for _, each in here])
    sides = [values - [each.low for _, each in here], np.array([each.high for _, each in here]) - values]
    errors = np.nan_to_num(np.maximum(sides, 0))
    axes.barh(places, values, thick, color=colour, alpha=0.55, label=label)
    axes.errorbar(values, places, xerr=errors, fmt="none", ecolor=INK, elinewidth=1.2, capsize=3)


def _baseline(axes: Axes, run: ReportedRun, names: Sequence[str], score: str) -> None:
    """Mark the scores of the baseline, which has a macro-F1."""
    of_languages = run.facts.baseline.get("by_language") or {}
    if score != "macro_f1" or run.facts.baseline.get("split") != ("test" if run.split == "test" else "validation"):
        return
    scores = [run.facts.baseline.get("overall") or {}, *(of_languages.get(name) or {} for name in names)]
    here = [(each["first"], at) for at, each in enumerate(scores) if "first" in each]
    if here:
        values, places = zip(*here, strict=True)
        axes.scatter(values, places, marker="D", s=26, color=PAPER, edgecolor=INK, zorder=4, label="baseline")


def draw_reliability(calibration: Calibration) -> Picture | None:
    """The reliability diagram: how often rows are right, by how sure the model is. None without rows."""
    used = [each for each in calibration.bins if each.count]
    if not used:
        return None
    figure = _figure(3.4)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    edges = np.arange(BINS) / BINS
    heights = [each.accuracy if each.count else 0 for each in calibration.bins]
    above.bar(edges, heights, 1 / BINS, align="edge", color=SERIES[0], alpha=0.55, edgecolor=INK, linewidth=0.6)
    above.plot([0, 1], [0, 1], color=INK, linestyle="--", linewidth=1, label="perfect calibration")
    above.set(xlim=(0, 1), ylim=(0, 1), ylabel="share right")
    above.legend(fontsize=9, loc="upper left")
    below.bar(edges, [each.count for each in calibration.bins], 1 / BINS, align="edge", color=SERIES[5], alpha=0.7)
    below.set(xlabel="probability of the predicted label", ylabel="rows")
    words = [f"{each.confidence:.2f} sure, {each.accuracy:.2f} right, {each.count} rows." for each in used]
    return _picture(figure, "reliability", "How sure, and how often right", " ".join(words))


def draw_confusion(breakdown: Breakdown) -> Picture | None:
    """The confusion matrix of each language, the largest ones first; None for a task without one."""
    groups = {name: each for name, each in largest_languages(breakdown, _MOST_MATRICES).items() if each.confusion}
    names = list(groups)
    if not names:
        return None
    columns = min(3, len(names))
    lines = math.ceil(len(names) / columns)
    figure = _figure(0.4 + 2.6 * lines, 0.4 + 2.8 * columns)
    labels = [_drawn_name(label, at + 1) for at, label in enumerate(breakdown.labels)]
    all_axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for number, (axes, name) in enumerate(zip(all_axes, names, strict=False)):
        axes.set_title(_drawn_name(shown_language(name), number + 1))
        _matrix(axes, np.array(groups[name].confusion, np.float64), labels)
    for axes in all_axes[len(names) :]:
        axes.set_visible(False)
    figure.supxlabel("predicted", fontsize=10)
    figure.supylabel("right", fontsize=10)
    return _picture(figure, "confusion", "Confusion by language", "The tables below have its numbers.")


def _matrix(axes: Axes, counts: np.ndarray, labels: Sequence[str]) -> None:
    from matplotlib.colors import LinearSegmentedColormap  # slow

    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axes.imshow(shares, cmap=LinearSegmentedColormap.from_list("series", [PAPER, SERIES[0]]), vmin=0, vmax=1)
    if len(labels) <= _MOST_NUMBERED:
        for row, column in np.ndindex(*counts.shape):
            colour = PAPER if shares[row, column] > 0.5 else INK
            axes.text(column, row, f"{counts[row, column]:.0f}", ha="center", va="center", color=colour, fontsize=9)
    names = labels if len(labels) <= _MOST_NAMED else []
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.grid(visible=False)
    axes.spines[:].set_color(GRID)


def _figure(height: float, width: float = _WIDTH) -> Figure:
    from matplotlib.figure import Figure  # slow

    return Figure(figsize=(width, height), layout="constrained")


def _picture(figure: Figure, name: str, title: str, alt: str) -> Picture:
    """A figure as a picture; within `drawing`."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # laid out once, which takes longer than to draw
    png, svg = io.BytesIO(), io.StringIO()
    figure.savefig(png, format="png", dpi=_DPI, metadata={"Software": None})
    nothing: dict[str, Any] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(svg, format="svg", transparent=True, metadata=nothing)
    return Picture(name, title, alt, _for_page(svg.getvalue(), name, alt), png.getvalue())


def _drawn_name(name: str, number: int) -> str:
    """A name as matplotlib can draw it: one with letters that its font lacks becomes its number."""
    if not name or any(ord(letter) >= _LAST_DRAWN or not letter.isprintable() for letter in name):
        return f"no. {number}"
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def _for_page(svg: str, name: str, alt: str) -> Markup:
    """The `svg` element with the page's colours and fonts, its own names, and its content in words."""
    svg = harmless(svg[svg.index("<svg") :])
    svg = re.sub(r"<style.*?</style>|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="(?:figure|axes|patch|line2d|text|matplotlib|xtick|ytick)[^"]*"', "", svg)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"; font-family: [^;\"]*", "", svg)
    svg = re.sub(
        r"((?:fill|stroke): )(#[0-9a-f]{6})",
        lambda found: f"{found[1]}var(--{VARIABLES[found[2]]})" if found[2] in VARIABLES else found[0],
        svg,
    )
    label = Markup('<svg role="img" aria-label="{}"').format(harmless(alt))
    return label + Markup(re.sub(r'^<svg| width="[\d.]+pt"| height="[\d.]+pt"', "", svg, count=3))
