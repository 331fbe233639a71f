"""Accelerators: streams, events and memory by torch's device-generic interfaces; one file for what only CUDA has."""
