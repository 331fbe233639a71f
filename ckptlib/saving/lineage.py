"""The lineage: this job's place in the history of a root.

A job is a generation. All ranks agree on it as the root is opened. Its number is above those of all generations that
have put their record, and of all that have left slots or local steps on the job's hosts. It enters history with its
first save, or when it goes back to an earlier step.
"""

from __future__ import annotations

import platform
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ckptlib._version import __version__
from ckptlib.catalog.begun import noted_ids
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.history import history, successor
from ckptlib.catalog.known_generations import KnownGenerations
from ckptlib.catalog.spared import enter_to_go_back
from ckptlib.errors import CheckpointNotFound, StoreError
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Generation, Root
from ckptlib.format.values import Json
from ckptlib.policy.best import Best
from ckptlib.ranks.group import Group
from ckptlib.ranks.together import by_rank_0, together
from ckptlib.slots.placement import ReplicaMap
from ckptlib.staging.other_slots import left_generations
from ckptlib.stores.local import LocalStore
from ckptlib.writer.begin_order import BeginOrder
from ckptlib.writer.client import Writer
from ckptlib.writer.generation import GenerationRecord
from ckptlib.writer.known_origin import KnownOrigin


class Lineage:
    """The lineage of one process, the same on all ranks."""

    def __init__(
        self,
        catalog: Catalog,
        group: Group,
        algorithm: str,
        save_deadline_s: float,
        tags: Mapping[str, str],
        run: Mapping[str, Json],
        slots_in: Sequence[Path],
        earlier: GenerationId | None,
        local: Path | None,
    ) -> None:
        """Opens the root, or makes it with this algorithm and deadline. Collective. `slots_in`: where slots may be.
        `earlier`: the generation that this process continues, whose record is in the store. `local`: this host's disk.

        Raises, on all ranks, the error of an unusable root, NewerFormat if a newer ckptlib has saved in it, and
        StoreError if a rank does not see the root that rank 0 opened.
        """
        self._catalog = catalog
        self._group = group
        self._tags, self._run = tags, run
        self._slots_in, self._local = slots_in, local
        self.root, self.generation, self._seen = self._agree(Root(secrets.token_hex(16), algorithm, save_deadline_s))
        self.host_id = self.generation
        """The generation by which slots and locks on this host are known. A process that continues an earlier
        generation has a name of its own here, so that it reclaims what that generation left."""
        if earlier is not None:
            self.generation = earlier
        self._goes_on = earlier is not None
        self.resumed_from: SaveId | None = None
        self.known: KnownOrigin | None = None
        """The step that was restored from the store, as this rank read it; kept until the writer is told."""
        self.began = False
        """Whether this job has saved, to the store or to memory, or gone back."""
        self._again = False
        self.recorded = group.rank != 0
        """Whether this job's record is in the store; only rank 0 hears of that."""
        self.placement: ReplicaMap | None = None
        """Where replicas go, if snapshots are kept in memory."""
        self.at_once = False
        """Whether this job's record is put before anything else: steps on local disks are of no use without it."""
        self.best: Best | None = None
        """The rule by which the job calls a step its best."""

    def _agree(self, wanted: Root) -> tuple[Root, GenerationId, KnownGenerations]:
        def make() -> bytes:
            root = self._catalog.open_root(wanted)
            saves = self._catalog.saves()  # listed first: whoever commits has put its record before
            ids = self._catalog.generations.ids()
            self._catalog.generations.check_versions(ids)
            records, _ = self._catalog.generations.records(saves, newer=True, ids=ids)
            last = max(history(saves, records), default="")
            return root.encode() + f"{successor(ids, saves)} {len(saves)} {last}".encode()

        document, _, tail = by_rank_0(self._group, "opening the root", make).rpartition(b"\n")
        name, num_saves, last = tail.decode().split(" ")
        self._is_new = num_saves == "0"
        root = Root.decode(document + b"\n", keys.ROOT)
        left = together(self._group, "opening the root", lambda: self._check_seen(root))
        generation = keys.parse_generation(name)
        known = KnownGenerations(
            generation.number - 1,
            self._left_above(generation.number - 1, left),
            keys.parse_save(last) if last else None,
        )
        above = max((other.number for other in known.left), default=0) + 1
        return root, replace(generation, number=max(generation.number, above)), known

    def _left_above(self, newest: int, left: set[GenerationId]) -> tuple[GenerationId, ...]:
        """Returns the generations above `newest` that have left something on any host. `newest`: the highest number in
        the store. `left`: the generations that have left something on this host. Collective."""
        later = sorted(str(generation) for generation in left if generation.number > newest)
        if not self._group.any(bool(later)):
            return ()
        told = self._group.gather(" ".join(later).encode())
        return tuple(sorted({keys.parse_generation(name) for names in told for name in names.decode().split()}))

    def _check_seen(self, root: Root) -> set[GenerationId]:
        """Checks, with one read, that this rank reaches the store, may read it, and sees the same root.

        Returns the generations that have left slots or writers on this host, or began on its disk: their records may
        still be on their way to the store.
        """
        left = left_generations(root.id, self._slots_in)
        if self._local is not None:
            left |= _begun_on(self._local)
        if self._group.rank == 0:
            return left
        where = f"{self._catalog.store.url} on {socket.gethostname()}"
        try:
            seen = self._catalog.root()
        except CheckpointNotFound as error:
            raise StoreError(
                f"{where}: rank 0 opened a root here, but this rank does not see it; is the path on storage that all "
                "hosts share?"
            ) from error
        if seen.id != root.id:
            raise StoreError(
                f"{where}: this rank sees root {seen.id}, but rank 0 opened {root.id}; every rank must use one store"
            )
        return left

    def begin(self, writer: Writer, step: int) -> None:
        """Tells this rank's writer that the generation begins, before its first snapshot, of `step`. Rank 0's writer
        puts the generation's record.

        That comes before anything of this generation can be committed. From then on, older generations may commit only
        what this one goes on from. Waits for nothing. Does nothing if it has begun, unless its record could not be put.
        """
        if self.began and not self._again:
            return
        continues = self.resumed_from is None or self.resumed_from.step > step  # would mix with what follows on it
        record = self._record(None if continues else self.resumed_from)
        order = BeginOrder(
            record,
            self.root.id,
            step,
            continues,
            now=self.at_once or self.placement is not None,
            again=self._goes_on,
            is_new=self._is_new and self.resumed_from is None,
            seen=self._seen,
        )
        writer.begin(order, None if continues or self._goes_on else self._take_known())
        self.began, self._again = True, False

    def go_back(self, writer: Writer, save: SaveId, committed: bool) -> None:
        """Enters history at once: steps after `save` are not listed from here on, whether this job saves or not.

        `committed`: else the save is in memory or on local disks only, where no retention drops it. Only before this
        job has begun. Collective. Raises Superseded if a newer job has begun, and what `enter_to_go_back` raises.
        """
        record = replace(self._record(save), rewind=True)

        def put() -> None:
            mine = GenerationRecord(record, self.root.id, save.step, continues=False, seen=self._seen)
            mine.put(self._catalog)

        def enter() -> None:
            if self._group.rank == 0:
                enter_to_go_back(self._catalog, save, put) if committed else put()
                self._catalog.generations.check_head(self.generation)

        together(self._group, f"going back to step {save.step}", enter)
        self.resumed_from = save
        self.began = self.recorded = True
        writer.begin(BeginOrder(record, self.root.id, save.step, is_put=True), self._take_known())

    def _take_known(self) -> KnownOrigin | None:
        """Returns, once, what is known of the step that the job goes on from; None if the restored step is another
        one."""
        known, self.known = self.known, None
        return None if known is None or known.save != self.resumed_from else known

    def note_init(self, source: Json) -> None:
        """Notes where the run began from, for its record. Only before this job has begun."""
        self._run = {**self._run, "init_from": source}

    def note_recorded(self) -> None:
        """Notes that rank 0's writer has put the record."""
        self.recorded, self._again = True, False

    def note_not_recorded(self) -> None:
        """Notes that it could not: the next snapshot has it try again."""
        self._again = True

    def _record(self, resumed_from: SaveId | None) -> Generation:
        placement = self.placement
        return Generation(
            id=self.generation,
            world_size=self._group.size,
            resumed_from=resumed_from,
            created=time.time(),
            versions={"ckptlib": __version__, "torch": torch.__version__, "python": platform.python_version()},
            host=socket.gethostname(),
            tags=self._tags,
            run=self._run,
            domains=() if placement is None else placement.domains,
            copies=0 if placement is None else placement.copies,
            kinds=() if placement is None else placement.kinds,
            best=self.best,
        )


def _begun_on(local: Path) -> set[GenerationId]:
    """Returns the generations that began on this host's disk."""
    try:
        with LocalStore(str(local)) as disk:
            return noted_ids(disk)
    except StoreError as error:
        raise StoreError(
            f"local={local} on {socket.gethostname()}: cannot be looked at, and may have newer steps than the store: "
            f"{error}. Mend that; or, to do without what is there, give local= another directory"
        ) from error
