"""From a checkpoint to tensors: what is read, in which order, and where each byte goes."""
