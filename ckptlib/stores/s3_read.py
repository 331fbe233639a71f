"""Reads bytes of an object from a bucket: straight to their place, and on from where a try broke off."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from botocore.exceptions import ClientError

from ckptlib.errors import ObjectNotFound, ObjectUnreadable, StoreDenied, StoreError
from ckptlib.stores.base import check_plain, range_nbytes
from ckptlib.stores.retries import Retries
from ckptlib.stores.s3_body import Progress
from ckptlib.stores.s3_client import Call, S3Client
from ckptlib.stores.s3_errors import Torn, code_of, meaning_of, status_of

_READ_NBYTES = 1 << 20
"""Bytes that may wait in memory for each request."""

_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class Reading:
    """Reads `nbytes` bytes of an object from `offset`, or all up to the end when None; runs on the loop's thread.

    `place` is given each chunk, in order, with the number of bytes before it.
    """

    def __init__(
        self, client: S3Client, call: Call, offset: int, nbytes: int | None, place: Callable[[int, bytes], None]
    ) -> None:
        self._client, self._call = client, call
        self._where = f"{client.url}/{call.key}"
        self._offset, self._nbytes = offset, nbytes
        self._place = place
        self._done = 0
        self._version: tuple[int, str] | None = None
        """Size of the object, and its ETag."""

    async def run(self) -> None:
        """Reads the range. Raises FormatError when the object ends earlier."""
        try:
            if self._nbytes == 0:
                self._count(await self._size())
            else:
                await self._client.tried(self._call, self._read_on, Retries(self._call.deadline))
        except ClientError as error:
            if status_of(error) != 416:
                raise self._failure(error) from None
            size = await self._size()
            self._count(size)
            if self._nbytes is not None or self._offset != size:  # nothing came, where something should have
                raise self._failure(error) from None

    async def _size(self) -> int:
        try:
            answer = await self._client.ask(self._call, "head_object", {"Key": self._client.prefix + self._call.key})
        except ClientError as error:
            raise self._failure(error) from None
        return int(answer["ContentLength"])

    def _count(self, size: int) -> int:
        return range_nbytes(self._where, self._offset, self._nbytes, size)

    async def _read_on(self, progress: Progress) -> None:
        first = self._offset + self._done
        wanted = {} if first == 0 and self._nbytes is None else {"Range": f"bytes={first}-{self._last()}"}
        answer = await self._client.send("get_object", {"Key": self._client.prefix + self._call.key, **wanted})
        try:
            count = self._check(answer, first)
            async for chunk in _chunks(answer["Body"]):
                progress.moved()
                if len(chunk) > count - self._done:
                    raise StoreError(f"{self._where}: cannot get: the server sent more than {count} bytes")
                self._place(self._done, chunk)
                self._done += len(chunk)
        finally:
            answer["Body"].close()
        if self._done < count:
            raise Torn(f"{self._done} of {count} bytes came")

    def _last(self) -> str:
        return "" if self._nbytes is None else str(self._offset + self._nbytes - 1)

    def _check(self, answer: dict[str, Any], first: int) -> int:
        """Returns how many bytes the whole range has; `first`: the first one that this answer should have."""
        check_plain(self._where, answer.get("ContentEncoding"))
        length = int(answer["ContentLength"])
        begin, last, size = self._range(answer.get("ContentRange")) or (0, length - 1, length)
        version = (size, str(answer.get("ETag")))
        if self._version not in (None, version):
            raise StoreError(f"{self._where}: changed while it was read: {self._version} became {version}")
        self._version = version
        count = self._count(size)
        if (begin, last) != (first, self._offset + count - 1) or length != last - begin + 1:
            expected = f"bytes {first}-{self._offset + count - 1}"
            raise StoreError(f"{self._where}: cannot get: expected {expected}, got {begin}-{last}, length {length}")
        return count

    def _range(self, told: str | None) -> tuple[int, int, int] | None:
        """Returns the first byte, the last byte and the object's size; None if the server sends all of it."""
        if told is None:
            return None
        found = _RANGE.fullmatch(told)
        if not found:
            raise StoreError(f"{self._where}: cannot get: unknown range {told[:80]!r}")
        begin, last, size = map(int, found.groups())
        return begin, last, size

    def _failure(self, error: ClientError) -> StoreError:
        """Tells errors of this object alone from errors of the store."""
        denied = meaning_of(error).kind is StoreDenied
        if status_of(error) == 404 and not denied:
            return ObjectNotFound(f"{self._where}: no such object")
        alone = status_of(error) == 403 and code_of(error) in ("AccessDenied", "Forbidden", "403", "InvalidObjectState")
        return self._client.failure(self._call, error, ObjectUnreadable if alone else None)


async def _chunks(body: Any) -> Any:
    """Yields chunks as they come from the socket: `body.read` would copy them together first."""
    content = getattr(body, "raw_stream", body).content
    if hasattr(content, "set_read_chunk_size"):
        content.set_read_chunk_size(_READ_NBYTES)  # or reading stops and starts again for every 128 KiB
    async for chunk in content.iter_any():
        yield chunk
