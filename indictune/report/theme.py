"""Turn figures of matplotlib into pictures of a page: SVG in the page's colours, dark or light, and PNG."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from indictune.hub.public_text import harmless

if TYPE_CHECKING:
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
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": PAPER,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,  # a label may hold dollars
    "xtick.color": INK,
    "ytick.color": INK,
}


@dataclass(frozen=True)
class Picture:
    """A picture of a page.

    Attributes:
        name: of its PNG, without the ending.
        title: above it.
        alt: what it shows, in words.
        svg: in the page's colours.
        png: the light one.
    """

    name: str
    title: str
    alt: str
    svg: Markup
    png: bytes


@contextmanager
def drawing() -> Iterator[None]:
    """A block whose figures have the style of the pages."""
    import matplotlib as mpl  # slow

    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]
        yield


def picture(figure: Figure, name: str, title: str, alt: str) -> Picture:
    """A figure as a picture; within `drawing`."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # laid out once, which takes longer than to draw
    png, svg = io.BytesIO(), io.StringIO()
    figure.savefig(png, format="png", dpi=_DPI, metadata={"Software": None})
    nothing: dict[str, Any] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(svg, format="svg", transparent=True, metadata=nothing)
    return Picture(name, title, alt, _for_page(svg.getvalue(), name, alt), png.getvalue())


def drawn_name(name: str, number: int) -> str:
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
