"""Slots of a rank, for cases that send them to other ranks: filled, sealed, damaged, compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from support import ROOT_ID, layout_of, shards_of
from workers.three_ranks import NUM_RANKS, rank

from ckptlib.format.body_layout import body_nbytes, lay_out
from ckptlib.format.digests import XXH3
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.slot import Slot
from ckptlib.slots.snapshot import SnapshotReader, check_body
from ckptlib.staging.pair import CopySource
from ckptlib.staging.stager import Content, Stager

STATE = {
    "w": np.random.default_rng(0).integers(0, 2**32, (9, 64, 1024), np.uint32),
    "b": np.arange(5, dtype=np.int64),
    "count": np.array(7.0),
}
"""2.25 MiB: two full messages and a part of one."""

CAPACITY = 3 << 20


@contextlib.contextmanager
def slot_of(directory: Path, capacity: int) -> Iterator[Slot]:
    slot = Slot.create(directory, f"rank{rank()}", capacity)
    yield slot
    slot.close()
    slot.unlink()


def seal(slot: Slot, step: int, origin: int, state: dict[str, np.ndarray] | None = None) -> SlotHeader:
    """What a rank holds after a step; every step and every rank has other bytes."""
    arrays = {
        name: np.asarray(array + step + 100 * origin) for name, array in (STATE if state is None else state).items()
    }
    layout = layout_of(arrays)
    table = lay_out(layout, shards_of(layout, 0))
    header = SlotHeader(
        root_id=ROOT_ID,
        save=SaveId(step, GenerationId(1, "00000001")),
        rank=origin,
        world_size=NUM_RANKS,
        number=step,
        sequence=2 * step,
        body_nbytes=body_nbytes(table),
        documents={},
    )
    content = Content(header, layout.encoded, table, {"step": step}, {}, 0.0, XXH3)
    names = [layout.tensors[t].name for t in table.tensors]
    stager = Stager(lambda staging: None)
    staging = stager.begin(slot, content)
    stager.copy(staging, [CopySource(n, torch.from_numpy(arrays[n]), False) for n in names])
    staging.go()
    staging.wait_sealed(60)
    stager.close()
    return slot.read_header()


def content_of(slot: Slot, header: SlotHeader) -> bytes:
    """All that makes it the snapshot it is, header included."""
    end = max(offset + nbytes for offset, nbytes, _ in header.documents.values())
    with slot.path.open("rb") as file:
        return file.read(end)


def taking(slot: Slot, offered: list[SlotHeader] | None = None) -> Callable[[SlotHeader], Slot]:
    def take(header: SlotHeader) -> Slot:
        if offered is not None:
            offered.append(header)
        assert slot.try_write_lock()
        return slot

    return take


def flip(slot: Slot, at: int) -> None:
    with slot.path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def assert_held(slot: Slot, header: SlotHeader, expected: Path) -> None:
    """The slot is a replica of what another rank has written to a file."""
    assert slot.read_header() == header
    assert content_of(slot, header) == expected.read_bytes()
    check_body(slot, SnapshotReader().read(slot, header))


def assert_not_ready(slot: Slot, step: int) -> None:
    header = slot.read_header()
    assert not header.ready
    assert header.save.step == step
