"""What a server does not implement, and says so: by 501, as OpenStack Swift's S3 does, or in another way. It is no
outage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest
from helpers.answering import Handler, Server
from helpers.s3_bucket import PART_NBYTES, scale_limits

from ckptlib.errors import StoreDenied, StoreError
from ckptlib.stores import Store, open_store

SHORT_RETRY_S = 1.5
"""For as long a client takes 501 for an outage."""


class Swift(Server):
    """Takes puts that have none of the fields that it does not know."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.unknown = {"If-None-Match": "Conditional object PUTs are not supported."}
        self.asked: list[set[str]] = []
        """Of each put: the condition, where it has one."""
        self.bodies: list[bytes] = []
        """Of those that were taken."""
        self.busy = 0
        """How many puts are told to come again later."""
        self.to_many = 501, "NotImplemented"
        """What it answers to a request to delete many."""
        self.deleted: list[str] = []


class _Handler(Handler):
    fields: ClassVar = {"ETag": '"opaque"'}
    server: Swift

    def do_PUT(self) -> None:
        body = self.body()
        self.server.asked.append({name.lower() for name in self.headers} & {"if-none-match"})
        told = next((why for name, why in self.server.unknown.items() if name in self.headers), None)
        if self.server.busy:
            self.server.busy -= 1
            self._refuse(503, "SlowDown", "Please reduce your request rate.")
        elif told is not None:
            self._refuse(501, "NotImplemented", told)
        else:
            self.server.bodies.append(body)
            self.answer(200)

    def do_HEAD(self) -> None:
        self.answer(404)

    def do_POST(self) -> None:
        self.body()
        self._refuse(*self.server.to_many, "no")

    def do_DELETE(self) -> None:
        self.server.deleted.append(self.path)
        self.answer(204)

    def _refuse(self, status: int, code: str, told: str) -> None:
        self.answer(
            status, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{told}</Message></Error>".encode()
        )


@pytest.fixture
def swift() -> Iterator[Swift]:
    with Swift() as server:
        yield server


@pytest.fixture
def store(swift: Swift, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    scale_limits(monkeypatch, idle_s=60.0, retry_s=SHORT_RETRY_S)
    with open_store("s3://bucket/run", swift.options("obstore")) as store:
        yield store


@pytest.mark.parametrize("nbytes", [10, PART_NBYTES - 1])
def test_a_create_that_is_not_known_is_asked_for_once(swift: Swift, store: Store, nbytes: int) -> None:
    for body in (bytes(nbytes), b"another"):
        store.put("a", body, create=True)
    assert swift.asked == [{"if-none-match"}, set(), set()]
    assert swift.bodies == [bytes(nbytes), b"another"]


@pytest.mark.parametrize("nbytes", [10, PART_NBYTES - 1])
def test_a_create_that_is_not_known_is_asked_for_until_it_is_answered(swift: Swift, store: Store, nbytes: int) -> None:
    swift.busy = 1
    store.put("a", bytes(nbytes), create=True)
    assert swift.asked == [{"if-none-match"}, {"if-none-match"}, set()]
    assert swift.bodies == [bytes(nbytes)]


def test_a_create_that_is_known_is_asked_for_each_time(swift: Swift, store: Store) -> None:
    swift.unknown, swift.busy = {}, 1
    for body in (b"a", b"b"):
        store.put("a", body, create=True)
    assert swift.bodies == [b"a", b"b"]
    assert swift.asked == 3 * [{"if-none-match"}]


def test_a_checksum_that_is_not_known(swift: Swift, store: Store) -> None:
    swift.unknown = {"x-amz-checksum-crc64nvme": "The x-amz-checksum-crc64nvme algorithm is not supported."}
    told = r"crc64nvme algorithm is not supported.*set AWS_CHECKSUM_ALGORITHM=sha256.*'when_required'"
    for call in (lambda: store.put("a", b"1"), lambda: store.put("a", b"1", create=True)):
        with pytest.raises(StoreError, match=told):
            call()
    assert swift.bodies == []


@pytest.mark.parametrize(
    "answer",
    [
        *((501, "NotImplemented"), (400, "MissingContentMD5"), (400, "InvalidRequest"), (405, "MethodNotAllowed")),
        (404, "NoSuchKey"),
    ],
)
def test_many_are_deleted_one_by_one_where_the_server_does_not_know_how(
    swift: Swift, store: Store, answer: tuple[int, str]
) -> None:
    """404 is no word that all of them are gone."""
    swift.to_many = answer
    for keys in (("a", "b"), ("c", "d")):
        store.delete(*keys)
    assert sorted(swift.deleted) == [f"/bucket/run/{key}" for key in "abcd"]


def test_many_that_may_not_be_deleted(swift: Swift, store: Store) -> None:
    swift.to_many = 403, "AccessDenied"
    with pytest.raises(StoreDenied, match="grant them the right to delete"):
        store.delete("a", "b")
    assert swift.deleted == []
