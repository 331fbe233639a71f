"""Faults, each met with a clear error within its time-out, and with the steps before it untouched.

Full disks and memories, ranks that are gone or never come, damaged objects and slots, hostile documents, two jobs on
one root. Real files and real processes throughout.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from support import of_version, resealed
from workers import crash_jobs
from workers.crash_bench import Bench
from workers.crash_jobs import Job, come_alone, run, start, train, train_without_memory, try_restore, try_roots
from workers.crash_oracle import failed_parts, read_document, read_root, slots_of

from ckptlib.stores.testing import flip_bit, truncate

root_only = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts a small tmpfs"),
]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    crash_jobs.end_all(bench.root)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1.5 MB; a step takes 340 kB."""
    path = tmp_path / "small"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", path], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr}")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def outcomes(job: Job) -> list[dict[str, Any]]:
    return [line for line in job.told() if line["what"] in ("committed", "failed")]


# -- no room


class TestNoRoom:
    pytestmark = root_only

    def test_full_disk(self, tmp_path: Path, small_disk: Path) -> None:
        bench = Bench(tmp_path, small_disk / "root")
        (job,) = bench.start()
        step = 0
        while not outcomes(job) or outcomes(job)[-1]["what"] == "committed":
            step += 1
            assert step < 10, "1.5 MB hold no ten steps"
            bench.open(step, "settle")
            job.wait_for("waiting", step + 1)
        failure = outcomes(job)[-1]
        assert failure["kind"] == "SaveFailed"
        assert re.search(r"No space left on device .* bytes are free on its file system; make room", failure["text"])
        assert bench.listed() == [*range(1, step)]
        assert len(bench.listed()) >= 2
        subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
        bench.open(step + 1, "settle")
        job.wait_for("waiting", step + 2)
        assert outcomes(job)[-1] == {**outcomes(job)[-1], "what": "committed", "step": step + 1}
        bench.open(step + 2, "end")
        assert job.join() == 0
        job.join_writers()
        assert bench.listed() == [*range(1, step), step + 1]
        assert bench.go_on() == step + 1

    def test_arena_without_room(self, bench: Bench, small_disk: Path) -> None:
        (job,) = start(train, bench.directory, url=bench.url, numel=500_000, arena=str(small_disk))
        assert job.join() == 1
        error = job.told()[-1]
        assert (error["what"], error["kind"]) == ("error", "NoRoom")
        assert f"{small_disk} has no room for a slot of" in error["text"]
        assert "give another directory: arena=" in error["text"]
        job.join_writers()
        assert [path.name for path in small_disk.iterdir()] == []
        assert bench.listed() == []
        bench.go_on()

    def test_full_memory_falls_back_to_a_file(self, bench: Bench) -> None:
        (job,) = start(train_without_memory, bench.directory, url=bench.url)
        assert job.join() == 0, job.told()
        assert [line["what"] for line in job.told()] == ["restored", *["saving", "committed"] * 2, "closed"]
        assert "/dev/shm has no room for a slot of" in job.log()
        assert "using a file in /tmp, which is slower" in job.log()
        job.join_writers()
        assert bench.listed() == [1, 2]
        assert slots_of(bench.root) == []


# -- ranks


def test_a_rank_that_dies_in_a_save_fails_it_within_the_deadline(bench: Bench) -> None:
    bench.go_on(size=2)
    bench.root.joinpath("ckptlib.json").unlink()  # made anew, with the deadline of the next job
    jobs = bench.start(2, save_deadline=3)
    for job in jobs:
        job.wait_for("waiting")
    bench.fault({"op": "put", "key": "^parts/.*/000001-", "action": "kill-before"})
    bench.open(2, "settle")
    bench.wait_for_fault(1)
    jobs[1].kill()
    failure = jobs[0].wait_for("failed")
    assert failure["kind"] == "SaveFailed"
    assert "no part came from 1 of 2 ranks: 1" in failure["text"]
    jobs[0].kill()
    for job in jobs:
        job.join()
        job.join_writers()
    assert bench.listed() == [1]
    bench.fault()
    assert bench.go_on(size=2) == 1


def test_a_rank_whose_writer_keeps_dying_says_so_and_nobody_waits_for_it(bench: Bench) -> None:
    jobs = bench.start(2)
    for job in jobs:
        job.wait_for("waiting")
    bench.fault({"op": "put", "key": "^parts/.*/000001-.*-ok-", "action": "kill-before"})
    bench.open(1, "settle")
    for job in jobs:
        failure = job.wait_for("failed")
        assert failure["kind"] == "SaveFailed"
        assert "the writer process died 3 times in a row" in failure["text"]
    assert bench.listed() == []
    bench.fault()
    bench.open(2, "settle")
    for job in jobs:
        job.wait_for("committed")
    bench.open(3, "end")
    assert [job.join() for job in jobs] == [0, 0]
    assert bench.listed() == [2]
    assert "died 3 times in a row" in failed_parts(bench.root)[0]


@pytest.mark.parametrize("how", ["Checkpointer", "save"])
def test_a_rank_that_never_comes(bench: Bench, how: str) -> None:
    jobs = start(come_alone, bench.directory, 2, url=bench.url, how=how, gate=str(bench.gates / "gate"))
    refused = jobs[0].wait_for("refused")
    assert refused["seconds"] < 20, "the time-out was 2 s"
    for job in jobs:
        job.join()
        job.join_writers()
    assert read_root(bench.root) == []


# -- a snapshot that is damaged in memory


def test_a_slot_that_changed_is_not_persisted(bench: Bench) -> None:
    """While the writer is stopped, each kind of byte of a ready slot is flipped."""
    (job,) = bench.start()
    places: dict[str, Callable[[bytes], int]] = {
        "body": lambda slot: 4096,
        "header": lambda slot: slot.index(b'"rank"') + 8,
        "layout": lambda slot: slot.index(b'"kind":"layout"') + 100,
        "table": lambda slot: slot.rindex(b'"chunks":{"pack"') + 40,
        "snapshot": lambda slot: slot.rindex(b'"digests":"') + 15,
    }
    step = 1
    for what, find in places.items():
        waiting = job.wait_for("waiting", step)
        os.kill(waiting["writer"], signal.SIGSTOP)
        bench.open(step, "settle")
        job.wait_for("staged", step)
        (slot,) = [
            path for path in slots_of(bench.root) if f'"save":"{step:012d}-'.encode() in path.read_bytes()[:4096]
        ]
        flip_bit(slot, find(slot.read_bytes()))
        os.kill(waiting["writer"], signal.SIGCONT)
        job.wait_for("waiting", step + 1)
        failure = outcomes(job)[-1]
        assert (failure["what"], failure["kind"]) == ("failed", "SaveFailed"), (what, failure)
        assert str(slot) in failure["text"]
        if what == "body":
            assert "changed in memory after it was sealed" in failure["text"]
            assert re.search(r"slot: \S+\[[0-9:, ]*\] at \[", failure["text"]), "names the tensor"
        bench.open(step + 1, "settle")
        job.wait_for("waiting", step + 2)
        assert outcomes(job)[-1]["what"] == "committed"
        assert bench.listed()[-1] == step + 1
        step += 2
    bench.open(step, "end")
    assert job.join() == 0
    assert bench.listed() == [2, 4, 6, 8, 10]


# -- objects that are damaged in the store

NEWEST = 3


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root of three steps, saved by two ranks."""
    directory = tmp_path_factory.mktemp("template")
    run(train, directory, 2, url=str(directory / "root"), steps=NEWEST)
    assert [step.number for step in read_root(directory / "root")] == [1, 2, NEWEST]
    return directory / "root"


def newest(root: Path, what: str) -> Path:
    """An object of the newest step."""
    if what == "root":
        return root / "ckptlib.json"
    if what == "generation":
        return next(root.glob("generations/*"))
    if what == "manifest":
        return next(root.glob(f"steps/{NEWEST:012d}-*"))
    if what == "layout":
        return root / "layouts" / f"{next(iter(read_document(newest(root, 'manifest'))['layouts']))}.json"
    kind, rank = what.split()
    return next(root.glob(f"{kind}s/{NEWEST:012d}-*/00000{rank}-*"))


def middle(path: Path) -> int:
    return path.stat().st_size // 2


def data_of(path: Path, entry: str | None = None) -> int:
    """The first byte behind the header of a pack, or the first one of an entry."""
    pack = path.read_bytes()
    start = 8 + int.from_bytes(pack[:8], "little")
    return start if entry is None else start + int(json.loads(pack[8:start])[entry]["data_offsets"][0])


Damage = Callable[[Path], None]


def replace(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink()
    make(path)


def bind(path: Path) -> None:
    """A socket: its address is short, whatever the path."""
    directory = os.open(path.parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"/proc/self/fd/{directory}/{path.name}")
    os.close(directory)


DAMAGES: dict[str, tuple[str, Damage, str]] = {
    f"{what.replace(' ', '')}-{how}": (what, damage, kinds)
    for what, hows in {
        "pack 0": {
            "first": (lambda p: flip_bit(p, data_of(p)), "CorruptData"),
            "cut": (lambda p: truncate(p, middle(p)), "FormatError"),
            "empty": (lambda p: truncate(p, 0), "FormatError"),
            "gone": (Path.unlink, "ObjectNotFound"),
            "fifo": (lambda p: replace(p, os.mkfifo), "ObjectNotFound"),
            "socket": (lambda p: replace(p, bind), "ObjectNotFound"),
            "directory": (lambda p: replace(p, os.mkdir), "ObjectNotFound"),
            "loop": (lambda p: replace(p, lambda path: os.symlink(path.name, path)), "ObjectNotFound"),
            "link": (lambda p: os.symlink(p.rename(f"{p}.moved").name, p), "ObjectNotFound"),
        },
        "pack 1": {
            "first": (lambda p: flip_bit(p, data_of(p)), "CorruptData"),
            "gone": (Path.unlink, "ObjectNotFound"),
        },
        "part 0": {
            "first": (lambda p: flip_bit(p, 0), "CorruptData"),
            "middle": (lambda p: flip_bit(p, middle(p)), "CorruptData"),
            "last": (lambda p: flip_bit(p, -1), "CorruptData"),
            "gone": (Path.unlink, "ObjectNotFound"),
        },
        "part 1": {
            "middle": (lambda p: flip_bit(p, middle(p)), "CorruptData"),
            "cut": (lambda p: truncate(p, middle(p)), "CorruptData"),
            "empty": (lambda p: truncate(p, 0), "CorruptData"),
            "gone": (Path.unlink, "ObjectNotFound"),
            "fifo": (lambda p: replace(p, os.mkfifo), "ObjectNotFound"),
        },
        "manifest": {
            "first": (lambda p: flip_bit(p, 0), "FormatError"),
            "middle": (lambda p: flip_bit(p, middle(p)), "CorruptData"),
            "last": (lambda p: flip_bit(p, -1), "CorruptData"),
            "cut": (lambda p: truncate(p, middle(p)), "CorruptData"),
            "empty": (lambda p: truncate(p, 0), "FormatError"),
        },
        "layout": {
            "first": (lambda p: flip_bit(p, 0), "CorruptData"),
            "middle": (lambda p: flip_bit(p, middle(p)), "CorruptData"),
            "cut": (lambda p: truncate(p, middle(p)), "CorruptData"),
            "gone": (Path.unlink, "ObjectNotFound"),
        },
    }.items()
    for how, (damage, kinds) in hows.items()
}


BY_BOTH = ("part1-middle", "pack1-first", "pack0-fifo", "manifest-middle", "layout-gone")


def try_all(directory: Path, roots: list[Path], size: int = 2) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """What ranks told of each root: "load" of the newest step, and "restore"; by root."""
    ranks = run(try_roots, directory, size, roots=[str(root) for root in roots], step=NEWEST)
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for told in ranks:
        for line in told:
            found.setdefault(line["root"], {}).setdefault(line["what"], []).append(line)
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_a_damaged_step_is_refused_by_name_and_skipped_by_all_ranks(tmp_path: Path, template: Path, size: int) -> None:
    objects = {}
    cases = [case for case in DAMAGES if size == 1 or case in BY_BOTH]
    for case in cases:
        what, damage, _ = DAMAGES[case]
        shutil.copytree(template, tmp_path / case)
        objects[case] = newest(tmp_path / case, what)
        damage(objects[case])
    told = try_all(tmp_path, [tmp_path / case for case in cases], size)
    for case in cases:
        kind = DAMAGES[case][2]
        assert (len(told[case]["load"]), len(told[case]["restore"])) == (size, size)
        for line in told[case]["load"]:
            assert line["kind"] == kind, line
            assert objects[case].name.split(".")[0] in line["text"], line
            if case.endswith("-first") and case.startswith("pack"):
                assert re.search(r"\w+\[[0-9:, ]*\]: packs/", line["text"]), "names the tensor"
        for line in told[case]["restore"]:
            assert (line["kind"], line["step"]) == ("", NEWEST - 1), line
            assert len(line["skipped"]) == 1
            assert f"{NEWEST:012d}" in line["skipped"][0]


def test_damage_that_one_rank_alone_has_seen(tmp_path: Path, template: Path) -> None:
    """Rank 1 alone reads the state of its random generators; both go back to the step before."""
    shutil.copytree(template, tmp_path / "own")
    pack = newest(tmp_path / "own", "pack 1")
    flip_bit(pack, data_of(pack, "@rng/torch@0"))
    told = try_all(tmp_path, [tmp_path / "own"])["own"]
    assert [line["kind"] for line in told["load"]] == ["", ""], "generators are not asked for"
    assert [line["step"] for line in told["restore"]] == [NEWEST - 1] * 2
    assert all("@rng/torch" in line["skipped"][0] for line in told["restore"])


def test_what_hurts_no_data_is_no_damage(tmp_path: Path, template: Path) -> None:
    """Rows and digests are the truth; a pack's own header is for people. And what can be made again is no loss."""

    def header(root: Path) -> None:
        flip_bit(newest(root, "pack 0"), 20)
        flip_bit(newest(root, "pack 1"), 2)

    cases: dict[str, Damage] = {
        "pack-header": header,
        "root-gone": lambda root: newest(root, "root").unlink(),
        "generation-gone": lambda root: newest(root, "generation").unlink(),
        "manifest-gone": lambda root: newest(root, "manifest").unlink(),  # all parts are there: it is committed again
    }
    for case, damage in cases.items():
        shutil.copytree(template, tmp_path / case)
        damage(tmp_path / case)
    told = try_all(tmp_path, [tmp_path / case for case in cases])
    for case in cases:
        expected = "CheckpointNotFound" if case == "manifest-gone" else ""
        assert [line["kind"] for line in told[case]["load"]] == [expected] * 2, told[case]
        assert [(line["kind"], line.get("step")) for line in told[case]["restore"]] == [("", NEWEST)] * 2, told[case]


def test_a_damaged_root_document_is_named(tmp_path: Path, template: Path) -> None:
    damages: dict[str, tuple[Damage, str]] = {
        "flip": (lambda p: flip_bit(p, middle(p)), "CorruptData"),
        "cut": (lambda p: truncate(p, middle(p)), "CorruptData"),
        "empty": (lambda p: truncate(p, 0), "FormatError"),
    }
    for case, (damage, _) in damages.items():
        shutil.copytree(template, tmp_path / case)
        damage(newest(tmp_path / case, "root"))
    told = try_all(tmp_path, [tmp_path / case for case in damages])
    for case, (_, kind) in damages.items():
        assert [line["kind"] for line in told[case]["load"]] == ["", ""], "a load writes nothing and needs no root"
        for line in told[case]["restore"]:
            assert line["kind"] == kind
            assert f"{tmp_path / case}/ckptlib.json" in line["text"]


def test_a_damaged_generation_record_hides_no_step(tmp_path: Path, template: Path) -> None:
    shutil.copytree(template, tmp_path / "flip")
    record = newest(tmp_path / "flip", "generation")
    flip_bit(record, middle(record))
    told = try_all(tmp_path, [tmp_path / "flip"], size=1)["flip"]
    assert told["restore"][0].get("step") == NEWEST


def test_every_step_damaged(tmp_path: Path, template: Path) -> None:
    """Then nothing is restored: never a fresh start over the ruins."""
    shutil.copytree(template, tmp_path / "all")
    for path in (tmp_path / "all").glob("packs/*/000001-*"):
        flip_bit(path, data_of(path))
    told = try_all(tmp_path, [tmp_path / "all"])["all"]
    for line in told["restore"]:
        assert line["kind"] == "CorruptData"
        assert "every step is damaged" in line["text"]


# -- objects that cannot be read


def behind(directory: Path, template: Path, name: str, *rules: dict[str, Any], rank: str = "") -> str:
    """The URL of a copy of the template that fails by these rules; where it has them by the rank that is given."""
    root, plans = directory / f"roots{name}", directory / f"plans{rank}"
    if not root.exists():
        shutil.copytree(template, root)
    plans.mkdir(exist_ok=True)
    (plans / name).write_text(json.dumps(rules))
    return f"fault+file://{root}?plan={plans}/{name}"


def unreadable(key: str, *ops: str) -> list[dict[str, Any]]:
    return [{"op": op, "key": key, "action": "unreadable"} for op in ops or ("get", "get_into")]


def test_a_step_that_cannot_be_read_is_skipped_by_all_ranks(tmp_path: Path, template: Path) -> None:
    """Rank 1 alone reads its pack; rank 0 alone the manifest."""
    cases = {
        "pack": f"^packs/{NEWEST:012d}-.*/000001-",
        "part": f"^parts/{NEWEST:012d}-.*/000001-",
        "manifest": f"^steps/{NEWEST:012d}-",
        "packs": "^packs/",
        "layouts": "^layouts/",
        "generations": "^generations/",
    }
    urls = {case: behind(tmp_path, template, case, *unreadable(key)) for case, key in cases.items()}
    ranks = run(try_roots, tmp_path, 2, roots=[*urls.values()], step=NEWEST)
    for told in ranks:
        for line in told:
            case = line["root"]
            if case == "generations":  # a history that ends with the head's own steps
                assert (line["kind"], line["step"]) == ("", NEWEST), line
            elif line["what"] == "load":
                assert line["kind"] == "ObjectUnreadable", line
            elif case in ("packs", "layouts"):
                assert line["kind"] == "ObjectUnreadable", line
                assert "no step can be read" in line["text"]
            else:
                assert (line["kind"], line["step"], len(line["skipped"])) == ("", NEWEST - 1, 1), line
                assert "cannot be read, as planned" in line["skipped"][0]


def test_a_step_whose_manifest_cannot_be_put_back_is_none(tmp_path: Path, template: Path) -> None:
    """Its parts are all there, but in its own place is something that is no object."""
    shutil.copytree(template, tmp_path / "fifo")
    replace(newest(tmp_path / "fifo", "manifest"), os.mkfifo)
    told = try_all(tmp_path, [tmp_path / "fifo"], size=1)["fifo"]
    assert [line["kind"] for line in told["load"]] == ["CheckpointNotFound"]
    assert [(line["kind"], line["step"]) for line in told["restore"]] == [("", NEWEST - 1)]


def test_a_store_that_one_rank_cannot_reach_is_no_reason_for_an_older_step(tmp_path: Path, template: Path) -> None:
    everything = unreadable("")
    plain = {"op": "get_into", "key": f"^packs/{NEWEST:012d}-", "action": "error"}
    for name, rules, kind in [("away", everything, "ObjectUnreadable"), ("slow", [plain], "StoreError")]:
        behind(tmp_path, template, name, rank="0")
        behind(tmp_path, template, name, *rules, rank="1")
        url = f"fault+file://{tmp_path}/roots{name}?plan={tmp_path}/plans{{rank}}/{name}"
        for told in run(try_restore, tmp_path, 2, url=url):
            (line,) = told
            assert line["kind"] == kind, line
            assert "no step" not in line["text"]


# -- documents that only malice or a bug writes; their digests are right


def put_part(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Replaces rank 0's part of the newest step, and has the manifest name the new one."""
    path, manifest = newest(root, "part 0"), newest(root, "manifest")
    body = read_document(path)
    change(body)
    document = resealed(path.read_bytes(), **body)
    stem = path.name.split("-")
    table = document[document.index(b'"table":') + 8 : document.rindex(b"}}\n")]
    stem[3] = xxhash.xxh3_128_hexdigest(json.dumps(json.loads(table), separators=(",", ":")).encode())
    stem[4] = xxhash.xxh3_128_hexdigest(document)  # the check behind it stays
    new = path.with_name("-".join(stem))
    path.unlink()
    new.write_bytes(document)
    parts = read_document(manifest)["parts"]
    manifest.write_bytes(resealed(manifest.read_bytes(), parts=[f"parts/{new.parent.name}/{new.name}", *parts[1:]]))


def rewrite_manifest(root: Path, **fields: Any) -> None:
    path = newest(root, "manifest")
    path.write_bytes(resealed(path.read_bytes(), **fields))


def climb(body: dict[str, Any]) -> None:
    body["packs"][0][0] = "packs/../../../../../../etc/passwd"


def huge(column: str, value: int) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        body["table"]["chunks"][column][0] = value
        body["packs"] = [[key, 2**62] for key, _ in body["packs"]]

    return change


def huge_box(body: dict[str, Any]) -> None:
    body["table"]["shards"]["shape"][0] = [2**59]
    body["table"]["chunks"]["nbytes"][0] = 2**61
    body["packs"] = [[key, 2**62] for key, _ in body["packs"]]


HOSTILE: dict[str, Callable[[Path], None]] = {
    "climbing-part": lambda root: rewrite_manifest(root, parts=["parts/../../../../etc/passwd"] * 2),
    "absolute-part": lambda root: rewrite_manifest(root, parts=["/etc/passwd"] * 2),
    "part-of-another-step": lambda root: rewrite_manifest(
        root, parts=read_document(next(root.glob("steps/000000000001-*")))["parts"]
    ),
    "world-of-millions": lambda root: rewrite_manifest(root, world_size=10**6),
    "climbing-layout": lambda root: rewrite_manifest(root, layouts={"../../../../etc/passwd": [[0, 1]]}),
    "absurd-ranks": lambda root: rewrite_manifest(root, layouts={"0" * 32: [[0, 10**6 - 1]]}),
    "climbing-pack": lambda root: put_part(root, climb),
    "absurd-nbytes": lambda root: put_part(root, huge("nbytes", 2**61)),
    "absurd-offset": lambda root: put_part(root, huge("offset", 2**61)),
    "absurd-box": lambda root: put_part(root, huge_box),
}


def test_hostile_documents(tmp_path: Path, template: Path) -> None:
    for case, change in HOSTILE.items():
        shutil.copytree(template, tmp_path / case)
        change(tmp_path / case)
    told = try_all(tmp_path, [tmp_path / case for case in HOSTILE], size=1)
    for case in HOSTILE:
        for line in told[case]["load"]:
            assert line["kind"] == "FormatError", line
            assert f"{NEWEST:012d}-" in line["text"], "names the object"
            assert "root:" not in line["text"], "tells what is in another file"
        assert [line.get("step") for line in told[case]["restore"]] == [NEWEST - 1], told[case]["restore"]


def test_the_part_that_is_put_by_hand_would_load(tmp_path: Path, template: Path) -> None:
    """The hostile ones fail for what was changed in them, and for nothing else."""
    shutil.copytree(template, tmp_path / "same")
    put_part(tmp_path / "same", lambda body: None)
    told = try_all(tmp_path, [tmp_path / "same"])["same"]
    assert [line.get("step") for line in told["load"] + told["restore"]] == [NEWEST] * 4, told


def test_a_newer_manifest_is_skipped_loudly_and_one_that_only_says_so_is_read(tmp_path: Path, template: Path) -> None:
    for case in ("newer", "flipped"):
        shutil.copytree(template, tmp_path / case)
        path = newest(tmp_path / case, "manifest")
        data = path.read_bytes()
        path.write_bytes(of_version(data, 2) if case == "newer" else data.replace(b":1,", b":3,", 1))
    told = try_all(tmp_path, [tmp_path / "newer", tmp_path / "flipped"])
    for line in told["newer"]["load"]:
        assert line["kind"] == "NewerFormat"
        assert "update ckptlib" in line["text"]
    for line in told["newer"]["restore"]:
        assert line["step"] == NEWEST - 1
        assert "update ckptlib" in line["skipped"][0]
    assert [line.get("step") for line in told["flipped"]["load"] + told["flipped"]["restore"]] == [NEWEST] * 4


# -- two jobs on one root


def test_a_second_job_on_the_same_root_supersedes_the_first(bench: Bench) -> None:
    (old,) = bench.start()
    bench.open(1, "settle")
    old.wait_for("committed")
    other = Bench(bench.directory / "other", bench.root)
    (new,) = other.start(orphans_timeout_s=0.2)
    new.wait_for("waiting")
    bench.open(2, "settle")  # until the newer one has saved, the older one may
    old.wait_for("committed", 2)
    other.open(2, "settle")
    new.wait_for("committed")
    bench.open(3, "settle")
    failure = old.wait_for("failed")
    assert failure["kind"] == "Superseded"
    assert "Two jobs use one root" in failure["text"]
    bench.open(4, "settle")
    assert old.join() == 1, "it is told at once from now on"
    assert old.told()[-1]["kind"] == "Superseded"
    other.open(3, "settle")
    new.wait_for("committed", 2)
    other.open(4, "end")
    assert new.join() == 0
    for job in (old, new):
        job.join_writers()
    steps = [(step.number, step.generation) for step in read_root(bench.root)]
    assert steps == [(1, 1), (2, 1), (2, 2), (3, 2)]
    assert bench.go_on() == 3
