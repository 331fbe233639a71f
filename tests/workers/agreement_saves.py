"""Cases of `agreement.py`: clocks, signals and steps that differ, saves that fail, calls that one rank makes alone."""

from __future__ import annotations

import gc
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.inside import num_failures, refuse_slots, writer_of
from helpers.interrupted import interrupted_at
from helpers.moody import Moody
from helpers.refused import refused_pwrite
from rank_cases import EVERY, PATIENCE_S, checkpointer, committed, everywhere, rank, save_after, warnings_of_ckptlib

import ckptlib
from ckptlib.errors import AgreementFailed, CkptError, NoRoom, SaveFailed, UnsupportedState
from ckptlib.events import Event, Failed
from ckptlib.saving.failures import MAX_FAILURES
from ckptlib.saving.session import WHOLE_EVERY
from ckptlib.staging.replica_digests import ReplicaDigests
from ckptlib.staging.stager import Stager
from ckptlib.stores.testing import write_plan

# Policies, signals, steps


class DueAt:
    """A clock that goes differently on every rank."""

    def __init__(self, *steps: int) -> None:
        self._steps = steps

    def due(self, step: int) -> bool:
        return step in self._steps


def clocks_that_differ(url: Path) -> None:
    policy = [DueAt(2), DueAt(5), DueAt()][rank()]
    state = {"w": torch.zeros(3)}
    with checkpointer(url, state, policy) as ckpt:
        for step in range(1, 8):
            state["w"].fill_(step)
            ckpt.after_step(step)
            if ckpt.pending is not None:
                ckpt.pending.wait_committed(PATIENCE_S)
    assert committed(url) == [2, 5]
    for step in (2, 5):
        ckptlib.load(url, state, step)
        assert torch.equal(state["w"], torch.full((3,), float(step)))


def sigterm_at_different_steps(url: Path) -> None:
    """A slow rank gets it later; all stop at one step, which is saved, though nothing was due."""
    state = {"w": torch.zeros(3), "own": ckptlib.PerRank(torch.zeros(2))}
    last = 0
    with suppress(ckptlib.Preempted), checkpointer(url, state, every=1000) as ckpt:
        for step in ckpt.loop(0, 100):
            if step == 2 + 3 * rank():
                os.kill(os.getpid(), signal.SIGTERM)
            state["w"].fill_(step + 1)
            state["own"].value.fill_(10 * (step + 1) + rank())
            last = step + 1
        assert ckpt.stopping
    lasts = everywhere(last)
    assert len(set(lasts)) == 1, lasts
    assert 3 <= last <= 5, last
    assert committed(url) == [last]
    found = {"w": torch.zeros(3), "own": ckptlib.PerRank(torch.zeros(2))}
    ckptlib.load(url, found)
    assert torch.equal(found["w"], torch.full((3,), float(last)))
    assert torch.equal(found["own"].value, torch.full((2,), 10.0 * last + rank()))


def sigterm_in_a_loop_that_does_not_ask(url: Path) -> None:
    """All ranks end at one step, and what they saved is committed before."""
    state = {"w": torch.zeros(3)}
    last = 0
    with suppress(ckptlib.Preempted), checkpointer(url, state, every=1000) as ckpt:
        for step in range(1, 100):
            if step == 3 and rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            last = step
            ckpt.after_step(step)
    assert committed(url) == [last - 1]
    assert everywhere(last) == [last] * 3


def steps_that_differ(url: Path) -> None:
    """One rank counts wrongly: all are told, and none waits for a rank that has left."""

    def train() -> None:
        with checkpointer(url, {"w": torch.zeros(3)}) as ckpt:
            for step in range(1, 20):
                ckpt.after_step(step if rank() != 1 or step < 4 else step + 3)

    began = time.monotonic()
    with pytest.raises(AgreementFailed, match=r"every rank must call after_step with the same") as caught:
        train()
    assert time.monotonic() - began < PATIENCE_S / 2, "some waited for the time-out"
    assert "4" in str(caught.value)


def saves_of_steps_that_differ(url: Path) -> None:
    """No rank takes one: each step would lack the part of some rank, and be waited for until the deadline of saves."""
    with checkpointer(url, {"w": torch.zeros(3)}) as ckpt:
        with pytest.raises(AgreementFailed, match=r"every rank must call save with the same step") as caught:
            ckpt.save(4 if rank() == 1 else 3)
        assert f"called save({4 if rank() == 1 else 3}), but the ranks are at steps 3 to 4" in str(caught.value)
        ckpt.save(4).wait_committed(PATIENCE_S)
    assert committed(url) == [4]


# Saves that fail


def fail_on_rank_1(plan: Path, active: bool) -> None:
    dist.barrier()
    if rank() == 0:
        rule = {"op": "put", "key": r"parts/.*/000001-.*-ok-", "action": "error"}
        write_plan(plan, [rule] if active else [])
    dist.barrier()


def a_store_that_fails_one_rank(url: Path) -> None:
    plan = url.with_suffix(".plan")
    fault = f"fault+file://{url}?plan={plan}"
    state = {"w": torch.zeros(3)}
    raised_at = 0

    def train() -> None:
        nonlocal raised_at
        with checkpointer(fault, state, max_outage=timedelta()) as ckpt:
            for number in range(1, 4):
                fail_on_rank_1(plan, number == 2)
                state["w"].fill_(number)
                save_after(ckpt, number)
                if number == 2:
                    with pytest.raises(SaveFailed, match="an error, as planned"):
                        ckpt.pending.wait_committed(PATIENCE_S)
                else:
                    ckpt.pending.wait_committed(PATIENCE_S)
            assert committed(url) == [EVERY, 3 * EVERY]
            fail_on_rank_1(plan, True)
            for number in range(4, 100):
                raised_at = number
                save_after(ckpt, number)

    with pytest.raises(SaveFailed, match="in a row failed"):
        train()
    numbers = everywhere(raised_at)
    assert len(set(numbers)) == 1, numbers
    assert raised_at == 4 + MAX_FAILURES
    assert committed(url) == [EVERY, 3 * EVERY]
    ckptlib.load(url, state)
    assert torch.equal(state["w"], torch.full((3,), 3.0))


class Growing:
    """State of this rank, of any size."""

    def __init__(self) -> None:
        self.nbytes = 8

    def state_dict(self) -> dict[str, object]:
        return {"bytes": ckptlib.PerRank(torch.ones(self.nbytes, dtype=torch.uint8))}

    def load_state_dict(self, state: dict[str, object]) -> None:
        pass


def no_room_on_one_rank(url: Path) -> None:
    """The kernel refuses one rank a larger slot, once; the saves after that go on, far past the next whole digest."""
    growing, before = Growing(), resource.getrlimit(resource.RLIMIT_FSIZE)
    state = {"w": torch.zeros(3), "growing": growing}
    numbers = range(1, WHOLE_EVERY + 5)
    with checkpointer(url, state) as ckpt:
        for number in numbers:
            state["w"].fill_(number)
            if number == 3 and rank() == 1:
                growing.nbytes = 32 << 20
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
            if number == 4:  # all ranks compare at its first step, since rank 1's state has changed
                with warnings_of_ckptlib() as warned:
                    ckpt.after_step(3 * EVERY + 1)
                assert any("File too large" in text for text in warned), warned
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
                ckpt.after_step(3 * EVERY + 2)
                ckpt.after_step(4 * EVERY)
            else:
                save_after(ckpt, number)
            if number != 3:
                ckpt.pending.wait_committed(PATIENCE_S)
                assert ckpt.pending.step == number * EVERY, "saved without a slot"
    assert committed(url) == [number * EVERY for number in numbers if number != 3]
    found = torch.zeros(3)
    ckptlib.load(url, {"w": found}, strict=False)
    assert torch.equal(found, state["w"])


def openings_that_fail(url: Path) -> None:
    """Who catches that, and tries again until it works, has no file of memory left from any of them."""
    url.with_suffix(".file").touch()
    state, before = {"w": torch.zeros(3)}, memory_files()
    for root, options in [
        (url.with_suffix(".file") / "run", {}),
        (url, {"local": url.with_suffix(".disk")} if rank() else {}),
        (url, {"keep": ckptlib.Keep(grace=timedelta(0))}),
    ]:
        with pytest.raises((CkptError, ValueError)):
            checkpointer(root, state, **options)
    assert memory_files() == before


def memory_files() -> list[str]:
    """That this process has open, by the names that ckptlib gives them."""
    gc.collect()  # errors hold the frames that they came through
    links = (Path("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
    return sorted(name for link in links if link.is_symlink() and "memfd:ckptlib" in (name := os.readlink(link)))


def a_slot_that_one_rank_cannot_write(url: Path) -> None:
    """Its header, as the snapshot begins, and as it is sealed behind three documents; all ranks go on."""
    state, refused = {"w": torch.zeros(3)}, {3: 1, 5: 5}
    numbers = range(1, 8)
    with checkpointer(url, state) as ckpt:
        for number in numbers:
            state["w"].fill_(number)
            with refused_pwrite(refused.get(number, 0) if rank() == 1 else 0):
                save_after(ckpt, number)
                with suppress(SaveFailed) if number in refused else nullcontext():
                    ckpt.pending.wait_committed(PATIENCE_S)
    assert committed(url) == [number * EVERY for number in numbers if number not in refused]
    found = torch.zeros(3)
    ckptlib.load(url, {"w": found})
    assert torch.equal(found, state["w"])


def memory_that_one_rank_lacks_for_a_snapshot(url: Path) -> None:
    """As it digests what others hold, too; as it copies, where the ranks compared before or not; and once it has begun
    to copy for `save`. Nobody ends, each rank tells that the step failed, and the saves after it are good."""
    state, told = {"w": torch.zeros(3)}, list[Event]()
    lacking: dict[int, tuple[type, str]] = {3: (ReplicaDigests, "begin"), 5: (Stager, "copy"), 7: (Stager, "copy")}
    with checkpointer(url, state, on_event=told.append) as ckpt:
        for number in range(1, 9):
            state["w"].fill_(number)
            lacks = rank() == 1 and number in lacking
            with lacking_memory(*lacking[number]) if lacks else nullcontext():
                if number == 7:  # it is saved before it is due
                    ckpt.after_step(7 * EVERY - 2)
                    ckpt.after_step(7 * EVERY - 1)
                    ckpt.save(7 * EVERY)
                    ckpt.after_step(7 * EVERY)
                else:
                    save_after(ckpt, number)
            assert ckpt.pending.step == number * EVERY
            with pytest.raises(SaveFailed, match="full, as planned") if number in lacking else nullcontext():
                ckpt.pending.wait_committed(PATIENCE_S)
        failed = [event.step for event in told if isinstance(event, Failed)]
        assert failed == [number * EVERY for number in lacking], failed
    with pytest.raises(SaveFailed, match="full, as planned"), lacking_memory(Stager, "copy", rank() == 1):
        ckptlib.save(url, state, 9 * EVERY)
    ckptlib.save(url, state, 10 * EVERY)
    assert committed(url) == [number * EVERY for number in range(1, 11) if number not in (*lacking, 9)]


@contextmanager
def lacking_memory(owner: type, method: str, lacks: bool = True) -> Iterator[None]:
    """Within, this method raises as where memory is full."""

    def raise_it(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("full, as planned")

    with mock.patch.object(owner, method, raise_it) if lacks else nullcontext():
        yield


def a_state_that_one_rank_cannot_save(url: Path) -> None:
    """It raises on all ranks at one step, though one knows of it a step earlier."""
    state: dict[str, object] = {"w": torch.zeros(3), "extra": 1}
    raised_at = 0

    def train() -> None:
        nonlocal raised_at
        with checkpointer(url, state) as ckpt:
            for number in range(1, 10):
                raised_at = number
                if number == 3 and rank() == 2:
                    state["extra"] = object()
                save_after(ckpt, number)

    with pytest.raises(UnsupportedState, match="extra"):
        train()
    numbers = everywhere(raised_at)
    assert numbers == [4, 4, 4], numbers
    assert committed(url) == [EVERY, 2 * EVERY]


def a_state_dict_that_raises_on_one_rank(url: Path) -> None:
    """Whoever catches that trains on; the other ranks are told that this step will not come, and all save on."""
    moody = Moody()
    state, raised = {"w": torch.zeros(3), "moody": moody}, {3: RuntimeError("changed size"), 5: KeyboardInterrupt()}
    numbers = range(1, 8)
    with checkpointer(url, state) as ckpt:
        for number in numbers:
            state["w"].fill_(number)
            moody.raises = raised.get(number) if rank() == 1 else None
            with nullcontext() if moody.raises is None else pytest.raises(type(moody.raises)):
                save_after(ckpt, number)
            moody.raises = None
            if number not in raised:
                ckpt.pending.wait_committed(PATIENCE_S)
            elif rank() != 1:
                with pytest.raises(SaveFailed, match=f"rank 1 failed.*{type(raised[number]).__name__}"):
                    ckpt.pending.wait_committed(PATIENCE_S)
    assert committed(url) == [number * EVERY for number in numbers if number not in raised]
    found = torch.zeros(3)
    ckptlib.load(url, {"w": found}, strict=False)
    assert torch.equal(found, state["w"])


def a_step_that_one_rank_does_again(url: Path) -> None:
    """Its `after_step` was interrupted there before the word for it was acted upon; the others had that word."""
    with checkpointer(url, {"w": torch.zeros(3)}, every=2) as ckpt:
        ckpt.after_step(1)
        if rank() == 1:
            with interrupted_at("Stopwatch.begin_step"):
                ckpt.after_step(2)
        for step in (2, 3, 4):
            ckpt.after_step(step)
        ckpt.save(4).wait_committed(PATIENCE_S)
    assert committed(url)[-1] == 4


def a_state_dict_that_raises_behind_a_save(url: Path) -> None:
    """What was said for that step knew nothing of the save, so all ranks tell whether they have a slot; for the next
    step they do not, and no rank asks alone."""
    moody, raised = Moody(), False
    state, peers = {"w": torch.zeros(3), "moody": moody}, ckptlib.Peers(copies=0, every=1)
    with checkpointer(url, state, 1000, peers=peers) as ckpt:
        for step in range(1, 1000):
            moody.raises = RuntimeError("changed size") if rank() == 1 and step > 2 else None
            try:
                ckpt.after_step(step)
            except RuntimeError:
                raised = True
            moody.raises = None
            if any(everywhere(raised)):
                break
            ckpt.save(step).wait_committed(PATIENCE_S)
        for further in range(1, 4):
            ckpt.after_step(step + further)
        ckpt.save(step + 4).wait_committed(PATIENCE_S)
    assert step + 4 in committed(url)


def a_save_of_a_step_that_one_rank_has_given_up(url: Path) -> None:
    """The others have said their words for the step that follows; what one rank does next meets them all the same."""
    moody = Moody()
    with checkpointer(url, {"w": torch.zeros(3), "moody": moody}) as ckpt:
        save_after(ckpt, 1)
        moody.raises = RuntimeError("changed size") if rank() == 1 else None
        with nullcontext() if moody.raises is None else pytest.raises(RuntimeError, match="changed size"):
            save_after(ckpt, 2)
        moody.raises = None
        with pytest.raises(SaveFailed, match=f"some rank could not save step {2 * EVERY}"):
            ckpt.save(2 * EVERY)
        save_after(ckpt, 3)
        ckpt.pending.wait_committed(PATIENCE_S)
    assert committed(url) == [EVERY, 3 * EVERY]


def a_state_dict_that_raises_where_ranks_compare(url: Path) -> None:
    """As at the first save: it fails on all ranks, none of which has said its word for the step that follows. What they
    do next is the same on all, whether they save, train or end."""
    moody = Moody()
    state = {"w": torch.zeros(3), "moody": moody}

    def fail(ckpt: ckptlib.Checkpointer, step: int) -> None:
        moody.raises = RuntimeError("changed size") if rank() == 1 else None
        with pytest.raises(RuntimeError if rank() == 1 else AgreementFailed, match="changed size"):
            ckpt.after_step(step)
        moody.raises = None

    with checkpointer(url, state, every=1) as ckpt:
        fail(ckpt, 1)
        ckpt.save(1).wait_committed(PATIENCE_S)
    with checkpointer(url, state, every=1) as ckpt:
        fail(ckpt, 2)
        ckpt.after_step(3)
        ckpt.pending.wait_committed(PATIENCE_S)
    last = checkpointer(url, state, every=1)
    fail(last, 4)
    with pytest.raises(SaveFailed, match=r"step 4 was to be saved and is not, nor is a later one.*changed size"):
        last.close()
    assert committed(url) == [1, 3]


def a_last_save_that_one_rank_cannot_take(url: Path) -> None:
    """No rank ends as if the save before were the last one: where all compare, as at the end of `loop`, and where the
    rank finds out alone."""

    def no_room(nbytes: int) -> None:
        raise NoRoom("no room, as planned")

    def train(root: Path, loops: bool) -> None:
        with checkpointer(root, {"w": torch.zeros(3)}) as ckpt:
            for step in ckpt.loop(0, 2 * EVERY) if loops else range(2 * EVERY):
                if step == EVERY + 1:
                    ckpt.pending.wait_committed(PATIENCE_S)
                    if rank() == 1:
                        refuse_slots(ckpt, no_room)
                if not loops:
                    ckpt.after_step(step + 1)

    for loops in (True, False):
        root = url / str(loops)
        with pytest.raises(SaveFailed, match="no room, as planned") as caught:
            train(root, loops)
        told = "step 6 was to be saved and is not, nor is a later one"
        assert (told in str(caught.value)) == (loops or rank() == 1), caught.value
        assert committed(root) == [EVERY]


# Calls that one rank makes alone


def alone(url: Path) -> None:
    """As the first call of all, and again later; what all do together goes well in between."""
    state, soon = {"w": torch.ones(3)}, timedelta(seconds=1)

    def call_alone(who: int, step: int) -> None:
        if rank() == who:
            others = sorted({0, 1, 2} - {who})
            began = time.monotonic()
            with pytest.raises(AgreementFailed) as caught:
                ckptlib.save(url, state, step, timeout=soon)
            assert f"rank(s) {others} did not come within 1 s" in str(caught.value), caught.value
            assert time.monotonic() - began < PATIENCE_S / 2
        dist.barrier()

    call_alone(1, 1)
    ckptlib.save(url, state, 1)
    call_alone(0, 2)
    call_alone(2, 2)
    state["w"].fill_(2)
    ckptlib.save(url, state, 2)
    assert committed(url) == [1, 2]
    with pytest.raises(AgreementFailed, match="rank 1 called save of step 4"):
        ckptlib.save(url, state, 3 if rank() != 1 else 4)
    with pytest.raises(AgreementFailed, match="rank 1 called save of step 3 with codec='raw'"):
        ckptlib.save(url, state, 3, codec="raw" if rank() == 1 else "auto")
    with pytest.raises(ValueError, match=r"codec='raw', but this process saves to .* with codec='auto'"):
        ckptlib.save(url, state, 3, codec="raw")
    state["w"].fill_(0)
    assert ckptlib.load(url, state).step == 2
    assert torch.equal(state["w"], torch.full((3,), 2.0))
    assert committed(url) == [1, 2]


def a_part_of_the_world(url: Path) -> None:
    """Ranks 0 and 2 save; rank 1 knows nothing of it. Groups of ranks that are in different numbers of them work."""
    pair, other = dist.new_group([0, 2]), dist.new_group([0, 1])
    for name, group, ranks in (("a", pair, (0, 2)), ("b", other, (0, 1)), ("c", pair, (0, 2))):
        if rank() in ranks:
            state = {"w": torch.full((4,), 7.0), "own": ckptlib.PerRank(torch.tensor(rank()))}
            ckptlib.save(url / name, state, 1, process_group=group)
            found = {"w": torch.zeros(4), "own": ckptlib.PerRank(torch.tensor(-1))}
            ckptlib.load(url / name, found, process_group=group)
            assert torch.equal(found["w"], state["w"])
            assert int(found["own"].value) == rank()
            assert next(iter(ckptlib.checkpoints(url / name))).world_size == 2


def impatient(url: Path) -> None:
    """Who did not want to wait for a commit may ask again: nothing has failed."""
    state = {"w": torch.ones(3)}
    with warnings_of_ckptlib() as warned, checkpointer(url, state, 10**6) as ckpt:
        ckpt.after_step(1)
        if rank() == 2:
            os.kill(writer_of(ckpt).pid, signal.SIGSTOP)
        pending = ckpt.save(2)
        for _ in range(2):
            with pytest.raises(ckptlib.errors.WaitTimeout):
                pending.wait_committed(0.2)
            time.sleep(0.2)
        ckpt.after_step(2)
        dist.barrier()
        if rank() == 2:
            os.kill(writer_of(ckpt).pid, signal.SIGCONT)
        pending.wait_committed(PATIENCE_S)
        assert num_failures(ckpt) == 0
    assert warned == [], warned
    assert committed(url) == [2]


def saved_again_after_one_rank_failed(url: Path) -> None:
    """The rank that has no save of this step does not go into another one alone."""
    state = {"w": torch.ones(3)}
    with checkpointer(url, state, 2) as ckpt:
        for step in range(1, 5):
            ckpt.after_step(step, metrics={"loss": object() if (step, rank()) == (4, 1) else 1.0})
            if step == 2:
                ckpt.pending.wait_committed(PATIENCE_S)
        with pytest.raises(SaveFailed, match="some rank could not save step 4"):
            ckpt.save(4)
        ckpt.save(5).wait_committed(PATIENCE_S)
    assert committed(url) == [2, 5]
