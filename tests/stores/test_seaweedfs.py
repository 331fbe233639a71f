"""The contract of a store on SeaweedFS."""

from __future__ import annotations

import pytest
from helpers.servers import ObjectStorage
from store_conformance import StoreConformance

from ckptlib.stores import Store, open_store


class TestSeaweedFS(StoreConformance):
    tells_existing = False

    @pytest.fixture
    def store(self, s3: ObjectStorage) -> Store:
        return open_store(s3.url(), s3.options())
