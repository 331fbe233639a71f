"""Adds the entries of a saved dict one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptlib.imports.foreign import Foreign, is_module


def add_entries(tree: Mapping[Any, Any], foreign: Foreign) -> None:
    """Adds each entry by its form; modules first, since optimizers are named by them."""
    for key, value in sorted(tree.items(), key=lambda item: not is_module(item[1])):
        if foreign.is_object(key, ""):
            continue
        if is_module(value):
            foreign.add_module(value, str(key))
        else:
            foreign.add_tree(value, str(key))
