"""Jobs that saved to local disks, and ended before the store had their record: the next job puts it, and finds them.

All ranks look at their own host's disk, since rank 0 may have been on another one. Rank 0 puts.
"""

from __future__ import annotations

import json
import logging

from ckptlib.catalog.begun import Begun, noted, unrecorded
from ckptlib.ranks.together import together
from ckptlib.saving.session import Session
from ckptlib.stores import Store
from ckptlib.writer.generation import GenerationRecord

log = logging.getLogger(__name__)


def enter_begun(session: Session, disk: Store) -> None:
    """Puts the records of jobs that began on local disks, before steps are looked for there. Collective. Raises, on all
    ranks, the errors of a disk or of the store."""
    group, what = session.group, "looking for jobs that began on local disks"

    def look() -> bytes:
        return json.dumps([begun.encode().decode() for begun in noted(disk)]).encode()

    told = group.gather(together(group, what, look))

    def enter() -> None:
        if group.rank != 0:
            return
        found = [Begun.decode(text.encode(), what) for data in told for text in json.loads(data)]
        for begun in unrecorded(found, session.catalog):
            record = GenerationRecord(begun.record, session.root.id, begun.first_step, begun.continues)
            warning = record.put(session.catalog)
            log.warning(
                "generation %s saved to local disks and ended before %s had its record, which is put now%s",
                begun.record.id,
                session.store.url,
                "" if warning is None else f": {warning}",
            )

    together(group, what, enter)
