"""A server that answers a deletion when the last object is gone, as Swift and older Ceph do: it is waited for."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from helpers.answering import Handler, Server

from ckptlib.errors import StoreDenied
from ckptlib.stores import Store, io_limits, open_store

IDLE_S = 0.3
ANSWER_S = 1.5
"""Far more than IDLE_S, and less than 100 objects may take."""


class _Slow(Handler):
    bodies: list[bytes]
    connections: set[object]
    """Addresses of the client."""
    swallows: bool
    """The first request is never answered."""
    answer_s: float

    def do_POST(self) -> None:
        self.connections.add(self.client_address)
        self.bodies.append(self.body())
        if self.swallows and len(self.bodies) == 1:
            self.rfile.read(1)  # until the client gives it up
            self.close_connection = True
            return
        threading.Event().wait(self.answer_s)
        gone = b"".join(b"<Deleted>%s</Deleted>" % key for key in re.findall(rb"<Key>.*?</Key>", self.bodies[-1]))
        told = b'<DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">%s</DeleteResult>' % gone
        self.answer(200, told, Content_Type="application/xml")


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
@pytest.mark.parametrize("swallows", [False, True], ids=["slow", "swallowed"])
def test_a_deletion_of_many_objects_is_sent_once(client: str, swallows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And once more where no answer came, as when its connection was lost in silence, though it was waited for longer
    than other requests are sent again."""
    monkeypatch.setattr(io_limits, "IDLE_S", IDLE_S)
    monkeypatch.setattr(io_limits, "RETRY_S", 0.6 if swallows else 2.0)
    monkeypatch.setattr(io_limits, "DELETE_S", 0.001 if swallows else io_limits.DELETE_S)
    monkeypatch.setattr(io_limits, "SLOWEST_BPS", 1e9 if swallows else 1e8)
    num = 500 if swallows else 300
    with opened(client, swallows, 0.0 if swallows else ANSWER_S) as (store, handler):
        store.delete(*(f"k/{n:03d}" for n in range(num)))
    assert [body.count(b"<Key>") for body in handler.bodies] == [num] * (1 + swallows)


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_deletions_share_connections(client: str) -> None:
    """A client that is made anew for each would connect, and look for credentials, each time."""
    with opened(client, False, 0.0) as (store, handler):
        for num in range(900, 1000, 10):
            store.delete(*(f"k/{n:03d}" for n in range(num)))
    assert len(handler.bodies) == 10
    assert len(handler.connections) < 10


class _Refusing(_Slow):
    """The first request alone. Objects one by one are deleted by nobody here."""

    def do_POST(self) -> None:
        if self.bodies:
            super().do_POST()
            return
        self.bodies.append(self.body())
        self.answer(
            403, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>", Content_Type="application/xml"
        )


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_many_are_deleted_at_once_again_after_a_refusal(client: str) -> None:
    """As while somebody mends the rights: only a server that does not know how is asked for one by one from then on."""
    with opened(client, False, 0.0, _Refusing) as (store, handler):
        with pytest.raises(StoreDenied):
            store.delete("a", "b")
        store.delete("a", "b")
    assert [body.count(b"<Key>") for body in handler.bodies] == [2, 2]


@contextmanager
def opened(
    client: str, swallows: bool, answer_s: float, kind: type[_Slow] = _Slow
) -> Iterator[tuple[Store, type[_Slow]]]:
    """A store, and what its server remembers."""
    handler = type("Slow", (kind,), {"bodies": [], "connections": set(), "swallows": swallows, "answer_s": answer_s})
    with Server(handler) as server, open_store("s3://bucket/run", server.options(client)) as store:
        yield store, handler
