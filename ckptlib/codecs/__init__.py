"""Codecs: the bytes of one chunk in fewer bytes, and back. They know nothing of files, stores or torch."""
