"""What this rank tells the others of its snapshots and links, and how it acts on what they told."""

from __future__ import annotations

import time

from ckptlib.errors import WaitTimeout
from ckptlib.ranks.beat import Word
from ckptlib.ranks.held import NONE
from ckptlib.ranks.together import together
from ckptlib.saving.ballots import Poll
from ckptlib.saving.pending import Pending
from ckptlib.saving.session import Session


def say(session: Session, word: Word) -> tuple[Word, Poll]:
    """Completes this rank's word for the next step with what the session knows, and returns its votes with it."""
    snapshots, outcomes = session.snapshots, session.outcomes
    word = session.tier.say(word, failed=outcomes.run.count > 0)._replace(
        agree=int(session.planner.must_compare),
        needs_held=snapshots.needs_held(),
        behind=int(snapshots.behind),
        failures=max(outcomes.run.count, word.failures),
        failed=max(int(outcomes.run.too_long), word.failed),
        superseded=int(session.store_state.superseded is not None),
        link_failed=int(session.link.failed),
        calm=int(session.link.calm),
        oldest_held=_newest_held(session),
        held_since=snapshots.own.since,
        oldest_settled=snapshots.own.settled,
        unrecorded=int(not session.lineage.recorded),
        oldest_local=session.tier.own.newest,
        oldest_local_settled=session.tier.own.settled,
    )
    return word, session.verdicts.poll()  # after reading `own`: what is held has been voted on


def _newest_held(session: Session) -> int:
    """Returns the newest step that this rank holds. With peers, rank 0 returns NONE until the generation's record is
    in the store: before that, no job could restore from the snapshot."""
    return session.snapshots.own.newest if session.lineage.recorded or session.settings.peers is None else NONE


def follow(session: Session, word: Word) -> None:
    """Acts on what all ranks said of their snapshots and links. Collective when links are mended."""
    session.snapshots.note_trained(word.step)
    session.snapshots.note_all(word.oldest_held, word.held_since, word.oldest_settled)
    session.tier.note_all(word.oldest_local, word.local_since, word.oldest_local_settled, bool(word.unrecorded))
    session.link.mend(bool(word.link_failed), bool(word.calm))


def await_room(session: Session, timeout_s: float | None = None) -> None:
    """Returns when every rank has a slot for another snapshot. Collective. Main thread.

    A snapshot that was begun and never let `go`, because the caller was interrupted, fails first: it would keep its
    slot for ever.

    Raises WaitTimeout after `timeout_s`. The default is longer than the deadline of a save, by which its slot is free.
    """
    session.stager.fail_left()
    with session.stopwatch.stalled():
        _await_room(session, 1.5 * session.root.save_deadline_s if timeout_s is None else timeout_s)


def _await_room(session: Session, timeout_s: float) -> None:
    group, deadline = session.group, time.monotonic() + timeout_s
    lacking = True
    while lacking:
        lacks = together(group, "waiting for a slot", lambda: _lacks_room(session, deadline, timeout_s))
        own, local = session.snapshots.own, session.tier.own
        (any_lacks, since, local_since, unrecorded), (newest, settled, newest_local, local_settled) = group.extremes(
            [int(lacks), own.since, local.since, int(not session.lineage.recorded)],
            [_newest_held(session), own.settled, local.newest, local.settled],
        )
        lacking = bool(any_lacks)
        poll = session.verdicts.poll()
        if poll.votes:
            session.verdicts.conclude(poll, group.start_sum(poll.votes)())
        session.snapshots.note_all(newest, since, settled)
        session.tier.note_all(newest_local, local_since, local_settled, bool(unrecorded))


def await_local(session: Session, pending: Pending) -> None:
    """Returns when a save is on the disks of all ranks. Collective. Raises SaveFailed if it never will be, and
    WaitTimeout."""
    group, deadline = session.group, time.monotonic() + 1.5 * session.root.save_deadline_s

    def is_there() -> bool:
        try:
            pending.wait_local(group.patience_s)
        except WaitTimeout:
            if time.monotonic() > deadline:
                raise
            return False
        return True

    with session.stopwatch.stalled():
        while group.any(not together(group, f"waiting for step {pending.step} on local disks", is_there)):
            pass


def _lacks_room(session: Session, deadline: float, timeout_s: float) -> bool:
    """Waits a while for a slot, and returns whether there is still none. Raises WaitTimeout after the deadline."""
    patience = time.monotonic() + session.group.patience_s
    snapshots, outcomes = session.snapshots, session.outcomes
    outcomes.poll()
    while snapshots.settling or snapshots.needs_held() > snapshots.own.newest:
        now = time.monotonic()
        if now > deadline:
            raise WaitTimeout(f"no slot was free within {timeout_s:.0f} s: {session.store_state.waits_for()}")
        if now > patience:
            return True
        outcomes.poll(0.02)
    return False
