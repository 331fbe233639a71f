"""Looks at what the hosts of a job hold: snapshots in their memory, and steps on their local disks.

Each rank looks at its own host, and tells the others; see `inventory` and `local_step` for what they conclude.
"""

from __future__ import annotations

import os

from ckptlib.catalog.catalog import Catalog
from ckptlib.ranks.together import by_rank_0, together
from ckptlib.recovery import local_step
from ckptlib.recovery.begun import enter_begun
from ckptlib.recovery.inventory import Inventory, describe, look
from ckptlib.recovery.local_step import OnHosts, on_hosts
from ckptlib.saving.session import Session
from ckptlib.slots.host import boot_id, memory_of
from ckptlib.stores.local import LocalStore


def look_in_memory(session: Session) -> Inventory:
    """Returns the snapshots in the memory of all hosts; collective. Empty if the job keeps none."""
    if session.settings.peers is None:
        return Inventory([])

    def own() -> bytes:
        with session.snapshots.arena.others.opened() as slots:
            found = look(slots, session.root.id)
        memories = map(memory_of, filter(os.path.isdir, session.snapshots.arena.others.directories))
        return describe(found, memories, boot_id(), os.sched_getaffinity(0))

    return Inventory(session.group.gather(together(session.group, "looking for snapshots in memory", own)))


def look_at_disks(session: Session, step: int | str | None) -> OnHosts:
    """Returns the steps that the local disks of all hosts hold, and that may be wanted; collective. None without a
    local tier.

    Abandoned steps are left out: there may be more of them than are looked at, and they may be later ones.
    """
    local, group = session.settings.local, session.group
    if local is None:
        return OnHosts({}, {})
    what = f"looking at {local.path}"
    with LocalStore(str(local.path)) as store:
        disk = Catalog(store, session.catalog)
        enter_begun(session, store)
        saves = local_step.parse_saves(group.gather(together(group, what, lambda: local_step.saves_on(disk))))

        def choose() -> bytes:
            return "\n".join(map(str, local_step.newest(session.catalog.visible(saves), saves, step))).encode()

        chosen = local_step.parse_saves([by_rank_0(group, "listing steps", choose)])
        return on_hosts(group.gather(together(group, what, lambda: local_step.look(disk, chosen))))
