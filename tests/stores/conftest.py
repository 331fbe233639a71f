"""Python 3.10 has no obstore: there, each test whose name says that it goes by obstore is skipped."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("obstore") is None:
        skipped = pytest.mark.skip(reason="obstore is not installed: it needs Python 3.11")
        for item in items:
            if item.path.parent == HERE and "obstore" in item.nodeid:
                item.add_marker(skipped)
