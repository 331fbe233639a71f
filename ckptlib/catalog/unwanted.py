"""Decides what may leave a root, from a listing and its manifests: steps, remains of crashes, trash, pins.

`retention` drops and deletes them. Pure: no torch, no I/O.
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
    """Returns the committed saves that no rule keeps. `broken`: saves that lack objects; they do not count among those
    that a rule keeps. `put`: see `Steps`.

    The save that the newest generation resumed from always stays while that generation has none of its own: without it,
    the job could not resume there again.
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
    """Returns the saves that were never committed, have no trash record yet, and are too old to be still in flight.

    Saves that the `live` job may have in flight are left out, however old the clocks of the store make them look. Those
    up to `decided` are not in flight.
    """
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
    """Returns the saves whose trash records are older than `oldest`, and that are not committed."""
    records = stock.records.items()
    return sorted(save for save, record in records if save not in stock.committed and record.modified < oldest)


def deletable(stock: Stock, due: Iterable[SaveId], needed: Needed) -> tuple[set[SaveId], list[list[Entry]]]:
    """Returns the due saves that may be deleted whole; and the objects to delete, stage by stage, in that order."""
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
    """Whether this mark by `ckptlib refresh` is no longer needed. It stays while a step needs packs that it covers: a
    save that was planned before the mark may be committed after it."""
    if needed is None or refresh in stock.committed:
        return False
    return not any(refresh.refresh_covers(of.save) for of in needed)


def idle_pins(stock: Stock, oldest: float) -> list[str]:
    """Returns the keys of pins of saves of which nothing is left. If only a step's manifest is missing, its pins stay,
    since the manifest may be put back."""
    left = stock.committed | stock.objects.keys()
    return [e.key for save, entries in stock.pins.items() if save not in left for e in entries if e.modified < oldest]
