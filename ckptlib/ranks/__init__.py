"""Ranks that act together: collectives with deadlines, the beat, links between hosts."""
