"""The slots that a writer has open: each is opened once, when it is first named, and outlives the trainer. No torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from ckptlib.errors import FormatError, StoreError, describe
from ckptlib.slots.files import is_taken_up
from ckptlib.slots.slot import Slot

log = logging.getLogger(__name__)

RESCUE_AFTER_S = 15.0
"""How long a restart may take before snapshots that are in memory only are persisted: less than a killed allocation has
left."""

SUCCESSOR_POLL_S = 0.2


class OpenSlots:
    """The open slots of one writer, by path."""

    def __init__(self) -> None:
        self._slots: dict[str, Slot] = {}
        self._refused: dict[str, FormatError] = {}
        """Slots that could not be opened, and why."""
        self.keep_s = 0.0
        """How long the slots are kept for a successor."""

    def open(self, path: str) -> Slot | None:
        """Opens a slot; None if it is gone: the trainer made a larger one while this process was still starting."""
        try:
            slot = self._slots[path] = Slot.open(Path(path))
        except FormatError as error:
            log.info("%s", error)
            self._refused[path] = error
            return None
        return slot

    def take(self, path: str) -> None:
        """Locks a slot that is to be read, so that a successor sees that there is work to do."""
        slot = self._slots.get(path) or self.open(path)
        if slot is not None:
            slot.read_lock()

    def find(self, path: str) -> Slot:
        """Returns an open slot. Raises FormatError if it could not be opened."""
        slot = self._slots.get(path)
        if slot is None:
            raise self._refused.get(path) or FormatError(f"{path}: this slot is not open in the writer")
        return slot

    def forget(self, path: str) -> None:
        """Closes a slot, and so gives its memory back."""
        self._refused.pop(path, None)
        slot = self._slots.pop(path, None)
        if slot is not None:
            slot.close()

    def abandon(self) -> None:
        """Lets a successor have the slots."""
        for slot in self._slots.values():
            slot.abandon()

    def await_successor(self, rescue: Callable[[list[Slot]], None] | None) -> None:
        """Keeps the slots for a restarted job, which recovers from them soonest, and unlinks them when it needs them no
        more. Unlinks what is left of them after `keep_s`.

        `rescue` persists a step that is in memory only, if no such job has come for a while; it is told which slots are
        left, and called again while the store fails. A job that goes on from the slots saves that step itself; if it is
        gone before it holds the step, they are as needed as before. Nor is the step left to that job for longer than
        half of `keep_s`: it may do nothing.
        """
        slots = list(self._slots.values())
        began, pause_s = time.monotonic(), min(RESCUE_AFTER_S, self.keep_s / 2)
        rescue_at, done = began + pause_s, list[Slot]()
        while time.monotonic() - began < self.keep_s and (left := [slot for slot in slots if slot.has_name]):
            if rescue is not None and left != done and (now := time.monotonic()) > rescue_at:
                rescue_at = now + pause_s
                if now - began >= self.keep_s / 2 or not any(is_taken_up(slot.path) for slot in left):
                    try:
                        rescue(left)
                        done = left  # a job can do without what it removes of them later: see `left_of`
                    except StoreError as error:
                        log.warning(
                            "what is in memory only could not be persisted, which is tried again: %s", describe(error)
                        )
                        rescue_at = time.monotonic() + pause_s
            time.sleep(SUCCESSOR_POLL_S)
        for slot in slots:
            slot.unlink()
