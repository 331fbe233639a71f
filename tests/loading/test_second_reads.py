"""What a network altered on the way is read again, once; what is altered where it lies is damaged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import layout_of, make_generation, of_version, put_part
from typing_extensions import override

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.catalog.failed_parts import raise_if_failed
from ckptlib.catalog.resolving import resolve_as_put
from ckptlib.catalog.step_objects import step_objects
from ckptlib.catalog.uses import DROPPED
from ckptlib.errors import CorruptData, FormatError, NewerFormat, SaveFailed
from ckptlib.format.box import Box
from ckptlib.format.digests import XXH3
from ckptlib.format.keys import SaveId
from ckptlib.format.manifest import Manifest, Root, TrashRecord
from ckptlib.loading.committed import resolve_manifest
from ckptlib.loading.reader import Reader
from ckptlib.ranks.group import SoloGroup
from ckptlib.reading.committed import Committed
from ckptlib.reading.reader import Want
from ckptlib.recovery.stored_step import StoredStep
from ckptlib.stores.local import LocalStore
from ckptlib.stores.testing import flip_bit
from ckptlib.verify.root import verify_save
from ckptlib.writer.persist import put_failure

SIZES = {"small": 1000, "large": 1 << 20}
CHUNK_BYTES = 1 << 19


class Noisy(LocalStore):
    """Flips a bit in so many of the reads from packs of at least so many bytes."""

    def __init__(self, path: str, is_local: bool) -> None:
        super().__init__(path)
        self.is_local = is_local
        self.flips = 0
        self.reads = 0

    @override
    def get_into(self, key: str, offset: int, buffer: memoryview, *, deadline: float | None = None) -> None:
        super().get_into(key, offset, buffer, deadline=deadline)
        if key.startswith("packs/") and buffer.nbytes >= 1000:
            self.reads += 1
            if self.flips:
                self.flips -= 1
                buffer[buffer.nbytes // 2] ^= 1


def saved(path: Path, is_local: bool) -> tuple[Noisy, SaveId, dict[str, np.ndarray]]:
    store = Noisy(str(path), is_local)
    catalog = Catalog(store)
    catalog.open_root(Root("0" * 32, XXH3, 60.0))
    save = SaveId(1, make_generation(catalog))
    tensors = {name: np.random.default_rng(n).standard_normal(n).astype(np.float32) for name, n in SIZES.items()}
    name = put_part(catalog, save, 0, layout_of(tensors, 1), tensors, chunk_bytes=CHUNK_BYTES)
    Committer(catalog).commit(save, [name])
    store.reads = 0
    return store, save, tensors


def load(store: Noisy, save: SaveId) -> dict[str, np.ndarray]:
    import torch

    catalog = Catalog(store)
    found = {name: np.zeros(n, np.float32) for name, n in SIZES.items()}
    wants = [Want(name, ((Box.whole(a.shape), torch.from_numpy(a)),)) for name, a in found.items()]
    Reader(Committed(catalog, catalog.manifest(save)), 0).read(wants, lambda nbytes: None)
    return found


def test_a_bit_that_flipped_on_the_way_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, save, tensors = saved(tmp_path, is_local=False)
    load(store, save)
    quiet, store.reads, store.flips = store.reads, 0, 1
    with caplog.at_level(logging.WARNING):
        found = load(store, save)
    assert all(np.array_equal(found[name], tensors[name]) for name in tensors)
    assert store.reads == quiet + 1
    assert "read once more" in caplog.text


@pytest.mark.parametrize(("is_local", "flips"), [(True, 1), (False, 1000)])
def test_what_stays_altered_is_damaged(tmp_path: Path, is_local: bool, flips: int) -> None:
    store, save, _ = saved(tmp_path, is_local)
    store.flips = flips
    with pytest.raises(CorruptData, match="does not match"):
        load(store, save)


class NoisyDocuments(LocalStore):
    """Flips a bit in so many of the documents of one kind that are read."""

    flips, prefix = 0, ""

    @override
    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        data = bytearray(super().get(key, offset, nbytes))
        if self.flips and key.startswith(self.prefix):
            self.flips -= 1
            data[len(data) // 2] ^= 1
        return bytes(data)


@pytest.mark.parametrize("prefix", ["steps/", "parts/"])
@pytest.mark.parametrize("restored", [False, True])
def test_a_document_that_was_altered_on_the_way_is_read_again(tmp_path: Path, prefix: str, restored: bool) -> None:
    _, save, _ = saved(tmp_path, is_local=False)
    store = NoisyDocuments(str(tmp_path))
    store.prefix, store.is_local = prefix, False

    def read() -> int:
        catalog = Catalog(store)
        if restored:
            manifest = resolve_manifest(SoloGroup(), catalog, "latest")
            return StoredStep(catalog, manifest, SoloGroup()).part(0).rank
        return catalog.part(catalog.manifest(save).parts[0]).rank

    store.flips = 1
    assert read() == 0
    assert store.flips == 0
    for is_local, flips in ((True, 1), (False, 1000)):
        store.is_local, store.flips = is_local, flips
        with pytest.raises((CorruptData, FormatError)):
            read()


@pytest.mark.parametrize(
    "read",
    [
        lambda catalog, save: resolve_as_put(catalog, "latest")[0],
        lambda catalog, save: step_objects(catalog, save).manifest,
    ],
    ids=["open", "copy"],
)
def test_who_opens_or_copies_a_step_reads_its_manifest_again(
    tmp_path: Path, read: Callable[[Catalog, SaveId], Manifest]
) -> None:
    _, save, _ = saved(tmp_path, is_local=False)
    store = NoisyDocuments(str(tmp_path))
    store.prefix, store.is_local, store.flips = "steps/", False, 1
    assert read(Catalog(store), save).save == save
    assert store.flips == 0
    store.flips = 1000
    with pytest.raises(CorruptData):
        read(Catalog(store), save)


def test_a_document_that_steps_share_is_read_again_before_its_copy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, save, _ = saved(tmp_path, is_local=False)
    store = NoisyDocuments(str(tmp_path))
    store.is_local = False
    [layout] = Catalog(store).manifest(save).layouts
    reads: dict[str, Callable[[Catalog], object]] = {
        "ckptlib.json": lambda catalog: catalog.open_root(Root("1" * 32, XXH3, 60.0)),
        "layouts/": lambda catalog: catalog.layout(layout),
        "generations/": lambda catalog: catalog.generations.record(save.generation),
    }
    for prefix, read in reads.items():
        store.prefix = prefix
        quiet = read(Catalog(store))
        store.flips = 1
        assert read(Catalog(store)) == quiet
        assert "Its copy" not in caplog.text
        store.flips = 2
        assert read(Catalog(store)) == quiet
        assert "Its copy" in caplog.text
        caplog.clear()


def test_a_document_that_is_newer_is_not_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = NoisyDocuments(str(tmp_path))
    store.is_local = False
    store.put("ckptlib.json", of_version(Root("1" * 32, XXH3, 60.0).encode(), 3))
    with pytest.raises(NewerFormat):
        Catalog(store).root()
    assert "read once more" not in caplog.text


def test_a_committer_reads_a_part_again(tmp_path: Path) -> None:
    """And where it knows the table of the part, so that it reads nothing but its head."""
    store = NoisyDocuments(str(tmp_path))
    store.prefix, store.is_local = "parts/", False
    catalog = Catalog(store)
    catalog.open_root(Root("0" * 32, XXH3, 60.0))
    generation, committer = make_generation(catalog), Committer(catalog)
    tensors = {"w": np.arange(SIZES["small"], dtype=np.float32)}
    for step in (1, 2):
        save = SaveId(step, generation)
        names = [put_part(catalog, save, 0, layout_of(tensors, 1), tensors)]
        store.flips = 1000
        with pytest.raises(CorruptData):
            committer.commit(save, names)
        assert not catalog.is_committed(save)
        store.flips = 1
        assert committer.commit(save, names).created == 0.0
        assert store.flips == 0
        assert catalog.is_committed(save)


def test_what_a_rank_said_and_what_retention_said_is_read_again(tmp_path: Path) -> None:
    store = NoisyDocuments(str(tmp_path))
    store.is_local = False
    catalog = Catalog(store)
    save = SaveId(1, make_generation(catalog))
    store.put(save.trash_key, TrashRecord(save, DROPPED).encode())
    put_failure(store, save, 1, "no room")
    store.prefix, store.flips = "trash/", 1
    assert catalog.trash_record(save).reason == DROPPED
    assert store.flips == 0
    store.prefix, store.flips = "parts/", 1
    with pytest.raises(SaveFailed, match="rank 1 failed: no room"):
        raise_if_failed(catalog, save)
    store.flips = 1000
    with pytest.raises(SaveFailed, match="rank 1 failed: why cannot be read: parts/"):
        raise_if_failed(catalog, save)


def test_verify_reads_again_and_tells_only_what_stays(tmp_path: Path) -> None:
    store, save, _ = saved(tmp_path, is_local=False)

    def findings() -> list[str]:
        return [finding.damage for finding in verify_save(Catalog(store), save, lambda nbytes: None)]

    assert findings() == []
    store.flips = 1
    assert findings() == []
    [pack] = tmp_path.glob("packs/*/*")
    flip_bit(pack, 5000)
    assert findings() == ["altered"]


@pytest.mark.parametrize("prefix", ["packs/", "parts/"])
def test_verify_reads_headers_and_parts_again(tmp_path: Path, prefix: str) -> None:
    _, save, _ = saved(tmp_path, is_local=False)
    store = NoisyDocuments(str(tmp_path))
    store.prefix, store.is_local = prefix, False
    store.flips = 1
    assert [*verify_save(Catalog(store), save)] == []
    assert store.flips == 0
    for is_local, flips in ((True, 1), (False, 1000)):
        store.is_local, store.flips = is_local, flips
        assert len([*verify_save(Catalog(store), save)]) == 1
