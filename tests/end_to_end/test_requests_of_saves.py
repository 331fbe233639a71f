"""The budget of a checkpoint in an object store: ranks x (parts of its upload + 4) + 14 requests, whoever waits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
from helpers.servers import ObjectStorage
from launch import fork_ranks

import ckptlib
from ckptlib.testing import FaultProxy

slow = pytest.mark.slow

PARTS = 1
"""Of each rank's pack, which is small."""


def requests(directory: Path) -> dict[object, Counter[str]]:
    """By save: what the store was asked, by operation and room. Pieces of an object are no requests of their own."""
    found: dict[object, Counter[str]] = defaultdict(Counter)
    at: object = "open"
    for line in (directory / "plan.json.log").read_text().splitlines():
        entry = json.loads(line)
        at = entry.get("mark", at)
        if entry.get("op", "write") != "write":
            found[at][f"{entry['op']} {entry['key'].partition('/')[0]}"] += 1
    return found


@pytest.mark.parametrize(
    ("num_ranks", "waits"),
    [
        (2, "all"),
        (4, "all"),
        (4, "nobody"),
        *(pytest.param(n, "last", marks=slow) for n in (2, 4)),
        pytest.param(2, "nobody", marks=slow),
    ],
)
def test_requests_per_checkpoint(tmp_path: Path, num_ranks: int, waits: str) -> None:
    fork_ranks("counted_saves.py", num_ranks, tmp_path, waits, "own", timeout_s=120)
    found = requests(tmp_path)
    assert found.keys() >= {1, 2, 3, 4, 5}
    for step in (2, 3, 4, 5):
        asked = found[step]
        assert sum(asked.values()) <= num_ranks * (PARTS + 4) + 14, asked
        assert asked["commit packs"] == asked["put parts"] == num_ranks, "all of them wrote"
        assert asked["put steps"] == 1
        assert asked["get parts"] in (1, 2, 3), "of rank 0, and a byte of it once the manifest, and the mark, are there"
    first = found[1]
    assert without_polls(first) <= num_ranks * (PARTS + 4) + 14 - 1, first
    assert first["scan generations"] == 2, "as the record is put, whether another job has begun; and the committer"
    assert (first["get layouts"], first["put layouts"]) == (2, 1), (
        "one rank asks and puts, rank 0's writer reads it back"
    )
    assert first["get parts"] in (num_ranks, num_ranks + 1), "all of them, to prove that nothing is missing"


@pytest.mark.parametrize(
    ("num_ranks", "kind"),
    [(4, "own"), (2, "replicated"), pytest.param(2, "own", marks=slow), pytest.param(4, "replicated", marks=slow)],
)
def test_requests_of_the_first_save_behind_a_restore(tmp_path: Path, num_ranks: int, kind: str) -> None:
    for _ in range(2):
        fork_ranks("counted_saves.py", num_ranks, tmp_path, "all", kind, timeout_s=150)
    found = requests(tmp_path)
    first = found[6]
    assert without_polls(first) <= num_ranks * (PARTS + 4) + 14 - 1, first
    assert first["get parts"] in (num_ranks, num_ranks + 1), "all of them, to prove that nothing is missing"
    assert first["get layouts"] == 1, "by the one who would put it; the committer is in the same process"
    assert first["scan steps"] == num_ranks + 1, (
        "each rank, whether its parent is committed; as the record is put, whether newer ones are there"
    )
    assert not first["scan packs"], "they were read, or listed, as the job restored"
    assert without_polls(found[7]) == without_polls(found[5]), "from then on the job saves as before"
    sizes = {step: packs_of(tmp_path, step) for step in (1, 5, 6, 7)}
    assert sizes[5] == sizes[6] == sizes[7] < sizes[1] / 2, "what has not changed is not sent again"


def packs_of(directory: Path, step: int) -> int:
    """Bytes that were put for a save."""
    return sum(pack.stat().st_size for pack in (directory / "root" / "packs").glob(f"{step:012d}-*/*"))


def without_polls(asked: Counter[str]) -> int:
    """All but what is asked again since a rank was not ready: how often says how busy the machine is."""
    return sum(asked.values()) - sum(max(asked[what] - 1, 0) for what in ("scan parts", "get steps", "get trash"))


LATEST = """
import json, sys
from ckptlib.catalog.catalog import Catalog
from ckptlib.stores import open_store
url, options = json.loads(sys.argv[1])
print(Catalog(open_store(url, options)).resolve("latest").step)
"""
OPEN = """
import json, sys
import ckptlib
url, options = json.loads(sys.argv[1])
with ckptlib.open(url, framework="numpy", storage_options=options) as step:
    print(step.step)
"""


THREE = ["ListObjects steps", "ListObjects generations", "GetObject generations"]


@pytest.mark.parametrize("client", ["s3fs", pytest.param("obstore", marks=pytest.mark.slow)])
def test_requests_for_the_newest_step_in_a_new_process(s3: ObjectStorage, client: str) -> None:
    """On the wire, behind two restarts."""
    if client == "obstore":
        pytest.importorskip("obstore")
    url = s3.url()
    for step in (1, 2):
        with ckptlib.Checkpointer(url, {"w": torch.ones(9)}, every=1, storage_options=s3.options()) as ckpt:
            ckpt.restore()
            ckpt.save(step)
    with FaultProxy(s3.endpoint) as proxy:
        given, num_before = json.dumps([url, {**s3.options(proxy.url), "client": client}]), 0
        for script, more in ((LATEST, []), (OPEN, ["GetObject steps", "GetObject layouts", "GetObject parts"])):
            done = subprocess.run([sys.executable, "-c", script, given], capture_output=True, text=True, timeout=120)
            assert done.stdout == "2\n", done.stderr
            seen = [f"{request.op} {room_of(request.path)}" for request in proxy.requests[num_before:]]
            assert sorted(seen) == sorted([*THREE, *more])
            num_before += len(seen)


def test_a_start_that_resumes_lists_the_steps_three_times(s3: ObjectStorage) -> None:
    """As it opens the root, as it looks for saves that nobody has committed, and behind that. A bucket of thousands of
    steps takes many requests for each."""
    url = s3.url()
    for step in (1, 2):
        with ckptlib.Checkpointer(url, {"w": torch.ones(9)}, every=1, storage_options=s3.options()) as ckpt:
            ckpt.save(step)
    with (
        FaultProxy(s3.endpoint) as proxy,
        ckptlib.Checkpointer(url, {"w": torch.ones(9)}, every=1, storage_options=s3.options(proxy.url)) as ckpt,
    ):
        assert ckpt.restore().step == 2
        listed = [request for request in proxy.requests if request.op == "ListObjects" and "steps" in request.path]
        assert len(listed) == 3


def room_of(path: str) -> str:
    (room,) = (room for room in ("steps", "generations", "layouts", "parts", "ckptlib.json") if room in path)
    return room
