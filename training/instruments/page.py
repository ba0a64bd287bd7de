"""One page of a run's curves and samples, which needs nothing but a browser.

The curves are drawn here, as SVG; the page has no script and loads nothing. A browser that shows it
reads it again every half minute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from srm.training.instruments.record import MEANINGS, LogLine
from srm.training.text.whole_files import write_whole

_POINTS = 300
"""Most points of a line; each is the mean of those it stands for."""
_SAMPLES = 20
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 360, 170, 52, 18
_PARTS = ("least ", "largest ", "evaluation ")
"""Begin the names of values that share a chart with each other, or with the rest of their name."""
_STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#222, #ddd); --dim: light-dark(#777, #999);
  --rule: light-dark(#ddd, #333); --c0: light-dark(#1667b7, #6fb1f0);
  --c1: light-dark(#c2571a, #f0a36f); }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--ink); margin: 1.5rem; max-width: 72rem; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(20rem, 1fr)); gap: 1.2rem; }
figure { margin: 0; } h2 { font-size: 1rem; margin: 0 0 .2rem; }
figcaption, text, th { color: var(--dim); fill: var(--dim); font-size: 12px; }
svg { width: 100%; height: auto; } path { fill: none; stroke-width: 1.5; }
line { stroke: var(--rule); } table { border-collapse: collapse; margin-top: 1.5rem; width: 100%; }
td, th { border-top: 1px solid var(--rule); padding: .3rem .6rem; text-align: left;
  vertical-align: top; white-space: pre-wrap; overflow-wrap: anywhere; }
"""
Points = list[tuple[int, float]]


def write_page(name: str, lines: Sequence[LogLine], path: Path) -> None:
    """Write the page of a run of that name. Raises ConfigError if it cannot be written."""
    charts: dict[str, dict[str, Points]] = {}
    for line in lines:
        for value_name, value in line.values.items():
            if value is not None:
                curves = charts.setdefault(_chart_of(value_name), {})
                curves.setdefault(value_name, []).append((line.step, value))
    last = max((line.step for line in lines), default=0)
    samples = [line for line in lines if line.sample is not None][: -_SAMPLES - 1 : -1]
    figures = "".join(_figure(chart, curves, last) for chart, curves in charts.items())
    write_whole(
        path,
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8">'
        f'<meta http-equiv="refresh" content="30"><title>{escape(name)}</title>'
        f"<style>{_STYLE}</style><h1>{escape(name)}</h1><p>After {last:,} updates.</p>"
        f"<main>{figures}</main>{_table(samples)}</html>\n".encode(),
    )


def _chart_of(name: str) -> str:
    for part in _PARTS:
        name = name.removeprefix(part)
    return name


def _figure(chart: str, curves: Mapping[str, Points], last: int) -> str:
    thinned = {name: _thinned(points) for name, points in curves.items()}
    values = [value for points in thinned.values() for _, value in points]
    low, high = min(values), max(values)
    room = _HEIGHT - _BOTTOM - 8

    def place(step: float, value: float) -> str:
        x = _LEFT + (_WIDTH - _LEFT - 4) * step / max(1, last)
        y = 8 + room * (1 - ((value - low) / (high - low) if high > low else 0.5))
        return f"{x:.1f},{y:.1f}"

    drawn, latest = [], []
    for number, (name, points) in enumerate(thinned.items()):
        path = " L".join(place(*point) for point in points)
        cap = "stroke-linecap:round;" if len(points) == 1 else ""
        drawn.append(f'<path style="{cap}stroke:var(--c{number % 2})" d="M{path} l0,0"/>')
        label = f"{name} " if len(curves) > 1 else ""
        text = escape(label + _number(curves[name][-1][1]))
        latest.append(f'<span style="color:var(--c{number % 2})">{text}</span>')
    foot = _HEIGHT - _BOTTOM
    return (
        f"<figure><h2>{escape(chart)} {', '.join(latest)}</h2>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(chart)}">'
        f'<line x1="{_LEFT}" y1="{foot}" x2="{_WIDTH}" y2="{foot}"/>'
        f'<text x="0" y="14">{_number(high)}</text><text x="0" y="{foot}">{_number(low)}</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 4}">0</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT - 4}" text-anchor="end">{last:,}</text>{"".join(drawn)}'
        f"</svg><figcaption>{escape(MEANINGS.get(chart, ''))}</figcaption></figure>"
    )


def _thinned(points: Points) -> Points:
    size = -(-len(points) // _POINTS)
    parts = (points[begin : begin + size] for begin in range(0, len(points), size))
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def _number(value: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _table(lines: Iterable[LogLine]) -> str:
    rows = []
    for line in lines:
        assert line.sample is not None
        reward = "" if line.sample.reward is None else _number(line.sample.reward)
        cells = (f"{line.step:,}", line.sample.prompt, line.sample.text, reward)
        rows.append("".join(f"<td>{escape(cell)}</td>" for cell in cells))
    if not rows:
        return ""
    heads = "".join(f"<th>{head}</th>" for head in ("updates", "prompt", "the model", "reward"))
    return f"<table><tr>{heads}</tr><tr>{'</tr><tr>'.join(rows)}</tr></table>"
