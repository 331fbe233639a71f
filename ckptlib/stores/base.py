"""The contract of a store: a flat space of immutable objects under one prefix.

A store knows keys and bytes; it does not know what they mean. Every implementation inherits the conformance tests in
`tests/store_conformance.py`. No torch.
"""

from __future__ import annotations

import io
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from typing_extensions import Buffer, Self

from ckptlib.errors import FormatError, ObjectExists, StoreError

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
MAX_KEY_LENGTH = 512

_COMPRESSED = ("gzip", "x-gzip", "deflate", "compress", "br", "zstd")
"""HTTP's encodings that compress. Some servers report aws-chunked for plain bytes."""

MAX_WHOLE_NBYTES = 2**30
"""Most bytes of an object that is read to its end: only documents are, and no document is larger."""


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
    """Returns the memory of `data` as a flat view of bytes; nothing is copied."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(bytearray())  # cast refuses a zero in the shape


def ends_early(where: str, offset: int, nbytes: int | None, nbytes_found: int) -> FormatError:
    """Returns the error for an object of `nbytes_found` bytes in which the range does not lie."""
    wanted = "to its end" if nbytes is None else f"to {offset + nbytes}"
    return FormatError(
        f"{where}: the object has {nbytes_found} bytes, expected bytes {offset} {wanted}; "
        "it is truncated, or the document that names it is wrong"
    )


def taken(where: str) -> ObjectExists:
    """Returns the error for a key that has an object."""
    return ObjectExists(f"{where}: exists already, and objects are never overwritten; put it under another key")


def check_plain(where: str, encoding: str | None) -> None:
    """Raises StoreError for an object in another encoding than it was put in, as from a proxy that compresses: the
    store is well, and what came would be taken for damage."""
    several = (encoding or "").lower().split(",")
    if any(one.strip() in _COMPRESSED for one in several):
        raise StoreError(
            f"{where}: cannot get: it came in the encoding {encoding}, in which it was not put; a proxy in the way "
            "compresses it: tell it not to, or reach the server past it"
        )


def never_ends(where: str, doing: str) -> StoreError:
    """Returns the error for a server whose pages do not lead on: it would be asked for the same ones for ever."""
    return StoreError(
        f"{where}: cannot {doing}: the server says that there is more, but not where, or gives a page again; it, or a "
        "proxy in front of it, does not page listings as S3 does: update it, or reach the server past the proxy"
    )


def range_nbytes(where: str, offset: int, nbytes: int | None, size: int) -> int:
    """Returns the length of a range of an object of `size` bytes, before memory is taken for it.

    Ranges come from documents, and sizes of objects may be anything. Raises FormatError.
    """
    if offset + (nbytes or 0) > size:
        raise ends_early(where, offset, nbytes, size)
    if nbytes is None and size - offset > MAX_WHOLE_NBYTES:
        raise FormatError(
            f"{where}: the object has {size:,} bytes, expected a document, of at most {MAX_WHOLE_NBYTES:,}; it was not "
            "written by ckptlib, or altered since"
        )
    return size - offset if nbytes is None else nbytes


@dataclass(frozen=True, slots=True)
class Entry:
    """One object in a listing."""

    key: str
    nbytes: int
    """Size in bytes."""
    modified: float
    """When it was put, in seconds since the epoch, by the store's own clock."""


@dataclass(frozen=True, slots=True)
class LateHead:
    """The first bytes of an object, which are known only when all the rest is."""

    nbytes: int
    """How many bytes; fixed beforehand."""
    make: Callable[[], Buffer]
    """Returns the bytes. Called once, when every piece was taken."""

    @classmethod
    def of(cls, head: Buffer | LateHead) -> LateHead:
        """Returns `head` as a late one, even if it is known already."""
        return head if isinstance(head, LateHead) else cls(as_bytes(head).nbytes, lambda: head)

    def made(self, key: str) -> memoryview:
        """Returns the bytes. Raises ValueError if they are not of the size announced."""
        view = as_bytes(self.make())
        if view.nbytes != self.nbytes:
            raise ValueError(f"{key}: expected a head of {self.nbytes} bytes, got {view.nbytes}")
        return view


@dataclass(frozen=True, slots=True)
class Counted:
    """Pieces of known total size, though they may be made as they are needed."""

    nbytes: int
    """Bytes of all pieces."""
    pieces: Iterable[Buffer]

    def __iter__(self) -> Iterator[Buffer]:
        return iter(self.pieces)


class InPlace(Counted):
    """Pieces that are views of memory which is there anyway, such as a slot: many may be under way at once."""

    __slots__ = ()


def joined(key: str, head: Buffer | LateHead, pieces: Iterable[Buffer]) -> bytes:
    """Returns a whole object, once in memory: for stores that put nothing else."""
    late, data = LateHead.of(head), io.BytesIO()
    data.seek(late.nbytes)
    for piece in pieces:
        data.write(as_bytes(piece))
    data.seek(0)
    data.write(late.made(key))
    return data.getvalue()  # its own bytes: BytesIO copies them only if it is written to again


class Store(ABC):
    """A directory or a bucket prefix. Every method may be called from several threads at once.

    Required of what lies below: atomic whole-object put, ranged get, fresh listing by prefix, delete. Never required:
    rename, append, locks, conditional put.

    Every method raises ValueError for what is not a key, ObjectNotFound, StoreFull, StoreDenied, StoreTimeout, and
    StoreError for the rest. An outage is never an empty listing. `get` and `get_into` raise ObjectUnreadable for a
    fault that may concern one object alone, and not for one that can only be the whole store's, such as a time-out.

    No call waits for ever: a request that makes no progress for `io_limits.IDLE_S` seconds is given up and sent again,
    a few times; so is one that met a fault which may pass. `deadline`, if a method takes one, is a time by the
    monotonic clock; nothing of the call goes on after it.
    """

    url: str
    """The place, without credentials; for messages."""

    pack_nbytes: int
    """The size in bytes above which a pack is better cut into several objects."""

    late_nbytes: int
    """The same for an object with a late head: some stores hold such an object in memory until they put it."""

    is_local: bool = False
    """Whether it is a file system: encoding takes longer there than writing what it would save."""

    reads_once: bool = False
    """Set by a reader that reads much of it, and only once: a local disk then leaves the page cache to others."""

    @abstractmethod
    def put(
        self,
        key: str,
        head: Buffer | LateHead,
        pieces: Iterable[Buffer] = (),
        *,
        create: bool = False,
        deadline: float | None = None,
    ) -> None:
        """Puts an object, `head` and then `pieces`: whole or not at all, and durable on return.

        The pieces are read in place, from any thread: their memory must stay as it is until the call returns. Pieces of
        an iterator are taken as they are needed, those of InPlace far ahead. Pieces that are page-aligned and hold
        whole pages take the fast way. An error that the iterator raises is raised on, and nothing is published.

        Raises ObjectExists if the key is taken and the store tells; some stores tell only when asked to, by `create`.
        Raises FormatError if what is there is no object. After any other error the object may be there.
        """

    @abstractmethod
    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Returns exactly `nbytes` bytes from `offset`, or all up to the end if None. The latter is for documents: more
        than MAX_WHOLE_NBYTES are refused, if the size is known before the bytes come.

        Raises FormatError when the object ends earlier.
        """

    @abstractmethod
    def get_into(self, key: str, offset: int, buffer: memoryview, *, deadline: float | None = None) -> None:
        """Fills `buffer` (writable bytes, contiguous) from `offset`.

        Raises FormatError when the object ends earlier.
        """

    @abstractmethod
    def scan(self, prefix: str, after: str = "") -> list[Entry]:
        """Returns every object whose key starts with `prefix` (a key, or a key and '/'; '' for all), sorted by key.

        Returns only keys after `after`, in the order of ASCII; if possible, the store is not asked for the others. The
        listing is fresh: it holds every object whose put returned before the call.
        """

    def entry(self, key: str) -> Entry | None:
        """Returns the object that has this key, readable or not, as a listing tells it; None if there is none."""
        return next((entry for entry in self.scan(key) if entry.key == key), None)

    def peek(self, most: int) -> list[str]:
        """Returns at most `most` names of what lies here, foreign ones among them. Raises as `scan` does.

        For a look at a place that may hold anything. A store that lists by pages is asked for one; of a directory, what
        lies deeper is left out.
        """
        return [entry.key for entry in self.scan("")][:most]

    def flush(self, prefix: str) -> None:  # noqa: B027  (most stores list nothing that is not durable)
        """Makes durable what lies directly in `prefix`, '' or a key and '/': a listing may have an object whose put has
        not returned yet, or never did. Raises StoreError."""

    @abstractmethod
    def delete(self, *keys: str) -> None:
        """Removes objects, in any order; an absent one is no error. After an error some may be gone, others not."""

    def free_nbytes(self) -> int | None:
        """Returns how many bytes more it takes, if it can tell: a file system can, but it knows of no quota."""
        return None

    def clean(  # noqa: B027  (most stores leave nothing behind)
        self, before: float, is_ours: Callable[[str], bool]
    ) -> None:
        """Removes what crashed uploads left that were last written to before `before`, by the store's own clock.

        None of it was ever an object. If it tells what key it was for, it is removed only if `is_ours` says so: others
        may upload below the same prefix. Only retention calls this.
        """

    def trust_address(self) -> None:  # noqa: B027  (most stores cannot have a wrong one)
        """Notes that somebody has just reached it: if nobody listens there, it is away, and not somewhere else."""

    def close(self) -> None:  # noqa: B027  (most stores hold nothing)
        """Releases connections and threads. The store must not be used afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
