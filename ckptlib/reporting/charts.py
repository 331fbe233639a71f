"""Charts as SVG: bars, stacked bars, lines of steps, and the course of a run. The style colours them by class.

Pure. Each mark has a title, which a browser shows under the mouse pointer; there are no scripts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptlib.reporting.html import Element, join, tag
from ckptlib.reporting.scale import Axis, Scale

MAX_BARS = 240
"""The most bars of a chart; more would be thinner than a pixel or two. Of neighbours, the highest is drawn."""

LEFT, RIGHT, TOP, BOTTOM = 62.0, 12.0, 10.0, 26.0
"""Room for the axes, in pixels."""


@dataclass(frozen=True, slots=True)
class Bar:
    """The bar at one place of the x axis."""

    parts: Sequence[tuple[str, float]]
    """Classes and values, from the bottom up."""
    title: str
    name: str
    """The bar's name on the x axis."""
    faded: bool = False
    level: float | None = None
    """A mark across the bar."""
    group: str = ""
    """A line is drawn between bars of different groups."""

    @property
    def total(self) -> float:
        return sum(value for _, value in self.parts)

    @property
    def high(self) -> float:
        return max(self.total, self.level or 0.0)


def bar_chart(bars: Sequence[Bar], axis: Callable[[float], Axis], label: str) -> Element:
    """Draws bars side by side, on a y axis that begins at 0."""
    bars = _thinned(bars)
    width, height = 540, 190
    y_axis = axis(max((bar.high for bar in bars), default=0.0))
    y = Scale(0.0, y_axis.high, height - BOTTOM, TOP)
    pitch = (width - LEFT - RIGHT) / max(len(bars), 1)
    wide = max(min(pitch * 0.72, 26.0), 0.8)
    drawn: list[Element] = [_y_axis(y_axis, y, width)]
    for n, bar in enumerate(bars):
        middle = LEFT + (n + 0.5) * pitch
        if n and bar.group != bars[n - 1].group:
            drawn.append(_line(LEFT + n * pitch, TOP, LEFT + n * pitch, height - BOTTOM, "border"))
        drawn.append(_bar(bar, y, middle, wide))
    drawn.append(_x_names([bar.name for bar in bars], lambda n: LEFT + (n + 0.5) * pitch, height, width))
    return svg(width, height, label, *drawn)


def _bar(bar: Bar, y: Scale, middle: float, wide: float) -> Element:
    shapes: list[Element] = []
    at = 0.0
    for kind, value in bar.parts:
        top, bottom = y(at + value), y(at)
        if bottom > top:
            shapes.append(
                tag("rect", class_=kind, x=middle - wide / 2, y=top, width=wide, height=max(bottom - top, 0.5))
            )
        at += value
    if bar.level is not None:
        level = y(bar.level)
        shapes.append(_line(middle - wide / 2 - 1, level, middle + wide / 2 + 1, level, "level"))
    return tag("g", tag("title", bar.title), *shapes, class_="mark faded" if bar.faded else "mark")


def _thinned(bars: Sequence[Bar]) -> list[Bar]:
    """Returns only the highest of neighbouring bars if there are too many."""
    if len(bars) <= MAX_BARS:
        return [*bars]
    edges = [round(n * len(bars) / MAX_BARS) for n in range(MAX_BARS + 1)]
    return [max(bars[a:b], key=lambda bar: bar.high) for a, b in itertools.pairwise(edges)]


def share_bar(parts: Sequence[tuple[str, float, str]], label: str) -> Element:
    """Draws one bar of the whole width. `parts`: class, value and title of each."""
    total = sum(value for _, value, _ in parts)
    width, height, at = 1100, 34, 0.0
    shapes = []
    for kind, value, title in parts:
        wide = width * value / total if total else 0.0
        if wide > 0:
            gap = 2.0 if wide > 6 else 0.0
            shapes.append(
                tag("rect", tag("title", title), class_=kind, x=at, y=4, width=max(wide - gap, 0.4), height=26, rx=2)
            )
        at += wide
    return svg(width, height, label, *shapes)


@dataclass(frozen=True, slots=True)
class Course:
    """One start of a job on the chart of a run."""

    kept: Sequence[tuple[float, float]]
    """Times and steps, of steps that count."""
    lost: Sequence[tuple[float, float]]
    """Times and steps, of steps that were done again or given up."""
    end: tuple[float, float] | None
    """Time and step at which it failed; None if it did not."""
    title: str


@dataclass(frozen=True, slots=True)
class Dot:
    """Something that happened at a time and a step."""

    at: float
    step: float
    kind: str
    title: str


def course_chart(courses: Sequence[Course], dots: Sequence[Dot], x_axis: Axis, x: Scale, y_axis: Axis) -> Element:
    """Draws steps over time. `x`: maps times to pixels, between LEFT and 1100 - RIGHT."""
    width, height = 1100, 300
    y = Scale(0.0, y_axis.high, height - BOTTOM, TOP)
    drawn = [_y_axis(y_axis, y, width)]
    for course in courses:
        lines = [
            tag("polyline", class_=kind, points=" ".join(f"{x(at):.1f},{y(step):.1f}" for at, step in points))
            for kind, points in (("course", course.kept), ("course lost", course.lost))
            if len(points) > 1
        ]
        drawn.append(tag("g", tag("title", course.title), *lines))
    drawn += [
        tag("circle", tag("title", dot.title), class_=f"dot {dot.kind}", cx=x(dot.at), cy=y(dot.step), r=3)
        for dot in dots
        if dot.kind != "rewind"
    ]
    drawn += [_cross(x(course.end[0]), y(course.end[1]), course.title) for course in courses if course.end]
    drawn += [_arrow(x(dot.at), y(dot.step), dot.title) for dot in dots if dot.kind == "rewind"]
    drawn.append(_x_axis(x_axis, x, height))
    return svg(width, height, "Steps over time, of each start of the job", *drawn)


def _cross(x: float, y: float, title: str) -> Element:
    path = f"M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10"
    return tag("path", tag("title", title), class_="cross", d=path)


def _arrow(x: float, y: float, title: str) -> Element:
    """Draws an arrow down to the step that a rewind went back to."""
    path = f"M{x:.1f} {TOP:.1f}V{y - 3:.1f}M{x - 4:.1f} {y - 9:.1f}L{x:.1f} {y - 3:.1f}L{x + 4:.1f} {y - 9:.1f}"
    return tag("path", tag("title", title), class_="arrow", d=path)


def svg(width: float, height: float, label: str, *drawn: Element) -> Element:
    return tag("svg", *drawn, viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=label)


def _y_axis(axis: Axis, y: Scale, width: float) -> Element:
    lines = []
    for tick, word in zip(axis.ticks, axis.words, strict=True):
        lines.append(_line(LEFT, y(tick), width - RIGHT, y(tick), "zero" if not tick else "grid"))
        lines.append(tag("text", word, class_="tick", x=LEFT - 7, y=y(tick) + 4, text_anchor="end"))
    return join(*lines)


def _x_axis(axis: Axis, x: Scale, height: float) -> Element:
    return join(
        *(
            tag("text", word, class_="tick", x=x(tick), y=height - 8, text_anchor="middle")
            for tick, word in zip(axis.ticks, axis.words, strict=True)
        )
    )


def _x_names(names: Sequence[str], x: Callable[[int], float], height: float, width: float) -> Element:
    """Draws as many names as there is room for."""
    longest = max(map(len, names), default=1)
    most = max(int((width - LEFT - RIGHT) / (7.0 * longest + 14)), 1)
    every = max(-(-len(names) // most), 1)
    return join(
        *(
            tag("text", names[n], class_="tick", x=x(n), y=height - 8, text_anchor="middle")
            for n in range(0, len(names), every)
        )
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Element:
    return tag("line", class_=kind, x1=x1, y1=y1, x2=x2, y2=y2)
