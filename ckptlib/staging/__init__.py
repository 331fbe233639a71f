"""From tensors to a slot: the copies of a snapshot, the fence, and the memory that it goes to."""
