"""How fast is an object put into a bucket and got from it, and what does it cost? Clients of S3, in turns.

One process for each client and turn: it puts one object from memory and gets it back by ranges of 16 MiB, eight at a
time, as a load does. The server is SeaweedFS on loopback. In the second case a proxy gives each connection 6 MB/s and
each request 30 ms, as a real bucket has; what counts there is how many requests a client keeps under way. On loopback
what counts is the CPU time of the client's process, since the server takes most of the machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.common import ROOT, tell, told
from benchmarks.figures import Figures, Options, rotated, run
from ckptlib.stores import InPlace, open_store
from ckptlib.stores.fsspec import FsspecStore
from ckptlib.stores.io_limits import PART_NBYTES, RUN_BYTES, THREADS, WRITE_BYTES

BANDWIDTH = 6e6
LATENCY_S = 0.03
HEAD_NBYTES = 4096
LOOPBACK, SLOW = "loopback", "6 MB/s, 30 ms"


class Client(Protocol):
    def put(self, key: str, head: bytes, body: memoryview) -> None: ...

    def get_into(self, key: str, offset: int, view: memoryview) -> None: ...


class _Ckptlib:
    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self._store = open_store(url, options)

    def put(self, key: str, head: bytes, body: memoryview) -> None:
        self._store.put(key, head, InPlace(body.nbytes, _pieces(body)))  # as a pack of a snapshot

    def get_into(self, key: str, offset: int, view: memoryview) -> None:
        self._store.get_into(key, offset, view)


class _CkptlibObstore(_Ckptlib):
    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        super().__init__(url, {**options, "client": "obstore"})


class _Fsspec(_Ckptlib):
    """As ckptlib puts where fsspec is all that there is: one object after the other, of 64 MiB."""

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self._store = FsspecStore(url, options)

    def put(self, key: str, head: bytes, body: memoryview) -> None:
        whole = self._store.pack_nbytes
        for start in range(0, body.nbytes, whole):
            self._store.put(f"{key}-{start}", head, [body[start : start + whole]])

    def get_into(self, key: str, offset: int, view: memoryview) -> None:
        whole = self._store.pack_nbytes
        number, inner = divmod(offset - HEAD_NBYTES, whole)
        self._store.get_into(f"{key}-{number * whole}", HEAD_NBYTES + inner, view)


class _Obstore:
    """obstore itself, with as many requests under way and no checksum."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        import obstore
        from obstore.store import S3Store

        bucket, _, self._prefix = url.removeprefix("s3://").partition("/")
        self._obstore = obstore
        self._bucket = S3Store(
            bucket,
            endpoint=options["endpoint_url"],
            access_key_id=options["key"],
            secret_access_key=options["secret"],
            region="us-east-1",
            virtual_hosted_style_request=False,
            unsigned_payload=True,
            client_options={"allow_http": True},
        )

    def put(self, key: str, head: bytes, body: memoryview) -> None:
        sizes = {"chunk_size": PART_NBYTES, "max_concurrency": 8}
        # of one large piece it would send all parts at once
        self._obstore.put(self._bucket, f"{self._prefix}/{key}", iter([head, *_pieces(body)]), **sizes)

    def get_into(self, key: str, offset: int, view: memoryview) -> None:
        path = f"{self._prefix}/{key}"
        view[:] = memoryview(self._obstore.get_range(self._bucket, path, start=offset, length=view.nbytes))


def _pieces(body: memoryview) -> list[memoryview]:
    return [body[at : at + WRITE_BYTES] for at in range(0, body.nbytes, WRITE_BYTES)]


CLIENTS: dict[str, Callable[[str, Mapping[str, Any]], Client]] = {
    "ckptlib, s3": _Ckptlib,
    "ckptlib, obstore": _CkptlibObstore,
    "ckptlib, fsspec": _Fsspec,
    "obstore, bare": _Obstore,
}


def main(arguments: list[str]) -> None:
    run(arguments, "object_store", measure, gb=0.5)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    sys.path.append(str(ROOT / "tests"))
    from helpers.servers import start_seaweedfs

    nbytes = (17 << 20) if options.toy else int(options.gb * 1e9)
    with start_seaweedfs(directory) as storage, _slowed(storage.endpoint, directory) as slow_endpoint:
        for number in range(1 if options.toy else options.rounds):
            for case, endpoint in ((LOOPBACK, storage.endpoint), (SLOW, slow_endpoint)):
                for client in rotated(list(CLIENTS), number):
                    given = {
                        "client": client,
                        "url": storage.url(),
                        "options": storage.options(endpoint),
                        "nbytes": nbytes if case == LOOPBACK else min(nbytes, 256 << 20),
                    }
                    for line in figures.attempt(case, client, __name__, 1, given, options.timeout_s):
                        figures.add(case, client, line["what"], line["unit"], [line["value"]])


@contextmanager
def _slowed(endpoint: str, directory: Path) -> Iterator[str]:
    """The same server behind a proxy, which is a process of its own."""
    rules = directory / "rules.json"
    rules.write_text(
        json.dumps([{"fault": "bandwidth", "bandwidth": BANDWIDTH}, {"fault": "latency", "seconds": LATENCY_S}])
    )
    command = [sys.executable, "-m", "ckptlib.stores.fault_proxy", "--upstream", endpoint, "--rules", str(rules)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as proxy:
        assert proxy.stdout
        try:
            yield proxy.stdout.readline().strip()
        finally:
            proxy.terminate()


def work() -> None:
    given = told()
    client = CLIENTS[given["client"]](given["url"], given["options"])
    client.put("first", b"h" * HEAD_NBYTES, memoryview(b"x"))  # connects, and what else a first request costs
    source = np.random.default_rng(0).integers(0, 256, given["nbytes"], dtype=np.uint8)
    target = np.zeros_like(source)

    def read(start: int) -> None:
        client.get_into("object", HEAD_NBYTES + start, memoryview(target)[start : start + RUN_BYTES])

    _timed("up", given["nbytes"], lambda: client.put("object", b"h" * HEAD_NBYTES, memoryview(source)))
    with ThreadPoolExecutor(THREADS) as threads:
        _timed("down", given["nbytes"], lambda: list(threads.map(read, range(0, given["nbytes"], RUN_BYTES))))
    assert np.array_equal(source, target), "other bytes came back"


def _timed(direction: str, nbytes: int, call: Callable[[], object]) -> None:
    began, cpu = time.perf_counter(), time.process_time()
    call()
    tell(what=direction, unit="MB/s", value=nbytes / 1e6 / (time.perf_counter() - began))
    tell(what=f"CPU {direction}", unit="s/GB", value=(time.process_time() - cpu) * 1e9 / nbytes)


if __name__ == "__main__":
    work()
