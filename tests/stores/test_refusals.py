"""What somebody must change is told at once, by a sentence that says what: tokens, clocks and certificates.

The servers speak HTTP and TLS on loopback; what S3 says of a token or a clock is said by one that keeps nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import ClassVar

import pytest
from helpers.answering import Handler, Server
from helpers.certificates import Authority, self_signed
from helpers.s3_bucket import at_most, scale_limits

from ckptlib.errors import StoreDenied, StoreError, StoreFull
from ckptlib.stores import Store, io_limits, open_store

IDLE_S = 60.0
"""No request is sent again for its time: those that come are counted."""

RETRY_S = 150.0
SHORT_RETRY_S = 8.0
"""Of what a client tries again."""

AT_ONCE_S = 100.0
"""Less than it is tried again for; a client takes its time to start."""


class Refusing(Server):
    """Takes every put, until it is told what to answer instead."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.answer: tuple[int, str] | None = None
        self.num_answers = sys.maxsize
        """How often it is told."""
        self.num_asked = 0
        self.expired: set[str] = set()
        """Access keys that are told so."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that do not like its certificate hang up."""


class _Handler(Handler):
    fields: ClassVar = {"ETag": '"opaque"'}
    server: Refusing

    def do_PUT(self) -> None:
        self.body()
        self.server.num_asked += 1
        key = self.headers["Authorization"].partition("Credential=")[2].partition("/")[0]
        status, code = (400, "ExpiredToken") if key in self.server.expired else self._told()
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode() if code else b""
        self.answer(status, body)

    def _told(self) -> tuple[int, str]:
        is_told = self.server.num_asked <= self.server.num_answers
        return self.server.answer if is_told and self.server.answer else (200, "")


@pytest.fixture
def server() -> Iterator[Refusing]:
    with Refusing() as server:
        yield server


@pytest.fixture(params=["s3fs", "obstore"])
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    scale_limits(monkeypatch, idle_s=IDLE_S, retry_s=RETRY_S)
    return str(request.param)


def opened(client: str, server: Refusing, url: str | None = None) -> Store:
    return open_store("s3://bucket/run", {**server.options(client), "endpoint_url": url or server.url})


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize(
    ("status", "code", "advice"),
    [
        (400, "ExpiredToken", "renew"),
        (403, "ExpiredToken", "renew"),
        (403, "InvalidToken", "renew"),
        (403, "InvalidTokenId", "renew"),
        (403, "RequestTimeTooSkewed", "clock of this host is wrong: set it by NTP"),
        (403, "SignatureDoesNotMatch", "secret|correct"),
    ],
)
def test_tokens_and_clocks(server: Refusing, client: str, status: int, code: str, advice: str, before: int) -> None:
    """At the first request, and when all went well until then."""
    with opened(client, server) as store:
        for n in range(before):
            store.put(f"a{n}", b"data")
        server.answer = status, code
        with at_most(AT_ONCE_S), pytest.raises(StoreDenied, match=f"/b: cannot put.*({advice})") as told:
            store.put("b", b"data")
        assert code in str(told.value)
        assert "s3cr3t" not in str(told.value)
    most = 3 if status == 400 else 1  # some servers refuse a checksum by that; others are tried then
    assert before < server.num_asked <= before + most, "asking again would not help"


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which clients look."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / ".aws").mkdir()
    return tmp_path / ".aws" / "credentials"


def write(credentials: Path, key: str) -> None:
    text = f"aws_access_key_id = {key}\naws_secret_access_key = s3cr3t\naws_session_token = of-{key}\n"
    credentials.write_text(f"[default]\n{text}")


@pytest.mark.parametrize(
    "answer",
    [
        (409, "ConditionalRequestConflict"),  # S3 cannot tell now whether there is such an object: nobody has the key
        (400, "RequestTimeout"),  # nothing moved on the connection
        (400, "ThrottlingException"),
        (522, ""),  # Cloudflare, as before R2, does not reach the server
    ],
)
def test_what_passes_is_asked_for_again(server: Refusing, client: str, answer: tuple[int, str]) -> None:
    server.answer, server.num_answers = answer, 2
    with opened(client, server) as store:
        store.put("p", b"data", create=True)
    assert server.num_asked == 3


@pytest.mark.parametrize(
    "answer",
    [
        (403, "QuotaExceeded"),
        (400, "XMinioAdminBucketQuotaExceeded"),
        pytest.param((507, ""), marks=pytest.mark.slow),  # obstore's own client asks again for ten seconds
    ],
)
def test_a_quota_is_no_want_of_rights(server: Refusing, client: str, answer: tuple[int, str]) -> None:
    server.answer = answer
    with opened(client, server) as store, pytest.raises(StoreFull, match=r"make room"):
        store.put("p", b"data")


def test_credentials_that_are_renewed_in_their_file(
    server: Refusing, client: str, credentials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same store; a refusal is told as long as nobody has renewed them, or somebody is about to."""
    if client == "obstore":
        from ckptlib.stores import obstore_config

        monkeypatch.setattr(obstore_config, "LOOK_S", -1000)  # what is told expires at once, so each request looks
    write(credentials, "first")
    place = {"endpoint_url": server.url, "region_name": "us-east-1"}
    with open_store("s3://bucket/run", {"client": client, "client_kwargs": place}) as store:
        store.put("a", b"data")
        server.expired.add("first")
        for text in (credentials.read_text(), "[default]\naws_access_key_id = second\n", "[def"):
            credentials.write_text(text)
            with pytest.raises(StoreDenied, match=r"ExpiredToken.*renew"):
                store.put("b", b"data")
        write(credentials, "second")
        store.put("b", b"data")
        server.expired.add("second")
        write(credentials, "third")
        with ThreadPoolExecutor(8) as threads:  # of all that are refused at the same time none is given up
            assert [*threads.map(lambda n: store.put(f"c{n}", b"data"), range(32))] == [None] * 32


@pytest.mark.parametrize("gone", ["found.json", "program"])
@pytest.mark.parametrize("client", ["obstore"], indirect=True)
def test_credentials_that_cannot_be_renewed_yet_are_used_until_they_expire(
    server: Refusing, client: str, credentials: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    """boto3 asks for others ten minutes before, and raises if it gets none."""
    from ckptlib.stores import obstore_config

    monkeypatch.setattr(obstore_config, "LOOK_S", -1000)
    until = datetime.now(timezone.utc) + timedelta(seconds=300)
    found = {"Version": 1, "AccessKeyId": "first", "SecretAccessKey": "s3cr3t", "Expiration": until.isoformat()}
    process, program = credentials.with_name("found.json"), credentials.with_name("program")
    process.write_text(json.dumps(found))
    program.write_text(f"#!/bin/sh\ncat {process}\n")
    program.chmod(0o700)
    credentials.with_name("config").write_text(f"[default]\nregion = us-east-1\ncredential_process = {program}\n")
    with open_store("s3://bucket/run", {"client": client, "endpoint_url": server.url}) as store:
        store.put("a", b"data")
        process.write_text(json.dumps({**found, "Expiration": until.timestamp()}))
        store.put("b0", b"data")
        credentials.with_name(gone).rename(credentials.with_name("away"))
        store.put("b1", b"data")
        server.expired.add("first")
        with pytest.raises(StoreDenied, match=r"ExpiredToken.*renew"):
            store.put("c", b"data")
        credentials.with_name("away").rename(credentials.with_name(gone))
        process.write_text(json.dumps({**found, "AccessKeyId": "second"}))
        store.put("c", b"data")


KEYS = {"Version": 1, "AccessKeyId": "first", "SecretAccessKey": "s3cr3t"}
"""What a program for credentials prints, without an end."""


@pytest.mark.parametrize("client", ["obstore", "s3fs"], indirect=True)
@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("/nowhere/it", "/nowhere/it"),
        ("echo no", "JSONDecodeError"),
        ("echo null", "Attr"),
        pytest.param(f"echo '{json.dumps({**KEYS, 'Expiration': 1893456000})}'", "TypeError", id="number"),
    ],
)
def test_a_program_that_gives_no_credentials(
    server: Refusing, client: str, credentials: Path, program: str, told: str
) -> None:
    credentials.with_name("config").write_text(f"[default]\nregion = us-east-1\ncredential_process = {program}\n")
    with (
        at_most(AT_ONCE_S),
        pytest.raises(StoreDenied, match=rf"{told}.*correct .*~/.aws"),
        open_store("s3://bucket/run", {"client": client, "endpoint_url": server.url}) as store,
    ):
        store.put("a", b"data")


@pytest.mark.parametrize("client", ["s3fs"], indirect=True)
def test_a_program_that_gives_none_again_does_not_hide_the_refusal(
    server: Refusing, client: str, credentials: Path
) -> None:
    process = credentials.with_name("found.json")
    process.write_text(json.dumps(KEYS))
    credentials.with_name("config").write_text(f"[default]\nregion = us-east-1\ncredential_process = cat {process}\n")
    with open_store("s3://bucket/run", {"client": client, "endpoint_url": server.url}) as store:
        store.put("a", b"data")
        server.expired.add("first")
        for text in ("null", "no", json.dumps({**KEYS, "Expiration": 1893456000})):
            process.write_text(text)
            with pytest.raises(StoreDenied, match=r"ExpiredToken.*renew"):
                store.put("b", b"data")
        process.write_text(json.dumps({**KEYS, "AccessKeyId": "second"}))
        store.put("b", b"data")


def test_a_program_that_gives_others_each_time_that_are_all_refused(
    server: Refusing, client: str, credentials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Session tokens of Amazon for another server, say: each call of the program makes some."""
    monkeypatch.setattr(io_limits, "RETRY_S", 1.0)
    program = credentials.with_name("program")
    program.write_text(f"#!/bin/sh\ncat << END\n{json.dumps({**KEYS, 'AccessKeyId': 'of-$$'})}\nEND\n")
    program.chmod(0o700)
    credentials.with_name("config").write_text(f"[default]\nregion = us-east-1\ncredential_process = {program}\n")
    server.answer = 403, "InvalidAccessKeyId"
    with open_store("s3://bucket/run", {"client": client, "endpoint_url": server.url}) as store:
        with at_most(AT_ONCE_S), pytest.raises(StoreDenied, match=r"InvalidAccessKeyId.*correct"):
            store.put("a", b"data")
        server.answer = None
        store.put("a", b"data")


@pytest.mark.parametrize("client", ["s3fs"], indirect=True)
def test_credentials_that_expire_at_the_end_of_an_outage(
    server: Refusing, client: str, credentials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the outage is up, and the last try is refused; but somebody has renewed them, and the server is
    there."""
    write(credentials, "first")
    place = {"endpoint_url": server.url, "region_name": "us-east-1"}
    with open_store("s3://bucket/run", {"client": client, "client_kwargs": place}) as store:
        store.put("a", b"data")
        write(credentials, "second")
        server.expired.add("first")
        tries, send = 0, store._client.send  # type: ignore[attr-defined]

        async def after_an_outage(operation: str, parameters: Mapping[str, object]) -> object:
            nonlocal tries
            tries += 1
            if tries == 1:
                raise OSError("away")
            if tries == 2:
                monkeypatch.setattr(io_limits, "RETRY_S", 1.0)
                await asyncio.sleep(1.0)
            return await send(operation, parameters)

        monkeypatch.setattr(store._client, "send", after_an_outage)  # type: ignore[attr-defined]
        store.put("b", b"data")
    assert tries == 3


@pytest.mark.parametrize("client", ["obstore"], indirect=True)
def test_a_role_that_is_not_given(
    server: Refusing, client: str, credentials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server knows no roles, and says so to boto3."""
    write(credentials, "first")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", server.url)
    role = "role_arn = arn:aws:iam::123456789012:role/r\nsource_profile = default\n"
    credentials.with_name("config").write_text(f"[profile lab]\nregion = us-east-1\n{role}")
    given = {"client": client, "endpoint_url": server.url, "profile": "lab"}
    with (
        open_store("s3://bucket/run", given) as store,
        pytest.raises(StoreDenied, match=r"found no credentials; .*credential provider"),
    ):
        store.put("a", b"data")


@pytest.mark.parametrize("client", ["s3fs"], indirect=True)
def test_credentials_that_were_given_are_not_looked_for(server: Refusing, client: str, credentials: Path) -> None:
    write(credentials, "of-somebody-else")
    with opened(client, server) as store:
        server.expired.add("somebody")
        with pytest.raises(StoreDenied, match=r"ExpiredToken.*renew"):
            store.put("b", b"data")


def with_tls(server: Refusing, path: Path) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(self_signed(path / "certificate.pem"))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    return f"https://localhost:{server.server_port}"


@pytest.mark.parametrize("client", ["s3fs", pytest.param("obstore", marks=pytest.mark.slow)], indirect=True)
def test_a_certificate_that_nobody_trusts(server: Refusing, client: str, tmp_path: Path) -> None:
    url = with_tls(server, tmp_path)
    with (
        opened(client, server, url) as store,
        at_most(AT_ONCE_S),
        pytest.raises(StoreDenied, match=r"certificate is not trusted: .*(AWS_CA_BUNDLE|verify)"),
    ):
        store.put("b", b"data")
    assert server.num_asked == 0


def test_a_certificate_of_an_authority_that_a_variable_names(
    server: Refusing, client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among others, as in the file of a host's own."""
    url = with_tls(server, tmp_path)
    another, own, bundle = Authority(tmp_path / "another.pem"), tmp_path / "certificate.pem", tmp_path / "bundle.pem"
    bundle.write_text(another.path.read_text() + own.read_text())
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
    with opened(client, server, url) as store:
        store.put("a", b"data")
    assert server.num_asked == 1


@pytest.mark.parametrize("client", ["s3fs", pytest.param("obstore", marks=pytest.mark.slow)], indirect=True)
def test_tls_where_there_is_none(server: Refusing, client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_limits, "RETRY_S", SHORT_RETRY_S)
    with (
        opened(client, server, f"https://127.0.0.1:{server.server_port}") as store,
        pytest.raises(StoreError, match="TLS failed: check whether the endpoint_url wants http://"),
    ):
        store.put("b", b"data")
    assert server.num_asked == 0
