"""Each fault, as a plain client and a plain server see it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import psutil
import pytest
from helpers.server_process import free_ports
from helpers.tiny_server import TinyServer, all_until_the_end, ask, body_of, put_head, raw_connection

from ckptlib.testing import FaultProxy

BODY = os.urandom(300_000)
WAIT_S = 0.5
"""Without a byte, when all is done that is to be done: nothing comes."""

PATIENCE_S = 150.0
GET = b"GET /b/k HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def server() -> Iterator[TinyServer]:
    with TinyServer() as server:
        server.objects["/b/k"] = BODY
        yield server


@pytest.fixture
def proxy(server: TinyServer) -> Iterator[FaultProxy]:
    with FaultProxy(server.url) as proxy:
        yield proxy


def soon(true: Callable[[], object]) -> bool:
    """Whether it becomes true; what the proxy and the server note, they note a moment after the client sees it."""
    end = time.monotonic() + 150
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def put_and_see(
    proxy: FaultProxy, body: bytes = BODY, waits_for: Callable[[], object] | None = None
) -> tuple[bytes, str]:
    """What comes after a put of /b/new, and how the connection ends; or that nothing comes when something is true."""
    with raw_connection(proxy.url) as connection:
        try:
            connection.sendall(put_head("/b/new", len(body)) + body)
        except (ConnectionResetError, BrokenPipeError):
            return b"", "reset"
        assert waits_for is None or soon(waits_for)
        return all_until_the_end(connection, PATIENCE_S if waits_for is None else WAIT_S)


def get_and_see(proxy: FaultProxy) -> tuple[bytes, str]:
    with raw_connection(proxy.url) as connection:
        connection.sendall(GET)
        return all_until_the_end(connection, PATIENCE_S)


# -- on the way up


def test_reset_up(server: TinyServer, proxy: FaultProxy) -> None:
    proxy.rules([{"match": "^PutObject", "fault": "reset_up", "after": 100_000, "count": 1}])
    assert put_and_see(proxy) == (b"", "reset")
    assert soon(lambda: server.partial)
    assert "/b/new" not in server.objects
    assert BODY[:100_000].startswith(server.partial["/b/new"])
    assert ask(proxy.url, "PUT", "/b/new", BODY)[0] == 200
    assert server.objects["/b/new"] == BODY
    assert [(r.op, r.fault, r.status, r.nbytes_up) for r in proxy.requests] == [
        ("PutObject", "reset_up", None, 100_000),
        ("PutObject", None, 200, len(BODY)),
    ]


def test_stall_up_for_ever(server: TinyServer, proxy: FaultProxy) -> None:
    proxy.rules([{"fault": "stall_up", "after": 1000}])
    with raw_connection(proxy.url) as connection:
        connection.sendall(put_head("/b/new", 1 << 40))
        connection.settimeout(WAIT_S)
        with pytest.raises(TimeoutError):
            connection.sendall(bytes(64 << 20))  # more than the buffers between here and there hold
        assert soon(lambda: proxy.requests and proxy.requests[0].nbytes_up)
        (request,) = proxy.requests
        assert (request.seconds, request.nbytes_up, request.fault) == (None, 1000, "stall_up")
    assert soon(lambda: server.partial)
    assert "/b/new" not in server.objects


def test_a_client_that_leaves_while_its_body_is_not_read(server: TinyServer, proxy: FaultProxy) -> None:
    proxy.rules([{"fault": "stall_up", "after": 1000}])
    with raw_connection(proxy.url) as connection:
        connection.sendall(put_head("/b/new", 1 << 40) + bytes(5000))
        assert soon(lambda: proxy.requests and proxy.requests[0].fault)
        assert proxy.requests[0].seconds is None
    assert soon(lambda: proxy.requests[0].seconds is not None)


def test_stall_up_for_a_while(server: TinyServer, proxy: FaultProxy) -> None:
    proxy.rules([{"fault": "stall_up", "after": 1000, "seconds": 0.3}])
    start = time.monotonic()
    assert ask(proxy.url, "PUT", "/b/new", BODY)[0] == 200
    assert time.monotonic() - start >= 0.3
    assert server.objects["/b/new"] == BODY
    assert (proxy.requests[0].fault, proxy.requests[0].nbytes_up) == ("stall_up", len(BODY))


@pytest.mark.parametrize("after", [0, 77, len(BODY) - 1])
def test_flip_up(server: TinyServer, proxy: FaultProxy, after: int) -> None:
    proxy.rules([{"fault": "flip_up", "after": after}])
    assert ask(proxy.url, "PUT", "/b/new", BODY)[0] == 200
    got = server.objects["/b/new"]
    assert len(got) == len(BODY)
    assert [n for n in range(len(BODY)) if got[n] != BODY[n]] == [after]


def test_a_fault_of_the_body_meets_longer_bodies_only(server: TinyServer, proxy: FaultProxy) -> None:
    proxy.rules([{"fault": "reset_up", "after": 100, "count": 1}])
    assert ask(proxy.url, "PUT", "/b/new", BODY[:100])[0] == 200
    assert ask(proxy.url, "GET", "/b/new")[1] == BODY[:100]
    assert put_and_see(proxy, BODY[:101]) == (b"", "reset")


def test_blackhole(server: TinyServer, proxy: FaultProxy) -> None:
    proxy.rules([{"match": "^PutObject", "fault": "blackhole"}])
    assert put_and_see(proxy, BODY[:64], lambda: proxy.requests and proxy.requests[0].fault) == (b"", "waits")
    assert server.seen == []
    assert soon(lambda: proxy.requests[0].seconds is not None)
    assert (proxy.requests[0].fault, proxy.requests[0].status) == ("blackhole", None)


def test_blackhole_gives_no_leave_to_send_the_body(server: TinyServer, proxy: FaultProxy) -> None:
    proxy.rules([{"fault": "blackhole"}])
    with raw_connection(proxy.url) as connection:
        connection.sendall(put_head("/b/new", 64, "Expect: 100-continue"))
        assert soon(lambda: proxy.requests and proxy.requests[0].fault)
        assert all_until_the_end(connection, WAIT_S) == (b"", "waits")
    assert server.seen == []


def test_refuse(server: TinyServer, proxy: FaultProxy) -> None:
    proxy.rules([{"match": "^GetObject", "fault": "refuse", "nth": 1}])
    assert ask(proxy.url, "GET", "/b/k")[0] == 200
    assert get_and_see(proxy) == (b"", "reset")
    assert ask(proxy.url, "GET", "/b/k")[0] == 200
    assert len(server.seen) == 2


# -- answers


@pytest.mark.parametrize("status", [403, 429, 500, 503])
def test_an_error(server: TinyServer, proxy: FaultProxy, status: int) -> None:
    proxy.rules([{"match": "^PutObject", "fault": str(status), "count": 2}])
    with raw_connection(proxy.url) as connection:
        for expected in (status, status, 200):  # the connection lives on
            connection.sendall(put_head("/b/new", len(BODY)) + BODY)
            answer = b""
            while b"\r\n\r\n" not in answer or (expected != 200 and b"</Error>" not in answer):
                answer += connection.recv(65536)
            assert answer.startswith(f"HTTP/1.1 {expected} ".encode())
            assert (b"<Error><Code>" in answer) == (expected != 200)
    assert len(server.seen) == 1
    assert [(r.status, r.fault) for r in proxy.requests] == [(status, str(status))] * 2 + [(200, None)]


def test_an_error_for_ever_and_without_a_body(server: TinyServer, proxy: FaultProxy) -> None:
    proxy.rules([{"match": "^HeadObject", "fault": "503"}])
    for _ in range(5):
        assert ask(proxy.url, "HEAD", "/b/k") == (503, b"")
    assert server.seen == []


def test_an_error_in_place_of_leave_to_send_the_body(server: TinyServer, proxy: FaultProxy) -> None:
    proxy.rules([{"fault": "503"}])
    with raw_connection(proxy.url) as connection:
        connection.sendall(put_head("/b/new", 64, "Expect: 100-continue"))
        answer, end = all_until_the_end(connection)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert end == "closed"


def test_hang_reply(server: TinyServer, proxy: FaultProxy) -> None:
    proxy.rules([{"match": "^PutObject", "fault": "hang_reply"}])
    assert put_and_see(proxy, waits_for=lambda: proxy.requests and proxy.requests[0].status) == (b"", "waits")
    assert server.objects["/b/new"] == BODY
    assert (proxy.requests[0].fault, proxy.requests[0].status) == ("hang_reply", 200)


def test_a_reply_that_is_late(server: TinyServer, proxy: FaultProxy) -> None:
    proxy.rules([{"fault": "hang_reply", "seconds": 0.3}])
    start = time.monotonic()
    assert ask(proxy.url, "GET", "/b/k") == (200, BODY)
    assert time.monotonic() - start >= 0.3


def test_lost_reply(server: TinyServer, proxy: FaultProxy) -> None:
    proxy.rules([{"match": "^PutObject", "fault": "lost_reply"}])
    assert put_and_see(proxy) == (b"", "reset")
    assert server.objects["/b/new"] == BODY
    assert (proxy.requests[0].fault, proxy.requests[0].status) == ("lost_reply", 200)


# -- on the way down


@pytest.mark.parametrize(
    ("fault", "end"), [("reset_down", "reset"), ("stall_down", "waits"), ("truncate", "closed")], ids=str
)
def test_an_answer_that_stops(server: TinyServer, proxy: FaultProxy, fault: str, end: str) -> None:
    proxy.rules([{"match": "^GetObject", "fault": fault, "after": 1234}])
    with raw_connection(proxy.url) as connection:
        connection.sendall(GET)
        answer = b""
        while len(body_of(answer)) < 1234:
            piece = connection.recv(65536)
            assert piece
            answer += piece
        more, how = all_until_the_end(connection, WAIT_S if end == "waits" else PATIENCE_S)
    answer += more
    assert how == end
    assert body_of(answer) == BODY[:1234]
    assert f"Content-Length: {len(BODY)}".encode() in answer
    assert soon(lambda: proxy.requests[0].seconds is not None)
    assert (proxy.requests[0].fault, proxy.requests[0].nbytes_down) == (fault, 1234)


def test_stall_down_for_a_while(server: TinyServer, proxy: FaultProxy) -> None:
    proxy.rules([{"fault": "stall_down", "after": 1234, "seconds": 0.3}])
    start = time.monotonic()
    assert ask(proxy.url, "GET", "/b/k") == (200, BODY)
    assert time.monotonic() - start >= 0.3


@pytest.mark.parametrize("target", ["/b/k", "/b/k?chunked", "/b/k?endless"])
def test_flip_down(server: TinyServer, proxy: FaultProxy, target: str) -> None:
    proxy.rules([{"fault": "flip_down", "after": 1234}])
    got = ask(proxy.url, "GET", target)[1]
    assert [n for n in range(len(BODY)) if got[n] != BODY[n]] == [1234]


# -- slowness


def test_latency_and_bandwidth_beside_another_fault(server: TinyServer, proxy: FaultProxy) -> None:
    proxy.rules(
        [
            {"fault": "latency", "seconds": 0.1},
            {"fault": "latency", "seconds": 0.1},
            {"fault": "bandwidth", "bandwidth": 1e6},
            {"match": "^PutObject", "fault": "lost_reply"},
        ]
    )
    start = time.monotonic()
    assert put_and_see(proxy) == (b"", "reset")
    assert time.monotonic() - start >= 0.2 + len(BODY) / 1e6
    start = time.monotonic()
    assert ask(proxy.url, "GET", "/b/k") == (200, BODY)
    assert time.monotonic() - start >= 0.2 + len(BODY) / 1e6
    assert [r.fault for r in proxy.requests] == ["lost_reply", None]


def test_bandwidth_is_that_of_a_connection(server: TinyServer, proxy: FaultProxy) -> None:
    proxy.rules([{"fault": "bandwidth", "bandwidth": 1e6}])
    with raw_connection(proxy.url) as connection:
        start = time.monotonic()
        for _ in range(2):  # one after the other
            connection.sendall(GET)
            nbytes = 0
            while nbytes < len(BODY):
                nbytes += len(connection.recv(65536))
        one_after_the_other = time.monotonic() - start
    assert one_after_the_other >= 2 * len(BODY) / 1e6 * 0.9


# -- servers that are gone


def test_down(server: TinyServer) -> None:
    (port,) = free_ports(1)  # else another test may be given it while the proxy is down
    with FaultProxy(server.url, port=port) as proxy:
        with raw_connection(proxy.url) as idle:
            idle.sendall(GET)
            while len(idle.recv(65536)) == 65536:
                pass
            proxy.rules([{"fault": "down"}])
            assert all_until_the_end(idle)[1] == "reset"
            with pytest.raises(ConnectionRefusedError):
                ask(proxy.url, "GET", "/b/k")
        proxy.rules([])
        assert ask(proxy.url, "GET", "/b/k") == (200, BODY)


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, not listening
        with FaultProxy(f"http://127.0.0.1:{free.getsockname()[1]}") as proxy:
            assert get_and_see(proxy) == (b"", "reset")
            assert proxy.requests[0].fault == "server down"


def test_a_server_that_closes_in_the_middle_of_an_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n1234")

        thread = threading.Thread(target=serve)
        thread.start()
        with FaultProxy(f"http://127.0.0.1:{listener.getsockname()[1]}") as proxy:
            answer, end = get_and_see(proxy)
            assert (body_of(answer), end) == (b"1234", "closed")
            assert proxy.requests[0].fault == "server gone"
        thread.join()


def test_it_works_only_while_it_is_entered(server: TinyServer) -> None:
    (port,) = free_ports(1)  # else another test may be given it once the proxy has ended
    proxy = FaultProxy(server.url, port=port)
    with pytest.raises(ValueError, match="while its context is entered"):
        proxy.rules([])
    for _ in range(2):
        with proxy:
            assert ask(proxy.url, "GET", "/b/k") == (200, BODY)
        with pytest.raises(ConnectionRefusedError):
            ask(proxy.url, "GET", "/b/k")
    assert len(proxy.requests) == 2


def test_nothing_is_left(server: TinyServer) -> None:
    process = psutil.Process()
    before = process.num_fds(), threading.active_count()
    for _ in range(5):
        proxy = FaultProxy(server.url, [{"match": "^Put", "fault": "stall_up"}])
        with ExitStack() as stack:
            with proxy:
                ask(proxy.url, "GET", "/b/k")
                connection = stack.enter_context(raw_connection(proxy.url))
                connection.sendall(put_head("/b/new", 1000) + b"1")
                assert soon(lambda proxy=proxy: proxy.requests[-1].fault)
            assert all_until_the_end(connection)[1] == "reset"
    assert soon(lambda: (process.num_fds(), threading.active_count()) <= before)
