"""The writer's entry point: `python -m ckptlib.writer <socket fd> <trainer's pid>`; its orders come over the socket."""

from __future__ import annotations

import socket
import sys

from ckptlib.writer.channel import Channel
from ckptlib.writer.process import WriterProcess

if __name__ == "__main__":
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    WriterProcess(channel, int(sys.argv[2])).run()
