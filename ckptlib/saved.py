"""What a checkpoint holds, by name, as the rank that loads it sees it."""

from __future__ import annotations

from collections.abc import Mapping

from ckptlib import values
from ckptlib.errors import StateMismatch
from ckptlib.layout import PerRank as HeldPerRank
from ckptlib.layout import TensorEntry
from ckptlib.reader import Reader
from ckptlib.values import Json


class Saved:
    """One step: its tensors, values, trees of objects and groups of optimizers."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        own = reader.part(reader.own_rank)
        own_layout = reader.layouts[own.table.layout]
        layouts = [own_layout, *(layout for layout in reader.layouts.values() if layout is not own_layout)]
        self.values: Mapping[str, Json] = own.values
        self.tensors: dict[str, TensorEntry] = {}
        self.objects: dict[str, Json] = {}
        self._aliases: dict[str, str] = {}
        self.groups: dict[str, dict[str, int]] = {}
        """By path of an optimizer: parameter name to group."""
        for layout in layouts:
            per_rank_elsewhere = layout is not own_layout
            for entry in layout.tensors:
                if not (per_rank_elsewhere and isinstance(entry.holding, HeldPerRank)):
                    self.tensors.setdefault(entry.name, entry)
            for alias, name in layout.aliases.items():
                self.tensors.setdefault(alias, layout.tensors[layout.index[name]])
                self._aliases.setdefault(alias, name)
            for path, tree in layout.objects.items():
                self.objects.setdefault(path, tree)
                self._add_groups(path, tree)

    def _add_groups(self, path: str, tree: Json) -> None:
        if not isinstance(tree, dict) or "optimizer" not in tree:
            return
        known = self.groups.setdefault(path, {})
        match tree["optimizer"]:
            case {"groups": list(groups)}:
                for i, names in enumerate(groups):
                    for name in names if isinstance(names, list) else []:
                        known.setdefault(str(name), i)
            case _:
                raise StateMismatch(f"{path}: the layout's groups of this optimizer cannot be read")

    def first_name(self, name: str) -> str:
        """Of a tensor that had several names: the one that its optimizer state is kept under."""
        return self._aliases.get(name, name)

    def same(self, first: str, second: str) -> bool:
        """Whether two saved tensors are one, or are equal."""
        return first == second or (first in self.tensors and self._reader.same_bytes(first, second))

    def value(self, path: str) -> object:
        return values.decode(self.values[path], path)
