"""Directories that each name a step of a root; trainers keep one for each checkpoint.

A directory gets its name when the step is committed, so one that is there is a whole checkpoint. Until then it is a
draft, whose name begins with a dot:

    a kill ...                      leaves                                  then `settle`
    while its files are written     a draft that names no step              removes the draft
    before the commit               the draft, and no step                  removes the draft
    after the commit                the draft, and the step                 gives the draft its name
    as one is replaced              the draft, and no directory             gives the draft its name
    as one is removed               the step, which no directory names      leaves it: `ckptlib rewind` and `gc` can

A process that has drafts locks the directory of all: one that looks meanwhile, such as an evaluation, removes none.

This module knows neither trainers nor tensors.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from contextlib import suppress
from pathlib import Path

from ckptlib.adapters import directory_lock
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.finishing import finish_saves
from ckptlib.catalog.retention import drop, sweep
from ckptlib.errors import CheckpointNotFound, CkptError, FormatError
from ckptlib.format.keys import SaveId, parse_save
from ckptlib.jobs import JobFutures
from ckptlib.policy.tier import directory_of
from ckptlib.recovery.leftovers import ORPHANS_TIMEOUT_S
from ckptlib.saving.settings import SAVE_DEADLINE
from ckptlib.staging.arena import searched
from ckptlib.staging.other_slots import OtherSlots
from ckptlib.stores import open_store
from ckptlib.stores.flushing import flush_path

log = logging.getLogger(__name__)

POINTER = "ckptlib_step.json"
"""The file of a directory that names its step."""

ROOT = "ckptlib"
"""Name of the root's directory, beside the directories or files that name its steps."""

MOST = 4096
"""The most bytes of a file that names a step."""

POLL_S = 0.05
ASK_EVERY_S = 0.1

HEAD = "."
"""Prefix of a draft's name."""


def step_of(folder: Path) -> SaveId | None:
    """Returns the step that a directory names, or None. Raises FormatError for a file of another kind."""
    where = folder / POINTER
    try:
        with where.open("rb") as file:
            data = file.read(MOST)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return parse_save(json.loads(data)["step"])
    except (FormatError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(
            f"{where}: expected a line of JSON that names a step, as ckptlib writes it, got {data[:40]!r}; resume from "
            "another directory, or write the step that `ckptlib ls --json` prints into this file"
        ) from error


_LEFT = re.compile(r"\..+\.[0-9]{12}-[0-9]{6}-[0-9a-f]{8}\.part")
"""Matches the name of a draft."""


class StepFolders:
    """The folders of one directory and one root. One process saves; its own thread flushes and deletes files."""

    def __init__(
        self,
        directory: Path,
        root: str,
        storage_options: Mapping[str, object] | None,
        beyond: Callable[[Path], list[Path]],
        arena: str | Path | None = None,
    ) -> None:
        """`beyond`: returns the directories that are too many, given the newest one. A thread calls it.

        `arena`: as for `Checkpointer`.
        """
        self._directory = directory
        self._root = root
        self._options = storage_options
        self._beyond = beyond
        self._arena = None if arena is None else directory_of("arena", arena)
        self._named = {folder: save for folder, save in _readable(directory) if not _is_draft(folder, save)}
        self._identity = _identity(directory)
        """Identity of the directory as it was found or made; None: it is not there yet."""
        self._thread = JobFutures("folders")
        self._leaving: dict[SaveId, Path | None] = {}
        """Steps that could not be dropped yet, with the drafts, if any, that stay until they are."""
        self._publishing: list[Future[None]] = []
        self._ending = False
        self._failed: OSError | None = None
        self._left = threading.Event()
        self._lock: weakref.finalize[[int], StepFolders] | None = None
        """Releases the lock, which is held from the first draft on, when this object is collected at the latest: nobody
        closes it if a training was interrupted."""

    def settle(self) -> None:
        """Gives drafts of an earlier process their names if their step was committed, and removes the others.

        Removes nothing else: directories that are too many are removed when a newer one comes.
        """
        if not self._directory.is_dir():
            return
        lock = directory_lock.take(self._directory) if self._lock is None else None
        try:
            self._settle(alone=lock is not None or self._lock is not None)
        finally:
            if lock is not None:
                directory_lock.give_up(lock)

    def _settle(self, alone: bool) -> None:
        """Settles drafts. Unless `alone`, another process may be saving here: then nothing is removed or waited for."""
        for path in self._directory.glob(f"{HEAD}*.part") if alone else ():
            if _LEFT.fullmatch(path.name) and path.is_dir() and not (path / POINTER).exists():
                shutil.rmtree(path)  # its process was killed while making or deleting it
        drafts = [(path, save) for path, save in _readable(self._directory) if _is_draft(path, save)]
        if not drafts:
            return
        with open_store(self._root, self._options) as store:
            catalog = Catalog(store)
            if alone and not all(catalog.is_committed(save) for _, save in drafts):
                self._finish(catalog)
            for draft, save in drafts:
                if catalog.is_committed(save):
                    self._give_name(draft.name[len(HEAD) : -len(_tail(save))], save)
                elif alone:
                    shutil.rmtree(draft)

    def _finish(self, catalog: Catalog) -> None:
        """Waits for the writers that an earlier process left on this host, and commits the saves they left whole."""
        try:
            root = catalog.root()
        except CheckpointNotFound:
            return
        others = OtherSlots(root.id, catalog.next_generation(), searched(self._arena))
        deadline = time.monotonic() + ORPHANS_TIMEOUT_S
        while others.under_way() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        finish_saves(catalog, catalog.next_generation())  # now above theirs, whose records are put by now

    def draft(self, name: str, save: SaveId, write: Callable[[Path], object] | None = None) -> Path:
        """Makes a new directory for the files of a checkpoint, which nobody takes for one yet.

        `write`: puts these files, before the one that names the step, so a draft that names one has all of them. Raises
        OSError; there is no draft then, and `publish` fails.
        """
        path = self._draft_of(name, save)
        try:
            path.mkdir(parents=True)
            self._identity = self._identity or _identity(self._directory)
            if self._lock is None and (lock := directory_lock.take(self._directory)) is not None:
                self._lock = weakref.finalize(self, directory_lock.give_up, lock)
            if write is not None:
                write(path)
            new = path / f".{POINTER}.new"  # the thread may be reading all drafts
            new.write_text(json.dumps({"ckptlib": ROOT, "step": str(save)}) + "\n")
            new.rename(path / POINTER)
        except OSError:
            self.discard(name, save)
            raise
        return path

    def discard(self, name: str, save: SaveId) -> None:
        """Removes a draft whose step will never exist."""
        shutil.rmtree(self._draft_of(name, save), ignore_errors=True)

    def publish(self, name: str, save: SaveId) -> None:
        """Has the thread give the draft its name, and remove directories that are too many. Does not wait."""
        self._publishing.append(self._thread.submit(self._publish, name, save))

    def publish_when_committed(self, name: str, save: SaveId, known: threading.Event) -> None:
        """Publishes as `publish` does, for callers that hear of no commit: the thread asks until the step is there.

        `known`: set once the caller knows the outcome. If the step is not there then, it never will be, or somebody has
        removed it: the thread discards the draft.
        """
        self._publishing.append(self._thread.submit(self._await, name, save, known))

    def _await(self, name: str, save: SaveId, known: threading.Event) -> None:
        deadline, over = time.monotonic() + SAVE_DEADLINE.total_seconds(), False
        with open_store(self._root, self._options) as store:
            catalog = Catalog(store)
            while not catalog.is_committed(save):
                if self._left.is_set():
                    return
                if over:
                    self.discard(name, save)
                    return
                over = known.wait(ASK_EVERY_S) or time.monotonic() > deadline
        self._publish(name, save)

    def wait(self) -> None:
        """Waits until everything asked for is done. Raises OSError if a directory could not get its name."""
        wait_for_all(self._publishing)  # waits for all, even if one raises
        for future in self._publishing:
            future.result()
        self._publishing.clear()
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def end(self) -> None:
        """Waits as `wait` does, while Python ends: directories get their names, but nothing is removed, since that
        needs threads, which Python no longer begins."""
        self._ending = True
        self.wait()

    def close(self) -> None:
        """Waits as `wait` does, and drops the steps of directories that somebody else has removed meanwhile."""
        try:
            self._thread.submit(self._drop_gone).result()
            self.wait()
        finally:
            self._thread.finish()
            self._unlock()

    def let_go(self) -> None:
        """Waits for no commit, only for renames and removals under way: the next process looks at the directory."""
        self._left.set()
        for future in self._publishing:
            future.cancel()
        self._thread.finish()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock()
            self._lock = None

    def _draft_of(self, name: str, save: SaveId) -> Path:
        """Returns another path for each step: a draft with the same name may still be under way."""
        return self._directory / f"{HEAD}{name}{_tail(save)}"

    def _publish(self, name: str, save: SaveId) -> None:
        """Publishes a draft. Keeps an OSError for `wait`: raising it here would stop this rank alone."""
        try:
            folder = self._give_name(name, save)
            if self._ending:
                return
            for other in self._beyond(folder):
                log.info("%s is removed, as it is one too many", other)
                self._remove(other)
            self._drop_gone()
        except OSError as error:
            log.error("%s: step %d is saved, but its directory is not: %s", self._directory / name, save.step, error)
            self._failed = error

    def _give_name(self, name: str, save: SaveId) -> Path:
        draft, folder = self._draft_of(name, save), self._directory / name
        try:
            if folder.is_dir():
                _take_over(folder, draft)
            for path in [*draft.rglob("*"), draft]:
                flush_path(path)
            if folder.exists():
                shutil.rmtree(folder)
            draft.rename(folder)
        except FileNotFoundError:
            if draft.exists() or step_of(folder) != save:
                raise  # otherwise another process did it first
        flush_path(self._directory)
        replaced = self._named.get(folder)
        self._named[folder] = save
        if replaced is not None and not self._ending:
            self._drop({replaced: None})
        return folder

    def _remove(self, folder: Path) -> None:
        """Removes a folder and its step. It is a draft until that is dropped: a kill leaves nothing unnoticed."""
        save = self._named.pop(folder, None)
        if save is None:
            shutil.rmtree(folder, ignore_errors=True)
            return
        draft = self._draft_of(folder.name, save)
        with suppress(FileNotFoundError):  # somebody else has removed it
            folder.rename(draft)
        self._drop({save: draft})

    def _drop_gone(self) -> None:
        """Drops the steps whose directories are gone; none if the directory of all of them is gone or another one, as
        when it was moved, or its file system is not mounted."""
        try:
            gone = [folder for folder in self._named if not folder.is_dir()]
        except OSError as error:
            log.warning("which directories are gone cannot be told: %s", error)
            return
        if gone and _identity(self._directory) != self._identity:
            log.warning(
                "%s is not there any more, or another directory is in its place. The steps that directories in it "
                "named stay in %s: ckptlib gc drops them",
                self._directory,
                self._root,
            )
            return
        self._drop({self._named.pop(folder): None for folder in gone})

    def _drop(self, saves: Mapping[SaveId, Path | None]) -> None:
        """Drops steps, with their drafts, except those that another directory names, even one that somebody has copied
        or renamed meanwhile. Their bytes are deleted after the grace period of the root.

        A step that stays, because somebody was killed as he dropped it or the store does not answer, is tried again
        with the next one. If there is none, the next start gives the remaining draft its name. A pinned step stays
        without a draft.
        """
        self._leaving |= saves
        if not self._leaving:
            return
        try:
            self._named |= {folder: save for folder, save in _readable(self._directory) if not _is_draft(folder, save)}
            with open_store(self._root, self._options) as store:
                catalog = Catalog(store)
                for save, draft in sorted(self._leaving.items()):
                    if save not in self._named.values() and catalog.is_committed(save):
                        drop(catalog, save)
                        steps = catalog.steps(since=save)
                        if save in steps.saves and save not in steps.pins:
                            continue
                    del self._leaving[save]
                    if draft is not None:
                        shutil.rmtree(draft, ignore_errors=True)
                sweep(catalog, None, None)
        except (CkptError, OSError, RuntimeError) as error:  # they only take room: `ckptlib gc` deletes them
            # RuntimeError: Python ends, and begins no thread
            log.warning("%s: steps that no directory names are left: %s", self._root, error)


def _take_over(folder: Path, draft: Path) -> None:
    """Moves files that others have put into the checkpoint's folder to the draft: callbacks of trainers know of no
    draft. If a checkpoint is replaced, moves only files newer than the draft."""
    begun = (draft / POINTER).stat().st_mtime_ns if (folder / POINTER).exists() else 0
    for path in folder.iterdir():
        if path.lstat().st_mtime_ns >= begun and not (draft / path.name).exists():
            path.rename(draft / path.name)


def _tail(save: SaveId) -> str:
    """Returns the end of a draft's name."""
    return f".{save}.part"


def _is_draft(path: Path, save: SaveId) -> bool:
    return path.name.startswith(HEAD) and path.name.endswith(_tail(save)) and len(path.name) > len(HEAD + _tail(save))


def _readable(directory: Path) -> Iterator[tuple[Path, SaveId]]:
    """Yields the directories in this one that name a step. Warns of those whose step cannot be told."""
    for folder in sorted(directory.iterdir()) if directory.is_dir() else ():
        if folder.is_symlink() or not folder.is_dir():
            continue
        try:
            save = step_of(folder)
        except (FormatError, OSError) as error:
            log.warning("%s", error)
        else:
            if save is not None:
                yield folder, save


def _identity(directory: Path) -> tuple[int, int] | None:
    """Returns what tells a directory from another one of its name; None if there is none, or it cannot be told."""
    try:
        found = directory.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
