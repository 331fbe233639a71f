"""Where a writer logs: to a directory that nobody else can write to."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.writers import Bench, alive, hear, until

from ckptlib.format.keys import SaveId
from ckptlib.slots import files
from ckptlib.staging.arena import directories
from ckptlib.writer import logfile


def others(path: Path) -> None:
    path.mkdir(mode=0o700)
    os.chown(path, 65534, 65534)


def writable(path: Path) -> None:
    path.mkdir()
    path.chmod(0o770)


TAKEN: dict[str, Callable[[Path], None]] = {
    "is a symbolic link": lambda path: path.symlink_to(path.parent / "elsewhere"),
    "is no directory": lambda path: path.write_bytes(b""),
    "may be written to by others (mode 770)": writable,
    **({"belongs to user 65534": others} if os.geteuid() == 0 else {}),
}


@pytest.mark.parametrize("problem", TAKEN)
def test_who_was_first_to_take_the_name_of_the_log_directory_gets_no_log(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, problem: str
) -> None:
    directory = tmp_path / "temporary"
    (directory / "elsewhere").mkdir(parents=True)
    taken = directory / f"ckptlib-{os.geteuid()}"
    TAKEN[problem](taken)
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    writer = bench.writer()
    hear(writer, "ready")
    own = writer.log_path.parent
    assert os.readlink(f"/proc/{writer.pid}/fd/1") == str(writer.log_path)
    assert own.parent == directory
    assert (own.stat().st_uid, own.stat().st_mode & 0o777, own.is_symlink()) == (os.geteuid(), 0o700, False)
    assert own != taken
    assert list((directory / "elsewhere").iterdir()) == []
    assert not taken.is_dir() or list(taken.iterdir()) == []
    assert f"{taken} {problem}, so the writer logs to {own}" in caplog.text


def test_a_writer_is_started_again_where_its_log_was_cleaned_away(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    writer = bench.writer()
    hear(writer, "ready")
    shutil.rmtree(writer.log_path.parent)
    os.kill(writer.pid, signal.SIGKILL)
    until(lambda: not alive(writer.pid))
    writer.void(SaveId(1, bench.generation), "for a test")
    until(lambda: bool(writer.poll()))
    assert writer.log_path.exists()


def test_a_read_only_container_has_its_slots_and_logs_in_memory(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no directory that tempfile could use."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    monkeypatch.setattr(files, "MEMORY", tmp_path)
    assert directories(None) == [tmp_path]
    writer = bench.writer()
    hear(writer, "ready")
    assert writer.log_path.is_relative_to(tmp_path)


def test_the_log_directory_is_made_once_and_no_link_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first, second = logfile.new_path(0), logfile.new_path(0)
    assert first.parent == second.parent == tmp_path / f"ckptlib-{os.geteuid()}"
    assert first != second
    (tmp_path / "target").write_bytes(b"kept")
    first.symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        logfile.append_to(first)
    with logfile.append_to(second) as output:
        output.write(b"one")
    with logfile.append_to(second) as output:
        output.write(b" two")
    assert second.read_bytes() == b"one two"
    assert second.stat().st_mode & 0o777 == 0o600


def test_the_logs_of_writers_that_have_ended_go(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is killed a thousand times would leave as many for each rank. A new process removes them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    writer = bench.writer()
    hear(writer, "ready")
    told, now = b"step 7: what was wrong with it\n", time.time()
    ages = {b"": {True: 2 * 3600, False: 600}, told: {True: 31 * 86400, False: 29 * 86400}}
    logs = {(text, old): logfile.new_path(0) for text in ages for old in (True, False)}
    for (text, old), path in logs.items():
        with logfile.append_to(path) as output:
            output.write(text)
        os.utime(path, (now, now - ages[text][old]))
    other = writer.log_path.with_name("another.log")
    other.touch()
    for path in (writer.log_path, other):
        os.utime(path, (now, now - 40 * 86400))
    logfile.remove_old(other.parent)
    stay = {logs[b"", False], logs[told, False], other}
    assert {*other.parent.iterdir()} == {*stay, writer.log_path}, "which runs"
    os.kill(writer.pid, signal.SIGKILL)

    def is_gone() -> bool:  # threads may hold it a little longer
        logfile.remove_old(other.parent)
        return not writer.log_path.exists()

    until(is_gone)
    assert {*other.parent.iterdir()} == stay
