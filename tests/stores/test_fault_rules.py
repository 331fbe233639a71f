"""What a rule is, when it is due, and what requests are called."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.server_process import free_ports
from helpers.tiny_server import TinyServer, ask
from places import ROOT

from ckptlib.stores.fault_proxy.ops import error_answer, op_of
from ckptlib.stores.fault_proxy.rules import Fault, Rules
from ckptlib.testing import FaultProxy


def met(rules: list[Any], num: int = 6, what: str = "PutObject /b/k") -> list[str | None]:
    """The faults of so many requests in a row."""
    those = Rules(rules)
    return [those.next_fault(what, 1000).kind for _ in range(num)]


def test_how_often() -> None:
    assert met([]) == [None] * 6
    assert met([{"fault": "503"}]) == ["503"] * 6
    assert met([{"fault": "503", "count": 2}]) == ["503"] * 2 + [None] * 4
    assert met([{"fault": "503", "nth": 2}]) == [None] * 2 + ["503"] + [None] * 3
    assert met([{"fault": "503", "nth": 2, "count": 3}]) == [None] * 2 + ["503"] * 3 + [None]
    assert met([{"fault": "503", "count": 0}]) == [None] * 6


def test_the_first_that_is_due() -> None:
    assert met([{"fault": "503", "count": 2}, {"fault": "500", "count": 1}]) == ["503", "503", "500"] + [None] * 3
    assert met([{"fault": "503", "match": "^Get"}, {"fault": "500"}]) == ["500"] * 6
    assert met([{"fault": "503", "match": r"Object /b/k$"}]) == ["503"] * 6
    assert met([{"fault": "reset_up", "after": 1000}, {"fault": "500", "count": 1}]) == ["500"] + [None] * 5
    assert met([{"fault": "reset_up", "after": 999, "count": 1}]) == ["reset_up"] + [None] * 5


def test_slowness_applies_beside_a_fault() -> None:
    rules = Rules(
        [
            {"fault": "latency", "seconds": 1, "count": 1},
            {"fault": "latency", "seconds": 2},
            {"fault": "bandwidth", "bandwidth": 5e6},
            {"fault": "bandwidth", "bandwidth": 1e6},
            {"fault": "stall_down", "after": 7, "seconds": 3},
        ]
    )
    assert rules.next_fault("GetObject /", None) == Fault("stall_down", 7, 3, 3.0, 1e6)
    assert rules.next_fault("GetObject /", None) == Fault("stall_down", 7, 3, 2.0, 1e6)


@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"fault": "504"},
        {"fault": 503},
        {"fault": "503", "times": 3},
        {"fault": "503", "seconds": 3},
        {"fault": "503", "after": 3},
        {"fault": "latency"},
        {"fault": "bandwidth"},
        {"fault": "bandwidth", "bandwidth": 0},
        {"fault": "reset_up", "bandwidth": 1e6},
        {"fault": "503", "match": "("},
        {"fault": "503", "match": 7},
        {"fault": "503", "nth": -1},
        {"fault": "503", "count": "3"},
        {"fault": "latency", "seconds": None},
        {"fault": "reset_up", "after": 0.5},
        "503",
    ],
    ids=json.dumps,
)
def test_what_is_no_rule_is_refused(rule: Any) -> None:
    with pytest.raises(ValueError, match=r"not a rule|expected|need|mean|no regular expression|of its own"):
        Rules([rule])


@pytest.mark.parametrize("upstream", ["https://127.0.0.1:1", "127.0.0.1:1", "http://", "http://host/path"])
def test_what_is_no_upstream_is_refused(upstream: str) -> None:
    with pytest.raises(ValueError, match="expected http://HOST:PORT"):
        FaultProxy(upstream)


AZURE = {b"x-ms-version": b"2025-01-01"}
REQUESTS = [
    ("GET", "/", {}, "ListBuckets"),
    ("HEAD", "/b", {}, "HeadBucket"),
    ("PUT", "/b/", {}, "CreateBucket"),
    ("DELETE", "/b", {}, "DeleteBucket"),
    ("GET", "/b?list-type=2&prefix=steps%2F", {}, "ListObjects"),
    ("GET", "/b/?prefix=", {}, "ListObjects"),
    ("GET", "/b?location", {}, "Other"),
    ("GET", "/b?uploads", {}, "ListMultipartUploads"),
    ("POST", "/b/?delete", {}, "DeleteObjects"),
    ("PUT", "/b/k/l?x-id=PutObject", {}, "PutObject"),
    ("GET", "/b/k", {}, "GetObject"),
    ("HEAD", "/b/k", {}, "HeadObject"),
    ("DELETE", "/b/k", {}, "DeleteObject"),
    ("POST", "/b/k?uploads=", {}, "CreateMultipartUpload"),
    ("PUT", "/b/k?partNumber=1&uploadId=u", {}, "UploadPart"),
    ("GET", "/b/k?uploadId=u", {}, "ListParts"),
    ("POST", "/b/k?uploadId=u", {}, "CompleteMultipartUpload"),
    ("DELETE", "/b/k?uploadId=u", {}, "AbortMultipartUpload"),
    ("PATCH", "/b/k", {}, "Other"),
    ("POST", "/upload/storage/v1/b/b/o?uploadType=media&name=k", {}, "PutObject"),
    ("POST", "/upload/storage/v1/b/b/o?uploadType=resumable&name=k", {}, "CreateMultipartUpload"),
    ("PUT", "/upload/storage/v1/b/b/o?uploadType=resumable&upload_id=u", {}, "UploadPart"),
    ("GET", "/storage/v1/b/b/o?prefix=k", {}, "ListObjects"),
    ("GET", "/storage/v1/b/b/o/k%2Fl", {}, "HeadObject"),
    ("GET", "/storage/v1/b/b/o/k%2Fl?alt=media", {}, "GetObject"),
    ("GET", "/download/storage/v1/b/b/o/k?alt=media", {}, "GetObject"),
    ("DELETE", "/storage/v1/b/b/o/k", {}, "DeleteObject"),
    ("GET", "/storage/v1/b/b", {}, "HeadBucket"),
    ("POST", "/batch/storage/v1", {}, "DeleteObjects"),
    ("PUT", "/account/c/k", AZURE, "PutObject"),
    ("PUT", "/account/c/k?comp=block&blockid=1", AZURE, "UploadPart"),
    ("PUT", "/account/c/k?comp=blocklist", AZURE, "CompleteMultipartUpload"),
    ("GET", "/account/c?restype=container&comp=list", AZURE, "ListObjects"),
    ("GET", "/account/c?restype=container", AZURE, "HeadBucket"),
    ("GET", "/account/c/k", AZURE, "GetObject"),
    ("HEAD", "/account/c/k", AZURE, "HeadObject"),
    ("DELETE", "/account/c/k", AZURE, "DeleteObject"),
]


@pytest.mark.parametrize(("method", "target", "fields", "op"), REQUESTS, ids=str)
def test_names_of_requests(method: str, target: str, fields: dict[bytes, bytes], op: str) -> None:
    assert op_of(method, target, fields) == op


@pytest.mark.parametrize(
    ("target", "fields", "code"),
    [
        ("/b/k", {}, b"<Code>SlowDown</Code>"),
        ("/storage/v1/b/b/o/k", {}, b'"code": 503'),
        ("/account/c/k", AZURE, b"x-ms-error-code: ServerBusy"),
    ],
    ids=str,
)
def test_each_store_says_no_in_its_own_words(target: str, fields: dict[bytes, bytes], code: bytes) -> None:
    answer = error_answer(503, "GET", target, fields)
    assert code in answer
    head, _, body = answer.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert error_answer(503, "HEAD", target, fields) == head + b"\r\n\r\n"


def test_rules_from_a_file_that_changes(tmp_path: Path) -> None:
    path, (port,) = tmp_path / "rules.json", free_ports(1)  # which no other test is given while the proxy is down
    with TinyServer() as server, FaultProxy(server.url, port=port, rules_path=path) as proxy:
        server.objects["/b/k"] = b"data"
        assert ask(proxy.url, "GET", "/b/k")[0] == 200  # no file
        path.write_text('[{"fault": "503", "count": 1}]')
        assert [ask(proxy.url, "GET", "/b/k")[0] for _ in range(2)] == [503, 200]
        path.write_text('[{"fault": "500"}]')
        assert [ask(proxy.url, "GET", "/b/k")[0] for _ in range(2)] == [500, 500]
        for broken in ('[{"fault": "50', '[{"fault": "none"}]', '{"fault": "403"}', "[1]"):
            path.write_text(broken)
            assert ask(proxy.url, "GET", "/b/k")[0] == 500
        path.unlink()
        assert ask(proxy.url, "GET", "/b/k")[0] == 200
        path.write_text('[{"fault": "down"}]')
        wait_until(lambda: not answers(proxy.url))  # the file is looked at without a request
        path.write_text("[]")
        wait_until(lambda: answers(proxy.url))


def answers(url: str) -> bool:
    try:
        return ask(url, "GET", "/b/k")[0] == 200
    except (ConnectionRefusedError, ConnectionResetError):  # reset: taken, then the port was closed
        return False


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 150
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_as_a_process(tmp_path: Path, how: signal.Signals) -> None:
    """On a port that no other test is given meanwhile, so that nobody answers there when it has ended."""
    rules, log, (port,) = tmp_path / "rules.json", tmp_path / "log.jsonl", free_ports(1)
    with TinyServer() as server:
        server.objects["/b/k"] = b"data"
        command = [sys.executable, "-m", "ckptlib.stores.fault_proxy", "--upstream", server.url]
        command += ["--port", str(port), "--rules", str(rules), "--log", str(log)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            url = process.stdout.readline().strip()
            assert url == f"http://127.0.0.1:{port}"
            assert ask(url, "GET", "/b/k", Range="bytes=0-3")[0] == 200
            rules.write_text('[{"match": "^GetObject", "fault": "503", "count": 1}]')
            assert [ask(url, "GET", "/b/k")[0] for _ in range(2)] == [503, 200]
            process.send_signal(how)
            assert process.wait(20) == 0
        with pytest.raises(ConnectionRefusedError):
            ask(url, "GET", "/b/k")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["op"], line["path"], line["status"], line["fault"]) for line in lines] == [
        ("GetObject", "/b/k", 200, None),
        ("GetObject", "/b/k", 503, "503"),
        ("GetObject", "/b/k", 200, None),
    ]
    assert lines[0]["range"] == "bytes=0-3"
    assert all(line["seconds"] >= 0 for line in lines)
