"""The contract of a store on JuiceFS."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.servers import ObjectStorage
from store_conformance import StoreConformance

from ckptlib.errors import StoreError
from ckptlib.stores import Store, open_store


class TestJuiceFS(StoreConformance):
    tells_existing = False

    @pytest.fixture
    def store(self, juicefs: ObjectStorage) -> Store:
        return open_store(juicefs.url(), juicefs.options())


def test_a_missing_bucket_is_not_an_empty_store(juicefs: ObjectStorage) -> None:
    elsewhere = replace(juicefs, bucket="no-such-bucket")
    with open_store(elsewhere.url(), elsewhere.options()) as store:
        for prefix in ["", "steps/"]:
            with pytest.raises(StoreError, match="no such bucket"):
                store.scan(prefix)
        with pytest.raises(StoreError, match=r"cannot put: .*(bucket|container|404)"):
            store.put("a", b"1")
        with pytest.raises(StoreError, match="no such bucket"):
            store.scan("")  # the put made none
