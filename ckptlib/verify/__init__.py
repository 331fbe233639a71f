"""Verifies a root: compares every byte with the digests that were taken when it was saved. No torch."""

from ckptlib.verify.root import verify_root, verify_save
from ckptlib.verify.shared_chunks import SharedChunks

__all__ = ["SharedChunks", "verify_root", "verify_save"]
