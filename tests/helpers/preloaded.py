"""What ranks import: the server of `helpers.forkserver` does it once for all of them."""

from __future__ import annotations

import torch
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

import ckptlib.checkpointer
import ckptlib.writer.process  # noqa: F401

torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # imports 300 modules, a second's worth
