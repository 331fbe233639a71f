"""Saves of one rank by a Persister of its own, without a trainer or a writer process, and what they read back as."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from support import make_generation, make_root
from workers.crash_spare import ready_slot

from ckptlib.catalog.chunks import read_chunk
from ckptlib.catalog.commit import Committer
from ckptlib.format.digests import digester
from ckptlib.format.keys import SaveId
from ckptlib.format.part import Part
from ckptlib.policy.codec import Asked, CodecRules
from ckptlib.slots.slot import Slot
from ckptlib.slots.snapshot import Snapshot, SnapshotReader
from ckptlib.stores import Store
from ckptlib.writer.persist import Persister

Arrays = Mapping[str, np.ndarray]


class OneRank:
    """A root in a store, and the persister of its only rank."""

    def __init__(self, directory: Path, store: Store, codec: Asked) -> None:
        self.directory, self.store = directory, store
        self.catalog = make_root(store)
        self.generation = make_generation(self.catalog)
        self.persister = self.persister_of(store, codec)
        self.step = 0

    @staticmethod
    def persister_of(store: Store, codec: Asked) -> Persister:
        """As a writer that was just started has it."""
        return Persister(store, ThreadPoolExecutor(1), 0, 1, 1e9, CodecRules.of(codec))

    def slot(self, arrays: Arrays) -> tuple[SaveId, Slot]:
        """The next snapshot, sealed."""
        self.step += 1
        save = SaveId(self.step, self.generation)
        return save, ready_slot(self.directory, save, dict(arrays))

    def save(self, arrays: Arrays, commit: bool = True) -> Part:
        save, slot = self.slot(arrays)
        try:
            part = self.persister.persist(slot, save)
        finally:
            slot.unlink()
        if commit:
            self.commit(part)
        return part

    def commit(self, part: Part) -> None:
        Committer(self.catalog).commit(part.save, [part.encode()[0]])

    def parts(self) -> list[str]:
        """Keys of all that were put."""
        return [entry.key for entry in self.store.scan("parts")]

    def read(self, part: Part) -> dict[str, bytes]:
        """The tensors of a part, each chunk checked."""
        part = self.catalog.part(part.encode()[0])
        table, layout = part.table, self.catalog.layout(part.table.layout)
        digest, chunks = digester(part.algorithm), dict[int, bytes]()
        for chunk, expected in enumerate(part.digests):
            data = read_chunk(self.store.get_into, part, chunk)
            assert digest(data) == expected
            chunks[chunk] = bytes(data)
        found: dict[str, bytes] = {}
        for shard, nbytes in enumerate(table.sizes(layout)):
            whole = b"".join(chunks[chunk] for chunk in table.chunks(shard))
            assert not table.is_shared(shard)
            assert len(whole) == nbytes
            found[layout.tensors[table.tensors[shard]].name] = whole
        return found

    def check(self, part: Part, arrays: Arrays) -> None:
        """What was saved is what a load gives back, bit for bit."""
        assert self.read(part) == {name: array.tobytes() for name, array in arrays.items()}


def snapshot_of(save: SaveId, slot: Slot) -> Snapshot:
    header = slot.read_header()
    assert header.save == save
    return SnapshotReader().read(slot, header)


def codecs_of(part: Part) -> list[str]:
    """Of each chunk; "raw": none."""
    return [part.codings[c].codec if c in part.codings else "raw" for c in range(len(part.digests))]


def num_summaries(job: OneRank) -> int:
    """Whole copies of chunks that are remembered for patches."""
    patches = job.persister._coder._patches
    assert patches is not None
    return sum(len(chunk.keyframes) for chunk in patches._chunks.values())
