"""The contract of a store on GCS."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from gcsfs.retry import validate_response
from helpers.objects import client_of
from helpers.servers import ObjectStorage
from store_conformance import StoreConformance

from ckptlib.errors import ObjectUnreadable, StoreDenied, StoreError, StoreTimeout
from ckptlib.stores import Store, io_limits, open_store


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


def test_what_may_not_be_touched(gcs: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """gcsfs has no class and no number for a refusal."""

    async def refuse(method: str, path: str, *parts: object, **more: object) -> None:
        validate_response(403, b'{"error": {"code": 403, "message": "no storage.objects.get access"}}', path)

    with open_store(gcs.url(), gcs.options()) as store:
        store.put("a", b"data")
        monkeypatch.setattr(client_of(store), "_call", refuse)
        for read in (lambda: store.get("a"), lambda: store.get_into("a", 0, memoryview(bytearray(4)))):
            with pytest.raises(ObjectUnreadable, match=r"(?s)/a: cannot get: .*Forbidden.*check the credentials"):
                read()
        for call in (lambda: store.put("b", b""), lambda: store.scan("steps/"), lambda: store.delete("a")):
            with pytest.raises(StoreDenied, match=r"(?s)cannot (put|list|delete): .*Forbidden.*check the credentials"):
                call()


@pytest.mark.parametrize("said", ["Rate Limit Exceeded", "User Rate Limit Exceeded"])
def test_a_403_that_asks_for_fewer_requests_is_no_refusal(
    gcs: ObjectStorage, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    """Google has 429 for it, and these two as well. A restore once took the step for one that it may not read."""
    met: list[str] = []

    with open_store(gcs.url(), gcs.options()) as store:
        client = client_of(store)
        call = client._call

        async def throttled(method: str, path: str, *parts: object, **more: object) -> object:
            met.append(method)
            if len(met) % 3:
                told = {"domain": "usageLimits", "reason": "rateLimitExceeded", "message": said}
                answer = {"error": {"code": 403, "message": said, "errors": [told]}}
                validate_response(403, json.dumps(answer).encode(), path)
            return await call(method, path, *parts, **more)

        monkeypatch.setattr(client, "_call", throttled)
        store.put("a", b"data")
        assert store.get("a", 1, 2) == b"at"
        assert [entry.key for entry in store.scan("")] == ["a"]
        store.delete("a")
        assert len(met) >= 4 * 3


@pytest.mark.parametrize("page", [b"<html><body>Forbidden</body></html>", b""])
def test_a_403_of_a_proxy_is_no_refusal(gcs: ObjectStorage, monkeypatch: pytest.MonkeyPatch, page: bytes) -> None:
    """Google's has a message, in JSON."""
    met: list[str] = []

    with open_store(gcs.url(), gcs.options()) as store:
        store.put("a", b"data")
        client = client_of(store)
        call = client._call

        async def refuse(method: str, path: str, *parts: object, **more: object) -> object:
            met.append(method)
            if len(met) == 1:
                validate_response(403, page, path)
            return await call(method, path, *parts, **more)

        async def refuse_always(method: str, path: str, *parts: object, **more: object) -> None:
            validate_response(403, page, path)

        monkeypatch.setattr(client, "_call", refuse)
        assert store.get("a", 0, 4) == b"data"
        assert len(met) == 2
        monkeypatch.setattr(client, "_call", refuse_always)
        monkeypatch.setattr(io_limits, "RETRY_S", 0.2)
        for call in (lambda: store.get("a"), lambda: store.put("b", b""), lambda: store.scan("a")):
            with pytest.raises(StoreTimeout, match=r"(?s)cannot .*Forbidden.*is there a proxy in the way\?"):
                call()


def test_a_403_that_asks_for_fewer_requests_for_long(gcs: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    async def throttled(method: str, path: str, *parts: object, **more: object) -> None:
        validate_response(403, b'{"error": {"code": 403, "message": "Rate Limit Exceeded"}}', path)

    monkeypatch.setattr(io_limits, "RETRY_S", 0.5)
    with open_store(gcs.url(), gcs.options()) as store:
        monkeypatch.setattr(client_of(store), "_call", throttled)
        for call in (lambda: store.get("a"), lambda: store.put("a", b"")):
            with pytest.raises(StoreError, match="Rate Limit Exceeded") as caught:
                call()
            assert type(caught.value) is StoreError, "neither StoreDenied nor ObjectUnreadable"
