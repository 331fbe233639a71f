"""The sections of the page that are tables: starts, failures, tiers, changes of the interval, steps. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptlib.catalog.codings import Count
from ckptlib.format.account import CLOSED
from ckptlib.reporting.html import Child, Element, join, tag
from ckptlib.reporting.plots import section
from ckptlib.reporting.records import Begin, FailedSave, Records, Step
from ckptlib.words import count, cut, metrics, moment, one_line, ranks, seconds, size, span

PLACES = {"memory": "memory", "local": "local disks", "store": "the store"}
"""Names of the tiers that a start may restore from."""

MAX_ROWS = 1000
"""The most rows of a table; if there are more, the newest are shown."""

MAX_CHANGES = 8
"""The most changes of the interval that are shown unfolded."""

MAX_KINDS = 20
"""The most kinds of tensors that are shown, the largest first; and the most lines of other lists."""

MAX_CHARACTERS = 300
"""The most characters of a cell with text that a run has written."""


def table(header: Sequence[str], rows: Sequence[Sequence[Child]], right: Iterable[str] = (), what: str = "") -> Element:
    """Returns a table; of the newest rows if there are too many. `right`: columns of numbers. `what`: noun for rows."""
    ends = {n for n, name in enumerate(header) if name in {*right}}
    cells = [
        tag(
            "tr",
            *(
                tag("td", cell, class_="n" if n in ends else "s" if is_short(cell) else None)
                for n, cell in enumerate(row)
            ),
        )
        for row in rows[-MAX_ROWS:]
    ]
    head = tag("tr", *(tag("th", name, class_="n" if n in ends else None) for n, name in enumerate(header)))
    left = len(rows) - len(cells)
    note = tag("p", f"The newest {len(cells):,} of {len(rows):,} {what}.") if left > 0 else None
    return join(note, tag("div", tag("table", head, *cells), class_="scroll"))


def is_short(cell: Child) -> bool:
    """Whether the cell is better kept on one line."""
    return isinstance(cell, str) and len(cell) <= len("2026-11-23 15:42:54")


def date(seconds_since: float) -> str:
    """Returns a date in UTC, without saying so: the header does."""
    return moment(seconds_since).removesuffix(" UTC")


def short(text: str) -> str:
    """Returns a text on one line, cut if it is too long."""
    return cut(one_line(text), MAX_CHARACTERS)


def starts(found: Records) -> Element:
    header = (
        *("generation", "began (UTC)", "host", "ranks", "went on from", "restored in", "steps", "lost", "snapshots"),
        *("down before", "end"),
    )
    rows = [_start(begin) for begin in found.begins]
    words = "Each start of the job, and each rewind. A start that resumed says from which step, and where it read that."
    resumed = [
        b for b in found.begins if b.record is not None and b.record.resumed_from is not None and not b.is_rewind
    ]
    if any(begin.restored_from is None for begin in resumed):
        words += " Of some it is not recorded whether they read memory, local disks or the store."
    if any(begin.start is not None and begin.start.skew > 1.0 for begin in found.begins):
        words += " Some start began before the one before it had ended: their hosts' clocks differ, or both ran."
    right = ("generation", "ranks", "restored in", "lost", "snapshots", "down before")
    return section("Starts and restores", tag("p", words), table(header, rows, right, "starts"))


def _start(begin: Begin) -> list[Child]:
    record, start = begin.record, begin.start
    began = start.began if start is not None else None if record is None else record.created
    end: Child = "rewind" if begin.is_rewind else "no account" if start is None else "not known"
    if start is not None and start.end is not None:
        end = "ended" if start.end == CLOSED else tag("span", "failed", class_="bad")
    return [
        begin.id.number,
        "" if began is None else date(began),
        "" if record is None else short(record.host),
        "" if record is None or begin.is_rewind else record.world_size,
        _origin(begin),
        "" if start is None else seconds(start.spent.restoring),
        "" if start is None or begin.is_rewind else "none" if start.last is None else f"{start.first} to {start.last}",
        "" if start is None else f"{start.steps_lost:,}",
        "" if begin.num_saves is None else f"{begin.num_saves:,}",
        "" if start is None else seconds(start.spent.down),
        end,
    ]


def _origin(begin: Begin) -> str:
    if begin.record is None:
        return "its record cannot be read"
    origin = begin.record.resumed_from
    if origin is None:
        return "began anew"
    words = f"step {origin.step} of generation {origin.generation.number}"
    tier = "" if begin.restored_from is None else f", read from {PLACES[begin.restored_from]}"
    return (f"went back to {words}" if begin.is_rewind else words) + tier


def failures(found: Records) -> Element:
    goodput = found.goodput
    parts: list[Child] = []
    if goodput.failures and goodput.mtbf is not None:
        unknown = sum(begin.end is None for begin in found.failed_starts)
        text = f"{count(goodput.failures, 'start')} failed, one every {seconds(goodput.mtbf)} in the mean"
        text += f"; of {count(unknown, 'start')} no word came after the last save" if unknown else ""
        lost = sum(start.steps_lost for start in goodput.starts)
        text += f". {count(lost, 'step')} were lost, by rewinds too" if lost else ""
        parts.append(tag("p", f"{text}."))
    gone = [save for save in found.failed if not save.may_come]
    if found.failed:
        rows = [_failed(save) for save in found.failed]
        header = ("step", "generation", "last put (UTC)", "parts", "written", "what became of it")
        parts.append(tag("p", f"{count(len(gone), 'save')} begun and never committed:" if gone else "Saves under way:"))
        parts.append(table(header, rows, ("step", "generation", "parts", "written"), "saves"))
    if found.problems:
        parts.append(tag("p", f"{count(len(found.problems), 'object')} could not be read (ckptlib verify says more):"))
        parts.append(tag("ul", *(tag("li", short(problem)) for problem in found.problems[:20]), class_="plain"))
    if not parts:
        parts.append(tag("p", "None: no start failed, no save was left without a commit, and all records can be read."))
    return section("Failures", *parts)


def _failed(save: FailedSave) -> list[Child]:
    said = {error: [rank for rank, other in save.errors.items() if other == error] for error in save.errors.values()}
    words = [
        f"{'rank' if len(who) == 1 else 'ranks'} {ranks(sorted(who))}: {short(error)}" for error, who in said.items()
    ]
    how = "; ".join(words) or ("under way, for all that is known" if save.may_come else "cut short: no rank told why")
    return [save.save.step, save.save.generation.number, date(save.modified), save.num_parts, size(save.nbytes), how]


def changes(found: Records) -> Element | None:
    """Returns the section of changes of the agreed interval; None if none is recorded."""
    rows: list[list[Child]] = []
    before: Step | None = None
    for step in found.steps:
        if step.interval is None:
            continue
        if before is None or before.interval != step.interval or before.save.generation != step.save.generation:
            new = before is None or before.save.generation != step.save.generation
            rows.append(
                [
                    step.save.step,
                    step.save.generation.number,
                    "" if new or before is None or before.interval is None else f"{before.interval:,}",
                    f"{step.interval:,}",
                    "" if step.why is None else short(step.why),
                ]
            )
        before = step
    if not rows:
        return None
    words = "The ranks agree upon an interval by what saves cost. Each row is the first save under another one."
    header = ["first save", "generation", "before", "steps", "why"]
    if not any(row[-1] for row in rows):
        words += " Why is not recorded in the root."
        header, rows = header[:-1], [row[:-1] for row in rows]
    right = ("first save", "generation", "before", "steps")
    found_table = table(header, rows, right, "changes")
    if len(rows) > MAX_CHANGES:
        found_table = tag("details", tag("summary", f"all {count(len(rows), 'change')}"), found_table)
    return section("Changes of the interval", tag("p", words), found_table)


def tiers(found: Records) -> Element:
    lines: list[str] = []
    for begin in found.begins:
        record = begin.record
        if record is not None and record.domains:
            domains = count(len({*record.domains}), "failure domain")
            copies = f"{count(record.copies, 'replica')} of each" if record.copies else "no replicas"
            lines.append(f"generation {begin.id.number}: snapshots in memory, {copies}, over {domains}")
    kept = sorted({*range(len(lines))} if len(lines) <= MAX_KINDS else {*range(len(lines) - MAX_KINDS, len(lines))})
    words = f"The store holds {count(len(found.steps), 'committed step')}, in {size(found.nbytes_packs)} of packs."
    if found.dropped:
        words += f" {count(len(found.dropped), 'step')} were dropped and wait for their deletion:"
    memory = "" if lines else " No start of this run has kept replicas of snapshots in other hosts' memory."
    local = " Local disks leave no record in the root: ckptlib ls --local PATH shows one, on its host."
    reasons: dict[str, list[int]] = {}
    for drop in found.dropped:
        reasons.setdefault(drop.reason, []).append(drop.save.step)
    drops = [f"{short(reason)}: {span(steps)}" for reason, steps in [*reasons.items()][:MAX_KINDS]]
    return section(
        "Tiers",
        tag("p", words),
        tag("ul", *(tag("li", drop) for drop in drops), class_="plain") if drops else None,
        tag("p", (memory + local).strip()),
        tag("ul", *(tag("li", lines[n]) for n in kept), class_="plain") if lines else None,
    )


def kinds(found: Records) -> Element | None:
    """Returns the section of how the newest step is stored; None if that is not known, or all of it is raw."""
    history = found.history
    if found.newest is None or not history or found.newest.codecs.keys() <= {"raw"}:
        return None
    of_kinds = found.newest.kinds
    counts = {kind: Count.sum(by_codec.values()) for kind, by_codec in of_kinds.items()}
    largest = sorted(counts.items(), key=lambda item: item[1].nbytes, reverse=True)
    rows: list[list[Child]] = [
        [short(kind), f"{of.chunks:,}", size(of.nbytes), size(of.stored), of.ratio, ", ".join(sorted(of_kinds[kind]))]
        for kind, of in largest[:MAX_KINDS]
    ]
    more = len(largest) - len(rows)
    return section(
        "What the newest step is stored as",
        tag("p", f"Step {history[-1].save.step}, by kind of tensor."),
        table(("kind", "chunks", "size", "stored", "ratio", "codecs"), rows, ("chunks", "size", "stored", "ratio")),
        tag("p", f"And {count(more, 'more kind')}.") if more > 0 else None,
    )


def steps(found: Records) -> Element:
    """Returns the section of all committed steps, folded away."""
    if not found.steps:
        return section("Steps", tag("p", "None is committed."))
    with_metrics = any(step.metrics for step in found.steps)
    header = [
        *("step", "generation", "taken (UTC)", "ranks", "logical", "written", "uses", "stall", "persist"),
        *("", "metrics"),
    ]
    rows = [_step(step) for step in found.steps]
    if not with_metrics:
        header, rows = header[:-1], [row[:-1] for row in rows]
    right = ("step", "generation", "ranks", "logical", "written", "uses", "stall", "persist")
    inner = table(header, rows, right, "steps")
    return section("Steps", tag("details", tag("summary", f"all {count(len(rows), 'committed save')}"), inner))


def _step(step: Step) -> list[Child]:
    times = step.times
    marks = ", ".join([*step.kept, *([] if step.on_history else ["left behind"])])
    return [
        step.save.step,
        step.save.generation.number,
        date(step.created),
        f"{step.world_size:,}",
        size(step.nbytes_state),
        size(step.nbytes),
        f"{step.num_uses:,}",
        "" if times.stall_s is None else seconds(times.stall_s),
        "" if times.persist_s is None else seconds(times.persist_s),
        marks,
        short(metrics(step.metrics)),
    ]
