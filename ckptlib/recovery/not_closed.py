"""Other Checkpointers of this process that save to the same root, and that nobody has closed.

Slots and locks tell a job only of the writers of other processes. What this process writes itself it must ask.
"""

from __future__ import annotations

import logging
import time

from ckptlib.errors import WaitTimeout
from ckptlib.format.keys import parse_save
from ckptlib.ranks.group import Group
from ckptlib.ranks.together import together_at_length
from ckptlib.saving.session import Session, not_closed
from ckptlib.stores.secrets import without_userinfo

log = logging.getLogger(__name__)


def await_others(session: Session) -> None:
    """Waits until what the session's `others` have under way by now is saved, or has failed: otherwise a restore would
    take an older step, or begin anew, and the first save after it would be their end. Collective. Raises
    WaitTimeout."""

    def wait() -> None:
        for other in session.others:
            _await(other)
            _warn_of_memory(other)

    together_at_length(session.group, "waiting for saves of a Checkpointer that is not closed", wait)


def await_all(group: Group, url: str) -> None:
    """Does what `await_others` does, for a caller that looks for a root's step before it has a session. Collective."""

    def wait() -> None:
        for session in not_closed(url):
            _await(session)

    together_at_length(group, f"waiting for saves of this process to {without_userinfo(url)}", wait)


def _await(other: Session) -> None:
    timeout_s = 1.5 * other.root.save_deadline_s  # longer than any save may take
    with other.outcomes.turn:  # nobody is within a call that takes a snapshot
        other.stager.fail_left()
    other.outcomes.poll()
    deadline, asked = time.monotonic() + timeout_s, _under_way(other)
    if not asked:
        return
    steps = ", ".join(map(str, sorted(asked)))
    what = f"{other.store.url}: an earlier run or `ckptlib.save_async` of this process still writes step {steps}"
    log.warning("%s; this waits for it. Close a run, by `with` or `close`, before the next begins", what)
    while asked & _under_way(other):
        other.outcomes.poll(0.05)
        if time.monotonic() > deadline:
            raise WaitTimeout(
                f"{what}, which has not ended within {timeout_s:.0f} s: {other.store_state.waits_for()}. Nothing was "
                "restored. Close that Checkpointer and make this one again, or start the program again"
            )


def _under_way(other: Session) -> set[int]:
    """Returns the steps that it may yet save. One that is expected, and that nobody copies any more, never comes:
    whoever took it was interrupted, as by Ctrl-C."""
    expected = {parse_save(save).step for save in other.writer.expected}
    expected &= {*other.snapshots.settling_steps}
    return expected | {parse_save(save).step for save in other.writer.awaited}  # last: expected saves go there


def _warn_of_memory(other: Session) -> None:
    """Warns of a step in its memory only: its slots are open, so nobody else in this process may look into them."""
    newest = other.snapshots.own.newest
    if other.settings.peers is not None and newest > other.newest_step:
        log.warning(
            "%s: another Checkpointer of this process, which is not closed, has step %d in memory only, from where "
            "this one cannot restore it. To go on from there, call its `save` and `close` first",
            other.store.url,
            newest,
        )
