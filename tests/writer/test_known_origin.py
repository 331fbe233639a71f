"""What a trainer tells its writer of the step that it restored comes as it went."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.actors import no_chance
from helpers.small_job import SmallJob
from helpers.writers import Bench
from support import ROOT_ID

from ckptlib.errors import CorruptData, FormatError
from ckptlib.format.keys import GenerationId
from ckptlib.format.manifest import Generation
from ckptlib.format.part import Part
from ckptlib.writer.begin_order import BeginOrder
from ckptlib.writer.channel import Channel
from ckptlib.writer.known_origin import KnownOrigin, Lent, borrowed, lend


@pytest.fixture(scope="module")
def known() -> KnownOrigin:
    with no_chance():
        job = SmallJob(world_size=2)
        return job.known(job.save_and_commit(), 1)


def test_through_the_channel(known: KnownOrigin) -> None:
    for one in (known, replace(known, manifest=None), replace(known, part=None, accounted=True)):
        assert KnownOrigin.of_message(json.loads(json.dumps(one.to_message()))) == one


def test_the_manifest_is_the_one_of_the_step(known: KnownOrigin) -> None:
    manifest = known.decoded_manifest()
    assert manifest is not None
    assert known.part is not None
    assert (manifest.save, manifest.parts[1]) == (known.save, known.part.name)
    assert replace(known, manifest=None).decoded_manifest() is None
    assert known.manifest is not None
    with pytest.raises(CorruptData):
        replace(known, manifest=known.manifest.replace(b'"world_size":2', b'"world_size":3')).decoded_manifest()


def test_a_name_that_is_none(known: KnownOrigin) -> None:
    with pytest.raises(FormatError, match="is no part"):
        KnownOrigin.of_message({**known.to_message(), "part": ["parts/x", "{}"]})


def test_lent_and_taken_back(known: KnownOrigin) -> None:
    with closing(Lent(known)) as lent:
        assert borrowed(lent.path) == known
        command = "import sys; from ckptlib.writer.known_origin import borrowed; print(borrowed(sys.argv[1]).save)"
        done = subprocess.run([sys.executable, "-c", command, lent.path], capture_output=True, text=True, check=True)
        assert done.stdout == f"{known.save}\n", "by another process"
    assert borrowed(lent.path) is None
    assert borrowed(None) is None


def test_it_is_taken_back_where_the_record_is_ordered_again(bench: Bench, known: KnownOrigin) -> None:
    """The store did not take it at first; the second order says nothing of the step."""
    writer = bench.writer()
    record = Generation(GenerationId(2, "00000002"), 1, None, 0.0, {}, "here")
    writer.begin(BeginOrder(record, ROOT_ID, 3), known)
    writer.begin(BeginOrder(record, ROOT_ID, 3))
    fds = (os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
    lent = [fd for fd in fds if "memfd:ckptlib-known" in os.path.realpath(fd)]
    assert len(lent) == 1
    writer.leave()
    assert not os.path.exists(lent[0]) or "memfd:ckptlib-known" not in os.path.realpath(lent[0])


def test_without_a_file_to_lend_it_in(known: KnownOrigin, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        lent = lend(known)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert lent is None, "the training does not end for it"
    assert "Too many open files" in caplog.text


def test_one_that_is_torn(tmp_path: Path, known: KnownOrigin) -> None:
    text = json.dumps(known.to_message())
    for n, torn in enumerate(("", text[: len(text) // 2], "[]", "{}", text.replace("packs/", "parts/"))):
        (tmp_path / str(n)).write_text(torn)
    assert [borrowed(str(tmp_path / str(n))) for n in range(4)] == [None] * 4
    other = borrowed(str(tmp_path / "4"))
    assert other is not None
    assert other.part is not None
    assert known.part is not None
    with pytest.raises(CorruptData):
        Part.decode(other.part.name, other.part.document)


def test_a_large_one_holds_nobody_up(known: KnownOrigin) -> None:
    """A writer that reads nothing: what the trainer tells it is no more than a socket takes."""
    assert known.part is not None
    large = replace(known, part=replace(known.part, document=b" " * (8 << 20)))
    ours, theirs = socket.socketpair()
    with closing(Lent(large)) as lent, ours, theirs:
        Channel(ours).send({"op": "begin", "known": lent.path})
        (told,) = Channel(theirs).receive(150)
        assert borrowed(told["known"]) == large
