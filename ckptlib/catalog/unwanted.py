"""What of a root may go, as far as a listing and its manifests tell: steps, remains of crashes, trash, pins.

Decides; `retention` drops and deletes. Pure: no torch, no I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ckptlib.catalog.history import history
from ckptlib.catalog.stand import Stand
from ckptlib.catalog.stock import Stock
from ckptlib.catalog.uses import Needed, is_needed
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Generation
from ckptlib.policy.keep import Keep
from ckptlib.stores import Entry


def unwanted_steps(
    committed: Collection[SaveId],
    generations: Mapping[GenerationId, Generation],
    keep: Keep | None,
    abandoned: bool,
    known: Mapping[SaveId, Stand],
    broken: Collection[SaveId],
    put: Mapping[SaveId, float],
) -> list[SaveId]:
    """The committed saves that no rule keeps. `broken`: they lack objects, and are none of the number that is kept.
    `put`: see `Steps`.

    Never the one that the newest generation resumed from while it has none of its own: it would have nowhere to
    start again.
    """
    visible = history(committed, generations)
    unwanted: set[SaveId] = set()
    if keep is not None:
        unwanted = {*keep.choose([save for save in visible if save not in broken], known, put)}
        unwanted |= {save for save in keep.choose(visible, known, put) if save in broken}
    if abandoned:
        unwanted |= {*committed} - {*visible}
    newest = max(generations, default=None)
    if newest is not None and all(save.generation != newest for save in committed):
        unwanted -= {generations[newest].resumed_from}
    return sorted(unwanted)


def crashed(stock: Stock, oldest: float, live: GenerationId | None, decided: SaveId | None = None) -> list[SaveId]:
    """The saves that never committed, have no trash record yet, and are too old to go on; none that the `live` job may
    have in flight, however old the clocks of the store make it look: it has decided on those up to `decided`."""
    found = [save for save in stock.committed if save.generation == live]
    newest = max(found if decided is None else [*found, decided], default=None)
    return sorted(
        save
        for save, entries in stock.objects.items()
        if not (save in stock.committed or save in stock.records)
        and (save.generation != live or (newest is not None and save <= newest))
        and all(entry.modified < oldest for entry in entries)
    )


def due_trash(stock: Stock, oldest: float) -> list[SaveId]:
    """The trash whose time has come."""
    records = stock.records.items()
    return sorted(save for save, record in records if save not in stock.committed and record.modified < oldest)


def deletable(stock: Stock, due: Iterable[SaveId], needed: Needed) -> tuple[set[SaveId], list[list[Entry]]]:
    """The due trash that may be deleted: whole saves; and the objects, stage by stage, in the order of deletion."""
    gone: set[SaveId] = set()
    parts: list[Entry] = []
    packs: list[Entry] = []
    records: list[Entry] = []
    for save in due:
        objects = stock.objects.get(save, ())
        free = [entry for entry in objects if not is_needed(needed, entry.key)]
        for entry in free:
            (packs if entry.key.startswith(keys.PACKS) else parts).append(entry)
        if len(free) == len(objects):
            gone.add(save)
            records.append(stock.records[save])
    return gone, [parts, packs, records]


def is_refresh_done(refresh: SaveId, stock: Stock, needed: Needed | None) -> bool:
    """Whether nobody has to see any more that this was asked for: a save that was planned before may come after it."""
    if needed is None or refresh in stock.committed:
        return False
    return not any(refresh.refresh_covers(of.save) for of in needed)


def idle_pins(stock: Stock, oldest: float) -> list[str]:
    """Pins of which nothing is left to keep. Not of a step whose manifest alone is missing: it may be put back."""
    left = stock.committed | stock.objects.keys()
    return [e.key for save, entries in stock.pins.items() if save not in left for e in entries if e.modified < oldest]
