"""Puts numbers, sizes, times and names in words for people: in messages, commands, reports. Pure, but for the clock."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone


def plain(text: str) -> str:
    """Returns the text with every unprintable character escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """Puts a text of several lines on one."""
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


def cut(text: str, most: int) -> str:
    """Cuts a text to at most `most` characters."""
    return text if len(text) <= most else text[: most - 3] + "..."


def listed(found: Sequence[object], most: int) -> str:
    """Lists the first items: "0, 1, ..."."""
    return ", ".join(map(str, found[:most])) + (", ..." if len(found) > most else "")


def last(found: Sequence[object], most: int) -> str:
    """Lists the last items: "..., 8, 9"."""
    return ("..., " if len(found) > most else "") + ", ".join(map(str, found[-most:]))


def size(nbytes: float) -> str:
    """Formats bytes with three digits: "3.24 MB"."""
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    unit = ""
    for unit in ("kB", "MB", "GB", "TB", "PB"):  # noqa: B007  (the last one is used below)
        nbytes /= 1000
        if nbytes < 999.5:
            break
    return f"{nbytes:.{2 if nbytes < 9.995 else 1 if nbytes < 99.95 else 0}f} {unit}"


def percent(share: float | None) -> str:
    """Formats a share of 1: "3.2 %"; None as "unknown"."""
    return "unknown" if share is None else f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    """Formats a time span in its largest unit: "3 min"."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms" if seconds >= 0 else "-" + duration(-seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def seconds(span: float) -> str:
    """Formats like `duration`, but with a decimal, and never in days, to compare parts of a run's time: "3.2 s"."""
    if span < 1:
        return duration(span)
    unit, length = next(((unit, length) for unit, length in (("h", 3600), ("min", 60)) if span >= 2 * length), ("s", 1))
    return f"{span / length:,.1f} {unit}"


def age(since: float) -> str:
    """Returns how long ago a time was, given in seconds since the epoch."""
    seconds = time.time() - since
    return duration(seconds) if abs(seconds) >= 1 else "0 s"


def moment(seconds: float) -> str:
    """Formats seconds since the epoch as a date, UTC."""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):  # from a document: may be any number
        return f"{seconds:g} s since 1970"


def is_told(times: int) -> bool:
    """Returns whether to report something that happened this many times: at the first, second, fourth time, ..."""
    return times & (times - 1) == 0


def count(number: int, noun: str) -> str:
    """Formats a number with its noun: "1 step", "2 steps"."""
    return f"{number:,} {noun if number == 1 else noun + 's'}"


def span(steps: Sequence[int]) -> str:
    """Describes one or more steps: "step 10", "3 steps from 10 to 30"."""
    return f"step {steps[0]}" if len(steps) == 1 else f"{count(len(steps), 'step')} from {min(steps)} to {max(steps)}"


def metrics(found: Mapping[str, object]) -> str:
    """Puts metrics on one line: "loss 2.513  lr 0.001"."""
    return "  ".join(f"{name} {_number(value)}" for name, value in found.items())


def _number(value: object) -> str:
    match value:
        case float():
            return f"{value:.6g}"
        case str():
            return value
        case {"$float": str(text)}:  # JSON has no such number
            return text
        case _:
            return json.dumps(value)


def ranks(found: Sequence[int]) -> str:
    """Lists ascending ranks: "0-3, 6"."""
    runs: list[list[int]] = []
    for rank in found:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
