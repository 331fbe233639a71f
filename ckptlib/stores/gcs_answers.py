"""Tells a proxy's page, which answers by success, from an answer of Google Cloud Storage.

gcsfs does not: whatever comes counts as the bytes of the object, and JSON that is no listing as an empty one.
"""

from __future__ import annotations

from typing import Any

from ckptlib.stores.fsspec_errors import Page

DEFAULTS = {scheme: {"consistency": "size"} for scheme in ("gs", "gcs")}
"""Options by scheme. Without this one, gcsfs takes every answer by success to an upload for an object's."""

_OF_OBJECT = ("Content-Range", "ETag", "X-Goog-Generation", "X-Goog-Hash")
"""Fields of which an answer to a read has one. Reads ask for ranges, so the first is there even of emulators."""


def refuse_pages(fs: Any) -> None:
    """Makes this GCSFileSystem raise Page if a read or a listing is not answered by a store."""
    call = fs._call

    async def checked(method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        answer = await call(method, path, *args, **kwargs)
        if method == "GET" and "?alt=media" in path:
            fields, _ = answer
            if not any(name in fields for name in _OF_OBJECT):
                raise Page("answered by success without what tells of an object")
        elif method == "GET" and path == "b/{}/o":
            kind = answer.get("kind") if isinstance(answer, dict) else None
            if kind != "storage#objects":
                raise Page("answered by success, but not by a listing")
        return answer

    fs._call = checked
