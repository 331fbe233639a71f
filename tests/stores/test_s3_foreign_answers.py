"""A page where the bucket should be: what answers by success is not taken for a server of S3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from helpers.answering import Handler, Server
from helpers.s3_bucket import PART_NBYTES, scale_limits

from ckptlib.errors import ObjectNotFound, StoreDenied, StoreError, StoreTimeout
from ckptlib.stores import Store, open_store

PAGE = b"<html><head><title>Sign in</title></head><body>Please sign in</body></html>"


class _Portal(Handler):
    """Sends whoever asks to its page, as a proxy does whose session is over; or answers by that page, or by nothing."""

    status, page = 200, PAGE

    def do_GET(self) -> None:
        self.body()
        body = b"" if self.status == 204 or self.command == "HEAD" else self.page
        if self.status == 303 and self.path != "/page":
            self.answer(303, body, Location="/page")
        else:
            self.answer(200 if self.path == "/page" else self.status, body)

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET


@pytest.fixture(params=["s3fs", "obstore"])
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[(200, PAGE), (200, b""), (204, b""), (303, PAGE)], ids=["page", "empty", "nothing", "redirect"])
def portal(client: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with opened(client, *request.param, monkeypatch) as store:
        yield store


@contextmanager
def opened(client: str, status: int, page: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    scale_limits(monkeypatch, idle_s=60.0, retry_s=0.2)
    handler = type("Portal", (_Portal,), {"status": status, "page": page})
    with Server(handler) as server, open_store("s3://bucket/run", server.options(client)) as store:
        yield store


CALLS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put("p", b"data"),
    "create": lambda store: store.put("p", b"data", create=True),
    "put in parts": lambda store: store.put("p", bytes(4096), [bytes(PART_NBYTES + 1)]),
    "get": lambda store: store.get("p"),
    "get a range": lambda store: store.get("p", 5, 10),
    "get into": lambda store: store.get_into("p", 0, memoryview(bytearray(len(PAGE)))),
    "size": lambda store: store.get("p", 0, 0),
    "list": lambda store: store.scan(""),
    "peek": lambda store: store.peek(10),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_it_is_an_outage(portal: Store, call: Callable[[Store], object]) -> None:
    with pytest.raises(StoreTimeout, match=r"s3://bucket/run/p?: cannot .*is there a proxy in the way\?"):
        call(portal)


@pytest.fixture(params=[PAGE, b"page not found\n", b""], ids=["page", "text", "empty"])
def page(request: pytest.FixtureRequest) -> bytes:
    return bytes(request.param)


@pytest.fixture(params=[403, 404])
def router(
    client: str, page: bytes, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    """A proxy that has lost the way to its server for a while, and says so by 404, or that lets nobody pass."""
    with opened(client, request.param, page, monkeypatch) as store:
        yield store


def test_without_a_code_it_is_no_word_of_a_store(router: Store) -> None:
    calls = {name: call for name, call in CALLS.items() if name != "size"}  # by a HEAD, whose answer has no body
    calls["delete"] = lambda store: store.delete("p")
    calls["delete many"] = lambda store: store.delete("p", "q")
    for call in calls.values():
        with pytest.raises(StoreTimeout, match=r"s3://bucket/run/p?.*: cannot .*is there a proxy in the way\?"):
            call(router)


@pytest.mark.parametrize(("status", "kind"), [(413, StoreError), (522, StoreTimeout)])
@pytest.mark.parametrize("client", ["s3fs"], indirect=True)
def test_the_page_of_a_gateway_is_told_by_its_status(
    client: str, status: int, kind: type[StoreError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """413: for a part that is larger than it takes, as nginx does for more than 1 MiB."""
    page = b"<html><body><h1>no</h1></body></html>"
    with opened(client, status, page, monkeypatch) as store, pytest.raises(StoreError) as told:
        store.put("p", b"data")
    assert told.type is kind
    assert f"answered by {status} without a code, as no S3 server does; is there a proxy in the way?" in str(told.value)


@pytest.mark.parametrize("client", ["s3fs"], indirect=True)
def test_a_server_that_knows_no_listing_of_uploads_may_say_so_without_a_code(router: Store) -> None:
    """An outage would have each sweep ask for a minute, and begin anew after the next commit."""
    with pytest.raises(StoreError, match=r"s3://bucket/run/: cannot list uploads: ") as told:
        router.clean(0.0, lambda key: True)
    assert told.type in (StoreError, StoreDenied)


@pytest.mark.parametrize("page", [b"Not Found", b"Not Found\n", b'{"error": {"code": 404}}'])
def test_an_emulator_of_gcs_says_404_in_two_words_to_obstore(page: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """As fake-gcs-server does, or in JSON."""
    with opened("obstore", 404, page, monkeypatch) as store, pytest.raises(ObjectNotFound):
        store.get("p")
