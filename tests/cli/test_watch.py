"""`ckptlib watch`: one look at roots of real runs, and a terminal beside a run that goes on."""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.commands import Ckptlib, files
from helpers.forkserver import context, start_server
from helpers.increments import body_of
from support import make_generation, make_root, make_save, put_parts, state
from workers.reported_run import train

import ckptlib as library
from ckptlib import events
from ckptlib.catalog.catalog import Catalog
from ckptlib.format.account import Account, Mark
from ckptlib.format.keys import SaveId
from ckptlib.format.part import FailedPart
from ckptlib.reporting.glance import Watcher
from ckptlib.stores import open_store
from ckptlib.stores.local import LocalStore
from ckptlib.stores.memory import MemoryStore
from ckptlib.stores.testing import write_plan

WAIT_S = 120.0


class Terminal:
    """`ckptlib watch` on a terminal of its own."""

    def __init__(self, *arguments: object) -> None:
        self._ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
        command = [sys.executable, "-m", "ckptlib.cli", "watch", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        os.set_blocking(self._ours, False)
        self.said = ""

    def wait_for(self, pattern: str) -> None:
        """Until it has shown this since the last call; colours aside."""
        deadline = time.monotonic() + WAIT_S
        while not (found := re.search(pattern, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._read()))):
            assert time.monotonic() < deadline, (pattern, self.said[-3000:])
            assert self.process.poll() is None, self.said
            time.sleep(0.02)
        self.said = self.said[found.end() :]

    def _read(self) -> str:
        try:
            while data := os.read(self._ours, 65536):
                self.said += data.decode(errors="replace")
        except OSError:  # nothing more for now
            pass
        return self.said

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        deadline = time.monotonic() + WAIT_S
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read()
            time.sleep(0.02)
        self._read()
        return self.process.wait(1)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    made: list[Terminal] = []
    yield made
    for terminal in made:
        terminal.close()


def test_one_look(ckptlib: Ckptlib, saved: Path) -> None:
    before = files(saved)
    shown = ckptlib("watch", saved, "--once")
    assert (shown.code, shown.err) == (0, "")
    assert "newest step 3," in shown.out
    assert "of generation 2 on 1 rank; 2 steps in all" in shown.out
    assert "0 of 2 starts, 0 saves" in shown.out
    assert files(saved) == before


def test_numbers_are_those_of_files_and_documents(ckptlib: Ckptlib, saved: Path) -> None:
    found = ckptlib("watch", saved, "--once", "--json").json
    assert [recent["step"] for recent in found["recent"]] == [2, 3]
    for recent in found["recent"]:
        path = saved / "steps" / f"{recent['name']}.json"
        said = body_of(path)
        assert recent["created"] == said["created"]
        assert recent["persist_s"] == pytest.approx(path.stat().st_mtime - said["created"], abs=0.01)
        assert recent["nbytes"] == sum(p.stat().st_size for p in (saved / "packs" / recent["name"]).glob("*"))
        assert recent["nbytes_state"] == said["nbytes_state"]


def test_a_save_under_way_and_one_that_failed(ckptlib: Ckptlib, tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    catalog = make_root(store)
    generation = make_generation(catalog, world_size=2)
    failed = SaveId(5, generation)
    name, document = FailedPart(failed, 1, "a" * 8, "no room\x1b[2J\nleft").encode()
    store.put(name.key, document)
    put_parts(catalog, generation, 7, state(7), 2)
    found = ckptlib("watch", tmp_path, "--once", "--json").json
    assert [(save["step"], save["parts"]) for save in found["under_way"]] == [(7, 2)]
    assert found["under_way"][0]["nbytes"] == sum(p.stat().st_size for p in tmp_path.glob("packs/*/*"))
    assert [save["said"] for save in found["failed_saves"]] == ["rank 1: no room\x1b[2J\nleft"]
    shown = ckptlib("watch", tmp_path, "--once").out
    assert "none is committed" in shown
    assert "step 7: 2 ranks done" in shown
    assert "rank 1: no room\\x1b[2J left" in shown
    assert "\x1b[2J" not in shown


def test_damage(ckptlib: Ckptlib, root: Path) -> None:
    newest = sorted((root / "steps").glob("*.json"))[-2]
    newest.write_bytes(newest.read_bytes()[:-30])
    shown = ckptlib("watch", root, "--once")
    assert shown.code == 1
    assert newest.stem in shown.out


def test_a_lost_start_is_a_failure_once_the_next_one_saves() -> None:
    """Host and writer went with it, so that its manifests alone tell of it: first as one that may still run."""
    catalog = make_root(MemoryStore())
    watcher = Watcher(Catalog(catalog.store))
    told = Account(1000.0, 10.0, 1.0, None, 1, (Mark(0, 0.0, 0.0), Mark(5, 5.0, 0.0)))
    lost = make_save(catalog, make_generation(catalog), 5, state(5), account=told.to_json())
    assert watcher.look().goodput.failures == 0
    generation = make_generation(catalog, 2, lost)
    watcher.look()
    later = Account(2000.0, 10.0, 1.0, None, 1, (Mark(5, 0.0, 0.0), Mark(9, 4.0, 0.0)))
    make_save(catalog, generation, 9, state(9), account=later.to_json())
    assert watcher.look().goodput.failures == Watcher(Catalog(catalog.store)).look().goodput.failures == 1


@pytest.mark.parametrize("is_directory", [False, True])
def test_a_root_that_is_gone_has_not_just_begun(tmp_path: Path, is_directory: bool) -> None:
    """As one whose disk is no longer mounted."""
    catalog = make_root(LocalStore(str(tmp_path / "root")))
    make_save(catalog, make_generation(catalog), 5, state(5))
    watcher = Watcher(Catalog(catalog.store))
    watcher.look()
    (tmp_path / "root").rename(tmp_path / "elsewhere")
    if is_directory:
        (tmp_path / "root").mkdir()
    with pytest.raises(library.CheckpointNotFound):
        watcher.look()
    shutil.rmtree(tmp_path / "root", ignore_errors=True)
    (tmp_path / "elsewhere").rename(tmp_path / "root")
    assert watcher.look().num_steps == 1


def test_a_start_from_an_earlier_step_is_seen_before_its_first_commit() -> None:
    """It is no part of history yet. That none of its saves gets as far must not look like a run without failures."""
    catalog = make_root(MemoryStore())
    first = make_generation(catalog)
    earlier = make_save(catalog, first, 50, state(5))
    make_save(catalog, first, 100, state(10))
    put_parts(catalog, first, 70, state(7), 1)
    watcher = Watcher(Catalog(catalog.store))
    watcher.look()
    second = make_generation(catalog, 2, earlier)
    assert watcher.look().under_way == []
    failed = SaveId(60, second)
    name, document = FailedPart(failed, 0, "a" * 8, "no room").encode()
    catalog.store.put(name.key, document)
    put_parts(catalog, second, 70, state(7), 1)
    for found in (watcher.look(), watcher.look(), Watcher(Catalog(catalog.store)).look()):
        assert found.newest is not None
        assert found.newest.save.step == 100
        assert found.failed == {failed: "rank 0: no room"}
        assert [save.save for save in found.under_way] == [SaveId(70, second)]


def test_a_failure_that_could_not_be_read_is_told_later(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    write_plan(plan, [{"op": "get", "key": "^parts/", "action": "error"}])
    catalog = make_root(LocalStore(str(tmp_path / "root")))
    generation = make_generation(catalog)
    failed = SaveId(5, generation)
    name, document = FailedPart(failed, 0, "a" * 8, "no room").encode()
    catalog.store.put(name.key, document)
    make_save(catalog, generation, 7, state(7))
    watcher = Watcher(Catalog(open_store(f"fault+file://{tmp_path / 'root'}?plan={plan}")))
    assert watcher.look().failed == {}
    write_plan(plan, [])
    assert watcher.look().failed == {failed: "rank 0: no room"}


def test_wrong_usage(ckptlib: Ckptlib, saved: Path, tmp_path: Path) -> None:
    assert ckptlib("watch", saved, "--json").code == 2
    assert ckptlib("watch", saved, "--every", "soon").code == 2
    shown = ckptlib("watch", tmp_path, "--once")
    assert shown.code == 1
    assert "holds no checkpoints" in shown.err


def test_beside_a_run(tmp_path: Path, terminals: list[Terminal]) -> None:
    """Begun before there is a root; it goes on through an outage of the store, and ends by Ctrl-C."""
    plan = tmp_path / "plan.json"
    write_plan(plan, [])
    watched = Terminal(f"fault+file://{tmp_path / 'root'}?plan={plan}", "--every", "100ms")
    terminals.append(watched)
    watched.wait_for("holds no checkpoints")
    start_server()
    (tmp_path / "arena").mkdir()
    job = context.Process(target=train, args=(str(tmp_path / "root"), str(tmp_path / "arena"), 17, 5, "killed"))
    job.start()
    watched.wait_for(r"newest step +15, .* of generation 1 on 1 rank; 3 steps in all")
    job.join(WAIT_S)
    assert job.exitcode == -signal.SIGKILL
    watched.wait_for(r"interval +5 steps")
    watched.wait_for(r"1 of 1 start")  # its writer has told of its death
    write_plan(plan, [{"op": "scan", "action": "error"}])
    watched.wait_for("as planned")
    write_plan(plan, [])
    watched.wait_for(r"newest step +15, ")
    assert watched.end(signal.SIGINT) == 0


def test_sigterm_gives_the_cursor_back(saved: Path, terminals: list[Terminal]) -> None:
    """As of `timeout`."""
    watched = Terminal(saved, "--every", "100ms")
    terminals.append(watched)
    watched.wait_for("newest step 3")
    assert watched.end(signal.SIGTERM) == 128 + signal.SIGTERM
    assert watched.said.rfind("\x1b[?25h") > watched.said.rfind("\x1b[?25l")


def test_into_a_pipe(saved: Path) -> None:
    """Look after look, without orders to a terminal."""
    command = [sys.executable, "-m", "ckptlib.cli", "watch", str(saved), "--every", "100ms"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    looks = 0
    for line in process.stdout:
        assert "\x1b" not in line
        looks += line.startswith("newest step 3")
        if looks == 3:
            break
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=WAIT_S)
    assert (process.returncode, told) == (0, "")


def test_intervals_where_steps_are_dropped(ckptlib: Ckptlib, tmp_path: Path) -> None:
    """Retention leaves two steps and one that is kept for good; the job itself tells which it began."""
    began: list[int] = []

    def note(event: events.Event) -> None:
        if isinstance(event, events.Begun):
            began.append(event.step)

    (tmp_path / "arena").mkdir()
    keep, where = library.Keep(last=2, every=40), tmp_path / "arena"
    values = {"w": torch.zeros(4)}
    with library.Checkpointer(tmp_path / "root", values, every=2, arena=where, keep=keep, on_event=note) as ckpt:
        for _ in ckpt.loop(ckpt.restore().step, 80):
            values["w"] += 1
            if ckpt.pending is not None:
                ckpt.pending.wait_committed()
    recent = ckptlib("watch", tmp_path / "root", "--once", "--json").json["recent"]
    assert [one["step"] for one in recent] == [40, 78, 80]
    for one in recent:
        at = began.index(one["step"])
        assert one["since_steps"] == one["step"] - (began[at - 1] if at else 0)
    assert [one["stall_s"] is None for one in recent] == [True, False, False]
