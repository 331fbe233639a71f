"""From a checkpoint to tensors: which chunks are read, in which order, and where each byte goes."""
