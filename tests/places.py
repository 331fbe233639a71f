"""Where things lie: for tests that start workers, or read what the project says of itself."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
WORKERS = TESTS / "workers"
DATA = TESTS / "data"
