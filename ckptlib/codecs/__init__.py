"""Codecs turn the bytes of one chunk into fewer bytes, and back. They know nothing of files, stores or torch."""
