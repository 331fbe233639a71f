"""Replicas of snapshots in the memory of other hosts."""
