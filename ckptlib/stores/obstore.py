"""Objects in S3, GCS and Azure by their native clients: the package obstore, Rust below.

It sends the parts of an object side by side and in place, and sends most requests again that failed. This module adds
deadlines, sends damaged uploads again, and tells a full bucket from a wrong key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from typing_extensions import Buffer, override

from ckptlib.errors import ObjectNotFound, StoreError
from ckptlib.stores import io_limits
from ckptlib.stores.base import (
    Counted,
    Entry,
    LateHead,
    Store,
    as_bytes,
    check_key,
    check_plain,
    check_prefix,
    check_range,
    joined,
    range_nbytes,
    taken,
)
from ckptlib.stores.obstore_errors import Failure, check_answer
from ckptlib.stores.obstore_listing import Listing
from ckptlib.stores.obstore_loop import Feed, GivenUp, Lent
from ckptlib.stores.obstore_pieces import Pieces
from ckptlib.stores.obstore_requests import Beyond, Requests
from ckptlib.stores.parts import part_nbytes
from ckptlib.stores.retries import Retries

T = TypeVar("T")

PACK_NBYTES = 50 * 10**9
"""Most bytes of a pack: in parts of 16 MiB, 3,000 of the 10,000 that S3 takes."""

MOST_PARTS = 10_000
"""Most parts that S3 and GCS take of one object. A copy may have packs from another store, which are larger."""

LATE_NBYTES = 28 << 20
"""Most bytes of an object with a late head, which is gathered in memory: obstore sends the first part first."""

DELETES = 16
"""Objects that are deleted at once, if each is a request."""

_SMALL_NBYTES = 1 << 20
"""Objects up to this size are put by a request that may take IDLE_S."""
_READ_NBYTES = 1 << 20


class ObstoreStore(Store):
    """The objects below `url` (s3://, gs://, az://); `options` are those that s3fs, gcsfs and adlfs take.

    What a put sent before it failed is invisible, with one exception: if the answer to a request was lost, nobody knows
    whether the server goes on with it. It may publish the whole object a moment later, never a part of one. Its key is
    random, or its bytes are always the same, so that nothing is harmed; sweeps remove it.

    An upload that ends at its deadline, or with its process, leaves parts behind that are paid for and that obstore
    cannot list: `clean` removes none of them. The bucket needs a lifecycle rule that aborts incomplete uploads.
    """

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self._requests = Requests(url, options)
        self.url = self._requests.url
        self.pack_nbytes, self.late_nbytes = PACK_NBYTES, LATE_NBYTES
        self._listing = Listing(self._requests)
        self._deletes_many = self._requests.is_s3
        self._creates: bool | None = None if self._requests.is_s3 else True
        """Whether the server knows If-None-Match; None until it has answered such a request."""

    @override
    def trust_address(self) -> None:
        self._requests.trust_address()

    # -- put

    @override
    def put(
        self,
        key: str,
        head: Buffer | LateHead,
        pieces: Iterable[Buffer] = (),
        *,
        create: bool = False,
        deadline: float | None = None,
    ) -> None:
        path = self._path(key)
        if isinstance(head, LateHead):
            head, pieces = joined(key, head, pieces), ()
        body = Pieces(head, pieces)
        body.take(io_limits.PART_NBYTES)
        is_one = body.nbytes <= io_limits.PART_NBYTES
        if create and is_one and self._creates is not False:
            self._create(key, path, body, deadline)
            return
        if create and self._size(key, path, deadline) is not None:  # the client cannot publish parts on a condition
            raise taken(f"{self.url}/{key}")
        if not is_one:
            told = as_bytes(head).nbytes + pieces.nbytes if isinstance(pieces, Counted) else body.nbytes
            self._put_parts(key, path, body, deadline, _part_nbytes(told))
        else:
            self._requests.run("put", key, lambda: self._put_whole(path, body), deadline, body.nbytes)

    async def _put_whole(self, path: str, body: Pieces, once: bool = False, **mode: Any) -> None:
        is_small = body.nbytes <= _SMALL_NBYTES
        client = self._requests.quick if is_small else self._requests.uploads
        if once:
            client = self._requests.once(is_small)
        await obstore.put_async(client, path, iter(body.views), use_multipart=False, **mode)

    def _create(self, key: str, path: str, body: Pieces, deadline: float | None) -> None:
        """Puts an object unless there is one. If an answer is lost, the request that is sent again finds the object
        that it wanted to create.

        The client takes 501 for an outage, and sends again for RETRY_S. So the first request of all is sent without the
        client's retries, and repeated here while the answer is 503 or the like, behind which 501 may come.
        """
        tries, retries = 0, Retries(deadline)

        async def create() -> None:
            nonlocal tries
            once = self._creates is None
            while True:
                tries += 1
                try:
                    await self._put_whole(path, body, once, mode="create")
                except BaseError as error:
                    failure = Failure.of(error)
                    if failure.may_refuse_condition:
                        raise _Refused(failure.was_sent_again) from None
                    if isinstance(error, AlreadyExistsError):
                        self._creates = True
                        if not (failure.may_pass or failure.has_no_bucket):
                            raise _Taken(failure.was_sent_again) from None
                    elif once and not failure.is_busy:
                        once = False
                        continue
                    elif once and (wait_s := retries.wait_s()) is not None:
                        await asyncio.sleep(wait_s)
                        continue
                    raise
                self._creates = True
                return

        try:
            self._requests.run("put", key, create, deadline, body.nbytes)
        except _Taken as found:
            if isinstance(found, _Refused) and self._size(key, path, deadline) is None:
                self._requests.run("put", key, lambda: self._put_whole(path, body), deadline, body.nbytes)
                self._creates = False
            elif (tries == 1 and not found.was_sent_again) or self.get(key) != b"".join(body.views):
                raise taken(f"{self.url}/{key}") from None

    def _put_parts(self, key: str, path: str, body: Pieces, deadline: float | None, part: int) -> None:
        """Puts an object in parts."""
        retries = Retries(deadline)
        while True:
            try:
                return self._put_parts_once(path, body, deadline, part)
            except GivenUp:
                raise self._requests.too_late("put", key) from None
            except _Failed as failed:
                error, failure = failed.error, Failure.of(failed.error)
                if failure.has_no_upload and self._size(key, path, deadline) == body.nbytes:
                    return None  # the upload is complete: the answer that said so was lost
                again = failure.was_damaged or (failure.may_pass and not failure.was_sent_again)
                again = again or (failure.refuses_parts and not retries.failures)
                wait_s = retries.wait_s() if again and body.can_repeat else None
                if wait_s is None:
                    raise self._requests.error(error, "put", key, body.nbytes) from None
                time.sleep(wait_s)

    def _put_parts_once(self, path: str, body: Pieces, deadline: float | None, part: int) -> None:
        """Tries to put the parts. Raises _Failed, GivenUp, and what the pieces raise; nothing reads them then."""
        lent = Lent(body.views if body.is_whole else ())
        feed = Feed(lent)
        source = lent if body.is_whole else feed
        client = self._requests.uploads_of(part)

        async def put() -> None:
            try:
                await obstore.put_async(
                    client,
                    path,
                    source,
                    use_multipart=True,
                    chunk_size=part,
                    max_concurrency=io_limits.PARTS_IN_FLIGHT,
                )
            except (BaseError, OSError) as error:
                raise _Failed(error) from None

        running = self._requests.loop.start(put(), deadline)
        feed.watch(running)
        try:
            if not body.is_whole:
                for view in body:
                    if not feed.give(view, deadline):
                        break
                else:
                    feed.give(None, deadline)
            running.result()
        finally:
            running.cancel()
            feed.close()
            lent.release()

    # -- get

    @override
    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        check_range(offset, nbytes)
        path, most = self._path(key), io_limits.RUN_BYTES

        async def get() -> bytes | int:
            """Returns the bytes, or how many they are if that is too many for one request."""
            result = await obstore.get_async(self._requests.quick, path, **_range(offset, nbytes))
            check_answer(result.meta)
            check_plain(f"{self.url}/{key}", result.attributes.get("Content-Encoding"))
            count = range_nbytes(f"{self.url}/{key}", offset, nbytes, result.meta["size"])
            return count if count > most else bytes(await result.bytes_async())

        if nbytes is None or 0 < nbytes <= most:
            data = self._in_range(key, path, offset, nbytes, get, None)
            if isinstance(data, bytes) and len(data) == (len(data) if nbytes is None else nbytes):
                return data
        size = self._known_size(key, path, None)
        into = bytearray(range_nbytes(f"{self.url}/{key}", offset, nbytes, size))
        self.get_into(key, offset, memoryview(into))
        return bytes(into)

    @override
    def get_into(self, key: str, offset: int, buffer: memoryview, *, deadline: float | None = None) -> None:
        check_range(offset, buffer.nbytes)
        path, view = self._path(key), as_bytes(buffer)
        if not view.nbytes:
            range_nbytes(f"{self.url}/{key}", offset, 0, self._known_size(key, path, deadline))
        for start in range(0, view.nbytes, io_limits.RUN_BYTES):
            part = view[start : start + io_limits.RUN_BYTES]
            self._get_part(key, path, offset + start, part, deadline)

    def _get_part(self, key: str, path: str, offset: int, view: memoryview, deadline: float | None) -> None:
        """Gets one range. The client itself goes on at the byte where an answer breaks off."""

        async def get() -> int:
            result = await obstore.get_async(self._requests.quick, path, **_range(offset, view.nbytes))
            check_answer(result.meta)
            check_plain(f"{self.url}/{key}", result.attributes.get("Content-Encoding"))
            range_nbytes(f"{self.url}/{key}", offset, view.nbytes, result.meta["size"])
            done = 0
            async for chunk in result.stream(min_chunk_size=_READ_NBYTES):
                got = memoryview(chunk)
                if done + got.nbytes > view.nbytes:
                    return done + got.nbytes
                view[done : done + got.nbytes] = got
                done += got.nbytes
            return done

        done = self._in_range(key, path, offset, view.nbytes, get, deadline)
        if done != view.nbytes:
            raise StoreError(f"{self.url}/{key}: cannot get: expected {view.nbytes} bytes from {offset}, got {done}")

    def _in_range(
        self,
        key: str,
        path: str,
        offset: int,
        nbytes: int | None,
        get: Callable[[], Coroutine[Any, Any, T]],
        deadline: float | None,
    ) -> T | None:
        """Returns the result of `get`; None if the object ends at `offset`, and `nbytes` is None."""
        try:
            result = self._requests.run("get", key, get, deadline)
            self._listing.known = path
            return result
        except Beyond:
            size = self._known_size(key, path, deadline)
            range_nbytes(f"{self.url}/{key}", offset, nbytes, size)
            if nbytes is None and offset == size:
                return None
            raise StoreError(f"{self.url}/{key}: cannot get bytes from {offset}: not in the object's {size}") from None

    def _known_size(self, key: str, path: str, deadline: float | None) -> int:
        size = self._size(key, path, deadline)
        if size is None:
            raise ObjectNotFound(f"{self.url}/{key}: no such object")
        return size

    def _size(self, key: str, path: str, deadline: float | None) -> int | None:
        """Returns the size of an object; None if there is no such object."""

        async def head() -> int:
            meta = await obstore.head_async(self._requests.quick, path)
            check_answer(meta)
            return int(meta["size"])

        with suppress(ObjectNotFound):
            return self._requests.run("get", key, head, deadline)
        return None

    # -- scan and delete

    @override
    def scan(self, prefix: str, after: str = "") -> list[Entry]:
        check_prefix(prefix)
        return self._requests.run("list", prefix, lambda: self._listing.scan(prefix, after), None)

    @override
    def peek(self, most: int) -> list[str]:
        return self._requests.run("list", "", self._listing.peek, None)[:most]

    @override
    def delete(self, *keys: str) -> None:
        paths = {self._path(key): key for key in keys}
        if len(paths) > 1 and self._deletes_many:
            most = min(len(paths), io_limits.PAGE_KEYS)  # in one request
            client, more_s = self._requests.deletes(most), io_limits.DELETE_S * most
            try:
                return self._requests.run(
                    "delete", min(keys), lambda: _delete_many(client, [*paths]), None, more_s=more_s
                )
            except StoreError as error:
                if type(error) is not StoreError:
                    raise
                self._deletes_many = False  # a server that does not know how, or wants Content-MD5

        async def delete() -> None:
            left = [*paths]
            while left:
                some, left = left[:DELETES], left[DELETES:]
                await asyncio.gather(*(_delete(self._requests.quick, path) for path in some))

        if paths:
            self._requests.run("delete", min(keys), delete, None)
        return None

    @override
    def close(self) -> None:
        self._requests.close()

    def _path(self, key: str) -> str:
        return self._requests.below(check_key(key))


class _Taken(Exception):
    """The key has an object."""

    def __init__(self, was_sent_again: bool) -> None:
        self.was_sent_again = was_sent_again


class _Refused(_Taken):
    """The server may not know how to put an object only where there is none; the key may have one."""


class _Failed(Exception):
    """The client failed, and not the pieces that it was given."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _part_nbytes(nbytes: int) -> int:
    """Returns the size of the parts of an object of `nbytes` bytes: no larger than it must be, since the client holds
    parts in memory."""
    least = io_limits.PART_NBYTES
    return part_nbytes(nbytes, least, least, io_limits.EVEN_PARTS, MOST_PARTS)


def _range(offset: int, nbytes: int | None) -> dict[str, Any]:
    if nbytes is not None:
        return {"options": {"range": (offset, offset + nbytes)}}
    return {"options": {"range": {"offset": offset}}} if offset else {}


async def _delete_many(client: Any, paths: list[str]) -> None:
    await obstore.delete_async(client, paths)


async def _delete(client: Any, path: str) -> None:
    try:
        await obstore.delete_async(client, path)
    except FileNotFoundError as error:
        failure = Failure.of(error)
        if failure.has_no_bucket or failure.is_page:
            raise
