"""The contract of a store on SeaweedFS."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.servers import ObjectStorage
from store_conformance import StoreConformance

from ckptlib.errors import StoreError
from ckptlib.stores import Store, open_store


class TestSeaweedFS(StoreConformance):
    tells_existing = False

    @pytest.fixture
    def store(self, s3: ObjectStorage) -> Store:
        return open_store(s3.url(), s3.options())


def test_a_missing_bucket_is_not_an_empty_store(s3: ObjectStorage) -> None:
    elsewhere = replace(s3, bucket="no-such-bucket")
    with open_store(elsewhere.url(), elsewhere.options()) as store:
        for prefix in ["", "steps/"]:
            with pytest.raises(StoreError, match="no such bucket"):
                store.scan(prefix)
        with pytest.raises(StoreError, match=r"cannot put: .*(bucket|container|404)"):
            store.put("a", b"1")
        with pytest.raises(StoreError, match="no such bucket"):
            store.scan("")  # the put made none
