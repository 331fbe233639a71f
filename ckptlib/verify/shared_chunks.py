"""Chunks that several steps need, and that were read and found good: so that a whole root is read once. No torch.

Only good ones are remembered: a damaged chunk is read again, and told, for each step that needs it. A chunk is known by
all that its verdict depends on: where its bytes lie, what they are a frame of, and the digest that they must have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.unreadable import UNREADABLE
from ckptlib.format.digests import XXH3, digester
from ckptlib.format.keys import PackSet, SaveId, pack_set
from ckptlib.format.part import Part

MAX_CHUNKS = 16_000_000
"""That are remembered, 8 bytes each; what is beyond that is read again."""


class SharedChunks:
    """Of the steps of a root, which are verified one after the other. Used by one thread."""

    def __init__(self, catalog: Catalog, saves: Sequence[SaveId]) -> None:
        """`saves`: in the order in which they will be verified. Reads their manifests, unless the catalog has them."""
        self._last: dict[PackSet, SaveId] = {}
        """By set of packs that several need: the last one to need it."""
        owners: dict[PackSet, SaveId] = {}
        catalog.warm_stands(saves)
        for save in saves:
            try:
                uses = catalog.stand(save).uses.keys()
            except UNREADABLE:
                continue  # a finding, in time
            for of in (PackSet(save), PackSet(save, carried=True), *uses):
                if of in owners:
                    self._last[of] = save
                owners[of] = save
        self._known: dict[str, np.ndarray] = {}
        """By pack: chunks as numbers, ascending."""
        self._found: list[tuple[str, np.ndarray]] = []
        """Of the step that is being verified: not known before its end, so that what is to be read of it is settled."""
        self._room = MAX_CHUNKS

    def unknown(self, part: Part, pack: str, chunks: Sequence[int]) -> list[int]:
        """Those of a part's chunks in a pack that must be read."""
        known = self._known.get(pack)
        if known is None:
            return [*chunks]
        read = np.isin(_numbers(part, chunks), known, invert=True)
        return [chunk for chunk, unread in zip(chunks, read.tolist(), strict=True) if unread]

    def add(self, part: Part, pack: str, chunks: Sequence[int]) -> None:
        """Chunks of a pack that were read and are good."""
        if chunks and pack_set(pack) in self._last:
            self._found.append((pack, _numbers(part, chunks)))

    def finish(self, save: SaveId) -> None:
        """A step is done: what is good of it is known from here on, and what no later step needs is forgotten."""
        for pack, numbers in self._found:
            if len(numbers) <= self._room:
                before = self._known.get(pack, np.empty(0, np.uint64))
                self._known[pack] = np.union1d(before, numbers)
                self._room -= len(self._known[pack]) - len(before)
        self._found.clear()
        done = {of for of, last in self._last.items() if last == save}
        for pack in [pack for pack in self._known if pack_set(pack) in done]:
            self._room += len(self._known.pop(pack))
        for of in done:
            del self._last[of]


def _numbers(part: Part, chunks: Iterable[int]) -> np.ndarray:
    """Different for chunks that may be judged differently, in one pack."""
    table = part.table
    return np.array([_number(part, chunk, table.offsets[chunk]) for chunk in chunks], np.uint64)


def _number(part: Part, chunk: int, offset: int) -> int:
    coding = part.codings.get(chunk)
    text = f"{offset} {part.stored[chunk]} {part.table.nbytes[chunk]} {part.algorithm} {part.digests[chunk]}"
    if coding is not None:
        base = coding.base
        text += f" {coding.codec} {base and (part.packs[base.pack].key, *base[1:])} {coding.loss and coding.loss[1:]}"
    return int(digester(XXH3)(text.encode())[:16], 16)
