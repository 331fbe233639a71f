"""Records in the account of each manifest what a start of the job has measured of its saves, and recalls it for the
next start.

The record says on how many ranks and on which machine that was: elsewhere a save costs something else. All ranks go on
from the same numbers, or none does. The numbers only say where the search for an interval begins, so missing ones are
no error.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from ckptlib.devices.accelerator import available
from ckptlib.errors import CheckpointNotFound, CkptError, describe
from ckptlib.format.account import measured_in
from ckptlib.format.keys import SaveId
from ckptlib.format.values import Json, dumps, loads
from ckptlib.policy.measured import Measured
from ckptlib.ranks.together import by_rank_0
from ckptlib.saving.session import Session

log = logging.getLogger(__name__)

CPUS = Path("/proc/cpuinfo")


@cache
def machine() -> str:
    """Returns what this process runs on, as far as it decides how long steps and saves take. The host's name is no part
    of it: a scheduler gives a restart other hosts of the same kind."""
    model = platform.machine()
    with suppress(OSError), CPUS.open() as lines:
        named = [line.partition(":")[2].strip() for line in lines.read(4096).splitlines() if "model name" in line]
        model = named[0] if named else model
    device = available()
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {'no accelerator' if device is None else device.type}"


def to_record(session: Session, measured: Mapping[str, Measured | None]) -> dict[str, Json]:
    """Returns the record of these measurements, by kind of save. Empty if nothing is measured."""
    told: dict[str, Json] = {name: {**found.to_json()} for name, found in measured.items() if found is not None}
    return {"world_size": session.group.size, "machine": machine(), **told} if told else {}


def recall(session: Session, save: SaveId) -> dict[str, Measured]:
    """Returns, by kind of save, what the start that made this save had measured. Collective; the same on all ranks.

    Empty if that is not known, or was measured on another number of ranks or another kind of machine.

    A save that is in memory or on local disks only has no manifest; then that of the save before it counts.
    """
    group = session.group
    what = "looking for what the start before has measured"
    told = loads(by_rank_0(group, what, lambda: dumps(_read(session, save))))
    record = told if isinstance(told, dict) else {}
    if group.any(record.get("machine") != machine() or record.get("world_size") != group.size):
        return {}
    named = {name: Measured.of(record.get(name)) for name in ("store", "memory")}
    return {name: measured for name, measured in named.items() if measured is not None}


def _read(session: Session, save: SaveId) -> dict[str, Json]:
    """Reads the record, on rank 0. A record that cannot be read counts as none: the restore has succeeded without
    it."""
    catalog = session.catalog
    try:
        try:
            return measured_in(catalog.manifest(save).account)
        except CheckpointNotFound:
            before = [one for one in catalog.visible() if one.step <= save.step]
            return measured_in(catalog.manifest(before[-1]).account) if before else {}
    except CkptError as error:
        log.info("the interval between saves is searched for anew: %s", describe(error))
        return {}
