"""python -m benchmarks NAME [arguments]: runs one of them; without a name, says which there are."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path


def questions() -> dict[str, str]:
    """By name: the first line of every file and package here that can be run."""
    found = {}
    here = Path(__file__).parent
    for path in sorted([*here.glob("[a-z]*.py"), *here.glob("[a-z]*/__init__.py")]):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            name = path.parent.name if path.stem == "__init__" else path.stem
            found[name] = (ast.get_docstring(tree) or "").split("\n")[0]
    return found


def run(arguments: list[str]) -> None:
    known = questions()
    if arguments and arguments[0] in known:
        importlib.import_module(f"benchmarks.{arguments[0]}").main(arguments[1:])
        return
    print("python -m benchmarks NAME [--toy] [--out FILE] [more: NAME --help]\n")
    for name, question in known.items():
        print(f"  {name:12} {question}")
    if arguments and arguments[0] not in ("-h", "--help"):
        raise SystemExit(f"no benchmark is called {arguments[0]!r}")


if __name__ == "__main__":
    run(sys.argv[1:])
