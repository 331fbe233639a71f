"""Makes a dict of another library's checkpoint an object that can be saved. Knows no library."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any


class PlainTree:
    """An object whose state comes back with every dict, list and tuple as it was."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self._tree = tree

    def state_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = plain_of(self._tree)
        return plain

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tree = state


def plain_of(node: Any) -> Any:
    """Returns a copy with dicts for kinds that only the other library knows, such as Lightning's AttributeDict."""
    if isinstance(node, dict):
        made = {key: plain_of(value) for key, value in node.items()}
        return type(node)(made) if type(node) in (OrderedDict, Counter) else made
    if type(node) in (list, tuple):
        return type(node)(map(plain_of, node))
    return node
