"""A reading that is left unfinished waits for none of its threads: the garbage collector may close it anywhere."""

from __future__ import annotations

import ast
import gc
import threading
from collections.abc import Iterator

import pytest
from places import ROOT

from ckptlib.catalog.reading import each

TIMEOUT_S = 60.0


class Blocked:
    """Calls of which the first returns at once, and the others when they are let."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.begun = threading.Event()

    def __call__(self, number: int) -> int:
        if number:
            self.begun.set()
            assert self.let.wait(TIMEOUT_S)
        return number


@pytest.fixture
def blocked() -> Iterator[Blocked]:
    calls = Blocked()
    yield calls
    calls.let.set()


def test_a_reading_that_is_closed_waits_for_no_thread(blocked: Blocked) -> None:
    found = each(blocked, range(1000))
    assert next(found) == 0
    assert blocked.begun.wait(TIMEOUT_S)
    closing = threading.Thread(target=found.close, daemon=True)  # type: ignore[attr-defined]
    closing.start()
    closing.join(TIMEOUT_S / 2)
    assert not closing.is_alive()


def test_a_thread_starts_though_garbage_is_collected_in_its_start(blocked: Blocked) -> None:
    """A failed commit keeps its reading in a cycle; the collector closed it in the start of a thread, while this held a
    lock of `threading`. No thread of the process started any more. Until Python 3.12."""
    lock = getattr(threading, "_shutdown_locks_lock", None)
    if lock is None:
        pytest.skip("the threads of this Python end without such a lock")
    found = each(blocked, range(1000))
    assert next(found) == 0
    kept = [found]
    kept.append(kept)  # type: ignore[arg-type]
    del found, kept

    def collect() -> None:
        with lock:
            gc.collect()

    blocked.let.set()
    collecting = threading.Thread(target=collect, daemon=True)
    collecting.start()
    collecting.join(TIMEOUT_S / 2)
    stuck = collecting.is_alive()
    if stuck:
        lock.release()  # for the tests that follow
    assert not stuck


def test_no_generator_waits_for_threads_where_it_is_left() -> None:
    """In all of the package: the executor of a generator is one that does not."""
    found = []
    for path in sorted((ROOT / "ckptlib").rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            nodes = [*own(function)] if isinstance(function, ast.FunctionDef) else []
            if any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in nodes):
                items = [item.context_expr for node in nodes if isinstance(node, ast.With) for item in node.items]
                found += [f"{path}:{item.lineno}" for item in items if "ThreadPoolExecutor(" in ast.unparse(item)]
    assert found == []


def own(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions in it."""
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            waiting += ast.iter_child_nodes(node)
