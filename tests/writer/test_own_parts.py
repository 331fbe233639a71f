"""Which parts may be there, though putting them has failed: there is no more doubt of them than the store leaves."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.writers import Bench
from typing_extensions import Buffer, override

from ckptlib.errors import StoreDenied, StoreError, StoreFull
from ckptlib.stores.local import LocalStore
from ckptlib.stores.testing import _HookedStore
from ckptlib.writer.persist import Persister


class Refusing(_HookedStore):
    """Refuses a put, before or after it is done."""

    def __init__(self, root: Path, prefix: str, when: str, error: StoreError, is_local: bool) -> None:
        super().__init__(LocalStore(str(root)), "refusing")
        self.is_local, self._prefix, self._when, self._error = is_local, prefix, when, error

    @override
    @contextmanager
    def _around(self, op: str, key: str, data: Buffer = b"") -> Iterator[Buffer]:
        is_met = op in ("put", "write", "commit") and key.startswith(self._prefix)
        if is_met and self._when == "before":
            raise self._error
        yield data
        if is_met and op == "put" and self._when == "after":
            raise self._error


@pytest.mark.parametrize(
    ("prefix", "when", "error", "is_local", "is_doubted"),
    [
        ("parts/", "after", StoreError("no answer"), False, True),
        ("parts/", "after", StoreError("no answer"), True, True),
        ("parts/", "after", StoreFull("a try before was taken"), False, True),
        ("parts/", "after", StoreFull("its directory could not be flushed"), True, True),
        ("parts/", "before", StoreFull("no room"), True, False),
        ("parts/", "before", StoreDenied("read-only"), True, False),
        ("layouts/", "before", StoreError("no answer"), False, False),
        ("packs/", "before", StoreError("no answer"), False, False),
    ],
)
def test_which_part_may_be_there(
    bench: Bench, prefix: str, when: str, error: StoreError, is_local: bool, is_doubted: bool
) -> None:
    save, slot = bench.slot(1)
    with ThreadPoolExecutor(1) as executor:
        persister = Persister(Refusing(bench.root, prefix, when, error, is_local), executor, rank=0, world_size=1)
        with pytest.raises(StoreError):
            persister.persist(slot, save)
    assert persister.parts.may_have_put(save) == is_doubted
    assert bool([*bench.root.glob("parts/*/*")]) == (when == "after")
