"""What users say to s3fs, gcsfs and adlfs, said to obstore: by real requests where a server is there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import ClassVar

import pytest
from helpers.answering import Handler, Server
from helpers.servers import ObjectStorage

from ckptlib.errors import StoreDenied
from ckptlib.stores import open_store

client_of = pytest.importorskip("ckptlib.stores.obstore_config").client_of

LONG = f"ya29.c.{'x' * 1017}"
"""A token as Google gives it to a service account: longer than the name of a file can be."""


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def test_an_unknown_client_is_refused() -> None:
    with pytest.raises(ValueError, match=r"client 'boto': expected one of s3fs, obstore, fsspec"):
        open_store("s3://bucket/run", {"client": "boto"})


@pytest.mark.parametrize("url", ["sftp://host/path", "s3:///path", "s3://user@bucket/path", "gs://"])
def test_urls_that_obstore_does_not_know(url: str) -> None:
    with pytest.raises(ValueError, match="://"):
        client_of(url, {})


@pytest.mark.parametrize(
    ("url", "options", "named"),
    [
        ("s3://b/r", {"version_aware": True}, "version_aware"),
        ("s3://b/r", {"client_kwargs": {"region_name": "x", "api_version": "1"}}, "api_version of client_kwargs"),
        ("s3://b/r", {"config_kwargs": {"signature_version": "s3"}}, "signature_version of config_kwargs"),
        ("s3://b/r", {"s3_additional_kwargs": {"ACL": "public-read"}}, "ACL of s3_additional_kwargs"),
        ("s3://b/r", {"key": "k", "secret": "s", "profile": "p"}, "a key and a profile"),
        ("s3://b/r", {"use_ssl": False}, "use_ssl"),
        ("s3://b/a//r/", {}, r"s3://b/a//r: .* no names with '//'.* is it s3://b/a/r\?"),
        ("gs://b//r", {}, r"is it gs://b/r\?"),
        ("s3://b/./a/../r", {}, r"s3://b/\./a/\.\./r: .* no names with .*'/\./' or '/\.\./'.* is it s3://b/r\?"),
        ("abfs://c@a.dfs.core.windows.net/x//r", {}, r"is it abfs://c@a\.dfs\.core\.windows\.net/x/r\?"),
        ("s3://b/r", {"client_kwargs": {"verify": "/none/ca.pem"}}, "'verify': '/none/ca.pem'}: No such file or"),
        (
            "s3://b/r",
            {"client_kwargs": {"verify": Path("/")}},
            "'verify': '/'}: Is a directory; expected",
        ),
        ("gs://b/r", {"token": "~/account.json"}, "token='~/account.json': there is no such file"),
        ("s3://b/r", {"endpoint_url": "minio:9000"}, "the endpoint 'minio:9000': expected http://"),
        ("gs://b/r", {"endpoint_url": "localhost:4443"}, "the endpoint 'localhost:4443': expected http://"),
        ("gs://b/r", {"consistency": "md5"}, "consistency"),
        ("gs://b/r", {"token": "browser"}, "browser"),
        ("gs://b/r", {"token": object()}, "token of type object"),
        ("az://b/r", {"credential": "x"}, "credential"),
        ("az://b/r", {"connection_string": "AccountName=a;QueueEndpoint=q"}, "QueueEndpoint of connection_string"),
    ],
)
def test_what_cannot_be_said_is_refused_by_name(url: str, options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        client_of(url, options)


def test_a_file_of_certificates_that_a_variable_names_and_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", "/none/ca.pem")
    with pytest.raises(ValueError, match=r"AWS_CA_BUNDLE=/none/ca\.pem: No such file or .*expected a certificate file"):
        client_of("s3://b/r", {})
    assert "root_certificate" not in client_of("s3://b/r", {"client_kwargs": {"verify": False}}).client_options


def test_an_endpoint_in_capitals() -> None:
    for kind in ("s3", "gs"):
        assert client_of(f"{kind}://b/r", {"endpoint_url": "HTTP://localhost:1"}).client_options["allow_http"]
        assert not client_of(f"{kind}://b/r", {"endpoint_url": "HTTPS://localhost:1"}).client_options.get("allow_http")


@pytest.mark.parametrize(
    ("url", "options", "bucket", "root", "expected"),
    [
        ("s3://b", {"anon": True}, "b", "", {"skip_signature": True}),
        (
            "s3://b/a/r/",
            {
                "key": "k",
                "secret": "s",
                "token": "t",
                "requester_pays": True,
                "client_kwargs": {"region_name": "eu-x-1"},
            },
            "b",
            "a/r",
            {
                "access_key_id": "k",
                "secret_access_key": "s",
                "session_token": "t",
                "region": "eu-x-1",
                "request_payer": True,
                "checksum_algorithm": "CRC64NVME",
            },
        ),
        (
            "s3://b/r",
            {
                "username": "k",
                "password": "s",
                "config_kwargs": {"s3": {"addressing_style": "virtual"}},
                "client_kwargs": {"endpoint_url": "https://s3.example"},
                "s3_additional_kwargs": {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "arn"},
            },
            "b",
            "r",
            {
                "access_key_id": "k",
                "endpoint": "https://b.s3.example",
                "virtual_hosted_style_request": True,
                "server_side_encryption": "aws:kms",
                "sse_kms_key_id": "arn",
            },
        ),
        ("gs://b/r", {"token": "ya29.x", "project": "p"}, "b", "r", {"bearer_token": "ya29.x"}),
        ("gs://b/r", {"token": LONG}, "b", "r", {"bearer_token": LONG}),
        ("gcs://b/r", {"token": "anon"}, "b", "r", {"skip_signature": True}),
        (
            *("abfss://c@acc.dfs.core.windows.net/r", {"sas_token": "?sv=1&sig=x"}, "c", "r"),
            {"account_name": "acc", "sas_key": "sv=1&sig=x"},
        ),
        (
            *(
                "az://c/r",
                {"connection_string": "AccountName=acc;AccountKey=a2V5;EndpointSuffix=cloud.x"},
                "c",
                "r",
            ),
            {"account_name": "acc", "account_key": "a2V5", "endpoint": "https://acc.blob.cloud.x"},
        ),
        (
            *("az://c/r", {"account_name": "a", "tenant_id": "t", "client_id": "i", "client_secret": "s"}, "c", "r"),
            {"account_name": "a", "tenant_id": "t", "client_id": "i", "client_secret": "s"},
        ),
    ],
)
def test_what_obstore_is_told(
    url: str, options: dict[str, object], bucket: str, root: str, expected: dict[str, object]
) -> None:
    client = client_of(url, options)
    assert (client.bucket, client.root) == (bucket, root)
    assert {name: client.config.get(name) for name in expected} == expected
    client.open(1000, idle=True, retry_s=1.0)  # obstore takes every word of it


def test_an_endpoint_of_the_environment_without_a_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "minio:9000")
    with pytest.raises(ValueError, match="the endpoint 'minio:9000': expected http://"):
        client_of("s3://b/r", {"key": "k", "secret": "s"})
    client_of("s3://b/r", {"key": "k", "secret": "s", "endpoint_url": "http://minio:9000"})
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://minio:9000")  # counts before all others, and an option
    client_of("s3://b/r", {"key": "k", "secret": "s"})
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "minio:9000")
    with pytest.raises(ValueError, match="the endpoint 'minio:9000': expected http://"):
        client_of("s3://b/r", {"key": "k", "secret": "s", "endpoint_url": "http://minio:9000"})


@pytest.mark.parametrize(
    ("url", "options", "why"),
    [
        ("az://c/r", {}, "Account must be specified$"),
        ("gs://b/r", {"token": {"type": "service_account", "private_key_id": "k"}}, "missing field .*"),
        ("az://c/r", {"account_name": "a", "account_key": "s3cr3t!"}, r".*$(?<!s3cr3t!)"),
    ],
)
def test_what_obstore_itself_refuses_is_told_on_one_line(url: str, options: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=rf"^client 'obstore' cannot take these options: [^\n]*{why}") as told:
        open_store(url, {**options, "client": "obstore"})
    assert "s3cr3t" not in str(told.value)


def test_a_service_account(tmp_path: Path) -> None:
    account = {"type": "service_account", "client_email": "a@b", "private_key": "x", "private_key_id": "y"}
    (tmp_path / "account.json").write_text(json.dumps(account))
    assert client_of("gs://b/r", {"token": f"{tmp_path}/account.json"}).config["service_account"].endswith("json")
    assert json.loads(client_of("gs://b/r", {"token": account}).config["service_account_key"]) == account


def test_a_profile(s3: ObjectStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "credentials"
    key, secret = s3.secrets["key"], s3.secrets["secret"]
    file.write_text(f"[lab]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    options = {"client": "obstore", "endpoint_url": s3.endpoint}
    url = s3.url()
    with open_store(url, {**options, "profile": "lab"}) as store:
        store.put("a", b"data")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    with open_store(url, options) as store:
        assert store.get("a") == b"data"
    with pytest.raises(StoreDenied, match=r"gets no credentials from boto3: ProfileNotFound: .*\(nobody\).*correct"):
        open_store(url, {**options, "profile": "nobody"})


def test_a_config_file_that_a_variable_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "config"
    file.write_text("[default]\nregion = eu-west-3\naws_access_key_id = k\naws_secret_access_key = s\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
    client = client_of("s3://b/r", {})
    assert client.config["region"] == "eu-west-3"
    assert client.credential_provider().items() >= {"access_key_id": "k", "secret_access_key": "s"}.items()  # type: ignore[operator]


@pytest.mark.parametrize("options", [{}, {"key": "k", "secret": "s"}, {"anon": True}, {"profile": "lab"}], ids=str)
def test_an_endpoint_of_a_profile(options: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore itself would send the keys of another server to Amazon; s3fs goes where the profile says."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", f"{tmp_path}/config")

    def config(of_profile: str, **more: object) -> dict[str, object]:
        keys = "aws_access_key_id = k\naws_secret_access_key = s"
        profiles = [f"[{name}]\n{keys}\n{of_profile}\n" for name in ("default", "profile lab")]
        service = "[services own]\ns3 =\n  endpoint_url = http://s3:1\n[services odd]\ns3 = http://s3:1\n"
        (tmp_path / "config").write_text("".join([*profiles, service]))
        return client_of("s3://b/r", {**options, **more}).config

    def endpoint(of_profile: str, **more: object) -> object:
        return config(of_profile, **more).get("endpoint")

    assert endpoint("") is None
    assert endpoint("endpoint_url = http://all:1") == "http://all:1"
    assert endpoint("endpoint_url = http://all:1\nservices = own") == "http://s3:1"
    assert endpoint("endpoint_url = http://all:1\nignore_configured_endpoint_urls = true") is None
    assert endpoint("endpoint_url = http://all:1", endpoint_url="http://given:1") == "http://given:1"
    for other in ("not-there", "odd"):
        with pytest.raises(ValueError, match=rf"services = {other} in ~/.aws: expected \[services {other}\], with"):
            endpoint(f"endpoint_url = http://all:1\nservices = {other}")
    there = "endpoint_url = http://all:1\nregion = lab-1"
    assert config(there)["region"] == "lab-1", "a server may refuse what is signed for another"
    assert config(there, client_kwargs={"region_name": "given-1"})["region"] == "given-1"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://env:1")  # which obstore reads
    assert endpoint("endpoint_url = http://all:1") is None


def test_keys_of_the_environment(s3: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.secrets["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secrets["secret"])
    with open_store(s3.url(), {"client": "obstore", "endpoint_url": s3.endpoint}) as store:
        store.put("a", b"data")
        assert store.get("a") == b"data"


class _Signed(Handler):
    fields: ClassVar = {"ETag": '"a"'}
    tokens: ClassVar[list[str | None]] = []

    def do_PUT(self) -> None:
        self.body()
        self.tokens.append(self.headers["x-amz-security-token"])
        self.answer(200)


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_a_token_of_the_environment_is_not_sent_with_keys_that_are_given(
    client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It belongs to the key of the environment, as of a session on AWS, and the bucket may be elsewhere."""
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN"):
        monkeypatch.setenv(f"AWS_{name}", "theirs")
    with Server(_Signed) as server:
        for token in ({}, {"token": "ours"}):
            with open_store("s3://bucket/run", {**server.options(client), **token}) as store:
                store.put("a", b"data")
            assert {*_Signed.tokens} == {token.get("token")}
            _Signed.tokens.clear()


def test_nobody(s3: ObjectStorage) -> None:
    with (
        open_store(s3.url(), {"client": "obstore", "endpoint_url": s3.endpoint, "anon": True}) as store,
        pytest.raises(StoreDenied),
    ):
        store.put("a", b"data")


@pytest.mark.parametrize("name", ["My run (1)", "50%25 off", "é+~@=,;#?&"])
def test_roots_of_all_sorts(s3: ObjectStorage, name: str) -> None:
    url = f"{s3.url()}/{name}"
    with (
        open_store(url, {**s3.options(), "client": "obstore"}) as store,
        open_store(url, {**s3.options(), "client": "fsspec"}) as other,
    ):
        store.put("a/b", b"data")
        assert other.get("a/b") == store.get("a/b") == b"data"
        assert [entry.key for entry in store.scan("a/")] == ["a/b"]
        store.delete("a/b")
        assert store.scan("") == []


def test_a_user_without_a_home_has_no_files_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of a container whom no file tells of."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "~nobody-is-called-so/credentials")
    assert client_of("s3://b/r", {}).bucket == "b"
