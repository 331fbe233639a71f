"""What stays on a host's disk, and what goes."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import make_generation, make_root, put_parts
from typing_extensions import override

import ckptlib
from ckptlib.catalog.begun import Begun, note, noted
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.local_disk import (
    UNFINISHED_S,
    DiskSweeper,
    Stays,
    by_save,
    disk_for,
    kept,
    open_disk,
    part_there,
    sweep_quietly,
    unwanted,
)
from ckptlib.errors import CorruptData, FormatError, StoreError
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Generation, Root
from ckptlib.stores import Entry
from ckptlib.stores.local import LocalStore
from ckptlib.stores.local_upload import TEMP_DIRECTORY, LocalUpload
from ckptlib.stores.testing import flip_bit

OLD, OWN, NEW = (GenerationId(n, f"{n:08d}") for n in (1, 2, 3))


@given(st.sets(st.integers(0, 40)), st.integers(1, 5), st.sets(st.integers(0, 40), max_size=3), st.data())
def test_the_newest_whole_one_and_what_is_pinned_stay(
    steps: set[int], last: int, pinned: set[int], data: st.DataObject
) -> None:
    saves = {SaveId(step, OWN) for step in steps}
    pins = {SaveId(step, OWN) for step in pinned}
    settled = data.draw(st.integers(-1, 40))
    assert kept(saves, Stays(None, settled, pins, last)) == saves, "as long as nobody knows, all stays"
    if not saves:
        return
    whole = data.draw(st.sampled_from(sorted(saves)))
    stay = kept(saves, Stays(whole, settled, pins, last))
    failed = {save for save in saves if whole.step < save.step <= settled}
    assert whole in stay
    assert {save for save in saves if save > whole} - failed <= stay, "one of these may be whole next"
    assert {*sorted(saves - failed)[-last:]} <= stay
    assert not (failed - pins) & stay
    assert pins <= stay
    assert stay - pins <= saves
    assert len(stay - pins) <= max(last, sum(save >= whole for save in saves - failed))


def entry(key: str) -> Entry:
    return Entry(key, 1, 0.0)


def test_only_what_this_rank_put_and_what_older_generations_left_goes() -> None:
    gone = SaveId(1, OWN)
    packs = [gone.pack_key(0, "a" * 8, 0), gone.pack_key(0, "a" * 8, 1), gone.pack_key(1, "b" * 8, 0)]
    others = [SaveId(9, OLD).pack_key(5, "c" * 8, 0), SaveId(1, NEW).pack_key(0, "d" * 8, 0)]
    stays = SaveId(2, OWN).pack_key(0, "e" * 8, 0)
    objects = [entry(key) for key in [*packs, *others, stays, "ckptlib.json", "layouts/x.json", "foreign"]]
    found = unwanted(objects, 0, OWN, {SaveId(2, OWN)}, {packs[1]})
    assert [e.key for e in found] == sorted([packs[0], others[0]]), "one pack is used by what stays"


def make_disk(path: Path) -> tuple[Catalog, GenerationId]:
    catalog = make_root(LocalStore(str(path)))
    return catalog, GenerationId(7, "0000000a")  # whose record is in the store


def put(disk: Catalog, generation: GenerationId, step: int, num_ranks: int = 2) -> SaveId:
    return put_parts(disk, generation, step, {"w": np.arange(64 * num_ranks) + step}, num_ranks)[0]


def test_a_sweep_removes_parts_before_packs_and_leaves_the_other_ranks(tmp_path: Path) -> None:
    disk, generation = make_disk(tmp_path)
    saves = [put(disk, generation, step) for step in range(1, 5)]
    sweeper = DiskSweeper(disk, 0)
    assert sweeper.sweep(generation, Stays(None, -1, frozenset(), 1)) == []
    gone = sweeper.sweep(generation, Stays(saves[3], -1, {saves[1]}, 1))
    assert [e.key.split("/")[0] for e in gone] == ["parts"] * 2 + ["packs"] * 2
    assert {rank for save in saves[:1] for rank in disk.parts(save)} == {1}
    for save in (saves[1], saves[3]):
        assert {*disk.parts(save)} == {0, 1}
        assert part_there(disk, save, 0) is not None
    assert sweeper.sweep(generation, Stays(saves[3], -1, {saves[1]}, 1)) == []


def test_what_somebody_saved_there_as_to_a_root_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An import into the directory was committed, and read back; then the job took it for leftovers of a job before."""
    disk, generation = make_disk(tmp_path / "disk")
    sweeper = DiskSweeper(disk, 0)
    old = put(disk, GenerationId(6, "0000000b"), 1)
    torch.save({"w": torch.arange(1000.0)}, tmp_path / "file.pt")
    ckptlib.convert(tmp_path / "file.pt", tmp_path / "disk", step=2)
    saves = [put(disk, generation, step) for step in range(3, 6)]
    for _ in range(2):
        sweeper.sweep(generation, Stays(saves[2], -1, frozenset(), 1))
    assert disk.parts(old) == {}
    assert [*disk.parts(saves[0])] == [1], "of this rank it is gone"
    assert torch.equal(ckptlib.read(tmp_path / "disk", step=2)["model"]["w"], torch.arange(1000.0))
    assert caplog.text.count("somebody saves there as to a root") == 1


def test_a_half_written_file_of_another_user_keeps_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a directory for all users, where each may remove only their own: the disk was never tidied again."""
    disk, generation = make_disk(tmp_path)
    saves = [put(disk, generation, step) for step in range(1, 4)]
    for name in (foreign := f"1-{'0' * 16}", own := f"2-{'0' * 16}"):
        (tmp_path / ".tmp" / name).write_bytes(b"half a pack")
        os.utime(tmp_path / ".tmp" / name, (1, 1))
    unlink = os.unlink

    def refused(path: str, **more: int) -> None:
        if path == foreign:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
        unlink(path, **more)

    monkeypatch.setattr(os, "unlink", refused)
    sweep_quietly(DiskSweeper(disk, 0), generation, Stays(saves[2], -1, frozenset(), 1))
    assert {rank for save in saves[:2] for rank in disk.parts(save)} == {1}
    assert ((tmp_path / ".tmp" / foreign).exists(), (tmp_path / ".tmp" / own).exists()) == (True, False)
    (told,) = caplog.messages
    assert f"{foreign}: cannot clean: Operation not permitted" in told


def test_nothing_goes_while_a_part_that_stays_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk, generation = make_disk(tmp_path)
    saves = [put(disk, generation, step) for step in range(1, 4)]
    (part,) = (tmp_path / saves[2].parts_prefix).glob("000000-*")
    flip_bit(part, part.stat().st_size // 2)
    before = sorted(tmp_path.rglob("*"))
    sweep_quietly(DiskSweeper(disk, 0), generation, Stays(saves[2], -1, frozenset(), 1))
    assert sorted(tmp_path.rglob("*")) == before
    assert "nothing is removed from the local disk" in caplog.text


def test_an_older_generation_goes_when_there_is_a_whole_step_of_the_own_one(tmp_path: Path) -> None:
    disk, generation = make_disk(tmp_path)
    old = put(disk, generation, 5)
    own = GenerationId(generation.number + 1, "0" * 8)
    new = put(disk, own, 3)
    sweeper = DiskSweeper(disk, 0)
    assert sweeper.sweep(own, Stays(old, -1, frozenset(), 1)) == [], "what was told is of another generation"
    sweeper.sweep(own, Stays(new, -1, frozenset(), 1))
    assert disk.parts(old) == {}
    assert {*disk.parts(new)} == {0, 1}


def test_on_a_full_disk_only_what_a_restart_needs_stays_of_older_generations(tmp_path: Path) -> None:
    """Before there is a whole step of the own one: of that all stays, and of the others the packs that are named."""
    disk, generation = make_disk(tmp_path)
    olds = [put(disk, generation, step) for step in range(1, 4)]
    own = GenerationId(generation.number + 1, "0" * 8)
    new = put(disk, own, 3)
    unnamed = SaveId(4, own).pack_key(0, "a" * 8, 0)
    disk.store.put(unnamed, b"of a save that found no room")
    note(disk.store, Begun(Generation(generation, 2, None, 0.0, {}, "here"), 1, True))
    sweeper = DiskSweeper(disk, 0)
    gone = sweeper.sweep(own, Stays(None, -1, frozenset(), 1, earlier=frozenset({olds[1]})))
    assert {keys.pack_save(e.key) for e in gone} == {None, olds[0], olds[2], SaveId(4, own)}
    for save in (olds[1], new):
        assert {*disk.parts(save)} == {0, 1}
        for rank in (0, 1):
            part = disk.part(part_there(disk, save, rank))  # type: ignore[arg-type]
            assert all((tmp_path / pack.key).exists() for pack in part.packs)
    assert noted(disk.store), "its record may not be in the store yet"
    assert sweeper.sweep(own, Stays(None, -1, frozenset(), 1, earlier=frozenset())), "nothing where no step is whole"
    assert disk.parts(olds[1]) == {}
    assert {*disk.parts(new)} == {0, 1}


def test_before_the_record_is_there_older_steps_of_the_own_generation_go(tmp_path: Path) -> None:
    """A restart finds the newest by what is noted here. Where that cannot be read, it goes back to an older generation,
    of which no part need be readable for the sweep."""
    disk, generation = make_disk(tmp_path)
    olds = [put(disk, generation, step) for step in range(1, 4)]
    (part,) = (tmp_path / olds[2].parts_prefix).glob("000000-*")
    flip_bit(part, part.stat().st_size // 2)
    left = generation_objects(tmp_path, generation)
    own = GenerationId(generation.number + 1, "0" * 8)
    news = [put(disk, own, step) for step in range(4, 8)]
    for of in (generation, own):
        note(disk.store, Begun(Generation(of, 2, None, 0.0, {}, "here"), 1, True))
    sweeper = DiskSweeper(disk, 0)
    sweeper.sweep(own, Stays(news[3], -1, frozenset(), 2, recorded=False))
    assert [0 in disk.parts(save) for save in news] == [False, False, True, True]
    assert generation_objects(tmp_path, generation) == left
    sweeper.sweep(own, Stays(news[3], -1, frozenset(), 1, recorded=False, earlier=frozenset({olds[1]})))
    assert [0 in disk.parts(save) for save in news] == [False, False, False, True]
    assert [bool(disk.parts(save)) for save in olds] == [False, True, False], "the disk is full"
    assert len(noted(disk.store)) == 2
    sweeper.sweep(own, Stays(news[3], -1, frozenset(), 1, recorded=True, earlier=frozenset({olds[1]})))
    assert disk.parts(olds[1]) == {}
    assert [begun.record.id for begun in noted(disk.store)] == [own]


def generation_objects(disk: Path, generation: GenerationId) -> set[Path]:
    return set(disk.glob(f"p*s/*-{generation}/*"))


def test_what_is_noted_of_a_generation_goes_with_it(tmp_path: Path) -> None:
    disk, generation = make_disk(tmp_path)
    own = GenerationId(generation.number + 1, "0" * 8)
    for of in (generation, own):
        note(disk.store, Begun(Generation(of, 2, None, 0.0, {}, "here"), 1, True))
    DiskSweeper(disk, 1).sweep(own, Stays(put(disk, own, 3), -1, frozenset(), 1))
    assert [begun.record.id for begun in noted(disk.store)] == [own]


def test_a_layout_goes_when_it_is_old_and_no_part_of_any_rank_names_it(tmp_path: Path) -> None:
    disk, generation = make_disk(tmp_path)
    saves = [put(disk, generation, step, num_ranks) for step, num_ranks in ((1, 2), (2, 3), (3, 4))]
    layouts = [disk.part(part_there(disk, save, 0)).table.layout for save in saves]  # type: ignore[arg-type]
    sweeper, stays = DiskSweeper(disk, 0), Stays(saves[2], -1, frozenset(), 1)
    (tmp_path / "layouts" / "desktop.ini").write_text("not ours")

    def left() -> list[str]:
        return [digest for digest in layouts if (tmp_path / keys.layout_key(digest)).exists()]

    sweeper.sweep(generation, stays)
    for save in saves[:2]:
        assert {*disk.parts(save)} == {*range(1, len(disk.parts(save)) + 1)}, "those of other ranks stay"
    _age_layouts(tmp_path)
    for number, save in enumerate(saves):
        sweeper.sweep(generation, stays)
        assert left() == layouts[number:], "parts of other ranks name the others"
        for names in disk.parts(save).values():
            disk.store.delete(names[0].key)
    fresh = put(disk, generation, 4, 1)
    DiskSweeper(disk, 0).sweep(generation, Stays(fresh, -1, frozenset(), 1))
    assert left() == []
    assert (tmp_path / "layouts" / "desktop.ini").exists()
    assert disk.part(part_there(disk, fresh, 0)).save == fresh  # type: ignore[arg-type]


def _age_layouts(path: Path) -> None:
    old = time.time() - UNFINISHED_S - 60
    for layout in (path / "layouts").iterdir():
        os.utime(layout, (old, old))


class _Meanwhile(LocalStore):
    """A disk on which another rank puts a part while a layout is deleted."""

    put_part: Callable[[], object]

    @override
    def delete(self, *keys: str) -> None:
        if keys[0].startswith("layouts/"):
            self.put_part()
        super().delete(*keys)


def test_a_layout_that_another_rank_names_meanwhile_is_put_again(tmp_path: Path) -> None:
    disk, generation = make_disk(tmp_path)
    old, new = put(disk, generation, 1, 3), put(disk, generation, 2, 2)
    layout = keys.layout_key(disk.part(part_there(disk, old, 0)).table.layout)  # type: ignore[arg-type]
    document = disk.store.get(layout)
    names = [name for some in disk.parts(old).values() for name in some]
    parts = {name.key: disk.store.get(name.key) for name in names if name.rank == 1}
    for name in names:
        disk.store.delete(name.key)
    _age_layouts(tmp_path)
    store = _Meanwhile(str(tmp_path))
    store.put_part = lambda: [store.put(key, data) for key, data in parts.items()]
    gone = DiskSweeper(Catalog(store), 0).sweep(generation, Stays(new, -1, frozenset(), 1))
    assert not [entry for entry in gone if entry.key.startswith("layouts/")]
    assert disk.store.get(layout) == document


def test_layouts_stay_while_a_part_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk, generation = make_disk(tmp_path)
    old, new = put(disk, generation, 1, 3), put(disk, generation, 2, 2)
    for names in disk.parts(old).values():
        disk.store.delete(names[0].key)
    part = tmp_path / disk.parts(new)[1][0].key
    flip_bit(part, part.stat().st_size // 2)
    _age_layouts(tmp_path)
    assert not DiskSweeper(disk, 0).sweep(generation, Stays(new, -1, {old}, 1))
    assert "layouts stay on the local disk, since a part cannot be read" in caplog.text
    assert len([*(tmp_path / "layouts").iterdir()]) == 2


def test_what_a_crash_left_half_written_goes_when_it_is_old(tmp_path: Path) -> None:
    disk, generation = make_disk(tmp_path)
    upload = LocalUpload(str(tmp_path), "packs/a/b", 10)
    upload.__enter__()
    upload.write(b"half")
    (left,) = [path for path in (tmp_path / TEMP_DIRECTORY).iterdir() if path.is_file()]
    sweeper, stays = DiskSweeper(disk, 0), Stays(None, -1, frozenset(), 1)
    sweeper.sweep(generation, stays)
    assert left.exists(), "somebody may be writing it"
    old = time.time() - UNFINISHED_S - 60
    os.utime(left, (old, old))
    sweeper.sweep(generation, stays)
    assert not left.exists()


def test_a_clock_that_was_set_forward_removes_nothing_that_others_write(tmp_path: Path) -> None:
    """What was begun after this rank's newest part is not old, whatever the time is now."""
    disk, generation = make_disk(tmp_path)
    save = put(disk, generation, 1)
    begun, layout = tmp_path / ".tmp" / "123-0123456789abcdef", tmp_path / "layouts" / ("0" * 32 + ".json")
    for path in (begun, layout):
        path.write_bytes(b"of another rank")
    before = time.time() - 2 * UNFINISHED_S
    for path in (*tmp_path.glob("parts/*/*"), begun, layout):
        os.utime(path, (before, before))
    sweeper = DiskSweeper(disk, 0)
    sweeper.sweep(generation, Stays(save, 1, frozenset(), 1))
    assert begun.exists()
    assert layout.exists()
    later = put(disk, generation, 2)
    sweeper.sweep(generation, Stays(later, 2, frozenset(), 1))
    assert not begun.exists()
    assert not layout.exists()


def test_a_disk_belongs_to_one_root(tmp_path: Path) -> None:
    first, second = (Root(letter * 32, "xxh3", 60.0) for letter in "ab")
    bucket = LocalStore(str(tmp_path / "bucket"))
    open_disk(str(tmp_path / "disk"), first, bucket)
    open_disk(str(tmp_path / "disk"), first, None)
    assert [path.name for path in (tmp_path / "disk").iterdir() if path.name != ".tmp"] == ["ckptlib.json"]
    with pytest.raises(StoreError, match=f"root {'a' * 32}, but this job saves to root {'b' * 32}"):
        open_disk(str(tmp_path / "disk"), second, bucket)


def test_nothing_stays_on_a_disk_where_the_store_does_not_answer(tmp_path: Path) -> None:
    (tmp_path / "bucket").symlink_to(tmp_path / "unmounted")
    with pytest.raises(StoreError, match="leads nowhere"):
        open_disk(str(tmp_path / "disk"), Root("a" * 32, "xxh3", 60.0), LocalStore(str(tmp_path / "bucket")))
    assert [path.name for path in (tmp_path / "disk").iterdir() if path.name != ".tmp"] == ["ckptlib.json"]


@pytest.mark.parametrize("at", [10, 40, 80], ids=["form", "digest", "id"])
def test_a_damaged_document_says_what_to_do(tmp_path: Path, at: int) -> None:
    root, disk = Root("a" * 32, "xxh3", 60.0), tmp_path / "disk"
    open_disk(str(disk), root, None)
    whole = (disk / "ckptlib.json").read_bytes()
    flip_bit(disk / "ckptlib.json", at)
    with pytest.raises((FormatError, CorruptData), match=f"local={disk} are of.*delete ckptlib.json in it"):
        open_disk(str(disk), root, None)
    (disk / "ckptlib.json").unlink()
    open_disk(str(disk), root, None)
    assert (disk / "ckptlib.json").read_bytes() == whole


def test_a_root_is_no_disk(tmp_path: Path) -> None:
    """What is swept from a disk would be lost."""
    root = Root("a" * 32, "xxh3", 60.0)
    fresh = tmp_path / "fresh"
    with pytest.raises(ValueError, match="is a root of its own, or the job's"):
        open_disk(str(fresh), root, LocalStore(str(fresh)))
    (tmp_path / "link").symlink_to(fresh)
    with pytest.raises(ValueError, match="is a root of its own, or the job's"):
        open_disk(str(fresh), root, LocalStore(str(tmp_path / "link" / ".." / "fresh")))
    catalog = make_root(LocalStore(str(tmp_path / "other")))
    put(catalog, make_generation(catalog), 1)
    with pytest.raises(ValueError, match="is a root of its own, or the job's"):
        open_disk(str(tmp_path / "other"), catalog.root(), None)


def test_what_is_put_on_a_disk_is_shaped_for_the_store(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "bucket"))
    store.pack_nbytes, store.late_nbytes, store.is_local = 123, 45, False
    disk = disk_for(str(tmp_path / "disk"), store)
    assert (disk.pack_nbytes, disk.late_nbytes, disk.is_local) == (123, 45, False)


def test_parts_by_save_and_rank(tmp_path: Path) -> None:
    disk, generation = make_disk(tmp_path)
    save = put(disk, generation, 1)
    names = [name for names in disk.parts(save).values() for name in names]
    assert by_save(names) == {save: {0: [names[0]], 1: [names[1]]}}
