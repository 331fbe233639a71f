"""Nests: containers of plain values that are saved whole, as one value at their path, since their entries have no names
by which a load could make them again: lists of lists, lists in a dict that training fills, dicts by number, whatever is
empty.

Flat lists at the top of a state are none, nor are dicts by text. Their entries keep names of their own, which `only=`
and `map=` can meet, and a load finds the list, or makes the entry of the dict.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping

import torch

from ckptlib.format.tagged_values import MAX_DEPTH
from ckptlib.state.visitor import is_plain

_SCALARS = frozenset([int, float, str, bool, type(None)])
"""Asked first: a history may have a million of them."""
_MAPPINGS = (dict, OrderedDict, Counter)
"""Those that come back as they are from within a value."""


def is_nest(node: object, path: str) -> bool:
    """Whether a container of the state, at a path below the top, is saved whole."""
    if isinstance(node, (list, tuple)) and type(node) in (list, tuple):
        # by its entries, a load could not tell a list that the restarted job has not made yet from a dict
        within = "/" in path
        return not node or ((within or not all(map(_is_flat, node))) and _comes_back(node))
    if isinstance(node, _MAPPINGS) and type(node) in (*_MAPPINGS, defaultdict):
        return not node or (not all(isinstance(key, str) for key in node) and _comes_back(dict(node)))
    return False


def is_all_plain(node: object, depth: int = 0) -> bool:
    """Whether nothing but plain values and containers lies in it; not said of one that has no end."""
    if _is_flat(node) or type(node) is torch.Size:
        return True
    if depth > MAX_DEPTH:
        return False
    if isinstance(node, Mapping):
        return all(is_all_plain(value, depth + 1) for value in node.values())
    if not isinstance(node, (list, tuple)) or type(node) not in (list, tuple):
        return False
    return all(is_all_plain(item, depth + 1) for item in node)


def _comes_back(node: object, depth: int = 0) -> bool:
    """Whether all in it is plain, and of types that a value keeps; else it is walked."""
    if _is_flat(node) or type(node) is torch.Size:
        return True
    if depth > MAX_DEPTH:
        return False
    if isinstance(node, (list, tuple)) and type(node) in (list, tuple):
        return all(_comes_back(item, depth + 1) for item in node)
    if not isinstance(node, Mapping) or type(node) not in _MAPPINGS:
        return False
    return all(not isinstance(key, str) or type(key) is str for key in node) and all(
        _comes_back(value, depth + 1) for value in node.values()
    )


def _is_flat(node: object) -> bool:
    return type(node) in _SCALARS or is_plain(node)
