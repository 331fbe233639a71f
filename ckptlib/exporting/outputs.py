"""Writes files that appear whole or not at all: under a temporary name in their directory, and renamed at the end."""

from __future__ import annotations

import errno
import glob
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptlib.errors import NoRoom, ObjectExists, StoreError
from ckptlib.stores.flushing import flush_path, free_nbytes, make_directories, reserve

PARTIAL = ".partial"
"""The suffix of files that are being written; their names begin with a dot."""

LEFT_FOR_S = 86400.0
"""A partial file that was not written to for this long was left by an export that was killed."""


class Outputs:
    """Files in one directory. `publish` gives them their names, in order; before, none has its name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._nonce = secrets.token_hex(4)
        self._must_be_free: tuple[Path, ...] = ()
        self._written: list[tuple[Path, Path]] = []

    def make_room(self, nbytes: int, *names: str) -> None:
        """Makes the directory. Raises ObjectExists if a name is taken, or that of the directory is by a file, NoRoom if
        the disk is too small.

        `names`: names of the files to come, and of others that readers would take instead of them, or together with
        them. Removes what an export of the same names left if it was killed more than a day ago.
        """
        try:
            make_directories(str(self._directory))
        except (FileExistsError, NotADirectoryError) as error:
            raise ObjectExists(
                f"{self._directory} is to be a directory, and it or one above it is a file, or a link that leads "
                "nowhere; export to another place"
            ) from error
        for path in self._directory.glob(f".*{PARTIAL}"):
            if any(path.match(f".{glob.escape(name)}.{'[0-9a-f]' * 8}{PARTIAL}") for name in names):
                with suppress(OSError):  # another process removes it
                    if path.stat().st_mtime < time.time() - LEFT_FOR_S:
                        _remove(path)
        self._must_be_free = tuple(self._directory / name for name in names)
        for path in self._must_be_free:
            if path.exists():
                raise ObjectExists(f"{path} is there already; remove it, or export to another place")
        free = free_nbytes(str(self._directory))
        if free is not None and nbytes > free:
            raise NoRoom(f"{self._directory}: the export has {nbytes:,} bytes, and the disk has {free:,} left")

    def beside(self, name: str) -> Path:
        """Returns the path at which a file or directory is written before it has its name."""
        path = self._directory / f".{name}.{self._nonce}{PARTIAL}"
        self._written.append((path, self._directory / name))
        return path

    def write(self, name: str, nbytes: int, fill: Callable[[int], object]) -> None:
        """Writes a file, for which `nbytes` are reserved. `fill`: called with its descriptor."""
        path = self.beside(name)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        try:
            if nbytes:
                reserve(fd, nbytes)
            fill(fd)
            os.fsync(fd)
        finally:
            os.close(fd)

    def publish(self) -> None:
        """Gives all files their names, in the order in which they were written."""
        for path in self._must_be_free:
            _check_free(path)
        for path, final in self._written:
            _name(path, final)
            flush_path(self._directory)
        self._written.clear()

    def discard(self) -> None:
        """Removes all that does not have its name yet."""
        for path, _ in self._written:
            with suppress(OSError):
                _remove(path)


@contextmanager
def outputs(directory: Path) -> Iterator[Outputs]:
    """Yields the files of one export. On leaving, whatever is raised, removes those that do not have their names.

    Raises NoRoom or StoreError in place of an OSError.
    """
    found = Outputs(directory)
    try:
        yield found
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoRoom(f"{directory}: {error.strerror}") from error
        raise StoreError(f"{directory}: the export cannot be written: {error}") from error
    finally:
        found.discard()


def _name(path: Path, final: Path) -> None:
    """Gives a file or directory its name, unless it is taken. Raises ObjectExists if it is.

    Another export, such as one that outlived its trainer, may publish the same names at this moment. The first one gets
    all of them: renaming would replace the other's file, so this makes a link.
    """
    try:
        os.link(path, final)
    except OSError:  # it is there, or this is a directory, or the file system has no hard links
        if not _is_one_file(path, final):
            _check_free(final)
            path.rename(final)
            return
    path.unlink()


def _is_one_file(path: Path, final: Path) -> bool:
    """Whether both are one file. If an answer is lost, NFS sends the request to link again, which then finds the link
    of the first request."""
    try:
        return path.samefile(final)
    except FileNotFoundError:
        return False


def _check_free(path: Path) -> None:
    if path.exists():
        raise ObjectExists(f"{path} is there since the export began; remove it, and export again")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
