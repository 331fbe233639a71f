"""From a committed step to checked bytes: names, slices, digests. No torch."""
