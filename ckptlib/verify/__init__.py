"""Whether what is in a root is whole: every byte against the digests that were taken when it was saved. No torch."""

from ckptlib.verify.root import verify_root, verify_save

__all__ = ["verify_root", "verify_save"]
