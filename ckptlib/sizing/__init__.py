"""What checkpoints will take, before the first one is saved: bytes, memory, time and requests. Pure arithmetic."""
