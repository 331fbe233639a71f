"""The standard streams of a process that was started without them, as daemons are."""

from __future__ import annotations

import os


def fill_stdio() -> None:
    """Opens what is closed of descriptors 0 to 2, on /dev/null.

    Else a slot or the writer's channel would get their numbers: what C code prints would go there, and a writer would
    have its own streams in the place of the channel.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free
