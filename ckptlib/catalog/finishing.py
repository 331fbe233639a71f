"""Finishes the saves of dead generations: those whose parts are all there are committed. No torch."""

from __future__ import annotations

import logging

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer, choose_parts
from ckptlib.catalog.history import newest_first, unfinished_from
from ckptlib.catalog.rights import is_recorded
from ckptlib.errors import CorruptData, FormatError, ObjectNotFound, ObjectUnreadable, SaveFailed, Superseded
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId, SaveId

log = logging.getLogger(__name__)


def finish_saves(catalog: Catalog, generation: GenerationId, to_go_on: bool = False) -> list[SaveId]:
    """Commits the saves of dead generations, older than `generation`, whose parts are all there; returns these saves.

    So a save that was persisted whole before a crash is not lost with the committer. `to_go_on`: only saves that the
    job may go on from. The parts of others are not even listed: with those of dropped steps, there may be millions.
    """
    committed, since = set(catalog.saves()), 0
    if to_go_on:
        ids = catalog.generations.ids()
        catalog.generations.warm(newest_first(ids, committed))
        since = unfinished_from(committed, ids, catalog.generations.record)
    waiting = {
        name.save
        for entry in catalog.store.scan(keys.PARTS, f"{keys.PARTS}{since:012d}")
        if (name := keys.parse_part_key(entry.key)) is not None and name.save not in committed
    }
    trashed = {keys.parse_trash_key(entry.key) for entry in catalog.store.scan(keys.TRASH)}
    done = []
    for save in sorted(waiting - trashed):
        if save.generation < generation and _finish_one(catalog, save):
            done.append(save)
    return done


def _finish_one(catalog: Catalog, save: SaveId) -> bool:
    found = catalog.parts(save)
    if 0 not in found or not all(name.ok for names in found.values() for name in names):
        return False  # a rank, or the committer, said that it gave up
    if not is_recorded(catalog, save.generation, catalog.generations.ids()):
        log.warning("step %d is not committed: its generation %s began in another root", save.step, save.generation)
        return False
    try:
        names, missing = choose_parts(found, catalog.part(found[0][0]).world_size)
        if missing:
            return False
        # A new committer reads all parts: nobody is left who knows whether they are whole.
        Committer(catalog).commit(save, names, left=True)
    except Superseded:  # there is no second job: this job went back, or went on without the save
        return False
    except (CorruptData, FormatError, ObjectNotFound, ObjectUnreadable, SaveFailed) as error:
        log.warning("step %d is not committed, though all its parts are there: %s", save.step, error)
        return False  # damaged or incomplete: it never existed, and retention will sweep it
    return True
