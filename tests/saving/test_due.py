"""What is due stays due until it is taken, and is due again when it came to nothing; told without ranks."""

from __future__ import annotations

from typing_extensions import override

from ckptlib.policy.overhead import Overhead
from ckptlib.policy.when import First, Minutes, Policy, Steps
from ckptlib.saving.due import DueSaves


def due(every: int = 5, in_memory: int | None = None) -> DueSaves:
    return DueSaves(Steps(every), None if in_memory is None else Steps(in_memory))


def test_what_is_due_stays_due_until_it_is_taken() -> None:
    saves = due()
    for step in range(1, 5):
        saves.look_ahead(step)
        assert not saves.to_store
    saves.look_ahead(5)
    saves.look_ahead(6)  # no slot was free
    assert saves.to_store
    saves.begin(to_store=True)
    assert not saves.to_store
    saves.look_ahead(7)
    assert not saves.to_store


def test_a_snapshot_for_memory_serves_no_save() -> None:
    saves = due(5, in_memory=2)
    for step in range(1, 6):
        saves.look_ahead(step)
    assert (saves.to_store, saves.in_memory) == (True, True)
    saves.begin(to_store=False)
    assert (saves.to_store, saves.in_memory) == (True, False)
    saves.begin(to_store=True)
    assert (saves.to_store, saves.in_memory) == (False, False)


def test_without_peers_nothing_is_due_in_memory() -> None:
    saves = due(1000)
    for step in range(1, 20):
        saves.look_ahead(step)
    assert not saves.in_memory


def test_the_last_step_of_a_loop_is_due() -> None:
    saves = due(1000)
    saves.final = 7
    saves.look_ahead(6)
    assert not saves.to_store
    saves.look_ahead(7)
    assert saves.to_store


def test_what_was_torn_is_owed_without_overlap_once() -> None:
    saves = due(1000)
    saves.owe(to_store=False, inline=True)
    assert (saves.to_store, saves.in_memory, saves.inline) == (False, True, True)
    saves.owe(to_store=True)
    assert (saves.to_store, saves.inline) == (True, True), "the second debt does not forgive the first"
    saves.begin(to_store=True)
    assert (saves.to_store, saves.in_memory, saves.inline) == (False, False, False)


def test_a_save_that_waits_is_still_taken_without_overlap() -> None:
    """While the writer reads a slot, a snapshot for memory alone may come before the one that is owed."""
    saves = due(1000, in_memory=1)
    saves.owe(to_store=True, inline=True)
    saves.begin(to_store=False)
    assert (saves.to_store, saves.inline) == (True, True)
    saves.begin(to_store=True)
    assert (saves.to_store, saves.inline) == (False, False)


def test_a_step_that_is_saved_already_is_not_saved_again_and_keeps_what_is_owed() -> None:
    saves = due(1000)
    saves.owe(to_store=True, inline=True)
    saves.skip(to_store=True)
    assert (saves.to_store, saves.in_memory, saves.inline) == (False, False, True)


def test_failures_are_counted_in_a_row() -> None:
    saves = due()
    first, second = RuntimeError("first"), RuntimeError("second")
    saves.fail(first)
    saves.fail(second)
    assert (saves.failures, saves.error) == (2, second)
    saves.succeed()
    assert (saves.failures, saves.error) == (0, None)
    saves.fail(first)
    assert (saves.failures, saves.error) == (1, first)


def test_a_policy_is_not_asked_for_what_is_due_already() -> None:
    asked = []

    class Counted(Policy):
        @override
        def due(self, step: int) -> bool:
            asked.append(step)
            return step == 1

    saves = DueSaves(Counted(), None)
    for step in (1, 2, 3):
        saves.look_ahead(step)
    saves.begin(to_store=True)
    saves.look_ahead(4)
    assert asked == [1, 4]


# -- waiting


def test_a_save_that_waits_for_two_intervals_is_told_once() -> None:
    saves = due(100)
    told = []
    for step in range(1, 1000):
        saves.look_ahead(step)
        if step == 100:
            saves.begin(to_store=True)
        if saves.must_tell():
            told.append(step)
    assert told == [400], "due at 200"


def test_what_waits_again_is_not_told_again_before_a_save_was_taken_in_time() -> None:
    saves = due(10)
    told = []
    for step in range(1, 300):
        saves.look_ahead(step)
        if saves.must_tell():
            told.append(step)
        if step in (10, 45, 85, 125) or step > 130:  # 45 to 125: each of them late
            saves.begin(to_store=True)
    assert told == [40]


def test_saves_that_are_late_again_and_again_are_told_of_ever_less_often() -> None:
    """As where a save takes a little less than two intervals: every other one waits too long."""
    saves = due(10)
    told, waited, late = [], 0, True
    for step in range(1, 1000):
        saves.look_ahead(step)
        if saves.must_tell():
            told.append(saves.num_late)
        waited += saves.to_store
        if waited > (20 if late else 0):
            saves.begin(to_store=True)
            waited, late = 0, not late
    assert told == [1, 2, 4, 8, 16]


def test_a_job_that_goes_on_measures_from_where_it_does() -> None:
    saves = due(1000)
    told = []
    for step in range(10_501, 14_000):
        saves.look_ahead(step)
        if saves.must_tell():
            told.append(step)
    assert told == [12_000], "due at 11,000, and the interval is that of this job: 500"


def test_a_last_save_and_one_that_is_owed_wait_no_interval() -> None:
    saves = due(1000)
    saves.final = 50
    for step in range(1, 51):
        saves.look_ahead(step)
        assert not saves.must_tell()


# -- what goes by more than the step


def steps_due(saves: DueSaves, steps: range, step_s: float = 1.0) -> list[int]:
    """Each save is taken where it falls due."""
    found = []
    for step in steps:
        saves.look_ahead(step, now=step * step_s)
        if saves.to_store:
            found.append(step)
            saves.begin(to_store=True)
    return found


def test_minutes_count_from_the_last_save() -> None:
    assert steps_due(DueSaves(Minutes(1), None), range(1, 200)) == [61, 121, 181]
    assert steps_due(DueSaves(Minutes(1) | Steps(100), None), range(1, 250)) == [61, 100, 160, 200]


def test_a_first_save_is_due_once_in_each_run_wherever_it_goes_on() -> None:
    assert steps_due(DueSaves(First() | Steps(50), None), range(1, 120)) == [1, 50, 100]
    assert steps_due(DueSaves(First(), None), range(501, 600)) == [501]


def test_an_overhead_goes_by_the_agreed_interval_from_the_last_save() -> None:
    saves = DueSaves(Overhead(at_most=0.01), None)
    assert steps_due(saves, range(501, 600)) == [], "nothing is agreed"
    saves.store.agree(40, widened=False)
    assert steps_due(saves, range(600, 700)) == [600, 640, 680]
    saves.store.agree(30, widened=True)
    assert steps_due(saves, range(700, 800)) == [], "a rank needs a baseline"
    saves.store.agree(70, widened=False)
    assert steps_due(saves, range(800, 950)) == [800, 870, 940]


def test_a_save_for_another_reason_begins_an_interval_anew() -> None:
    saves = DueSaves(Overhead(at_most=0.01) | Steps(100), None)
    saves.store.agree(60, widened=False)
    assert steps_due(saves, range(1, 300)) == [60, 100, 160, 200, 260]


def test_a_snapshot_for_memory_does_not_count_as_a_save() -> None:
    saves = DueSaves(Overhead(at_most=0.01), Steps(2))
    saves.store.agree(5, widened=False)
    for step in (1, 2, 3, 4):
        saves.look_ahead(step, now=0.0)
        saves.begin(to_store=False)
        assert not saves.to_store
    saves.look_ahead(5, now=0.0)
    assert saves.to_store


def test_snapshots_in_memory_keep_to_a_budget_of_their_own() -> None:
    saves = DueSaves(Steps(10), Overhead(at_most=0.01))
    assert saves.memory is not None
    saves.memory.agree(4, widened=False)
    taken = []
    for step in range(1, 31):
        saves.look_ahead(step)
        if saves.to_store or saves.in_memory:
            taken.append(step)
            saves.begin(saves.to_store)
    assert taken == [4, 8, 10, 14, 18, 20, 24, 28, 30], "what is saved to the store is a snapshot, too"
