"""`doctor`: what it finds on this host, in its slots and at a store."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from helpers.commands import Ckptlib, files
from support import ROOT_ID

from ckptlib.catalog.catalog import Catalog
from ckptlib.cli import host
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Generation, Root
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.slot import Slot
from ckptlib.slots.writer_lock import WriterLock
from ckptlib.stores import open_store


def test_doctor(ckptlib: Ckptlib, tmp_path: Path) -> None:
    document = ckptlib("doctor", "--json").json
    verdicts = {check["name"]: check["verdict"] for check in document["checks"]}
    assert {
        "shared memory",
        "cgroup memory",
        "RemoveIPC",
        "ulimit -l",
        "kernel",
        "versions",
        "slots",
    } <= verdicts.keys()
    assert verdicts["versions"] == "ok"
    shown = ckptlib("doctor", tmp_path / "not" / "there", "--size", 1)
    assert shown.code == (0 if document["good"] else 1)
    assert "MB/s" in shown.out or "GB/s" in shown.out
    assert "direct I/O" in shown.out
    assert list(tmp_path.iterdir()) == []  # left as it was


def test_doctor_leaves_a_root_as_it_was(ckptlib: Ckptlib, saved: Path) -> None:
    before = files(saved)
    ckptlib("doctor", saved, "--size", 1)
    assert files(saved) == before
    assert not (saved / "probe").exists()


def test_doctor_of_a_store_that_fails(ckptlib: Ckptlib, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = ckptlib("doctor", tmp_path / "file" / "below", "--json")
    assert result.code == 1
    assert {c["name"]: c["verdict"] for c in result.json["checks"]}["store"] == "bad"


def test_slots_alive_and_abandoned(tmp_path: Path) -> None:
    holder = (
        "import sys; from pathlib import Path; from ckptlib.slots.slot import Slot\n"
        "slot = Slot.create(Path(sys.argv[1]), 'ckptlib-00', 1 << 20); print(slot.path, flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holder, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    path = process.stdout.readline().strip()
    slot = Slot.open(Path(path))
    slot.close()
    other = Slot.create(tmp_path, "ckptlib-01", 1 << 16)
    other.write_header(SlotHeader(ROOT_ID, SaveId(7, GenerationId(1, "0" * 8)), 3, 4, 1, 2, 100, {}))
    other.close()
    try:
        alive, abandoned = host.slots([tmp_path])
    finally:
        process.communicate("\n", timeout=150)
    assert (alive.verdict, abandoned.verdict) == ("ok", "warning")
    assert [s["path"] for s in alive.numbers["slots"]] == [path]  # type: ignore[attr-defined]
    assert [s["content"] for s in abandoned.numbers["slots"]] == ["step 7 of rank 3 of 4"]  # type: ignore[attr-defined]
    assert [check.verdict for check in host.slots([tmp_path])] == ["warning"]


def test_slots_of_a_job_and_what_it_survives(ckptlib: Ckptlib, tmp_path: Path) -> None:
    with open_store(str(tmp_path / "root")) as store:
        catalog = Catalog(store)
        catalog.open_root(Root(ROOT_ID, "xxh3", 60.0))
        generation = GenerationId(1, "0" * 8)
        domains = ("h0", "h0", "h1", "h1", "h2", "h2")
        catalog.generations.put(Generation(generation, 6, None, 0.0, {}, "here", domains=domains, copies=1))
    arena = tmp_path / "arena"
    arena.mkdir()
    mine = Slot.create(arena, f"ckptlib-{ROOT_ID[:16]}-{generation}", 1 << 16)
    mine.write_header(SlotHeader(ROOT_ID, SaveId(7, generation), 3, 6, 1, 2, 100, {}))
    other = Slot.create(arena, f"ckptlib-{'1' * 16}-{generation}", 1 << 16)
    other.write_header(SlotHeader("1" * 32, SaveId(9, generation), 0, 1, 1, 1, 100, {}))
    mine.close()
    other.close()

    found = ckptlib("slots", tmp_path / "root", "--arena", arena, "--json").json
    assert [(s["path"], s["step"], s["rank"], s["state"]) for s in found["slots"]] == [
        (str(mine.path), 7, 3, "ready, left behind")
    ]
    assert found["placement"]["num_losses_survived"] == 1
    assert found["placement"]["holders"] == [[2], [3], [4], [5], [0], [1]]
    shown = ckptlib("slots", tmp_path / "root", "--arena", arena)
    assert "survives the loss of any 1" in shown.out
    every = ckptlib("slots", "--arena", arena, "--json").json["slots"]
    assert {(s["path"], s["state"]) for s in every} >= {
        (str(mine.path), "ready, left behind"),
        (str(other.path), "being written, left behind"),
    }

    lock = WriterLock.take([arena], f"ckptlib-{ROOT_ID[:16]}-{generation}")
    assert lock is not None
    writers = os.dup(lock.fd)
    lock.close()  # the trainer is gone
    kept = ckptlib("slots", tmp_path / "root", "--arena", arena, "--clean", "--json").json
    assert [(s["path"], s["state"]) for s in kept["slots"]] == [(str(mine.path), "ready")], "its writer is starting"
    os.close(writers)
    cleaned = ckptlib("slots", tmp_path / "root", "--arena", arena, "--clean", "--json").json
    assert cleaned["removed"] == [str(mine.path)]
    assert [*arena.iterdir()] == [other.path]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_cgroup_limits_of_both_versions(tmp_path: Path) -> None:
    mount, membership = tmp_path / "cgroup", tmp_path / "membership"
    gigabyte = 1 << 30
    write(membership, "0::/job/step\n")
    write(mount / "job" / "step" / "memory.max", "max\n")
    write(mount / "job" / "memory.max", f"{4 * gigabyte}\n")
    write(mount / "job" / "memory.current", f"{gigabyte}\n")
    found = host.cgroup_memory(mount, membership)
    assert (found.verdict, found.numbers) == ("ok", {"nbytes_limit": 4 * gigabyte, "nbytes_used": gigabyte})
    write(mount / "job" / "memory.current", f"{4 * gigabyte - 5}\n")
    assert host.cgroup_memory(mount, membership).verdict == "warning"

    write(membership, "4:memory:/from/the/host\n0::/\n")
    write(mount / "memory" / "memory.limit_in_bytes", f"{2 * gigabyte}\n")
    write(mount / "memory" / "memory.usage_in_bytes", "5\n")
    assert host.cgroup_memory(mount, membership).numbers == {"nbytes_limit": 2 * gigabyte, "nbytes_used": 5}
    write(mount / "memory" / "memory.limit_in_bytes", "9223372036854771712\n")
    assert host.cgroup_memory(mount, membership).found == "no limit"
    assert host.cgroup_memory(mount, tmp_path / "nothing").found == "no limit"


def test_remove_ipc(tmp_path: Path) -> None:
    assert host.remove_ipc(tmp_path, 1000).verdict == "ok"  # no logind
    (tmp_path / "run/systemd/sessions").mkdir(parents=True)
    assert host.remove_ipc(tmp_path, 1000).verdict == "warning"  # its default
    assert host.remove_ipc(tmp_path, 0).verdict == "ok"
    write(tmp_path / "etc/systemd/logind.conf", "[Login]\n#RemoveIPC=yes\nRemoveIPC=no\n")
    assert host.remove_ipc(tmp_path, 1000).verdict == "ok"
    write(tmp_path / "etc/systemd/logind.conf.d/site.conf", "[Login]\nRemoveIPC=yes\n")
    assert host.remove_ipc(tmp_path, 1000).verdict == "warning"


def test_shared_memory(tmp_path: Path) -> None:
    assert host.shared_memory(tmp_path / "nothing").verdict == "bad"
    assert host.shared_memory(tmp_path).numbers["nbytes"] == shutil.disk_usage(tmp_path).total
