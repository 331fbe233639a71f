"""Two ranks; one dies just before it connects to its peer: dead_peer.py <root>. Rank 0 prints what it was told."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch.distributed as dist

from ckptlib import Checkpointer, Peers
from ckptlib.errors import AgreementFailed
from ckptlib.peers.connection import Connection
from ckptlib.ranks import group

dist.init_process_group("gloo")
group.MEET_S = 0.1
if dist.get_rank() == 1:
    Connection.connect = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
began = time.monotonic()
try:
    Checkpointer(sys.argv[1], {}, every=1, peers=Peers(domain=str(dist.get_rank())))
except AgreementFailed as error:
    print("told:", error, flush=True)
assert time.monotonic() - began < Peers().timeout.total_seconds() / 2
os._exit(0)
