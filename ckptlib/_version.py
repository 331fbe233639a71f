"""Which version of the library this is."""

__version__ = "0.2.0"
