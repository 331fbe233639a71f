"""The contract of a store on GCS."""

from __future__ import annotations

import pytest
from helpers.servers import ObjectStorage
from store_conformance import StoreConformance

from ckptlib.stores import Store, open_store


class TestGCS(StoreConformance):
    tells_existing = False

    @pytest.fixture
    def store(self, gcs: ObjectStorage) -> Store:
        return open_store(gcs.url(), gcs.options())
