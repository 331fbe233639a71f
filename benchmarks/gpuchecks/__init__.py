"""The checks of `scripts/gpu-check`: each measures, and says under "wrong" what should not be.

What is said in numbers is in GB (1e9 bytes) and seconds.
"""
