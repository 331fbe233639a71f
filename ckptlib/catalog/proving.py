"""Proves that the parts of a save are a whole step, and derives its manifest from them. Puts nothing.

A manifest is derived from the parts alone, so whoever commits a save writes the same bytes. The conditions for a whole
set of parts are in `completeness`. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.completeness import Doubt, Proof
from ckptlib.catalog.reading import each
from ckptlib.catalog.second_read import decoded
from ckptlib.catalog.shards import PartIndex, ShardComparer
from ckptlib.catalog.uses import times_of
from ckptlib.errors import FormatError, ReplicasDiffer, SaveFailed, UnsupportedState
from ckptlib.format.check import alike
from ckptlib.format.keys import PackSet, PartName, SaveId
from ckptlib.format.manifest import Manifest, ranks_by_layout
from ckptlib.format.part import PartHead, uses_digest

SHARES_KEPT = 4
"""How many parts are kept while replicas are compared, rank by rank."""


@dataclass(frozen=True, slots=True)
class _Proved:
    """The facts of a whole step, from its tables."""

    layouts: Mapping[str, tuple[int, ...]]
    """The ranks of each layout."""
    nbytes: int
    """Bytes of all packs that were put for it."""
    nbytes_state: int
    """Bytes of all chunks, decoded."""


class Prover:
    """Proves saves of one root. Remembers what it has proved of the last tables, which most saves have again."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._proved: dict[tuple[str | None, ...], _Proved] = {}

    def manifest_of(self, save: SaveId, names: Sequence[PartName]) -> Manifest:
        """Returns the manifest of a save. `names`: one part per rank.

        For a new set of tables, all parts are read, to prove that together they hold every element of every tensor, and
        one value of each. That proof stands while the tables stay the same, unless two of them hold the same element.
        Every time, the checks in the parts' names tell whether ranks agree on what one of them wrote for several.
        Raises SaveFailed, ReplicasDiffer, StoreError, or what a damaged part raises.
        """
        assert [(n.save, n.rank) for n in names] == [(save, rank) for rank in range(len(names))], "one part per rank"
        if not alike(name.check for name in names):
            raise ReplicasDiffer(
                f"step {save.step}: what several ranks hold, and one of them wrote for all, is not the same on all of "
                "them; the step is not committed"
            )
        proved, first = self._prove(save, names)
        catalog, first = self._catalog, first or self._head(names[0])
        users = self._users(names, first)
        uses = times_of(catalog, save, users)
        sizes = [name.nbytes for name in names if name.nbytes is not None]
        return Manifest(
            save=save,
            world_size=len(names),
            parts=tuple(names),
            layouts=proved.layouts,
            nbytes=sum(sizes) if len(sizes) == len(names) else proved.nbytes,
            created=first.created,
            metrics=first.metrics,
            uses=uses,
            users={of: ranks for of, ranks in users.items() if len(ranks) < len(names)},
            nbytes_state=proved.nbytes_state,
            exempt=first.exempt,
            account=first.account,
        )

    def _users(self, names: Sequence[PartName], first: PartHead) -> dict[PackSet, frozenset[int]]:
        """Returns the sets of packs of other saves that parts name, each with the ranks of these parts.

        `first`: the head of rank 0's part. Most ranks use the same sets; the names of their parts tell so, and only one
        of these parts is read.
        """
        known: dict[str | None, tuple[PackSet, ...]] = {None: (), uses_digest(()): (), names[0].uses: first.uses}
        others = {name.uses: name for name in names if name.uses not in known}
        heads = each(self._head, others.values())
        known.update(zip(others, (head.uses for head in heads), strict=True))
        ranks: dict[str | None, list[int]] = {}
        for name in names:
            ranks.setdefault(name.uses, []).append(name.rank)
        found: dict[PackSet, frozenset[int]] = {}
        for digest, some in ranks.items():
            for of in known[digest]:
                found[of] = found.get(of, frozenset()).union(some)
        return found

    def _head(self, name: PartName) -> PartHead:
        store = self._catalog.store
        return decoded(store, partial(store.get, name.key), partial(PartHead.decode, name))

    def _prove(self, save: SaveId, names: Sequence[PartName]) -> tuple[_Proved, PartHead | None]:
        """Returns what is proved of the save, and the head of rank 0's part if it had to be read."""
        key = tuple(name.table for name in names)
        if key in self._proved:
            return self._proved[key], None
        proved, doubts, first = _prove(self._catalog, save, names)
        if not doubts:  # the bytes of an overlap may differ the next time
            self._proved = {key: proved}
        return proved, first


def _prove(
    catalog: Catalog, save: SaveId, names: Sequence[PartName]
) -> tuple[_Proved, Sequence[Doubt], PartHead | None]:
    """Reads every part, and proves that the save is whole; raises SaveFailed if not. Returns also the overlaps, for
    which bytes had to be compared, and the head of rank 0's part."""
    found: list[tuple[str, int]] = []
    nbytes, nbytes_state, proof, store = 0, 0, Proof(), catalog.store
    first: PartHead | None = None
    # Decoded in this thread: decoding is work for one core, and garbage collection is paused meanwhile.
    for name, document in zip(names, each(lambda name: store.get(name.key), names), strict=True):
        part = decoded(store, partial(store.get, name.key), partial(catalog.decode_part, name), document)
        first = first or part.head
        if part.world_size != len(names):
            what = f"the part of rank {part.rank} is for {part.world_size} ranks, expected {len(names)}"
            raise SaveFailed(f"step {save.step}: {what}")
        found.append((part.table.layout, part.rank))
        nbytes += part.nbytes_put
        nbytes_state += part.table.nbytes_data
        proof.add(part, catalog.layout(part.table.layout))
    if (clash := proof.clash()) is not None:
        raise SaveFailed(f"step {save.step}: {clash}; the step is not committed")
    try:
        missing = proof.missing()
        doubts = proof.doubts() if missing is None else []
    except (FormatError, UnsupportedState) as error:
        raise SaveFailed(f"step {save.step}: {error}; the step is not committed") from error
    if missing is not None:
        raise SaveFailed(f"step {save.step}: no rank wrote {missing}; the step is not committed")
    _settle(catalog, save, names, doubts)
    return _Proved(ranks_by_layout(found), nbytes, nbytes_state), doubts, first


def _settle(catalog: Catalog, save: SaveId, names: Sequence[PartName], doubts: Sequence[Doubt]) -> None:
    """Compares overlaps. Raises SaveFailed if two ranks wrote different bytes of a tensor."""
    contents = ShardComparer(catalog.store.get_into)

    @lru_cache(maxsize=SHARES_KEPT)
    def share(rank: int) -> PartIndex:
        part = catalog.part(names[rank])
        return PartIndex(part, catalog.layout(part.table.layout))

    for doubt in doubts:
        if not contents.settles(doubt, share):
            where, (first, second) = f"{doubt.name}{doubt.region}", doubt.ranks
            raise SaveFailed(
                f"step {save.step}: {where}: ranks {first} and {second} saved different bytes for it; the step is "
                "not committed. If each rank has its own, say PerRank; if these are pieces of one tensor, DTensor "
                "or Sharded(tensor, offset, shape), with boxes that are equal where they overlap"
            )
