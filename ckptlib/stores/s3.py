"""Objects of a bucket of S3, or of a server that speaks like it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from botocore.exceptions import ClientError
from typing_extensions import Buffer, override

from ckptlib.errors import StoreDenied, StoreError
from ckptlib.stores import io_limits
from ckptlib.stores.base import (
    Entry,
    LateHead,
    Store,
    as_bytes,
    check_key,
    check_prefix,
    check_range,
    is_key,
    never_ends,
)
from ckptlib.stores.s3_client import Call, S3Client
from ckptlib.stores.s3_errors import code_of, meaning_of, status_of
from ckptlib.stores.s3_read import Reading
from ckptlib.stores.s3_upload import put

PACK_NBYTES = 50 * 10**9
"""Most bytes of a pack: one object per rank and save, so that no step needs as many listings as it has gigabytes.
10,000 parts of 16 MiB are more."""

DIRECTORY_BUCKET = "--x-s3"
"""How the name of a directory bucket ends. A listing there is of whole directories, in any order and from the start; so
Amazon's documents have it, and no test has asked Amazon."""

_BEFORE_SLASH = re.compile(r"[-.]")


def start_after(prefix: str, after: str) -> str:
    """Returns a key at or before `after` from which every server may begin a listing of `prefix`; '' for none.

    S3 sorts by bytes, so that `a-1` comes before `a/1`. SeaweedFS sorts by directories: after `a-1` it leaves out all
    of `a/`, and after `a` as well. After this key, nothing that is wanted is left out. JuiceFS refuses one that does
    not have the prefix.
    """
    if not after.startswith(prefix):
        return ""
    cut = _BEFORE_SLASH.search(after, len(prefix))
    start = after[: cut.start() if cut else len(after)].rstrip("/")[:-1]
    return start if len(start) > len(prefix) else ""


class S3Store(Store):
    """The objects below `url`, `s3://bucket/prefix`; `options` are those of s3fs.

    A key that is put twice is overwritten, unless `create` is true and the server knows If-None-Match.
    """

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self._client = S3Client(url, options)
        self.url = self._client.url
        self.pack_nbytes = self.late_nbytes = PACK_NBYTES
        self._deletes_many = True
        self._lists_directories = self._client.bucket.endswith(DIRECTORY_BUCKET)

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
        put(self._client, Call("put", check_key(key), deadline=deadline), LateHead.of(head), pieces, create)

    @override
    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        check_range(offset, nbytes)
        chunks: list[bytes] = []
        self._read(Call("get", check_key(key), nbytes), offset, nbytes, lambda at, chunk: chunks.append(chunk))
        return b"".join(chunks)

    @override
    def get_into(self, key: str, offset: int, buffer: memoryview, *, deadline: float | None = None) -> None:
        check_range(offset, buffer.nbytes)
        call = Call("get", check_key(key), buffer.nbytes, deadline)
        with as_bytes(buffer) as view:  # released at the end, so that nothing is written to it after an error

            def place(at: int, chunk: bytes) -> None:
                view[at : at + len(chunk)] = chunk

            self._read(call, offset, view.nbytes, place)

    def _read(self, call: Call, offset: int, nbytes: int | None, place: Callable[[int, bytes], None]) -> None:
        self._client.run(call, Reading(self._client, call, offset, nbytes, place).run())

    @override
    def scan(self, prefix: str, after: str = "") -> list[Entry]:
        call = Call("list", check_prefix(prefix))
        found = self._client.run(call, self._list(call, after))
        wanted = (e for e in found if is_key(e.key) and e.key.startswith(prefix) and e.key > after)
        return sorted(wanted, key=lambda entry: entry.key)

    @override
    def peek(self, most: int) -> list[str]:
        call = Call("list", "")
        return [entry.key for entry in self._client.run(call, self._list(call, "", whole=False))[:most]]

    async def _list(self, call: Call, after: str, whole: bool = True) -> list[Entry]:
        """Lists objects; others of the same directory may be among them. `whole`: if False, only the first page."""
        root, prefix, start = self._client.prefix, call.key, start_after(call.key, after)
        if self._lists_directories:
            prefix, start = prefix[: prefix.rfind("/") + 1], ""
        where: dict[str, object] = {"Prefix": root + prefix, "MaxKeys": io_limits.PAGE_KEYS}
        if start:
            where["StartAfter"] = root + start
        entries: list[Entry] = []
        firsts: set[str] = set()
        while True:
            page = await self._client.ask(call, "list_objects_v2", where)
            contents = page.get("Contents", ())
            for found in contents:
                entries.append(Entry(found["Key"][len(root) :], int(found["Size"]), found["LastModified"].timestamp()))
            if not (whole and page.get("IsTruncated")):
                return entries
            token = page.get("NextContinuationToken")
            seen = {found["Key"] for found in contents[:1]}
            if not token or token == where.get("ContinuationToken") or seen & firsts:
                raise never_ends(f"{self.url}/{call.key}", call.doing)
            firsts |= seen
            where["ContinuationToken"] = token

    @override
    def delete(self, *keys: str) -> None:
        for key in keys:
            check_key(key)
        for start in range(0, len(keys), io_limits.PAGE_KEYS):
            some = keys[start : start + io_limits.PAGE_KEYS]
            call = Call("delete", some[0] if len(some) == 1 else f"{some[0]} ... {some[-1]}")
            self._client.run(call, self._delete(call, some))

    async def _delete(self, call: Call, keys: Sequence[str]) -> None:
        left = keys
        if self._deletes_many and len(keys) > 1:
            left = await self._delete_many(call, keys)
        for start in range(0, len(left), io_limits.DOCUMENT_THREADS):
            await asyncio.gather(*map(self._delete_one, left[start : start + io_limits.DOCUMENT_THREADS]))

    async def _delete_many(self, call: Call, keys: Sequence[str]) -> list[str]:
        """Deletes by one request. Returns those that are left to be deleted one by one, which tells what is the matter
        with each."""
        wanted = {"Objects": [{"Key": self._client.prefix + key} for key in keys], "Quiet": True}
        more_s = io_limits.DELETE_S * len(keys)
        try:
            answer = await self._client.ask(call, "delete_objects", {"Delete": wanted}, more_s=more_s)
        except ClientError as error:
            if meaning_of(error).kind is not StoreError:
                raise
            self._deletes_many = False  # a server that does not know how
            return list(keys)
        return [error["Key"][len(self._client.prefix) :] for error in answer.get("Errors", ())]

    async def _delete_one(self, key: str) -> None:
        call = Call("delete", key)
        try:
            await self._client.ask(call, "delete_object", {"Key": self._client.prefix + key})
        except ClientError as error:
            if status_of(error) != 404 or meaning_of(error).kind is StoreDenied:
                raise self._client.failure(call, error) from None

    @override
    def clean(self, before: float, is_ours: Callable[[str], bool]) -> None:
        call = Call("list uploads", "")
        self._client.run(call, self._clean(call, before, is_ours))

    async def _clean(self, call: Call, before: float, is_ours: Callable[[str], bool]) -> None:
        where: dict[str, object] = {"Prefix": self._client.prefix}
        while True:
            page = await self._client.ask(call, "list_multipart_uploads", where)
            for upload in page.get("Uploads", ()):
                key = upload["Key"][len(self._client.prefix) :]
                if is_ours(key) and upload["Initiated"].timestamp() < before:
                    await self._abort(upload["Key"], upload["UploadId"])
            if not page.get("IsTruncated"):
                return
            names = ("KeyMarker", "UploadIdMarker")  # a directory bucket tells only the first
            marks = {name: page[f"Next{name}"] for name in names if page.get(f"Next{name}")}
            if "KeyMarker" not in marks or marks.items() <= where.items():
                raise never_ends(f"{self.url}/{call.key}", call.doing)
            where |= marks

    async def _abort(self, key: str, upload: str) -> None:
        try:
            await self._client.ask(Call("abort", key), "abort_multipart_upload", {"Key": key, "UploadId": upload})
        except ClientError as error:
            if code_of(error) != "NoSuchUpload":
                raise

    @override
    def trust_address(self) -> None:
        self._client.was_there = True

    @override
    def close(self) -> None:
        self._client.close()
