"""The answer to the end of an upload is lost, on a server whose ETags say nothing of its parts, as rclone's."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from typing import ClassVar

import pytest
from helpers.answering import Handler, Server
from helpers.s3_bucket import PART_NBYTES, scale_limits

from ckptlib.errors import StoreError
from ckptlib.stores import open_store

HEAD, DATA = b"head" * 1024, os.urandom(2 * PART_NBYTES)


class Forgetful(Server):
    """Joins the parts, resets the connection, and knows nothing of the upload when it is asked again."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.parts: dict[str, bytes] = {}
        self.data: bytearray | None = None
        """Of the object, once there is one."""
        self.flips: int | None = None
        """In which byte of the object another bit is."""
        self.more = b""
        """What the object has behind its parts."""
        self.knows_crc32 = True
        self.num_uploads = 0


class _Handler(Handler):
    fields: ClassVar = {"ETag": '"opaque"'}
    server: Forgetful

    def do_PUT(self) -> None:
        self.server.parts[self.path] = self.body()
        crc32 = self.headers["x-amz-checksum-crc32"] if self.server.knows_crc32 else None
        self.answer(200, **({} if crc32 is None else {"x-amz-checksum-crc32": crc32}))

    def do_POST(self) -> None:
        self.body()
        if "uploads" in self.path:
            self.server.num_uploads += 1
            self.answer(200, b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")
            return
        if self.server.data is not None:
            self.answer(404, b"<Error><Code>NoSuchUpload</Code></Error>")
            return
        self.server.data = bytearray().join(data for _, data in sorted(self.server.parts.items()))
        if self.server.flips is not None:
            self.server.data[self.server.flips] ^= 1
        self.server.data += self.server.more
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def do_DELETE(self) -> None:
        self.answer(204)

    def do_HEAD(self) -> None:
        self.answer(200, bytes(self.server.data or b""))

    def do_GET(self) -> None:
        data = self.server.data or b""
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        self.answer(206, bytes(data[first : last + 1]), Content_Range=f"bytes {first}-{last}/{len(data)}")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forgetful]:
    scale_limits(monkeypatch)
    with Forgetful() as server:
        yield server


def put(server: Forgetful, client: str = "s3fs") -> None:
    with open_store("s3://bucket/run", server.options(client)) as store:
        store.put("p", HEAD, [DATA])


@pytest.mark.parametrize("knows_crc32", [True, False], ids=["CRC32", "MD5"])
def test_the_object_is_taken_that_has_what_was_sent(server: Forgetful, knows_crc32: bool) -> None:
    server.knows_crc32 = knows_crc32
    put(server)
    assert server.data == HEAD + DATA


@pytest.mark.parametrize("at", [0, PART_NBYTES + 7, len(HEAD) + len(DATA) - 1, None])
def test_another_one_is_not(server: Forgetful, at: int | None) -> None:
    server.flips, server.more = at, b"" if at is not None else b"more"
    with pytest.raises(StoreError, match=r"run/p: cannot put: .*NoSuchUpload"):
        put(server)


def test_obstore_sends_nothing_again_where_all_of_it_is_there(server: Forgetful) -> None:
    """What is given but once could not be sent again: such a put would fail, of an object that is there."""
    put(server, client="obstore")
    assert server.data == HEAD + DATA
    assert server.num_uploads == 1
