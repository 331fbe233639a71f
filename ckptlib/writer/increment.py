"""Which chunks a save writes, and which it takes over from the save before, by their digests. Pure.

A chunk of equal digest at the same place in an equal table is not written again: the new part names the place that it
has in the packs of an earlier save. Some unchanged chunks are written all the same:

* those that are old, since a chunk that all steps share is a single point of rot; not all at once;
* those that somebody asked for (`ckptlib refresh`), since they may be damaged;
* those in a pack that is mostly dead: its save was dropped, and most of its bytes are needed no more;
* some, if a part would use the packs of very many saves;
* those whose pack was lost: no step that referred to it would load.

They go into packs of their own, since what has not changed so far is likely to stay.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass

from ckptlib.format.keys import PackSet, SaveId, pack_set
from ckptlib.format.part import Pack, Part

MAX_USES = 256
"""Most sets of packs that a part uses: its manifest and the listing of a sweep grow with them."""

FEWER_USES = 192
"""How many sets stay in use when there were more, so that the next save does not exceed the limit again."""

LIVE_SHARE = 0.5
"""Least share of a pack that must be in use once its save was dropped: with less, what is in use is written again, so
that the pack can go. So what a root holds is at most twice what its steps need, and no byte is moved more than once for
one that died."""

STAGGER = 0.25
"""The last part of the time to a refresh, over which chunks are spread."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The facts that decide whether a chunk that has not changed is written again."""

    now: float
    """When the snapshot was taken; seconds since the epoch."""
    refresh_s: float
    """Age in seconds from which on a pack is not referred to."""
    committed: Set[SaveId]
    """Committed saves, at least those of the saves that put packs of the parent."""
    distrusted: Collection[SaveId] = ()
    """Saves that are marked for a refresh: packs that a mark covers are not referred to."""
    lost: Collection[Pack] = ()
    """Packs of the parent that are not in the store any more."""


@dataclass(frozen=True, slots=True)
class Increment:
    """Positions of chunks. Each chunk is in one of the three tuples, which are ascending."""

    taken: tuple[int, ...]
    """Taken over from the parent."""
    changed: tuple[int, ...]
    carried: tuple[int, ...]
    """Unchanged, and written again."""

    @property
    def written(self) -> tuple[int, ...]:
        return tuple(sorted(self.changed + self.carried)) if self.carried else self.changed


def whole(num_chunks: int) -> Increment:
    """Returns the increment that writes all chunks."""
    return Increment((), tuple(range(num_chunks)), ())


def unchanged(digests: Sequence[str], parent: Part) -> list[int]:
    """Returns the chunks of a snapshot that the parent has, too. The parent's table must be equal."""
    if not parent.codings:
        return [chunk for chunk, (a, b) in enumerate(zip(digests, parent.digests, strict=True)) if a == b]
    before = [*parent.digests]
    for chunk, coding in parent.codings.items():
        before[chunk] = before[chunk] if coding.loss is None else coding.loss.raw_digest
    return [chunk for chunk, (a, b) in enumerate(zip(digests, before, strict=True)) if a == b]


def plan(digests: Sequence[str], parent: Part, rules: Rules) -> Increment:
    """Returns which chunks of a snapshot are written. The parent's table must be equal."""
    same = unchanged(digests, parent)
    packs = _packs_of(parent, same)
    doomed = _doomed(parent, same, rules)
    old = _old(parent, rules)
    if not doomed and not old:
        taken = same
    else:
        taken = [
            chunk
            for chunk in same
            if not any(number in doomed or old.get(number, 0) > _due(chunk) for number in packs[chunk])
        ]
    kept, stays = {*taken}, {*same}
    return Increment(
        tuple(taken),
        tuple(chunk for chunk in range(len(digests)) if chunk not in stays),
        tuple(chunk for chunk in same if chunk not in kept),
    )


def without_base(digests: Sequence[str], parent: Part, rules: Rules) -> frozenset[int]:
    """Returns chunks that, changed or not, are not to be stored as changes of what the parent has.

    A part refers to a base as to an unchanged chunk, so the same rules decide.
    """
    doomed, old = _doomed(parent, unchanged(digests, parent), rules), _old(parent, rules)
    if not doomed and not old:
        return frozenset()
    bases = {chunk: coding.base.pack for chunk, coding in parent.codings.items() if coding.base is not None}
    packs = ((chunk, bases.get(chunk, pack)) for chunk, pack in enumerate(parent.table.packs))
    return frozenset(chunk for chunk, pack in packs if pack in doomed or old.get(pack, 0) > _due(chunk))


def _old(parent: Part, rules: Rules) -> dict[int, float]:
    """Returns the age of each pack of which something is to be refreshed, as a share of the time to a refresh."""
    return {
        number: (rules.now - pack.created) / rules.refresh_s
        for number, pack in enumerate(parent.packs)
        if rules.now - pack.created > rules.refresh_s * (1 - STAGGER)
    }


def _packs_of(parent: Part, chunks: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Returns the packs that each chunk needs, that of its base included."""
    packs = parent.table.packs
    one: list[tuple[int, ...]] = [(number,) for number in range(len(parent.packs))]
    found = {chunk: one[packs[chunk]] for chunk in chunks}
    for chunk, coding in parent.codings.items():
        if coding.base is not None and chunk in found:
            found[chunk] = (packs[chunk], coding.base.pack)
    return found


def _due(chunk: int) -> float:
    """Returns when a chunk is refreshed, as a share of the time to a refresh: neighbours differ, each stays the
    same."""
    return 1 - STAGGER * ((chunk * 0x9E3779B1) % 2**32) / 2**32


def _doomed(parent: Part, same: Collection[int], rules: Rules) -> set[int]:
    """Returns the parent's packs that are not referred to any more."""
    live = [0] * len(parent.packs)
    for chunk in same:
        live[parent.table.packs[chunk]] += parent.stored[chunk]
    for coding in parent.codings.values():  # a chunk that has changed is likely to be patched against the same base
        if coding.base is not None:
            live[coding.base.pack] += coding.base.stored
    sets = [pack_set(pack.key) for pack in parent.packs]
    found = {number for number, of in enumerate(sets) if of is None or _is_doomed(parent, number, of, live, rules)}
    found.update(number for number, pack in enumerate(parent.packs) if pack in rules.lost)
    by_set: dict[PackSet, list[int]] = {}
    for number, of in enumerate(sets):
        if of is not None and number not in found and live[number]:
            by_set.setdefault(of, []).append(number)
    if len(by_set) >= MAX_USES:
        fewest = sorted(by_set.values(), key=lambda numbers: sum(live[number] for number in numbers))
        found.update(number for numbers in fewest[: len(by_set) - FEWER_USES] for number in numbers)
    return found


def _is_doomed(parent: Part, number: int, of: PackSet, live: Sequence[int], rules: Rules) -> bool:
    dead = live[number] < LIVE_SHARE * parent.packs[number].nbytes
    distrusted = any(marked.refresh_covers(of.save) for marked in rules.distrusted)
    return distrusted or (of.save not in rules.committed and dead)
