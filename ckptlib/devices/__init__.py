"""Accelerators: streams, events and memory by torch's device-generic interfaces; what is CUDA's alone in one file."""
