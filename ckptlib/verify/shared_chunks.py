"""Remembers good chunks that several steps need, so that they are read once when a whole root is verified. No torch.

A damaged chunk is read again, and reported, for each step that needs it. A chunk is identified by all that its verdict
depends on: where its bytes lie, how they are encoded, and the digest that they must have.
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
"""The most chunks that are remembered, at 8 bytes each; further ones are read again."""


class SharedChunks:
    """The good chunks of a root's steps, which are verified one after the other. Used by one thread."""

    def __init__(self, catalog: Catalog, saves: Sequence[SaveId]) -> None:
        """`saves`: in the order in which they will be verified. Reads their manifests, unless the catalog has them."""
        self._last: dict[PackSet, SaveId] = {}
        """For each set of packs that several steps need, the last of them."""
        owners: dict[PackSet, SaveId] = {}
        catalog.warm_stands(saves)
        for save in saves:
            try:
                uses = catalog.stand(save).uses.keys()
            except UNREADABLE:
                continue  # a finding when this step is verified
            for of in (PackSet(save), PackSet(save, carried=True), *uses):
                if of in owners:
                    self._last[of] = save
                owners[of] = save
        self._known: dict[str, np.ndarray] = {}
        """The good chunks of each pack, as ascending numbers."""
        self._found: list[tuple[str, np.ndarray]] = []
        """Good chunks of the step that is being verified. They become known at its end: until then, what is to be read
        of the step must not change."""
        self._room = MAX_CHUNKS

    def unknown(self, part: Part, pack: str, chunks: Sequence[int]) -> list[int]:
        """Returns those of a part's chunks in a pack that must be read."""
        known = self._known.get(pack)
        if known is None:
            return [*chunks]
        read = np.isin(_numbers(part, chunks), known, invert=True)
        return [chunk for chunk, unread in zip(chunks, read.tolist(), strict=True) if unread]

    def add(self, part: Part, pack: str, chunks: Sequence[int]) -> None:
        """Adds chunks of a pack that were read and are good."""
        if chunks and pack_set(pack) in self._last:
            self._found.append((pack, _numbers(part, chunks)))

    def finish(self, save: SaveId) -> None:
        """Ends a step: its good chunks become known, and those that no later step needs are forgotten."""
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
    """Returns a number for each chunk; it differs for chunks of a pack whose verdicts may differ."""
    table = part.table
    return np.array([_number(part, chunk, table.offsets[chunk]) for chunk in chunks], np.uint64)


def _number(part: Part, chunk: int, offset: int) -> int:
    coding = part.codings.get(chunk)
    text = f"{offset} {part.stored[chunk]} {part.table.nbytes[chunk]} {part.algorithm} {part.digests[chunk]}"
    if coding is not None:
        base = coding.base
        text += f" {coding.codec} {base and (part.packs[base.pack].key, *base[1:])} {coding.loss and coding.loss[1:]}"
    return int(digester(XXH3)(text.encode())[:16], 16)
