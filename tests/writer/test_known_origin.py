"""What a trainer tells its writer of the step that it restored comes as it went."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from helpers.actors import no_chance
from helpers.small_job import SmallJob

from ckptlib.errors import CorruptData, FormatError
from ckptlib.writer.known_origin import KnownOrigin


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
