"""The common style of a report's plots: matplotlib figures as inline SVG that adapts to its page.

Colours are variables of the page's style sheet and text has its font, so one picture fits a light
and a dark page.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from srm.loadtest.recording import Times
from srm.loadtest.report.tables import Table

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import (
        FixedLocator,
        FuncFormatter,
        LogLocator,
        MaxNLocator,
        NullFormatter,
        NullLocator,
    )
except ImportError:  # `srm loadtest` says so before it works; help needs none
    Axes = Axis = Any  # type: ignore[assignment,misc]

Panel = Axes
"""The type that plots are drawn on."""
Curve = Callable[[Times], Times]
SIZE = (4.6, 2.75)
"""Inches: small enough that 9 points are still legible on a phone."""
_VARIABLES = {
    "#010101": "currentColor",
    "#020202": "var(--line)",
    "#030303": "var(--soft)",
    "#0a0001": "var(--series-1)",
    "#0a0002": "var(--series-2)",
    "#0a0003": "var(--series-3)",
    "#0a0004": "var(--bad)",
}
"""Placeholder colours for matplotlib, and the page's CSS values that replace them."""
INK, LINE, SOFT, FIRST, SECOND, THIRD, BAD = _VARIABLES
SERIES = (FIRST, SECOND, THIRD)
_STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a name may have dollars in it
    "svg.hashsalt": "srm",  # the same picture for the same numbers
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), LINE),
    **dict.fromkeys(("axes.labelcolor", "axes.titlecolor"), SOFT),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), SOFT),
    "legend.labelcolor": INK,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("xtick.minor.bottom", "ytick.minor.left"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "grid.linewidth": 0.6,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.2,
    "legend.borderaxespad": 0.0,
    "legend.borderpad": 0.2,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "path.simplify_threshold": 0.3,
}


class Picture(NamedTuple):
    """A plot with its alternative text and its data as a table."""

    title: str
    svg: str
    alt: str
    table: Table
    note: str = ""


@contextmanager
def axes_of(unit: str, across: str) -> Iterator[Panel]:
    """Yield axes to draw on; the unit of y stands above them, the label of x below."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=SIZE)
        FigureCanvasSVG(figure)
        axes = figure.add_axes((0.125, 0.165, 0.85, 0.725))
        axes.set_title(unit)
        axes.set_xlabel(across, loc="right", labelpad=2)
        axes.tick_params(length=0, pad=4)
        yield axes


def plain(axis: Axis, most: int = 6) -> None:
    """Make an axis linear with plainly written numbers."""
    axis.set_major_locator(MaxNLocator(most))
    axis.set_major_formatter(FuncFormatter(_tick))


def logarithmic(axes: Panel, which: str) -> None:
    """Make axis `x` or `y` logarithmic, with as many labels as there is room for."""
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis: Axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = sorted(axes.get_xlim() if which == "x" else axes.get_ylim())
    decades = np.log10(high / low)
    subs: tuple[float, ...] = (1.0, 2.0, 5.0)
    if decades > 1.6:
        subs = (1.0,) if decades > 3 else (1.0, 3.0)
    elif decades < 0.8:
        subs = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    axis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(_tick))
    axis.set_minor_formatter(NullFormatter())


def is_wide(values: Iterable[float]) -> bool:
    """Whether the values above 0 span so much that their axis is better logarithmic."""
    known = [value for value in values if value > 0]
    return bool(known) and max(known) > 8 * min(known)


def scale(
    axes: Panel, which: str, room: float, values: Iterable[float], is_logarithmic: bool = False
) -> None:
    """Make axis `x` or `y` logarithmic, or else linear from 0, with some room beyond the largest
    value."""
    if is_logarithmic:
        logarithmic(axes, which)
        return
    end = room * max((value for value in values if value > 0), default=0.0) or 1
    (axes.set_xlim if which == "x" else axes.set_ylim)(0, end)
    plain(axes.xaxis if which == "x" else axes.yaxis)


def mark(
    axes: Panel, place: float, text: str, up: float, left: bool, va: str = "baseline", **line: float
) -> None:
    """Draw a dashed vertical line with a text beside it, `up` of the axes' height."""
    axes.axvline(place, color=SOFT, linewidth=1, linestyle=(0, (2, 2)), **line)
    axes.annotate(
        text, (place, up), (-3 if left else 3, 0), xycoords=("data", "axes fraction"),
        textcoords="offset points", ha="right" if left else "left", va=va, color=SOFT, fontsize=8,
    )  # fmt: skip


def percentile_curves(curves: dict[str, Curve], unit: str, name: str, alt: str) -> str:
    """Draw times by rank, on an axis of 1 / (1 - rank), so that each further nine is as wide.

    A curve is a function that returns the times of ranks, in the unit.
    """
    ranks = 1 - np.geomspace(1, 1e-3, 91)
    labels = {2: "p50", 10: "p90", 100: "p99", 1000: "p99.9"}
    with axes_of(f"{unit}, log scale", "percentile") as axes:
        axes.set_xscale("log")
        axes.set_xlim(1, 1000)
        axes.xaxis.set_major_locator(FixedLocator(list(labels)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: labels.get(round(x), "")))
        axes.xaxis.get_ticklabels()[-1].set_horizontalalignment("right")
        for (label, times), colour in zip(curves.items(), SERIES, strict=False):
            axes.plot(1 / (1 - ranks), times(ranks), color=colour, label=label)
        logarithmic(axes, "y")
        legend(axes)
        return svg_of(axes, name, alt)


def _tick(value: float, _position: int) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def legend(axes: Panel) -> None:
    """Put the names of the series above the axes if there is more than one."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        axes.legend(handles, labels, loc="lower right", bbox_to_anchor=(1, 1.01), ncols=4)


def svg_of(axes: Panel, name: str, alt: str) -> str:
    """Return the picture as an element of an HTML page; `name` must be unique on the page."""
    figure = axes.figure
    written = io.StringIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(  # type: ignore[union-attr]  # a SubFigure has no canvas, and is none of ours
            written, format="svg", transparent=True, metadata={"Date": None}
        )
    return inline(written.getvalue(), name, alt)


def inline(svg: str, name: str, alt: str) -> str:
    """Strip what only an SVG file needs, such as DTD addresses; prefix ids by `name`."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.S)
    body = re.sub(r"<!--.*?-->\s*", "", body, flags=re.S)
    view = re.search(r'viewBox="([^"]*)"', body)
    assert view is not None
    head = f'<svg viewBox="{view[1]}" role="img" aria-label="{html.escape(alt)}">'
    body = head + body[body.index(">") + 1 :]
    body = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", body)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', body))
    body = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", body)
    body = re.sub(r"font-family:[^;\"]*;?|font: (\d+)px [^;\"]*", _font, body)
    body = re.sub(r"(\d\.\d{2})\d+", r"\1", body)
    body = re.sub(r"\s*\n\s*", "\n", body)
    return re.sub("|".join(_VARIABLES), lambda found_name: _VARIABLES[found_name[0]], body)


def _font(match: re.Match[str]) -> str:
    return f"font-size: {match[1]}px" if match[1] else ""
