"""What does a save to a bucket cost the training beside it, and how much memory does it take? Job by job, in turns.

One rank trains with one thread. Blocks of steps without saves come before and behind saves; steps during which one goes
up are told apart. A step is a short piece of AdamW and then a wait, as for a device: the CPU is left to the upload, so
that what is seen is what the save does to the training, and not that machines of tests have few cores. With "all CPU"
the rest of a step is computed as well: then everything on the machine slows it down, the test's server included, so the
same bytes are uploaded by a process that has nothing to do with the job, for comparison. With a "slow link" each
connection has 1 MB/s: one upload lasts for a hundred steps, so that the call that begins it counts for little.

Memory is anonymous memory (RssAnon), the most of many samples: of ckptlib's writer beyond what it had before the first
save; of others the trainer's, where they upload from, beyond the same. Slots are shared memory and not in it; a copy of
the state that a peer makes is. The server is SeaweedFS on loopback.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckptlib
from benchmarks.common import ROOT, tell, told
from benchmarks.figures import Figures, Options, rotated, run
from benchmarks.memory import children
from benchmarks.slowdown import Training
from ckptlib.testing import FaultProxy

STEP_S = 0.25
STEPS_PER_BLOCK = 15
SAVES = 3
SAMPLE_S = 0.01
FIRST = 2
"""Saves that are not timed: slots, plans, connections and copies are made."""

LONGEST_S = 300.0
WAITING, COMPUTING, LONG = "waits for a device", "all CPU", "waits for a device, slow link"
CASES = (WAITING, COMPUTING, LONG)
SLOW = {"fault": "bandwidth", "bandwidth": 1e6, "match": "^(PutObject|UploadPart) "}
OUTSIDE = "obstore bare, from outside the job"
ENCODED = "planes"

Saved = Callable[[], bool]
"""Whether what was begun is durable."""


class Saver:
    """One way to save to a bucket from a job."""

    def __init__(self, training: Training, given: dict[str, Any]) -> None:
        self.training, self.given = training, given
        self.url, self.options = str(given["url"]), dict(given["options"])

    def begin(self, step: int) -> Saved:
        raise NotImplementedError

    def uploads_from(self) -> int:
        """The process that sends."""
        return os.getpid()

    def close(self) -> None: ...


class Ckptlib(Saver):
    client, codec = "s3fs", "raw"

    def __init__(self, training: Training, given: dict[str, Any]) -> None:
        super().__init__(training, given)
        state = {"model": training.model, "optim": training.optimizer}
        options = {**self.options, "client": self.client}
        self._saver = ckptlib.Checkpointer(self.url, state, every=10**9, codec=self.codec, storage_options=options)

    def begin(self, step: int) -> Saved:
        return self._saver.save(step).done

    def uploads_from(self) -> int:
        until = time.monotonic() + LONGEST_S  # on a busy machine its command line is another for a while
        while not (found := children("ckptlib.writer")) and time.monotonic() < until:
            time.sleep(0.1)
        return found[0]

    def close(self) -> None:
        self._saver.close()


class CkptlibObstore(Ckptlib):
    client = "obstore"


class CkptlibEncoded(Ckptlib):
    codec = ENCODED


class CkptlibObstoreEncoded(CkptlibObstore):
    codec = ENCODED


class DcpFsspec(Saver):
    """`async_save` through DCP's own writer for fsspec, on s3fs."""

    def writer(self, url: str) -> Any:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        return FsspecWriter(url, **self.options)

    def begin(self, step: int) -> Saved:
        import torch.distributed.checkpoint as dcp

        future = dcp.async_save(self.training.flat(), storage_writer=self.writer(f"{self.url}/step-{step}"))

        def saved() -> bool:
            if future.done():  # type: ignore[union-attr]
                future.result()  # type: ignore[union-attr]
                return True
            return False

        return saved


class S3TorchConnector(DcpFsspec):
    """`async_save` through Amazon's connector for DCP."""

    def writer(self, url: str) -> Any:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client
        from s3torchconnector.dcp import S3StorageWriter
        from s3torchconnector.dcp.s3_file_system import S3FileSystem

        os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = (
            self.options["key"],
            self.options["secret"],
        )
        region, config = "us-east-1", S3ClientConfig(force_path_style=True)
        found = S3StorageWriter(region, f"{url}/", s3client_config=config)
        client = S3Client(region, endpoint=self.options["endpoint_url"], s3client_config=config)
        found.fs = S3FileSystem(region, s3_client=client)
        return found


class TorchSnapshot(Saver):
    """`Snapshot.async_take`; its plugin for S3 takes all it needs from the environment."""

    def begin(self, step: int) -> Saved:
        from torchsnapshot import Snapshot, StateDict

        names = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_ENDPOINT_URL": "endpoint_url"}
        os.environ.update({name: str(self.options[option]) for name, option in names.items()})
        os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
        pending = Snapshot.async_take(f"{self.url}/step-{step}", {"all": StateDict(**self.training.flat())})

        def saved() -> bool:
            if pending.done():
                pending.wait()
                return True
            return False

        return saved


class Outside(Saver):
    """As many bytes, sent by another process."""

    def __init__(self, training: Training, given: dict[str, Any]) -> None:
        super().__init__(training, given)
        command = [sys.executable, "-m", "benchmarks.bucket_upload", self.url, str(given["nbytes"])]
        environment = {**os.environ, "BUCKET_UPLOAD": f"{self.options['endpoint_url']} {self.options['key']}"}
        environment["BUCKET_SECRET"] = str(self.options["secret"])
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout
        self._process.stdout.readline()

    def begin(self, step: int) -> Saved:
        over = threading.Event()
        assert self._process.stdin
        self._process.stdin.write(f"{step}\n")
        self._process.stdin.flush()

        def wait() -> None:
            assert self._process.stdout
            self._process.stdout.readline()
            over.set()

        threading.Thread(target=wait, daemon=True).start()
        return over.is_set

    def uploads_from(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


SAVERS: dict[str, type[Saver]] = {
    "ckptlib, s3fs": Ckptlib,
    "ckptlib, obstore": CkptlibObstore,
    "ckptlib, s3fs, encoded": CkptlibEncoded,
    "ckptlib, obstore, encoded": CkptlibObstoreEncoded,
    "DCP async thread, fsspec": DcpFsspec,
    "DCP async thread, s3torchconnector": S3TorchConnector,
    "torchsnapshot": TorchSnapshot,
    OUTSIDE: Outside,
}


def main(arguments: list[str]) -> None:
    run(arguments, "bucket_job", measure, gb=0.1)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    sys.path.append(str(ROOT / "tests"))
    from helpers.servers import start_seaweedfs

    nbytes = 30_000_000 if options.toy else int(options.gb * 1e9)
    cases = CASES[:1] if options.toy else CASES
    subjects = list(SAVERS)[:1] if options.toy else list(SAVERS)
    with start_seaweedfs(directory) as storage, FaultProxy(storage.endpoint, [SLOW]) as slow:
        for number in range(1 if options.toy else options.rounds):
            for case in cases:
                for subject in rotated(subjects, number):
                    given = {
                        "subject": subject,
                        "url": storage.url(),
                        "options": storage.options(slow.url) if case == LONG else storage.options(),
                        "nbytes": nbytes,
                        "computes": case == COMPUTING,
                        "saves": 1 if case == LONG else SAVES,
                        "step_s": 0.05 if options.toy else STEP_S,
                    }
                    for line in figures.attempt(case, subject, __name__, 1, given, options.timeout_s):
                        figures.add(case, subject, line["what"], line["unit"], line["samples"], nbytes=nbytes)


# In the rank


def work() -> None:
    given = told()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step_s = float(given["step_s"])
    training = Training(int(given["nbytes"]), step_s if given["computes"] else 0.0)

    def step() -> None:
        until = time.perf_counter() + step_s
        training.step()
        if not given["computes"]:
            time.sleep(max(0.0, until - time.perf_counter()))

    saver = SAVERS[given["subject"]](training, given)
    pid = saver.uploads_from()
    before, beside, later = _anonymous(pid), list[float](), list[float]()
    began_s, durable_s = list[float](), list[float]()
    with _most(pid) as most:
        for number in range(1, 1 + FIRST):
            _until(saver.begin(number), step)
        without = _block(step)
        for number in range(1 + FIRST, 1 + FIRST + int(given["saves"])):
            first = time.perf_counter()
            saved = saver.begin(number)
            began_s.append(time.perf_counter() - first)
            times = _until(saved, step)
            durable_s.append(time.perf_counter() - first)
            later += times[1:]
            times[0] += began_s[-1]
            beside += times
    without += _block(step)
    saver.close()
    _tell("step without saves", "s", without)
    _tell("step beside an upload", "s", beside)
    _tell("beside / without", "1", [sum(beside) / len(beside) / (sum(without) / len(without))])
    if later:
        _tell("beside, but for first steps / without", "1", [sum(later) / len(later) / (sum(without) / len(without))])
    _tell("call that begins a save", "s", began_s)
    _tell("until durable", "s", durable_s)
    _tell("anonymous memory of who uploads, above idle", "MiB", [(most[0] - before) / (1 << 20)])
    dist.destroy_process_group()


def _until(saved: Saved, step: Callable[[], None]) -> list[float]:
    """Steps until it is durable: seconds of each."""
    times: list[float] = []
    while not times or not saved():
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
        assert sum(times) < LONGEST_S, "it does not become durable"
    return times


def _block(step: Callable[[], None]) -> list[float]:
    times = []
    for _ in range(STEPS_PER_BLOCK):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return times


def _anonymous(pid: int) -> int:
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return next(int(words[1]) << 10 for words in lines if words[0] == "RssAnon:")


@contextmanager
def _most(pid: int) -> Iterator[list[int]]:
    """The most anonymous memory that the process had within, in bytes."""
    most, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(SAMPLE_S):
            most[0] = max(most[0], _anonymous(pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


def _tell(what: str, unit: str, samples: list[float]) -> None:
    tell(what=what, unit=unit, samples=samples)


if __name__ == "__main__":
    work()
