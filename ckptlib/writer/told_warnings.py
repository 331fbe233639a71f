"""Tells the trainer what its writer warns of: nobody reads the writer's own file while a job runs. No torch."""

from __future__ import annotations

import logging
import time

from typing_extensions import override

from ckptlib.writer.channel import Channel, Message

TELL_AGAIN_S = 600.0
"""Seconds for which the same line of code is not told again: a store that is away may concern every save."""

MAX_TEXT = 4000
"""Most characters of a warning."""

ALREADY_TOLD = {"is_told": True}
"""`extra=` for records that the trainer hears of, and logs, in another way."""


class ToldWarnings(logging.Handler):
    """Tells one writer's warnings, from any thread. Beside that, they are printed as ever."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(logging.WARNING)
        self._channel = channel
        self._told: dict[tuple[str, int], float] = {}
        """When each line of code was told last; by the monotonic clock."""

    @classmethod
    def begin(cls, channel: Channel) -> None:
        """Tells warnings from now on in this process."""
        ours = logging.getLogger("ckptlib")
        ours.addHandler(cls(channel))
        ours.addHandler(logging.StreamHandler())  # what Python does by itself only if there is no other handler

    @override
    def emit(self, record: logging.LogRecord) -> None:
        line, now = (record.pathname, record.lineno), time.monotonic()
        if getattr(record, "is_told", False) or now - self._told.get(line, -TELL_AGAIN_S) < TELL_AGAIN_S:
            return
        self._told[line] = now
        text = record.getMessage()[:MAX_TEXT]
        self._channel.send({"event": "warned", "logger": record.name, "level": record.levelno, "text": text})


def log_told(event: Message, rank: int) -> None:
    """Logs a writer's warning in the trainer, as if it were its own."""
    logging.getLogger(event["logger"]).log(event["level"], "the writer process of rank %d: %s", rank, event["text"])
