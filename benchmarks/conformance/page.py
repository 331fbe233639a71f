"""The trials as tables of counts, in markdown."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.common import Line
from benchmarks.conformance import buckets, faults
from benchmarks.conformance.libraries import LIBRARIES
from benchmarks.conformance.outcomes import Found, Said

WORDS = {
    Found.NEW: "new step",
    Found.BEFORE: "step before, by itself",
    Found.ERROR: "error; step before on request",
    Found.DIED: "loader died; step before on request",
    Found.LOST: "error, **no step loads**",
    Found.NOTHING: "**nothing loaded, no error**",
    Found.WRONG: "**wrong tensors, no error**",
    Found.HANG: "**hangs**",
}
SAVES = {Said.ERROR: "save: error", Said.DONE: "save: done", Said.WAITING: "save: still waiting"}
MEETS_TWO_RANKS = "one of two ranks killed"
CONTROL = faults.CONTROL
ORDER = [*faults.FAULTS, *buckets.FAULTS]


def page(lines: Sequence[Line]) -> str:
    """All of it; of lines of several runs, too."""
    return "\n".join([*_head(lines), *tables(lines)]) + "\n"


def tables(lines: Sequence[Line]) -> Iterator[str]:
    """A summary, then one table for each fault, then what did not run."""
    trials = [line for line in lines if line["kind"] == "trial"]
    yield from [
        "## All faults together",
        "",
        *_summary([trial for trial in trials if not trial["fault"].startswith(CONTROL)]),
    ]
    for fault in sorted({line["fault"] for line in trials}, key=ORDER.index):
        yield from ["", f"## {fault[0].upper()}{fault[1:]}", "", *_of_fault([t for t in trials if t["fault"] == fault])]
    others = [line for line in lines if line["kind"] in ("left out", "failure")]
    if others:
        yield from ["", "## Not run", ""]
        reasons: dict[tuple[str, str], list[str]] = {}
        for line in others:
            reasons.setdefault((line["library"], line["why"].splitlines()[0]), []).append(line["fault"])
        for (library, why), without in reasons.items():
            yield f"- {library} ({', '.join(without)}): {why}"


def _head(lines: Sequence[Line]) -> Iterator[str]:
    yield from ["# Conformance", ""]
    for machine in (line for line in lines if line["kind"] == "machine"):
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        memory = f"{machine['memory_bytes'] / (1 << 30):.0f} GiB"
        where = f"{machine['cores']} cores, {memory}, Linux {machine['kernel']}, {machine['filesystem']}"
        yield from [f"Made by `python -m benchmarks {shlex.join(machine['settings']['command'])}`.", ""]
        yield from [f"{machine['cpu']}, {where}; {machine['at']}. {versions}.", ""]
    for end in (line for line in lines if line["kind"] == "end"):
        num_trials = sum(line["kind"] == "trial" for line in lines)
        yield from [f"{num_trials:,} trials in {end['seconds'] / 60:.1f} minutes.", ""]


def _summary(trials: Sequence[Line]) -> Iterator[str]:
    rows = []
    for library, mine in _by_library(trials).items():
        rows.append(
            {
                "library": library,
                "trials": len(mine),
                "a whole step, by itself": _count(mine, Found.NEW, Found.BEFORE),
                "error; step before on request": _count(mine, Found.ERROR, Found.DIED),
                "**no step loads**": _count(mine, Found.LOST),
                "**wrong or no tensors, no error**": _count(mine, Found.WRONG, Found.NOTHING),
                "**hangs**": _count(mine, Found.HANG),
                "**said done, was not**": sum(map(_is_false, mine)),
            }
        )
    return _table(rows)


def _is_false(line: Line) -> bool:
    """Whether a save on one rank said that it was done, and its step does not load."""
    done = line.get("said") == Said.DONE.name.lower() and line["fault"] != MEETS_TWO_RANKS
    return done and line["found"] != Found.NEW.name.lower()


def _of_fault(trials: Sequence[Line]) -> Iterator[str]:
    seen, said = {line["found"] for line in trials}, {line.get("said") for line in trials}
    rows = []
    for library, mine in _by_library(trials).items():
        row: dict[str, object] = {"library": library, "trials": len(mine)}
        for word, title in SAVES.items():
            if word.name.lower() in said:
                row[title] = sum(line.get("said") == word.name.lower() for line in mine)
        for found, title in WORDS.items():
            if found.name.lower() in seen:
                row[title] = _count(mine, found)
        rows.append(row)
    return _table(rows)


def _by_library(trials: Sequence[Line]) -> dict[str, list[Line]]:
    """In the order in which libraries are listed."""
    found: dict[str, list[Line]] = {name: [] for name in LIBRARIES}
    for line in trials:
        found.setdefault(line["library"], []).append(line)
    return {name: mine for name, mine in found.items() if mine}


def _count(lines: Sequence[Line], *found: Found) -> int:
    names = {one.name.lower() for one in found}
    return sum(line["found"] in names for line in lines)


def _table(rows: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """Zeroes are left empty."""
    if not rows:
        return
    yield "| " + " | ".join(rows[0]) + " |"
    yield "| " + " | ".join("---" for _ in rows[0]) + " |"
    for row in rows:
        yield "| " + " | ".join(str(cell or "") for cell in row.values()) + " |"
