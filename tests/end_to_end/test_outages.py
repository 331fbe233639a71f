"""A store that swallows requests, or refuses them for a while: training goes on, saves fail by name, and later ones
commit. Real processes throughout, and a store that never answers.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import pytest
from helpers.fault_log import operations
from helpers.inside import poll, writer_of
from helpers.one_job import WAIT_S, Job, faulty, slots, steps
from helpers.writers import alive, until

import ckptlib
from ckptlib.errors import SaveFailed, StoreDenied, StoreError, StoreTimeout, WaitTimeout
from ckptlib.writer import client

T = TypeVar("T")

FOR_EVER_S = 1e9
DEADLINE = timedelta(seconds=3)
SHORT = timedelta(seconds=2)
PATIENCE = timedelta(seconds=WAIT_S)
FAILED = "earlier steps are untouched"
"""Of each failure, whether it is in doubt or not: who replaces a writer that hangs cannot know what that has put."""

WORD_FAILS = [{"op": "put", "key": "-failed-", "action": "error"}]

TOLD = {"commit": "put", "put": "put", "scan": "list", "get": "get", "delete": "delete"}
"""Operations of a FaultStore, by the words for them in messages."""

FREE_STEPS = 10
"""More than there would be if one of them waited for what is never answered."""

STEP_S = 0.01
"""Of a step, at least: steps that take nothing keep a core busy for seconds, which others wait for."""

SWALLOWED = {
    "pack": ("commit", "^packs/"),
    "part": ("put", "^parts/.*-ok-"),
    "record": ("put", "^generations/"),
    "manifest": ("put", "^steps/"),
    "listing-of-parts": ("scan", "^parts/"),
    "listing-of-steps": ("scan", "^steps/"),
    "read-of-part": ("get", "^parts/"),
}


def stall(op: str, key: str = "") -> dict[str, object]:
    return {"op": op, "key": key, "action": "stall", "seconds": FOR_EVER_S}


class Outage:
    """A job of one process behind a store with faults, and what it logs."""

    def __init__(self, job: Job, caplog: pytest.LogCaptureFixture) -> None:
        self.job = job
        self.url = faulty(job, [])
        self.step = 0
        self.began = time.monotonic()
        self._caplog = caplog

    def checkpointer(self, **options: Any) -> ckptlib.Checkpointer:
        given = {"every": 3, "arena": self.job.root.parent, "save_deadline": DEADLINE, **options}
        return ckptlib.Checkpointer(self.url, self.job.state, **given)

    def plan(self, *rules: dict[str, object]) -> None:
        path = self.job.root.parent / "plan.json"
        path.with_suffix(".new").write_text(json.dumps(rules))
        path.with_suffix(".new").rename(path)

    def train_until(self, ckpt: ckptlib.Checkpointer, true: Callable[[], bool], limit_s: float = WAIT_S) -> int:
        """How many steps were made until something is true."""
        deadline, first = time.monotonic() + limit_s, self.step
        while not true():
            assert time.monotonic() < deadline, self.said()
            self.job.body()
            self.step += 1
            ckpt.after_step(self.step)
            time.sleep(STEP_S)
        return self.step - first

    def train_until_told(self, ckpt: ckptlib.Checkpointer, *words: str) -> int:
        """Once more, in one line. How many steps were made until then."""
        assert self.began + WAIT_S > time.monotonic(), self.said()
        before = self.times_heard(*words)
        return self.train_until(ckpt, lambda: self.times_heard(*words) > before)

    def told_before(self, failure: Sequence[str]) -> bool:
        """Whether it was told that something waits, and then that this failed."""
        said = self.said()
        waits = [n for n, line in enumerate(said) if "has not answered" in line and "training goes on" in line]
        failed = [n for n, line in enumerate(said) if all(word in line for word in failure)]
        return bool(waits and failed) and waits[0] < failed[-1]

    def save_last(self, ckpt: ckptlib.Checkpointer) -> None:
        """It is committed; or another one, since on a busy machine one takes longer than DEADLINE."""
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                ckpt.save(self.step).wait_committed(WAIT_S)
            except (SaveFailed, WaitTimeout):  # or no slot is free as long as that
                assert time.monotonic() < deadline, self.said()
                self.job.body()
                self.step += 1
                ckpt.after_step(self.step)
            else:
                return

    def train_until_committed(self, ckpt: ckptlib.Checkpointer) -> None:
        """Another one."""
        before = len(self.names())
        self.train_until(ckpt, lambda: len(self.names()) > before)

    def hold(self, ckpt: ckptlib.Checkpointer, true: Callable[[], bool]) -> None:
        """Until something is true no save is taken; the writer may end, and another one begin with the next."""
        deadline = time.monotonic() + WAIT_S
        while not true():
            assert time.monotonic() < deadline, self.said()
            self.train_until_committed(ckpt)
            settled = time.monotonic() + 2 * DEADLINE.total_seconds()
            while time.monotonic() < settled and not true():
                poll(ckpt, 0.05)

    def answered_in_time(self, call: Callable[[], T]) -> T:
        """What it returns; made again where a busy machine took longer than SHORT."""
        while True:
            try:
                return call()
            except StoreTimeout:
                assert time.monotonic() < self.began + WAIT_S

    def names(self) -> list[str]:
        return [path.name for path in self.job.root.glob("steps/*.json")]

    def said(self, level: int = logging.WARNING) -> list[str]:
        return [r.getMessage() for r in self._caplog.records if r.levelno >= level and r.name.startswith("ckptlib")]

    def heard(self, *words: str) -> bool:
        """Whether one line has all of these."""
        return self.times_heard(*words) > 0

    def times_heard(self, *words: str) -> int:
        return sum(all(word in line for word in words) for line in self.said())

    def operations(self) -> list[dict[str, Any]]:
        return operations(self.job.root.parent / "plan.json")

    def asked_here(self) -> int:
        """Operations by the process that trains, on whichever thread; the writer is another one."""
        return sum(line["pid"] == os.getpid() for line in self.operations())

    def met(self) -> bool:
        return any(line["fault"] for line in self.operations())

    def listed(self) -> list[int]:
        return steps(self.job.root)


@pytest.fixture
def outage(job: Job, caplog: pytest.LogCaptureFixture) -> Iterator[Outage]:
    yield Outage(job, caplog)
    assert slots(job.root.parent) == []


ONE_MORE = ("listing-of-parts", "listing-of-steps", "part", "read-of-part", "record")


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.slow if what in ONE_MORE else ()) for what in SWALLOWED]
)
def test_a_swallowed_request_fails_its_save_and_blocks_no_step(outage: Outage, what: str) -> None:
    op, key = SWALLOWED[what]
    if what != "record":
        with outage.checkpointer(save_deadline=PATIENCE) as ckpt:  # so that there is a parent, and parts to be read
            outage.train_until(ckpt, lambda: outage.step == 6)
        for name in ("ckptlib.json", "copies/ckptlib.json"):  # made anew, with the deadline of the next job
            outage.job.root.joinpath(name).unlink()
    before = outage.listed() if what != "record" else []
    with outage.checkpointer() as ckpt:
        ckpt.restore()
        outage.plan(stall(op, key))
        assert (asked := outage.asked_here()) > 0
        outage.train_until(ckpt, outage.met)
        pid, request = writer_of(ckpt).pid, f"{TOLD[op]} {key[1:].split('/')[0]}/"
        may_be = what in ("part", "manifest", "listing-of-parts")
        outcome = "failed and may be committed all the same: `ckptlib ls`" if may_be else "will never be committed"
        failure = outcome, f"has not answered {request}"
        while outage.train_until_told(ckpt, *failure) < FREE_STEPS or not outage.told_before(failure):
            pass  # this process stood still, or the writer did: so it is with the next save
        assert outage.asked_here() == asked, "what trains asks the store nothing, so nothing there can hold it"
        assert outage.listed() == before
        outage.plan()
        outage.train_until_committed(ckpt)
        assert writer_of(ckpt).pid != pid
        outage.save_last(ckpt)
    assert outage.listed()[-1] == outage.step
    assert set(before) < set(outage.listed())
    ckptlib.load(outage.job.root, outage.job.state)


def test_one_rank_that_waits_for_a_commit_does_not_name_other_ranks(outage: Outage) -> None:
    with outage.checkpointer(every=10**6, save_deadline=PATIENCE) as ckpt:
        outage.plan({"op": "put", "key": "^steps/", "action": "hold"})
        pending = ckpt.save(1)
        pending.wait_released(WAIT_S)
        with pytest.raises(WaitTimeout, match="it may still be: what was taken is written, but for its commit"):
            pending.wait_committed(0)
        outage.plan()
        pending.wait_committed(WAIT_S)


@pytest.mark.parametrize("once", [True, False])
def test_a_store_that_fails_behind_the_manifest_is_asked_once_more(outage: Outage, once: bool) -> None:
    with outage.checkpointer(every=10**6, save_deadline=PATIENCE) as ckpt:
        outage.plan({"op": "get", "key": "^trash/", "action": "error", "once": once})
        told = r"save 0*1-.* failed and may be committed all the same: `ckptlib ls` tells .*as planned"
        with nullcontext() if once else pytest.raises(SaveFailed, match=told):
            ckpt.save(1).wait_committed(WAIT_S)
        outage.plan()
        ckpt.save(2).wait_committed(WAIT_S)
    assert outage.listed() == [1, 2]


@pytest.mark.parametrize("what", ["listing", "part"])
@pytest.mark.parametrize("word_fails", [True, False])
def test_a_failure_is_told_as_never_once_the_store_has_word_of_it(outage: Outage, what: str, word_fails: bool) -> None:
    """All its parts are there, so without that word the next job commits it."""
    ckpt = outage.checkpointer(every=10**6, save_deadline=PATIENCE)
    if what == "listing":
        outage.plan({"op": "scan", "key": "^parts/", "action": "error"}, *WORD_FAILS[:word_fails])
    else:
        killed = {"op": "put", "key": "-ok-", "action": "kill-after", "once": True}
        outage.plan(killed, {"op": "put", "key": "-ok-", "action": "error"}, *WORD_FAILS[:word_fails])
    ckpt.save(1)
    in_doubt = "failed and may be committed all the same: `ckptlib ls` tells .* the next start of the job may"
    with pytest.raises(SaveFailed, match=in_doubt if word_fails else "failed and will never be committed"):
        ckpt.close()
    assert outage.listed() == []
    outage.plan()
    with outage.checkpointer() as ckpt:
        assert ckpt.restore().step == (1 if word_fails else 0)


def test_a_step_that_may_be_there_and_lacks_objects_is_none_of_those_that_are_kept(outage: Outage) -> None:
    """Nobody has looked behind its manifest."""
    with outage.checkpointer(every=10**6, save_deadline=PATIENCE, keep=ckptlib.Keep(last=2)) as ckpt:
        ckpt.save(1).wait_committed(WAIT_S)
        outage.plan({"op": "get", "key": "^trash/", "action": "error"})
        with pytest.raises(SaveFailed, match="failed and may be committed all the same"):
            ckpt.save(2).wait_committed(WAIT_S)
        for part in outage.job.root.glob("parts/0*2-*/*-ok-*"):
            part.unlink()
        outage.plan()
        ckpt.save(3).wait_committed(WAIT_S)
    assert outage.listed() == [1, 2, 3]


def test_the_record_is_put_before_anything_is_committed(outage: Outage) -> None:
    """Also where its first put was never answered."""
    outage.plan(stall("put", "^generations/"))
    with outage.checkpointer() as ckpt:
        outage.train_until(ckpt, lambda: outage.heard(FAILED, "put generations/"))
        outage.plan()
        outage.train_until_committed(ckpt)
    puts = [(line["key"].split("/")[0], line["fault"]) for line in outage.operations() if line["op"] == "put"]
    good = puts.index(("generations", None))
    assert ("steps", None) not in puts[:good]
    assert ("steps", None) in puts[good:]


def test_nothing_is_answered_at_all(outage: Outage) -> None:
    """Not even the word that the save failed gets through."""
    with outage.checkpointer() as ckpt:
        outage.train_until(ckpt, lambda: bool(outage.names()))
        outage.plan(*(stall(op) for op in ("put", "commit", "get", "scan", "delete")))
        while sum(outage.train_until_told(ckpt, FAILED) for _ in range(2)) < FREE_STEPS:
            pass  # this process stood still
        outage.plan()
        outage.train_until_committed(ckpt)
        outage.save_last(ckpt)


@pytest.mark.slow
def test_a_save_that_waits_for_two_intervals_is_told_once(outage: Outage) -> None:
    with outage.checkpointer(save_deadline=timedelta(seconds=10)) as ckpt:
        outage.plan(stall("commit", "^packs/"))
        outage.train_until(ckpt, lambda: outage.heard("no save for two intervals", "is being written"))
        outage.train_until(ckpt, lambda: outage.heard("has not answered put packs/"))
        outage.train_until(ckpt, lambda: outage.heard(FAILED))
        assert len([line for line in outage.said() if "no save for two intervals" in line]) == 1
        outage.plan()
        outage.train_until_committed(ckpt)


# -- outages


def test_failures_within_the_outage_that_is_allowed_end_nothing(outage: Outage) -> None:
    with outage.checkpointer(max_outage=timedelta(minutes=5)) as ckpt:
        outage.plan({"op": "commit", "key": "^packs/", "action": "error"})
        outage.train_until(ckpt, lambda: len([s for s in outage.said() if "never be committed" in s]) >= 6)
        outage.plan()
        outage.train_until(ckpt, lambda: bool(outage.names()))


def test_a_longer_outage_ends_the_training(outage: Outage) -> None:
    def train() -> None:
        with outage.checkpointer(max_outage=timedelta(seconds=1)) as ckpt:
            outage.plan({"op": "commit", "key": "^packs/", "action": "error"})
            outage.train_until(ckpt, lambda: False)

    began = time.monotonic()
    with pytest.raises(SaveFailed, match=r"saves in a row failed .*an error, as planned"):
        train()
    assert time.monotonic() - began > 1
    assert outage.listed() == []
    wait_gone(outage)


def wait_gone(outage: Outage) -> None:
    """The writer that was left alone has ended."""
    deadline = time.monotonic() + WAIT_S
    while slots(outage.job.root.parent):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_refusal_is_told_at_once_and_may_pass(outage: Outage) -> None:
    with outage.checkpointer() as ckpt:
        outage.plan({"op": "put", "action": "denied"}, {"op": "commit", "action": "denied"})
        outage.train_until(ckpt, lambda: bool(outage.said(logging.ERROR)))
        first = outage.said(logging.ERROR)[0]
        assert "denied, as planned" in first
        assert "no save will succeed before somebody changes that, and training ends when saves have failed" in first
        outage.train_until(ckpt, lambda: len(outage.said(logging.ERROR)) > 5)
        outage.plan()
        outage.train_until_committed(ckpt)


def test_a_root_that_is_refused_is_not_opened(outage: Outage) -> None:
    outage.plan({"op": "put", "action": "denied"})
    with pytest.raises(StoreDenied, match="denied, as planned"):
        outage.checkpointer()


# -- what no save waits for


def test_a_sweep_that_hangs_delays_no_commit(outage: Outage) -> None:
    keep = ckptlib.Keep(last=1, grace=timedelta(minutes=1))
    with outage.checkpointer(keep=keep) as ckpt:
        outage.plan(stall("put", "^trash/"))
        outage.train_until(ckpt, outage.met)
        for _ in range(3):
            outage.train_until_committed(ckpt)
        assert not outage.heard("never be committed", "put trash/")
        outage.plan()
        outage.hold(ckpt, lambda: any((outage.job.root / "trash").glob("*")))
        outage.save_last(ckpt)
    assert outage.listed() == [outage.step], "the next writer removed the others"


def test_a_snapshot_in_memory_counts_once_its_record_is_there(outage: Outage) -> None:
    """A job that comes back finds no snapshot of a generation without one."""
    with outage.checkpointer(every=10**6, peers=ckptlib.Peers(copies=0)) as ckpt:
        assert ckpt.restore().step == 0
        outage.plan(stall("put", "^generations/"))
        outage.train_until(ckpt, lambda: outage.heard("the record of generation", "put generations/"))
        last = outage.step + FREE_STEPS
        outage.train_until(ckpt, lambda: outage.step == last)
        assert ckpt.coverage is not None
        assert ckpt.coverage.step is None
        outage.plan()
        outage.train_until(ckpt, lambda: ckpt.coverage is not None and ckpt.coverage.step is not None)
        (record,) = (outage.job.root / "generations").glob("*.json")
        assert record.read_bytes()
        assert len([line for line in outage.said() if "the record of generation" in line]) == 1


# -- the end, and the beginning


def test_a_last_save_that_hangs_ends_by_a_time_out(outage: Outage) -> None:
    """And the writer that is left alone ends, too."""
    told: list[int] = []

    def train() -> None:
        with outage.checkpointer(every=1000, timeout=SHORT) as ckpt:
            told.append(writer_of(ckpt).pid)
            for step in ckpt.loop(0, 10**6):
                outage.job.body()
                if step == 5:
                    outage.plan(stall("commit", "^packs/"))
                    os.kill(os.getpid(), signal.SIGTERM)

    def hangs() -> str:
        with pytest.raises(WaitTimeout, match="step 7 was not committed within 2 s; ") as raised:
            train()
        return str(raised.value)

    while "answered put packs/" not in (said := outage.answered_in_time(hangs)):
        assert "is being written" in said  # a busy machine has not come to it
        assert time.monotonic() < outage.began + WAIT_S
    wait_gone(outage)
    assert outage.listed() == []


KEEP = ckptlib.Keep(last=1)
HELD_SWEEP = {"op": "scan", "key": "^trash/", "action": "hold"}


def go_on_alone(outage: Outage, writer: int) -> None:
    """The sweep that hung; nothing is left behind."""
    until(outage.met)
    assert alive(writer)
    outage.plan()
    until(lambda: not alive(writer))


def test_a_job_that_was_told_to_stop_does_not_wait_for_a_sweep_that_hangs(
    outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last step is committed, so it ends by the status of that. It raised WaitTimeout, if it lived for so long."""
    monkeypatch.setattr(client, "SWEEPS_S", 0.5)
    writers: list[int] = []

    def train() -> None:
        with outage.checkpointer(every=1000, keep=KEEP, save_deadline=PATIENCE, timeout=PATIENCE) as ckpt:
            writers.append(writer_of(ckpt).pid)
            for step in ckpt.loop(0, 10**6):
                outage.job.body()
                if step == 5:
                    outage.plan(HELD_SWEEP)
                    os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(ckptlib.Preempted):
        train()
    assert outage.listed() == [7]
    assert outage.heard("still removes old steps")
    go_on_alone(outage, *writers)


def test_closing_fails_by_no_sweep_that_hangs(outage: Outage) -> None:
    ckpt = outage.checkpointer(keep=KEEP, save_deadline=PATIENCE)
    outage.plan(HELD_SWEEP)
    ckpt.save(1).wait_committed(WAIT_S)
    ckpt.close(timedelta(seconds=1))
    assert outage.heard("still removes old steps")
    go_on_alone(outage, writer_of(ckpt).pid)


@pytest.mark.parametrize("op", ["put", "scan", "get", "delete"])
def test_a_root_that_does_not_answer_is_not_opened(outage: Outage, op: str) -> None:
    outage.plan(stall(op))

    def refused() -> str:
        with pytest.raises(StoreTimeout, match="was not answered within 1 s") as raised:
            outage.checkpointer(timeout=SHORT)
        return str(raised.value)

    while f"{TOLD[op]} " not in refused():  # a busy machine takes a second for what is well
        assert time.monotonic() < outage.began + WAIT_S


@pytest.mark.parametrize("op", ["scan", "get"])
def test_a_restore_that_is_not_answered_ends(outage: Outage, op: str) -> None:
    with outage.checkpointer(save_deadline=PATIENCE) as ckpt:
        outage.train_until(ckpt, lambda: outage.step == 4)
    with outage.answered_in_time(lambda: outage.checkpointer(timeout=SHORT)) as ckpt:
        outage.plan(stall(op))
        with pytest.raises(StoreError, match="was not answered within 1 s"):
            ckpt.restore()
        outage.plan()
        assert outage.answered_in_time(ckpt.restore).step == 3
        poll(ckpt)
