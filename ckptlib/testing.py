"""Stores that are slow or that fail, and ways to damage a file. See `ckptlib.stores.testing`, where they live."""

from ckptlib.stores.testing import FaultStore, LatencyStore, flip_bit, open_testing_store, truncate

__all__ = ["FaultStore", "LatencyStore", "flip_bit", "open_testing_store", "truncate"]
