"""`ckptlib du`: the bytes of steps, alone and together, and the bytes that no step needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from functools import partial

import click
from rich.text import Text

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.reading import each
from ckptlib.catalog.uses import add_needed
from ckptlib.cli.options import with_output, with_store
from ckptlib.cli.output import Cell, Output
from ckptlib.cli.usage import PacksUsage, StepUsage, Usage
from ckptlib.errors import CheckpointNotFound, CkptError
from ckptlib.format import keys
from ckptlib.format.keys import PackSet, PartName, SaveId
from ckptlib.format.manifest import Manifest
from ckptlib.format.part import Part
from ckptlib.stores import Store
from ckptlib.verify.findings import attempt
from ckptlib.words import count, size

MAX_MISSING = 5
"""The most missing packs that are named to people."""


@click.command("du", short_help="Show what steps take, alone and together.")
@with_store
@with_output
def command(store: Store, output: Output) -> bool:
    """Shows how many bytes each step takes. Steps share what has not changed from one to the next.

    \b
    LOGICAL  what a load of the step gives back
    STORED   what its chunks take in packs, whichever step wrote them
    SHARED   the part of STORED that other committed steps need, too
    OWN      the part of STORED that no other committed step needs
    WRITTEN  the packs that were written for the step and are still there
    DEAD     the part of WRITTEN that no step needs, and that stays because
             other bytes of these packs are needed

    Reads the documents of all steps, and no tensor data. Sizes are those of packs; documents are not counted.
    """
    catalog = Catalog(store)
    catalog.root()  # raises where there is none
    usage, problems = Usage(), []
    needed: dict[PackSet, frozenset[int] | None] = {}
    committed: set[SaveId] = set()
    damaged: set[SaveId] = set()
    for save, found in _documents(catalog):
        committed.add(save)
        needed |= {PackSet(save): None, PackSet(save, carried=True): None}
        if isinstance(found, Manifest):
            add_needed(needed, found)
        elif isinstance(found, Part):
            usage.add(found)
        else:
            damaged.add(save)
            problems.append(f"{found}; what step {save.step} needs is not counted, or not all of it")
    trash = {*filter(None, (keys.parse_trash_key(entry.key) for entry in store.scan(keys.TRASH)))}
    packs = usage.finish(store.scan(keys.PACKS), committed, needed)  # listed last: what steps need is there by then
    problems += _missing(usage)
    states = _states(sorted({*committed, *packs}), committed, {*catalog.visible(newer=True)}, trash)
    states.update(dict.fromkeys(damaged, "damaged"))
    total = totals(usage.steps, packs, states)
    rows = [_document(save, state, usage.steps.get(save), packs.get(save)) for save, state in states.items()]
    output.document({"url": store.url, "steps": rows, "totals": total, "problems": problems})
    _print(output, usage.steps, packs, states, total)
    for problem in problems:
        output.problem(problem)
    return not problems


def _documents(catalog: Catalog) -> Iterator[tuple[SaveId, Manifest | Part | CkptError]]:
    """Yields each committed step's manifest, then its parts; in place of one that cannot be read, the error. Only a few
    are read ahead."""

    def part_of(item: tuple[SaveId, PartName | Manifest | CkptError]) -> tuple[SaveId, Manifest | Part | CkptError]:
        save, name = item
        if isinstance(name, PartName):
            return save, attempt(partial(catalog.part_alone, name))
        return save, name

    saves = catalog.saves()
    manifests = zip(saves, each(lambda save: attempt(partial(catalog.manifest, save)), saves), strict=True)
    items: Iterator[tuple[SaveId, PartName | Manifest | CkptError]] = (
        (save, item)
        for save, found in manifests
        if not isinstance(found, CheckpointNotFound)  # dropped since it was listed
        for item in (found, *(found.parts if isinstance(found, Manifest) else ()))
    )
    return each(part_of, items)


def _missing(usage: Usage) -> list[str]:
    """Returns messages about missing packs."""
    some = [f"{key}: is not there, or shorter than what steps need of it" for key in usage.missing[:MAX_MISSING]]
    more = len(usage.missing) - len(some)
    return [*some, *([f"and {count(more, 'more pack')}: run ckptlib verify --all"] if more else [])]


def _states(
    saves: Iterable[SaveId], committed: Set[SaveId], visible: Set[SaveId], trash: Set[SaveId]
) -> dict[SaveId, str]:
    """Returns the states of saves, as `ls --all` calls them."""
    return {
        save: ("committed" if save in visible else "left behind")
        if save in committed
        else ("trash" if save in trash else "uncommitted")
        for save in saves
    }


def totals(
    steps: Mapping[SaveId, StepUsage], packs: Mapping[SaveId, PacksUsage], states: Mapping[SaveId, str]
) -> dict[str, int]:
    """Returns the sums over a root. `written` is the sum of the ones after it."""
    idle = {state: sum(p.idle for save, p in packs.items() if states[save] == state) for state in {*states.values()}}
    return {
        "logical": sum(step.logical for step in steps.values()),
        "written": sum(p.written for p in packs.values()),
        "needed": sum(p.needed for p in packs.values()),
        "framing": sum(p.framing for p in packs.values()),
        "dead": sum(p.dead for p in packs.values()),
        "trash": idle.get("trash", 0),
        "uncommitted": idle.get("uncommitted", 0),
    }


def _document(save: SaveId, state: str, step: StepUsage | None, packs: PacksUsage | None) -> dict[str, object]:
    packs = packs or PacksUsage()
    return {
        "step": save.step,
        "name": str(save),
        "state": state,
        "logical": step.logical if step else None,
        "stored": step.stored if step else None,
        "shared": step.shared if step else None,
        "own": step.own if step else None,
        "written": packs.written,
        "dead": packs.dead,
    }


def _print(
    output: Output,
    steps: Mapping[SaveId, StepUsage],
    packs: Mapping[SaveId, PacksUsage],
    states: Mapping[SaveId, str],
    total: Mapping[str, int],
) -> None:
    header = ["STEP", "GEN", "STATE", "LOGICAL", "STORED", "SHARED", "OWN", "WRITTEN", "DEAD"]
    rows = [_cells(save, state, steps.get(save), packs.get(save)) for save, state in states.items()]
    if rows:
        output.columns(header, rows, right=[name for name in header if name != "STATE"])
        output.line()
    lines = [
        ("written", "all packs"),
        ("needed", f"by {count(len(steps), 'step')} of {size(total['logical'])}, each byte once"),
        ("framing", "headers of these packs, and gaps that align chunks"),
        ("dead", "needed by no step, beside bytes that are"),
        ("trash", "of dropped steps; ckptlib gc deletes them after the grace period"),
        ("uncommitted", "of saves in flight, or the remains of a crash"),
    ]
    output.columns(
        ("TOTAL", "SIZE", "WHAT"),
        [(name, size(total[name]), Text(what, style="dim")) for name, what in lines],
        ("SIZE",),
    )


def _cells(save: SaveId, state: str, step: StepUsage | None, packs: PacksUsage | None) -> list[Cell]:
    packs = packs or PacksUsage()
    numbers = ["-"] * 4 if step is None else [size(n) for n in (step.logical, step.stored, step.shared, step.own)]
    cells = [str(save.step), str(save.generation.number), state, *numbers, size(packs.written), size(packs.dead)]
    return [Text(cell, style={"committed": "", "damaged": "red"}.get(state, "dim")) for cell in cells]
