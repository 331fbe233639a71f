"""What is saved: a state as named tensors, plain values and random generators."""
