"""Names this incarnation of a job: all of its ranks have the name, and none before had it. Each group that they make in
it gets its name in the same way.

The ranks agree on it in the store by which they found each other. torchrun's store may outlive them, with all that dead
ones wrote; its agents count restarts each for itself, so that one in a lost node's place begins at 0 again (torch
2.13); and processes may make their process group again.

    rank 0: offer    = a name, new
    rank r: came/r   = the name that it sees, a nonce of its own, and its version of ckptlib; again when another name is
                       offered
    rank 0: go/name  = all nonces, when all have come for this very name; and a line that says why they cannot go on, or
                       is empty
    rank r: the name is agreed when go/name has its nonce; that of an earlier incarnation has another

Ranks of other versions of ckptlib do not understand each other, and nothing that they do later tells why. Those of
0.2.0 tell no version, and write no such line.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from ckptlib._version import __version__
from ckptlib.errors import AgreementFailed

POLL_FIRST_S = 0.001
POLL_LAST_S = 0.1


def agree(store: Store, ranks: Sequence[int], rank: int, nonce: str, timeout: timedelta) -> str:
    """Returns the name; collective. `ranks`: numbers in the world, for messages; `rank`: this one's place among them.
    `nonce`: of no other process, and of no name agreed before; the same when this rank has failed and comes again.

    Raises AgreementFailed when the others do not come in time, or run another version of ckptlib.
    """
    if rank == 0:
        return _lead(store, ranks, timeout)
    return _follow(store, ranks, rank, nonce, timeout)


def _lead(store: Store, ranks: Sequence[int], timeout: timedelta) -> str:
    name = secrets.token_hex(8)
    store.set("offer", name)
    nonces, versions = dict[int, str](), dict[int, str]()
    deadline, pause = time.monotonic() + timeout.total_seconds(), POLL_FIRST_S
    while True:
        for r in range(1, len(ranks)):
            if r not in nonces and store.check([f"came/{r}"]):
                seen, nonce, *version = store.get(f"came/{r}").decode().split(" ")
                if seen == name:
                    nonces[r], versions[r] = nonce, "".join(version)
        if len(nonces) == len(ranks) - 1:
            why = _unlike(ranks, versions)
            store.set(f"go/{name}", " ".join(nonces[r] for r in sorted(nonces)) + f"\n{why}")
            if why:
                raise AgreementFailed(why)
            return name
        if time.monotonic() > deadline:
            missing = [ranks[r] for r in range(1, len(ranks)) if r not in nonces]
            raise AgreementFailed(f"rank(s) {missing} did not come within {timeout.total_seconds():.0f} s")
        time.sleep(pause)
        pause = min(2 * pause, POLL_LAST_S)


def _unlike(ranks: Sequence[int], versions: Mapping[int, str]) -> str:
    """Says which rank runs another version of ckptlib than rank 0, this one; nothing if none does. `versions`: by
    place."""
    others = {r: version for r, version in versions.items() if version != __version__}
    if not others:
        return ""
    r, version = min(others.items())
    return (
        f"rank {ranks[r]} runs ckptlib {version or 'of an older version'}, and rank {ranks[0]} ckptlib {__version__}. "
        f"{_REMEDY}"
    )


_REMEDY = "All ranks of a job need the same version: install one on every host"


def _follow(store: Store, ranks: Sequence[int], rank: int, nonce: str, timeout: timedelta) -> str:
    name = ""
    deadline, pause = time.monotonic() + timeout.total_seconds(), POLL_FIRST_S
    while True:
        offered = store.get("offer").decode() if store.check(["offer"]) else ""
        if offered != name:
            name, pause = offered, POLL_FIRST_S
            store.set(f"came/{rank}", f"{name} {nonce} {__version__}")
        if name and store.check([f"go/{name}"]):
            nonces, line, why = store.get(f"go/{name}").decode().partition("\n")
            if nonce in nonces.split():
                if not line:
                    why = f"rank {ranks[0]} runs ckptlib of an older version than {__version__}, this rank's. {_REMEDY}"
                if why:
                    raise AgreementFailed(why)
                return name
        if time.monotonic() > deadline:
            raise AgreementFailed(
                f"rank {ranks[0]}, or another that it waits for, did not come within {timeout.total_seconds():.0f} s"
            )
        time.sleep(pause)
        pause = min(2 * pause, POLL_LAST_S)
