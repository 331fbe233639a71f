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

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        threading.Event().wait(ANSWER_S)
        gone = b"".join(b"<Deleted>%s</Deleted>" % key for key in re.findall(rb"<Key>.*?</Key>", self.bodies[-1]))
        told = b'<DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">%s</DeleteResult>' % gone
        self.send_response(200)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_a_deletion_of_many_objects_is_sent_once(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_limits, "IDLE_S", IDLE_S)
    monkeypatch.setattr(io_limits, "RETRY_S", 2.0)
    monkeypatch.setattr(io_limits, "SLOWEST_BPS", 1e8)
    handler = type("Slow", (_Slow,), {"bodies": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        options = {"key": "somebody", "secret": "s3cr3t", "endpoint_url": f"http://127.0.0.1:{server.server_port}"}
        more = {"client": client} if client == "obstore" else {}
        with open_store("s3://bucket/run", {**options, **more}) as store:
            store.delete(*(f"k/{n:03d}" for n in range(300)))
        server.shutdown()
        thread.join()
    assert [body.count(b"<Key>") for body in handler.bodies] == [300]
