"""What a restart makes of its own host's memory, and what it says of steps that it cannot take.

Hosts that are lost are in tests/peers.
"""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from helpers.tmpfs import tmpfs
from helpers.writers import until
from rankthreads import run_ranks
from torch import nn

import ckptlib
from ckptlib.catalog.catalog import Catalog
from ckptlib.cli import app as cli
from ckptlib.errors import AgreementFailed, CheckpointNotFound, CorruptData, ObjectUnreadable, StateMismatch
from ckptlib.format.keys import SaveId
from ckptlib.pages import PAGE_BYTES
from ckptlib.ranks.group import Group
from ckptlib.recovery.candidates import Untried
from ckptlib.recovery.filling import _closed_together
from ckptlib.recovery.leftovers import await_writers
from ckptlib.recovery.memory_source import InMemory
from ckptlib.saving.session import Session
from ckptlib.slots import files
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.slot import Slot
from ckptlib.state import rng
from ckptlib.state.leaf import torch_dtype
from ckptlib.stores.local import LocalStore
from ckptlib.stores.testing import flip_bit, write_plan


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 2 MiB."""
    with tmpfs(tmp_path / "small", 2 << 20) as path:
        yield path


def checkpointer(root: Path, state: dict[str, object], arena: Path) -> ckptlib.Checkpointer:
    peers = ckptlib.Peers(copies=0, every=1, keep_for=timedelta(0))
    return ckptlib.Checkpointer(root, state, every=1000, peers=peers, arena=arena)


def test_a_writer_begins_when_the_restore_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its imports would compete with it for the cores."""
    weights = torch.arange(100_000, dtype=torch.float32)
    with checkpointer(tmp_path / "root", {"w": weights.clone()}, tmp_path) as ckpt:
        ckpt.save(3)
    monkeypatch.setattr("ckptlib.saving.memory.WRITER_WAITS_S", 600.0)
    found = torch.zeros_like(weights)
    with checkpointer(tmp_path / "root", {"w": found}, tmp_path) as ckpt:
        assert ckpt._session.writer.poll(1.0) == []
        assert ckpt.restore().step == 3
        assert ckpt.pending is None, "the store has it, and it is kept in memory only"
        deadline = time.monotonic() + 150
        while not (events := ckpt._session.writer.poll(0.1)):
            assert time.monotonic() < deadline
        assert events[0]["event"] == "ready"
    assert torch.equal(found, weights)


def test_no_room_for_what_was_restored_is_said_and_the_job_goes_on(
    tmp_path: Path, small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = torch.arange(2_000_000, dtype=torch.float32)
    roomy = tmp_path / "roomy"
    roomy.mkdir()
    with checkpointer(tmp_path / "root", {"w": weights.clone()}, roomy) as ckpt:
        ckpt.save(3)
    found = torch.zeros_like(weights)
    ckpt = checkpointer(tmp_path / "root", {"w": found}, small)
    report = ckpt.restore()
    assert (report.step, report.in_memory, report.committed) == (3, False, True)
    assert torch.equal(found, weights)
    assert "is not kept in memory" in caplog.text
    assert ckpt.coverage == ckptlib.Coverage(step=None, lag=0, num_losses=0, linked=True, sent=0)
    for step in range(4, 12):
        ckpt.after_step(step)
    assert caplog.text.count("kept in memory") == 2, "the job goes on, and says once why memory does not protect it"
    ckpt.close()


def test_a_copy_of_a_root_does_not_restore_what_a_job_of_the_other_one_left_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both have one id, so the slots of both have one name. It is told: the job may have been one of this root, and
    have ended before its record was there."""
    arena = tmp_path / "arena"
    arena.mkdir()
    peers = ckptlib.Peers(copies=0, every=1, keep_for=timedelta(seconds=60))
    weights = torch.full((1000,), 1.0)
    ckptlib.save(tmp_path / "one", {"w": weights}, step=1)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    ckpt = ckptlib.Checkpointer(tmp_path / "one", {"w": weights}, every=1000, peers=peers, arena=arena)
    assert ckpt.restore().step == 1
    ckpt.save(5).wait_committed()
    ckpt.__exit__(KeyError, KeyError("the trainer's own trouble"), None)
    assert list(arena.iterdir())
    found = torch.zeros_like(weights)
    with ckptlib.Checkpointer(tmp_path / "two", {"w": found}, every=1000, peers=peers, arena=arena) as ckpt:
        assert ckpt.restore().step == 1
        assert torch.equal(found, torch.full((1000,), 1.0))
    (told,) = (record.getMessage() for record in caplog.records if "no record of its generation" in record.message)
    assert told.startswith("step 000000000005-000002-")


def test_a_host_without_memory_for_files_goes_on_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a sandbox may be, that has no /dev/shm."""
    monkeypatch.setattr(files, "MEMORY", tmp_path / "absent")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    peers = ckptlib.Peers(copies=0, every=1, keep_for=timedelta(seconds=60))
    found = torch.full((3000,), 3.0)
    ckpt = ckptlib.Checkpointer(tmp_path / "root", {"w": found}, every=1000, peers=peers)
    assert ckpt.restore().step == 0
    ckpt.save(3).wait_committed(60)
    ckpt.__exit__(KeyError, KeyError("the trainer's own trouble"), None)
    found.zero_()
    with ckptlib.Checkpointer(tmp_path / "root", {"w": found}, every=1000, peers=peers) as ckpt:
        report = ckpt.restore()
    assert (report.step, report.tier) == (3, "memory")
    assert torch.equal(found, torch.full((3000,), 3.0))


def faulty(tmp_path: Path, *rules: dict[str, object]) -> str:
    """The URL of a root with steps 1 and 2, which fails by these rules."""
    for step in (1, 2):
        ckptlib.save(tmp_path / "root", {"w": torch.full((1000,), float(step))}, step)
    write_plan(tmp_path / "plan", rules)
    return f"fault+file://{tmp_path}/root?plan={tmp_path}/plan"


def test_what_could_not_be_read_for_a_moment_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pack = {"op": "get_into", "key": f"^packs/{2:012d}-", "action": "unreadable", "nth": 0}
    found = torch.zeros(1000)
    with ckptlib.Checkpointer(faulty(tmp_path, pack), {"w": found}, every=1000) as ckpt:
        report = ckpt.restore()
    assert (report.step, report.skipped) == (2, ())
    assert torch.equal(found, torch.full((1000,), 2.0))
    assert caplog.text.count("retrying step") == 1


@pytest.mark.parametrize("what", [{"op": "get", "key": f"^steps/{2:012d}-"}, {"op": "get", "key": f"^parts/{2:012d}-"}])
def test_a_document_that_could_not_be_read_for_a_moment_is_read(
    tmp_path: Path, what: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    url = faulty(tmp_path)
    found = torch.zeros(1000)
    with ckptlib.Checkpointer(url, {"w": found}, every=1000) as ckpt:
        write_plan(tmp_path / "plan", [{**what, "action": "unreadable", "nth": 0}])
        report = ckpt.restore()
    assert (report.step, report.skipped) == (2, ())
    assert torch.equal(found, torch.full((1000,), 2.0))
    assert "retrying step" in caplog.text


def test_what_a_local_disk_could_not_read_for_a_moment_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here no other copy has the step: the store is to get none of them."""
    found, local = torch.full((1000,), 2.0), {"local": tmp_path / "disk", "drain": ckptlib.Steps(1000)}
    with ckptlib.Checkpointer(tmp_path / "root", {"w": found}, every=1000, **local) as ckpt:
        ckpt.save(2).wait_local(60)
    failed: list[str] = []
    get_into = LocalStore.get_into

    def fail_once(self: LocalStore, key: str, offset: int, buffer: memoryview) -> None:
        if key.startswith("packs/") and not failed:
            failed.append(key)
            raise ObjectUnreadable(f"{key}: cannot be read, as planned")
        get_into(self, key, offset, buffer)

    found.zero_()
    with ckptlib.Checkpointer(tmp_path / "root", {"w": found}, every=1000, **local) as ckpt:
        monkeypatch.setattr(LocalStore, "get_into", fail_once)
        report = ckpt.restore()
    assert failed
    assert (report.step, report.tier, report.skipped) == (2, "local", ())
    assert torch.equal(found, torch.full((1000,), 2.0))
    assert "retrying step" in caplog.text


def test_a_store_that_goes_away_is_no_reason_for_an_older_step(tmp_path: Path) -> None:
    url = faulty(tmp_path)
    with ckptlib.Checkpointer(url, {"w": torch.zeros(1000)}, every=1000) as ckpt:
        rules = [
            {"op": op, "key": "^(packs/0+2|(copies/)?ckptlib)", "action": "unreadable"} for op in ("get", "get_into")
        ]
        write_plan(tmp_path / "plan", rules)
        with pytest.raises(ckptlib.ObjectUnreadable, match=r"ckptlib\.json.*cannot be read, as planned"):
            ckpt.restore()


def test_a_root_that_is_gone_is_no_fresh_run(tmp_path: Path) -> None:
    """As an unmounted file system is, which lists nothing."""
    root, away, found = tmp_path / "root", tmp_path / "away", torch.zeros(3)
    ckptlib.save(root, {"w": torch.ones(3)}, 1)
    with ckptlib.Checkpointer(root, {"w": found}, every=1000) as ckpt:
        root.rename(away)
        root.mkdir()
        with pytest.raises(CheckpointNotFound, match=r"no ckptlib\.json, and it was there when .* mounted any more"):
            ckpt.restore()
    root.rmdir()
    away.rename(root)
    with ckptlib.Checkpointer(root, {"w": found}, every=1000) as ckpt:
        assert ckpt.restore().step == 1
    assert torch.equal(found, torch.ones(3))


def test_no_rank_times_out_while_another_waits_for_writers_of_the_job_before() -> None:
    """Their host may be the only one with such writers, and `timeout=` shorter than they are waited for."""
    met = threading.Event()

    def on_rank(group: Group) -> None:
        group.patience_s = 0.01
        meetings: list[list[int]] = []
        start_sum = group.start_sum

        def counted(values: Sequence[int]) -> Callable[[], list[int]]:
            meetings.append([*values])
            if len(meetings) == 3:
                met.set()
            return start_sum(values)

        group.start_sum = counted  # type: ignore[method-assign]

        def under_way(after: SaveId | None) -> list[Path]:
            if group.rank == 1:
                assert met.wait(60), "the other rank waits for this one without a word"
            return []

        others = SimpleNamespace(under_way=under_way)
        session = SimpleNamespace(group=group, snapshots=SimpleNamespace(arena=SimpleNamespace(others=others)))
        await_writers(cast(Session, session), None)

    run_ranks(2, on_rank)


@pytest.mark.parametrize("reads", [1, 10**6], ids=["a read", "every read"])
def test_a_slot_of_which_a_read_was_altered_on_the_way_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reads: int
) -> None:
    """As between hosts; once. Only a slot that proves damaged when it is checked is dropped at once, with its step."""
    peers = ckptlib.Peers(copies=0, every=1, keep_for=timedelta(seconds=60))
    found = torch.full((3000,), 3.0)
    ckpt = ckptlib.Checkpointer(tmp_path / "root", {"w": found}, every=1000, peers=peers, arena=tmp_path)
    ckpt.save(3).wait_committed(60)
    ckpt.__exit__(KeyError, KeyError("the trainer's own trouble"), None)
    altered: list[int] = []
    read_into = Slot.read_into

    def alter(self: Slot, offset: int, buffer: memoryview) -> None:
        read_into(self, offset, buffer)
        assert len(altered) < 10, "it is read again and again"
        if len(altered) < reads:
            altered.append(offset)
            buffer[0] ^= 1

    found.zero_()
    with checkpointer(tmp_path / "root", {"w": found}, tmp_path) as ckpt:
        monkeypatch.setattr(Slot, "read_into", alter)
        report = ckpt.restore()
    assert len(altered) == (1 if reads == 1 else 2)
    assert (report.step, report.tier, len(report.skipped)) == (3, *(("memory", 0) if reads == 1 else ("store", 1)))
    assert torch.equal(found, torch.full((3000,), 3.0))
    assert "retrying step" in caplog.text


class LetGo(logging.Handler):
    """Lets a writer that is held go on when somebody waits for it, to meet `then`."""

    def __init__(self, plan: Path, then: list[dict[str, Any]]) -> None:
        super().__init__()
        self._plan, self._then = plan, then

    def emit(self, record: logging.LogRecord) -> None:
        if "waiting for the writers" in record.getMessage():
            write_plan(self._plan, self._then)


@pytest.mark.parametrize(
    ("error", "with_others"),
    [(None, True), (CorruptData, True), (AgreementFailed, False), (OSError, False), (KeyboardInterrupt, False)],
)
def test_ranks_close_a_source_together_where_all_come_there(
    error: type[BaseException] | None, with_others: bool
) -> None:
    """Else those that come wait for the others' last word, and those that read from this rank for its answers."""
    closed: list[bool] = []
    with (
        nullcontext() if error is None else pytest.raises(error),
        _closed_together(cast(InMemory, SimpleNamespace(close=closed.append))),
    ):
        if error is not None:
            raise error
    assert closed == [with_others]


@pytest.mark.parametrize(
    "then",
    [[], [{"op": "put", "key": "^steps/", "action": "kill-before"}]],
    ids=["commits it", "dies before it commits it"],
)
def test_a_step_that_is_damaged_in_memory_is_awaited_where_its_writer_has_read_it_before(
    tmp_path: Path, then: list[dict[str, Any]]
) -> None:
    """The step before it in the store would be older, and what the writer commits later would be abandoned."""
    plan, url, weights = tmp_path / "plan", faulty(tmp_path), torch.full((3000,), 3.0)
    peers = ckptlib.Peers(copies=0, every=1, keep_for=timedelta(seconds=60))
    ckpt = ckptlib.Checkpointer(url, {"w": weights}, every=1000, peers=peers, arena=tmp_path)
    ckpt.save(3).wait_committed(60)
    write_plan(plan, [{"op": "put", "key": f"^parts/{7:012d}-", "action": "hold"}])
    weights.fill_(7.0)
    ckpt.save(7).wait_staged(60)
    ckpt.__exit__(KeyError, KeyError("the trainer's own trouble"), None)
    until(lambda: any(tmp_path.glob(f"root/packs/{7:012d}-*/*.safetensors")))  # it has read the documents by then
    for slot in tmp_path.glob("*.slot"):
        header = SlotHeader.decode(slot.read_bytes()[:PAGE_BYTES], "the slot")
        flip_bit(slot, header.documents["layout"][0])
    logger, let_go = logging.getLogger("ckptlib"), LetGo(plan, then)
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(let_go)
    try:
        with checkpointer(tmp_path / "root", {"w": weights}, tmp_path) as after:
            report = after.restore()
    finally:
        logger.removeHandler(let_go)
        logger.setLevel(before)
        write_plan(plan, [])
    assert (report.step, report.tier, len(report.skipped)) == (7, "store", 1)
    assert torch.equal(weights, torch.full((3000,), 7.0))


def test_a_job_whose_only_step_is_damaged_in_memory_is_told_how_to_begin_anew(tmp_path: Path) -> None:
    """No start of it would come any further, whatever starts it again."""
    root, state = tmp_path / "root", {"w": torch.full((3000,), 3.0)}
    peers = ckptlib.Peers(copies=0, every=1, keep_for=timedelta(seconds=60))
    ckpt = ckptlib.Checkpointer(root, state, every=1000, peers=peers, arena=tmp_path)
    ckpt.save(3).wait_committed(60)
    ckpt.__exit__(KeyError, KeyError("the trainer's own trouble"), None)
    for objects in ("steps", "parts"):
        shutil.rmtree(root / objects)
    (slot,) = tmp_path.glob("*.slot")
    flip_bit(slot, PAGE_BYTES + 1000)
    for _ in range(2):
        with checkpointer(root, state, tmp_path) as ckpt, pytest.raises(CorruptData) as raised:
            ckpt.restore()
        assert "every step is damaged" in str(raised.value)
    arguments = re.search("to begin anew, `ckptlib (.*)` on each host$", str(raised.value))
    assert arguments is not None
    with pytest.raises(SystemExit, match="0"):
        cli.run([*arguments[1].split(), "--arena", str(tmp_path)])
    with checkpointer(root, state, tmp_path) as ckpt:
        assert ckpt.restore().step == 0


def left_in_part(arena: Path, step: int) -> None:
    """A slot of a snapshot that two ranks took; that of rank 1 is nowhere."""
    one = next(path for path in arena.glob("*.slot"))
    other = one.with_name(f"{one.name.rpartition('-')[0]}-{'0' * 16}.slot")
    shutil.copy(one, other)
    with other.open("r+b") as file:
        header = SlotHeader.decode(file.read(PAGE_BYTES), "the slot")
        save = replace(header.save, step=step)
        file.seek(0)
        file.write(replace(header, save=save, world_size=2).encode())


@pytest.mark.parametrize("whole", [True, False], ids=["from memory", "from the store"])
def test_a_snapshot_that_has_lost_a_share_is_not_left_out_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, whole: bool
) -> None:
    """All ranks may have held it, and whoever starts the job again does not know what the step is that it had come to.
    A job that takes one at each step dies with one on its way, which is no news."""
    caplog.set_level(logging.INFO, "ckptlib")
    peers = ckptlib.Peers(copies=0, every=1, keep_for=timedelta(seconds=60))
    weights = torch.full((3000,), 3.0)
    ckpt = ckptlib.Checkpointer(tmp_path / "root", {"w": weights}, every=1000, peers=peers, arena=tmp_path)
    ckpt.save(3).wait_committed(60)
    ckpt.__exit__(KeyError, KeyError("the trainer's own trouble"), None)
    own = [*tmp_path.glob("*.slot")]
    left_in_part(tmp_path, 7)
    for path in own if not whole else ():
        path.unlink()
    with checkpointer(tmp_path / "root", {"w": weights}, tmp_path) as ckpt:
        report = ckpt.restore()
        assert (report.step, report.in_memory) == (3, whole)
    (told,) = (record for record in caplog.records if "but not whole" in record.message)
    assert "step 000000000007-" in told.message
    assert "the share of rank 1 is not there" in told.message
    assert told.levelno == (logging.INFO if whole else logging.WARNING)


def test_memory_that_an_older_copy_may_need_is_not_taken_before_the_restored_step_has_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where fewer hosts have the step than an older one: slots for later snapshots are made when they come."""
    peers = ckptlib.Peers(copies=0, every=1, keep_for=timedelta(seconds=60))
    weights = torch.full((3000,), 3.0)
    ckpt = ckptlib.Checkpointer(tmp_path / "root", {"w": weights}, every=1000, peers=peers, arena=tmp_path)
    ckpt.save(3).wait_committed(60)
    ckpt.__exit__(KeyError, KeyError("the trainer's own trouble"), None)
    num_slots = []
    for stays in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(Untried, "safer", lambda self, candidate, stays=stays: candidate.save if stays else None)
            ckpt = ckptlib.Checkpointer(tmp_path / "root", {"w": weights}, every=1000, peers=peers, arena=tmp_path)
            assert ckpt.restore().in_memory
            num_slots.append(len(ckpt._session.snapshots.arena.slots))
            ckpt.__exit__(KeyError, KeyError("the trainer's own trouble"), None)
    assert num_slots[0] == 1 < num_slots[1]


# -- no tensor is left with what a damaged step has put into it


def flip_in_pack(root: Path, step: int) -> None:
    """In the last tensor of the step's pack."""
    pack = max(root.glob(f"packs/{step:012d}-*/*"), key=lambda path: path.stat().st_size)
    flip_bit(pack, pack.stat().st_size * 3 // 4)


@pytest.mark.parametrize(
    "options", [{"optional": "ema"}, {"strict": False}, {"optional": "new", "map": {"new": "ema"}}]
)
def test_what_a_damaged_step_was_read_into_is_not_left_where_the_step_before_lacks_it(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Else it would be of another step than all the rest, or of damaged bytes, and be said to be as it was."""
    name = "new" if "map" in options else "ema"
    size = 300_000
    ckptlib.save(tmp_path, {"w": torch.full((size,), 1.0)}, 1)
    ckptlib.save(tmp_path, {"w": torch.full((size,), 2.0), "ema": torch.full((size,), 2.5)}, 2)
    flip_in_pack(tmp_path, 2)
    state = {"w": torch.zeros(size), name: torch.full((size,), -1.0)}
    with (
        ckptlib.Checkpointer(tmp_path, state, every=1000) as ckpt,
        pytest.raises(StateMismatch, match=rf"step 1 has no {name}, .*was read of step 2, .*restore\(step=1\)"),
    ):
        ckpt.restore(**options)
    assert not torch.equal(state["w"], torch.full((size,), 1.0)), "refused before anything of step 1 was read"
    state[name].fill_(-1.0)
    with ckptlib.Checkpointer(tmp_path, state, every=1000) as ckpt:
        report = ckpt.restore(step=1, **options)
    assert (report.step, report.missing) == (1, (name,))
    assert torch.equal(state["w"], torch.full((size,), 1.0))
    assert torch.equal(state[name], torch.full((size,), -1.0))


def test_what_no_step_has_stays_as_it_is_behind_a_damaged_one(tmp_path: Path) -> None:
    for step in (1, 2):
        ckptlib.save(tmp_path, {"w": torch.full((300_000,), float(step))}, step)
    flip_in_pack(tmp_path, 2)
    state = {"w": torch.zeros(300_000), "new": torch.full((3,), -1.0)}
    with ckptlib.Checkpointer(tmp_path, state, every=1000) as ckpt:
        assert ckpt.restore(optional="new").step == 1
        ckpt.save(3).wait_committed(60)
    assert torch.equal(state["w"], torch.full((300_000,), 1.0))
    assert torch.equal(state["new"], torch.full((3,), -1.0))
    visible = Catalog(LocalStore(str(tmp_path))).visible()
    assert [save.step for save in visible] == [1, 3], "what follows goes on from what was restored"


def test_a_whole_save_before_a_damaged_step_is_committed_and_restored(tmp_path: Path) -> None:
    """Its commit had failed, and steps before the newest one are not looked at for such."""
    for step in (1, 2, 3, 4):
        ckptlib.save(tmp_path, {"w": torch.full((300_000,), float(step))}, step)
    for step in (2, 3):
        (manifest,) = tmp_path.glob(f"steps/{step:012d}-*")
        manifest.unlink()
    for step in (3, 4):
        flip_in_pack(tmp_path, step)
    state = {"w": torch.zeros(300_000)}
    with ckptlib.Checkpointer(tmp_path, state, every=1000) as ckpt:
        report = ckpt.restore()
    assert (report.step, len(report.skipped)) == (2, 2)
    assert torch.equal(state["w"], torch.full((300_000,), 2.0))


def test_a_generator_that_the_step_before_lacks_is_as_it_was_behind_a_damaged_one(tmp_path: Path) -> None:
    """Its state was read into new memory, and never given to it: that is no reason to refuse the step."""
    size = 300_000
    ckptlib.save(tmp_path, {"w": torch.full((size,), 1.0)}, 1)
    ckptlib.save(tmp_path, {"w": torch.full((size,), 2.0), "drawn": torch.Generator().manual_seed(5)}, 2)
    flip_in_pack(tmp_path, 2)
    generator = torch.Generator().manual_seed(7)
    state = {"w": torch.zeros(size), "drawn": generator}
    with ckptlib.Checkpointer(tmp_path, state, every=1000) as ckpt:
        report = ckpt.restore(optional="drawn")
    assert (report.step, report.missing, len(report.skipped)) == (1, ("drawn",), 1)
    assert torch.equal(state["w"], torch.full((size,), 1.0))
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(7).get_state())


def test_generators_that_an_imported_step_lacks_are_as_they_were_behind_a_damaged_one(tmp_path: Path) -> None:
    root, weights = tmp_path / "root", torch.zeros(300_000)
    torch.save({"w": torch.full((300_000,), 1.0)}, tmp_path / "w.pt")
    ckptlib.convert(tmp_path / "w.pt", root)
    with ckptlib.Checkpointer(root, {"model": {"w": weights}}, every=1000) as ckpt:
        assert ckpt.restore().step == 0
        weights += 1
        ckpt.save(1)
    flip_in_pack(root, 1)
    weights.zero_()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with ckptlib.Checkpointer(root, {"model": {"w": weights}}, every=1000) as ckpt:
        report = ckpt.restore()
        ckpt.restore_random()
    assert (report.step, len(report.skipped)) == (0, 1)
    assert torch.equal(weights, torch.full((300_000,), 1.0))
    assert torch.equal(torch.rand(3), expected)


# -- what is not damage is not called so


def test_random_state_of_another_version_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = rng.capture
    model = nn.Linear(3, 3)
    with ckptlib.Checkpointer(tmp_path, {"model": model}, every=1) as ckpt:
        monkeypatch.setattr(rng, "capture", lambda: {**capture(), "torch": torch.zeros(16, dtype=torch.uint8)})
        for step in (1, 2):
            ckpt.save(step).wait_committed(60)
    monkeypatch.undo()
    before = torch.get_rng_state()
    with ckptlib.Checkpointer(tmp_path, {"model": model}, every=1) as ckpt:
        with pytest.raises(StateMismatch, match=r"random state of torch: 16 bytes .*ckptlib\.load\(url, state\)"):
            ckpt.restore()
        assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(StateMismatch, match="random state of torch"):
        ckptlib.load(tmp_path, {"model": model}, random=True)
    state = {"model": nn.Linear(3, 3)}
    with ckptlib.Checkpointer(tmp_path, state, every=1) as ckpt:  # as the message says
        assert ckptlib.load(tmp_path, state).step == 2
        ckpt.save(3).wait_committed(60)
    assert [info.step for info in ckptlib.checkpoints(tmp_path)] == [1, 2, 3]


def test_a_store_that_lacks_objects_is_not_called_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"w": torch.ones(3)}
    with ckptlib.Checkpointer(tmp_path, state, every=1) as ckpt:
        for step in (1, 2):
            ckpt.save(step).wait_committed(60)
    (tmp_path / "packs").rename(tmp_path / "elsewhere")  # a mount that is not there, a copy under way
    with (
        ckptlib.Checkpointer(tmp_path, state, every=1) as ckpt,
        pytest.raises(
            CheckpointNotFound, match=r"nothing is damaged, but every step lacks objects\. .* no such object"
        ),
    ):
        ckpt.restore()
    assert "lacks an object and is skipped" in caplog.text
    assert "is damaged" not in caplog.text
    (tmp_path / "elsewhere").rename(tmp_path / "packs")
    with ckptlib.Checkpointer(tmp_path, state, every=1) as ckpt:
        assert ckpt.restore().step == 2


def test_a_dtype_that_this_torch_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.zeros(3, dtype=torch.float8_e5m2)}
    with ckptlib.Checkpointer(tmp_path, state, every=1) as ckpt:
        ckpt.save(1).wait_committed(60)
    monkeypatch.delattr(torch, "float8_e5m2")
    torch_dtype.cache_clear()
    with (
        ckptlib.Checkpointer(tmp_path, state, every=1) as ckpt,
        pytest.raises(StateMismatch, match=r"the checkpoint has dtype float8_e5m2; torch .* lacks it"),
    ):
        ckpt.restore()
