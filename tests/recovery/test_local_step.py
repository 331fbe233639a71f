"""Which steps the local disks of several hosts hold together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from support import make_generation, make_root, put_parts
from typing_extensions import override

from ckptlib.catalog.catalog import Catalog
from ckptlib.errors import CorruptData, FormatError, NotBrought, ObjectUnreadable
from ckptlib.format.check import check_of
from ckptlib.format.keys import SaveId
from ckptlib.ranks.group import SoloGroup
from ckptlib.recovery.local_share import LocalShare, RemoteShare
from ckptlib.recovery.local_step import LOOKED_AT, OnDisks, look, moves, newest, on_hosts, parse_saves, saves_on
from ckptlib.recovery.remote_slots import RemoteBytes
from ckptlib.stores.local import LocalStore
from ckptlib.stores.testing import FaultStore, flip_bit, write_plan

PATIENCE = timedelta(seconds=60)


class Disks:
    """Of so many hosts with a rank each; every part and its packs lie on the disk of its rank."""

    def __init__(self, directory: Path, num: int) -> None:
        self.paths = [directory / f"disk-{rank}" for rank in range(num)]
        self.disks = [make_root(LocalStore(str(path))) for path in self.paths]
        self.generation = make_generation(self.disks[0])

    def save(self, step: int, **told: Sequence[object]) -> SaveId:
        """`told`: further fields of the parts, by rank."""
        num = len(self.disks)
        for rank, disk in enumerate(self.disks):
            fields = {name: values[rank] for name, values in told.items()}
            save, _ = put_parts(disk, self.generation, step, {"w": np.arange(64 * num) + step}, num, **fields)
            for other in range(num):
                if other != rank:
                    self.lose(rank, step, other)
        return save

    def lose(self, disk: int, step: int, rank: int) -> None:
        for path in self.paths[disk].glob(f"pa*s/{step:012d}-*/{rank:06d}-*"):
            path.unlink()

    def told(self) -> list[bytes]:
        saves = parse_saves([saves_on(disk) for disk in self.disks])
        return [look(disk, saves) for disk in self.disks]


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    return Disks(tmp_path, 3)


def test_a_step_is_whole_when_the_disks_together_have_all_parts(disks: Disks) -> None:
    saves = [disks.save(step) for step in (1, 2)]
    found = on_hosts(disks.told()).whole
    assert sorted(found) == saves
    assert found[saves[0]].seen == (frozenset({0}), frozenset({1}), frozenset({2}))
    assert [name.rank for name in found[saves[0]].parts] == [0, 1, 2]
    disks.lose(1, 2, 1)
    assert sorted(on_hosts(disks.told()).whole) == saves[:1]
    assert on_hosts(disks.told()).in_part == {saves[1]: [1]}
    assert on_hosts(disks.told()[:2]) == ({}, {saves[0]: [2], saves[1]: [1, 2]}), "a host is gone"


@pytest.mark.parametrize("digests", [[b"same", b"same"], [b"one", b"two"]], ids=["alike", "unlike"])
def test_a_step_whose_replicas_differ_is_none(tmp_path: Path, digests: list[bytes]) -> None:
    """Its commit is refused, and so is a restart from the disks, where no commit is asked for."""
    disks = Disks(tmp_path, 2)
    save = disks.save(1, check=[check_of(7, rank, {(0, 1): digest}) for rank, digest in enumerate(digests)])
    assert [*on_hosts(disks.told()).whole] == [save] * (digests[0] == digests[1])


@pytest.mark.parametrize("size", [2, 4])
def test_a_step_of_which_disks_tell_different_numbers_of_ranks_is_none(disks: Disks, size: int) -> None:
    save = disks.save(1)
    told = [json.loads(data) for data in disks.told()]
    assert [rows[str(save)][0] for rows in told] == [3, 3, 3]
    told[2][str(save)][0] = size
    assert on_hosts([json.dumps(rows).encode() for rows in told]).whole == {}


def test_ranks_that_share_a_host_see_the_same(disks: Disks) -> None:
    save = disks.save(1)
    first, second, third = disks.told()
    assert on_hosts([first, second, third, third]).whole[save].seen == tuple(frozenset({n}) for n in (0, 1, 2, 2))


def test_a_damaged_part_makes_its_step_none(disks: Disks, caplog: pytest.LogCaptureFixture) -> None:
    disks.save(1)
    (part,) = disks.paths[1].glob("parts/*/*")
    flip_bit(part, part.stat().st_size // 2)
    assert on_hosts(disks.told()).whole == {}
    assert "step 1 on the local disk is not used" in caplog.text


def test_only_what_may_be_wanted_is_looked_at(tmp_path: Path) -> None:
    disks = Disks(tmp_path, 1)
    saves = [disks.save(step) for step in range(1, LOOKED_AT + 4)]
    found = parse_saves([saves_on(disks.disks[0])])
    assert sorted(found) == saves
    in_store_only, left_behind = SaveId(99, disks.generation), saves[-1]
    visible = [save for save in [*saves, in_store_only] if save != left_behind]
    assert newest(visible, found, None) == newest(visible, found, "latest") == saves[-LOOKED_AT - 1 : -1]
    for step in (1, "1", str(saves[0])):
        assert newest(visible, found, step) == saves[:1], "an old one is asked for"
    assert newest(visible, found, left_behind.step) == newest(visible, found, 99) == []
    assert sorted(on_hosts([look(disks.disks[0], saves[:2])]).whole) == saves[:2]


def test_reading_what_is_here_and_what_is_not(tmp_path: Path) -> None:
    alone = Disks(tmp_path / "alone", 1)
    save = alone.save(1)
    source = OnDisks(SoloGroup(), None, alone.disks[0], on_hosts(alone.told()).whole[save], PATIENCE)
    assert (source.world_size, source.in_memory, source.near({0}), source.near({0, 7})) == (1, False, (0,), ())
    part = source.part(0)
    buffer = memoryview(bytearray(part.table.nbytes[0]))
    source.read_into(part.packs[0].key, part.table.offsets[0], buffer)
    assert np.frombuffer(buffer, np.int64).tolist() == (np.arange(64) + 1).tolist()
    source.bring({0})
    with pytest.raises(NotBrought):
        source.part(7)
    source.close()


def test_what_a_rank_lacks_is_read_out_by_those_that_have_it() -> None:
    """By each of them as much; nobody is sent what is on its own host."""
    seen = [frozenset({0, 1}), frozenset({0, 1}), frozenset({2}), frozenset[int]()]
    assert moves(seen, [{0, 1}, {0}, {2}, {2}]) == [(2, 2, 3)]
    assert moves(seen, [{0, 2}, set(), {0, 1, 2}, {0, 1}]) == [(2, 2, 0), (0, 0, 2), (1, 1, 2), (0, 0, 3), (1, 1, 3)]


def test_a_share_is_its_part_and_its_packs(tmp_path: Path) -> None:
    """And nothing else is read out, whatever a rank asks for."""
    alone = Disks(tmp_path, 1)
    (name,) = alone.disks[0].parts(alone.save(1))[0]
    share = LocalShare(alone.disks[0], name)
    (pack,) = (alone.disks[0].part(name)).packs
    document, packed = alone.disks[0].store.get(name.key), alone.disks[0].store.get(pack.key)
    assert bytes(share.view(0, 8 + len(document))) == len(document).to_bytes(8, "little") + document
    assert bytes(share.view(2**44 + 5, len(packed) - 5)) == packed[5:]
    for at, nbytes in ((0, 9 + len(document)), (2 * 2**44, 1), (2**64 - 1, 1)):
        assert len(share.view(at, nbytes)) < nbytes or at + nbytes > share.end
    for at, nbytes in ((2**44, len(packed) + 1), (2 * 2**44 - 1, 2)):
        with pytest.raises(FormatError, match="it is truncated"):
            share.view(at, nbytes)


class Lies(RemoteBytes):
    def __init__(self) -> None:
        self.server = 1

    @override
    def read_at(self, at: int, buffer: memoryview) -> None:
        buffer[:] = b"\xff" * len(buffer)


def test_no_memory_is_taken_for_what_is_too_large_to_be_a_part() -> None:
    with pytest.raises(FormatError, match="rank 1 offers a part of"):
        RemoteShare(Lies()).part()


def test_a_disk_that_fails_is_a_copy_that_cannot_be_read(tmp_path: Path) -> None:
    alone = Disks(tmp_path, 1)
    save = alone.save(1)
    plan = tmp_path / "plan.json"
    disk = Catalog(FaultStore(LocalStore(str(alone.paths[0])), str(plan)))
    source = OnDisks(SoloGroup(), None, disk, on_hosts(alone.told()).whole[save], PATIENCE)
    write_plan(plan, [{"op": "get_into", "action": "error"}, {"op": "get", "action": "error"}])
    (pack,) = alone.paths[0].glob("packs/*/*")
    with pytest.raises(ObjectUnreadable):
        source.read_into(str(pack.relative_to(alone.paths[0])), 0, memoryview(bytearray(8)))
    with pytest.raises(ObjectUnreadable):
        source.part(0)
    plan.unlink()
    (layout,) = alone.paths[0].glob("layouts/*")
    flip_bit(layout, 300)
    with pytest.raises(CorruptData):
        OnDisks(SoloGroup(), None, Catalog(disk.store), on_hosts(alone.told()).whole[save], PATIENCE)
