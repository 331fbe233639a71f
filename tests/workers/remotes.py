"""Slots, and shares on disks, that are read from another rank: whole, damaged and by liars. `three_ranks` runs these.

Rank 1 reads what rank 0 has where a case does not say otherwise.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).parent.parent))

from support import ROOT_ID, layout_of, make_root, put_part, shards_of
from workers.no_threads import NO_STACK
from workers.rank_slots import CAPACITY, STATE, content_of, flip, seal, slot_of
from workers.three_ranks import PATIENCE, rank, run_cases, world

from ckptlib.errors import AgreementFailed, CorruptData, FormatError, NotBrought, ObjectNotFound, ObjectUnreadable
from ckptlib.format.body_layout import body_nbytes, lay_out
from ckptlib.format.box import Box
from ckptlib.format.digests import XXH3
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.loading import own_values
from ckptlib.loading.reader import Reader
from ckptlib.pages import PAGE_BYTES
from ckptlib.ranks.link import CHUNK_BYTES, Link
from ckptlib.ranks.meeting import group_of
from ckptlib.ranks.together import together
from ckptlib.reading.reader import Want
from ckptlib.reading.source import own_rank
from ckptlib.recovery import remote_slots as remote_module
from ckptlib.recovery.inventory import Found, Inventory, SnapshotId, Transfer, describe, look
from ckptlib.recovery.local_share import RemoteShare
from ckptlib.recovery.local_step import OnDisks, on_hosts
from ckptlib.recovery.local_step import look as look_at_disk
from ckptlib.recovery.memory_source import InMemory
from ckptlib.recovery.remote_slots import STREAMS, Exchange, RemoteSlot, link_among
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.host import boot_id, memory_of
from ckptlib.slots.slot import Slot
from ckptlib.slots.snapshot import SnapshotReader, check_body
from ckptlib.staging.pair import CopySource
from ckptlib.staging.stager import Content, Stager
from ckptlib.stores.local import LocalStore

PIECE_BYTES = 1 << 20
"""The most that one request asks for, here: a small body takes several."""

DONE = 2**64 - 1
REQUEST, VERDICT = struct.Struct("<QQQQ"), struct.Struct("<?I507s")
"""As remote.py describes them."""


def shared(slot: Slot) -> Found:
    """What rank 0 has found."""
    mine = json.dumps(look([slot], ROOT_ID)[0].to_json() if rank() == 0 else None)
    return Found.from_json(json.loads(group_of(None, PATIENCE).gather(mine.encode())[0]))


@contextmanager
def exchanging(
    slot: Slot, *moves: tuple[int, int], link: type[Link] = Link
) -> Iterator[tuple[Exchange[Found], list[RemoteSlot]]]:
    """`moves`: (sender, receiver), all of the slot of rank 0. What this rank receives of them."""
    found = shared(slot)
    exchange = Exchange(link(world(), PATIENCE), PATIENCE, open_here)
    slots = slots_of(exchange, *(Transfer(found, sender, receiver) for sender, receiver in moves))
    dist.barrier()
    yield exchange, slots
    dist.barrier()
    exchange.close(together=True)
    assert not serving()


def slots_of(exchange: Exchange[Found], *moves: Transfer) -> list[RemoteSlot]:
    """Those that are read out to this rank."""
    return [RemoteSlot(there, found) for found, there in exchange.add(moves).items()]


def open_here(found: Found) -> Slot:
    if found.path.endswith("-huge"):
        raise MemoryError("no memory is left")
    return Slot.open(Path(found.path))


def serving() -> int:
    """So many threads of this rank read out to others."""
    return sum(thread.name == "ckptlib-serve" for thread in threading.enumerate())


def as_it_is(directory: Path) -> None:
    """Header, documents and body, by two ranks with several threads each; and no more than was asked for."""
    with slot_of(directory, CAPACITY) as slot:
        header = seal(slot, 1, 0)
        if rank() == 0:
            (directory / "content").write_bytes(content_of(slot, header))
        with exchanging(slot, (0, 1), (0, 2)) as (exchange, slots):
            assert len(slots) == (rank() > 0)
            assert serving() == (STREAMS if rank() == 0 else 0), "for however many ranks"
            expected = (directory / "content").read_bytes()
            for there in slots:
                header = there.read_header()
                assert (header.rank, header.save.step) == (0, 1)
                snapshot = SnapshotReader().read(there, header)
                documents = sum(nbytes for _, nbytes, _ in header.documents.values())
                assert exchange.nbytes_received == PAGE_BYTES + documents
                check_body(there, snapshot)
                before = exchange.nbytes_received
                end = PAGE_BYTES + header.body_nbytes
                ranges = [(at, min(300_001, end - at)) for at in range(0, end, 77_777)]
                with ThreadPoolExecutor(2 * STREAMS) as executor:
                    pieces = list(executor.map(lambda place, there=there: bytes(there.view(*place)), ranges))
                assert pieces == [expected[at : at + nbytes] for at, nbytes in ranges]
                assert exchange.nbytes_received == before + sum(nbytes for _, nbytes in ranges)
                assert header.body_nbytes > PIECE_BYTES, "more than one request takes"
                assert there.view(0, end) == expected[:end]


def what_is_not_there(directory: Path) -> None:
    """Behind the end, cut since it was opened, and a slot that cannot be opened: said to who asks, who goes on."""
    with slot_of(directory, CAPACITY) as slot:
        seal(slot, 1, 0)
        found = shared(slot)
        exchange = Exchange(Link(world(), PATIENCE), PATIENCE, lru_cache(open_here))
        paths = found.path, found.path + "x", found.path + "-huge"
        slots = slots_of(exchange, *(Transfer(replace(found, path=path), 0, 1) for path in paths))
        dist.barrier()
        if rank() == 1:
            there, gone, huge = slots
            for at, nbytes in ((2**40, 1), (PAGE_BYTES + CAPACITY, 2 * PIECE_BYTES)):
                with pytest.raises(CorruptData, match=r"rank 0 says: .*is past its end"):
                    there.view(at, nbytes)
            check_body(there, SnapshotReader().read(there, there.read_header()))
            os.truncate(found.path, PAGE_BYTES + 1000)
            with pytest.raises(CorruptData, match=r"rank 0 says: .*is past its end, 5,096"):
                there.view(5000, 2 * PAGE_BYTES)
            there.view(5000, 96)
            with pytest.raises(FormatError, match=r"rank 0 says: .*cannot be opened as a slot"):
                gone.read_header()
            with pytest.raises(ObjectUnreadable, match="rank 0 says: no memory is left"):
                huge.read_header()
            there.view(5000, 96)
        exchange.close(together=True)
        dist.barrier()


def damage(directory: Path) -> None:
    """One bit of the body, then one of a document."""
    with slot_of(directory, CAPACITY) as slot:
        header = seal(slot, 1, 0)
        flip(slot, PAGE_BYTES + STATE["w"].nbytes - 1)
        with exchanging(slot, (0, 1)) as (_, slots):
            for there in slots:
                snapshot = SnapshotReader().read(there, there.read_header())
                with pytest.raises(CorruptData, match=r"on rank 0: w\[.*\] at \[\d+:\+\d+\] changed in memory"):
                    check_body(there, snapshot)
            dist.barrier()
            flip(slot, sum(header.documents["table"][:2]) - 1)
            dist.barrier()
            for there in slots:
                with pytest.raises(CorruptData, match=r"on rank 0: table at .* does not match its digest"):
                    SnapshotReader().read(there, there.read_header())


def liars_who_ask(directory: Path) -> None:
    """They get zeros and are told why, or nothing at all; and nobody else is the worse for it."""
    with slot_of(directory, CAPACITY) as slot:
        seal(slot, 1, 0)
        found = shared(slot)
        if rank() == 1:
            link = Link(world(), PATIENCE)
            dist.barrier()
            for request, why in {
                (1, PAGE_BYTES, 8): b"rank 1 asks for offer 1, of 1",
                (DONE - 1, PAGE_BYTES, 8): b"asks for offer",
                (0, 2**64 - 1, 1): b"is past its end",
                (0, 2**63, PIECE_BYTES): b"is past its end",
                (0, PAGE_BYTES + CAPACITY, 1): b"is past its end",
            }.items():
                good, data, text = _ask(link, *request)
                assert not good
                assert data == bytes(len(data))
                assert why in text, (request, text)
            assert _ask(link, 0, 0, 20)[:2] == (True, slot.view(0, 20)), "all ranks have the same"
            for stream, nbytes in ((0, 2**63), (1, PIECE_BYTES + 1), (2, 0), (STREAMS, 8), (2**64 - 1, 8)):
                link.begin_request(0, memoryview(REQUEST.pack(0, 0, nbytes, stream)))()
            assert _ask(link, 0, 0, 20)[0]
            dist.barrier()
            for _ in range(STREAMS):
                link.begin_request(0, memoryview(REQUEST.pack(DONE, 0, 0, 0)))()
            dist.barrier()
            link.close()
            return
        exchange = Exchange(Link(world(), PATIENCE), PATIENCE, open_here)
        slots = slots_of(exchange, Transfer(found, 0, 1), Transfer(found, 0, 2))
        dist.barrier()
        for there in slots:
            check_body(there, SnapshotReader().read(there, there.read_header()))
        dist.barrier()
        exchange.close(together=True)
        dist.barrier()


def _ask(link: Link, number: int, at: int, nbytes: int) -> tuple[bool, bytes, bytes]:
    data, verdict = bytearray(nbytes), bytearray(VERDICT.size)
    request = memoryview(REQUEST.pack(number, at, nbytes, STREAMS - 1))
    link.ask(0, request, [memoryview(data), memoryview(verdict)], STREAMS - 1)
    good, length, text = VERDICT.unpack(verdict)
    return good, bytes(data), text[:length]


class Lies(Link):
    """Sends other bytes than were asked for, and calls them good."""

    @override
    def answer(self, to: int, answer: Sequence[memoryview], tag: int) -> None:
        data = bytearray(answer[0])
        data[-1] ^= 1
        super().answer(to, [memoryview(data), answer[1]], tag)


def liars_who_serve(directory: Path) -> None:
    """Nothing is believed: not a header, not a document, not a chunk."""
    with slot_of(directory, CAPACITY) as slot:
        header = seal(slot, 1, 0)
        snapshot = SnapshotReader().read(slot, header)
        with exchanging(slot, (0, 1), link=Lies if rank() == 0 else Link) as (_, slots):
            for there in slots:
                with pytest.raises((CorruptData, FormatError), match="on rank 0"):
                    there.read_header()
                for name in header.documents:
                    with pytest.raises(CorruptData, match=rf"on rank 0: {name} at .* does not match"):
                        there.read_document(header, name)
                with pytest.raises(CorruptData, match=r"on rank 0: .* changed in memory"):
                    check_body(there, snapshot)


def share(slot: Slot, step: int, of: int, num_ranks: int, tensors: dict[str, np.ndarray]) -> None:
    """Seals what a rank of a larger job holds."""
    layout = layout_of(tensors, num_ranks)
    shards = shards_of(layout, of)
    table = lay_out(layout, shards)
    header = SlotHeader(
        root_id=ROOT_ID,
        save=SaveId(step, GenerationId(1, "00000001")),
        rank=of,
        world_size=num_ranks,
        number=step,
        sequence=2 * step,
        body_nbytes=body_nbytes(table),
        documents={},
    )
    names = [layout.tensors[t].name for t in table.tensors]
    pieces = [torch.from_numpy(tensors[n][box.slices()]) for n, box in zip(names, table.boxes, strict=True)]
    stager = Stager(lambda staging: None)
    content = Content(header, layout.encoded, table, {"step": step}, {}, 0.0, XXH3)
    sources = [CopySource(n, piece, False) for n, piece in zip(names, pieces, strict=True)]
    staging = stager.begin(slot, content)
    stager.copy(staging, sources)
    staging.go()
    staging.wait_sealed(60)
    stager.close()


def only_what_is_needed(directory: Path) -> None:
    """Two saved shares on one host, and three ranks that want a quarter each: what they receive is what they lack."""
    tensors = {"w": np.random.default_rng(1).integers(0, 2**32, (96, 64, 1024), np.uint32)}
    here = directory / f"host{rank()}"
    here.mkdir()
    half = tensors["w"].nbytes // 2
    with slot_of(here, half) as first, slot_of(here, half) as second:
        if rank() == 0:
            share(first, 1, 0, 2, tensors)
            share(second, 1, 1, 2, tensors)
        group = group_of(None, PATIENCE)
        inventory = Inventory(group.gather(describe(look([first, second], ROOT_ID), [memory_of(here)], boot_id(), [0])))
        source = InMemory(group, world(), inventory, inventory.whole()[0], PATIENCE)
        box = Box((24 * rank(), 0, 0), (24, 64, 1024))
        found = torch.zeros(box.shape, dtype=torch.uint32)
        want = Want("w", ((box, found),))
        source.bring({own_rank(rank(), 2)})
        reader = Reader(source, rank())
        source.bring(reader.ranks_for(want))
        reader.read([want], lambda nbytes: None)
        assert np.array_equal(found.numpy(), tensors["w"][box.slices()])
        lacking = found.nbytes if rank() > 0 else 0
        assert lacking <= source.nbytes_received <= lacking + 8 * PAGE_BYTES, "documents are small here"
        assert source.num_received == (0, 2, 2)[rank()], "with the one that its values are from"
        dist.barrier()
        source.close()


def another_copy(directory: Path) -> None:
    """Rank 0 lacks its share, and the others have it. The one that it is read from first is damaged."""
    here, group = directory / f"memory{rank()}", group_of(None, PATIENCE)
    here.mkdir()
    with slot_of(here, CAPACITY) as slot:
        if rank() > 0:
            seal(slot, 1, 0)
        inventory = Inventory(group.gather(describe(look([slot], ROOT_ID), [memory_of(here)], boot_id(), [0])))
        snapshot, needs = SnapshotId(SaveId(1, GenerationId(1, "00000001")), 1, 3), {0} if rank() == 0 else set[int]()
        (first,) = inventory.moves(snapshot, [[0], [], []])
        if rank() == first.sender:
            flip(slot, PAGE_BYTES + 1000)
        dist.barrier()
        source = InMemory(group, world(), inventory, snapshot, PATIENCE)
        source.bring(needs)
        for _ in needs:
            assert source.part(0).packs[0].key == first.found.path
        assert source.drop_damaged(), "on all ranks"
        source.bring(needs)
        for _ in needs:
            assert source.part(0).packs[0].key != first.found.path
        assert not source.drop_damaged()
        source.close()


def no_thread_to_serve_with(directory: Path) -> None:
    """On rank 0, which has what the others lack: all ranks are told, and the next candidate is tried."""
    here, group = directory / f"memory{rank()}", group_of(None, PATIENCE)
    here.mkdir()
    with slot_of(here, CAPACITY) as slot:
        if rank() < 2:
            seal(slot, 1, rank())
        inventory = Inventory(group.gather(describe(look([slot], ROOT_ID), [memory_of(here)], boot_id(), [0])))
        snapshot = SnapshotId(SaveId(1, GenerationId(1, "00000001")), 1, 3)
        for has_one_later in (False, True):
            source = InMemory(group, world(), inventory, snapshot, PATIENCE)
            source.bring({1} if rank() == 2 else set())
            before = threading.stack_size(NO_STACK if rank() == 0 else 0)
            with pytest.raises(ObjectUnreadable, match=r"rank 0 .*thread.* See ulimit -u"):
                source.bring({0} if rank() > 0 else set())
            threading.stack_size(before)
            if has_one_later:
                source.bring({0} if rank() > 0 else set())
                assert source.part(0).rank == 0
                dist.barrier()
            began = time.monotonic()
            source.close()
            assert time.monotonic() - began < PATIENCE.total_seconds() / 2
            assert not serving()


def long_restore(directory: Path) -> None:
    """It takes longer than the time-out: rank 1 has all that it needs, and rank 2 reads on by one stream."""
    with slot_of(directory, CAPACITY) as slot:
        seal(slot, 1, 0)
        found, timeout = shared(slot), timedelta(seconds=6)
        own = timeout if rank() == 0 else PATIENCE
        exchange = Exchange(Link(world(), own), own, lru_cache(open_here))
        slots = slots_of(exchange, Transfer(found, 0, 1), Transfer(found, 0, 2))
        dist.barrier()
        end = time.monotonic() + (1.3 * timeout.total_seconds() if rank() == 2 else 0.0)
        for there in slots:
            check_body(there, SnapshotReader().read(there, there.read_header()))
            while time.monotonic() < end:
                time.sleep(0.2)
                check_body(there, SnapshotReader().read(there, there.read_header()))
        dist.barrier()
        exchange.close(together=True)


def shares_on_disks(directory: Path) -> None:
    """Three disks with a share each, of a tensor that every rank wants whole. Then one pack is cut, and gone: all ranks
    raise what the one does that has the disk, and is asked once more or not accordingly."""
    tensors = {"w": np.random.default_rng(1).integers(0, 2**32, (99, 64, 1024), np.uint32)}
    disk, save = make_root(LocalStore(str(directory / f"disk{rank()}"))), SaveId(1, GenerationId(1, "00000001"))
    put_part(disk, save, rank(), layout_of(tensors, 3), tensors)
    group, found = group_of(None, PATIENCE), torch.zeros(tensors["w"].shape, dtype=torch.uint32)
    step = on_hosts(group.gather(look_at_disk(disk, [save]))).whole[save]

    def read() -> None:
        with closing(OnDisks(group, world(), disk, step, PATIENCE)) as source:
            source.bring({rank()})
            reader, want = Reader(source, rank()), Want("w", ((Box.whole(tuple(found.shape)), found),))
            assert reader.ranks_for(want) == {0, 1, 2}
            with pytest.raises(NotBrought):
                source.part((rank() + 1) % 3)
            source.bring({0, 1, 2})
            together(group, "reading", lambda: reader.read([want], lambda nbytes: None))

    read()
    assert np.array_equal(found.numpy(), tensors["w"])
    assert not serving()
    (pack,) = (directory / "disk2").glob("packs/*/*")
    for damage, kind in ((lambda: os.truncate(pack, 10_000), FormatError), (pack.unlink, ObjectNotFound)):
        dist.barrier()
        if rank() == 2:
            damage()
        dist.barrier()
        with pytest.raises(kind) as caught:
            read()
        assert rank() == 2 or "rank 2 says: " in str(caught.value)


class Hangs:
    where, end = "a disk", 1 << 45

    def __init__(self) -> None:
        self.asked, self.ended = threading.Event(), threading.Event()

    def view(self, at: int, nbytes: int) -> memoryview:
        self.asked.set()
        self.ended.wait(60)
        return memoryview(bytes(nbytes))


def disk_that_hangs(directory: Path) -> None:
    """Rank 0's, as it reads out. The other rank is told at its time-out what to do, and waits for no second one."""
    disk = Hangs()
    exchange = Exchange(Link(world(), PATIENCE), PATIENCE, lambda what: disk)
    exchange._link._timeout = timedelta(seconds=0.5) if rank() else PATIENCE  # to connect may take longer
    for there in exchange.add([("its share", 0, 1)]).values():
        with pytest.raises(AgreementFailed, match=r"within .* Rank 0 reads its local disk: .* without `local`"):
            RemoteShare(there).part()
        exchange._link._timeout, began = PATIENCE, time.monotonic()
        with pytest.raises(AgreementFailed, match="asking rank 0 failed"):
            there.read_at(0, memoryview(bytearray(8)))
        assert time.monotonic() - began < PATIENCE.total_seconds() / 2
    dist.barrier()
    disk.ended.set()
    exchange.close(together=False)


def leaves_alone(directory: Path) -> None:
    """Rank 0, in the middle of what it reads out: who waits for that is told at once."""
    disk = Hangs()
    exchange = Exchange(Link(world(), PATIENCE), PATIENCE, lambda what: disk)
    theirs, began = exchange.add([("its share", 0, 1)]), time.monotonic()
    if rank() == 0:
        assert disk.asked.wait(60)
        exchange.close(together=False)
    for there in theirs.values():
        with pytest.raises(AgreementFailed, match="asking rank 0 failed"):
            there.read_at(0, memoryview(bytearray(8)))
    assert time.monotonic() - began < PATIENCE.total_seconds() / 2
    dist.barrier()
    disk.ended.set()
    if rank() > 0:
        exchange.close(together=False)


def behind_bodies(directory: Path) -> None:
    """Rank 1's request stands behind what it sends to rank 0 when the connection closes: gloo does not tell who waits
    until it is sent."""
    asking = threading.Event()

    class Tells(Link):
        def _wait(self, *works: dist.Work) -> None:
            asking.set()
            super()._wait(*works)

    link, body, ready = Tells(world(), PATIENCE), memoryview(bytearray(CHUNK_BYTES)), memoryview(bytearray(1))
    bodies = list[Callable[[], None]]()
    if rank() == 0:
        bodies += [link.begin_recv(1, body, 0) for _ in range(16)]
        link.recv(1, ready, 1)
        time.sleep(0.05)  # until bodies are on their way
        threading.Thread(target=link.recv_request, args=(memoryview(bytearray(8)),), daemon=True).start()
    if rank() == 1:
        with ThreadPoolExecutor(1) as executor:
            asked = executor.submit(link.ask, 0, memoryview(bytearray(8)), [memoryview(bytearray(8))], 2)
            assert asking.wait(60)
            link.send(0, ready, 1)
            bodies += [link.begin_send(0, body, 0) for _ in range(16)]
            time.sleep(0.2)
            began = time.monotonic()
            link.cut()
            assert isinstance(asked.exception(), AgreementFailed)
            assert time.monotonic() - began < PATIENCE.total_seconds() / 2
    dist.barrier()
    bodies.clear()  # gloo uses them until here


def values_for_a_warning_alone(directory: Path) -> None:
    """Those of the last rank are compared with rank 0's where they are on its host, and sent from no other."""
    tensors = {"w": np.arange(24, dtype=np.int64)}
    save, group = SaveId(1, GenerationId(1, "00000001")), group_of(None, PATIENCE)
    for beside in (0, 1):  # rank 2 has a disk in common with this one
        path = directory / f"{beside}-{'together' if rank() in (beside, 2) else 'alone'}"
        disk = make_root(LocalStore(str(path)))
        put_part(disk, save, rank(), layout_of(tensors, 3), tensors, told={"values": {"place": rank()}})
        dist.barrier()
        step = on_hosts(group.gather(look_at_disk(disk, [save]))).whole[save]
        with closing(OnDisks(group, world(), disk, step, PATIENCE)) as source:
            reader = Reader(source, rank())
            assert own_values._last_values(group, source, reader) == ({} if beside or rank() else {"place": 2})
            with pytest.raises(NotBrought):
                source.part(2 if rank() == beside ^ 1 else beside ^ 1)
        dist.barrier()


def more_is_asked_for_later(directory: Path) -> None:
    """Ranks 0 and 1 share a disk. What rank 2 has from one of them, the other does not begin to read out as well."""
    tensors = {"w": np.arange(24, dtype=np.int64)}
    disk = make_root(LocalStore(str(directory / ("far" if rank() == 2 else "near"))))
    save, group = SaveId(1, GenerationId(1, "00000001")), group_of(None, PATIENCE)
    put_part(disk, save, rank(), layout_of(tensors, 3), tensors)
    dist.barrier()
    step = on_hosts(group.gather(look_at_disk(disk, [save]))).whole[save]
    with closing(OnDisks(group, world(), disk, step, PATIENCE)) as source:
        for needed in ({0}, {0, 1}, {0, 1, 2}):
            source.bring(needed if rank() == 2 else set())
        readable = [0, 1, 2] if rank() == 2 else [0, 1]
        assert [source.part(saved).rank for saved in readable] == readable
        assert serving() == (STREAMS if rank() == 0 else 0)
        dist.barrier()


class Dies(Link):
    """Killed in the middle of what it reads out."""

    @override
    def answer(self, to: int, answer: Sequence[memoryview], tag: int) -> None:
        super().answer(to, answer[:1], tag)
        os.kill(os.getpid(), signal.SIGKILL)


class Data:
    where, end = "data", PIECE_BYTES

    def view(self, at: int, nbytes: int) -> memoryview:
        return memoryview(bytes(nbytes))


def killed(directory: Path) -> None:
    """Rank 1 with requests that rank 2 has not come to; rank 2 in the middle of what it reads out: the last case.

    Then rank 0 is about to connect to both, as where they die just after all have agreed on that.
    """
    group = group_of(None, PATIENCE)
    first = Link(world(), PATIENCE) if rank() == 1 else Exchange(Link(world(), PATIENCE), PATIENCE, lambda what: Data())
    remote_module.DONE_WITHIN_S = 0.1
    last = Exchange((Dies if rank() == 2 else Link)(world(), PATIENCE), PATIENCE, lambda what: Data())
    if isinstance(first, Link):
        dist.barrier()
        request = memoryview(bytearray(REQUEST.pack(0, 0, 8, 0)))
        under_way = [first.begin_request(2, request) for _ in range(2 * STREAMS)]  # whose answers nobody takes
        assert under_way
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        theirs = [exchange.add([("its", 2, 1), ("ours", 2, 0), ("own", 0, 1)]) for exchange in (first, last)]
        dist.barrier()
        dist.barrier()
        if rank() == 2:
            signal.pause()
        with pytest.raises(RuntimeError):
            dist.recv(torch.zeros(1), 1)  # which is gone
        began = time.monotonic()
        for there in theirs:
            with ThreadPoolExecutor(2 * STREAMS) as executor:
                pieces = [memoryview(bytearray(PIECE_BYTES)) for _ in range(2 * STREAMS)]
                reads = [executor.submit(there["ours"].read_at, 0, piece) for piece in pieces]
            assert [type(read.exception()) for read in reads] == [AgreementFailed] * len(reads)
        assert time.monotonic() - began < PATIENCE.total_seconds() / 2, "as soon as rank 2 knows"
        began = time.monotonic()
        for exchange in (first, last):
            exchange.close(together=True)  # as where rank 1 has died since all agreed
        assert time.monotonic() - began < PATIENCE.total_seconds() / 2
        began, group.patience_s = time.monotonic(), 0.1
        with pytest.raises(AgreementFailed):
            link_among(group, world(), PATIENCE)
        assert time.monotonic() - began < PATIENCE.total_seconds() / 2


CASES = [
    as_it_is,
    what_is_not_there,
    damage,
    liars_who_ask,
    liars_who_serve,
    only_what_is_needed,
    another_copy,
    no_thread_to_serve_with,
    long_restore,
    shares_on_disks,
    more_is_asked_for_later,
    values_for_a_warning_alone,
    disk_that_hangs,  # whose threads are left
    leaves_alone,
    behind_bodies,  # a thread of which is left
    killed,
]


if __name__ == "__main__":
    remote_module.PIECE_BYTES = PIECE_BYTES
    run_cases(CASES)
