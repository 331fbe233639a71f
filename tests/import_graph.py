"""The shape of the package: `python tests/import_graph.py [tree]` prints rooms, circles and the longest import path."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path


def modules(package: Path) -> dict[str, Path]:
    return {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(package.rglob("*.py"))
    }


def imported(tree: ast.AST) -> Iterator[str]:
    """Absolute names, from anywhere in a file; `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def graph(package: Path) -> dict[str, set[str]]:
    """By file: the files of the package that it imports. The package's own `__init__` is left out: it is lazy."""
    known = modules(package)
    root = package.name

    def home(name: str) -> str:
        while name not in known:
            name = name.rpartition(".")[0]
        return name

    return {
        module: {
            home(name)
            for name in imported(ast.parse(path.read_text(encoding="utf-8")))
            if name.split(".")[0] == root and home(name) not in (module, root)
        }
        for module, path in known.items()
        if module != root
    }


def longest_path(edges: dict[str, set[str]]) -> list[str]:
    best: dict[str, list[str]] = {}
    for module in TopologicalSorter(edges).static_order():
        below = max((best[other] for other in edges.get(module, ())), key=len, default=[])
        best[module] = [module, *below]
    return max(best.values(), key=len)


def rooms(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for module, others in edges.items():
        own = module.split(".")[1]
        found.setdefault(own, set()).update(other.split(".")[1] for other in others)
    return {name: others - {name} for name, others in found.items()}


def main(tree: Path) -> None:
    edges = graph(tree / "ckptlib")
    between = rooms(edges)
    print(f"{len(edges)} files in {len(between)} rooms")
    for what, found in (("files", edges), ("rooms", between)):
        try:
            path = longest_path(found)
            print(f"{what}: no circle; the longest path of imports has {len(path)}: {' > '.join(path)}")
        except CycleError as error:
            print(f"{what}: a circle: {' > '.join(error.args[1])}")
    for name, others in sorted(between.items()):
        print(f"  {name:14} {' '.join(sorted(others))}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent)
