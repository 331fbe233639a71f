"""Decides when to save, what to keep, and when to stop. Decisions only: no torch, no store."""
