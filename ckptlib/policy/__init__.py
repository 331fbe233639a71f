"""When to save, what to keep, when to stop. Nothing but decisions: no torch, no store."""
