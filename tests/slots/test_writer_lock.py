"""Who keeps a writer's lock, and who does not: real processes, killed in every order."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.tmpfs import mounted, tmpfs
from helpers.writers import alive, until
from workers import lock_jobs

from ckptlib.slots.writer_lock import SUFFIX, WriterLock, is_awaited, reclaim

PREFIX = "ckptlib-root-000001-abcdef01"


class Trainer:
    """A process that has taken a lock, and what it has started."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._process = process
        path, *others = process.stdout.readline().split()
        self.path, self.others = Path(path), [int(pid) for pid in others]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(60)

    def let_writer_read(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("read\n")
        self._process.stdin.flush()


@contextmanager
def trainer(directory: Path, *kinds: str) -> Iterator[Trainer]:
    """See `lock_jobs`."""
    command = [sys.executable, lock_jobs.__file__, str(directory), *kinds]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    made = Trainer(process)
    try:
        yield made
    finally:
        made.kill()
        for pid in filter(alive, made.others):
            os.kill(pid, signal.SIGKILL)


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid))


def awaited_elsewhere(path: Path) -> bool:
    """Whether another process waits."""
    code = "import sys; from pathlib import Path; from ckptlib.slots.writer_lock import is_awaited;"
    code += "print(is_awaited(Path(sys.argv[1])))"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    return done.stdout == "True\n"


def test_the_writer_of_a_dead_trainer_is_awaited_until_it_has_read_its_orders(tmp_path: Path) -> None:
    with trainer(tmp_path, "writer") as job:
        assert not is_awaited(job.path), "its trainer lives"
        reclaim(job.path)
        job.kill()
        assert is_awaited(job.path)
        assert is_awaited(job.path), "who asks does not take it"
        reclaim(job.path)
        assert is_awaited(job.path)
        job.let_writer_read()
        until(lambda: not job.path.exists())
        assert alive(job.others[0])


@pytest.mark.parametrize("first", ["trainer", "writer"])
def test_a_writer_that_is_killed_is_not_awaited(tmp_path: Path, first: str) -> None:
    with trainer(tmp_path, "writer") as job:
        if first == "trainer":
            job.kill()
            end(job.others[0])
        else:
            end(job.others[0])
            assert not is_awaited(job.path)
            job.kill()
        assert job.path.exists()
        assert not is_awaited(job.path)
        reclaim(job.path)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["program", "forked"])
def test_other_children_of_the_trainer_do_not_keep_it(tmp_path: Path, kind: str) -> None:
    """They outlive both, as a data loader may."""
    with trainer(tmp_path, "writer", kind) as job:
        writer, other = job.others
        job.kill()
        assert is_awaited(job.path)
        end(writer)
        until(lambda: not is_awaited(job.path))  # a child that was forked just now may have yet to run
        assert alive(other)


def test_a_writer_gives_it_up_for_whoever_else_has_the_file_open(tmp_path: Path) -> None:
    with trainer(tmp_path, "heir", "writer") as job:
        job.kill()
        with job.path.open("rb") as opened:
            assert not locks(opened.fileno())
            job.let_writer_read()
            until(lambda: locks(opened.fileno()))
        assert alive(job.others[0])


def locks(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def test_a_process_does_not_wait_for_its_own(tmp_path: Path) -> None:
    """`save(url)` and a Checkpointer of one root. To look does not drop the trainer's lock either."""
    lock = WriterLock.take([tmp_path], PREFIX)
    assert lock is not None
    writers = os.dup(lock.fd)
    assert not is_awaited(lock.path)
    reclaim(lock.path)
    assert not awaited_elsewhere(lock.path)
    lock.close()
    assert is_awaited(lock.path), "left to its writer"
    assert awaited_elsewhere(lock.path)
    os.close(writers)
    assert not is_awaited(lock.path)
    lock.close()  # of a session that is closed twice


def test_one_that_is_taken_away_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a job that removes what nobody has locked: it is gone, or held for a moment."""
    tries = []
    lockf = fcntl.lockf

    def interrupted(fd: int, how: int, length: int) -> None:
        (path,) = set(tmp_path.iterdir()) - {*tries}
        tries.append(path)
        if len(tries) == 1:
            path.unlink()
        elif len(tries) == 2:
            raise BlockingIOError
        lockf(fd, how, length)

    monkeypatch.setattr(fcntl, "lockf", interrupted)
    lock = WriterLock.take([tmp_path], PREFIX)
    monkeypatch.undo()
    assert lock is not None
    assert [*tmp_path.iterdir()] == [lock.path] == tries[2:]
    lock.close()


def test_where_there_is_no_room_for_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The next directory has it; without any the job goes on, and says so."""
    with mounted(tmp_path / "full", "tmpfs", "-o", "size=4k,nr_inodes=2") as full:
        (full / "data").write_bytes(b"x" * 4096)
        lock = WriterLock.take([full, tmp_path], PREFIX)
        assert lock is not None
        assert lock.path.parent == tmp_path
        lock.close()
        assert WriterLock.take([full, tmp_path / "missing"], PREFIX) is None
        assert f"in {full}: No space left on device" in caplog.text
        assert f"in {tmp_path / 'missing'}: No such file or directory" in caplog.text


def test_a_memory_that_is_full_of_slots_has_room_for_it(tmp_path: Path) -> None:
    """The file is empty: it needs a name and no page."""
    with tmpfs(tmp_path / "full", 4096) as full:
        (full / "data").write_bytes(b"x" * 4096)
        lock = WriterLock.take([full], PREFIX)
        assert lock is not None
        lock.close()


def test_what_was_planted_is_neither_waited_for_nor_removed(tmp_path: Path) -> None:
    """By another user, who holds it for ever; or what is no such file."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    link, hard, directory, pipe, theirs = (tmp_path / f"{PREFIX}-{n}{SUFFIX}" for n in range(5))
    link.symlink_to(victim)
    os.link(victim, hard)
    directory.mkdir()
    os.mkfifo(pipe)
    theirs.touch(0o666)
    if os.geteuid() == 0:
        os.chown(theirs, 1, 1)
    else:
        theirs.unlink()
    there = sorted(tmp_path.iterdir())
    with victim.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for path in there:
            assert not is_awaited(path)
            reclaim(path)
    if theirs in there:
        with theirs.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert not is_awaited(theirs)
        reclaim(theirs)
    assert sorted(tmp_path.iterdir()) == there
    assert victim.read_bytes() == b"precious"
