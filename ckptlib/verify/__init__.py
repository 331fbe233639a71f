"""Whether what is in a root is whole: every byte against the digests that were taken when it was saved. No torch."""

from ckptlib.verify.root import verify_root, verify_save
from ckptlib.verify.shared_chunks import SharedChunks

__all__ = ["SharedChunks", "verify_root", "verify_save"]
