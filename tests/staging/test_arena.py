"""Arenas: what is reused and what never is, where slots go when there is no room, and who cleans up after whom."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.stage import wait_warm
from helpers.tmpfs import tmpfs
from places import TESTS
from support import ROOT_ID

from ckptlib.errors import NoRoom
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.pages import PAGE_BYTES
from ckptlib.slots import files
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.slot import SUFFIX, Slot
from ckptlib.staging import arena as arena_module
from ckptlib.staging.arena import Arena

GENERATION = GenerationId(7, "0123abcd")
SIZE = 1 << 16


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena(ROOT_ID, GENERATION, tmp_path, 2)
    yield arena
    arena.close(unlink=True)


@contextmanager
def process(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A slot_holder, and the line it printed when it was ready."""
    command = [sys.executable, "workers/slot_holder.py", *map(str, arguments)]
    running = subprocess.Popen(command, cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        yield running, running.stdout.readline()
    finally:
        running.communicate(timeout=150)


def taken(arena: Arena, held_by_all: int, in_use: list[Slot], nbytes: int = SIZE) -> Slot:
    slot = arena.take(nbytes, held_by_all, in_use)
    assert slot is not None
    return slot


def saved(arena: Arena, step: int, held_by_all: int, in_use: list[Slot]) -> Slot:
    """As a save does: taken, written, ready."""
    slot = taken(arena, held_by_all, in_use)
    arena.mark_void(slot)
    slot.unlock()
    arena.mark_ready(slot, step)
    return slot


# -- the rule


def test_two_slots_take_turns(arena: Arena) -> None:
    first = saved(arena, 1, -1, [])
    second = saved(arena, 2, 1, [])
    assert first is not second
    for step in range(3, 9):
        assert saved(arena, step, step - 1, []) is (first if step % 2 else second)
    assert len(arena.slots) == 2


def test_the_newest_that_all_have_is_never_overwritten(arena: Arena) -> None:
    """However often it is asked: step 2 is ready here, but only 1 is everywhere."""
    first, second = saved(arena, 1, -1, []), saved(arena, 2, 1, [])
    assert arena.take(SIZE, 1, []) is None
    assert arena.needs_held([]) == 2
    assert taken(arena, 2, []) is first
    assert second.path.exists()


def removed(slot: Slot) -> None:
    """As by logind, when the user logs out, or by a script that clears /dev/shm."""
    slot.path.unlink()


def cut_short(slot: Slot) -> None:
    os.truncate(slot.path, PAGE_BYTES)


@pytest.mark.parametrize("lose", [removed, cut_short])
def test_one_that_was_lost_below_the_job_is_replaced(
    arena: Arena, lose: Callable[[Slot], None], caplog: pytest.LogCaptureFixture
) -> None:
    """No writer could open the first, and to write to the second would kill the trainer."""
    made: list[Path] = []
    gone: list[Path] = []
    arena.on_made, arena.on_gone = made.append, gone.append
    lost, other = saved(arena, 1, -1, []), saved(arena, 2, 1, [])
    lose(lost)
    found = saved(arena, 3, 2, [])
    found.body[:] = b"x" * SIZE
    assert found.path.exists()
    assert (made, gone) == ([lost.path, other.path, found.path], [lost.path])
    assert saved(arena, 4, 3, []) is other, "nothing is made in the place of what is there"
    assert len(arena.slots) == 2
    assert str(lost.path) in caplog.text


def test_what_a_writer_still_has_to_read_is_not_overwritten(arena: Arena) -> None:
    first = saved(arena, 1, -1, [])
    saved(arena, 2, 1, [first])
    assert arena.needs_held([first]) == 3
    assert arena.take(SIZE, 2, [first]) is None
    assert taken(arena, 2, []) is first


def test_a_void_slot_is_free_at_once(arena: Arena) -> None:
    first, second = saved(arena, 1, -1, []), saved(arena, 2, 1, [])
    arena.mark_void(second)
    assert taken(arena, 1, []) is second
    assert first.path.exists()


def test_a_reader_in_another_process_is_never_overwritten(arena: Arena) -> None:
    """Whatever the trainer believes: the lock decides."""
    first = saved(arena, 1, -1, [])
    saved(arena, 2, 1, [])
    with process("read", first.path) as (reader, line):
        assert line == "reading\n"
        assert arena.take(SIZE, 2, []) is None
        reader.send_signal(signal.SIGKILL)
        reader.wait(60)
        assert taken(arena, 2, []) is first


# -- making slots


def test_a_slot_is_private_and_its_name_cannot_be_guessed(arena: Arena) -> None:
    first = taken(arena, -1, [])
    paths = [first.path, taken(arena, -1, [first]).path]
    names = {path.name.removeprefix(f"ckptlib-{ROOT_ID[:16]}-{GENERATION}-").removesuffix(SUFFIX) for path in paths}
    assert len(names) == 2
    for path, name in zip(paths, sorted(names), strict=True):
        assert len(bytes.fromhex(name)) == 8
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_memory_is_there_before_it_is_needed(arena: Arena) -> None:
    arena.warm(1 << 20)
    wait_warm(arena)
    assert [slot.capacity for slot in arena.slots] == [1 << 20] * 2
    for slot in arena.slots:
        assert slot.path.stat().st_blocks * 512 >= 1 << 20, "allocated"
    assert taken(arena, -1, [], 1 << 20) in arena.slots
    arena.warm(1 << 20)
    wait_warm(arena)
    assert len(arena.slots) == 2


def test_a_slot_that_is_too_small_is_made_anew(arena: Arena) -> None:
    arena.warm(SIZE)
    wait_warm(arena)
    before = arena.slots
    grown = taken(arena, -1, [], 3 * SIZE)
    assert grown.capacity >= 3 * SIZE
    assert grown.path != before[0].path
    assert not before[0].path.exists()
    assert before[1].path.exists()
    assert len(arena.slots) == 2


def test_no_forked_child_keeps_the_memory_of_one_that_was_closed(tmp_path: Path) -> None:
    arena = Arena(ROOT_ID, GENERATION, tmp_path, 1)
    held = os.dup(taken(arena, -1, []).mapped.fd)
    assert os.fstat(held).st_blocks * 512 >= SIZE
    arena.close(unlink=True)
    try:
        assert os.fstat(held).st_blocks == 0
    finally:
        os.close(held)


def test_no_room_where_a_directory_was_chosen(small: Path) -> None:
    arena = Arena(ROOT_ID, GENERATION, small, 2)
    arena.warm(1 << 30)
    wait_warm(arena)
    assert arena.slots == [], "an estimate that does not fit is no error"
    with pytest.raises(NoRoom, match=r"no room for a slot of 1,073,745,920 bytes .*arena="):
        arena.take(1 << 30, -1, [])
    assert list(small.iterdir()) == []
    assert taken(arena, -1, []).path.parent == small
    arena.close(unlink=True)


def test_an_older_snapshot_beside_the_one_that_is_needed_goes_where_memory_lacks(small: Path) -> None:
    """Once its processes have let go of it."""
    before, nbytes, left = GenerationId(6, "00000006"), 1 << 19, dict[int, Path]()
    for step in (4, 5):
        slot = Slot.create(small, f"ckptlib-{ROOT_ID[:16]}-{before}", nbytes)
        slot.write_header(SlotHeader(ROOT_ID, SaveId(step, before), 0, 1, step, 2, 0, {}))
        slot.close()
        left[step] = slot.path
    arena = Arena(ROOT_ID, GENERATION, small, 3)
    arena.others.needed = SaveId(5, before)
    taken(arena, -1, [], nbytes)
    with process("read", left[4]), pytest.raises(NoRoom):
        taken(arena, -1, arena.slots, nbytes)
    assert left[4].exists()
    taken(arena, -1, arena.slots, nbytes)
    assert not left[4].exists()
    with pytest.raises(NoRoom):
        taken(arena, -1, arena.slots, nbytes)
    assert left[5].exists()
    arena.close(unlink=True)


def test_what_a_trainer_was_killed_in_is_not_kept_with_its_snapshot(tmp_path: Path) -> None:
    before, paths = GenerationId(6, "00000006"), list[Path]()
    for sequence in (2, 3):
        slot = Slot.create(tmp_path, f"ckptlib-{ROOT_ID[:16]}-{before}", SIZE)
        slot.write_header(SlotHeader(ROOT_ID, SaveId(5, before), 0, 1, 5, sequence, 0, {}))
        slot.close()
        paths.append(slot.path)
    whole, torn = paths
    arena = Arena(ROOT_ID, GENERATION, tmp_path, 2)
    assert arena.others.reclaim(but=[SaveId(5, before)]) == [torn]
    assert names(tmp_path) == {whole.name}


def test_a_slot_that_is_too_small_gives_its_memory_to_the_next(small: Path) -> None:
    """Though another process, or a copy that was made into it, has it mapped still."""
    arena = Arena(ROOT_ID, GENERATION, small, 1)
    first = taken(arena, -1, [], 1 << 20)
    mapped = first.body
    assert taken(arena, -1, [], 3 << 19) in arena.slots
    del mapped
    arena.close(unlink=True)


def test_a_file_where_memory_has_no_room(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Some slots in memory, one in a file: the same code, said loudly."""
    monkeypatch.setattr(files, "MEMORY", small)
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    arena = Arena(ROOT_ID, GENERATION, None, 2)
    first = taken(arena, -1, [], 1 << 20)
    second = taken(arena, -1, [], 2 << 20)
    assert (first.path.parent, second.path.parent) == (small, tmp_path)
    assert "slower" in caplog.text
    second.body[-1] = 7
    arena.close(unlink=True)
    assert not second.path.exists()


def test_a_file_goes_back_to_memory_that_has_room_again(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the job before has let go of its slots: else each restart would leave some on a disk, for good."""
    monkeypatch.setattr(files, "MEMORY", small)
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    gone: list[Path] = []
    before, nbytes = small / "before", 1 << 19
    before.write_bytes(bytes(7 << 18))
    arena = Arena(ROOT_ID, GENERATION, None, 1)
    arena.on_gone = gone.append
    on_disk = taken(arena, -1, [], nbytes)
    assert on_disk.path.parent == tmp_path
    assert taken(arena, -1, [], nbytes) is on_disk, "there is no room yet"
    before.unlink()
    there = taken(arena, -1, [], nbytes)
    assert (there.path.parent, gone) == (small, [on_disk.path])
    assert not on_disk.path.exists()
    assert taken(arena, -1, [], nbytes) is there
    arena.close(unlink=True)


def test_one_slot_more_than_needed_is_made_where_memory_has_room_and_is_no_file_on_a_disk(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each fourth snapshot would go there."""
    monkeypatch.setattr(files, "MEMORY", small)
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    before = small / "before"
    before.write_bytes(bytes(3 << 19))
    arena = Arena(ROOT_ID, GENERATION, None, 1)
    first = taken(arena, -1, [], 1 << 18)
    for _ in range(3):
        arena.grow()
        arena.await_made()
    with monkeypatch.context() as quota:
        quota.setattr("ckptlib.staging.arena._free_in", lambda directory: 1 << 40)
        arena.grow()
        arena.await_made()
    assert arena.slots == [first]
    assert [r.levelname for r in caplog.records if "memory keeps fewer snapshots" in r.message] == ["WARNING"]
    before.unlink()
    for _ in range(3):
        arena.grow()
        arena.await_made()
    assert [slot.path.parent for slot in arena.slots] == [small] * 2, "one, as soon as there is room"
    arena.close(unlink=True)


def test_no_older_snapshot_goes_for_a_slot_that_the_job_can_do_without(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in the place of a file, where other ranks have taken the room meanwhile; and one more than needed."""
    monkeypatch.setattr(files, "MEMORY", small)
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    before, left = GenerationId(6, "00000006"), list[Path]()
    for step in (4, 5):
        slot = Slot.create(small, f"ckptlib-{ROOT_ID[:16]}-{before}", 1 << 19)
        slot.write_header(SlotHeader(ROOT_ID, SaveId(step, before), 0, 1, step, 2, 0, {}))
        slot.close()
        left.append(slot.path)
    arena = Arena(ROOT_ID, GENERATION, None, 1)
    arena.others.needed = SaveId(5, before)
    with process("read", left[0]):
        on_disk = taken(arena, -1, [], 1 << 20)
    assert on_disk.path.parent == tmp_path
    with monkeypatch.context() as patched:
        patched.setattr(arena_module, "_free_in", lambda directory: 1 << 40)
        assert taken(arena, -1, [], 1 << 20) is on_disk
    arena.grow()
    arena.await_made()
    assert arena.slots == [on_disk]
    assert all(path.exists() for path in left)
    arena.close(unlink=True)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 2 MiB."""
    with tmpfs(tmp_path / "small", 2 << 20) as path:
        yield path


# -- those who come after


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_slots_of_a_live_process_are_left_alone_and_those_of_a_dead_one_go(tmp_path: Path) -> None:
    with process("make", ROOT_ID, 6, "00000006", tmp_path) as (other, line):
        paths = {Path(text) for text in line.split()}
        assert len(paths) == 2
        arena = Arena(ROOT_ID, GENERATION, tmp_path, 2)
        assert arena.others.reclaim() == []
        assert all(path.exists() for path in paths)
        other.send_signal(signal.SIGKILL)
        other.wait(60)
        assert all(path.exists() for path in paths), "only reclaimed when asked"
        assert {*arena.others.reclaim()} == paths
    assert names(tmp_path) == set()
    arena.close(unlink=True)


def test_a_slot_that_a_writer_still_reads_is_waited_for(tmp_path: Path) -> None:
    left = Slot.create(tmp_path, f"ckptlib-{ROOT_ID[:16]}-{GenerationId(6, '00000006')}", SIZE)
    left.close()
    with process("read", left.path) as (other, line):
        assert line == "reading\n"
        arena = Arena(ROOT_ID, GENERATION, tmp_path, 2)
        assert arena.others.under_way() == [left.path]
        assert arena.others.reclaim() == []
        other.send_signal(signal.SIGKILL)
        other.wait(60)
        assert arena.others.under_way() == []
    arena.close(unlink=True)


def test_other_roots_and_this_generation_are_nobodys_orphans(tmp_path: Path) -> None:
    """Ranks of one job on one host have the same generation, and see each other's slots."""
    for root, generation in (("f" * 32, GenerationId(6, "00000006")), (ROOT_ID, GENERATION)):
        Slot.create(tmp_path, f"ckptlib-{root[:16]}-{generation}", SIZE).close()
    before = names(tmp_path)
    arena = Arena(ROOT_ID, GENERATION, tmp_path, 2)
    assert (arena.others.reclaim(), arena.others.under_way()) == ([], [])
    assert names(tmp_path) == before


def test_what_a_later_generation_left_for_its_successor_is_not_taken_by_an_earlier_one(tmp_path: Path) -> None:
    """A superseded job that comes to its end while the one after it is dead."""
    left = {}
    for number in (GENERATION.number - 1, GENERATION.number, GENERATION.number + 1):
        slot = Slot.create(tmp_path, f"ckptlib-{ROOT_ID[:16]}-{GenerationId(number, 'abcdef01')}", SIZE)
        slot.close()
        left[number] = slot.path
    arena = Arena(ROOT_ID, GENERATION, tmp_path, 2)
    assert {*arena.others.reclaim()} == {left[GENERATION.number - 1], left[GENERATION.number]}
    assert left[GENERATION.number + 1].exists()
    assert not arena.others.any_earlier


def test_two_arenas_of_one_root_in_one_process_leave_each_other_alone(tmp_path: Path) -> None:
    """`save(url)` and a Checkpointer of the same root: their locks cannot tell them apart."""
    first = Arena(ROOT_ID, GenerationId(6, "00000006"), tmp_path, 2)
    slot = taken(first, -1, [])
    second = Arena(ROOT_ID, GENERATION, tmp_path, 2)
    assert second.others.reclaim() == []
    assert slot.path.exists()
    with process("read", slot.path) as (_, line):
        assert line == "", "the lock of the first arena still holds"
    first.close(unlink=False)
    assert slot.path.exists(), "left to a writer"
    assert second.others.reclaim() == [slot.path]
    assert not slot.path.exists(), "nobody's now"


def test_what_was_planted_is_neither_followed_nor_deleted(tmp_path: Path) -> None:
    prefix = f"ckptlib-{ROOT_ID[:16]}-000001-00000001-"
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious" * PAGE_BYTES)
    (tmp_path / f"{prefix}{'0' * 16}{SUFFIX}").symlink_to(victim)
    (tmp_path / f"{prefix}{'1' * 16}{SUFFIX}").symlink_to(tmp_path / "nowhere")
    (tmp_path / f"{prefix}{'2' * 16}{SUFFIX}").write_bytes(b"short")
    (tmp_path / f"{prefix}{'3' * 16}{SUFFIX}").mkdir()
    os.mkfifo(tmp_path / f"{prefix}{'4' * 16}{SUFFIX}")
    os.link(victim, tmp_path / f"{prefix}{'5' * 16}{SUFFIX}")
    writable = tmp_path / f"{prefix}{'6' * 16}{SUFFIX}"
    writable.write_bytes(b"precious" * PAGE_BYTES)
    writable.chmod(0o666)
    before = names(tmp_path)
    arena = Arena(ROOT_ID, GENERATION, tmp_path, 2)
    assert (arena.others.under_way(), arena.others.reclaim(), arena.others.any_earlier) == ([], [], False)
    arena.close(unlink=True)
    assert names(tmp_path) == before
    assert victim.read_bytes() == writable.read_bytes() == b"precious" * PAGE_BYTES


@pytest.mark.parametrize(("number", "stays"), [(GENERATION.number - 1, False), (GENERATION.number + 1, True)])
def test_a_slot_whose_maker_was_killed_before_its_first_byte_goes(tmp_path: Path, number: int, stays: bool) -> None:
    path = tmp_path / f"ckptlib-{ROOT_ID[:16]}-{number:06d}-00000001-{'0' * 16}{SUFFIX}"
    path.touch(0o600)
    arena = Arena(ROOT_ID, GENERATION, tmp_path, 2)
    assert arena.others.reclaim() == []
    assert path.exists() is stays
    arena.close(unlink=True)


def test_a_link_planted_under_a_new_name_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even when the name was guessed."""
    monkeypatch.setattr("secrets.token_hex", lambda n: "0" * 2 * n)
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / f"ckptlib-{ROOT_ID[:16]}-{GENERATION}-{'0' * 16}{SUFFIX}").symlink_to(victim)
    arena = Arena(ROOT_ID, GENERATION, tmp_path, 2)
    with pytest.raises(NoRoom, match="File exists"):
        arena.take(SIZE, -1, [])
    assert victim.read_bytes() == b"precious"
