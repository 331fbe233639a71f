"""Puts an object into a bucket: by one request, or in parts that appear together."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from types import TracebackType
from typing import Any

from botocore.exceptions import ClientError
from typing_extensions import Self

from ckptlib.errors import StoreError
from ckptlib.stores import io_limits
from ckptlib.stores.base import Counted, InPlace, LateHead, taken
from ckptlib.stores.parts import cut, num_head_parts, part_nbytes
from ckptlib.stores.retries import Retries
from ckptlib.stores.s3_body import Body
from ckptlib.stores.s3_client import Call, S3Client, ended
from ckptlib.stores.s3_errors import code_of, status_of
from ckptlib.stores.s3_read import Reading
from ckptlib.stores.s3_sums import fits

MOST_PARTS = 10_000
_CREATE: dict[str, object] = {"IfNoneMatch": "*"}
"""Condition that nothing has the key; left out for a server that refuses it."""

_MD5 = re.compile(r'"?[0-9a-f]{32}"?')

_ABORT_S = 5.0
"""How long the end of a failed upload may take; `clean` removes what stays."""


def put(client: S3Client, call: Call, head: LateHead, pieces: Iterable[Any], create: bool) -> None:
    """Puts the object whole. Parts with bytes of the head, and with them some of the body, are kept back to the end."""
    size = _part_nbytes(head, pieces)
    num_head = num_head_parts(head.nbytes, size)
    parts = cut(pieces, num_head * size - head.nbytes, size)
    with_head, further = next(parts, []), next(parts, None)
    if further is None and num_head == 1:
        data = Body([head.made(call.key), *with_head])
        call = replace(call, nbytes=data.nbytes)
        client.run(call, _put_whole(client, call, data, client.sums.of(data), _CREATE if create else {}))
        return
    with Upload(client, call, create) as upload:
        for number, views in enumerate(chain([further] if further else [], parts), num_head + 1):
            upload.send(number, Body(views))
        for number, views in enumerate(cut([head.made(call.key), *with_head], size, size), 1):
            upload.send(number, Body(views))
        upload.complete()


def _part_nbytes(head: LateHead, pieces: Iterable[Any]) -> int:
    """Returns the size of the parts. They are held in memory while under way, so they are as small as may be, unless
    the pieces lie in memory anyway."""
    if not isinstance(pieces, Counted):
        return io_limits.PART_NBYTES
    nbytes, least = head.nbytes + pieces.nbytes, io_limits.PART_NBYTES
    most = io_limits.LARGE_PART_NBYTES if isinstance(pieces, InPlace) else least
    return part_nbytes(nbytes, least, most, io_limits.EVEN_PARTS, MOST_PARTS - 1)


def _may_refuse_it(error: ClientError) -> bool:
    """Whether it may be the condition that the server refuses: it does not know it, or says nothing of why."""
    return status_of(error) in (405, 501) or code_of(error) in ("400", "InvalidArgument", "InvalidRequest")


def _is_there(error: ClientError) -> bool:
    return status_of(error) == 412 or code_of(error) == "PreconditionFailed"


async def _put_whole(
    client: S3Client, call: Call, data: Body, sums: dict[str, str], condition: dict[str, object]
) -> None:
    retries = Retries(call.deadline)
    try:
        await client.give(call, "put_object", {"Key": client.prefix + call.key, **condition}, data, sums, retries)
    except ClientError as error:
        if not (condition and (_is_there(error) or _may_refuse_it(error))):
            raise
        if not _is_there(error) and await _found(client, call) is None:
            await _put_whole(client, call, data, client.sums.of(data), {})
        elif not (retries.failures and await _holds(client, call, data)):
            raise taken(f"{client.url}/{call.key}") from None


async def _found(client: S3Client, call: Call) -> dict[str, Any] | None:
    """Returns what the server tells of the object; None if there is none."""
    try:
        return await client.ask(call, "head_object", {"Key": client.prefix + call.key})
    except ClientError as error:
        if status_of(error) == 404:
            return None
        raise


async def _holds(client: S3Client, call: Call, data: Body) -> bool:
    """Whether the object is what we put: then the answer to an earlier try was lost, and this one found its object."""
    chunks: list[bytes] = []
    await Reading(client, replace(call, doing="get"), 0, None, lambda at, chunk: chunks.append(chunk)).run()
    return b"".join(chunks) == b"".join(data.views)


class Upload:
    """Sends parts of an object that nobody sees before `complete`; leaving the context by an error drops them.

    Used by one thread, which waits while `io_limits.PARTS_IN_FLIGHT` parts are under way.
    """

    def __init__(self, client: S3Client, call: Call, create: bool) -> None:
        self._client, self._call, self._create = client, call, create
        self._key = client.prefix + call.key
        self._futures: set[concurrent.futures.Future[None]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        """Tasks of the loop's thread."""
        self._sent: dict[int, tuple[int, dict[str, str]]] = {}
        """Bytes of each part, and their sums."""
        self._parts: dict[int, dict[str, object]] = {}
        self._nbytes = 0

    def __enter__(self) -> Self:
        self._upload = self._client.run(self._call, self._begin())
        return self

    async def _begin(self) -> dict[str, object]:
        while True:
            sums = self._client.sums.of_upload
            try:
                answer = await self._client.ask(self._call, "create_multipart_upload", {"Key": self._key, **sums})
            except ClientError as error:
                if not self._client.sums.refused(sums, error):
                    raise
            else:
                return {"Key": self._key, "UploadId": answer["UploadId"]}

    def send(self, number: int, data: Body) -> None:
        """Begins to send a part; its memory must stay as it is."""
        if number > MOST_PARTS:
            raise StoreError(
                f"{self._client.url}/{self._call.key}: cannot put {self._nbytes} bytes and more in {MOST_PARTS} parts, "
                "the most that S3 takes of one object"
            )
        self._wait(io_limits.PARTS_IN_FLIGHT - 1)
        self._nbytes += data.nbytes
        with self._client.failures(self._call):
            sums = self._client.sums.of(data)
            self._sent[number] = data.nbytes, sums
            self._futures.add(self._client.start(self._send(number, data, sums)))

    def _wait(self, num_left: int) -> None:
        """Waits until at most `num_left` parts are in flight. Raises the error of any."""
        while len(self._futures) > num_left:
            self._client.wait(self._call, self._futures)
            done = {future for future in self._futures if future.done()}
            self._futures -= done
            for future in done:
                with self._client.failures(self._call):
                    future.result()

    async def _send(self, number: int, data: Body, sums: dict[str, str]) -> None:
        call = replace(self._call, doing=f"put part {number}", nbytes=data.nbytes)
        request = {"PartNumber": number, **self._upload}
        with self._noted():
            answer = await self._client.give(call, "upload_part", request, data, sums, Retries(call.deadline))
        crc32 = {"ChecksumCRC32": answer["ChecksumCRC32"]} if "ChecksumCRC32" in answer else {}
        self._parts[number] = {"PartNumber": number, "ETag": answer["ETag"], **crc32}

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """Notes the task that runs it, so that `_drop` can end it."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    def complete(self) -> None:
        """Makes an object of the parts."""
        self._wait(0)
        self._client.run(self._call, self._complete(_CREATE if self._create else {}))

    async def _complete(self, condition: dict[str, object]) -> None:
        parts = [self._parts[number] for number in sorted(self._parts)]
        call = replace(self._call, nbytes=self._nbytes)
        retries = Retries(call.deadline)
        request = {"MultipartUpload": {"Parts": parts}, **self._upload, **condition}
        with self._noted():
            try:
                await self._ask_to_complete(call, request, retries)
            except ClientError as error:
                # The answer to an earlier try may have been lost: then the object is there, and the upload is not.
                exists, refused = condition and _is_there(error), condition and _may_refuse_it(error)
                if refused:
                    exists = await _found(self._client, self._call) is not None
                gone = code_of(error) == "NoSuchUpload"
                if (exists or gone) and retries.failures and await self._is_whole(parts):
                    return
                if exists:
                    raise taken(f"{self._client.url}/{self._call.key}") from None
                if not refused:
                    raise
                await self._complete({})

    async def _ask_to_complete(self, call: Call, request: dict[str, object], retries: Retries) -> None:
        """Asks for the object of the parts, until it is there.

        A list of parts that was altered on its way, if no checksum protects it, is refused by 400 or 404: so it is sent
        once more. So it is after 200 and no result, as of a proxy, or cut off, which comes before the parts are joined.
        """
        while True:
            try:
                answer = await self._client.ask(call, "complete_multipart_upload", request, retries=retries)
            except ClientError as error:
                if retries.failures or status_of(error) not in (400, 404):
                    raise
                retries.failures += 1
                continue
            if "ETag" in answer or await self._is_there():
                return
            wait_s = retries.wait_s()
            if wait_s is None:
                raise StoreError(
                    f"{self._client.url}/{call.key}: cannot {call.doing}: the server ended the upload by 200 without a "
                    f"result, and there is no object of {self._nbytes} bytes; try again; is there a proxy in the way?"
                )
            await asyncio.sleep(wait_s)

    async def _is_there(self) -> bool:
        """Whether the key has an object of as many bytes as were sent."""
        found = await _found(self._client, self._call)
        return found is not None and found["ContentLength"] == self._nbytes

    async def _is_whole(self, parts: list[dict[str, object]]) -> bool:
        """Whether the object is made of these parts. If its ETag does not tell, as that of rclone, it is read."""
        found = await _found(self._client, self._call)
        if found is None or found["ContentLength"] != self._nbytes:
            return False
        return found["ETag"].strip('"') == _etag(parts) or await self._holds_what_was_sent()

    async def _holds_what_was_sent(self) -> bool:
        """Reads one part at a time; returns whether each has the sums that it was sent with."""
        call, at = replace(self._call, doing="get"), 0
        for _, (nbytes, sums) in sorted(self._sent.items()):
            part = bytearray(nbytes)

            def place(start: int, chunk: bytes, part: bytearray = part) -> None:
                part[start : start + len(chunk)] = chunk

            await Reading(self._client, call, at, nbytes, place).run()
            if not fits(sums, Body([memoryview(part)])):
                return False
            at += nbytes
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            return
        call = Call("abort", self._call.key, deadline=time.monotonic() + _ABORT_S)
        with contextlib.suppress(StoreError):
            self._client.run(call, self._drop(call))

    async def _drop(self, call: Call) -> None:
        await ended(list(self._tasks))
        await self._client.ask(call, "abort_multipart_upload", self._upload)


def _etag(parts: list[dict[str, object]]) -> str | None:
    """Returns the ETag that S3 gives an object of these parts; None if their ETags are no MD5."""
    if not all(_MD5.fullmatch(str(part["ETag"])) for part in parts):
        return None
    md5s = b"".join(bytes.fromhex(str(part["ETag"]).strip('"')) for part in parts)
    return f"{hashlib.md5(md5s, usedforsecurity=False).hexdigest()}-{len(parts)}"
