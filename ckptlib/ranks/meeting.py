"""How the ranks of a process group find each other: the group made over it, and meetings.

A meeting guards calls that one rank may make alone by mistake. It uses keys in the store that the ranks share, not a
collective, so a rank that waits in vain leaves nothing half done.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ckptlib.errors import AgreementFailed
from ckptlib.ranks.connections import ask_store, shared_by
from ckptlib.ranks.group import Group, SoloGroup, TorchGroup
from ckptlib.ranks.notices import Notices

log = logging.getLogger(__name__)

LONGEST = timedelta(days=365)
"""How long ranks wait at a meeting, at most: neither Python's locks nor torch's store take timedelta.max."""

ALONE = ("", "1")
"""Values of WORLD_SIZE if no launcher has started other ranks."""


def group_or_world(over: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Returns the given group, else the world; None if torch.distributed is not initialised.

    Raises AgreementFailed in a process that was forked from a rank: to use the rank's connections would break them.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if dist.group.WORLD is _inherited_world:
        raise AgreementFailed(
            f"process {os.getpid()} was forked from rank {dist.get_rank()} and is not a rank of the job; save and load "
            "in the ranks, or in a process that multiprocessing's spawn or forkserver starts"
        )
    return over if over is not None else dist.group.WORLD


_inherited_world: dist.ProcessGroup | None = None
"""The world of the rank that this process was forked from."""


def _in_child() -> None:
    global _inherited_world
    if dist.is_available() and dist.is_initialized():
        _inherited_world = dist.group.WORLD


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_in_child)


def group_of(over: dist.ProcessGroup | None, timeout: timedelta) -> Group:
    """Returns the group over a process group; a job of one if torch.distributed is not initialised."""
    found = group_or_world(over)
    if found is None:
        _warn_of_others(os.environ.get("WORLD_SIZE", ""))
        return SoloGroup()
    return TorchGroup(found, timeout)


def is_gone(over: dist.ProcessGroup | None) -> bool:
    """Returns whether a process group was destroyed; for None, which stands for none: whether there is one by now."""
    has_world = dist.is_available() and dist.is_initialized()
    if not has_world or over is None:
        return has_world == (over is None)
    try:
        dist.get_process_group_ranks(over)
    except KeyError:  # torch does not know it any more
        return True
    return False


def is_alone() -> bool:
    """Whether this process is a job of its own, as far as torch and its launcher know: it waits for no other rank."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return False
    return os.environ.get("WORLD_SIZE", "") in ALONE


@functools.cache
def _warn_of_others(world_size: str) -> None:
    """Warns, once, if a launcher has started several ranks that do not know of one another."""
    if world_size not in ALONE:
        log.warning(
            "WORLD_SIZE is %s, but there is no process group: this process is a job of its own, and so are the others; "
            "two such jobs cannot save to one root. Call torch.distributed.init_process_group before",
            world_size,
        )


def notices_over(over: dist.ProcessGroup | None, name: str, timeout: timedelta) -> Notices:
    """Returns the notices of ranks that met before, in the group `over`; None: a job of one. `name`: a new one."""
    if over is None or over.size() == 1:
        return Notices(None, name, 1)
    return Notices(shared_by(over, timeout).store, name, over.size())


def meet(over: dist.ProcessGroup | None, place: str, what: str, timeout: timedelta) -> None:
    """Returns when every rank of `over` has come to `place`, for the same `what`.

    It is no collective, which would be left half done: a rank that waits in vain gives the meeting up for all, and
    whoever comes later goes to the next one, so that ranks find each other again. Raises AgreementFailed, which names
    the ranks that did not come within `timeout`, or came for something else.
    """
    group = group_or_world(over)
    if group is None or group.size() == 1:
        return
    attended, timeout = False, min(timeout, LONGEST)
    try:
        shared = shared_by(group, timeout)
        store = PrefixStore(f"meetings/{place}", shared.store)
        while not attended:
            number = shared.meetings[place]
            shared.meetings[place] += 1
            attended = _attend_in_time(store, number, group, what, timeout)
    except AgreementFailed as error:
        raise _nobody_came(what, str(error)) from error


def _attend_in_time(store: Store, number: int, group: dist.ProcessGroup, what: str, timeout: timedelta) -> bool:
    """See `_attend`. Raises AgreementFailed also if the store is gone, or does not answer."""
    left = threading.Event()
    try:
        return ask_store(timeout, _attend, store, number, group, what, timeout, left)
    finally:
        left.set()


def _attend(
    store: Store, number: int, group: dist.ProcessGroup, what: str, timeout: timedelta, left: threading.Event
) -> bool:
    """Returns whether the meeting takes place; False when it was over before this rank came. Raises AgreementFailed.

    `left`: set when this rank waits no longer. If the store answers after that, the meeting is given up for all.
    """
    verdict = f"{number}/verdict"
    if store.check([verdict]):
        return False
    num_came = 0 if left.is_set() else _come(store, number, group, what)
    differing = _differing(_came(store, number, group)) if num_came == group.size() else ""
    if left.is_set():
        store.compare_set(verdict, "", f"rank {dist.get_rank()} has left: the store had not answered it in time")
        return False
    if num_came == group.size():
        store.compare_set(verdict, "", differing or _MET)
        for key in ("verdict", "count"):  # all ranks have left the meeting before
            store.delete_key(f"{number - 1}/{key}")
    else:
        try:
            store.wait([verdict], timeout)
        except dist.DistNetworkError:
            raise
        except RuntimeError:  # a time-out; only TCPStore has a class for it
            missing = sorted(set(dist.get_process_group_ranks(group)) - _came(store, number, group).keys())
            reason = f"rank(s) {missing} did not come within {timeout.total_seconds():.0f} s"
            store.compare_set(verdict, "", reason)
    found = store.get(verdict).decode()
    if found != _MET:
        raise AgreementFailed(found)
    return True


def _come(store: Store, number: int, group: dist.ProcessGroup, what: str) -> int:
    """Notes that this rank has come. Returns how many ranks have come to the meeting, with this one."""
    store.set(f"rank{group.rank()}", f"{number} {what}")
    return store.add(f"{number}/count", 1)


def _nobody_came(what: str, why: str) -> AgreementFailed:
    return AgreementFailed(
        f"{what} on rank {dist.get_rank()}: {why}. Every rank of the process group must make the same call"
    )


_MET = "met"


def _came(store: Store, number: int, group: dist.ProcessGroup) -> dict[int, str]:
    """Returns, by rank of the world, the purpose that it came to this meeting for."""
    found = {}
    for rank, rank_of_world in enumerate(dist.get_process_group_ranks(group)):
        if store.check([f"rank{rank}"]):
            last, _, what = store.get(f"rank{rank}").decode().partition(" ")
            if int(last) == number:
                found[rank_of_world] = what
    return found


def _differing(came: dict[int, str]) -> str:
    """Says which ranks came for which purpose; nothing when all came for the same."""
    first = {what: rank for rank, what in sorted(came.items(), reverse=True)}
    return "; ".join(f"rank {rank} called {what}" for what, rank in first.items()) if len(first) > 1 else ""
