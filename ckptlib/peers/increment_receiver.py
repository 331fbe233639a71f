"""The receiving end of increments: a holder makes a rank's next snapshot from its last one and from increments."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np

from ckptlib.codecs.optimizer_step import OptimizerStep
from ckptlib.errors import CkptError, FormatError
from ckptlib.peers.increments import RAW, STEP, Base, Stretch, are_lacking
from ckptlib.peers.parameters import Span
from ckptlib.peers.ranges import Ranges
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.slot import Slot
from ckptlib.slots.snapshot import Snapshot


class StepReceiver:
    """The replicas that this rank holds of another rank, and the decoding of the next one. For one thread."""

    def __init__(self) -> None:
        self._coder = OptimizerStep()
        self._last: tuple[Slot, SlotHeader] | None = None
        self.used = False
        """Whether increments came for the newest snapshot."""
        self.distrusted = False
        """Whether an increment has come out wrong: everything is sent as it is from then on."""

    def begin(self, void: Callable[[int], bool]) -> None:
        """Prepares for another snapshot. `void`: whether nothing may build on the snapshot of a step."""
        self.used = False
        if self._last is not None and void(self._last[1].save.step):
            self._last = None

    def sealed(self, slot: Slot, header: SlotHeader) -> None:
        """Notes the newest snapshot."""
        self._last = slot, header

    def base(self) -> Slot | None:
        """Returns the slot of the last sealed replica, while it holds that: not once another one is written there."""
        if self._last is None or self.distrusted:
            return None
        slot, header = self._last
        try:
            return slot if slot.read_header() == header else None
        except CkptError:  # it is being overwritten, or was closed, since it was too small
            return None

    def offer(self, header: SlotHeader) -> Base | None:
        """Returns the base that this rank names to a sender. The offered snapshot's slot is marked as being written."""
        if self.base() is None or self._last is None:
            return None
        last = self._last[1]
        return Base.of(last) if last.documents["table"] == header.documents["table"] else None

    def accept(self, data: bytes, snapshot: Snapshot, lacking: Ranges) -> list[tuple[Span, ...]]:
        """Returns the states that come as increments. Raises FormatError for a malformed plan."""
        where = f"plan of increments of rank {snapshot.header.rank}"
        try:
            rows = [[int(shard) for shard in row] for row in json.loads(data)]
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise FormatError(f"{where}: {data[:80]!s}, expected lists of shards") from error
        layout, table = snapshot.layout, snapshot.table
        sizes = table.sizes(layout)
        begins = table.begins(sizes)
        seen: set[int] = set()
        found = []
        for row in rows:
            if not 2 <= len(row) <= 3 or not all(0 <= shard < len(sizes) for shard in row) or seen & {*row}:
                raise FormatError(f"{where}: {row}, expected two or three of {len(sizes)} shards, each once")
            seen |= {*row}
            spans = tuple(Span(n, begins[n], sizes[n], layout.tensors[table.tensors[n]].dtype) for n in row)
            counts = {span.nbytes // span.itemsize if span.itemsize else 0 for span in spans}
            if len(counts) > 1 or 0 in counts or len({*row}) < len(row):
                raise FormatError(f"{where}: {row} are not alike")
            if not are_lacking(spans, lacking):
                raise FormatError(f"{where}: {row} are not lacking")
            found.append(spans)
        self.used = bool(found)
        return found

    def decode(self, slot: Slot, how: int, frame: memoryview, stretch: Stretch) -> None:
        """Decodes an increment into a slot. Raises FormatError."""
        out = stretch.words(slot)
        if how == STEP and self._last is not None:
            self._coder.decode(frame, stretch.words(self._last[0]), out)
        elif how == RAW and len(frame) == stretch.nbytes:
            at = 0
            for words in out:
                words[:] = np.frombuffer(frame[at : at + words.nbytes], words.dtype)
                at += words.nbytes
        else:
            raise FormatError(f"an increment of kind {how} and {len(frame):,} bytes for {stretch.nbytes:,}")
