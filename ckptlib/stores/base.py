"""The contract of a store: a flat space of immutable objects under one prefix.

A store knows keys and bytes; it does not know what they mean. Every implementation inherits the conformance tests in
`tests/store_conformance.py`. No torch.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import TracebackType

from typing_extensions import Buffer, Self

from ckptlib.errors import FormatError

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
MAX_KEY_LENGTH = 512


def check_key(key: str) -> str:
    """Returns `key` when it is one: relative, plain ASCII segments, none of which starts with a dot.

    Raises ValueError otherwise, so that a name read from a document can never climb out of the store.
    """
    if not is_key(key):
        raise ValueError(f"invalid object key {key[:80]!r}; expected segments of [A-Za-z0-9._-] joined by '/'")
    return key


def is_key(key: str) -> bool:
    """Whether `key` can name an object; foreign files and temporary ones, whose names begin with a dot, cannot."""
    return len(key) <= MAX_KEY_LENGTH and _KEY.fullmatch(key) is not None


def check_prefix(prefix: str) -> str:
    """Returns `prefix` when it is '', a key, or a key and '/'. Raises ValueError otherwise."""
    if prefix:
        check_key(prefix.removesuffix("/"))
    return prefix


def check_range(offset: int, nbytes: int | None) -> None:
    """Raises ValueError for a range that starts or ends before the object does."""
    if offset < 0 or (nbytes is not None and nbytes < 0):
        raise ValueError(f"invalid range of an object: offset {offset}, {nbytes} bytes; expected numbers >= 0")


def as_bytes(data: Buffer) -> memoryview:
    """The memory of `data` as a flat view of bytes; nothing is copied."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(bytearray())  # cast refuses a zero in the shape


def ends_early(where: str, offset: int, nbytes: int | None, nbytes_found: int) -> FormatError:
    """The error for an object of `nbytes_found` bytes in which the range does not lie."""
    wanted = "to its end" if nbytes is None else f"to {offset + nbytes}"
    return FormatError(
        f"{where}: the object has {nbytes_found} bytes, expected bytes {offset} {wanted}; "
        "it is truncated, or the document that names it is wrong"
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """One object in a listing."""

    key: str
    nbytes: int
    """Size in bytes."""
    modified: float
    """When it was put, in seconds since the epoch, by the store's own clock."""


class Upload(ABC):
    """One object under way: a head of a size fixed beforehand, and a body in order.

    Nothing is visible under the key until `commit` returns; then the whole object is there, and durable. Leaving the
    context without a commit, by exception or not, leaves no object behind. Used by one thread.
    """

    @abstractmethod
    def write(self, data: Buffer) -> None:
        """Appends to the body. The caller may reuse `data` when this returns.

        Buffers that are page-aligned and hold whole pages take the fast way.
        """

    @abstractmethod
    def commit(self, head: Buffer) -> None:
        """Puts `head`, of exactly the size announced, before the body, and publishes the object.

        Raises ObjectExists where the store can tell without another request; FormatError where what is there is no
        object; StoreFull; StoreError.
        """

    @abstractmethod
    def abort(self) -> None:
        """Drops what was written. Does nothing after a commit."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class Store(ABC):
    """A directory or a bucket prefix. Every method may be called from several threads at once.

    Required of what lies below: atomic whole-object put, ranged get, fresh listing by prefix, delete. Never required:
    rename, append, locks, conditional put.

    Raises, from every method: ValueError for what is not a key, ObjectNotFound, StoreFull, StoreError for the rest.
    An outage is never an empty listing. What may be the matter with one object alone makes `get` and `get_into` raise
    ObjectUnreadable; what can only be the whole store's, such as a time-out, does not.
    """

    url: str
    """Where it is, without credentials; for messages."""

    pack_nbytes: int
    """The size in bytes above which a pack is better cut into several objects."""

    is_local: bool = False
    """Whether it is a file system: encoding takes longer there than writing what it would save."""

    @abstractmethod
    def put(self, key: str, data: Buffer) -> None:
        """Puts a small object, whole or not at all; it is durable on return. Same errors as `Upload.commit`."""

    @abstractmethod
    def upload(self, key: str, head_nbytes: int) -> Upload:
        """Begins a large object whose first `head_nbytes` bytes are known last."""

    @abstractmethod
    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Exactly `nbytes` bytes from `offset`, or all up to the end when None.

        Raises FormatError when the object ends earlier.
        """

    @abstractmethod
    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` (writable bytes, contiguous) from `offset`.

        Raises FormatError when the object ends earlier.
        """

    @abstractmethod
    def scan(self, prefix: str) -> list[Entry]:
        """Every object whose key starts with `prefix` (a key, or a key and '/'; '' for all), sorted by key.

        The listing is fresh: it holds every object whose put returned before the call.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Removes the object; an absent one is no error."""

    def clean(self, before: float) -> None:  # noqa: B027  (most stores leave nothing behind)
        """Removes what crashed uploads left that were last written to before `before`, by the store's own clock.

        None of it was ever an object. Only retention calls this.
        """

    def close(self) -> None:  # noqa: B027  (most stores hold nothing)
        """Releases connections and threads. The store must not be used afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
