"""Opens the standard streams of a process that was started without them, as daemons are."""

from __future__ import annotations

import os


def fill_stdio() -> None:
    """Opens those of descriptors 0 to 2 that are closed, on /dev/null.

    Otherwise a slot or the writer's channel would get their numbers: output of C code would go there, and a writer
    would have its own streams in place of the channel.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free
