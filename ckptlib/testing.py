"""Stores and servers that are slow or that fail, and ways to damage a file.

They live in `ckptlib.stores.testing` and `ckptlib.stores.fault_proxy`; see there.
"""

from ckptlib.stores.fault_proxy import FaultProxy
from ckptlib.stores.testing import FaultStore, LatencyStore, flip_bit, open_testing_store, truncate, write_plan

__all__ = ["FaultProxy", "FaultStore", "LatencyStore", "flip_bit", "open_testing_store", "truncate", "write_plan"]
