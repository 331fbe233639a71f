"""Snapshots in the memory of other hosts."""
