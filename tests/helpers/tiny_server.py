"""An HTTP server of a few lines that remembers what it was given, and clients that see how a connection ends."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from helpers.answering import Handler, Server


class TinyServer(Server):
    request_queue_size = 512

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        """By path, without the query. Those of which a body came only in part are not there."""
        self.partial: dict[str, bytes] = {}
        self.seen: list[str] = []
        """Method and target of each request, in order."""
        self.heads: list[list[tuple[str, str]]] = []
        super().__init__(_Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reset connection is what these tests are about."""


class _Handler(Handler):
    server: TinyServer

    def parse_request(self) -> bool:
        ok = super().parse_request()
        if ok:
            self.server.seen.append(f"{self.command} {self.path}")
            self.server.heads.append(list(self.headers.items()))
        return ok

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while nbytes := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(nbytes)
                self.rfile.readline()
            while self.rfile.readline() != b"\r\n":
                pass
            return body
        body, wanted = b"", int(self.headers.get("Content-Length", 0))
        while len(body) < wanted:
            try:
                piece = self.rfile.read1(min(65536, wanted - len(body)))
            except OSError:
                piece = b""
            if not piece:
                self.server.partial[self.path.partition("?")[0]] = body
                raise ConnectionResetError
            body += piece
        return body

    def do_PUT(self) -> None:
        self.server.objects[self.path.partition("?")[0]] = self.body()
        self.answer(200)

    do_POST = do_PUT

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        body = self.server.objects.get(path)
        if body is None:
            self.answer(404, b"nothing")
        elif query == "chunked":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for start in range(0, len(body), 1000):
                piece = body[start : start + 1000]
                self.wfile.write(b"%x;ext=1\r\n%s\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\nX-Trailer: end\r\n\r\n")
        elif query == "endless":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = True
        elif query == "unchanged":
            self.answer(304)
        else:
            self.answer(200, body)

    def do_HEAD(self) -> None:
        self.answer(200, self.server.objects.get(self.path, b""))

    def do_DELETE(self) -> None:
        self.server.objects.pop(self.path, None)
        self.answer(204)


def ask(url: str, method: str, target: str, body: bytes | None = None, **fields: str) -> tuple[int, bytes]:
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=150)
    try:
        connection.request(method, target, body, {name.replace("_", "-"): value for name, value in fields.items()})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@contextmanager
def raw_connection(url: str) -> Iterator[socket.socket]:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=150) as connection:
        yield connection


def all_until_the_end(connection: socket.socket, patience_s: float = 20) -> tuple[bytes, str]:
    """What still comes, and how the connection ends: "closed", "reset" or "waits" (no byte for `patience_s`)."""
    data = b""
    connection.settimeout(patience_s)
    while True:
        try:
            piece = connection.recv(65536)
        except ConnectionResetError:
            return data, "reset"
        except TimeoutError:
            return data, "waits"
        if not piece:
            return data, "closed"
        data += piece


def put_head(path: str, nbytes: int, *more: str) -> bytes:
    lines = [f"PUT {path} HTTP/1.1", "Host: x", f"Content-Length: {nbytes}", *more]
    return "\r\n".join([*lines, "", ""]).encode()


def body_of(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]
