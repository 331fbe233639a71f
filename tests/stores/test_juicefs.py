"""The contract of a store on JuiceFS."""

from __future__ import annotations

import pytest
from helpers.servers import ObjectStorage
from store_conformance import StoreConformance

from ckptlib.stores import Store, open_store


class TestJuiceFS(StoreConformance):
    tells_existing = False

    @pytest.fixture
    def store(self, juicefs: ObjectStorage) -> Store:
        return open_store(juicefs.url(), juicefs.options())
