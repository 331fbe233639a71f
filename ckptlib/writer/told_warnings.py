"""What a writer warns of, told to its trainer: nobody reads the writer's own file while a job runs. No torch."""

from __future__ import annotations

import logging
import time

from typing_extensions import override

from ckptlib.writer.channel import Channel, Message

TELL_AGAIN_S = 600.0
"""How long the same line of code is not told again: a store that is away may concern every save."""

MAX_TEXT = 4000
"""Characters of a warning."""

ALREADY_TOLD = {"is_told": True}
"""`extra=` of what the trainer hears, and logs, in another way."""


class ToldWarnings(logging.Handler):
    """Of one writer; from any thread. Beside it, warnings are printed as ever."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(logging.WARNING)
        self._channel = channel
        self._told: dict[tuple[str, int], float] = {}
        """When each line of code was told last; by the monotonic clock."""

    @classmethod
    def begin(cls, channel: Channel) -> None:
        """From now on in this process."""
        ours = logging.getLogger("ckptlib")
        ours.addHandler(cls(channel))
        ours.addHandler(logging.StreamHandler())  # what Python does by itself only where there is no other handler

    @override
    def emit(self, record: logging.LogRecord) -> None:
        line, now = (record.pathname, record.lineno), time.monotonic()
        if getattr(record, "is_told", False) or now - self._told.get(line, -TELL_AGAIN_S) < TELL_AGAIN_S:
            return
        self._told[line] = now
        text = record.getMessage()[:MAX_TEXT]
        self._channel.send({"event": "warned", "logger": record.name, "level": record.levelno, "text": text})


def log_told(event: Message, rank: int) -> None:
    """In the trainer, as if it were its own."""
    logging.getLogger(event["logger"]).log(event["level"], "the writer process of rank %d: %s", rank, event["text"])
