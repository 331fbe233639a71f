"""Paths of tensors and values within a state: a key or position for each level, with slashes between them.

Slashes in keys are escaped, so two paths are never the same text.
"""

from __future__ import annotations


def join(path: str, key: object) -> str:
    """The path of an entry. Raises ValueError for an int of more digits than Python converts."""
    return f"{path}/{segment_of(key)}" if path else segment_of(key)


def segment_of(key: object) -> str:
    """A key as a part of a path. Raises what `join` raises."""
    return str(key).replace("%", "%25").replace("/", "%2F")


def key_of(segment: str) -> str:
    """The key that a part of a path was made of, as text."""
    return segment.replace("%2F", "/").replace("%25", "%") if "%" in segment else segment
