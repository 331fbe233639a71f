"""Paths of tensors and values within a state: a key or position per level, separated by slashes.

Slashes in keys are escaped, so different paths have different texts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable


def join(path: str, key: object) -> str:
    """Returns the path of an entry. Raises ValueError for an int of more digits than Python converts."""
    return f"{path}/{segment_of(key)}" if path else segment_of(key)


def segment_of(key: object) -> str:
    """Returns a key as a segment of a path. Raises what `join` raises."""
    return str(key).replace("%", "%25").replace("/", "%2F")


def key_of(segment: str) -> str:
    """Returns the key of a segment, as text."""
    return segment.replace("%2F", "/").replace("%25", "%") if "%" in segment else segment


def below_any(paths: Iterable[str]) -> Callable[[str], bool]:
    """Returns a function that tells whether a name lies below any of these paths. There may be thousands of both."""
    heads: list[str] = []
    for head in sorted(f"{path}/" for path in paths):
        if not heads or not head.startswith(heads[-1]):
            heads.append(head)  # no head begins with another, so only the last one up to a name can match

    def is_below(name: str) -> bool:
        before = bisect_right(heads, name)
        return before > 0 and name.startswith(heads[before - 1])

    return is_below
