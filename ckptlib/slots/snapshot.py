"""Snapshots: the decoded documents of a ready slot, and the check that its bytes are the sealed ones. No torch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckptlib.errors import CorruptData
from ckptlib.format.digests import digester
from ckptlib.format.documents import Fields, decode
from ckptlib.format.layout import Layout, decode_layout
from ckptlib.format.table import Table
from ckptlib.format.values import Json, loads
from ckptlib.pages import PAGE_BYTES
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.readable import ReadableSlot


@dataclass(frozen=True)
class Snapshot:
    """The documents of a ready slot, decoded."""

    header: SlotHeader
    table: Table
    layout: Layout
    algorithm: str
    digests: tuple[str, ...]
    """The digest of each chunk of the table."""
    values: dict[str, Json]
    metrics: dict[str, Json]
    created: float
    exempt: bool = False
    """Whether the step is to stay for good."""
    account: Mapping[str, Json] = field(default_factory=dict)
    """What the start of the job had spent its time on by then; see `format.account`."""


class SnapshotReader:
    """Reads snapshots. Keeps documents that are the same from one save of a rank to its next. Owned by one thread."""

    def __init__(self) -> None:
        self._tables: dict[int, tuple[str, Table, Layout]] = {}
        """The last table of each rank, its digest and its layout, by rank."""

    def table(self, rank: int) -> Table | None:
        """Returns the table of the last snapshot of a rank that was read."""
        known = self._tables.get(rank)
        return None if known is None else known[1]

    def read(self, slot: ReadableSlot, header: SlotHeader) -> Snapshot:
        """Returns the snapshot whose documents lie where `header` says. Raises CorruptData, FormatError."""
        table, layout = self._table(slot, header)
        fields = decode("snapshot", slot.read_document(header, "snapshot"), f"{slot.where}: snapshot")
        return Snapshot(
            header,
            table,
            layout,
            fields.text("algorithm"),
            tuple(fields.digests(len(table.nbytes))),
            fields.tree("values"),
            fields.tree("metrics"),
            fields.number("created"),
            fields.flag("exempt"),
            fields.tree("account") if "account" in fields else {},
        )

    def _table(self, slot: ReadableSlot, header: SlotHeader) -> tuple[Table, Layout]:
        text = slot.read_document(header, "table")
        digest = header.documents["table"][2]
        known = self._tables.get(header.rank)
        if known is None or known[0] != digest:
            layout = decode_layout(slot.read_document(header, "layout"), f"{slot.where}: layout")
            table = Table.decode(Fields(loads(text), f"{slot.where}: table"))
            table.check(layout, slot.where)
            table.check_packs([header.body_nbytes], slot.where)
            known = self._tables[header.rank] = (digest, table, layout)
        return known[1:]


def check_body(
    slot: ReadableSlot, snapshot: Snapshot, arriving: Iterable[int] = (), chunks: Iterable[int] | None = None
) -> None:
    """Raises CorruptData, naming the tensor, when a chunk in the slot does not match its digest.

    `arriving`: if the body is still being received, yields again and again how many of its bytes are there by now.
    `chunks`: those that are checked; None: all.
    """
    digest, table = digester(snapshot.algorithm), snapshot.table
    arrivals, there = iter(arriving), 0
    for chunk in range(len(table.nbytes)) if chunks is None else chunks:
        offset, nbytes, expected = table.offsets[chunk], table.nbytes[chunk], snapshot.digests[chunk]
        while offset + nbytes > there:
            there = next(arrivals, sys.maxsize)
        if digest(slot.view(PAGE_BYTES + offset, nbytes)) != expected:
            what = table.describe(chunk, snapshot.layout)
            raise CorruptData(
                f"{slot.where}: {what} at [{offset}:+{nbytes}] changed in memory after it was sealed. If this happens "
                "again, test the host's memory"
            )
