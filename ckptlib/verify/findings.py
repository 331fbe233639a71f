"""What may be wrong with a root, as `ckptlib.verify.root` tells it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from ckptlib.errors import (
    CheckpointNotFound,
    CkptError,
    CorruptData,
    FormatError,
    NewerFormat,
    ObjectNotFound,
    StoreError,
)
from ckptlib.format.box import Box
from ckptlib.format.keys import SaveId

T = TypeVar("T")

Damage = Literal["missing", "altered", "malformed", "incomplete", "unreadable", "newer"]
"""No such object; bytes that do not match their digest; an object that is not what it should be; elements that nobody
holds, or that two hold differently; the store failed to give it; whole, but written by a newer ckptlib, so that nothing
is known of what it says."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    damage: Damage
    key: str
    """The object in which it is."""
    message: str
    save: SaveId | None = None
    """The step that is hurt; None: the root as a whole."""
    rank: int | None = None
    """Whose part or pack it is."""
    shards: tuple[tuple[str, Box], ...] = ()
    """The tensors that are hurt, each with its box in global coordinates."""
    offset: int | None = None
    """First damaged byte of the object, where that is known to the chunk."""
    nbytes: int | None = None
    """From there to the end of the last damaged chunk."""


def damage_of(error: CkptError) -> Damage:
    if isinstance(error, ObjectNotFound | CheckpointNotFound):
        return "missing"
    if isinstance(error, CorruptData):
        return "altered"
    if isinstance(error, NewerFormat):
        return "newer"
    return "malformed" if isinstance(error, FormatError) else "unreadable"


def finding_of(error: CkptError, key: str, save: SaveId | None, rank: int | None = None) -> Finding:
    return Finding(damage_of(error), key, str(error), save, rank)


def attempt(call: Callable[[], T]) -> T | CkptError:
    """Its result, or the error that is to be a finding."""
    try:
        return call()
    except (CheckpointNotFound, CorruptData, FormatError, StoreError) as error:
        return error
