"""How large the parts of an object are: what S3 takes, what costs little, and what is held in memory meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from importlib import import_module

import pytest
from helpers.s3_bucket import PART_NBYTES, Bucket, bucket_of, scale_limits
from helpers.servers import ObjectStorage
from typing_extensions import Buffer

from ckptlib.errors import StoreError
from ckptlib.stores import Counted, InPlace, LateHead, io_limits, open_store, s3_upload
from ckptlib.stores.parts import part_nbytes

MIB = 1 << 20
HEAD = b"h" * 4096


def of(nbytes: int) -> int:
    return part_nbytes(nbytes, 16 * MIB, 64 * MIB, 128, 10_000)


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (1, 16),
        (10**9, 16),
        (128 * 16 * MIB, 16),
        (128 * 16 * MIB + 1, 17),
        (4 << 30, 32),
        (8 << 30, 64),
        (50 << 30, 64),
    ],
)
def test_parts_grow_with_the_object(nbytes: int, expected: int) -> None:
    assert of(nbytes) == expected * MIB


@pytest.mark.parametrize("nbytes", [160 * 10**9, 640 << 30, (640 << 30) + 1, 5 << 40])
def test_no_object_has_more_parts_than_s3_takes(nbytes: int) -> None:
    assert of(nbytes) * 10_000 >= nbytes
    assert (of(nbytes) - MIB) * 10_000 < nbytes or of(nbytes) == 64 * MIB, "no larger than it must be"


@pytest.mark.parametrize("client", ["s3", "obstore"])
def test_the_limits_of_a_job_are_those_of_s3(client: str) -> None:
    """Objects whose size is not known are cut before they have too many parts, and no part is too small or large."""
    pack_nbytes = import_module(f"ckptlib.stores.{client}").PACK_NBYTES
    assert pack_nbytes + 10**9 < s3_upload.MOST_PARTS * io_limits.PART_NBYTES
    assert 5 * MIB <= io_limits.PART_NBYTES <= io_limits.LARGE_PART_NBYTES <= 5 << 30


@pytest.fixture
def bucket(s3: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    scale_limits(monkeypatch)
    monkeypatch.setattr(io_limits, "EVEN_PARTS", 4)
    monkeypatch.setattr(io_limits, "LARGE_PART_NBYTES", 6 * MIB)
    monkeypatch.setattr(s3_upload, "MOST_PARTS", 6)
    with bucket_of(s3) as bucket:
        yield bucket


def put(bucket: Bucket, data: bytes, in_place: bool, counted: bool = False) -> list[int]:
    """The sizes of the parts."""
    before = len(bucket.requests())
    pieces: Iterable[Buffer] = (memoryview(data)[at : at + MIB] for at in range(0, len(data), MIB))
    if in_place or counted:
        pieces = InPlace(len(data), pieces) if in_place else Counted(len(data), pieces)
    bucket.store.put("p", LateHead(len(HEAD), lambda: HEAD), pieces)
    assert bucket.bytes_of("p") == HEAD + data
    assert bucket.uploads() == []
    sent = {r.path: r.nbytes_up for r in bucket.requests()[before:] if r.op == "UploadPart" and r.status == 200}
    return sorted(sent.values(), reverse=True)  # each part once: a busy machine may have one sent again


@pytest.mark.parametrize(("nbytes", "part"), [(4 * PART_NBYTES - len(HEAD), 5), (22 * MIB, 6), (33 * MIB, 7)])
def test_what_lies_in_memory_is_sent_in_larger_parts_of_one_size(bucket: Bucket, nbytes: int, part: int) -> None:
    *whole, last = put(bucket, os.urandom(nbytes), in_place=True)
    assert {*whole} == {part * MIB}
    assert sum([*whole, last]) == nbytes + len(HEAD)


@pytest.mark.parametrize(("nbytes", "part"), [(22 * MIB, 5), (33 * MIB, 7)])
def test_what_is_held_for_it_is_sent_in_larger_ones_where_there_would_be_too_many(
    bucket: Bucket, nbytes: int, part: int
) -> None:
    """As a pack that is copied from a disk, where one may have a terabyte."""
    assert {*put(bucket, os.urandom(nbytes), in_place=False, counted=True)[:-1]} == {part * MIB}


def test_what_is_held_for_it_is_sent_in_small_ones_and_refused_where_these_are_too_many(bucket: Bucket) -> None:
    assert {*put(bucket, os.urandom(22 * MIB), in_place=False)[:-1]} == {PART_NBYTES}
    with pytest.raises(StoreError, match=r"/p: cannot put \d+ bytes and more in 6 parts, the most that S3 takes"):
        put(bucket, bytes(33 * MIB), in_place=False)
    assert bucket.uploads() == []


@pytest.mark.parametrize(("nbytes", "part"), [(22 * MIB, 5), (33 * MIB, 7)])
def test_obstore_sends_larger_ones_where_there_would_be_too_many(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, nbytes: int, part: int
) -> None:
    monkeypatch.setattr("ckptlib.stores.obstore.MOST_PARTS", 5)
    options = {**bucket.storage.options(bucket.proxy.url), "client": "obstore"}
    before, data = len(bucket.requests()), os.urandom(nbytes)
    with open_store(bucket.url, options) as store:
        store.put("p", HEAD, Counted(len(data), (memoryview(data)[at : at + MIB] for at in range(0, len(data), MIB))))
    assert bucket.bytes_of("p") == HEAD + data
    sent = {r.path: r.nbytes_up for r in bucket.requests()[before:] if r.op == "UploadPart" and r.status == 200}
    assert {*sorted(sent.values())[1:]} == {part * MIB}
