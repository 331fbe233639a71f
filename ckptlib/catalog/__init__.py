"""What is in a root: committed steps, generations, their history, and what may go. No torch."""

from ckptlib.catalog.catalog import Catalog, CheckpointInfo

__all__ = ["Catalog", "CheckpointInfo"]
