"""The contract of a store on Azure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.servers import ObjectStorage
from store_conformance import StoreConformance

from ckptlib.errors import StoreError
from ckptlib.stores import Store, open_store


class TestAzure(StoreConformance):
    knows_sizes = False
    tells_existing = False

    @pytest.fixture
    def store(self, azure: ObjectStorage) -> Store:
        return open_store(azure.url(), azure.options())


def test_a_missing_container_is_not_an_empty_store(azure: ObjectStorage) -> None:
    elsewhere = replace(azure, bucket="no-such-bucket")
    with open_store(elsewhere.url(), elsewhere.options()) as store:
        for prefix in ["", "steps/"]:
            with pytest.raises(StoreError, match="no such bucket"):
                store.scan(prefix)
        with pytest.raises(StoreError, match=r"cannot put: .*(bucket|container|404)"):
            store.put("a", b"1")
        with pytest.raises(StoreError, match="no such bucket"):
            store.scan("")  # the put made none
