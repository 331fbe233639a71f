"""What saves on a local disk take over: from the newest part that the store has, while its packs are here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.persists import Arrays, codecs_of
from support import ROOT_ID, make_generation, make_root
from workers.crash_spare import ready_slot

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.chunks import read_chunk
from ckptlib.catalog.commit import Committer
from ckptlib.catalog.local_disk import disk_for
from ckptlib.errors import CorruptData, SaveFailed
from ckptlib.format.digests import digester
from ckptlib.format.keys import SaveId, pack_save
from ckptlib.format.part import Part
from ckptlib.policy.codec import CodecRules
from ckptlib.policy.tier import LocalTier
from ckptlib.stores import Entry
from ckptlib.stores.local import LocalStore
from ckptlib.stores.testing import flip_bit
from ckptlib.writer.persist import Persister
from ckptlib.writer.tier import Tier

FROZEN, CHANGING = 3 << 20, 1 << 20


class Saves:
    """Of one rank with a tier, without a writer process."""

    def __init__(self, directory: Path, codec: str = "raw") -> None:
        self.directory = directory
        self.bucket = LocalStore(str(directory / "bucket"))
        self.bucket.is_local = codec == "raw"
        self.catalog = make_root(self.bucket)
        self.generation = make_generation(self.catalog)
        self.tier = Tier(LocalTier(directory / "disk", None, 1), self.bucket, 0, ROOT_ID)
        rules = CodecRules.of(codec)
        executor = ThreadPoolExecutor(1)
        self.persister = Persister(self.tier.disk, executor, 0, 1, 1e9, rules, drained=self.tier.parents)
        self.tier.open(60.0, self.persister.note_upload)
        self.step = 0

    def save(self, arrays: Arrays | None = None, drained: bool = True) -> Part:
        """Persisted only."""
        self.step += 1
        save = SaveId(self.step, self.generation)
        if drained:
            self.tier.expect(save)
        slot = ready_slot(self.directory, save, dict(arrays or state(self.step)))
        slot.read_lock()
        self.tier.make_room(save)
        part = self.persister.persist(slot, save, may_be_parent=drained)
        slot.unlink()
        return part

    def drain(self, part: Part, commit: bool = True) -> None:
        self.tier.drain(part.save, lambda: None)
        if commit:
            Committer(self.catalog).commit(part.save, [part.encode()[0]])
            self.tier.look_again()
        self.tier.settle(part.save)

    def whole_in(self, where: Catalog, part: Part) -> bool:
        """Whether every chunk can be read there."""
        part = where.part(part.encode()[0])
        digest = digester(part.algorithm)
        return [digest(read_chunk(where.store.get_into, part, c)) for c in range(len(part.digests))] == [*part.digests]


def state(step: int) -> Arrays:
    frozen = np.random.default_rng(0).integers(0, 255, FROZEN, np.uint8)
    return {"frozen": frozen, "w": np.random.default_rng(step).integers(0, 255, CHANGING, np.uint8)}


@pytest.fixture
def saves(tmp_path: Path) -> Saves:
    return Saves(tmp_path)


def sources(part: Part) -> set[int]:
    """The steps in whose packs it lies."""
    return {save.step for pack in part.packs if (save := pack_save(pack.key)) is not None}


def test_only_what_the_store_has_committed_is_a_parent(saves: Saves) -> None:
    first = saves.save()
    assert sources(saves.save(drained=False)) == {2}, "step 1 is not committed"
    saves.drain(first)
    third = saves.save()
    assert sources(third) == {1, 3}
    assert sources(saves.save()) == {1, 4}
    saves.drain(third)
    fifth = saves.save()
    assert sources(fifth) == {1, 5}
    local, bucket = Catalog(LocalStore(str(saves.directory / "disk"))), saves.catalog
    saves.drain(fifth)
    assert saves.whole_in(bucket, fifth)
    assert saves.whole_in(local, fifth), "packs that a local part uses are local"


def test_the_newest_committed_one_stays_however_many_saves_fail_behind_it(saves: Saves) -> None:
    saves.drain(saves.save())
    for step in range(2, 9):
        part = saves.save()
        saves.drain(part, commit=False)
        assert sources(part) == {1, step}


def test_what_was_in_packs_that_are_gone_from_the_disk_is_written_again(
    saves: Saves, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own sweeps may have removed them: nothing to warn of."""
    first = saves.save()
    saves.drain(first)
    for path in (saves.directory / "disk" / "packs").rglob("*.safetensors"):
        path.unlink()
    assert sources(saves.save()) == {2}
    assert caplog.text == ""


def test_packs_that_somebody_deletes_from_the_store_are_put_there_again(
    saves: Saves, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk has them, and a part that the store gets refers to them."""
    first = saves.save()
    saves.drain(first)
    [pack] = [saves.directory / "bucket" / pack.key for pack in first.packs]
    data = pack.read_bytes()
    pack.unlink()
    second = saves.save()
    with caplog.at_level(logging.WARNING):
        saves.drain(second)
    assert sources(second) == {1, 2}
    assert pack.read_bytes() == data
    assert f"{first.packs[0].key}, which step 2 needs, is not there any more" in caplog.text
    assert saves.whole_in(saves.catalog, second)
    pack.chmod(0o600)
    pack.write_bytes(data[:-1])
    third = saves.save()
    with pytest.raises(SaveFailed, match=r"needs .*/packs/.*, which cannot be read up to its \d+ bytes"):
        saves.drain(third)
    assert not [*(saves.directory / "bucket" / "parts").glob(f"{third.save}/*")]


def patched(directory: Path) -> tuple[Saves, Part, Part]:
    """A table that is committed, and one that is stored as changes of it."""
    saves = Saves(directory, "planes")
    table = np.random.default_rng(0).normal(size=(4000, 64)).astype(np.float32)
    first = saves.save({"table": table})
    saves.drain(first)
    table[:8] += 1
    second = saves.save({"table": table})
    assert "patch" in codecs_of(second)
    return saves, first, second


def altered(saves: Saves, part: Part) -> Path:
    """The own pack of a part, of which the disk has changed a bit."""
    [key] = [pack.key for pack in part.packs if pack_save(pack.key) == part.save]
    path = saves.directory / "disk" / key
    flip_bit(path, part.table.offsets[0] + part.stored[0] // 2)
    return path


def test_a_patch_that_the_disk_has_altered_is_not_committed(tmp_path: Path) -> None:
    saves, _, second = patched(tmp_path)
    altered(saves, second)
    with pytest.raises(CorruptData, match="the local disk has altered it; the step is not committed"):
        saves.drain(second)
    assert not [*(tmp_path / "bucket" / "parts").glob(f"{second.save}/*")]


@pytest.mark.parametrize("known", [False, True])
def test_a_base_that_the_disk_has_altered_and_the_store_lost_is_in_no_step(tmp_path: Path, known: bool) -> None:
    """`known`: that the store has not got it any more; else it was seen there lately."""
    saves, first, second = patched(tmp_path)
    altered(saves, first)
    (tmp_path / "bucket" / first.packs[0].key).unlink()
    if known:
        saves.tier.open(60.0, saves.persister.note_upload)
    with pytest.raises(CorruptData, match="the local disk has altered it; the step is not committed"):
        saves.drain(second)
    assert not [*(tmp_path / "bucket" / "parts").glob(f"{second.save}/*")]


@pytest.mark.parametrize("lost", [False, True])
def test_a_base_is_read_from_the_store_where_the_disk_does_not_have_it(tmp_path: Path, lost: bool) -> None:
    saves, first, second = patched(tmp_path)
    base = altered(saves, first)
    if lost:
        base.unlink()
    saves.drain(second)
    assert saves.whole_in(saves.catalog, second)


def test_a_sweep_of_the_disk_leaves_what_later_saves_refer_to(saves: Saves) -> None:
    """With as little kept as can be, and many saves that stay local behind one that was drained."""
    first = saves.save()
    saves.drain(first)
    for step in range(2, 9):
        saves.tier.note_whole(SaveId(step - 1, saves.generation), step - 1, recorded=True)
        assert sources(saves.save(drained=False)) == {1, step}
    left = {int(path.name[:12]) for path in (saves.directory / "disk" / "parts").iterdir()}
    assert left == {1, 7, 8}
    second = saves.save()
    saves.drain(second)
    for step in range(10, 13):
        saves.tier.note_whole(SaveId(step - 1, saves.generation), step - 1, recorded=True)
        assert sources(saves.save(drained=False)) == {1, step}
    left = {int(path.name[:12]) for path in (saves.directory / "disk" / "parts").iterdir()}
    assert left == {9, 11, 12}, "the packs of step 1 stay, its part does not"
    assert saves.whole_in(Catalog(saves.tier.disk), second)


@pytest.mark.parametrize("drained", [True, False])
def test_a_second_attempt_on_a_full_disk_finds_no_packs_of_the_first(saves: Saves, drained: bool) -> None:
    first, second = saves.save(), saves.save()
    saves.tier.note_whole(first.save, first.save.step, recorded=True)
    save = SaveId(3, saves.generation)
    if drained:
        saves.tier.expect(save)
    saves.tier.disk.put(save.pack_key(0, "a" * 8, 0), b"of the attempt for which there was no room")
    saves.tier.make_room(save, least=True)
    packs = {entry.key for entry in saves.tier.disk.scan("packs/")}
    assert packs == {pack.key for part in (first, second) for pack in part.packs}


def test_the_codec_is_the_bucket_s_and_learns_from_drains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = Saves(tmp_path, "auto")
    disk = disk_for(str(tmp_path / "disk"), saves.bucket)
    assert not disk.is_local
    weights = np.random.default_rng(0).normal(size=2 << 20).astype(np.float32)
    first = saves.save({"w": weights})
    assert {*codecs_of(first)} == {"raw"}, "how fast the bucket is has not been seen"
    told: list[int] = []
    slow = _slowed(saves.persister.note_upload, told)
    saves.tier.open(60.0, slow)
    saves.drain(first)
    assert sum(told) == first.nbytes_put
    second = saves.save({"w": weights + 1})
    assert "raw" not in {*codecs_of(second)} or len({*codecs_of(second)}) > 1, "some are tried now"
    saves.drain(second)
    assert saves.whole_in(saves.catalog, second)


def _slowed(note: Callable[[int, float, float], None], told: list[int]) -> Any:
    """As if each byte took a microsecond."""

    def slow(nbytes: int, began: float, ended: float) -> None:
        told.append(nbytes)
        note(nbytes, ended - nbytes * 1e-6, ended)

    return slow


def test_a_drain_lists_no_step_before_those_that_matter(saves: Saves, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank lists them with each drain, and a bucket may have ten thousand."""
    listed: list[str] = []
    scan = saves.bucket.scan

    def told(prefix: str, after: str = "") -> list[Entry]:
        if prefix == "steps/":
            listed.append(after)
        return scan(prefix, after)

    for step in range(8):
        saves.drain(saves.save({"w": np.full(CHANGING, step, np.uint8)}))
    monkeypatch.setattr(saves.bucket, "scan", told)
    part = saves.save({"w": np.full(CHANGING, 8, np.uint8)})
    saves.tier.drain(part.save, lambda: None)
    saves.tier.look_again()
    assert listed == [f"steps/{SaveId(5, saves.generation)}"] * 2


def test_what_stays_on_the_disk_is_not_remembered_for_ever(saves: Saves) -> None:
    """A job saves every minute, and drains every tenth."""
    to_drain = saves.save()
    saves.tier.note_new(to_drain.save)
    for _ in range(5):
        saves.tier.note_new(saves.save(drained=False).save)
    newest = SaveId(saves.step, saves.generation)
    assert [part.save for part in saves.tier.parents._parts] == [to_drain.save]
    assert saves.tier._new == {to_drain.save, newest}
