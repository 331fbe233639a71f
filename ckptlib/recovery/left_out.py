"""Tells of what a job's hosts have in memory or on local disks that is newer than the step that it goes on from.

Whoever starts a job again may not know which step it had come to.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from ckptlib.catalog.catalog import Catalog
from ckptlib.errors import StoreError
from ckptlib.format.keys import SaveId
from ckptlib.recovery.candidates import Candidate
from ckptlib.recovery.inventory import Inventory
from ckptlib.saving.session import Session
from ckptlib.words import listed

log = logging.getLogger(__name__)

InPart = Mapping[SaveId, Sequence[int]]
"""What is not whole, and the saved ranks whose shares are missing."""


def tell_left_out(
    session: Session, inventory: Inventory, in_part: InPart, on_disks: InPart, restored: Candidate | None
) -> None:
    """Tells of what is left out, by rank 0. `in_part`, `on_disks`: snapshots in memory and steps on local disks that
    were not whole before any was found to be damaged, which is told elsewhere."""
    if session.group.rank == 0:
        _tell_in_part(in_part, restored)
        _tell_in_part_on_disks(on_disks, restored)
        _tell_unrecorded(session.catalog, inventory, restored)


def _tell_in_part(in_part: InPart, restored: Candidate | None) -> None:
    """Tells of the newest snapshot that is left out since it is not whole: all ranks may have held it. After a restore
    from memory, it was most probably on its way."""
    if (left_out := _newest(in_part, restored)) is not None:
        log.log(
            logging.INFO if restored is not None and restored.snapshot is not None else logging.WARNING,
            "step %s is in the memory of this job's hosts, but not whole, so it is not restored: the share of rank %s "
            "is not there. If the job before had told it as held, more hosts are gone than there were copies, or slots "
            "were removed or damaged; else it was on its way",
            left_out,
            listed(in_part[left_out], 8),
        )


def _tell_in_part_on_disks(in_part: InPart, restored: Candidate | None) -> None:
    """Tells of the newest step that is left out since some hosts' disks lack their shares of it: it may have been whole
    on the disks of the job before. After a restore from memory or from disks, it was most probably on its way."""
    if (left_out := _newest(in_part, restored)) is not None:
        log.log(
            logging.INFO if restored is not None and restored.tier != "store" else logging.WARNING,
            "step %s is on the local disks of this job's hosts, but not whole, so it is not restored: the share of "
            "rank %s is not there. If the job before had it on all disks, it ran on a host that is not of this job, or "
            "a disk was lost: to go on from there, start again with all of its hosts before this job saves. Else it "
            "was on its way",
            left_out,
            listed(in_part[left_out], 8),
        )


def _newest(in_part: InPart, restored: Candidate | None) -> SaveId | None:
    """Returns the newest one, if it is newer than the restored step."""
    return max((save for save in in_part if restored is None or save > restored.save), default=None)


def _tell_unrecorded(catalog: Catalog, inventory: Inventory, restored: Candidate | None) -> None:
    """Tells of the newest snapshot that does not count since the store lacks the record of its generation; others were
    abandoned, as by a rewind. It is a hint: a failure here ends no run."""
    least = -1 if restored is None else restored.save.step
    newer = [snapshot.save for snapshot in inventory.whole() if snapshot.save.step > least]
    if not newer:
        return
    try:
        recorded = catalog.generations.ids()
    except StoreError as error:
        log.warning("%s: why step %s in memory is not restored is not known: %s", catalog.store.url, newer[0], error)
        return
    if lost := [save for save in newer if save.generation not in recorded]:
        log.warning(
            "step %s is whole in the memory of this job's hosts, but %s has no record of its generation, so it is not "
            "restored: its job ended before the store had the record, or saved to a copy of this root",
            lost[0],
            catalog.store.url,
        )
