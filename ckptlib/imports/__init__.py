"""Reads checkpoints of other libraries, to save them as steps."""
