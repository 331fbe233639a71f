"""Without a rule the proxy changes nothing: bytes, order, connections; of a bare socket and of real clients."""

from __future__ import annotations

import http.client
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import fsspec
import pytest
from botocore.exceptions import BotoCoreError
from helpers.servers import ObjectStorage, s3_client, start_seaweedfs
from helpers.tiny_server import TinyServer, all_until_the_end, ask, raw_connection

from ckptlib.testing import FaultProxy

BODY = os.urandom(300_000)


@pytest.fixture
def server() -> Iterator[TinyServer]:
    with TinyServer() as server:
        server.objects["/b/k"] = BODY
        yield server


@contextmanager
def scripted_server(*steps: tuple[int, bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """Reads so many bytes, sends these, and so on, then closes; the list is what it read."""
    read: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                for nbytes, answer in steps:
                    got = b""
                    while len(got) < nbytes:
                        got += connection.recv(nbytes - len(got))
                    read.append(got)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", read
        thread.join(20)
        assert not thread.is_alive()


HEAD = b"PUT /b/k?x=%2F&y HTTP/1.1\r\nhOsT:  a b \r\nX-Odd:\r\nX-Odd: twice\r\n"

AWS = b"3;chunk-signature=0\r\nabc\r\n0\r\nx-amz-checksum-crc32:1\r\n\r\n"
EXCHANGES = {
    "sized": (HEAD + b"Content-Length: 3\r\n\r\nabc", b"HTTP/1.1 200 Fine, thanks\r\nContent-Length: 2\r\n\r\nok"),
    "no body": (b"GET /b/k HTTP/1.1\r\n\r\n", b"HTTP/1.1 204 \r\nX: 1\r\n\r\n"),
    "head": (b"HEAD /b/k HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"),
    "unchanged": (b"GET /b/k HTTP/1.1\r\n\r\n", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 1000\r\n\r\n"),
    "chunked": (
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n3;ext=1\r\nabc\r\n0A\r\n0123456789\r\n0\r\nX-Sum: 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n000\r\n\r\n",
    ),
    "aws-chunked": (
        HEAD + b"Content-Encoding: aws-chunked\r\nContent-Length: %d\r\n\r\n%s" % (len(AWS), AWS),
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    ),
    "hints": (
        b"GET /b/k HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    ),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_every_byte_passes_as_it_is(name: str) -> None:
    request, answer = EXCHANGES[name]
    with scripted_server((len(request), answer), (len(request), answer)) as (url, read), FaultProxy(url) as proxy:
        with raw_connection(proxy.url) as connection:
            for _ in range(2):  # on one connection
                connection.sendall(request)
                got = b""
                while len(got) < len(answer):
                    got += connection.recv(65536)
                assert got == answer
            assert all_until_the_end(connection) == (b"", "closed")  # as the server does
        assert read == [request, request]
        assert [r.fault for r in proxy.requests] == [None, None]


def test_requests_sent_at_once_are_answered_in_order(server: TinyServer) -> None:
    with FaultProxy(server.url) as proxy, raw_connection(proxy.url) as connection:
        connection.sendall(b"HEAD /b/k HTTP/1.1\r\n\r\n" * 3 + b"GET /none HTTP/1.1\r\nConnection: close\r\n\r\n")
        answers, end = all_until_the_end(connection)
        assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200"] * 3 + [b"404"]
        assert end == "closed"
        assert len(proxy.requests) == 4


def test_a_body_that_is_sent_with_leave() -> None:
    head = b"PUT /b/k HTTP/1.1\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n"
    leave, answer = b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    with (
        scripted_server((len(head), leave), (3, answer)) as (url, read),
        FaultProxy(url) as proxy,
        raw_connection(proxy.url) as connection,
    ):
        connection.sendall(head)
        assert connection.recv(65536) == leave
        connection.sendall(b"abc")
        assert all_until_the_end(connection) == (answer, "closed")
        assert read == [head, b"abc"]
        assert (proxy.requests[0].status, proxy.requests[0].nbytes_up) == (200, 3)


def test_an_answer_before_the_body_was_sent() -> None:
    head = b"PUT /b/k HTTP/1.1\r\nContent-Length: 3000\r\nExpect: 100-continue\r\n\r\n"
    answer = b"HTTP/1.1 307 Temporary Redirect\r\nContent-Length: 0\r\n\r\n"
    with (
        scripted_server((len(head), answer)) as (url, _),
        FaultProxy(url) as proxy,
        raw_connection(proxy.url) as connection,
    ):
        connection.sendall(head)
        assert all_until_the_end(connection) == (answer, "closed")


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01 TLS\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"x" * 600_000], ids=len
)
def test_what_is_no_http_ends_that_connection_alone(server: TinyServer, garbage: bytes) -> None:
    with FaultProxy(server.url) as proxy:
        with raw_connection(proxy.url) as connection:
            try:
                connection.sendall(garbage)
            except (ConnectionResetError, BrokenPipeError):
                pass
            else:
                assert all_until_the_end(connection) == (b"", "reset")
        assert ask(proxy.url, "GET", "/b/k") == (200, BODY)


def test_answers_of_every_form(server: TinyServer) -> None:
    with FaultProxy(server.url) as proxy:
        connection = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=150)
        for method, query in [("GET", ""), ("HEAD", ""), ("GET", "?chunked"), ("GET", "?unchanged"), ("GET", "")]:
            connection.request(method, "/b/k" + query)
            got = connection.getresponse().read()
            assert got == (BODY if method == "GET" and query != "?unchanged" else b"")
        connection.request("PUT", "/b/new", iter([b"abc", b"defg"]), encode_chunked=True)
        assert connection.getresponse().read() == b""
        connection.request("DELETE", "/b/k")
        assert connection.getresponse().read() == b""
        connection.request("GET", "/b/new?endless")
        assert connection.getresponse().read() == b"abcdefg"
        connection.close()
        assert [r.nbytes_down for r in proxy.requests] == [len(BODY), 0, len(BODY), 0, len(BODY), 0, 0, 7]
        assert [r.nbytes_up for r in proxy.requests] == [0] * 5 + [7, 0, 0]


def test_many_connections_at_once(server: TinyServer) -> None:
    with FaultProxy(server.url) as proxy:

        def work(n: int) -> None:
            body = bytes([n]) * 100_000
            for number in range(5):
                assert ask(proxy.url, "PUT", f"/b/{n}-{number}", body)[0] == 200
                assert ask(proxy.url, "GET", f"/b/{n}-{number}") == (200, body)

        with ThreadPoolExecutor(40) as threads:
            list(threads.map(work, range(40)))
        assert Counter(r.op for r in proxy.requests) == {"PutObject": 200, "GetObject": 200}
        assert {r.fault for r in proxy.requests} == {None}


# -- real clients and servers


def test_s3fs_and_amazons_client(s3: ObjectStorage) -> None:
    with FaultProxy(s3.endpoint) as proxy:
        fs = fsspec.filesystem("s3", **s3.options(proxy.url), skip_instance_cache=True)
        root = s3.url().removeprefix("s3://")
        data = os.urandom(12 << 20)
        with fs.open(f"{root}/parts", "wb", block_size=5 << 20) as file:
            file.write(data)
        fs.pipe_file(f"{root}/whole", data[:1000])
        fs.pipe_file(f"{root}/empty", b"")
        assert fs.cat_file(f"{root}/parts", start=5, end=9_000_000) == data[5:9_000_000]
        fs.invalidate_cache()
        assert sorted(path.rpartition("/")[2] for path in fs.find(root)) == ["empty", "parts", "whole"]
        client = s3_client(s3, proxy.url)
        key = root.partition("/")[2] + "/parts"
        answer = client.get_object(Bucket=s3.bucket, Key=key)
        assert answer["Body"].read() == data
        client.close()
        ops = Counter(request.op for request in proxy.requests)
        assert {name: ops[name] for name in ("CreateMultipartUpload", "CompleteMultipartUpload", "PutObject")} == {
            "CreateMultipartUpload": 1,
            "CompleteMultipartUpload": 1,
            "PutObject": 2,
        }
        assert ops["UploadPart"] >= 1
        assert ops["GetObject"] == 2
        assert ops["ListObjects"] >= 1
        assert ops["Other"] == 0
        assert sum(r.nbytes_up for r in proxy.requests if r.op == "UploadPart") == len(data)


def test_obstore(s3: ObjectStorage) -> None:
    import obstore
    from obstore.store import S3Store

    with FaultProxy(s3.endpoint) as proxy:
        store = S3Store(
            s3.bucket,
            endpoint=proxy.url,
            access_key_id=s3.secrets["key"],
            secret_access_key=s3.secrets["secret"],
            region="us-east-1",
            client_options={"allow_http": True},
        )
        key, data = s3.url().rpartition("/")[2], os.urandom(12 << 20)
        obstore.put(store, key, data, chunk_size=5 << 20, max_concurrency=3)
        assert bytes(obstore.get_range(store, key, start=7, length=6 << 20)) == data[7 : 7 + (6 << 20)]
        proxy.rules([{"match": "^UploadPart", "fault": "503", "count": 2}])
        obstore.put(store, key, data[::-1], chunk_size=5 << 20, max_concurrency=3)
        assert bytes(obstore.get(store, key).bytes()) == data[::-1]
        assert Counter(r.fault for r in proxy.requests) == {"503": 2, None: len(proxy.requests) - 2}


@pytest.mark.parametrize("name", ["gcs", "azure"])
def test_gcs_and_azure(name: str, request: pytest.FixtureRequest) -> None:
    storage: ObjectStorage = request.getfixturevalue(name)
    with FaultProxy(storage.endpoint) as proxy:
        fs = fsspec.filesystem(storage.scheme, **storage.options(proxy.url), skip_instance_cache=True)
        root = storage.url().partition("://")[2]
        data = os.urandom(3 << 20)
        fs.pipe_file(f"{root}/a", data)
        assert fs.cat_file(f"{root}/a") == data
        assert len(fs.find(root)) == 1
        fs.rm_file(f"{root}/a")
        ops = {request.op for request in proxy.requests}
        assert {"PutObject", "GetObject", "ListObjects", "DeleteObject"} <= ops | (
            {"PutObject"} if "CompleteMultipartUpload" in ops else set()
        )
        proxy.rules([{"match": "^GetObject", "fault": "403"}])
        with pytest.raises(Exception, match=r"(?i)injected|forbidden|authorization"):
            fs.cat_file(f"{root}/a")


def test_a_server_that_is_killed_during_an_upload(tmp_path: Path) -> None:
    data = os.urandom(8 << 20)
    with start_seaweedfs(tmp_path) as storage, FaultProxy(storage.endpoint) as proxy:
        proxy.rules([{"match": "^PutObject", "fault": "bandwidth", "bandwidth": 4e6, "count": 1}])
        with ThreadPoolExecutor(1) as thread, closing(s3_client(storage, proxy.url)) as client:
            put = thread.submit(client.put_object, Bucket=storage.bucket, Key="k", Body=data)
            end = time.monotonic() + 150
            while not any(request.nbytes_up > 1 << 20 for request in proxy.requests):
                assert time.monotonic() < end
                time.sleep(0.01)
            storage.process.kill()
            with pytest.raises(BotoCoreError):
                put.result(30)
            with pytest.raises(BotoCoreError):
                client.list_objects_v2(Bucket=storage.bucket)
            storage.process.start()
            assert "Contents" not in client.list_objects_v2(Bucket=storage.bucket)
            client.put_object(Bucket=storage.bucket, Key="k", Body=data)
            assert client.get_object(Bucket=storage.bucket, Key="k")["Body"].read() == data
        assert [request.fault for request in proxy.requests][:2] == ["server gone", "server down"]
        assert proxy.requests[0].status is None
