"""Stores: where checkpoints live. `open_store(url)` picks the implementation by the URL's scheme."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ckptlib.stores.base import Counted, Entry, InPlace, LateHead, Store, check_key
from ckptlib.stores.secrets import without_userinfo

__all__ = [
    "Counted",
    "Entry",
    "InPlace",
    "LateHead",
    "Store",
    "absolute",
    "check_key",
    "is_url",
    "open_store",
    "url_text",
]

_LOCAL = ("file", "local")
"""Schemes of local paths. fsspec knows both, too; its own filesystem flushes nothing and puts nothing whole."""

_THIS_HOST = ("localhost", "127.0.0.1")
"""Hosts that some programs write into the URL of a local path."""

_S3 = ("s3", "s3a")
_BUCKETS = (*_S3, "gs", "gcs", "az", "abfs", "abfss")
_CLIENTS = ("s3fs", "obstore", "fsspec")

_LOST_SLASH = re.compile(rf"([A-Z][A-Z0-9+.-]+(?=:/)|{'|'.join(_BUCKETS)}):/?(?!/)", re.IGNORECASE)
"""Matches the beginning of a URL that went through pathlib, or of a bucket's without any slash; a drive of Windows has
one letter."""

_VERSION = re.compile(r"\?versionid=.*", re.IGNORECASE | re.DOTALL)
"""Matches what s3fs and adlfs take for the version of one object, and leave out of its name."""

_CACHES = ("filecache", "simplecache", "blockcache", "cached")
"""fsspec's schemes of caches in front of another filesystem, which an option names."""


def url_text(url: str | Path) -> str:
    """Returns the URL as text. Raises TypeError for what names no place, such as the None of a variable that is not
    set: `str` would make a directory of it."""
    if not isinstance(url, (str, os.PathLike)):
        raise TypeError(
            f"the URL of a root is a path, or a URL such as 's3://bucket/run7'; got {type(url).__name__}. If it comes "
            "from a variable or an option, that may not be set"
        )
    return str(url)


def is_url(text: str) -> bool:
    """Returns whether the text is a URL, or was one before it lost slashes; else it is a path."""
    return "://" in text or _LOST_SLASH.match(text) is not None


def absolute(url: str | Path) -> str:
    """Returns the URL that names the same place from any working directory, and in the writer's process. It is the same
    for all spellings of a path, but for links."""
    text = url_text(url)
    scheme, path = _split(text)
    if scheme in _LOCAL and path:
        return f"file://{os.path.abspath(path)}"
    return text.rstrip("/") if path.strip("/") else text


def _split(url: str) -> tuple[str, str]:
    """Returns the scheme and the rest; a path has the scheme "file"."""
    if url != url.strip():  # another job, which strips it, would find another root
        raise ValueError(
            f"{url!r} begins or ends with white space, such as the line end of a file it was read from: strip it"
        )
    if "\0" in url:
        raise ValueError(f"{url!r} has a character NUL, which no path and no URL can have")
    if lost := _LOST_SLASH.match(url):
        scheme = lost[1].lower()
        whole = f"{scheme}://{'/' if scheme in _LOCAL else ''}{url[lost.end() :]}"
        raise ValueError(
            f"{url} would be a directory below {Path.cwd()}: is it {whole}? A URL has two slashes behind its scheme, "
            f"and pathlib makes one of them; pass a URL as a str, or ./{url} if the directory is meant"
        )
    scheme, found, rest = url.partition("://")
    if found and not scheme:  # fsspec would take it for a path
        raise ValueError(f"{url} names no scheme: expected one such as s3://bucket/run7. Is a variable in it not set?")
    scheme, rest = (scheme, rest) if found else ("file", url)
    host, slash, below = rest.partition("/")
    if found and scheme in _LOCAL and slash and host.lower() in _THIS_HOST:
        raise ValueError(
            f"{url} would be below a directory called {host} in {Path.cwd()}: is it /{below}? Pass that, or "
            f"{os.path.abspath(rest)} if the directory is meant"
        )
    if scheme in _LOCAL and host == "~":
        raise ValueError(
            f"{url} would be below a directory called ~ in {Path.cwd()}, since only a shell makes the home directory "
            f"of it: is it {os.path.expanduser(rest)}? Pass that, or {os.path.abspath(rest)} if the directory is meant"
        )
    return scheme, rest


def open_store(url: str, options: Mapping[str, object] | None = None) -> Store:
    """The store at `url`: a path, `file://`, `local://`, `memory://`, or any URL that fsspec knows.

    `options` are those of fsspec's filesystem (credentials, endpoint, ...), which is s3fs's for S3; local paths take
    none. One of them is ours: `client` names what reaches buckets, "s3fs" (S3), "fsspec" (the rest), or "obstore", for
    S3, GCS and Azure. The schemes `latency+...` and `fault+...` are those of `ckptlib.testing`. Nothing is read or
    written yet.

    Raises ValueError for a URL that has lost a slash, its scheme or its bucket, for a chain of fsspec's, for a version
    of an object, for a path below "~", for file://localhost/ and file://127.0.0.1/, and for options of which no
    filesystem can be made; TypeError for options that are no dict.
    """
    if not isinstance(options, Mapping | None):  # its value may be a secret
        raise TypeError(f"storage_options: expected a dict, such as {{'profile': 'a'}}, not a {type(options).__name__}")
    scheme, rest = _split(url)
    if scheme in _LOCAL:
        from ckptlib.stores.local import LocalStore

        return LocalStore(rest)
    if scheme == "memory":
        from ckptlib.stores.memory import MemoryStore

        return MemoryStore.named(rest)
    if scheme.startswith(("latency+", "fault+")):
        from ckptlib.stores.testing import open_testing_store

        return open_testing_store(url, options, open_store)
    if scheme in _BUCKETS and not rest.partition("/")[0]:  # fsspec would take the first directory for the bucket
        raise ValueError(f"{url} names no bucket: expected {scheme}://BUCKET/PREFIX. Is a variable in it not set?")
    given = dict(options or {})
    client = given.pop("client", "s3fs" if scheme in _S3 else "fsspec")
    if client not in _CLIENTS:
        raise ValueError(f"client {client!r}: expected one of {', '.join(_CLIENTS)}")
    if client == "obstore":
        return _obstore(url, given)
    # A cache would give what others have deleted, and does not put whole; some wait for themselves.
    if "::" in url or scheme in _CACHES:
        raise ValueError(
            f"{without_userinfo(url)}: fsspec makes a chain of filesystems of a URL with '::', or of a cache, and "
            "ckptlib takes none: give the URL of the store alone, as s3://bucket/run7; of an archive zip://run7, with "
            "an option fo=PATH"
        )
    if scheme in _BUCKETS and (left_out := _VERSION.search(url)):
        raise ValueError(
            f"{without_userinfo(url)}: a root has no versions, and s3fs and adlfs leave {left_out[0]!r} out of each "
            "name: pass the URL without it, or choose another name"
        )
    if client == "s3fs":
        return _s3(url, scheme, given)
    from ckptlib.stores.fsspec import FsspecStore

    return FsspecStore(url, given)


def _s3(url: str, scheme: str, options: Mapping[str, object]) -> Store:
    if scheme not in _S3:
        raise ValueError(f"client 's3fs' reaches S3; expected s3://..., got {scheme}://...")
    try:
        from ckptlib.stores.s3 import S3Store
    except ModuleNotFoundError as error:
        raise ImportError(f"{url} needs s3fs: pip install 'ckptlib[s3]'") from error
    return S3Store(url, options)


def _obstore(url: str, options: Mapping[str, object]) -> Store:
    try:
        from ckptlib.stores.obstore import ObstoreStore
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise ModuleNotFoundError("client 'obstore' needs a package: pip install 'ckptlib[obstore]'") from None
    return ObstoreStore(url, options)
