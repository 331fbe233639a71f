"""Names this incarnation of a job: all of its ranks have the name, and none before had it. Each group that they make in
it gets its name in the same way.

The ranks agree on it in the store by which they found each other. torchrun's store may outlive them, with all that dead
ones wrote; its agents count restarts each for itself, so that one in a lost node's place begins at 0 again (torch
2.13); and processes may make their process group again.

    rank 0: offer    = a name, new
    rank r: came/r   = the name that it sees, and a nonce of its own; again when another is offered
    rank 0: go/name  = all nonces, when all have come for this very name
    rank r: the name is agreed when go/name has its nonce; that of an earlier incarnation has another
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from ckptlib.errors import AgreementFailed

POLL_FIRST_S = 0.001
POLL_LAST_S = 0.1


def agree(store: Store, ranks: Sequence[int], rank: int, nonce: str, timeout: timedelta) -> str:
    """Returns the name; collective. `ranks`: numbers in the world, for messages; `rank`: this one's place among them.
    `nonce`: of no other process, and of no name agreed before; the same when this rank has failed and comes again.

    Raises AgreementFailed when the others do not come in time.
    """
    if rank == 0:
        return _lead(store, ranks, timeout)
    return _follow(store, ranks, rank, nonce, timeout)


def _lead(store: Store, ranks: Sequence[int], timeout: timedelta) -> str:
    name = secrets.token_hex(8)
    store.set("offer", name)
    nonces: dict[int, str] = {}
    deadline, pause = time.monotonic() + timeout.total_seconds(), POLL_FIRST_S
    while True:
        for r in range(1, len(ranks)):
            if r not in nonces and store.check([f"came/{r}"]):
                seen, _, nonce = store.get(f"came/{r}").decode().partition(" ")
                if seen == name:
                    nonces[r] = nonce
        if len(nonces) == len(ranks) - 1:
            store.set(f"go/{name}", " ".join(nonces[r] for r in sorted(nonces)))
            return name
        if time.monotonic() > deadline:
            missing = [ranks[r] for r in range(1, len(ranks)) if r not in nonces]
            raise AgreementFailed(f"rank(s) {missing} did not come within {timeout.total_seconds():.0f} s")
        time.sleep(pause)
        pause = min(2 * pause, POLL_LAST_S)


def _follow(store: Store, ranks: Sequence[int], rank: int, nonce: str, timeout: timedelta) -> str:
    name = ""
    deadline, pause = time.monotonic() + timeout.total_seconds(), POLL_FIRST_S
    while True:
        offered = store.get("offer").decode() if store.check(["offer"]) else ""
        if offered != name:
            name, pause = offered, POLL_FIRST_S
            store.set(f"came/{rank}", f"{name} {nonce}")
        if name and store.check([f"go/{name}"]) and nonce in store.get(f"go/{name}").decode().split():
            return name
        if time.monotonic() > deadline:
            raise AgreementFailed(
                f"rank {ranks[0]}, or another that it waits for, did not come within {timeout.total_seconds():.0f} s"
            )
        time.sleep(pause)
        pause = min(2 * pause, POLL_LAST_S)
