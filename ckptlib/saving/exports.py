"""Exports that a run makes by itself: of committed steps, one after the other, each in a process of its own.

A failed export fails no save, and ends no training: a log line and an event report it.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from ckptlib.errors import StoreError
from ckptlib.events import Exported, ExportFailed
from ckptlib.exporting.asked import Export
from ckptlib.format.keys import SaveId
from ckptlib.saving.pending import Pending
from ckptlib.saving.session import Session
from ckptlib.saving.terminal import show

log = logging.getLogger(__name__)

POLL_S = 0.05

TOLD_CHARS = 2000
"""How many characters of a dead process's last output are reported."""


@dataclass(frozen=True, slots=True)
class _Running:
    process: subprocess.Popen[str]
    printed: IO[str]
    """A file: nobody reads while the process runs, and a full pipe would stop it."""
    save: SaveId
    out: Path
    began: float


class Exports:
    """Runs the exports of one Checkpointer; main thread. Only rank 0 has anything to do."""

    def __init__(self, export: Export | None, session: Session) -> None:
        self._export = None
        if export is not None and session.group.rank == 0:  # training may change the working directory
            self._export = replace(export, out=Path(export.out).absolute())
        self._session = session
        self._watched: deque[Pending] = deque()
        """Saves whose export is due, and which are not known to be committed yet."""
        self._waiting: deque[SaveId] = deque()
        self._running: _Running | None = None
        self._owed = False
        """Whether the next save is to be exported."""
        self._seen: SaveId | None = None
        """The latest save to the store that `_watch` was given."""
        self._taken: SaveId | None = None
        """The latest save that is exported, if it comes to be committed."""
        self._restored: SaveId | None = None
        if self._export is not None and self._export.path(0).is_file():
            log.warning("%s is there already, and no export overwrites it; the export will fail", self._export.path(0))

    def note_restored(self, save: SaveId | None, committed: bool, again: Pending | None) -> None:
        """Notes the step that was restored: the last one, if the run turns out to be at its end already. If its export
        was due, the job before may have been killed before that was written, so it is due again.

        `committed`: else the step is in memory or on local disks, and was saved `again`, if there was room.
        """
        self._restored, self._taken, self._owed = save, None, False  # a program may restore twice before its first step
        self._waiting.clear()
        if self._export is None or save is None or not self._is_due(save.step) or self._export.is_there(save.step):
            return
        if committed:
            self._waiting.append(save)
            self._taken = save
            return
        self._owed = True
        self._watch(again)

    def poll(self, last: Pending | None, step: int) -> None:
        """Begins exports that are due, after each step, and reports those that have ended. Waits for nothing. `last`:
        the latest save.

        A save may be taken some steps after it was due, so the first one from a due step on counts.
        """
        if self._export is None:
            return
        if self._taken is None or self._taken.step < step:  # `save` and `after_step` may come with the same step
            self._owed = self._owed or self._is_due(step)
        self._watch(last)
        self._see_watched()
        self._go_on()

    def _watch(self, last: Pending | None) -> None:
        """Takes the latest save as the one to export, if an export is owed and that save goes to the store."""
        if last is not None and last.drains and last.save != self._seen:  # a local save may be drained later
            self._seen = last.save
            if self._owed:
                self._watched.append(last)
                self._taken, self._owed = last.save, False

    def _see_watched(self) -> None:
        while self._watched and (self._watched[0].committed or self._watched[0].error is not None):
            pending = self._watched.popleft()
            if pending.committed:
                self._waiting.append(pending.save)
            else:
                self._owed = True

    def finish(self, last: Pending | None, final: int | None, deadline: float) -> None:
        """Exports the last step of a run that ends, too, and waits for all exports up to the deadline.

        `final`: the step that the loop was to end with. An export that is not done by the deadline goes on alone.
        """
        if self._export is None or not self._session.owner.here:
            return
        self._see_watched()
        if last is not None and last.committed and last.save != self._taken:
            self._waiting.append(last.save)
            self._taken = last.save  # a program may close twice
        restored, self._restored = self._restored, None  # for a run that was at its end when it was started again
        at_end = last is None and restored is not None and restored.step == final
        if restored is not None and at_end and restored != self._taken and not self._export.is_there(restored.step):
            self._waiting.append(restored)
        self._go_on()
        if self._running is not None:
            steps = [self._running.save.step, *(save.step for save in self._waiting)]
            seconds = max(deadline - time.monotonic(), 0.0)
            show(log, "waiting up to %.0f s for the export of step %s", seconds, ", ".join(map(str, steps)))
        while self._running is not None and time.monotonic() < deadline:
            time.sleep(POLL_S)
            self._go_on()
        self.let_go()

    def let_go(self) -> None:
        """Ends without waiting: exports in flight go on alone; those that have not begun are named in the log."""
        if self._export is None or not self._session.owner.here:
            return
        self._see_watched()
        self._go_on(begin=False)
        if self._running is not None:
            running = self._running
            log.warning(
                "the export of step %d to %s has not ended; it goes on alone (pid %d)",
                *(running.save.step, running.out, running.process.pid),
            )
        for save in self._waiting:
            log.warning("step %d is not exported; ckptlib export --step %s does it", save.step, save)
        self._waiting.clear()
        self._session.listener.deliver()

    def _is_due(self, step: int) -> bool:
        """Returns whether a step's export is due; False if the user's function raises."""
        assert self._export is not None
        try:
            return self._export.is_due(step)
        except Exception as error:  # anything that it may raise: no reason to end the training
            log.error("Export(steps=...) failed for step %d, which is not exported: %r", step, error)
            return False

    def _go_on(self, begin: bool = True) -> None:
        if self._running is not None and self._running.process.poll() is not None:
            running, self._running = self._running, None
            self._tell(running)
        while begin and self._running is None and self._waiting:
            self._begin(self._waiting.popleft())

    def _begin(self, save: SaveId) -> None:
        assert self._export is not None
        out, settings = self._export.path(save.step), self._session.settings
        order = {
            **self._export.document(),
            "url": settings.url,
            "step": str(save),
            "storage_options": dict(settings.options),
            "out": str(out),
        }
        try:
            text = json.dumps(order)
            printed = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (closed when it is read)
            process = subprocess.Popen(
                [sys.executable, "-m", "ckptlib.exporting"],
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
                    "PYTHONSAFEPATH": "1",
                },
            )
            assert process.stdin is not None
            process.stdin.write(text)
            process.stdin.close()
        except (OSError, TypeError, ValueError) as error:
            self._fail(save, out, f"the process of the export could not be started: {error}")
            return
        self._running = _Running(process, printed, save, out, time.monotonic())

    def _tell(self, running: _Running) -> None:
        with running.printed as file:
            file.seek(0)
            printed = file.read()
        *_, last = printed.splitlines() or [""]
        try:
            told = json.loads(last)
        except ValueError:
            told = {}
        if not isinstance(told, dict) or not told.keys() & {"error", "nbytes"}:
            status = running.process.returncode
            how = f"signal {-status}" if status < 0 else f"status {status}"
            self._fail(running.save, running.out, f"its process ended with {how}: {printed[-TOLD_CHARS:].strip()}")
        elif "error" in told:
            self._fail(running.save, running.out, str(told["error"]))
        else:
            step, out, nbytes = running.save.step, str(running.out), int(told["nbytes"])
            seconds = time.monotonic() - running.began
            show(log, "step %d is exported to %s: %s bytes in %.1f s", step, out, f"{nbytes:,}", seconds)
            self._session.listener.tell(Exported(step, out, nbytes, seconds))

    def _fail(self, save: SaveId, out: Path, why: str) -> None:
        log.error(
            "the export of step %d to %s failed; the step itself is whole. ckptlib export --step %s tries again: %s",
            *(save.step, out, save, why),
        )
        self._session.listener.tell(ExportFailed(save.step, str(out), StoreError(why)))
