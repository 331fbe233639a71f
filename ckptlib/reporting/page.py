"""The report on a run as one page of HTML, which needs no network and runs no script. Pure."""

from __future__ import annotations

from ckptlib._version import __version__
from ckptlib.reporting import plots, tables
from ckptlib.reporting.html import Element, join, tag
from ckptlib.reporting.records import Records
from ckptlib.reporting.style import STYLE
from ckptlib.words import count, duration, moment, percent, size

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The page's policy: a browser may load nothing for it, so even markup that was not escaped could send nothing."""


def page(found: Records) -> str:
    """Returns the whole document."""
    sections = [
        plots.course(found),
        plots.time_spent(found),
        plots.pair(plots.stalls(found), plots.persists(found)),
        plots.pair(plots.sizes(found), plots.codecs(found)),
        plots.pair(plots.intervals(found), tables.tiers(found)),
        tables.changes(found),
        tables.starts(found),
        tables.failures(found),
        tables.kinds(found),
        tables.steps(found),
    ]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"Checkpoints of {found.url}"),
        tag("style", Element(STYLE)),
    )
    body = tag("body", tag("main", _header(found), *sections))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _header(found: Records) -> Element:
    words = f"Read {moment(found.at)} by ckptlib {__version__}, from the records in the root alone."
    if found.untold:
        words += f" {count(found.untold, 'start')} left no account of the time (of an older ckptlib, or ckptlib.save)."
    return tag(
        "header", tag("h1", f"Checkpoints of {found.url}"), tag("p", words), tag("div", *_tiles(found), class_="tiles")
    )


def _tiles(found: Records) -> list[Element]:
    history, goodput = found.history, found.goodput
    newest = history[-1] if history else None
    taken = sum(begin.num_saves or 0 for begin in found.begins)
    behind = len(found.steps) - len(history)
    sizes = [*dict.fromkeys(b.record.world_size for b in found.begins if b.record is not None and not b.record.rewind)]
    tiles = []
    if newest is not None:
        age = duration(max(found.at - newest.created, 0.0))
        tiles += [
            tile("newest step", f"{newest.save.step:,}", f"{age} old when this page was made"),
            tile(
                *("committed steps", f"{len(history):,}"),
                *(f"{count(taken, 'snapshot')} taken" if taken else "", f"{behind:,} left behind" if behind else ""),
            ),
            tile("size of the newest", size(newest.nbytes_state), f"{size(newest.nbytes)} written for it"),
        ]
    else:
        tiles.append(tile("committed steps", "0", "nothing to resume from"))
    logical = size(sum(step.nbytes_state for step in found.steps))
    tiles.append(tile("stored in the root", size(found.nbytes_packs), f"for steps of {logical}"))
    if sizes:
        shown = ", ".join(map(str, sizes[-4:]))
        starts = sum(not begin.is_rewind for begin in found.begins)
        tiles.append(tile("ranks", f"... {shown}" if len(sizes) > 4 else shown, count(starts, "start")))
    if goodput.ettr is not None:
        trained = f"of {duration(goodput.spent.total)} trained steps that count"
        tiles.append(tile("ETTR", percent(goodput.ettr), trained))
    gone = sum(not save.may_come for save in found.failed)
    more = f"{count(gone, 'save')} never committed" if gone else ""
    tiles.append(tile("failed starts", f"{goodput.failures:,}", more, bad=bool(goodput.failures)))
    return tiles


def tile(name: str, value: str, *more: str, bad: bool = False) -> Element:
    lines = (tag("span", line) for line in more if line)
    return tag("div", tag("span", name), tag("b", value, class_="bad" if bad else None), join(*lines), class_="tile")
