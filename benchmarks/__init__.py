"""Benchmarks: one file, one question, JSON lines out. `python -m benchmarks` lists them."""
