"""Checkpoints of other libraries, read to be saved as steps."""
