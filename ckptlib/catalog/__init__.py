"""The content of a root: committed steps, generations, their history, and retention. No torch."""

from ckptlib.catalog.catalog import Catalog, CheckpointInfo

__all__ = ["Catalog", "CheckpointInfo"]
