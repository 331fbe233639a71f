"""The contract of a store on GCS."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.servers import ObjectStorage
from store_conformance import StoreConformance

from ckptlib.errors import StoreError
from ckptlib.stores import Store, open_store


class TestGCS(StoreConformance):
    knows_sizes = False
    tells_existing = False

    @pytest.fixture
    def store(self, gcs: ObjectStorage) -> Store:
        return open_store(gcs.url(), gcs.options())


@pytest.mark.parametrize("end", [b"\r", b"\n", b"\r\n", b"\n--", b""], ids=repr)
def test_the_last_bytes_of_an_object(gcs: ObjectStorage, end: bytes) -> None:
    with open_store(gcs.url(), gcs.options()) as store:
        store.put("a", b"data" + end)
        assert store.get("a") == b"data" + end


def test_a_missing_bucket_is_not_an_empty_store(gcs: ObjectStorage) -> None:
    elsewhere = replace(gcs, bucket="no-such-bucket")
    with open_store(elsewhere.url(), elsewhere.options()) as store:
        for prefix in ["", "steps/"]:
            with pytest.raises(StoreError, match="no such bucket"):
                store.scan(prefix)
        with pytest.raises(StoreError, match=r"cannot put: .*(bucket|container|404)"):
            store.put("a", b"1")
        with pytest.raises(StoreError, match="no such bucket"):
            store.scan("")  # the put made none
