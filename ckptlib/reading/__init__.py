"""Reads a committed step into checked bytes: names, slices, digests. No torch."""
