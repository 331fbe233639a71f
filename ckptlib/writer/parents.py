"""The parent of a save, from which it takes over unchanged chunks: a part of the same rank, of a committed step.

Candidates are the parts that this writer has put, and after a start the newest one of its generation, or the one that
the job resumed from, which its trainer may have read already. Only a committed step is a parent: its packs are kept
from then on. No torch.
"""

from __future__ import annotations

import logging
import time

from ckptlib.catalog.catalog import Catalog, Steps
from ckptlib.catalog.listed_steps import ListedSteps, list_steps
from ckptlib.catalog.pauses import Pauses
from ckptlib.catalog.second_read import decoded
from ckptlib.catalog.unreadable import UNREADABLE
from ckptlib.errors import StoreError
from ckptlib.format import gc_pause
from ckptlib.format.keys import PartName, SaveId, pack_save
from ckptlib.format.manifest import Generation
from ckptlib.format.part import Part
from ckptlib.slots.snapshot import Snapshot
from ckptlib.writer.increment import unchanged
from ckptlib.writer.known_origin import KnownOrigin
from ckptlib.writer.seen_packs import SeenPacks

log = logging.getLogger(__name__)

KEPT = 5
"""Parts that are remembered: commits may come several saves late."""

RECORD_WITHIN_S = 5.0
"""How long a rank waits for the record of its generation, which rank 0's writer puts as its own first save begins."""


def keep_few(parts: list[Part], parent: Part | None) -> None:
    """Forgets the oldest part if there are more than KEPT. The parent that was chosen last stays beside them: it is the
    newest committed one as long as saves fail."""
    oldest = 1 if parts[0] is parent else 0
    if len(parts) - oldest > KEPT:
        del parts[oldest]


class Parents:
    """Chooses the parent of each save of one rank. For one thread."""

    def __init__(self, catalog: Catalog, world_size: int, seen: SeenPacks) -> None:
        """`seen` is told of packs that the job's trainer has seen."""
        self._catalog, self._seen = catalog, seen
        self._world_size = world_size
        self._parts: list[Part] = []
        """Newest last."""
        self._parent: Part | None = None
        """The parent that was chosen last."""
        self._searched = False
        self._origin: SaveId | None = None
        """The step that the job resumed from; None: the record of its generation tells."""
        self._known: KnownOrigin | None = None
        """What the trainer has read of that step, until it is used."""
        self._listed: ListedSteps | None = None

    def begin_anew(self) -> None:
        """Notes that nothing can be found but what this writer has put."""
        self._searched = True

    def go_on_from(self, save: SaveId, known: KnownOrigin | None) -> None:
        """Notes the step that the job resumed from. `known`: what the trainer has read of it; if given, nothing of this
        generation is there yet, since a writer in the place of a dead one is not told it."""
        self._origin = save
        if known is not None and not self._searched:
            self._known = known

    def remember(self, part: Part) -> None:
        """Remembers a part that was put; once its step is committed, it may be a parent.

        If one save has two parts, neither may: nobody knows which one the manifest names. Nothing keeps what only the
        other uses.
        """
        twins = [other for other in self._parts if other.save == part.save]
        for other in twins:
            self._parts.remove(other)
        if not twins:
            self._parts.append(part)
            keep_few(self._parts, self._parent)

    def search_again(self) -> None:
        """Forgets all parts and searches again: a writer that died may have put another part of the newest save, and
        its manifest tells which one counts."""
        self._parts.clear()
        self._searched = False

    def choose(self, snapshot: Snapshot, patience_s: float) -> tuple[Part | None, Steps]:
        """Returns a snapshot's parent, or None if nothing can be taken over, together with the steps that matter to it.

        Lists no steps before those of the packs that the candidates use: each rank asks at each save. Waits up to
        `patience_s` for the commit of the newest part, if that has more in common with the snapshot than the parts that
        are committed. Raises StoreError.
        """
        if not self._searched:
            found = self._find(snapshot)
            self._searched, self._known = True, None
            if found is not None:
                self._parts.insert(0, found)
        candidates = [part for part in reversed(self._parts) if fits(part, snapshot)]
        if not candidates:
            return None, Steps([], [])
        oldest, recent = min(map(oldest_save, candidates)), min(part.save for part in candidates)
        steps = self._list(oldest, recent)
        deadline, pauses = time.monotonic() + patience_s, Pauses(self._catalog.store, patience_s)
        while True:
            parent = self._parent = next((part for part in candidates if steps.has(part.save)), None)
            newest = candidates[0]
            if parent is newest or time.monotonic() >= deadline:
                return parent, steps
            if not _nbytes_gained(snapshot, newest, parent):
                return parent, steps
            time.sleep(min(pauses.next(), max(deadline - time.monotonic(), 0.0)))
            steps = self._list(oldest, recent)

    def _list(self, oldest: SaveId, recent: SaveId) -> Steps:
        self._listed = list_steps(self._catalog, oldest, recent, self._listed)
        return self._listed.steps

    def _find(self, snapshot: Snapshot) -> Part | None:
        """Returns the part of a step that this writer has not put, if it can be a parent once the step is committed."""
        known = self._known
        save = self._start(snapshot) if known is None else known.save
        if save is None:
            return None
        try:
            return self._read(save, snapshot) if known is None else self._take(known, snapshot)
        except (*UNREADABLE, StoreError) as error:
            log.warning(
                "step %d is written whole, since step %d cannot be read: %s",
                snapshot.header.save.step,
                save.step,
                error,
            )
            return None

    def _read(self, save: SaveId, snapshot: Snapshot) -> Part | None:
        """Returns this rank's part of a save from the store; None if it cannot be a parent."""
        manifest = self._catalog.manifest(save)
        if manifest.world_size != self._world_size:
            return None
        name = manifest.parts[snapshot.header.rank]
        store = self._catalog.store
        return decoded(store, lambda: store.get(name.key), lambda document: _decoded(name, document, snapshot))

    def _take(self, known: KnownOrigin, snapshot: Snapshot) -> Part | None:
        """Returns the part as the trainer has read it. Its packs were there when the job restored."""
        part = None if known.part is None else _decoded(known.part.name, known.part.document, snapshot)
        for pack in () if part is None else part.packs:
            self._seen.note(pack.key, known.read_at)
        return part

    def _start(self, snapshot: Snapshot) -> SaveId | None:
        """Returns the newest committed save of the generation, else the one that it resumed from."""
        steps, save = self._catalog.steps(), snapshot.header.save
        own = [other for other in steps.saves if other.generation == save.generation and other != save]
        if own:
            return own[-1]
        if not steps.saves:
            return None
        try:
            resumed = self._origin or self._record(snapshot).resumed_from
        except UNREADABLE as error:
            log.warning("step %d is written whole: what the job resumed from cannot be told: %s", save.step, error)
            return None
        return resumed if resumed is not None and steps.has(resumed) else None

    def _record(self, snapshot: Snapshot) -> Generation:
        """Returns the record of the snapshot's generation. Raises one of UNREADABLE, or StoreError.

        It is looked for before it is read: a reader that finds none reads the copy, which may come in between, and
        would be told of as the copy of a record that is lost.
        """
        generation, is_first = snapshot.header.save.generation, snapshot.header.rank == 0
        deadline, pauses = time.monotonic() + RECORD_WITHIN_S, Pauses(self._catalog.store)
        while not is_first and not self._catalog.is_there(generation.key) and time.monotonic() < deadline:
            time.sleep(pauses.next())
        return self._catalog.generations.record(generation)


def _decoded(name: PartName, document: bytes, snapshot: Snapshot) -> Part | None:
    """Returns the part of this name; None if it cannot be a parent of the snapshot. Raises CorruptData, FormatError.

    Tables that are cut alike name one layout, so the snapshot's layout is the part's: it is not read.
    """
    with gc_pause.kept():
        part = Part.decode(name, document)
        if not fits(part, snapshot):
            return None
        part.table.check(snapshot.layout, name.key)
    return part


def fits(part: Part, snapshot: Snapshot) -> bool:
    """Returns whether chunks of equal numbers are of the same bytes of the same tensors, named by the same digests."""
    return part.algorithm == snapshot.algorithm and part.table.cuts_digest == snapshot.table.cuts_digest


def oldest_save(part: Part) -> SaveId:
    """Returns the oldest of the saves that a part needs: its own, and those of its packs."""
    return min([part.save, *(of for of in (pack_save(pack.key) for pack in part.packs) if of is not None)])


def _nbytes_gained(snapshot: Snapshot, newest: Part, parent: Part | None) -> int:
    """Returns the bytes that could be taken over from the newest part, but not from the parent."""
    found = {*unchanged(snapshot.digests, newest)}
    if parent is not None:
        found -= {*unchanged(snapshot.digests, parent)}
    return sum(newest.table.nbytes[chunk] for chunk in found)
