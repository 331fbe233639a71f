"""The sections of the page that are charts: turns records into bars, lines and their titles. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import median
from typing import TypeVar

from ckptlib.format.account import CLOSED, DIED
from ckptlib.reporting import scale
from ckptlib.reporting.charts import (
    LEFT,
    RIGHT,
    Bar,
    Course,
    Dot,
    bar_chart,
    course_chart,
    share_bar,
)
from ckptlib.reporting.html import Child, Element, tag
from ckptlib.reporting.records import Begin, Records, Step
from ckptlib.reporting.scale import Scale, is_date
from ckptlib.words import count, moment, percent, seconds, size

USES = {
    "trained": ("c-blue", "steps that count"),
    "stalled": ("c-yellow", "training waited for saves of these"),
    "lost": ("c-red", "steps that were done again or given up"),
    "restoring": ("c-violet", "opening the root, reading the checkpoint"),
    "closing": ("c-green", "waiting for the last commit"),
    "down": ("c-grey", "no Checkpointer between two starts"),
}
"""What time was spent on: colours and meanings."""

COLOURS = ("c-blue", "c-orange", "c-green", "c-violet", "c-yellow", "c-red")
"""The colours of codecs, raw first; if there are more codecs, they share the last one."""

T = TypeVar("T")

MAX_POINTS = 1500
"""The most points of a line, apart from its last; more could not be told apart."""


MAX_COURSES = 300
"""The most starts that are drawn, the newest ones."""


def section(title: str, *children: Child) -> Element:
    return tag("section", tag("h2", title), *children)


def pair(*sections: Element) -> Element:
    return tag("div", *sections, class_="pair")


def key(*rows: tuple[str, str]) -> Element | None:
    """Returns a legend of what colours mean; None if there are no rows."""
    return (
        None if not rows else tag("ul", *(tag("li", tag("i", class_=kind), word) for kind, word in rows), class_="key")
    )


# The course of the run


def course(found: Records) -> Element | None:
    """Returns the section of steps over time; None if no time is known."""
    failed = {begin.id for begin in found.failed_starts}
    drawn = found.begins[-MAX_COURSES:]
    lines = [line for begin in drawn if (line := _course(begin, begin.id in failed)) is not None]
    dots = [dot for dot in (*_saves(found.steps), *_rewinds(drawn)) if is_date(dot.at)]
    times = [at for line in lines for at, _ in (*line.kept, *line.lost)] + [dot.at for dot in dots]
    if not times:
        return None
    first, last = min(times), max(times)
    x_axis = scale.time_axis(first, last)
    x = Scale(first, last, LEFT + 10, 1100 - RIGHT - 10)
    highest = max([step for line in lines for _, step in (*line.kept, *line.lost)] + [dot.step for dot in dots])
    more = f" The newest {MAX_COURSES} of {len(found.begins):,}." if len(drawn) < len(found.begins) else ""
    chart = course_chart(lines, dots, x_axis, x, scale.count_axis(highest))
    return section(
        "The run",
        tag("p", f"Steps over time (UTC), {moment(first)} to {moment(last)}. Each line is one start of the job.{more}"),
        tag("div", chart, class_="scroll"),
        key(
            ("c-blue", "steps that count; a dot is a committed save"),
            (
                "c-red",
                "lost steps; \u00d7: a start failed or was last heard of; a ring: a save that was left behind",
            ),
            ("c-violet", "somebody went back to a step"),
        ),
    )


def _course(begin: Begin, failed: bool) -> Course | None:
    start = begin.start
    if start is None or not begin.marks or not is_date(start.began):
        return None
    zero = start.began + start.spent.restoring
    points = [(zero + mark.trained_s + mark.stalled_s, float(mark.step)) for mark in _thinned(begin.marks)]
    limit = float((start.last or 0) - start.steps_lost)
    kept = [(start.began, float(begin.marks[0].step)), *(point for point in points if point[1] <= limit)]
    lost = [point for point in points if point[1] > limit]
    if lost:
        (t1, s1), (t2, s2) = kept[-1], lost[0]
        edge = (t1 + (t2 - t1) * max(limit - s1, 0.0) / (s2 - s1), max(limit, s1)) if s2 > s1 else kept[-1]
        kept, lost = [*kept, edge], [edge, *lost]
    end = ([*kept, *lost])[-1] if failed else None
    how = {CLOSED: "ended", DIED: "failed"}.get(start.end or "", "its end is not known")
    title = f"generation {start.generation.number}: steps {start.first} to {start.last}, {how}"
    return Course(kept, lost, end, title + (f", {count(start.steps_lost, 'step')} lost" if start.steps_lost else ""))


def _thinned(points: Sequence[T]) -> list[T]:
    every = max(-(-len(points) // MAX_POINTS), 1)
    return [*points[:-1:every], *points[-1:]]


def _saves(steps: Sequence[Step]) -> Iterable[Dot]:
    for step in _thinned(steps):
        title = f"step {step.save.step} of generation {step.save.generation.number}, {moment(step.created)}"
        kind = "save" if step.on_history else "behind"
        yield Dot(step.created, float(step.save.step), kind, title + ("" if step.on_history else ": left behind"))


def _rewinds(begins: Iterable[Begin]) -> Iterable[Dot]:
    for begin in begins:
        record = begin.record
        if record is not None and record.rewind and record.resumed_from is not None:
            to = record.resumed_from.step
            yield Dot(record.created, float(to), "rewind", f"went back to step {to}, {moment(record.created)}")


def time_spent(found: Records) -> Element:
    spent = found.goodput.spent
    total = spent.total
    if not total:
        return section("Where the time went", tag("p", "No start of this run has left an account of its time."))
    values: dict[str, float] = asdict(spent)
    bar = share_bar(
        [(USES[name][0], value, f"{name}: {seconds(value)}") for name, value in values.items()],
        "Shares of the time",
    )
    rows = [
        tag(
            "tr",
            tag("td", tag("i", class_=USES[name][0]), name),
            tag("td", seconds(value), class_="n"),
            tag("td", percent(value / total), class_="n"),
            tag("td", USES[name][1]),
        )
        for name, value in values.items()
    ]
    ettr, predicted = found.goodput.ettr, found.goodput.predicted
    text = f"{seconds(total)} in all. ETTR (effective training time ratio), the share that trained steps which count: "
    text += f"{percent(ettr)} measured"
    text += "" if predicted is None else f", {percent(predicted)} by the formula from intervals, stalls and failures"
    return section("Where the time went", tag("p", text + "."), bar, tag("table", *rows))


# Each save


def stalls(found: Records) -> Element:
    known = [(step, step.times.stall_s) for step in found.steps if step.times.stall_s is not None]
    title = "Stall"
    if not known:
        return section(title, tag("p", "No save has left word of how long training waited."))
    bars = [_bar(step, [("c-yellow", value)], f"training waited {seconds(value)}") for step, value in known]
    return section(
        title,
        tag("p", f"Seconds that training stood still from a save to the next one, on rank 0. {_summary(known)}"),
        bar_chart(bars, scale.seconds_axis, "Stall of each save"),
        key(*_signs(step for step, _ in known)),
    )


def persists(found: Records) -> Element:
    known = [(step, step.times.persist_s) for step in found.steps if step.times.persist_s is not None]
    title = "Persist"
    if not known:
        why = "The times of the manifests tell nothing: the root was copied, or the store's clock is off."
        return section(title, tag("p", why if found.steps else "No save is committed."))
    bars = [_bar(step, [("c-blue", value)], f"committed after {seconds(value)}") for step, value in known]
    left = len(found.steps) - len(known)
    more = f" Of {count(left, 'save')} that is not known." if left else ""
    return section(
        title,
        tag("p", f"From the snapshot to the commit in the store, in the background. {_summary(known)}{more}"),
        bar_chart(bars, scale.seconds_axis, "Time until each save was committed"),
        key(*_signs(step for step, _ in known)),
    )


def _summary(known: Sequence[tuple[Step, float]]) -> str:
    values = [value for _, value in known]
    step, most = max(known, key=lambda item: item[1])
    return f"Median {seconds(median(values))}, at most {seconds(most)} (step {step.save.step})."


def sizes(found: Records) -> Element:
    if not found.steps:
        return section("Size", tag("p", "No save is committed."))
    bars = []
    for step in found.steps:
        taken = None if step.content is None else step.content.taken_over.stored
        parts = [("c-blue", float(step.nbytes)), *([("c-sky", float(taken))] if taken else [])]
        text = f"{size(step.nbytes_state)} in all, {size(step.nbytes)} written"
        text += f", {size(taken)} taken over from {count(step.num_uses, 'earlier save')}" if taken else ""
        bars.append(_bar(step, parts, text, float(step.nbytes_state)))
    state, written = sum(step.nbytes_state for step in found.steps), sum(step.nbytes for step in found.steps)
    share = f": {100 * written / state:.0f} %" if state else ""
    return section(
        "Size",
        tag("p", f"{size(written)} were written for steps of {size(state)}{share}."),
        bar_chart(bars, scale.bytes_axis, "Bytes of each save"),
        key(
            ("c-blue", "written for the step"),
            ("c-sky", "taken over from earlier saves"),
            ("level-key", "\u2015 what a load of the step gives back"),
            *_signs(found.steps),
        ),
    )


def codecs(found: Records) -> Element:
    known = [(step, step.content) for step in found.steps if step.content is not None]
    title = "Codecs"
    if not known:
        return section(title, tag("p", "No part of a save was read."))
    names = [*dict.fromkeys(name for _, content in known for name in content.codecs)]
    colours = {name: COLOURS[min(n, len(COLOURS) - 1)] for n, name in enumerate(names)}
    bars = [
        _bar(
            step,
            [(colours[name], float(counts.stored)) for name, counts in content.codecs.items()],
            ", ".join(f"{name}: {size(c.nbytes)} in {size(c.stored)}" for name, c in content.codecs.items()),
        )
        for step, content in known
    ]
    nbytes = sum(counts.nbytes for _, content in known for counts in content.codecs.values())
    stored = sum(counts.stored for _, content in known for counts in content.codecs.values())
    ratio = f"{size(nbytes)} of chunks take {size(stored)}." if nbytes else ""
    if names == ["raw"]:
        ratio = "All chunks are stored as they are."
    some = found.num_without_content
    more = f" The parts of {count(some, 'save')} were not read." if some else ""
    return section(
        title,
        tag("p", f"How the chunks (pieces of tensors) that each step needs are stored. {ratio}{more}"),
        bar_chart(bars, scale.bytes_axis, "Stored bytes of each save, by codec"),
        key(
            *((colours[name], "raw: as they are" if name == "raw" else name) for name in names),
            *_signs(s for s, _ in known),
        ),
    )


def intervals(found: Records) -> Element:
    known = [(step, step.times.since_steps) for step in found.steps if step.times.since_steps is not None]
    title = "Interval"
    if not known:
        return section(title, tag("p", "No two saves of one start are known."))
    bars = [
        _bar(
            step,
            [("c-green", float(steps))],
            f"{count(steps, 'step')} since the save before"
            + ("" if step.times.since_s is None else f", {seconds(step.times.since_s)}"),
            None if step.interval is None else float(step.interval),
        )
        for step, steps in known
    ]
    times = [step.times.since_s for step, _ in known if step.times.since_s is not None]
    text = f"Steps from the save before, or from the start, to each save. Median {median(v for _, v in known):g} steps"
    agreed = any(step.interval is not None for step, _ in known)
    rows = [("level-key", "\u2015 what Overhead asks for")] if agreed else []
    return section(
        title,
        tag("p", text + (f", {seconds(median(times))}." if times else ".")),
        bar_chart(bars, scale.count_axis, "Steps between saves"),
        key(("c-green", "steps between saves"), *rows, *_signs(step for step, _ in known)),
    )


def _signs(steps: Iterable[Step]) -> list[tuple[str, str]]:
    """Returns rows of the legend for what bars show besides colours, if any of these steps has it."""
    steps = [*steps]
    pale = [("level-key", "pale: left behind by a rewind")] if not all(step.on_history for step in steps) else []
    starts = [("level-key", "line between bars: another start")] if len({s.save.generation for s in steps}) > 1 else []
    return pale + starts


def _bar(step: Step, parts: Sequence[tuple[str, float]], text: str, level: float | None = None) -> Bar:
    generation = step.save.generation.number
    behind = "" if step.on_history else ", left behind"
    return Bar(
        parts=parts,
        title=f"step {step.save.step} (generation {generation}{behind}): {text}",
        name=str(step.save.step),
        faded=not step.on_history,
        level=level,
        group=str(generation),
    )
