"""Checks that the store answers and still has the root: if not, no single step is to blame."""

from __future__ import annotations

from ckptlib.errors import CheckpointNotFound
from ckptlib.format import keys
from ckptlib.ranks.together import together
from ckptlib.saving.session import Session


def check_store(session: Session) -> None:
    """Raises if any rank cannot read from the store as a whole. Collective."""
    together(session.group, "reading from the store", session.catalog.root)


def check_there(session: Session) -> None:
    """Checks that the root is there, after rank 0 has listed nothing: a file system that is not mounted any more lists
    nothing either. Collective.

    Raises CheckpointNotFound.
    """
    try:
        together(session.group, "reading from the store", lambda: session.group.rank == 0 and session.catalog.root())
    except CheckpointNotFound as error:
        raise CheckpointNotFound(
            f"{session.catalog.store.url} has no {keys.ROOT}, and it was there when the Checkpointer was made. Was it "
            "moved or removed, or is its file system not mounted any more? Nothing was restored. Put it back, and "
            "start the job again. To begin anew, start it again as it is"
        ) from error
