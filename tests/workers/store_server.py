"""A store for the ranks of a job, in a process of its own: its port goes into a file."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch.distributed as dist

if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = Path(sys.argv[1])
    port.with_suffix(".new").write_text(str(store.port))
    port.with_suffix(".new").rename(port)
    time.sleep(600)
