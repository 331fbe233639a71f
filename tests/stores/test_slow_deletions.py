"""A server that answers a deletion when the last object is gone, as Swift and older Ceph do: it is waited for."""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ckptlib.stores import io_limits, open_store

IDLE_S = 0.3
ANSWER_S = 1.5
"""Far more than IDLE_S, and less than 100 objects may take."""


class _Slow(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bodies: list[bytes]
    swallows: bool
    """The first request is never answered."""

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        if self.swallows and len(self.bodies) == 1:
            self.rfile.read(1)  # until the client gives it up
            self.close_connection = True
            return
        threading.Event().wait(0.0 if self.swallows else ANSWER_S)
        gone = b"".join(b"<Deleted>%s</Deleted>" % key for key in re.findall(rb"<Key>.*?</Key>", self.bodies[-1]))
        told = b'<DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">%s</DeleteResult>' % gone
        self.send_response(200)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    def log_message(self, format: str, *args: object) -> None: ...


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
    handler = type("Slow", (_Slow,), {"bodies": [], "swallows": swallows})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        options = {"key": "somebody", "secret": "s3cr3t", "endpoint_url": f"http://127.0.0.1:{server.server_port}"}
        more = {"client": client} if client == "obstore" else {}
        with open_store("s3://bucket/run", {**options, **more}) as store:
            store.delete(*(f"k/{n:03d}" for n in range(num)))
        server.shutdown()
        thread.join()
    assert [body.count(b"<Key>") for body in handler.bodies] == [num] * (1 + swallows)
