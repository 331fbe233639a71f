"""A drop-in for torch.distributed.checkpoint: `import ckptlib.dcp as dcp`. See docs/dcp.md."""

from ckptlib.adapters.dcp import SaveFuture, async_save, load, save
from ckptlib.adapters.dcp_reader import StorageReader
from ckptlib.adapters.dcp_writer import StorageWriter

__all__ = ["SaveFuture", "StorageReader", "StorageWriter", "async_save", "load", "save"]
