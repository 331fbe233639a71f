"""A drop-in for torch.distributed.checkpoint: `import ckptlib.dcp as dcp`. See docs/dcp.md."""

from ckptlib.adapters.dcp import SaveFuture, async_save, load, save

__all__ = ["SaveFuture", "async_save", "load", "save"]
