"""gloo connections of our own among the ranks of a process group, and the store by which those ranks found each other.

Knows how connections are made and closed; `group` and `link` use them.
"""

from __future__ import annotations

import functools
import os
import secrets
import socket
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import TimeoutError as NotDone
from dataclasses import dataclass, field
from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ckptlib.errors import AgreementFailed
from ckptlib.jobs import Given, JobFutures, Result
from ckptlib.ranks import incarnation

LATE_S = 5.0
"""How much longer than its time-out the store may take, at least: a busy machine is not a store that is gone."""

UNREACHED = "another rank, or the store of torch.distributed,"

BY_THE_HOST = ("gloo", "mpi", "fake", "undefined")
"""Backends of torch.distributed that have no links between devices."""


@dataclass(slots=True)
class Shared:
    """What the ranks of a process group share in this incarnation, and how far this rank has come in it.

    A process may outlive an incarnation, and meet new ones in the next: all count from the start there.
    """

    whole: Store
    """The store of torch.distributed. Another one belongs to another incarnation."""
    store: Store
    """Keys and values that no rank has written before this incarnation."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    """This rank's nonce for the group that it makes next: the same until the ranks have agreed on that."""
    meetings: Counter[str] = field(default_factory=Counter)
    """The number of meetings that this rank has seen the end of, by place."""


def connect(over: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup:
    """Makes gloo connections of our own among the ranks of `over`; collective over it. Raises AgreementFailed.

    Does not use `new_group`: that is collective over the world, and with local synchronisation it hangs when its
    members are in different numbers of groups, since the name it makes of that number differs then. Nor are the calls
    of this counted: one that fails on some ranks only is made again by these alone. So the ranks agree on a name.
    """
    try:
        shared = shared_by(over, timeout)
        place = PrefixStore("groups", shared.store)
        name = _agree(over, place, shared.nonce, timeout)
    except AgreementFailed as error:
        raise AgreementFailed(f"rank {dist.get_rank()} could not connect to the other ranks: {error}") from error
    shared.nonce = secrets.token_hex(8)
    store = PrefixStore(name, place)
    try:
        gloo = _in_time(timeout, UNREACHED, _make, store, over.rank(), over.size(), timeout)
    except AgreementFailed as error:
        raise AgreementFailed(
            f"rank {dist.get_rank()} could not connect to the other ranks: {error}. {_by()}"
        ) from error
    except RuntimeError as error:
        raise AgreementFailed(f"{failure('connecting', over.size(), timeout, error)}. {_by()}") from error
    return cast(dist.ProcessGroup, gloo)  # it has the same methods; torch's stub leaves them out


def _make(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
    _made.add(gloo)
    return gloo


_made: weakref.WeakSet[dist.ProcessGroupGloo] = weakref.WeakSet()
"""Groups that `connect` made, and that have not been destroyed."""

_left_alone: list[dist.ProcessGroupGloo] = []
"""A forked child's: the groups of its parent. To destroy one there is to wait for its threads, which only the parent
has. Closed ones too: they may be garbage that is not collected yet."""


def _in_child() -> None:
    _left_alone.extend(_made)


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_in_child)


def _by() -> str:
    """Says by which address other hosts reach this rank, and what a user may do if they do not."""
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    by = f"the interface {names} (GLOO_SOCKET_IFNAME)" if names else f"what the name {socket.gethostname()} resolves to"
    other = "another one" if names else "the interface that other hosts reach"
    return (
        f"gloo listens at {by}, at any free port. If other hosts do not reach that, or a firewall stands between them, "
        f"set GLOO_SOCKET_IFNAME to {other}, or open the ports"
    )


def disconnect(gloo: dist.ProcessGroup) -> None:
    """Closes a group that `connect` made. torch 2.6 closes it only when nothing refers to it any more."""
    if hasattr(gloo, "shutdown"):
        gloo.shutdown()


def failure(what: str, size: int, timeout: timedelta, error: RuntimeError) -> AgreementFailed:
    """Returns the error of a collective that gloo gave up."""
    return AgreementFailed(
        f"{what} among {size} ranks failed on rank {dist.get_rank()}: another rank is gone, or did not "
        f"answer within {timeout.total_seconds():.0f} s: {error}"
    )


_shared: dict[str, Shared] = {}
"""What the ranks of each process group share, by its name."""


def shared_by(over: dist.ProcessGroup, timeout: timedelta) -> Shared:
    """Returns what the ranks of a process group share. Collective if the group is new. Raises AgreementFailed."""
    whole = dist.distributed_c10d._get_default_store()
    known = _shared.get(over.group_name)
    if known is None or known.whole is not whole:
        place = PrefixStore(f"ckptlib/{over.group_name}", whole)
        name = _agree(over, place, _nonce(whole), timeout)
        known = _shared[over.group_name] = Shared(whole, PrefixStore(name, place))
    return known


def _agree(over: dist.ProcessGroup, place: Store, nonce: str, timeout: timedelta) -> str:
    """Agrees on a name; see `incarnation.agree`. Raises AgreementFailed also if the store is gone or silent."""
    ranks = dist.get_process_group_ranks(over)
    return ask_store(timeout, incarnation.agree, place, ranks, over.rank(), nonce, timeout)


def ask_store(timeout: timedelta, call: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Result:
    """Asks the store by `_in_time`. Raises AgreementFailed also if the store is gone."""
    try:
        return _in_time(timeout, "the store of torch.distributed", call, *args, **kwargs)
    except RuntimeError as error:
        raise AgreementFailed(f"the store of torch.distributed is gone: {error}") from error


def _in_time(
    timeout: timedelta, whom: str, call: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs
) -> Result:
    """Returns the result of a call that has this time-out and asks the store. Raises AgreementFailed, which names
    `whom`, if there is no answer.

    The store's client waits for an answer for ever. So a thread asks, and is left alone if none comes. It has half the
    time more, or LATE_S: an error that it raises itself says more.
    """
    timeout_s = timeout.total_seconds()
    asking, limit_s = JobFutures("store"), timeout_s + max(timeout_s / 2, LATE_S)
    try:
        result = asking.submit(call, *args, **kwargs)
    except RuntimeError as error:
        why = f"{error}. See ulimit -u, and pids.max of the container's cgroup"
        raise AgreementFailed(f"{whom} was not asked: {why}") from error
    try:
        return result.result(limit_s)
    except NotDone as error:
        raise AgreementFailed(f"{whom} has not answered within {limit_s:.0f} s") from error
    finally:
        del result  # an error in it that has this frame in its trace would keep all callers' locals, such as a model
        asking.leave()


@functools.lru_cache(maxsize=1)
def _nonce(whole: Store) -> str:
    """Returns the nonce of this process in this incarnation: when it has given up waiting, and comes again, it is still
    the one that was counted. The next incarnation may find this one's keys in the same store."""
    return secrets.token_hex(8)


def links_of(group: dist.ProcessGroup) -> frozenset[str]:
    """Returns the types of devices whose memory the group sends over links of their own, not through the host."""
    backends = [entry.partition(":") for entry in str(dist.get_backend_config(group)).split(",")]
    return frozenset(device for device, _, backend in backends if backend not in BY_THE_HOST)
