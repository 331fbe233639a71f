"""Nests: containers of plain values that are saved whole, as one value at their path, since their entries have no names
by which a load could make them again: lists, dicts with numbers or number-like text as keys, and empty containers.

Dicts with text as keys are no nests. Their entries keep names of their own, which `only=` and `map=` can match.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from keyword import iskeyword
from typing import Any

import torch

from ckptlib.format.tagged_values import MAX_DEPTH, is_unicode
from ckptlib.state.visitor import are_scalars, is_plain

_MAPPINGS = (dict, OrderedDict, Counter)
"""Mappings that keep their type within a value."""


def is_nest(node: object) -> bool:
    """Returns whether a container of the state is saved whole."""
    if isinstance(node, (list, tuple)) and type(node) in (list, tuple):
        return _comes_back(node)
    if isinstance(node, _MAPPINGS) and type(node) in (*_MAPPINGS, defaultdict):
        # keys first: in nested dicts with text keys, values would be searched anew at each level
        return not node or (not all(map(is_text, node)) and _are_keys(node) and all(map(_comes_back, node.values())))
    return False


def is_text(key: object) -> bool:
    """Returns whether a key is text that no key of another type has: no number, constant, tuple or member of an
    enum."""
    if not isinstance(key, str) or not is_unicode(key) or iskeyword(key):
        return False
    if not _NO_TEXT.isdisjoint(key):
        return False
    if _IN_NO_NUMBER.search(key):  # most keys by far; a failing conversion takes longer than everything else
        return True
    if not any(map(str.isalpha, key)):
        return False
    try:
        complex(key)  # also for nan and 1e5
    except ValueError:
        return True
    return False


_NO_TEXT = frozenset(".()[]{}<>'\"")

_IN_NO_NUMBER = re.compile("[b-dghk-mo-su-xzB-DGHK-MO-SU-XZ]")
"""Letters that the text of no number has: all but those of nan, infinity, e and j."""


def is_all_plain(node: object) -> bool:
    """Returns whether nothing but plain values and containers lies in it; False for a nesting without end."""
    return _is_plain_below(node, lambda found: True)


def _comes_back(node: object) -> bool:
    """Returns whether everything in it is plain, and of types that a value keeps; else it is walked."""
    return _is_plain_below(node, lambda found: type(found) in _MAPPINGS and _are_keys(found))


def _is_plain_below(node: object, takes: Callable[[Mapping[Any, object]], bool], depth: int = 0) -> bool:
    """Returns whether everything in it is plain; `takes` tells of each mapping whether it may be there."""
    if _is_flat(node) or type(node) is torch.Size:
        return True
    if depth > MAX_DEPTH:
        return False
    if isinstance(node, Mapping):
        return takes(node) and all(_is_plain_below(value, takes, depth + 1) for value in node.values())
    if not isinstance(node, (list, tuple)) or type(node) not in (list, tuple):
        return False
    return are_scalars(node) or all(_is_plain_below(item, takes, depth + 1) for item in node)


def _are_keys(node: Mapping[Any, object]) -> bool:
    """Returns whether all keys of a dict come back as they are."""
    return all(not isinstance(key, str) or type(key) is str for key in node)


def _is_flat(node: object) -> bool:
    return are_scalars((node,)) or is_plain(node)
