"""The store in memory, and `open_store`: what a URL means, and what is imported for it."""

from __future__ import annotations

import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch
from store_conformance import StoreConformance

import ckptlib
from ckptlib.stores import Store, absolute, open_store
from ckptlib.stores.memory import MemoryStore

# -- memory


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()


def test_a_name_is_shared_within_the_process() -> None:
    name = uuid.uuid4().hex
    open_store(f"memory://{name}").put("a", b"1")
    assert open_store(f"memory://{name}").get("a") == b"1"
    assert MemoryStore(name).scan("") == []


# -- open_store


def test_a_path_is_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in [
        str(tmp_path / "run"),
        "run",
        "./run/",
        f"file://{tmp_path}/run",
        "file://run",
        f"local://{tmp_path}/run",
        f"{tmp_path}/other/../run/",
    ]:
        assert open_store(url).url == absolute(url) == f"file://{tmp_path}/run"
    with pytest.raises(ValueError, match="needs a path: is a variable in it not set"):
        open_store(absolute(""))
    assert absolute("s3://bucket/run") == absolute("s3://bucket/run/") == "s3://bucket/run"


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        (Path("s3://bucket/run"), "s3://bucket/run"),
        (Path("gs://bucket") / "run", "gs://bucket/run"),
        (Path("file:///scratch/run"), "file:///scratch/run"),
        ("s3:/bucket", "s3://bucket"),
        ("s3:bucket/run", "s3://bucket/run"),
        ("S3:Bucket/run", "s3://Bucket/run"),
        ("abfs:container", "abfs://container"),
    ],
)
def test_a_url_that_has_lost_slashes_is_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str | Path, meant: str
) -> None:
    monkeypatch.chdir(tmp_path)
    told = re.escape(f"{url} would be a directory below {tmp_path}: is it {meant}?")
    with pytest.raises(ValueError, match=told):
        absolute(url)
    with pytest.raises(ValueError, match=told):
        open_store(str(url))
    with pytest.raises(ValueError, match=told):
        ckptlib.save(url, {"a": torch.ones(1)}, step=1)
    assert [*tmp_path.iterdir()] == []
    assert absolute(f"./{url}") == f"file://{tmp_path}/{url}"


@pytest.mark.parametrize("host", ["localhost", "LocalHost", "127.0.0.1"])
def test_the_host_of_a_file_is_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.chdir(tmp_path)
    for what in (absolute, open_store):
        with pytest.raises(ValueError, match=rf"below a directory called {host} in .*: is it /scratch/run\? Pass that"):
            what(f"file://{host}/scratch/run")
    assert absolute(f"{host}/run") == absolute(f"file://./{host}/run") == f"file://{tmp_path}/{host}/run"


@pytest.mark.parametrize("url", ["run\0", "file:///run\0/7"])
def test_a_nul_is_in_no_path(url: str) -> None:
    for what in (absolute, open_store):
        with pytest.raises(ValueError, match="has a character NUL"):
            what(url)


@pytest.mark.parametrize("url", ["a:b/run", "run:7", "logs3:bucket", "s4:run"])
def test_a_path_may_have_a_colon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute(url) == f"file://{tmp_path}/{url}"


@pytest.mark.parametrize("url", ["run\n", "s3://bucket/run\r\n", "run ", " /scratch/run"])
def test_a_url_with_the_line_end_of_its_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for what in (absolute, open_store, lambda url: ckptlib.save(url, {"a": torch.ones(1)}, step=1)):
        with pytest.raises(ValueError, match=r"ends with white space, .*: strip it"):
            what(url)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("url", ["s3:///run7/x", "s3://", "gs:///run7/x", "az://"])
def test_a_directory_is_not_taken_for_the_bucket_of_a_variable_that_is_not_set(url: str) -> None:
    with pytest.raises(ValueError, match=rf"{url} names no bucket: expected .*://BUCKET/PREFIX. Is a variable"):
        open_store(url, {"key": "a", "secret": "b"} if url[0] == "s" else {"token": "anon"})


def test_a_path_is_not_made_of_a_url_whose_scheme_is_a_variable_that_is_not_set() -> None:
    for what in (absolute, open_store):
        with pytest.raises(ValueError, match="://bucket/run names no scheme: expected one such as s3://bucket/run7"):
            what("://bucket/run")


@pytest.mark.parametrize(
    "url",
    [
        "simplecache::s3://bucket/run",
        "filecache::file:///tmp/run",
        "s3://bucket/run::7",
        "simplecache::sftp://a/b",
        "filecache://bucket/run",
    ],
)
def test_a_chain_of_filesystems_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=rf"{url}: fsspec makes a chain .* give the URL of the store alone"):
        open_store(url, {"target_protocol": "memory"})


@pytest.mark.parametrize("url", ["s3://bucket/run?versionId=7", "az://bucket/run?versionid=7"])
def test_a_version_of_an_object_is_no_root(url: str) -> None:
    """s3fs and adlfs leave it out: two roots would be one, and in Azure all objects of a root."""
    with pytest.raises(ValueError, match=r"/run\?version[Ii]d=7: a root has no versions, .*: pass the URL without it"):
        open_store(url, {"key": "a", "secret": "b"} if url[0] == "s" else {"account_name": "a"})


def test_a_path_may_have_two_colons(tmp_path: Path) -> None:
    with open_store(f"{tmp_path}/run::7") as store:
        store.put("a", b"1")
    assert (tmp_path / "run::7" / "a").read_bytes() == b"1"


@pytest.mark.parametrize(
    ("url", "meant"), [("~/run", "/run"), (Path("~/run"), "/run"), ("file://~/run", "/run"), ("~", "")]
)
def test_a_home_that_no_shell_has_replaced_is_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str | Path, meant: str
) -> None:
    """It would lie where the program was started, and a restart from elsewhere would begin anew."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    told = re.escape(f"is it /home/somebody{meant}? Pass that, or {tmp_path}/~{meant} if")
    with pytest.raises(ValueError, match=told):
        absolute(url)
    with pytest.raises(ValueError, match=told):
        open_store(str(url))
    assert [*tmp_path.iterdir()] == []
    assert absolute("./~/run") == absolute(tmp_path / "~/run") == f"file://{tmp_path}/~/run"
    assert absolute("~run") == f"file://{tmp_path}/~run"


@pytest.mark.parametrize("url", ["s3://bucket/run", "run", "memory://run"])
def test_options_that_are_no_dict_are_refused_and_not_told(url: str) -> None:
    with pytest.raises(TypeError, match=r"storage_options: expected a dict, .* not a str") as raised:
        open_store(url, "a secret")  # type: ignore[arg-type]
    assert "secret" not in str(raised.value)


def test_stores_do_not_import_torch_or_fsspec(tmp_path: Path) -> None:
    script = """
import sys
from ckptlib.stores import open_store
open_store(sys.argv[1]).scan("")
open_store("memory://x")
assert not {"torch", "fsspec", "s3fs"} & set(sys.modules), sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
