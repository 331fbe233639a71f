"""The writer's entry point:
`python -m ckptlib.writer <socket fd> <trainer's pid> <seconds> <log> [<lock fd> <lock's path>]`.

Orders come over the socket. The process begins when its standard input says something or ends, or after this many
seconds. It prints to the log, and removes the log at its end if nothing is in it. The lock tells the next job that
there may be orders yet to read.
"""

from __future__ import annotations

import gc
import select
import signal
import socket
import sys
from pathlib import Path

LEFT_TO_THE_TRAINER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that Slurm, for one, sends to every process of a job. They are for the trainer, which may save once more and
leave at once: then only this process can finish the step. It ends by itself, once the trainer is gone and all is
done."""

if __name__ == "__main__":
    for number in LEFT_TO_THE_TRAINER:
        signal.signal(number, signal.SIG_IGN)

from ckptlib.priority import give_way  # noqa: E402

if __name__ == "__main__":
    give_way()  # before the other imports: they take 0.3 s of a core while the training starts, or restores
    if float(sys.argv[3]):
        waiting = select.poll()
        waiting.register(sys.stdin, select.POLLIN)
        waiting.poll(float(sys.argv[3]) * 1000)

from ckptlib.writer import late_numpy  # noqa: E402

if __name__ == "__main__":
    late_numpy.defer()
    gc.disable()  # no import makes garbage: looking for some takes a tenth of the imports' time

from ckptlib.slots.writer_lock import WriterLock  # noqa: E402
from ckptlib.writer.channel import Channel  # noqa: E402
from ckptlib.writer.process import WriterProcess  # noqa: E402

if __name__ == "__main__":
    gc.enable()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    log, *inherited = map(Path, sys.argv[4:])
    lock = WriterLock(inherited[1], int(inherited[0].name)) if inherited else None
    WriterProcess(channel, int(sys.argv[2]), lock).run()
    if log.exists() and not log.stat().st_size:
        log.unlink(missing_ok=True)
    gc.freeze()  # the end of the interpreter need not look through all objects either
