"""What is whole is one thing for the commit, for verify and for a load; the oracle looks at every element."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import commit_unproved, make_generation, make_root, put_part

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.errors import CkptError, CorruptData, FormatError, SaveFailed
from ckptlib.format.box import Box
from ckptlib.format.keys import PartName, SaveId
from ckptlib.format.layout import ByHand, Holding, Layout, Mesh, OwnPerRank, Placed, TensorEntry
from ckptlib.format.manifest import Manifest
from ckptlib.format.sharding import Replicate
from ckptlib.loading.match import targets
from ckptlib.loading.reader import Reader
from ckptlib.reading.committed import Committed
from ckptlib.reading.reader import Want
from ckptlib.reading.saved_names import SavedNames
from ckptlib.stores.memory import MemoryStore
from ckptlib.verify.root import verify_save


@dataclass(frozen=True)
class Share:
    """What one rank writes of a tensor."""

    holding: Holding | None
    """None: it has no such tensor."""
    boxes: tuple[Box, ...]
    values: np.ndarray
    """Of the whole tensor, as this rank has it."""


def put(shares: list[Share], chunk_bytes: int) -> tuple[MemoryStore, SaveId, list[PartName]]:
    store = MemoryStore()
    catalog = make_root(store)
    save = SaveId(1, make_generation(catalog, world_size=len(shares)))
    names = []
    for rank, share in enumerate(shares):
        filler = TensorEntry("filler", "float32", (2 + rank,), OwnPerRank())  # so that shared chunks differ
        entries = [filler]
        tensors = {"filler": np.full(2 + rank, rank, np.float32), "x": share.values}
        if share.holding is not None:
            entries.append(TensorEntry("x", str(share.values.dtype), share.values.shape, share.holding))
        layout = Layout(len(shares), tuple(entries))
        shards = [("filler", Box.whole((2 + rank,))), *(("x", box) for box in share.boxes)]
        names.append(put_part(catalog, save, rank, layout, tensors, shards=shards, chunk_bytes=chunk_bytes))
    return store, save, names


@st.composite
def some_shares(draw: st.DrawFn) -> list[Share]:
    """A tensor that ranks cut by hand, hold as replicas, or have each of its own; now and then it differs."""
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=2)))
    base = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    shares = []
    for rank in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["by-hand"] * 4 + ["replica", "per-rank", "none"]))
        values = base.copy()
        if draw(st.integers(0, 4)) == 0:
            values[tuple(draw(st.integers(0, size - 1)) for size in shape)] += 1 + rank
        if kind == "none":
            shares.append(Share(None, (), values))
        elif kind == "per-rank":
            shares.append(Share(OwnPerRank(), (Box.whole(shape),), values))
        elif kind == "replica":
            shares.append(Share(Placed(Mesh((1,), (rank,)), (Replicate(),), None), (Box.whole(shape),), values))
        else:
            starts = [[draw(st.integers(0, n - 1)) for n in shape] for _ in range(draw(st.integers(0, 2)))]
            boxes = [
                Box(tuple(at), tuple(draw(st.sampled_from([n - a, 1])) for a, n in zip(at, shape, strict=True)))
                for at in starts
            ]
            if draw(st.booleans()):
                boxes = [Box.whole(shape)]
            elif len(boxes) == 2 and boxes[0].intersect(boxes[1]) is not None:
                boxes.pop()  # of one rank, none overlap
            shares.append(Share(ByHand(), tuple(boxes), values))
    return shares


def value(shares: list[Share]) -> np.ndarray | None:
    """The one value that all but the ranks with their own wrote; None where there is none."""
    shared = [share for share in shares if share.holding is not None and not isinstance(share.holding, OwnPerRank)]
    found = np.full(shares[0].values.shape, np.nan, np.float32)
    for share in shared:
        for box in share.boxes:
            before, now = found[box.slices()], share.values[box.slices()]
            if not (np.isnan(before) | (before == now)).all():
                return None
            found[box.slices()] = now
    return None if shared and np.isnan(found).any() else found


def load(store: MemoryStore, save: SaveId, rank: int, shape: tuple[int, ...]) -> np.ndarray:
    catalog = Catalog(store)
    reader = Reader(Committed(catalog, catalog.manifest(save)), rank)
    target = torch.full(shape, -1.0)
    reader.read([Want("x", ((Box.whole(shape), target),))], lambda nbytes: None)
    return target.numpy()


@settings(max_examples=200)
@given(some_shares(), st.sampled_from([8, 1 << 20]))
def test_what_commits_verifies_and_loads_and_nothing_else_does(shares: list[Share], chunk_bytes: int) -> None:
    store, save, names = put(shares, chunk_bytes)
    expected = value(shares)
    if expected is None:
        with pytest.raises(SaveFailed, match=r"x.*(no rank wrote|saved different bytes)|no rank wrote x"):
            Committer(Catalog(store)).commit(save, names)
        commit_unproved(store, save, names)
    else:
        Committer(Catalog(store)).commit(save, names)
    findings = list(verify_save(Catalog(store), save))
    assert bool(findings) == (expected is None), findings
    for rank, share in enumerate(shares):
        if share.holding is None or isinstance(share.holding, OwnPerRank):
            if share.holding is not None:
                assert (load(store, save, rank, share.values.shape) == share.values).all()
        elif expected is None:
            with pytest.raises(CkptError, match="x"):
                load(store, save, rank, share.values.shape)
        else:
            assert (load(store, save, rank, share.values.shape) == expected).all()


def replica(rank: int, values: np.ndarray, *boxes: Box) -> Share:
    return Share(ByHand(), boxes or (Box.whole(values.shape),), values)


def test_a_tensor_of_two_kinds_is_refused() -> None:
    """Two ranks make a tensor of one name at a save for which they do not compare."""
    store, save, names = put([replica(0, np.ones(3, np.float32)), replica(1, np.ones(4, np.float32))], 1 << 20)
    with pytest.raises(SaveFailed, match=r"x is float32\[3\] on rank 0 and float32\[4\] on rank 1"):
        Committer(Catalog(store)).commit(save, names)
    commit_unproved(store, save, names)
    (found,) = verify_save(Catalog(store), save)
    assert "x is float32[3] on rank 0 and float32[4] on rank 1" in found.message


def test_bytes_are_compared_at_every_commit_that_has_something_twice() -> None:
    """The tables are the same; what was equal at one save need not be at the next."""
    store, save, names = put([replica(0, np.zeros(4, np.float32)), replica(1, np.zeros(4, np.float32))], 1 << 20)
    catalog = Catalog(store)
    committer = Committer(catalog)
    committer.commit(save, names)
    layouts = [catalog.layout(catalog.part(name).table.layout) for name in names]
    save = replace(save, step=2)
    names = [
        put_part(
            catalog,
            save,
            rank,
            layout,
            {"filler": np.zeros(2 + rank, np.float32), "x": np.full(4, rank, np.float32)},
            shards=[("filler", Box.whole((2 + rank,))), ("x", Box.whole((4,)))],
        )
        for rank, layout in enumerate(layouts)
    ]
    with pytest.raises(SaveFailed, match=r"step 2: x\[0:4\]: ranks 0 and 1 saved different bytes"):
        committer.commit(save, names)


def test_only_what_is_wanted_must_agree() -> None:
    values = np.arange(8, dtype=np.float32)
    other = values.copy()
    other[5] = 9.0
    store, save, names = put([replica(0, values, Box((0,), (6,))), replica(1, other, Box((4,), (4,)))], 1 << 20)
    commit_unproved(store, save, names)
    catalog = Catalog(store)
    reader = Reader(Committed(catalog, catalog.manifest(save)), 0)
    target = torch.zeros(5)
    reader.read([Want("x", ((Box((0,), (5,)), target),))], lambda nbytes: None)
    assert target.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(CorruptData, match=r"x\[5:6\]: ranks 0 and 1 saved different bytes"):
        reader.read([Want("x", ((Box((5,), (1,)), target[:1]),))], lambda nbytes: None)


def test_a_region_is_compared_across_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of large boxes, in pieces, against chunks that lie elsewhere; every element counts."""
    monkeypatch.setattr("ckptlib.catalog.shards.REGION_BYTES", 4096)
    rng = np.random.default_rng(0)
    values = rng.standard_normal((300, 70)).astype(np.float32)
    left, right = Box((0, 0), (300, 50)), Box((10, 20), (290, 50))
    edge = Box((0, 50), (10, 20))
    for at in [None, (10, 20), (299, 49), (150, 33), (10, 49), (299, 20)]:
        other = values.copy()
        if at is not None:
            other[at] += 1
        store, save, names = put([replica(0, values, left, edge), replica(1, other, right)], 8192)
        if at is None:
            Committer(Catalog(store)).commit(save, names)
        else:
            with pytest.raises(SaveFailed, match=r"x\[10:300, 20:50\]: ranks 0 and 1"):
                Committer(Catalog(store)).commit(save, names)


def test_manifests_are_those_of_unproved_commits() -> None:
    """The helper of these tests puts what a commit would."""
    store, save, names = put([replica(0, np.zeros(4, np.float32))], 1 << 20)
    commit_unproved(store, save, names)
    found = Catalog(store).manifest(save)
    store.delete(save.manifest_key)
    assert isinstance(found, Manifest)
    assert Committer(Catalog(store)).commit(save, names) == found


def test_more_overlaps_of_many_tensors_than_can_be_compared_are_refused_by_name() -> None:
    """Each of them could be compared: 90 x 90 pairs."""
    num, count = 90, 3
    values = np.zeros((num, num), np.float32)
    boxes = [[Box((i, 0), (1, num)) for i in range(num)], [Box((0, i), (num, 1)) for i in range(num)]]
    store = MemoryStore()
    catalog = make_root(store)
    save, names = SaveId(1, make_generation(catalog, world_size=2)), []
    for rank in range(2):
        layout = Layout(2, tuple(TensorEntry(f"x{i}", "float32", (num, num), ByHand()) for i in range(count)))
        shards = [(f"x{i}", box) for i in range(count) for box in boxes[rank]]
        tensors = {f"x{i}": values for i in range(count)}
        names.append(put_part(catalog, save, rank, layout, tensors, shards=shards))
    with pytest.raises(SaveFailed, match=r"x2: ranks wrote more than 16,384 regions twice"):
        Committer(Catalog(store)).commit(save, names)
    commit_unproved(store, save, names)
    assert [found.message[:8] for found in verify_save(Catalog(store), save)] == ["x2: rank"]
    for name in ("x0", "x2"):
        found = np.ones((num, num), np.float32)
        reader = Reader(Committed(Catalog(store), Catalog(store).manifest(save)), 0)
        reader.read([Want(name, ((Box.whole((num, num)), torch.from_numpy(found)),))], lambda nbytes: None)
        assert (found == 0).all(), "a load compares what it reads alone"


def test_a_hundred_regions_are_told_for_two_ranks_that_differ_in_many() -> None:
    ones, twos = np.ones(120, np.float32), np.full(120, 2, np.float32)
    boxes = [Box((i,), (1,)) for i in range(120)]
    store, save, names = put([replica(0, ones, *boxes), replica(1, twos, Box.whole((120,)))], 1 << 20)
    with pytest.raises(SaveFailed, match=r"x\[0:1\]: ranks 0 and 1 saved different bytes"):
        Committer(Catalog(store)).commit(save, names)
    commit_unproved(store, save, names)
    assert [found.message for found in verify_save(Catalog(store), save)] == [
        f"x[{i}:{i + 1}]: ranks 0 and 1 saved different bytes for it" for i in range(100)
    ]


def test_more_overlaps_than_can_be_compared_are_refused_by_name() -> None:
    """A comb of many teeth over as many others: each tooth meets each."""
    shape, num = (400, 400), 400
    values = np.zeros(shape, np.float32)
    rows = [Box((i, 0), (1, num)) for i in range(num)]
    columns = [Box((0, i), (num, 1)) for i in range(num)]
    store, save, names = put([replica(0, values, *rows), replica(1, values, *columns)], 1 << 20)
    with pytest.raises(SaveFailed, match=r"x: its 800 boxes overlap in more ways than can be compared"):
        Committer(Catalog(store)).commit(save, names)
    commit_unproved(store, save, names)
    assert ["x: its 800 boxes" in found.message for found in verify_save(Catalog(store), save)] == [True]
    with pytest.raises(FormatError, match=r"x: its 800 boxes overlap"):
        load(store, save, 0, shape)


@pytest.mark.parametrize("with_own", [False, True])
def test_an_alias_is_what_its_own_layout_says(with_own: bool) -> None:
    """Rank 0 ties b to a, of which rank 1 wrote all; rank 1 has no b, or another."""
    store = MemoryStore()
    catalog = make_root(store)
    save = SaveId(1, make_generation(catalog, world_size=2))
    whole = Box.whole((3,))
    a, b = (TensorEntry(name, "float32", (3,), ByHand()) for name in "ab")
    layouts = Layout(2, (a,), {"b": "a"}), Layout(2, (a, b) if with_own else (a,))
    tensors = {"a": np.full(3, 1, np.float32), "b": np.full(3, 9, np.float32)}
    shards = [("a", whole), ("b", whole)] if with_own else [("a", whole)]
    names = [put_part(catalog, save, 0, layouts[0], tensors, shards=[])]
    names += [put_part(catalog, save, 1, layouts[1], tensors, shards=shards)]
    Committer(catalog).commit(save, names)
    assert [*verify_save(catalog, save)] == []
    for rank, expected in enumerate((1, 9 if with_own else 1)):
        reader = Reader(Committed(catalog, catalog.manifest(save)), rank)
        target = {"b": torch.zeros(3)}
        found = targets(target, SavedNames(reader))
        assert (found.missing, found.unexpected, found.mismatched) == ((), ("a",), ())
        reader.read(found.wants, lambda nbytes: None)
        assert target["b"].tolist() == [expected] * 3
