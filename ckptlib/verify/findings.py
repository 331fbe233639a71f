"""The findings that `ckptlib.verify.root` reports: what is wrong with a root."""

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
"""The kinds of damage, in this order: there is no such object; its bytes do not match their digest; it is not what it
should be; no part holds some elements, or two hold them differently; the store failed to return it; it is whole, but
was written by a newer ckptlib, so that its content is not understood."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    damage: Damage
    key: str
    """The damaged object."""
    message: str
    save: SaveId | None = None
    """The step that is damaged; None: the root as a whole."""
    rank: int | None = None
    """The rank whose part or pack it is."""
    shards: tuple[tuple[str, Box], ...] = ()
    """The tensors that are damaged, each with its box in global coordinates."""
    offset: int | None = None
    """The object's first damaged byte, if the damaged chunks are known."""
    nbytes: int | None = None
    """Bytes from there to the end of the last damaged chunk."""


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
    """Calls `call`; returns its result, or the error that is to be a finding."""
    try:
        return call()
    except (CheckpointNotFound, CorruptData, FormatError, StoreError) as error:
        return error
