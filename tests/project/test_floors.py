"""The rules on imports in CONTRIBUTING.md, held by reading the source. The table there is the one that counts."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from types import ModuleType

import pytest
from import_graph import graph
from places import ROOT

import ckptlib.catalog
import ckptlib.stores
import ckptlib.testing
import ckptlib.verify

PACKAGE = ROOT / "ckptlib"

TORCH_FREE = {
    *("policy", "jobs", "libc", "pages", "priority", "record_locks", "words", "errors", "events", "_version"),
    *("format", "stores", "catalog", "slots", "codecs", "verify", "writer", "reading", "exporting", "sizing"),
    *("reporting", "cli"),
}
"""Rooms; and the package itself."""
TORCH_INSIDE_FUNCTIONS = {
    *("ckptlib.format.tagged_values", "ckptlib.reading.frameworks", "ckptlib.exporting.torch_file"),
    "ckptlib.exporting.dcp_files",
}
RUNS_CODE = {"pickle", "_pickle", "shelve", "marshal", "dill", "cloudpickle"}
WRITES_ONLY = {"ckptlib.exporting.torch_file": {"pickle", "pickle.Pickler"}}
"""What a module may use, since it makes a pickle, and opens none."""
PICKLES_INSIDE = {
    "torch.load",
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}


def floors() -> dict[str, int]:
    """By room: a package, or a module that lies beside the packages."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    found = re.search(r"```floors\n(.*?)```", text, re.DOTALL)
    assert found, "CONTRIBUTING.md has no ```floors block"
    table = {}
    for line in found[1].splitlines():
        number, *rooms = re.split(r" {2,}", re.sub(r" {3,}.*", "", line.strip()))
        table.update(dict.fromkeys(rooms, int(number)))
    return table


FLOORS = floors()
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def room(name: str) -> str:
    """`stores` for ckptlib.stores.local.LocalStore; a name that is no module belongs to `ckptlib` itself."""
    top = [*name.split("."), ""][1]
    return top if top in FLOORS or f"ckptlib.{top}" in MODULES else "ckptlib"


def is_torch_free(module: str) -> bool:
    return room(module) in {*TORCH_FREE, "ckptlib"}


def nodes(tree: ast.AST, inside_function: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every node that may run, and whether it does so only when a function is called."""
    for node in ast.iter_child_nodes(tree):
        inside = inside_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield node, inside
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in node.orelse:
                yield other, inside
                yield from nodes(other, inside)
        else:
            yield from nodes(node, inside)


def imports(found: list[tuple[ast.AST, bool]], module: str, is_package: bool) -> Iterator[tuple[str, bool]]:
    """(absolute name, whether inside a function). `from a import b` gives a.b, whether b is a module or not."""
    for node, inside in found:
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                above = module.split(".")
                base = above[: len(above) - node.level + is_package] + base
            yield from ((".".join([*base, alias.name]), inside) for alias in node.names)


@cache
def read(module: str) -> tuple[list[tuple[str, bool]], set[str]]:
    """Its imports, and the attributes that it uses: each with the name that it is of, or else alone."""
    path = MODULES[module]
    found = [*nodes(ast.parse(path.read_text(encoding="utf-8")))]
    attributes = {
        f"{node.value.id}.{node.attr}" if isinstance(node.value, ast.Name) else node.attr
        for node, _ in found
        if isinstance(node, ast.Attribute)
    }
    return [*imports(found, module, path.name == "__init__.py")], attributes


def imports_of(module: str) -> list[tuple[str, bool]]:
    return read(module)[0]


def own_imports_of(module: str) -> set[str]:
    """All but the version, which the package has set before any of its modules is loaded."""
    names = {name for name, _ in imports_of(module) if name.partition(".")[0] == "ckptlib"}
    return names - {"ckptlib.__version__"}


def test_every_module_has_a_floor() -> None:
    homeless = [module for module in MODULES if room(module) not in FLOORS]
    assert not homeless, f"{homeless}: in no room; add it to the table of CONTRIBUTING.md"


def test_imports_go_downward_only() -> None:
    wrong = {}
    for module in MODULES:
        own = room(module)
        others = {name for name in own_imports_of(module) if room(name) != own}
        if module == "ckptlib":
            others = {name for name in others if not is_public_home(name)}
        if found := {name for name in others if FLOORS.get(room(name), FLOORS[own]) >= FLOORS[own]}:
            wrong[module] = sorted(found)
    assert not wrong, f"imports from their own floor or from above: {wrong}"


def is_public_home(name: str) -> bool:
    """Whether the package says of a name where it lives, and imports it only when somebody asks for it."""
    return name.rpartition(".")[2] in ckptlib.__all__


def test_no_circle_between_files() -> None:
    try:
        tuple(TopologicalSorter(graph(PACKAGE)).static_order())
    except CycleError as error:
        pytest.fail(f"these files import one another: {' -> '.join(error.args[1])}")


def test_public_names_survive_importing_everything() -> None:
    """A package that is called like a public function would take its place."""
    names = [module for module in MODULES if not module.endswith("__main__")]
    if importlib.util.find_spec("torchtitan") is None:
        names.remove("ckptlib.adapters.torchtitan")
    for name in names:
        importlib.import_module(name)
    assert [name for name in ckptlib.__all__ if isinstance(getattr(ckptlib, name), ModuleType)] == []


@pytest.mark.parametrize("name", ["data.ResumableSampler", "events.Committed", "Preempted"])
def test_public_modules_need_no_import_of_their_own(name: str) -> None:
    code = f"import ckptlib; ckptlib.{name}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr


def test_type_checkers_know_all_public_names() -> None:
    tree = ast.parse((ROOT / "ckptlib" / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    known = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert known == {*ckptlib.__all__, "data", "events"}


def test_documented_places() -> None:
    assert ckptlib.catalog.Catalog
    assert ckptlib.verify.verify_root
    assert ckptlib.stores.open_store
    assert ckptlib.testing.LatencyStore is ckptlib.stores.testing.LatencyStore


def test_torch_free() -> None:
    wrong = {}
    for module in filter(is_torch_free, MODULES):
        torch = {
            name
            for name, inside in imports_of(module)
            if name.partition(".")[0] == "torch" and not (inside and module in TORCH_INSIDE_FUNCTIONS)
        }
        if found := torch | {other for other in own_imports_of(module) if not is_torch_free(other)}:
            wrong[module] = sorted(found)
    assert not wrong, f"must run without torch, and import it or modules that may need it: {wrong}"


def test_torch_free_when_run() -> None:
    names = [module for module in MODULES if is_torch_free(module) and not module.endswith("__main__")]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_clients_of_stores_stay_in_stores() -> None:
    clients = ("fsspec", "s3fs", "obstore", "aiobotocore", "botocore", "aiohttp")
    found = {
        module: name
        for module in MODULES
        for name, _ in imports_of(module)
        if name.partition(".")[0] in clients and room(module) != "stores"
    }
    assert not found, f"only stores/ may import these: {found}"


def test_nothing_unpickles() -> None:
    wrong = {}
    for module in MODULES:
        names = {name for name, _ in imports_of(module)} | read(module)[1]
        found = {n for n in names if n.partition(".")[0] in RUNS_CODE or {n, n.rpartition(".")[2]} & PICKLES_INSIDE}
        found -= WRITES_ONLY.get(module, set())
        if found:
            wrong[module] = sorted(found)
    assert not wrong, f"opening a checkpoint must never run code, and these may: {wrong}"


# -- the reading itself --


def test_what_counts_as_an_import() -> None:
    source = """
import os.path
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import hidden
else:
    import seen
class C:
    import in_class
    def f(self):
        if True:
            from ckptlib.stores import base as b
from . import sibling
from .deep import x
"""
    found = [*nodes(ast.parse(source))]
    assert list(imports(found, "ckptlib.writer.persist", is_package=False)) == [
        ("os.path", False),
        ("typing.TYPE_CHECKING", False),
        ("seen", False),
        ("in_class", False),
        ("ckptlib.stores.base", True),
        ("ckptlib.writer.sibling", False),
        ("ckptlib.writer.deep.x", False),
    ]
    found = [*nodes(ast.parse("from . import a"))]
    assert [name for name, _ in imports(found, "ckptlib.writer", is_package=True)] == ["ckptlib.writer.a"]


def test_the_table_is_read() -> None:
    assert FLOORS["errors"] == 0
    assert FLOORS["stores"] == 1
    assert set(FLOORS.values()) == set(range(11))
    assert not [name for name in FLOORS if " " in name]
    assert {name for name in TORCH_FREE if name not in FLOORS} == set()
    assert [
        room(m)
        for m in ("ckptlib", "ckptlib.errors", "ckptlib.stores", "ckptlib.stores.local.LocalStore", "ckptlib.Keep")
    ] == ["ckptlib", "errors", "stores", "stores", "ckptlib"]
