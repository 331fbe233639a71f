"""The writer process: what it is made of, and what it leaves to its trainer. No torch on either side."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from _thread import interrupt_main
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from helpers.writers import WAIT_S, Bench, alive, hear, heard, status, stop, until
from workers.crash_oracle import failed_parts, read_document, read_root
from workers.crash_spare import ROOT_ID, ready_slot, setup

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.catalog.finishing import finish_saves
from ckptlib.catalog.retention import drop
from ckptlib.errors import WaitTimeout
from ckptlib.format import keys
from ckptlib.format.check import Check
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Generation
from ckptlib.policy.keep import Keep
from ckptlib.stores import open_store
from ckptlib.stores.testing import flip_bit
from ckptlib.testing import write_plan
from ckptlib.writer.__main__ import LEFT_TO_THE_TRAINER
from ckptlib.writer.begin_order import BeginOrder
from ckptlib.writer.channel import Channel, Message
from ckptlib.writer.client import MAX_DEATHS, Writer
from ckptlib.writer.persist import Persister, put_failure

LARGE_BYTES = 600 << 20


# -- what it is


def test_starts_without_torch_in_a_session_of_its_own_at_low_priority(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.perf_counter()
    writer = bench.writer()
    hear(writer, "ready")
    with capsys.disabled():
        print(f" writer ready after {time.perf_counter() - began:.2f} s ", end="")
    maps = Path(f"/proc/{writer.pid}/maps").read_text()
    assert "libpython" in maps or "python" in maps
    assert "torch" not in maps
    assert "numpy" not in maps, "a third of its imports"
    assert os.getsid(writer.pid) == writer.pid != os.getsid(0)
    assert os.getpriority(os.PRIO_PROCESS, writer.pid) >= 10
    assert os.readlink(f"/proc/{writer.pid}/fd/0") == "/dev/null"
    for stream in (1, 2):
        assert os.readlink(f"/proc/{writer.pid}/fd/{stream}") == str(writer.log_path)
    assert writer.log_path.parent.stat().st_mode & 0o777 == 0o700


_EARLY = """
import os, runpy, sys
os.nice = lambda by: print(by, "numpy" in sys.modules, "ckptlib.writer.process" in sys.modules, flush=True)
runpy.run_module("ckptlib.writer", run_name="__main__")
"""


def test_gives_way_before_it_imports_anything() -> None:
    """Imports take 0.3 s of a core, just when the training starts or restores."""
    found = subprocess.run([sys.executable, "-c", _EARLY], capture_output=True, text=True, timeout=150)
    assert found.stdout == "10 False False\n"
    assert "IndexError" in found.stderr, "it has no socket to listen to"


def waiting(bench: Bench) -> Writer:
    """One that nothing but a word begins, within the time that a test waits."""
    writer = Writer(setup(bench.root), wait_s=4 * WAIT_S)
    bench.writers.append(writer)
    return writer


def test_one_that_waits_begins_when_it_is_woken(bench: Bench) -> None:
    writer = waiting(bench)
    assert writer.poll(1.0) == []
    assert writer._child._process.stdin is not None
    held = os.dup(writer._child._process.stdin.fileno())  # as by a forked child
    writer.wake()
    hear(writer, "ready")
    writer.wake()
    os.close(held)


def test_one_that_waits_begins_with_the_first_slot(bench: Bench) -> None:
    """What is in it must outlive the trainer from then on."""
    save, slot = bench.slot(1)
    writer = waiting(bench)
    writer.add_slot(slot.path)
    hear(writer, "ready")
    writer.persist(save, slot.path)
    hear(writer, "committed")


def test_one_that_waits_ends_when_it_is_closed(bench: Bench) -> None:
    writer = waiting(bench)
    assert [event["event"] for event in writer.close(WAIT_S)] in ([], ["ready"])
    assert not alive(writer.pid)


def test_a_forked_child_keeps_no_writer_that_was_left(bench: Bench) -> None:
    """It has the socket open still, as workers of a data loader have for as long as the process lives."""
    writer = bench.writer()
    hear(writer, "ready")
    held = os.dup(writer._child.channel.fileno())
    writer.leave()
    try:
        until(lambda: not alive(writer.pid))
    finally:
        os.close(held)


_DIES = """
import os, sys
sys.path[:0] = sys.argv[2:]
from workers.crash_spare import setup
from ckptlib.writer.client import Writer
print(Writer(setup(sys.argv[1]), wait_s=600.0).pid, flush=True)
os._exit(1)
"""


def test_one_that_waits_ends_when_its_trainer_dies(bench: Bench) -> None:
    tests = Path(__file__).parents[1]
    found = subprocess.run(
        [sys.executable, "-c", _DIES, str(bench.root), str(tests), str(tests / "workers")],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert found.stdout, found.stderr
    until(lambda: not alive(int(found.stdout)))


_SESSION = Path("/proc/self/autogroup")
_NICE_SESSION = """
import os, pathlib, time
from ckptlib.priority import give_way
session = pathlib.Path("/proc/self/autogroup")
before = session.read_text()
give_way()
for _ in range(400 if os.getsid(0) == os.getpid() else 10):
    if session.read_text() != before:
        break
    time.sleep(0.1)
print(os.nice(0), session.read_text().split()[-1])
"""
sessions_share_the_cpu = pytest.mark.skipif(
    not (_SESSION.exists() and _SESSION.read_text()), reason="this kernel does not divide the CPU between sessions"
)


@sessions_share_the_cpu
def test_its_session_gives_way_too(bench: Bench) -> None:
    """Where the kernel divides the CPU between sessions first, the niceness of a process alone does nothing."""
    writer = bench.writer()
    until(lambda: Path(f"/proc/{writer.pid}/autogroup").read_text().split()[-1] == "10")


@sessions_share_the_cpu
def test_the_session_of_whoever_started_it_keeps_its_priority() -> None:
    before = _SESSION.read_text()
    found = subprocess.run([sys.executable, "-c", _NICE_SESSION], capture_output=True, text=True, timeout=150)
    assert found.stdout == f"{min(10 + os.nice(0), 19)} {before.split()[-1]}\n", found.stderr
    assert _SESSION.read_text() == before


@sessions_share_the_cpu
@pytest.mark.skipif(shutil.which("setpriv") is None or os.geteuid() != 0, reason="takes capabilities away")
def test_sessions_give_way_where_the_kernel_takes_one_change_at_a_time() -> None:
    """Without CAP_SYS_ADMIN it refuses a second change within 0.1 s, and the writers of a host start together."""
    command = ["setpriv", "--bounding-set=-sys_admin", sys.executable, "-c", _NICE_SESSION]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) for _ in range(6)]
    assert [process.communicate(timeout=150)[0] for process in started] == [f"{min(10 + os.nice(0), 19)} 10\n"] * 6


def test_numpy_comes_with_the_first_order(bench: Bench) -> None:
    save, slot = bench.slot(1)
    writer = bench.writer()
    writer.add_slot(slot.path)
    hear(writer, "ready")
    assert "numpy" not in Path(f"/proc/{writer.pid}/maps").read_text()
    writer.persist(save, slot.path)
    hear(writer, "committed")
    assert "numpy" in Path(f"/proc/{writer.pid}/maps").read_text()


_DEFERRED = """
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from ckptlib.writer import late_numpy
late_numpy.defer()
late_numpy.defer()
import numpy as np
from ckptlib.format import box, layout, table
assert box.np is np and "numpy._core" not in sys.modules
if sys.argv[1] == "asked":
    assert np.int64(3) + 1 == 4
elif sys.argv[1] == "asked by many":
    with ThreadPoolExecutor(8) as executor:
        assert sum(executor.map(lambda n: int(np.arange(n).sum()) + len(np.fft.__name__), [4] * 200)) == 200 * 15
else:
    late_numpy.load()
    late_numpy.load()
import numpy.linalg
assert box.np is layout.np is table.np is np is numpy is sys.modules["numpy"] and type(np) is type(sys)
assert np.linalg.norm(np.array([3.0, 4.0])) == 5 and np.__file__ == np.__spec__.origin
late_numpy.defer()
assert sys.modules["numpy"] is np
print("good")
"""


@pytest.mark.parametrize("how", ["asked", "asked by many", "loaded"])
def test_what_stands_for_numpy_becomes_numpy(how: str) -> None:
    found = subprocess.run([sys.executable, "-c", _DEFERRED, how], capture_output=True, text=True, timeout=150)
    assert found.stdout == "good\n", found.stderr


def test_starts_no_threads_for_algebra_that_it_never_does(bench: Bench) -> None:
    writer = bench.writer()
    hear(writer, "ready")
    assert b"OPENBLAS_NUM_THREADS=1" in Path(f"/proc/{writer.pid}/environ").read_bytes().split(b"\0")


def test_secrets_do_not_show(bench: Bench) -> None:
    secret = "hunter2hunter2"
    writer = bench.writer(options={"secret": secret})
    hear(writer, "ready")
    assert secret.encode() not in Path(f"/proc/{writer.pid}/cmdline").read_bytes()
    assert secret.encode() not in Path(f"/proc/{writer.pid}/environ").read_bytes()
    assert secret not in writer.log_path.read_text()


def test_memory_stays_small_beside_a_large_slot(bench: Bench) -> None:
    """What it holds for itself while it persists 600 MB, apart from the slot, which it shares with the trainer."""
    save, slot = bench.slot(1, nbytes=LARGE_BYTES)
    writer = bench.writer()
    writer.add_slot(slot.path)
    writer.persist(save, slot.path)
    hear(writer, "committed")
    own = status(writer.pid, "VmHWM") - status(writer.pid, "RssShmem")
    shared = status(writer.pid, "RssShmem")
    private = sum(
        int(kb)
        for kb in re.findall(r"^Private_\w+:\s+(\d+)", Path(f"/proc/{writer.pid}/smaps_rollup").read_text(), re.M)
    )
    assert shared >= LARGE_BYTES // 1024, "the slot was read where it is"
    assert private < 150 * 1024
    assert own < 150 * 1024 + shared - LARGE_BYTES // 1024 + 4096, "at no time did it hold more"
    (pack,) = bench.root.glob("packs/*/*")
    stored = np.memmap(pack, np.int32, offset=pack.stat().st_size - LARGE_BYTES)
    assert all(stored[i] == i + 1 for i in range(0, LARGE_BYTES // 4, 1 << 16))


def test_a_slot_that_is_forgotten_gives_its_memory_back(bench: Bench) -> None:
    writer = bench.writer()
    for step in range(1, 4):
        save, slot = bench.slot(step)
        writer.add_slot(slot.path)
        writer.persist(save, slot.path)
        hear(writer, "committed")
        assert str(slot.path) in Path(f"/proc/{writer.pid}/maps").read_text()
        writer.forget_slot(slot.path)
        slot.unlink()
    until(lambda: ".slot" not in Path(f"/proc/{writer.pid}/maps").read_text())
    assert [step.number for step in read_root(bench.root)] == [1, 2, 3]


# -- orders


def test_closed_it_finishes_what_was_ordered_and_leaves_no_log(bench: Bench) -> None:
    writer = bench.writer()
    for step in range(1, 4):
        save, slot = bench.slot(step)
        writer.add_slot(slot.path)
        writer.expect(save)
        writer.tell_expected(save)
        writer.persist(save, slot.path)
    events = writer.close(WAIT_S)
    assert [event["step"] if "step" in event else event["event"] for event in events].count("committed") == 3
    assert [step.number for step in read_root(bench.root)] == [1, 2, 3]
    assert not alive(writer.pid)
    assert not writer.log_path.exists()
    assert all(slot.path.exists() for slot in bench.slots), "slots are the trainer's to unlink"


def test_what_it_does_after_a_slot_is_let_go_of_is_known(bench: Bench) -> None:
    """Commits and sweeps take processor time, which whoever weighs the cost of a save must know."""
    writer = bench.writer(keep=Keep(last=1).to_json(), world_size=2)
    save, slot = bench.slot(1)
    writer.add_slot(slot.path)
    assert not writer.finishes
    writer.persist(save, slot.path)
    hear(writer, "released")
    assert writer.finishes, "it waits for the other rank's part"
    put_failure(open_store(str(bench.root)), save, 1, "no part")
    hear(writer, "failed")
    assert not writer.finishes
    alone = bench.writer(keep=Keep(last=1).to_json())
    save, slot = bench.slot(2)
    alone.add_slot(slot.path)
    alone.persist(save, slot.path)
    events = heard(alone, "swept")
    assert [event["sweeps"] for event in events if event["event"] == "committed"] == [1]
    assert not alone.finishes


def test_left_alone_it_finishes_and_unlinks_the_slots(bench: Bench) -> None:
    writer = bench.writer()
    save, slot = bench.slot(1)
    writer.add_slot(slot.path)
    writer.persist(save, slot.path)
    expected = SaveId(2, bench.generation)
    writer.expect(expected)
    writer.tell_expected(expected)
    writer.leave()
    until(lambda: not alive(writer.pid))
    assert [step.number for step in read_root(bench.root)] == [1]
    assert not slot.path.exists()
    (error,) = failed_parts(bench.root)
    assert "the trainer died before its snapshot was whole" in error


def test_left_as_it_closes_it_unlinks_the_slots(bench: Bench) -> None:
    """Who was told that it goes on alone does not unlink them, and nobody else would."""
    writer = bench.writer()
    hear(writer, "ready")
    stop(writer.pid)
    save, slot = bench.slot(1)
    writer.add_slot(slot.path)
    writer.persist(save, slot.path)
    with pytest.raises(WaitTimeout, match="it goes on alone"):
        writer.close(0.1)
    writer.leave()
    os.kill(writer.pid, signal.SIGCONT)
    until(lambda: not alive(writer.pid))
    assert [step.number for step in read_root(bench.root)] == [1]
    assert not slot.path.exists()


@pytest.mark.parametrize("how", ["left", "left as it closes", "closed"])
def test_no_other_one_is_started_for_whoever_has_let_go_of_it(bench: Bench, how: str) -> None:
    """Its orders, and the snapshot that all ranks hold, were a reason; but the one that was left goes on with these."""
    writer = bench.writer()
    hear(writer, "ready")
    pid = writer.pid
    stop(pid)
    save, slot = bench.slot(1)
    writer.add_slot(slot.path)
    writer.persist(save, slot.path)
    writer.held(save)
    if how == "closed":
        os.kill(pid, signal.SIGCONT)
        assert "committed" in [event["event"] for event in writer.close(WAIT_S)]
    else:
        if how != "left":
            with pytest.raises(WaitTimeout):
                writer.close(0.1)
        writer.leave()
        os.kill(pid, signal.SIGCONT)
    until(lambda: not alive(pid))
    assert writer.poll() == []
    writer.watch(save, 0.0)
    assert writer.poll() == []
    assert writer.pid == pid
    assert [step.number for step in read_root(bench.root)] == [1]


def test_no_other_one_is_started_for_a_thread_that_listens_as_it_is_left(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears that nobody is at the other end, which is no death of the writer."""
    writer = bench.writer()
    hear(writer, "ready")
    pid, close, polled = writer.pid, Channel.close, list[Future[list[Message]]]()
    stop(pid)
    save, slot = bench.slot(1)
    writer.add_slot(slot.path)
    writer.persist(save, slot.path)
    with ThreadPoolExecutor(1) as threads:

        def closing(channel: Channel) -> None:
            monkeypatch.undo()
            close(channel)
            polled.append(threads.submit(writer.poll))
            wait(polled, 0.5)  # where it can, it starts another one at once

        monkeypatch.setattr(Channel, "close", closing)
        writer.leave()
        (told,) = polled
        assert told.result() == []
    assert writer.pid == pid
    os.kill(pid, signal.SIGCONT)
    until(lambda: not alive(pid))
    assert [step.number for step in read_root(bench.root)] == [1]


def test_signals_of_a_launcher_are_for_the_trainer(bench: Bench) -> None:
    """Slurm sends them to all processes of a job. A trainer that leaves at once has nobody else to finish the step."""
    writer = bench.writer()
    until(lambda: ignored(writer.pid) >= set(LEFT_TO_THE_TRAINER))
    stop(writer.pid)
    save, slot = bench.slot(1)
    writer.add_slot(slot.path)
    writer.persist(save, slot.path)
    writer.leave()
    for number in LEFT_TO_THE_TRAINER:
        os.kill(writer.pid, number)
    os.kill(writer.pid, signal.SIGCONT)
    until(lambda: not alive(writer.pid))
    assert [step.number for step in read_root(bench.root)] == [1]


def ignored(pid: int) -> set[int]:
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = re.findall(r"^SigIgn:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return {number for number in range(1, 65) if int(mask, 16) >> (number - 1) & 1}


def test_left_alone_it_waits_for_other_ranks_and_lets_a_successor_have_the_slots(bench: Bench) -> None:
    """Whose own would else have no room beside them."""
    writer = bench.writer(world_size=2)
    save, slot = bench.slot(1)
    writer.add_slot(slot.path)
    writer.persist(save, slot.path)
    hear(writer, "released")
    assert not slot.abandoned()
    writer.leave()
    until(slot.abandoned)
    assert alive(writer.pid)
    assert slot.path.exists()
    assert read_root(bench.root) == []


def test_a_void_save_is_published(bench: Bench) -> None:
    writer = bench.writer()
    save = SaveId(1, bench.generation)
    writer.expect(save)
    writer.tell_expected(save)
    writer.void(save, "no memory")
    failed = hear(writer, "failed")
    assert (failed["save"], failed["kind"], failed["error"]) == (str(save), "SaveFailed", "no memory")
    assert failed_parts(bench.root) == ["no memory"]
    assert read_root(bench.root) == []


def test_orders_are_given_again_to_the_next_writer(bench: Bench) -> None:
    writer = bench.writer()
    first = writer.pid
    os.kill(first, signal.SIGSTOP)
    save, slot = bench.slot(1)
    writer.add_slot(slot.path)
    writer.expect(save)
    writer.tell_expected(save)
    writer.persist(save, slot.path)
    os.kill(first, signal.SIGKILL)
    assert [event["error"] for event in heard(writer, "committed") if event["event"] == "released"] == [None]
    assert writer.pid != first
    assert [step.number for step in read_root(bench.root)] == [1]


def test_behind_a_writer_that_died_as_its_part_was_put_saves_refer_to_what_the_manifest_names(bench: Bench) -> None:
    """The next writer puts another part, and what only that one needs, retention does not keep: five saves failed."""
    plan = bench.directory / "plan.json"
    write_plan(plan, [{"op": "put", "key": "^parts/", "action": "kill-after", "once": True}])
    writer = bench.writer(url=f"fault+file://{bench.root}?plan={quote(str(plan))}")
    save, slot = bench.slot(1)
    writer.add_slot(slot.path)
    writer.persist(save, slot.path)
    until(lambda: not alive(writer.pid))
    (first,) = packs_of_parts(bench.root, 1)
    Committer(Catalog(open_store(str(bench.root)))).commit_when_whole(save, 1, lambda: WAIT_S)  # as rank 0 may have
    hear(writer, "committed")
    assert len(packs_of_parts(bench.root, 1)) == 2
    save, slot = bench.slot(2, content=1)
    writer.add_slot(slot.path)
    writer.persist(save, slot.path)
    hear(writer, "committed")
    assert packs_of_parts(bench.root, 2) == [first], "nothing has changed"


def packs_of_parts(root: Path, step: int) -> list[list[str]]:
    """Of each part of a step: the packs that it names."""
    parts = root.glob(f"parts/{step:012d}-*/*-ok-*")
    return [[key for key, *_ in read_document(part)["packs"]] for part in parts]


def test_the_next_writer_warns_of_no_steps_of_its_own_job(bench: Bench) -> None:
    """Which did not say what it goes on from: of steps that another job left it is warned, and once."""
    save, slot = bench.slot(5)
    left = bench.writer()
    left.persist(save, slot.path)
    hear(left, "committed")
    bench.generation = GenerationId(2, "00000002")
    record = Generation(bench.generation, 1, None, 0.0, {}, "here")
    writer = bench.writer()
    writer.begin(BeginOrder(record, ROOT_ID, 3, continues=True))
    told, found = [], []
    for step in (3, 4):
        save, slot = bench.slot(step)
        writer.add_slot(slot.path)
        writer.persist(save, slot.path)
        told += [event["warning"] for event in heard(writer, "committed") if event["event"] == "begun"]
        found.append((bench.root / bench.generation.key).read_bytes())
        os.kill(writer.pid, signal.SIGKILL)
        until(lambda: not alive(writer.pid))
    first, second = told
    assert "holds steps up to 5" in first
    assert second is None
    assert found[0] == found[1]


def test_a_trainer_may_have_thousands_of_files_open(bench: Bench) -> None:
    """Select refuses descriptors from 1024 on, and the writer inherits the number of its end."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    save, slot = bench.slot(1)
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        writer = bench.writer()
        writer.add_slot(slot.path)
        writer.persist(save, slot.path)
        hear(writer, "committed")
        writer.close(WAIT_S)
    finally:
        for fd in files:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 always looks into the working directory first")
def test_what_lies_in_the_working_directory_is_not_imported(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job's own queue.py is none of the writer's business."""
    (tmp_path / "queue.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.chdir(tmp_path)
    hear(bench.writer(), "ready")


def test_a_writer_that_dies_idle_is_started_again_by_the_next_order(bench: Bench) -> None:
    writer = bench.writer()
    hear(writer, "ready")
    first = writer.pid
    for _ in range(MAX_DEATHS + 1):
        os.kill(writer.pid, signal.SIGKILL)
        until(lambda: not alive(writer.pid))
        assert writer.poll() == []
        assert writer.pid == first, "there is nothing to do for another one"
        save, slot = bench.slot(len(bench.slots) + 1)
        writer.add_slot(slot.path)
        writer.persist(save, slot.path)
        hear(writer, "committed")
        assert writer.pid != first
        first = writer.pid


@pytest.mark.parametrize("keep_slots_s", [0.0, pytest.param(2.0, marks=pytest.mark.slow)])
def test_a_writer_that_dies_while_it_keeps_snapshots_is_started_again(bench: Bench, keep_slots_s: float) -> None:
    """Nobody else has what is in memory only persisted, or unlinks it in the end."""
    writer = bench.writer(keep_slots_s=keep_slots_s)
    save, slot = bench.slot(1)
    writer.add_slot(slot.path)
    writer.held(save)
    pids = set()
    for _ in range(MAX_DEATHS):
        pids.add(writer.pid)
        os.kill(writer.pid, signal.SIGKILL)
        until(lambda: not alive(writer.pid))
        if len(pids) < MAX_DEATHS:
            assert writer.poll() == []
            assert writer.pid not in pids
    assert writer.poll() == []
    assert writer.pid in pids, "it keeps dying"
    _, another = bench.slot(2)
    writer.add_slot(another.path)
    writer.void(SaveId(3, bench.generation), "something to do")
    hear(writer, "failed")
    writer.leave()
    until(lambda: not slot.path.exists() and not another.path.exists())
    assert [step.number for step in read_root(bench.root)] == ([1] if keep_slots_s else [])


def test_a_writer_that_dies_before_it_has_put_the_record_at_once_is_started_again(bench: Bench) -> None:
    """Snapshots in memory count for nothing without it, and they order nothing."""
    writer = bench.writer()
    stop(writer.pid)
    record = Generation(GenerationId(2, "00000002"), 1, None, 0.0, {}, "here")
    writer.begin(BeginOrder(record, ROOT_ID, 3, now=True))
    os.kill(writer.pid, signal.SIGKILL)
    until(lambda: not alive(writer.pid))
    hear(writer, "begun")
    assert read_document(bench.root / record.id.key)["world_size"] == 1
    os.kill(writer.pid, signal.SIGKILL)
    until(lambda: not alive(writer.pid))
    assert writer.poll() == []
    assert not alive(writer.pid), "there is nothing to do"


def test_who_asks_for_too_short_a_time_is_told_of_no_failure(bench: Bench) -> None:
    writer = bench.writer()
    save, slot = bench.slot(1)
    writer.watch(save, 0.1)
    hear(writer, "undecided")
    writer.add_slot(slot.path)
    writer.persist(save, slot.path)
    assert "failed" not in [event["event"] for event in heard(writer, "committed")]
    assert failed_parts(bench.root) == []


@pytest.mark.parametrize("op", ["get", "scan"])
def test_who_asks_where_the_store_does_not_answer_is_told_of_no_failure(bench: Bench, op: str) -> None:
    """One request was refused, and the rank said that the save would never be committed, which rank 0 committed."""
    plan = bench.directory / "plan.json"
    write_plan(plan, [{"op": op, "key": "^(steps|parts)/", "action": "error"}])
    writer = bench.writer(rank=1, world_size=2, url=f"fault+file://{bench.root}?plan={quote(str(plan))}")
    save, slot = bench.slot(1)
    writer.watch(save, 0.1)
    answers = heard(writer, "undecided")
    assert not [event for event in answers if event["event"] == "failed"]
    committer = bench.writer()
    committer.add_slot(slot.path)
    committer.persist(save, slot.path)
    hear(committer, "committed")
    write_plan(plan, [])
    writer.watch(save, 0.0)
    hear(writer, "committed")


@pytest.mark.parametrize("newer", [False, True])
def test_who_asks_for_a_save_of_another_rank_is_told_that_a_newer_job_has_begun(bench: Bench, newer: bool) -> None:
    """As the rank that commits is: an error of another class on each could end one of them, and not the others."""
    writer, save = bench.writer(rank=1, world_size=2), SaveId(1, bench.generation)
    with open_store(str(bench.root)) as store:
        if newer:
            begun = GenerationId(bench.generation.number + 1, "0" * 8)
            Catalog(store).generations.put(Generation(begun, 2, None, 0.0, {}, "here"))
        put_failure(store, save, 0, "gave up")
    writer.watch(save, WAIT_S)
    found = hear(writer, "failed")
    assert found["kind"] == ("Superseded" if newer else "SaveFailed")
    assert ("has begun" if newer else "rank 0 failed: gave up") in found["error"]


@pytest.mark.parametrize(
    ("parts", "differ", "damaged"), [(1, False, False), (2, False, False), (2, True, False), (2, False, True)]
)
def test_who_asks_for_what_rank_0_gave_up_behind_all_parts_is_told_in_doubt(
    bench: Bench, parts: int, differ: bool, damaged: bool
) -> None:
    """Its manifest may have been put, though that was not answered, and may come late. Without a part there is none,
    nor where replicas differ."""
    save = SaveId(1, bench.generation)
    with open_store(str(bench.root)) as store, ThreadPoolExecutor(1) as executor:
        for rank in range(parts):
            bench.slots.append(ready_slot(bench.directory, save, {f"w{rank}": np.arange(9)}, rank, size=2))
            if differ:
                header = bench.slots[rank].read_header()
                bench.slots[rank].write_header(replace(header, check=Check(1, rank, 0)))
            Persister(store, executor, rank, 2).persist(bench.slots[rank], save)
        name = put_failure(store, save, 0, "gave up")
    if damaged:
        flip_bit(bench.root / name.key, 100)
    writer = bench.writer(rank=1, world_size=2)
    writer.watch(save, WAIT_S)
    found = hear(writer, "failed")
    in_doubt = parts == 2 and not differ
    assert (found["kind"], found["seen"], found.get("in_doubt", False)) == ("SaveFailed", True, in_doubt)
    assert f"rank 0 failed: {'why cannot be read' if damaged else 'gave up'}" in found["error"]


def test_a_writer_that_keeps_dying_answers_by_a_failure(bench: Bench) -> None:
    writer = bench.writer()
    save, slot = bench.slot(1)
    os.kill(writer.pid, signal.SIGSTOP)
    writer.add_slot(slot.path)
    writer.persist(save, slot.path)
    pids, events = {writer.pid}, []
    while not events:
        os.kill(writer.pid, signal.SIGKILL)
        until(lambda: not alive(writer.pid))
        events = [event for event in writer.poll() if event["event"] == "failed"]
        if not events:
            os.kill(writer.pid, signal.SIGSTOP)
            pids.add(writer.pid)
    assert len(pids) == MAX_DEATHS
    assert "died 3 times in a row" in events[0]["error"]
    assert "in_doubt" not in events[0], "none has begun"
    hear(writer, "failed")  # the fourth publishes it, for the other ranks
    assert "died 3 times in a row" in failed_parts(bench.root)[0]
    assert read_root(bench.root) == []


def test_a_writer_that_keeps_dying_has_begun_nothing_that_waits(bench: Bench) -> None:
    """It was told in doubt as well, as if a part of it could be there."""
    plan = bench.directory / "plan.json"
    write_plan(plan, [{"op": "put", "key": "-ok-", "action": "kill-before"}])
    writer = bench.writer(url=f"fault+file://{bench.root}?plan={quote(str(plan))}")
    for step in (1, 2):
        save, slot = bench.slot(step)
        writer.add_slot(slot.path)
        writer.persist(save, slot.path)
    told = [event for event in heard(writer, "failed") if event["event"] == "failed"]
    assert [(keys.parse_save(event["save"]).step, "in_doubt" in event) for event in told] == [(1, True), (2, False)]


def test_a_writer_that_keeps_dying_says_nothing_of_the_snapshot_that_is_still_taken(bench: Bench) -> None:
    """It was told as never to be, and published as that, and then committed."""
    plan = bench.directory / "plan.json"
    write_plan(plan, [{"op": "put", "key": "-ok-", "action": "kill-before"}])
    writer = bench.writer(url=f"fault+file://{bench.root}?plan={quote(str(plan))}")
    (poison, slot), (save, later) = bench.slot(1), bench.slot(2)
    for given in (slot, later):
        writer.add_slot(given.path)
    writer.expect(save)
    writer.tell_expected(save)
    writer.persist(poison, slot.path)
    told = heard(writer, "failed")
    write_plan(plan, [])
    writer.persist(save, later.path)
    told += heard(writer, "committed")
    ended = {(found["event"], found["save"]) for found in told if found["event"] in ("failed", "committed")}
    assert ended == {("failed", str(poison)), ("committed", str(save))}
    assert len(failed_parts(bench.root)) == 1


def test_a_writer_that_keeps_dying_says_nothing_of_what_what_another_rank_commits(bench: Bench) -> None:
    """This rank was told that the save had failed, while rank 0 committed it."""
    writer = bench.writer(rank=1, world_size=2)
    save, slot = bench.slot(1)
    writer.watch(save, WAIT_S)
    pids, answers = set(), []
    while not answers:
        pids.add(writer.pid)
        os.kill(writer.pid, signal.SIGKILL)
        until(lambda: not alive(writer.pid))
        answers = [event for event in writer.poll() if event["event"] in ("undecided", "failed")]
    assert len(pids) == MAX_DEATHS
    assert answers == [{"event": "undecided", "save": str(save)}]
    other = bench.writer()
    other.add_slot(slot.path)
    other.persist(save, slot.path)
    hear(other, "committed")
    writer.watch(save, 0.0)
    assert hear(writer, "committed")["save"] == str(save), "who asks again is told"


@pytest.mark.parametrize("refused", ["no second part", "no second writer", "no slot"])
def test_a_rank_whose_writer_died_as_its_part_was_put_does_not_know_whether_rank_0_commits(
    bench: Bench, refused: str
) -> None:
    """It said that the save would never be committed, and rank 0 committed it."""
    plan = bench.directory / "plan.json"
    write_plan(plan, [{"op": "put", "key": "^parts/", "action": "kill-after"}])
    writer = bench.writer(rank=1, world_size=2, url=f"fault+file://{bench.root}?plan={quote(str(plan))}")
    save = SaveId(1, bench.generation)
    for rank in (0, 1):
        bench.slots.append(ready_slot(bench.directory, save, {f"w{rank}": np.arange(9)}, rank, size=2))
    writer.add_slot(bench.slots[1].path)
    writer.persist(save, bench.slots[1].path)
    until(lambda: not alive(writer.pid))
    write_plan(plan, [{"op": "put", "key": "^p", "action": "kill-before" if "writer" in refused else "error"}])
    if refused == "no slot":
        bench.slots[1].unlink()
    assert hear(writer, "failed").get("in_doubt") is True
    committer = bench.writer(world_size=2)
    committer.add_slot(bench.slots[0].path)
    committer.persist(save, bench.slots[0].path)
    hear(committer, "committed")


def test_what_rank_0_could_not_tell_the_store_of_is_in_doubt(bench: Bench) -> None:
    """Its writer died behind the part each time, and the next job committed what was told as never to be."""
    plan = bench.directory / "plan.json"
    actions = {"-ok-": "kill-after", "-failed-": "error"}
    write_plan(plan, [{"op": "put", "key": key, "action": action} for key, action in actions.items()])
    writer = bench.writer(url=f"fault+file://{bench.root}?plan={quote(str(plan))}")
    save, slot = bench.slot(1)
    writer.add_slot(slot.path)
    writer.persist(save, slot.path)
    failed = hear(writer, "failed")
    assert "died 3 times in a row" in failed["error"]
    assert failed.get("in_doubt") is True
    writer.close(WAIT_S)
    catalog = Catalog(open_store(str(bench.root)))
    assert finish_saves(catalog, catalog.next_generation()) == [save]


def test_what_lacks_a_part_as_its_committer_died_is_never_committed(bench: Bench) -> None:
    """Nobody can have committed it, and it was told in doubt."""
    writer = bench.writer(world_size=2)
    save = SaveId(1, bench.generation)
    bench.slots.append(ready_slot(bench.directory, save, {"w": np.arange(9)}, size=2))
    writer.add_slot(bench.slots[0].path)
    writer.persist(save, bench.slots[0].path)
    hear(writer, "released")
    os.kill(writer.pid, signal.SIGKILL)
    until(lambda: not alive(writer.pid))
    put_failure(open_store(str(bench.root), {}), save, 1, "no snapshot")
    failed = hear(writer, "failed")
    assert failed["error"] == "step 1: rank 1 failed: no snapshot"
    assert "in_doubt" not in failed


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_writer_had_given_up_as_it_died_is_not_put_by_the_next_one(bench: Bench, rank: int) -> None:
    """Other ranks had read that its part would never come, and told so, of a step that was then committed."""
    plan = bench.directory / "plan.json"
    faults = [("commit", "^packs/", "full"), ("put", f"/00000{rank}-[0-9a-f]*-failed-", "kill-after")]
    write_plan(plan, [{"op": op, "key": key, "action": action} for op, key, action in faults])
    writer = bench.writer(rank=rank, world_size=2, url=f"fault+file://{bench.root}?plan={quote(str(plan))}")
    save = SaveId(1, bench.generation)
    bench.slots.append(ready_slot(bench.directory, save, {"w": np.arange(9)}, rank, size=2))
    writer.add_slot(bench.slots[0].path)
    writer.persist(save, bench.slots[0].path)
    until(lambda: not alive(writer.pid))
    write_plan(plan, [])
    assert f"rank {rank} failed: " in hear(writer, "failed")["error"]
    assert not [*bench.root.glob("parts/*/*-ok-*")]


@pytest.mark.parametrize("given_up", [False, True])
def test_a_rank_that_asks_late_is_told_of_a_step_that_was_dropped_since(bench: Bench, given_up: bool) -> None:
    """It waited until its time was over; or was told of a failure, where rank 0 had given the step up in doubt."""
    writer = bench.writer()
    save, slot = bench.slot(1)
    writer.add_slot(slot.path)
    writer.persist(save, slot.path)
    hear(writer, "committed")
    if given_up:
        put_failure(open_store(str(bench.root)), save, 0, "its manifest was not answered")
    drop(Catalog(open_store(str(bench.root))), save)
    other, told = bench.writer(rank=1, world_size=1), list[Message]()
    other.watch(save, 0.0)
    until(lambda: bool(told.extend(event for event in other.poll(0.05) if event["event"] != "ready") or told))
    assert [event["event"] for event in told] == ["committed"]


@pytest.mark.parametrize("how", ["times out", "Ctrl-C"])
def test_what_it_said_of_earlier_saves_is_not_lost_where_it_does_not_end(bench: Bench, how: str) -> None:
    plan = bench.directory / "plan.json"
    write_plan(plan, [{"op": "commit", "key": "^packs/0*2-", "action": "hold"}])
    writer = bench.writer(url=f"fault+file://{bench.root}?plan={quote(str(plan))}")
    for step in (1, 2):
        save, slot = bench.slot(step)
        writer.add_slot(slot.path)
        writer.persist(save, slot.path)
    until(lambda: bool([*bench.root.glob("steps/*.json")]))
    if how == "Ctrl-C":
        threading.Timer(1.0, interrupt_main).start()
    with pytest.raises(WaitTimeout if how == "times out" else KeyboardInterrupt):
        writer.close(1.0 if how == "times out" else WAIT_S)
    assert hear(writer, "committed")["save"] == str(SaveId(1, bench.generation))
    write_plan(plan, [])


def test_a_writer_that_does_not_end_is_named(bench: Bench) -> None:
    writer = bench.writer()
    os.kill(writer.pid, signal.SIGSTOP)
    with pytest.raises(WaitTimeout, match=rf"pid {writer.pid}\) did not finish within 0 s; it goes on alone"):
        writer.close(0.1)


def test_orders_that_cannot_be_carried_out_end_it_and_are_answered(bench: Bench) -> None:
    """Such as those of a setup that is wrong: no process is left behind that answers nothing."""
    writer = bench.writer(url="no-such-scheme://nowhere")
    save, slot = bench.slot(1)
    writer.add_slot(slot.path)
    writer.persist(save, slot.path)
    failed = hear(writer, "failed")
    assert "died 3 times in a row" in failed["error"]
    assert "no-such-scheme" in writer.log_path.read_text()
    until(lambda: not alive(writer.pid))


def test_the_word_that_a_save_failed_is_put_again_where_the_store_was_full(bench: Bench) -> None:
    """Else the rank that commits would wait for this one's part for as long as a save may take."""
    plan = bench.directory / "plan.json"
    write_plan(plan, [{"op": "put", "key": "-failed-", "nth": 0, "action": "full"}])
    writer = bench.writer(url=f"fault+file://{bench.root}?plan={quote(str(plan))}")
    writer.void(SaveId(1, bench.generation), "no snapshot")
    hear(writer, "failed")
    until(lambda: failed_parts(bench.root) == ["no snapshot"])
