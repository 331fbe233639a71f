"""The writer's entry point: `python -m ckptlib.writer <socket fd> <trainer's pid> <log>`.

Its orders come over the socket. The log is what it prints to; one with nothing in it goes when it ends.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from ckptlib.writer.channel import Channel
from ckptlib.writer.process import WriterProcess

if __name__ == "__main__":
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    WriterProcess(channel, int(sys.argv[2])).run()
    log = Path(sys.argv[3])
    if log.exists() and not log.stat().st_size:
        log.unlink(missing_ok=True)
