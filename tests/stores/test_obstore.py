"""The contract of a store through obstore, on servers of S3 and Azure.

GCS's client speaks GCS's XML interface, of which gcp-storage-emulator knows nothing; it is S3's but for conditions and
credentials, so that moto takes it. What Google's own servers do is not tested.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from helpers.servers import ObjectStorage
from store_conformance import StoreConformance, keys

from ckptlib.stores import Store, open_store

DELETES = pytest.importorskip("ckptlib.stores.obstore").DELETES


class OnServer(StoreConformance):
    tells_existing = False

    @pytest.fixture
    def storage(self) -> ObjectStorage:
        raise NotImplementedError

    @pytest.fixture
    def store(self, storage: ObjectStorage) -> Iterator[Store]:
        with open_store(storage.url(), {**storage.options(), "client": "obstore"}) as store:
            yield store


class TestSeaweedFS(OnServer):
    @pytest.fixture
    def storage(self, s3: ObjectStorage) -> ObjectStorage:
        return s3


class TestJuiceFS(OnServer):
    @pytest.fixture
    def storage(self, juicefs: ObjectStorage) -> ObjectStorage:
        return juicefs


class TestAzurite(OnServer):
    @pytest.fixture
    def storage(self, azure: ObjectStorage) -> ObjectStorage:
        return azure


class TestGCSClient(StoreConformance):
    tells_existing = False

    @pytest.fixture
    def store(self, s3_endpoint: str) -> Iterator[Store]:
        options = {"client": "obstore", "token": "a-token", "endpoint_url": s3_endpoint}
        with open_store(f"gs://bucket/{uuid.uuid4().hex}", options) as store:
            yield store

    def test_more_than_are_deleted_at_once(self, store: Store) -> None:
        names = [f"a/{n}" for n in range(DELETES + 2)]
        for name in names:
            store.put(name, b"")
        store.delete(*names[1:])
        assert keys(store) == names[:1]
