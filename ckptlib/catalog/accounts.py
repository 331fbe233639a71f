"""The accounts of a root: where the time of each start of its job went, in few objects beside the generations.

The writer of a start's first rank puts its account when the trainer is gone. If host and writer died too, the newest
manifest of that start tells how far it had come, and the next start puts an account from that. When there are too many
objects, one object with all their accounts replaces them, and they are deleted. Two processes that merge at once put
two such objects with the same content. No torch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.reading import each
from ckptlib.catalog.resolving import TRIES, is_newest_there
from ckptlib.catalog.unreadable import UNUSABLE
from ckptlib.errors import CheckpointNotFound, CkptError, CorruptData, FormatError, ObjectNotFound, ObjectUnreadable
from ckptlib.format import keys
from ckptlib.format.account import Account, decode_account, decode_accounts, encode_accounts, fullest
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Manifest

log = logging.getLogger(__name__)

MAX_OBJECTS = 64
"""If there are more, they are merged into one."""

MAX_LISTINGS = 4
"""The most listings of accounts: they are listed again if others merge some, which happens once in MAX_OBJECTS
starts."""

MAX_ACCOUNT_BYTES = 64 * 2**20
"""The largest object that is read; ckptlib writes none that is larger."""


@dataclass(frozen=True, slots=True)
class Accounts:
    """The accounts found in a root."""

    told: Mapping[GenerationId, Account]
    untold: Sequence[GenerationId]
    """Starts that left no account: those of an older ckptlib, or of `ckptlib.save`. The newest start is not included
    before it has a step."""
    problems: Sequence[str]
    """Objects that cannot be read."""


def put_account(catalog: Catalog, generation: GenerationId, account: Account) -> None:
    """Puts an account; merges all accounts into one object if there are too many. Raises the store's errors."""
    _put(catalog, generation, {generation: account})
    found = _keys(catalog)
    if len(found) > MAX_OBJECTS:
        _merge(catalog, generation, found)


def keep_account_of(catalog: Catalog, save: SaveId) -> None:
    """Puts the account of the start that made this save, from its manifest, if that start left none.

    Otherwise it would be lost once retention drops all steps of that start.
    """
    if all(keys.parse_account_key(key) != save.generation for key in _keys(catalog)):
        try:
            manifest = catalog.manifest(save)
        except CheckpointNotFound:  # it was restored from memory, and is not committed yet
            return
        keep_account_in(catalog, manifest)


def keep_account_in(catalog: Catalog, manifest: Manifest) -> None:
    """Puts the account that this manifest tells; the caller knows that its start left none. If the start leaves one
    after all, no harm is done: of two accounts of one start, the fuller one counts."""
    account, generation = _told_in(manifest), manifest.save.generation
    if account is not None:
        _put(catalog, generation, {generation: account})


def read_accounts(catalog: Catalog) -> Accounts:
    """Reads the accounts of all starts. An account that cannot be read is reported, and hides no other.

    Raises the store's errors.
    """
    for _ in range(TRIES):
        listed = catalog.saves()
        found = _accounts(catalog, listed)
        if is_newest_there(catalog, listed):
            break
    return found


def _accounts(catalog: Catalog, listed: Sequence[SaveId]) -> Accounts:
    saves: dict[GenerationId, list[SaveId]] = {}
    for save in listed:  # ascending by step
        saves.setdefault(save.generation, []).append(save)
    ids = catalog.generations.ids()
    told, problems = _read_listed(catalog)
    untold = []
    starts = sorted({*ids, *saves})
    for generation in starts:
        is_beginning = generation == starts[-1] and generation not in saves
        known = told.get(generation)
        if known is not None and known.end is not None:
            continue
        try:
            found = _of_newest(catalog, saves.get(generation, ()))
        except (CorruptData, FormatError, ObjectUnreadable) as error:
            problems.append(str(error))
            found = None
        if found is not None:
            told[generation] = found if known is None else fullest([found, known])
        elif known is None and not is_beginning and not is_rewind(catalog, generation):
            untold.append(generation)
    return Accounts(told, untold, problems)


def _put(catalog: Catalog, generation: GenerationId, accounts: Mapping[GenerationId, Account]) -> None:
    catalog.store.put(generation.account_key(keys.new_nonce()), encode_accounts(accounts))


def _keys(catalog: Catalog) -> list[str]:
    found = (entry for entry in catalog.store.scan(keys.GENERATIONS) if entry.nbytes <= MAX_ACCOUNT_BYTES)
    return [entry.key for entry in found if keys.parse_account_key(entry.key) is not None]


def _told_in(manifest: Manifest) -> Account | None:
    return decode_account(manifest.account, manifest.save.manifest_key)


def _of_newest(catalog: Catalog, saves: Sequence[SaveId]) -> Account | None:
    """Returns the account in the newest of these saves that retention has not dropped since they were listed."""
    for save in reversed(saves):
        with suppress(CheckpointNotFound):
            return _told_in(catalog.manifest(save))
    return None


def is_rewind(catalog: Catalog, generation: GenerationId) -> bool:
    """Whether the generation's record was put to go back, as by `ckptlib rewind`, which starts no job."""
    try:
        return catalog.generations.record(generation).rewind
    except UNUSABLE:  # reported when history is walked
        return False


def _read_listed(catalog: Catalog) -> tuple[dict[GenerationId, Account], list[str]]:
    """Reads all accounts. Those merged since they were listed are in an object that a new listing shows."""
    for _ in range(MAX_LISTINGS):
        told, problems, merged = _read(catalog, _keys(catalog))
        if not merged:
            break
    return told, problems


def _read(catalog: Catalog, objects: Sequence[str]) -> tuple[dict[GenerationId, Account], list[str], bool]:
    """Returns the accounts in these objects, why some objects cannot be read, and whether some are gone."""

    def read(key: str) -> Mapping[GenerationId, Account] | str | None:
        try:
            return decode_accounts(catalog.store.get(key), f"{catalog.store.url}/{key}")
        except ObjectNotFound:  # merged since it was listed
            return None
        except (CorruptData, FormatError, ObjectUnreadable) as error:
            return str(error)

    told: dict[GenerationId, Account] = {}
    problems, merged = [], False
    for found in each(read, objects):
        if found is None:
            merged = True
            continue
        if isinstance(found, str):
            problems.append(found)
            continue
        for generation, account in found.items():
            told[generation] = fullest([account, told[generation]]) if generation in told else account
    return told, problems, merged


def _merge(catalog: Catalog, generation: GenerationId, objects: Sequence[str]) -> None:
    """Merges these objects into one, and deletes them once it is put. If one cannot be read, all of them stay."""
    told, problems, _ = _read(catalog, objects)
    if problems:
        log.warning("accounts are not merged: %s", "; ".join(problems[:4]))
        return
    _put(catalog, generation, told)
    try:
        catalog.store.delete(*objects)
    except CkptError as error:  # without the right to delete, all of them stay
        log.warning("%d accounts that are in another object could not be deleted: %s", len(objects), error)
