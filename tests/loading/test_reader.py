"""The reader: few requests, little memory, and no byte believed that a digest does not vouch for."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import support
import torch
from helpers.calls import num_calls
from helpers.readers import limit, plan_of, store_of
from onerank import opened
from support import make_generation, make_root, make_save, put_part, put_parts
from typing_extensions import override

from ckptlib.catalog.catalog import Catalog
from ckptlib.errors import CorruptData, ObjectNotFound
from ckptlib.format import gc_pause
from ckptlib.format.box import Box
from ckptlib.format.keys import PartName, SaveId
from ckptlib.format.layout import ByHand, Layout, TensorEntry
from ckptlib.format.manifest import Manifest
from ckptlib.format.part import Part
from ckptlib.loading.reader import Reader
from ckptlib.reading.committed import Committed
from ckptlib.reading.reader import Want
from ckptlib.stores.io_limits import GAP_BYTES, RUN_BYTES, THREADS, IoLimits
from ckptlib.stores.local import LocalStore


class CountingStore(LocalStore):
    """Knows what it was asked for."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.requests: list[tuple[str, int, int]] = []
        self.in_flight = self.most_in_flight = 0
        self._counting = threading.Lock()

    @override
    def get_into(self, key: str, offset: int, buffer: memoryview, *, deadline: float | None = None) -> None:
        with self._counting:
            self.requests.append((key, offset, buffer.nbytes))
            self.in_flight += buffer.nbytes
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        super().get_into(key, offset, buffer)
        with self._counting:
            self.in_flight -= buffer.nbytes


def want(name: str, array: np.ndarray | torch.Tensor, box: Box | None = None) -> Want:
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    return Want(name, ((Box.whole(tuple(tensor.shape)) if box is None else box, tensor),))


def saved(path: Path, tensors: Mapping[str, np.ndarray], world_size: int = 1, is_local: bool = True) -> Reader:
    store = CountingStore(str(path))
    store.is_local = is_local
    catalog = make_root(store)
    save = make_save(catalog, make_generation(catalog), 1, tensors, world_size)
    return Reader(Committed(catalog, catalog.manifest(save)), 0)


def requests(reader: Reader) -> list[tuple[str, int, int]]:
    store = store_of(reader)
    assert isinstance(store, CountingStore)
    return store.requests


def nothing(nbytes: int) -> None:
    pass


# -- requests


def test_many_small_tensors_are_few_requests(tmp_path: Path) -> None:
    tensors = {f"t{i:04}": np.full(50 + i % 7, i, dtype=np.float32) for i in range(3000)}
    reader = saved(tmp_path, tensors)
    found = {name: np.zeros_like(array) for name, array in tensors.items()}
    told: list[int] = []
    reader.read([want(name, array) for name, array in found.items()], told.append)
    assert len(requests(reader)) == 1
    assert sum(told) == reader.nbytes_read == requests(reader)[0][2]
    assert all((found[name] == tensors[name]).all() for name in tensors)


def test_only_what_is_wanted_is_read(tmp_path: Path) -> None:
    tensors = {f"t{i}": np.full(100_000, i, dtype=np.float32) for i in range(20)}
    reader = saved(tmp_path, tensors)
    found = {name: np.zeros_like(tensors[name]) for name in ("t3", "t4", "t15")}
    reader.read([want(name, array) for name, array in found.items()], nothing)
    assert reader.nbytes_read <= 3 * 400_000 + 2 * GAP_BYTES
    assert all((found[name] == tensors[name]).all() for name in found)


def test_a_box_reads_only_its_chunks(tmp_path: Path) -> None:
    whole = np.arange(4_000_000, dtype=np.float32).reshape(4000, 1000)
    reader = saved(tmp_path, {"w": whole}, world_size=4)
    box = Box((2100, 10), (50, 7))
    found = np.zeros(box.shape, dtype=np.float32)
    reader.read([want("w", found, box)], nothing)
    assert (found == whole[2100:2150, 10:17]).all()
    assert reader.nbytes_read <= 3 << 20
    assert len({key for key, _, _ in requests(reader)}) == 1


@pytest.mark.parametrize("kind", ["as saved", "transposed", "cast"])
def test_every_box_of_a_tensor_that_three_ranks_hold(tmp_path: Path, kind: str) -> None:
    """Rows, columns, and all between; of one chunk and of several."""
    whole = np.random.default_rng(1).integers(0, 1 << 16, (7, 5)).astype(np.uint16)
    reader = saved(tmp_path, {"w": whole}, world_size=3)
    spans = {size: [(a, b - a) for a in range(size) for b in range(a + 1, size + 1)] for size in whole.shape}
    boxes = [Box((a, c), (n, m)) for a, n in spans[7] for c, m in spans[5]]
    dtype = torch.int32 if kind == "cast" else torch.uint16
    made = [torch.zeros(box.shape[::-1] if kind == "transposed" else box.shape, dtype=dtype) for box in boxes]
    found = [tensor.t() if kind == "transposed" else tensor for tensor in made]
    reader.read([want("w", tensor, box) for tensor, box in zip(found, boxes, strict=True)], nothing)
    for tensor, box in zip(found, boxes, strict=True):
        assert (tensor.numpy() == whole[box.slices()]).all(), box


def test_parts_of_large_chunks_go_where_they_are_wanted(tmp_path: Path) -> None:
    whole = np.arange(3 << 20, dtype=np.float32)
    reader = saved(tmp_path, {"w": whole}, world_size=2)
    boxes = [Box((start,), (stop - start,)) for start, stop in ((0, 1), (700_001, 2_900_003), (1 << 20, 3 << 19))]
    found = [np.zeros(box.shape, np.float32) for box in boxes]
    wants = [want("w", array, box) for array, box in zip(found, boxes, strict=True)]
    reader.read(wants, nothing)
    for array, box in zip(found, boxes, strict=True):
        assert (array == whole[box.slices()]).all()
    reads = [read for request in plan_of(reader, wants, [*map(reader.ranks_for, wants)]) for read in request.reads]
    assert all(first + nbytes <= read.nbytes for read in reads for first, nbytes, _ in read.moves)
    assert sum(nbytes for read in reads for _, nbytes, _ in read.moves) == sum(array.nbytes for array in found)


def test_nothing_wanted_is_nothing_read(tmp_path: Path) -> None:
    reader = saved(tmp_path, {"w": np.ones(4), "e": np.ones((0, 3))})
    reader.read([Want("e", ())], nothing)
    assert requests(reader) == []


# -- small shards share chunks


def test_shards_that_share_a_chunk_go_where_they_are_wanted(tmp_path: Path) -> None:
    """As they are, transposed, in part, of several dtypes: all of one chunk."""
    tensors = {
        "a": np.arange(12, dtype=np.float64).reshape(3, 4),
        "b": np.arange(7, dtype=np.float32),
        "c": np.arange(20, dtype=np.int16).reshape(4, 5),
        "d": np.array(True),
    }
    reader = saved(tmp_path, tensors)
    assert len(reader.part(0).table.nbytes) == 1
    turned, part = torch.zeros(4, 3, dtype=torch.float64).t(), torch.zeros(2, 3, dtype=torch.int16)
    small, last = np.zeros(7, np.float32), np.zeros((), np.bool_)
    wants = [want("a", turned), want("b", small), want("c", part, Box((1, 2), (2, 3))), want("d", last)]
    reader.read(wants, nothing)
    assert (turned.numpy() == tensors["a"]).all()
    assert (part.numpy() == tensors["c"][1:3, 2:5]).all()
    assert (small == tensors["b"]).all()
    assert last
    assert len(requests(reader)) == 1


def test_replicas_are_compared_though_their_chunks_differ(tmp_path: Path) -> None:
    """Two ranks hold the same box beside other tensors: its bytes decide."""
    catalog = make_root(LocalStore(str(tmp_path)))
    save = SaveId(1, make_generation(catalog))
    entries = tuple(TensorEntry(name, "float32", (4,), ByHand()) for name in ("other", "same", "unlike"))
    names, layouts = [], {}
    for rank in range(2):
        layout = Layout(2, entries[rank:])
        arrays = {name: np.full(4, 2.0, np.float32) for name in ("other", "same")}
        arrays["unlike"] = np.full(4, rank, np.float32)
        layouts[layout.digest] = (rank,)
        with pytest.MonkeyPatch.context() as patch:
            boxes = [(entry.name, Box.whole(entry.shape)) for entry in layout.tensors]
            patch.setattr(support, "shards_of", lambda layout, rank, boxes=boxes: boxes)
            names.append(put_part(catalog, save, rank, layout, arrays))
    catalog.store.put(save.manifest_key, Manifest(save, 2, tuple(names), layouts, 1, 0.0, {}).encode())
    reader = Reader(Committed(catalog, catalog.manifest(save)), 0)
    found = np.zeros(4, np.float32)
    reader.read([want("same", found)], nothing)
    assert (found == 2).all()
    assert reader.same_bytes("other", "same")
    with pytest.raises(CorruptData, match=r"unlike.*ranks 0 and 1 saved different bytes"):
        reader.read([want("unlike", found)], nothing)


# -- memory


def test_memory_is_bounded_however_much_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"t{i}": np.full((100, 500), i, dtype=np.float32) for i in range(200)}  # 40 MB
    reader = saved(tmp_path, tensors)
    limit(reader, IoLimits(most=256 * 1024), monkeypatch)
    found = {name: torch.zeros(500, 100).t() for name in tensors}
    wants = [want(name, tensor) for name, tensor in found.items()]
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    reader.read(wants, nothing)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert all((found[name] == i).all() for i, name in enumerate(tensors))
    store = store_of(reader)
    assert isinstance(store, CountingStore)
    assert store.most_in_flight <= THREADS * (256 * 1024 + 64)
    assert max(nbytes for _, _, nbytes in store.requests) <= 256 * 1024 + 64
    # one buffer of 1 MiB per thread, and the plan; the data itself is 40 MB
    assert peak - before < THREADS * (1 << 20) + (4 << 20)
    assert THREADS * RUN_BYTES <= 128 << 20


def test_a_plan_is_few_objects(tmp_path: Path) -> None:
    """Of a thousand ranks there are hundreds of thousands of shards, and the collector searches all that is made."""
    tensors = {f"t{i:03}": np.full((8, 10), i, dtype=np.float32) for i in range(200)}
    reader = saved(tmp_path, tensors, world_size=4)
    wants = [want(name, torch.zeros(8, 10, dtype=torch.float64)) for name in tensors]
    ranks = [*map(reader.ranks_for, wants)]
    plan_of(reader, wants, ranks)  # reads the parts
    gc.collect()
    before = len(gc.get_objects())
    with gc_pause.kept():
        plan = plan_of(reader, wants, ranks)
        made = len(gc.get_objects()) - before
    assert sum(len(read.copies) for request in plan for read in request.reads) == 4 * len(tensors)
    assert made < 5 * len(tensors) + 100  # one for each shard, and one for each target
    reader.read(wants, nothing)
    assert all((want.pieces[0][1] == i).all() for i, want in enumerate(wants))


def test_a_plan_makes_few_calls(tmp_path: Path) -> None:
    """What the shards of one tensor have in common is asked once, not for each of thousands of ranks."""
    tensors = {f"t{i:03}": np.full((32, 2), i, dtype=np.float32) for i in range(100)}
    reader = saved(tmp_path, tensors, world_size=32)
    for dtype in (torch.float32, torch.float64):  # bytes that go there as they are, and others
        wants = [want(name, torch.zeros(32, 2, dtype=dtype)) for name in tensors]
        ranks = [*map(reader.ranks_for, wants)]
        plan = plan_of(reader, wants, ranks)  # reads the parts
        taken = [len([*read.moves]) + len(read.copies) for request in plan for read in request.reads]
        assert sum(taken) == 32 * len(tensors)
        assert num_calls(lambda wants=wants, ranks=ranks: plan_of(reader, wants, ranks)) < 2 * sum(taken)


def test_requests_are_as_large_as_the_source_likes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = np.random.default_rng(0).integers(0, 255, 12 << 20, dtype=np.uint8)
    small = {f"t{i:02}": np.full(100_000, i, dtype=np.float32) for i in range(20)}
    for limits, few in ((IoLimits(), 2), (IoLimits(most=2 << 20), 12)):
        reader = saved(tmp_path / str(few), {"w": whole, **small})
        limit(reader, limits, monkeypatch)
        found = {name: np.zeros_like(array) for name, array in {"w": whole, **small}.items()}
        reader.read([want(name, array) for name, array in found.items()], nothing)
        assert all((found[name] == array).all() for name, array in {"w": whole, **small}.items())
        assert len(requests(reader)) == few
        assert all(nbytes <= limits.most for _, _, nbytes in requests(reader))


def test_tensors_come_one_by_one_or_several_at_a_time_as_the_source_likes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"t{i}": np.full(3 << 20, i, dtype=np.uint8) for i in range(10)}
    for limits, few in ((IoLimits(), 10), (IoLimits(direct_from=RUN_BYTES), 2)):
        reader = saved(tmp_path / str(few), tensors)
        limit(reader, limits, monkeypatch)
        apart = np.zeros((len(tensors), 4 << 20), dtype=np.uint8)
        reader.read([want(name, apart[i, : 3 << 20]) for i, name in enumerate(tensors)], nothing)
        assert all((apart[i, : 3 << 20] == i).all() for i in range(len(tensors)))
        assert len(requests(reader)) == few


@pytest.mark.parametrize("piece", [4096, 100_001, 1 << 20])
def test_what_is_read_in_pieces_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Chunks that go straight into their targets, those that go through a buffer, and boxes that end inside of one."""
    rng = np.random.default_rng(0)
    arrays = {
        f"t{i}": rng.integers(0, 255, (n, 1), dtype=np.uint8) for i, n in enumerate((9 << 20, 3_000_017, 70_001, 1))
    }
    reader = saved(tmp_path, arrays)
    limit(reader, IoLimits(piece=piece, threads=1), monkeypatch)
    found = {name: np.zeros_like(array) for name, array in arrays.items()}
    part = np.zeros((5 << 20, 1), dtype=np.uint8)
    told: list[int] = []
    wants = [want(name, array) for name, array in found.items()]
    reader.read([*wants, want("t0", part, Box((1_000_003, 0), (5 << 20, 1)))], told.append)
    assert all((found[name] == array).all() for name, array in arrays.items())
    assert (part == arrays["t0"][1_000_003 : 1_000_003 + (5 << 20)]).all()
    assert all(nbytes <= piece for pack, _, nbytes in requests(reader) if "packs/" in pack)
    assert sum(told) == reader.nbytes_read >= sum(array.nbytes for array in arrays.values())


@pytest.mark.parametrize("at", [0, 300_000, 2_999_999])
def test_a_damaged_byte_of_any_piece_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    whole = np.random.default_rng(0).integers(0, 255, 3_000_000, dtype=np.uint8)
    reader = saved(tmp_path, {"w": whole})
    limit(reader, IoLimits(piece=256 << 10, threads=1), monkeypatch)
    (pack,) = {
        request.pack for request in plan_of(reader, [want("w", whole.copy())], [reader.ranks_for(want("w", whole))])
    }
    path = next(tmp_path.rglob(Path(pack).name))
    data = bytearray(path.read_bytes())
    data[data.index(whole.tobytes()[:64]) + at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptData, match=r"w.* does not match.*ckptlib verify URL 1$"):
        reader.read([want("w", np.zeros_like(whole))], nothing)


def test_tensors_of_megabytes_come_from_afar_several_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"t{i}": np.full(3 << 20, i, dtype=np.uint8) for i in range(10)}
    tensors["large"] = np.full(12 << 20, 10, dtype=np.uint8)
    for is_local, few in ((True, 11), (False, 3)):
        reader = saved(tmp_path / str(few), tensors, is_local=is_local)
        found = {name: np.zeros_like(array) for name, array in tensors.items()}
        reader.read([want(name, array) for name, array in found.items()], nothing)
        assert all((found[name] == array).all() for name, array in tensors.items())
        assert len(requests(reader)) == few


def test_large_chunks_go_straight_into_their_targets(tmp_path: Path) -> None:
    whole = np.random.default_rng(0).integers(0, 255, 24 << 20, dtype=np.uint8)
    reader = saved(tmp_path, {"w": whole})
    found = np.zeros_like(whole)
    tracemalloc.start()
    reader.read([want("w", found)], nothing)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (found == whole).all()
    assert peak < 1 << 20


# -- damage


def tampered(catalog: Catalog, names: list[PartName], save: SaveId, change: Callable[[Part], Part]) -> Reader:
    """A committed save whose first part says something else, consistently down to its name."""
    part = catalog.part(names[0])
    name, document = change(part).encode()
    catalog.store.put(name.key, document)
    layouts = {part.table.layout: tuple(range(len(names)))}
    manifest = Manifest(save, len(names), (name, *names[1:]), layouts, 1, 0.0, {})
    catalog.store.put(save.manifest_key, manifest.encode())
    return Reader(Committed(catalog, catalog.manifest(save)), 0)


def without(part: Part, tensor: str, catalog: Catalog) -> Part:
    """The part without the row of a shard."""
    table, layout = part.table, catalog.layout(part.table.layout)
    lost = next(s for s, t in enumerate(table.tensors) if layout.tensors[t].name == tensor)
    assert not table.is_shared(lost)
    chunks = table.chunks(lost)
    shards = [s for s in range(len(table.tensors)) if s != lost]
    kept = [c for c in range(len(table.nbytes)) if c not in chunks]
    smaller = replace(
        table,
        tensors=tuple(table.tensors[s] for s in shards),
        boxes=tuple(table.boxes[s] for s in shards),
        num_chunks=tuple(table.num_chunks[s] for s in shards),
        packs=tuple(table.packs[c] for c in kept),
        offsets=tuple(table.offsets[c] for c in kept),
        nbytes=tuple(table.nbytes[c] for c in kept),
    )
    return replace(part, table=smaller, digests=tuple(part.digests[c] for c in kept))


def test_a_missing_row_names_the_elements(tmp_path: Path) -> None:
    catalog = make_root(LocalStore(str(tmp_path)))
    tensors = {"w": np.ones((8, 50_000), dtype=np.float32), "b": np.ones(4, dtype=np.float32)}
    save, names = put_parts(catalog, make_generation(catalog), 1, tensors, world_size=4)
    reader = tampered(catalog, names, save, lambda part: without(part, "w", catalog))
    reader.read([want("b", np.zeros(4, dtype=np.float32))], nothing)
    with pytest.raises(CorruptData, match=r"w\[0:2, 0:50000\]: no chunk of step 1 holds these elements.*verify URL 1$"):
        reader.read([want("w", np.zeros((8, 50_000), dtype=np.float32))], nothing)
    found = np.zeros((6, 50_000), dtype=np.float32)
    reader.read([want("w", found, Box((2, 0), (6, 50_000)))], nothing)  # what is there can still be had
    assert found.all()


def test_a_digest_that_does_not_match_names_tensor_and_object(tmp_path: Path) -> None:
    catalog = make_root(LocalStore(str(tmp_path)))
    tensors = {"w": np.ones((8, 3), dtype=np.float32)}
    save, names = put_parts(catalog, make_generation(catalog), 1, tensors)
    reader = tampered(catalog, names, save, lambda part: replace(part, digests=("0" * 32,)))
    with pytest.raises(CorruptData, match=r"w\[0:8, 0:3\]: packs/.*\[4096:\+96\] does not match 0{32}"):
        reader.read([want("w", np.zeros((8, 3), dtype=np.float32))], nothing)


def test_a_lost_pack_is_told(tmp_path: Path) -> None:
    reader = saved(tmp_path, {"w": np.ones(4)})
    (pack,) = reader.part(0).packs
    (tmp_path / pack.key).unlink()
    with pytest.raises(ObjectNotFound, match=pack.key):
        reader.read([want("w", np.zeros(4))], nothing)


# -- what digests know


def test_same_bytes(tmp_path: Path) -> None:
    a = np.arange(600_000, dtype=np.float32)
    reader = saved(tmp_path, {"a": a, "b": a.copy(), "c": a + 1, "d": a[:-1].copy()}, world_size=3)
    assert reader.same_bytes("a", "a")
    assert reader.same_bytes("a", "b")
    assert not reader.same_bytes("a", "c")
    assert not reader.same_bytes("a", "d")


# -- the whole way


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 256 * 1024, 4 * 1024 * 1024 + 1])
def test_sizes_around_pages_and_chunks(tmp_path: Path, nbytes: int) -> None:
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    target = {"t": torch.zeros(nbytes, dtype=torch.uint8), "u": torch.zeros(3)}
    with opened(tmp_path) as root:
        root.move({"t": source, "u": torch.arange(3.0)}, target)
    assert torch.equal(target["t"], source)
    assert torch.equal(target["u"], torch.arange(3.0))


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("ckptlib-read")]
