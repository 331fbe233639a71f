"""Real object stores on loopback, each started at most once per session of pytest, by the first test that asks for it.

    s3        SeaweedFS, or what CKPTLIB_TEST_S3_ENDPOINT, _BUCKET, _KEY and _SECRET name
    juicefs   the S3 gateway of JuiceFS
    gcs       gcp-storage-emulator, or what CKPTLIB_TEST_GCS_ENDPOINT and _BUCKET name
    azure     Azurite, or what CKPTLIB_TEST_AZURE_CONNECTION and _BUCKET name

A test that kills its server, or pauses it, starts one of its own: `with start_seaweedfs(tmp_path) as storage:
storage.process.kill(); storage.process.start()`. Nothing here listens elsewhere than on loopback or reports usage.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import botocore.client
import botocore.session
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from helpers.server_process import ServerProcess, answers, free_ports

BUCKET = "ckpt"
KEY, SECRET = "testing", "90210557316402"
"""A secret of digits: text all the same."""
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of the account devstoreaccount1, which every Azurite has. Public."""
_GRPC = 10_000
"""What SeaweedFS adds to a port for gRPC; some of its parts do not ask which port was set instead."""


@dataclass(frozen=True)
class ObjectStorage:
    """A bucket that tests may fill."""

    scheme: str
    endpoint: str
    bucket: str
    secrets: Mapping[str, str]
    """As fsspec's filesystem takes them."""
    server: ServerProcess | None = None
    """None when the environment names the endpoint."""

    @property
    def process(self) -> ServerProcess:
        """The server, to be killed; a test that does so starts one of its own."""
        assert self.server is not None, f"{self.endpoint} was not started here"
        return self.server

    def url(self) -> str:
        """A prefix that nobody has used."""
        return f"{self.scheme}://{self.bucket}/{uuid.uuid4().hex}"

    def options(self, endpoint: str | None = None) -> dict[str, object]:
        """What `open_store` needs; `endpoint` may be that of a proxy in front of the server."""
        place = endpoint or self.endpoint
        if self.scheme == "abfs":
            connection = self.secrets["connection_string"].replace(self.endpoint, place)
            return {"connection_string": connection}
        return {**self.secrets, "endpoint_url": place}


@contextmanager
def start_seaweedfs(directory: Path) -> Iterator[ObjectStorage]:
    """Ready after 2 s, and 1 s after it was killed; 120 MB, after puts of 512 MiB 470. Takes no disk beforehand."""
    keys = {"accessKey": KEY, "secretKey": SECRET}
    admin = {"name": "admin", "credentials": [keys], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    (directory / "s3.json").write_text(json.dumps({"identities": [admin]}))
    (directory / "data").mkdir(exist_ok=True)
    ports = dict(zip(("master", "volume", "filer", "s3", "admin"), free_ports(5, beside=_GRPC), strict=True))
    command = [
        *(_program("weed"), "mini", f"-dir={directory}/data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *("-master.telemetry=false", "-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        *(f"-s3.config={directory}/s3.json", f"-bucket={BUCKET}", "-s3.autoCreateBucket=false"),
        *(f"-{part}.port={port}" for part, port in ports.items()),
        *(f"-{part}.port.grpc={port + _GRPC}" for part, port in ports.items()),
    ]
    storage = _s3_on(ports["s3"], command, directory, {"GOMEMLIMIT": "512MiB"})
    try:
        with storage.process:
            yield storage
    finally:
        for port in ports.values():
            for number in (port, port + _GRPC):  # a killed one leaves them, and has no option for most
                for path in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):
                    path.unlink(missing_ok=True)


@contextmanager
def start_juicefs(directory: Path) -> Iterator[ObjectStorage]:
    """Ready after 0.5 s; 120 MB."""
    meta, (port, metrics) = f"sqlite3://{directory}/meta.db", free_ports(2)
    juicefs = _program("juicefs")
    form = [
        *(juicefs, "format", "--storage", "file", "--bucket", f"{directory}/objects/"),
        *("--trash-days", "0", "--compress", "none", meta, BUCKET),
    ]
    serve = [
        *(juicefs, "gateway", "--keep-etag", "--no-usage-report", "--no-agent", "--no-banner", "--log-level", "warn"),
        *("--log", f"{directory}/gateway.log", "--cache-size", "0", "--cache-dir", f"{directory}/cache"),
        *("--buffer-size", "64", "--backup-meta", "0", "--network-interfaces", "lo"),
        *("--metrics", f"127.0.0.1:{metrics}", meta, f"127.0.0.1:{port}"),
    ]
    # Formatting anew what is formatted changes nothing, so both may run at each start.
    both = ["/bin/sh", "-c", f"{shlex.join(form)} && exec {shlex.join(serve)}"]
    storage = _s3_on(port, both, directory, {"MINIO_ROOT_USER": KEY, "MINIO_ROOT_PASSWORD": SECRET})
    with storage.process:
        yield storage


@contextmanager
def start_gcs_emulator(directory: Path) -> Iterator[ObjectStorage]:
    (port,) = free_ports(1)
    emulator = Path(__file__).with_name("gcs_emulator.py")
    command = [
        *(sys.executable, str(emulator), "-d", f"{directory}/data", "start", "-q", "--default-bucket", BUCKET),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]
    with ServerProcess(command, directory, lambda: answers(port), {}) as server:
        yield ObjectStorage("gs", f"http://127.0.0.1:{port}", BUCKET, {"token": "anon", "project": "test"}, server)


@contextmanager
def start_azurite(directory: Path) -> Iterator[ObjectStorage]:
    """Ready after 0.7 s; 110 MB. Forgets when it is killed: it writes down every few seconds what is stored.

    Skips the test where scripts/azurite has not installed it.
    """
    node = shutil.which("node")
    places = [home / "azurite/node_modules/azurite/dist/src/blob/main.js" for home in _homes()]
    found = [place for place in places if place.exists()]
    if node is None or not found:
        pytest.skip("Azurite is not installed: run scripts/azurite, which needs node and npm")
    (port,) = free_ports(1)
    command = [
        *(node, str(found[0]), "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", f"{directory}/data"),
        *("--skipApiVersionCheck", "--disableTelemetry", "--silent"),
    ]
    endpoint = f"http://127.0.0.1:{port}"
    connection = (
        f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={AZURITE_KEY};"
        f"BlobEndpoint={endpoint}/devstoreaccount1;"
    )
    with ServerProcess(command, directory, lambda: answers(port) and _has_container(connection), {}) as server:
        yield ObjectStorage("abfs", endpoint, BUCKET, {"connection_string": connection}, server)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStorage]:
    named = _named("S3", "ENDPOINT", "BUCKET", "KEY", "SECRET")
    if named:
        secrets = {"key": named["KEY"], "secret": named["SECRET"]}
        yield ObjectStorage("s3", named["ENDPOINT"], named["BUCKET"], secrets)
    else:
        with _directory(tmp_path_factory, "seaweedfs") as directory, start_seaweedfs(directory) as storage:
            yield storage


@pytest.fixture(scope="session")
def juicefs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStorage]:
    with _directory(tmp_path_factory, "juicefs") as directory, start_juicefs(directory) as storage:
        yield storage


@pytest.fixture(scope="session")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStorage]:
    named = _named("GCS", "ENDPOINT", "BUCKET")
    if named:
        yield ObjectStorage("gs", named["ENDPOINT"], named["BUCKET"], {})
    else:
        with _directory(tmp_path_factory, "gcs") as directory, start_gcs_emulator(directory) as storage:
            yield storage


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStorage]:
    named = _named("AZURE", "CONNECTION", "BUCKET")
    if named:
        parts = dict(part.split("=", 1) for part in named["CONNECTION"].split(";") if part)
        endpoint = parts.get("BlobEndpoint", "").rpartition("/")[0]
        yield ObjectStorage("abfs", endpoint, named["BUCKET"], {"connection_string": named["CONNECTION"]})
    else:
        with _directory(tmp_path_factory, "azurite") as directory, start_azurite(directory) as storage:
            yield storage


@contextmanager
def _directory(tmp_path_factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """For a session: removed at its end, since pytest would keep what three sessions stored."""
    path = tmp_path_factory.mktemp(name)
    yield path
    shutil.rmtree(path)


def _named(kind: str, first: str, *others: str) -> dict[str, str]:
    """What the environment says of the endpoint to use; empty when it names none."""
    prefix = f"CKPTLIB_TEST_{kind}_"
    if prefix + first not in os.environ:
        return {}
    missing = [prefix + name for name in others if prefix + name not in os.environ]
    assert not missing, f"{prefix}{first} is set; expected {', '.join(missing)} as well"
    return {name: os.environ[prefix + name] for name in (first, *others)}


def _homes() -> list[Path]:
    """Of each virtual environment that packages are taken from; a worktree may borrow those of another one."""
    return [Path(entry).parents[2] for entry in sys.path if entry.endswith("site-packages")]


def _program(name: str) -> str:
    """One that came with a package."""
    found = shutil.which(name, path=os.pathsep.join(str(home / "bin") for home in _homes()))
    assert found, f"there is no {name} in the bin of {_homes()}; scripts/test installs it"
    return found


def _s3_on(port: int, command: list[str], directory: Path, environ: Mapping[str, str]) -> ObjectStorage:
    storage = ObjectStorage("s3", f"http://127.0.0.1:{port}", BUCKET, {"key": KEY, "secret": SECRET})
    server = ServerProcess(command, directory, lambda: answers(port) and _takes_objects(storage), environ)
    return replace(storage, server=server)


def _takes_objects(storage: ObjectStorage) -> bool:
    """Whether the bucket takes an object: SeaweedFS answers a second before its bucket is there and has a volume."""
    client = s3_client(storage)
    try:
        client.put_object(Bucket=storage.bucket, Key="ready", Body=b"1")
        client.delete_object(Bucket=storage.bucket, Key="ready")
    except (BotoCoreError, ClientError):
        return False
    finally:
        client.close()
    return True


def s3_client(storage: ObjectStorage, endpoint: str | None = None) -> botocore.client.BaseClient:
    """Amazon's own client, as an oracle: what is in the bucket, whatever the store under test says of it."""
    config = Config(
        retries={"total_max_attempts": 1}, connect_timeout=5, read_timeout=10, s3={"addressing_style": "path"}
    )
    return botocore.session.Session().create_client(
        "s3",
        region_name="us-east-1",
        endpoint_url=endpoint or storage.endpoint,
        aws_access_key_id=storage.secrets["key"],
        aws_secret_access_key=storage.secrets["secret"],
        config=config,
    )


def _has_container(connection: str) -> bool:
    """Makes it where it is missing, as it may be after a kill."""
    from azure.core.exceptions import ResourceExistsError  # half a second, which few sessions need
    from azure.storage.blob import BlobServiceClient

    with BlobServiceClient.from_connection_string(connection) as client, suppress(ResourceExistsError):
        client.create_container(BUCKET)
    return True
