"""The contract of a store on Azure."""

from __future__ import annotations

import pytest
from helpers.servers import ObjectStorage
from store_conformance import StoreConformance

from ckptlib.stores import Store, open_store


class TestAzure(StoreConformance):
    tells_existing = False

    @pytest.fixture
    def store(self, azure: ObjectStorage) -> Store:
        return open_store(azure.url(), azure.options())
