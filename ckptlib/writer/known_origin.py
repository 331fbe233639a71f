"""What the trainer read of the step that the job restored from the store, told to the writers so that the first save
need not read it again.

This does not say whether the step is still there: that is asked when a parent is chosen. No torch.
"""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from ckptlib.errors import FormatError
from ckptlib.format.keys import PartName, SaveId, parse_part_key, parse_save
from ckptlib.format.manifest import Manifest
from ckptlib.libc import memory_file
from ckptlib.writer.channel import Message

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OwnPart:
    """The part of one rank, as it was put."""

    name: PartName
    document: bytes
    """Its digest is in its name; whoever decodes it checks that."""


@dataclass(frozen=True, slots=True)
class KnownOrigin:
    """What one rank knows of the step that the job restored."""

    save: SaveId
    part: OwnPart | None
    """The rank's own part, if all its packs were there; None: the rank has none that could be a parent."""
    manifest: bytes | None = None
    """The step's manifest; on rank 0 only."""
    accounted: bool = False
    """Whether the start that made the step had left its account; see `catalog.accounts`. On rank 0 only."""
    read_at: float = field(default_factory=time.monotonic)
    """When the step was read, by the monotonic clock, which the processes of a host share."""

    def to_message(self) -> Message:
        part, manifest = self.part, self.manifest
        return {
            "save": str(self.save),
            "part": None if part is None else [part.name.key, part.document.decode()],
            "manifest": None if manifest is None else manifest.decode(),
            "accounted": self.accounted,
            "read_at": self.read_at,
        }

    @classmethod
    def of_message(cls, message: Message) -> KnownOrigin:
        part, manifest = message["part"], message["manifest"]
        return cls(
            parse_save(message["save"]),
            None if part is None else OwnPart(_name(part[0]), part[1].encode()),
            None if manifest is None else manifest.encode(),
            message["accounted"],
            float(message["read_at"]),
        )

    def decoded_manifest(self) -> Manifest | None:
        """Returns the manifest, if it is known. Raises CorruptData, FormatError."""
        if self.manifest is None:
            return None
        return Manifest.decode(self.save, self.manifest, f"{self.save.manifest_key}, as the trainer read it")


class Lent:
    """A file in memory from which the writer of this process reads what is known. A part may have megabytes, and the
    trainer waits for no reader, as it would at a full socket."""

    def __init__(self, known: KnownOrigin) -> None:
        self._fd = memory_file("ckptlib-known")
        try:
            with open(self._fd, "wb", closefd=False) as file:
                file.write(json.dumps(known.to_message()).encode())
        except BaseException:
            self.close()
            raise
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def lend(known: KnownOrigin) -> Lent | None:
    """Lends what is known; None if there is no memory, or no file can be opened: then the writer asks the store."""
    try:
        return Lent(known)
    except OSError as error:
        log.warning("the writer is not told of the step that was restored, and reads it again: %s", error)
        return None


def borrowed(path: str | None) -> KnownOrigin | None:
    """Returns what a trainer has lent; None if the trainer is gone, or it cannot be read: then the store is asked."""
    if path is None:
        return None
    try:
        data = Path(path).read_bytes()
    except OSError:  # the trainer is gone
        return None
    try:
        return KnownOrigin.of_message(json.loads(data))
    except (ValueError, TypeError, KeyError, FormatError) as error:
        log.warning("what the trainer knows of the step it restored cannot be read: %s", error)
        return None


def _name(key: str) -> PartName:
    name = parse_part_key(key)
    if name is None:
        raise FormatError(f"{key[:80]!r} is no part")
    return name
