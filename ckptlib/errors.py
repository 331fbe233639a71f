"""The errors of ckptlib, one class per reaction that a caller can have.

    CkptError
    +-- StoreError              the store refused or failed; the same call may work later
    |   +-- ObjectNotFound      no object has this key (also a KeyError)
    |   |   +-- NotBrought      a share is on another host, and was not asked to be brought
    |   +-- ObjectUnreadable    the object is there and cannot be read, for a reason that may be its own
    |   +-- ObjectExists        the key is taken; objects are never overwritten
    |   +-- StoreFull           no space or quota left
    |   +-- StoreDenied         what fails again until somebody changes something: credentials, rights, the bucket
    |   +-- StoreTimeout        no answer, or no progress, in the time allowed
    +-- FormatError             bytes that are not what their name says: torn, foreign, hostile
    |   +-- NewerFormat         written by a later major version of ckptlib
    +-- CorruptData             bytes whose digest does not match
    +-- CheckpointNotFound      no such committed step
    +-- StateError              the state given cannot be saved or loaded as asked
    |   +-- UnsupportedState    a kind of object or tensor that ckptlib does not know
    |   +-- StateMismatch       names, shapes or dtypes of target and checkpoint differ
    +-- SaveFailed              a save that will never be committed; earlier steps are untouched
    |   +-- Superseded          a newer generation of the job owns the root
    |   +-- StateChanged        other tensors than at the save before; the next save compares them first
    |   +-- ReplicasDiffer      ranks hold different data where it should be alike (also an UnsupportedState)
    +-- NoRoom                  no memory or space for a snapshot
    +-- TornSnapshot            the state was written to while it was copied; another one is taken
    +-- ReplicationFailed       a peer did not get a replica of a snapshot; the next one may succeed
    |   +-- PeerRefused         the peer has no room for it, or wants another one
    +-- AgreementFailed         ranks did not come together in time
    +-- WaitTimeout             something took longer than its time-out (also a TimeoutError)

Every message says what, where, expected, got, and what to do. Ranks tell one another the name of an error's class and
its message, and raise that class (see `group.together`): every class stands here and can be made from a message alone.
"""

from __future__ import annotations

import json

from typing_extensions import override


class CkptError(Exception):
    """Base class of errors at run time. Wrong arguments, and calls in a wrong order, raise ValueError or TypeError."""


class StoreError(CkptError):
    """The store refused or failed; nothing was published by the call."""


class ObjectNotFound(StoreError, KeyError):
    """No object has this key."""

    @override
    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0]) if self.args else ""


class NotBrought(ObjectNotFound):
    """The share of a saved rank is elsewhere, and was not asked to be brought."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank
        """The saved rank; -1 if another rank of the job reported the error."""


class ObjectUnreadable(StoreError):
    """The object is there and cannot be read, for a reason that may be its own: a bad sector, a permission.

    It may be the whole store's, too; a second object tells.
    """


class ObjectExists(StoreError):
    """The key is taken. Objects are immutable: they are never put twice."""


class StoreFull(StoreError):
    """No space or no quota left in the store."""


class StoreDenied(StoreError):
    """The store refuses, and will again until somebody changes something: credentials, rights, or the bucket."""


class StoreTimeout(StoreError):
    """The store did not answer, or the transfer made no progress, in the time allowed."""


class FormatError(CkptError):
    """Bytes that are not what their name says: torn, foreign or hostile."""


class NewerFormat(FormatError):
    """Written by a later major version of ckptlib; update ckptlib to read it."""


class CorruptData(CkptError):
    """Bytes whose digest does not match the one recorded when they were saved."""


class CheckpointNotFound(CkptError):
    """No such committed step."""


class StateError(CkptError):
    """The state given cannot be saved or loaded as asked."""


class UnsupportedState(StateError):
    """A kind of object or tensor that ckptlib does not know how to save."""


class StateMismatch(StateError):
    """Names, shapes or dtypes of the target and of the checkpoint differ."""


class SaveFailed(CkptError):
    """A save that will never be committed. Earlier steps are untouched.

    The message says that it may be committed all the same if its manifest or this rank's part may have been put, as
    when only the answer was lost; if the next start of the job may commit it, because the store did not record the
    failure; or if local disks have the step. `ckptlib ls` tells whether it is there.
    """


class Superseded(SaveFailed):
    """A newer generation of the job owns the root; this one may no longer delete, nor commit what that left behind."""


class StateChanged(SaveFailed):
    """A rank's state is made of other tensors than at the save before. The next save compares all ranks' first."""


class ReplicasDiffer(SaveFailed, UnsupportedState):
    """Ranks hold different data that should be equal, so that no one of them can write it for the others."""


class NoRoom(CkptError):
    """No memory or disk space for a snapshot."""


class TornSnapshot(CkptError):
    """The state was written to while it was copied; the snapshot is worth nothing."""


class ReplicationFailed(CkptError):
    """A peer did not get a replica of a snapshot. The snapshot itself is untouched; the next one may get there."""


class PeerRefused(ReplicationFailed):
    """The peer has no room for a replica, or wants another one."""


class AgreementFailed(CkptError):
    """Ranks did not come together in time; the message names those that are missing, if known."""


class WaitTimeout(CkptError, TimeoutError):
    """Something took longer than its time-out."""


def describe(error: BaseException) -> str:
    """Returns one line for a document or a message to another process."""
    text = str(error) if isinstance(error, CkptError) else f"{type(error).__name__}: {error}"
    return json.loads(json.dumps(text[:2000]))  # type: ignore[no-any-return]


EXIT_PREEMPTED = 75
"""EX_TEMPFAIL of sysexits.h: try again later."""


class Preempted(SystemExit):
    """The job was told to stop before its end, and everything that it needs to go on is committed. Not an error.

    Unless the program catches it, the process ends with status 75: with 0, a launcher would take the job for done.
    """

    def __init__(self) -> None:
        super().__init__(EXIT_PREEMPTED)
