"""`ckptlib watch`: shows on a terminal what a run's checkpoints do right now."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from statistics import median

import click
from rich.console import Group
from rich.live import Live
from rich.text import Text

from ckptlib.catalog.catalog import Catalog
from ckptlib.cli.options import with_output, with_store
from ckptlib.cli.output import Output
from ckptlib.cli.quantities import SPAN
from ckptlib.errors import CkptError
from ckptlib.reporting.glance import Glance, Recent, Watcher
from ckptlib.stores import Store
from ckptlib.words import count, cut, duration, moment, one_line, plain, seconds, size

MAX_FAILED = 3
"""The most failed saves that are shown to people, the newest ones; JSON has all."""

MAX_WIDTH = 100
"""The most characters that are shown of an error that a rank published."""

HEADER = ("STEP", "GEN", "AGE", "SIZE", "WRITTEN", "INTERVAL", "STALL", "PERSIST")


@click.command("watch", short_help="Watch a run's checkpoints on the terminal.")
@click.option("--every", type=SPAN, default=5.0, help="Time between looks at the root.  [default: 5s]")
@click.option("--once", is_flag=True, help="Look once, print, and end.")
@with_store
@with_output
def command(output: Output, store: Store, every: float, once: bool) -> bool:
    """Shows the newest step, its age, interval, stall, persist time, stored size, and failures; until Ctrl-C.

    A look takes four listings and reads what is new. An error of the store is shown, and the next look tried. STALL is
    how long training waited from a save to the next one, so that of the newest save is not known yet.
    """
    watcher = Watcher(Catalog(store))
    if once or output.as_json:
        if not once:
            raise click.UsageError("--json shows one look; give --once, too")
        found = watcher.look()
        output.document(document(store.url, found))
        for line in view(store.url, found, None, time.time()):
            output.line(line)
        return not found.problems
    with suppress(KeyboardInterrupt):
        _watch(watcher, store.url, every)
    return True


def _watch(watcher: Watcher, url: str, every: float) -> None:
    """Looks again and again, until KeyboardInterrupt or SIGTERM, as `timeout` sends: the terminal gets its cursor back
    then. Ages are updated between looks."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    found: Glance | None = None
    with Live(auto_refresh=False) as live:
        while True:
            problem: CkptError | None = None
            try:
                found = watcher.look()
            except CkptError as error:
                problem = error
            until = time.monotonic() + every
            while True:
                lines = view(url, found, problem, time.time())
                if live.is_started and live.console.is_terminal:
                    live.update(Group(*lines), refresh=True)
                left = until - time.monotonic()
                if left <= 0:
                    break
                time.sleep(min(left, 1.0))
            if not live.console.is_terminal:
                live.console.print(*lines, sep="\n", soft_wrap=True)


def view(url: str, found: Glance | None, problem: CkptError | None, now: float) -> list[Text]:
    """Returns the lines that are shown to people."""
    lines = [Text.assemble((plain(url), "bold"), (f"  {moment(now)}", "dim"))]
    if problem is not None:
        lines.append(Text(plain(one_line(str(problem))), style="red"))
    if found is None:
        return lines
    rows = [*_rows(found, now)]
    lines += [Text.assemble((f"{name:<12}", "dim"), (plain(text), style)) for name, text, style in rows]
    if found.recent:
        lines += [Text(), *_table(found.recent, now)]
    lines += [Text(plain(text), style="red") for text in found.problems[:MAX_FAILED]]
    return lines


def _rows(found: Glance, now: float) -> Iterator[tuple[str, str, str]]:
    newest, known = found.newest, found.last_known
    if newest is None:
        yield "newest step", "none is committed", ""
    else:
        ranks = count(newest.world_size, "rank")
        where = f"{_age(newest, now)} old, of generation {newest.save.generation.number} on {ranks}"
        yield "newest step", f"{newest.save.step}, {where}; {count(found.num_steps, 'step')} in all", ""
    for save in found.under_way:
        text = f"step {save.save.step}: {count(save.num_parts, 'rank')} done, {size(save.nbytes)} so far"
        yield "under way", text, ""
    if newest is not None:
        agreed = "" if newest.interval is None else f"; Overhead asks for {count(newest.interval, 'step')}"
        yield "interval", _interval(newest) + agreed, ""
        stalls = [r.times.stall_s for r in found.recent if r.times.stall_s is not None]
        if known is not None and known.times.stall_s is not None:
            yield "stall", f"{seconds(known.times.stall_s)} at step {known.save.step}{_median(stalls)}", ""
        else:
            yield "stall", "not known yet", ""
        persists = [r.times.persist_s for r in found.recent if r.times.persist_s is not None]
        last = newest.times.persist_s
        yield "persist", "not known" if last is None else seconds(last) + _median(persists), ""
        yield "size", f"{size(newest.nbytes_state)}, {size(newest.nbytes)} written for it", ""
    yield from _failures(found)


def _failures(found: Glance) -> Iterator[tuple[str, str, str]]:
    failed = found.goodput.failures
    text = f"{failed:,} of {count(found.num_starts, 'start')}, {count(len(found.failed), 'save')}"
    yield "failures", text, "red" if failed or found.failed else ""
    for save, said in [*found.failed.items()][-MAX_FAILED:]:
        yield "", f"step {save.step}, {cut(' '.join(said.split()), MAX_WIDTH)}", "red"


def _median(values: Sequence[float]) -> str:
    return f", in the median {seconds(median(values))}" if len(values) > 1 else ""


def _interval(recent: Recent) -> str:
    steps, since_s = recent.times.since_steps, recent.times.since_s
    if steps is None:
        return "not known"
    return count(steps, "step") + ("" if since_s is None else f", {seconds(since_s)}")


def _age(recent: Recent, now: float) -> str:
    return duration(max(now - recent.created, 0.0)) if now - recent.created >= 1 else "0 s"


def _table(recent: Sequence[Recent], now: float) -> list[Text]:
    cells = [HEADER, *(_cells(one, now) for one in recent)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return [Text(line, style="" if n else "dim") for n, line in enumerate(lines)]


def _cells(recent: Recent, now: float) -> tuple[str, ...]:
    times = recent.times
    return (
        str(recent.save.step),
        str(recent.save.generation.number),
        _age(recent, now),
        size(recent.nbytes_state),
        size(recent.nbytes),
        "-" if times.since_steps is None else count(times.since_steps, "step"),
        "-" if times.stall_s is None else seconds(times.stall_s),
        "-" if times.persist_s is None else seconds(times.persist_s),
    )


def document(url: str, found: Glance) -> dict[str, object]:
    """Returns a look for JSON: seconds, steps, bytes."""
    return {
        "url": url,
        "at": found.at,
        "steps": found.num_steps,
        "recent": [
            {
                "step": recent.save.step,
                "name": str(recent.save),
                "created": recent.created,
                "world_size": recent.world_size,
                "nbytes_state": recent.nbytes_state,
                "nbytes": recent.nbytes,
                "interval": recent.interval,
                **asdict(recent.times),
            }
            for recent in found.recent
        ],
        "under_way": [
            {"step": save.save.step, "name": str(save.save), "parts": save.num_parts, "nbytes": save.nbytes}
            for save in found.under_way
        ],
        "starts": found.num_starts,
        "failures": found.goodput.failures,
        "failed_saves": [{"step": save.step, "name": str(save), "said": said} for save, said in found.failed.items()],
        "problems": [*found.problems],
    }
