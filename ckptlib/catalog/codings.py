"""The codings of a step's chunks, by codec and by kind of tensor. Pure: callers pass parts and layouts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ckptlib.codecs.registry import RAW
from ckptlib.format.layout import Layout
from ckptlib.format.part import Part

SMALL = "small tensors"
"""The kind of chunks that hold tensors of several kinds."""


@dataclass(slots=True)
class Count:
    """A number of chunks, and their bytes."""

    chunks: int = 0
    nbytes: int = 0
    """Decoded bytes, as a load returns them."""
    stored: int = 0
    """Encoded bytes, in packs."""

    def add(self, other: Count) -> None:
        self.chunks += other.chunks
        self.nbytes += other.nbytes
        self.stored += other.stored

    @classmethod
    def sum(cls, of: Iterable[Count]) -> Count:
        total = cls()
        for one in of:
            total.add(one)
        return total

    def document(self) -> dict[str, int]:
        return {"num_chunks": self.chunks, "nbytes": self.nbytes, "nbytes_stored": self.stored}

    @property
    def ratio(self) -> str:
        """Stored bytes per byte, for people."""
        return f"{self.stored / self.nbytes:.3f}" if self.nbytes else "-"


@dataclass(slots=True)
class Codings:
    """Counts how the chunks of one step are stored."""

    kinds: dict[str, dict[str, Count]] = field(default_factory=dict)
    """The counts, by kind of tensor and codec."""
    _known: dict[str, tuple[list[str], np.ndarray]] = field(default_factory=dict)
    """By layout: its kinds, and the index of each tensor's kind among them."""

    def add(self, part: Part, layout: Layout) -> None:
        """Adds the chunks of a part that was checked against its layout."""
        table = part.table
        if not table.nbytes:
            return
        names, of_tensor = self._kinds_in(layout)
        codecs, codec = codecs_in(part)
        of_shard = of_tensor[np.array(table.tensors, np.int64)]
        counts = np.array(table.num_chunks, np.int64)
        kind = np.repeat(of_shard, counts)
        guests = np.flatnonzero(counts == 0)  # shards that lie in the chunk of an earlier shard
        hosts = np.array(table.first_chunks, np.int64)[guests]
        kind[hosts[kind[hosts] != of_shard[guests]]] = len(names)
        cell = kind * len(codecs) + codec
        for at in np.unique(cell):
            chosen = cell == at
            name = [*names, SMALL][int(at) // len(codecs)]
            nbytes, stored = (int(np.array(column, np.int64)[chosen].sum()) for column in (table.nbytes, part.stored))
            by_codec = self.kinds.setdefault(name, {})
            by_codec.setdefault(codecs[int(at) % len(codecs)], Count()).add(Count(int(chosen.sum()), nbytes, stored))

    def _kinds_in(self, layout: Layout) -> tuple[list[str], np.ndarray]:
        if layout.digest not in self._known:
            kinds = [kind_of(entry.name) for entry in layout.tensors]
            names = sorted({*kinds})
            position = {name: at for at, name in enumerate(names)}
            self._known[layout.digest] = names, np.array([position[kind] for kind in kinds], np.int64)
        return self._known[layout.digest]

    @property
    def codecs(self) -> dict[str, Count]:
        """The counts by codec, raw first."""
        found: dict[str, Count] = {}
        for by_codec in self.kinds.values():
            for codec, count in by_codec.items():
                found.setdefault(codec, Count()).add(count)
        return raw_first(found)


def codecs_in(part: Part) -> tuple[list[str], np.ndarray]:
    """Returns the codecs of a part, raw first, and the index of each chunk's codec among them."""
    names = [RAW, *sorted({coding.codec for coding in part.codings.values()} - {RAW})]
    column = np.zeros(len(part.table.nbytes), np.int64)
    for chunk, coding in part.codings.items():
        column[chunk] = names.index(coding.codec)
    return names, column


def raw_first(counts: Mapping[str, Count]) -> dict[str, Count]:
    """Returns these counts sorted by codec, raw first."""
    return dict(sorted(counts.items(), key=lambda item: (item[0] != RAW, item[0])))


def kind_of(name: str) -> str:
    """Returns the kind of a tensor, a pattern that its name matches: "optim/*exp_avg", "model/*weight", "cursor"."""
    first, slash, rest = name.partition("/")
    if not slash:
        return name
    last = re.split(r"[/.]", rest)[-1]
    return f"{first}/*" if last.isdigit() else f"{first}/*{last}"
