"""The format: documents, names and digests of what is saved. FORMAT.md is its specification. No torch."""
