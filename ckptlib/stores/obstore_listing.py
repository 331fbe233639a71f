"""Listings by obstore's client: what lies below a prefix, and whether it was the store that answered.

This client takes a proxy's page, which answers by success, for the end of a listing; so it does with a page of a server
that says that there is more, but not where. So if a listing may have been cut, having no object at all or whole pages,
another request shows who answers, and the store is asked what comes after the last object. If it has no object at all,
the store must list some object while the one that was read last is there.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import obstore
from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

from ckptlib.stores.base import Entry, is_key, never_ends
from ckptlib.stores.obstore_errors import FOUND, UNLISTED, Foreign
from ckptlib.stores.obstore_requests import Requests

_LISTED = 1000
"""Objects per page."""

_WHOLE = 100
"""Pages of every server have a multiple of this many objects, but for the last."""

_ABSENT = "ckptlib-absent"
"""A key under which nothing is ever put."""


class Listing:
    """Lists the objects of one store. Its coroutines run in the client's loop, and raise what the client raises."""

    def __init__(self, requests: Requests) -> None:
        self._requests, self._root = requests, requests.root
        self._in_order = requests.lists_in_order
        self.known: str | None = None
        """Where the object lies that was read last."""

    async def scan(self, prefix: str, after: str) -> list[Entry]:
        """See `Store.scan`."""
        found, firsts, start, is_checked = dict[str, Entry](), set[str](), after, False
        while True:
            last = await self._scan(prefix, after, start, found, firsts)
            goes_on = self._in_order and is_key(last or "")
            if last is None or (is_checked and not goes_on):
                return [found[key] for key in sorted(found)]
            await self._check_store()
            if not found:
                await self._check_known()
            is_checked = True
            if goes_on:
                start = last
            else:
                firsts.clear()

    async def peek(self) -> list[str]:
        """See `Store.peek`; returns one page."""
        found = await self._peek()
        if not found:
            await self._check_store()
            await self._check_known()
            found = await self._peek()
        return sorted(found)

    async def _scan(self, prefix: str, after: str, start: str, found: dict[str, Entry], firsts: set[str]) -> str | None:
        """Lists what comes after `start`. Adds it to `found`, and the first object of each page to `firsts`.

        Returns the last key, '' if there was none; None if nothing of the listing can be missing.
        """
        directory, _, name = prefix.rpartition("/")
        num, last = 0, ""
        async for metas in self._pages(directory, max(prefix[:-1] if name else "", start)):
            num, last = num + len(metas), self._key(metas[-1])
            if metas[0]["path"] in firsts:  # the client itself would go on for ever
                raise never_ends(f"{self._requests.url}/{prefix}", "list")
            firsts.add(metas[0]["path"])
            for meta in metas:
                key = self._key(meta)
                if self._in_order and name and _is_behind(key, directory, name):
                    return None
                if key.startswith(prefix) and key > after and is_key(key):
                    found[key] = Entry(key, meta["size"], meta["last_modified"].timestamp())
        return None if num % _WHOLE else last

    async def _peek(self) -> list[str]:
        async for metas in self._pages("", ""):
            return [self._key(meta) for meta in metas]
        return []

    async def _check_store(self) -> None:
        """Raises Foreign if a proxy answers, with an ETag or without: a page that is a file has one. A store says that
        there is no such object, or forbids it."""
        with suppress(FileNotFoundError, PermissionDeniedError, UnauthenticatedError):
            await obstore.head_async(self._requests.quick, self._requests.below(_ABSENT))
            raise Foreign(FOUND)

    async def _check_known(self) -> None:
        """Raises Foreign if an object is there, and no listing has any: then the pages are not the store's, though all
        else is."""
        with suppress(FileNotFoundError, PermissionDeniedError, UnauthenticatedError):
            if self.known is None or await self._peek():
                return
            await obstore.head_async(self._requests.quick, self.known)
            raise Foreign(UNLISTED)
        self.known = None  # deleted since, or it may not be asked for

    def _pages(self, directory: str, start: str) -> Any:
        """Returns a stream of pages. What the client takes for a prefix ends with a segment."""
        below = self._requests.below
        inside = not directory or start.startswith(directory + "/")  # JuiceFS refuses what does not begin as the prefix
        offset = {"offset": below(start)} if inside and is_key(start) else {}
        return obstore.list(self._requests.quick, below(directory) or None, chunk_size=_LISTED, **offset)

    def _key(self, meta: Any) -> str:
        return str(meta["path"][len(self._root) + 1 if self._root else 0 :])


def _is_behind(key: str, directory: str, name: str) -> bool:
    """Returns whether a key of a directory comes after all whose names begin with `name`, however '/' is sorted."""
    sibling = key[len(directory) + 1 if directory else 0 :].partition("/")[0]
    return sibling > name and not sibling.startswith(name)
