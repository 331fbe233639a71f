"""Estimates what checkpoints will take before the first is saved: bytes, memory, time, requests. Pure arithmetic."""
