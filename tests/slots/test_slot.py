"""Slots: what outlives a process, who may touch it, and that nothing torn is ever taken for ready."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.tmpfs import tmpfs
from support import ROOT_ID

from ckptlib.errors import CkptError, CorruptData, FormatError, NoRoom
from ckptlib.format.box import Box
from ckptlib.format.documents import encode
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.layout import ByHand, Layout, TensorEntry
from ckptlib.format.table import Table
from ckptlib.format.values import Json
from ckptlib.pages import PAGE_BYTES
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.slot import SUFFIX, Slot
from ckptlib.slots.snapshot import SnapshotReader

SAVE = SaveId(500, GenerationId(7, "0123abcd"))
CAPACITY = 4 * PAGE_BYTES
DOCUMENTS = {"layout": b"l" * 100, "table": b"t" * 5000, "snapshot": b"s"}
HEADER = SlotHeader(ROOT_ID, SAVE, 3, 8, 2, 4, CAPACITY, {"layout": (20480, 100, "0" * 32)})


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[Slot]:
    slot = Slot.create(tmp_path, "ckptlib", CAPACITY)
    yield slot
    slot.close()


def sealed(slot: Slot, body: bytes = b"x" * CAPACITY, sequence: int = 2) -> SlotHeader:
    """Fills a slot as a stager does."""
    slot.write_header(replace(HEADER, sequence=sequence - 1, documents={}))
    slot.body[: len(body)] = body
    places = slot.write_documents(len(body), DOCUMENTS)
    header = replace(HEADER, sequence=sequence, body_nbytes=len(body), documents=places)
    slot.write_header(header)
    return header


def test_who_asks_whether_it_is_read_does_not_get_in_the_way_of_a_reader(slot: Slot) -> None:
    """A restart asks again and again; a writer that reads its orders meanwhile locks the slot once."""
    code = "import sys; from pathlib import Path; from ckptlib.slots.slot import Slot\n"
    code += "slot = Slot.open(Path(sys.argv[1]))\nprint('asks', flush=True)\nwhile True: slot.being_read()"
    with subprocess.Popen([sys.executable, "-c", code, slot.path], stdout=subprocess.PIPE, text=True) as asker:
        try:
            assert asker.stdout is not None
            assert asker.stdout.readline() == "asks\n"
            for _ in range(20_000):
                assert slot.read_lock()
                slot.unlock()
        finally:
            asker.kill()


def test_chunks_lie_in_the_body_and_are_not_larger_than_it(slot: Slot) -> None:
    """A load takes memory for a chunk, and one place told a thousand times is digested as often."""
    layout = Layout(1, (TensorEntry("a", "uint8", (CAPACITY,), ByHand()),))
    half = CAPACITY // 2
    low, high = Box((0,), (half,)), Box((half,), (half,))
    table = Table(layout.digest, (0, 0), (low, high), (1, 1), (0, 0), (0, half), (half, half))
    content: dict[str, Json] = {"algorithm": "xxh3", "values": {}, "metrics": {}, "created": 0.0}
    thrice = replace(table, tensors=(0,) * 3, boxes=(low,) * 3, num_chunks=(1,) * 3, packs=(0,) * 3, nbytes=(half,) * 3)
    for told, problem in [
        (table, None),
        (replace(table, offsets=(0, CAPACITY)), "lies outside of the packs"),
        (replace(table, offsets=(0, 2**40)), "lies outside of the packs"),
        (replace(thrice, offsets=(0, 0, 0)), "chunks of pack 0 are larger together than it is"),
    ]:
        snapshot = encode("snapshot", {**content, "digests": "0" * 32 * len(told.nbytes)})
        documents = {"layout": layout.encoded, "table": told.encoded.encode(), "snapshot": snapshot}
        slot.write_header(replace(HEADER, body_nbytes=CAPACITY, documents=slot.write_documents(CAPACITY, documents)))
        with contextlib.nullcontext() if problem is None else pytest.raises(FormatError, match=problem):
            assert SnapshotReader().read(slot, slot.read_header()).table == told


# -- content


def test_what_one_writes_another_reads(slot: Slot) -> None:
    body = np.random.default_rng(0).bytes(CAPACITY)
    header = sealed(slot, body)
    program = (
        "import sys; from pathlib import Path; from ckptlib.slots.slot import Slot\n"
        "slot = Slot.open(Path(sys.argv[1])); header = slot.read_header()\n"
        "out = sys.stdout.buffer; out.write(bytes(slot.body[:header.body_nbytes]))\n"
        "for name in ('layout', 'table', 'snapshot'): out.write(slot.read_document(header, name))\n"
    )
    found = subprocess.run([sys.executable, "-c", program, str(slot.path)], capture_output=True, check=True).stdout
    assert found == body + b"".join(DOCUMENTS.values())
    assert slot.read_header() == header
    assert slot.read_header().ready


def test_a_slot_is_private_whole_pages_and_has_room(slot: Slot) -> None:
    status = slot.path.stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == PAGE_BYTES + CAPACITY <= status.st_blocks * 512
    assert slot.path.name.startswith("ckptlib-")
    assert slot.path.suffix == SUFFIX
    assert slot.capacity == CAPACITY == len(slot.body)
    slot.prefault()
    assert slot.address() == np.frombuffer(slot.body, np.uint8).__array_interface__["data"][0]
    assert slot.address() % PAGE_BYTES == 0


def test_a_new_slot_has_no_header(slot: Slot) -> None:
    with pytest.raises(FormatError, match="not a document"):
        slot.read_header()


def test_documents_may_grow_and_shrink_from_save_to_save(slot: Slot) -> None:
    for scale in (1, 50, 2):
        documents = {name: data * scale for name, data in DOCUMENTS.items()}
        places = slot.write_documents(100, documents)
        header = replace(HEADER, documents=places)
        assert {name: slot.read_document(header, name) for name in documents} == documents
    with pytest.raises(FormatError, match="holds no values"):
        slot.read_document(header, "values")


def test_damage_to_a_document_is_found(slot: Slot) -> None:
    header = sealed(slot)
    offset, nbytes, digest = header.documents["table"]
    for at in range(offset, offset + nbytes, 499):
        with slot.path.open("r+b") as file:  # before the lock is asked for: closing this drops it
            file.seek(at)
            file.write(b"?")
        with pytest.raises(CorruptData, match=r"table at \["):
            slot.read_document(header, "table")
        with slot.path.open("r+b") as file:
            file.seek(at)
            file.write(b"t")
    assert slot.read_document(header, "table") == DOCUMENTS["table"]
    for place in ((offset, nbytes - 1, digest), (offset + 1, nbytes, digest), (offset, nbytes, "0" * 32)):
        with pytest.raises(CorruptData):
            slot.read_document(replace(header, documents={"table": place}), "table")


def test_absurd_lengths_take_no_memory(slot: Slot) -> None:
    header = sealed(slot)
    for place in ((PAGE_BYTES, 2**40 - 1, "0" * 32), (2**62, 1, "0" * 32), (2**70, 1, "0" * 32)):
        with pytest.raises(CorruptData, match="past the end"):
            slot.read_document(replace(header, documents={"table": place}), "table")
    slot.write_header(replace(header, body_nbytes=CAPACITY + 1))
    with pytest.raises(FormatError, match="a body of"):
        slot.read_header()


def test_documents_that_are_yet_to_come_have_their_places(slot: Slot) -> None:
    """As of a replica on its way; it is told as one that is being written, not as an empty slot."""
    coming = replace(HEADER, sequence=1, documents={"layout": (slot.end, 100, "0" * 32)})
    slot.write_header(coming)
    assert slot.read_header() == coming
    slot.write_header(replace(coming, sequence=2))
    with pytest.raises(FormatError, match="documents extend to byte"):
        slot.read_header()


def test_a_truncated_slot_is_found(slot: Slot) -> None:
    header = sealed(slot)
    for length in (PAGE_BYTES + CAPACITY, PAGE_BYTES + 1, PAGE_BYTES, 100, 0):
        os.truncate(slot.path, length)
        with pytest.raises((CorruptData, FormatError)):
            slot.read_document(header, "table")
        if length < PAGE_BYTES:
            with pytest.raises(CkptError):
                Slot.open(slot.path)
    with pytest.raises((CorruptData, FormatError)):
        slot.read_header()


def test_what_is_not_a_slot_of_this_user_is_not_opened(slot: Slot, tmp_path: Path) -> None:
    link = tmp_path / f"link{SUFFIX}"
    link.symlink_to(slot.path)
    (tmp_path / "short").write_bytes(b"x")
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"x" * PAGE_BYTES)
    if os.geteuid() == 0:
        os.chown(foreign, 12345, 12345)
    else:
        foreign.write_bytes(b"")
    os.mkfifo(tmp_path / "fifo")
    writable = tmp_path / "writable"
    writable.write_bytes(b"x" * PAGE_BYTES)
    writable.chmod(0o620)
    (tmp_path / "two names").write_bytes(b"x" * PAGE_BYTES)
    (tmp_path / "two names").chmod(0o600)
    os.link(tmp_path / "two names", tmp_path / "second")
    some = [tmp_path / name for name in ("absent", "short", "fifo", "second")]
    for path in (link, tmp_path, foreign, writable, *some):
        with pytest.raises(FormatError):
            Slot.open(path)


def test_a_slot_that_cannot_be_mapped_is_named_and_let_go(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a restore goes on with the other copies: it looks into every slot of its host."""
    num_open = len(os.listdir("/proc/self/fd"))
    for error in (OSError(errno.ENOMEM, "Cannot allocate memory"), ValueError("mmap length is greater than file size")):

        def fail(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr("ckptlib.slots.slot.mmap.mmap", fail)
        with pytest.raises(FormatError, match=rf"{slot.path}: cannot be mapped as a slot: .*{error.args[-1]}"):
            Slot.open(slot.path)
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) <= num_open
    Slot.open(slot.path).close()


def test_what_the_disk_of_a_slot_does_not_give_is_damage(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that another copy is tried, as for any other damage."""

    def fail(*arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CorruptData, match="cannot be read: Input/output error"):
        slot.read_header()


def test_views_of_a_closed_slot_stay_readable(slot: Slot) -> None:
    sealed(slot, b"abc")
    view = slot.body[:3]
    slot.close()
    slot.unlink()
    slot.unlink()
    assert bytes(view) == b"abc"
    assert not slot.path.exists()


# -- room


def test_no_room_where_there_is_no_directory(tmp_path: Path) -> None:
    with pytest.raises(NoRoom, match="cannot make a slot"):
        Slot.create(tmp_path / "absent", "ckptlib", CAPACITY)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "small", 1 << 20) as mount:
        yield mount


@pytest.mark.root
def test_no_room_on_a_full_tmpfs_is_an_error_and_leaves_nothing(small_tmpfs: Path) -> None:
    with pytest.raises(NoRoom, match=r"no room for a slot of 2,\d+,\d+ bytes .*\(ckptlib slots --clean\).*arena="):
        Slot.create(small_tmpfs, "ckptlib", 2 << 20)
    assert list(small_tmpfs.iterdir()) == []
    slot = Slot.create(small_tmpfs, "ckptlib", 512 << 10)
    with pytest.raises(NoRoom, match="no room for 1,048,576 bytes of table"):
        slot.write_documents(512 << 10, {"layout": b"x", "table": b"x" * (1 << 20)})
    slot.close()


def test_a_limit_on_the_size_of_files_is_told_as_that(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (CAPACITY, limits[1]))
    try:
        with pytest.raises(NoRoom, match=r"takes no slot of 20,480 bytes: File too large; raise .*\(ulimit -f\)"):
            Slot.create(tmp_path, "ckptlib", CAPACITY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


# -- locks, between processes

HOLDER = """
import sys
from pathlib import Path
from ckptlib.slots.slot import Slot
slot = Slot.open(Path(sys.argv[1]))
for line in sys.stdin:
    print(getattr(slot, line.strip())(), flush=True)
"""


class Holder:
    """Another process that has the slot open and does as it is told."""

    def __init__(self, slot: Slot) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(slot.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.tell("unlock") == "None", "it is up"

    def tell(self, method: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(method + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        """By SIGKILL; a second time does nothing."""
        with self._process:  # closes the pipes and waits
            self._process.kill()


@contextmanager
def holding(slot: Slot) -> Iterator[Holder]:
    holder = Holder(slot)
    try:
        yield holder
    finally:
        holder.kill()


def test_a_reader_keeps_the_writer_out_until_it_is_done(slot: Slot) -> None:
    with holding(slot) as holder:
        assert holder.tell("read_lock") == "True"
        assert not slot.try_write_lock()
        assert slot.read_lock(), "readers do not mind each other"
        slot.unlock()
        assert holder.tell("unlock") == "None"
        assert slot.try_write_lock()
        assert holder.tell("read_lock") == "False"
        slot.unlock()
        assert holder.tell("read_lock") == "True"


def test_a_system_without_a_lock_to_give_refuses_and_raises_nothing(
    slot: Slot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart only looks at the slots of the job before; an error on this rank alone would leave the others."""
    assert slot.read_lock()

    def refuse(*given: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as without:
        without.setattr(fcntl, "lockf", refuse)
        assert not slot.try_write_lock()
        assert not slot.abandoned()
        slot.unlock()
        slot.abandon()
        with pytest.raises(NoRoom, match=os.strerror(errno.ENOLCK)):
            Slot.create(tmp_path, "another", CAPACITY)
        with pytest.raises(FormatError, match=os.strerror(errno.ENOLCK)):
            Slot.open(slot.path)
    assert [path.name for path in tmp_path.iterdir()] == [slot.path.name]
    assert slot.try_write_lock()


def test_locks_vanish_with_their_process(slot: Slot) -> None:
    with holding(slot) as holder:
        assert holder.tell("read_lock") == "True"
        assert not slot.try_write_lock()
        assert not slot.abandoned()
        holder.kill()
        assert slot.try_write_lock()
        assert slot.abandoned()


def test_a_slot_is_abandoned_when_nobody_else_has_it_open(slot: Slot) -> None:
    with holding(slot) as first:
        assert first.tell("abandoned") == "False", "its maker lives"
        with holding(slot) as second:
            slot.close()
            assert second.tell("abandoned") == "False", "the other one has it open"
        assert first.tell("abandoned") == "True"
        with holding(slot) as third:
            assert first.tell("abandoned") == "False"
            assert third.tell("abandoned") == "False"


def test_a_forked_child_holds_nothing(slot: Slot) -> None:
    """Data loaders fork; one that outlives its trainer must not keep the slot."""
    program = (
        "import os, sys, time; from pathlib import Path; from ckptlib.slots.slot import Slot\n"
        "slot = Slot.open(Path(sys.argv[1])); assert slot.read_lock()\n"
        "child = os.fork()\n"
        "if child: print(child, flush=True); os._exit(0)\n"
        "time.sleep(60)\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", program, str(slot.path)], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    child = int(trainer.stdout.readline())
    try:
        with trainer:
            assert trainer.wait() == 0
        os.kill(child, 0)
        assert slot.try_write_lock()
        assert slot.abandoned()
    finally:
        os.kill(child, signal.SIGKILL)
