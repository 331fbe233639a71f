"""A save that fails where the store has no room even for a word about that: the trainer need not wait for it."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from helpers.tmpfs import tmpfs

from ckptlib.catalog.shared_documents import SharedDocuments
from ckptlib.errors import StoreFull
from ckptlib.format.keys import SaveId, parse_save
from ckptlib.stores.local import LocalStore
from ckptlib.writer import failures
from ckptlib.writer.channel import Channel
from ckptlib.writer.failures import Failures

SAVE: SaveId = parse_save("000000000002-000001-95a68bba")
LONG_S = 300.0


def test_it_is_told_before_there_is_room_to_publish_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "FULL_PAUSES_S", (0.01,) * 30_000)
    left, right = socket.socketpair()
    with tmpfs(tmp_path / "disk", 1 << 20) as disk, left, right:
        store = LocalStore(str(disk))
        store.put("there", b"something")
        fill(disk / "fill")
        told = Failures(Channel(right), SharedDocuments(store), 1, slack_s=LONG_S)
        giving_up = threading.Thread(target=told.give_up, args=(SAVE, StoreFull("no room")))
        giving_up.start()
        [event] = Channel(left).receive(LONG_S / 2)
        assert (event["event"], event["save"], event["error"]) == ("failed", str(SAVE), "no room")
        assert not any(str(SAVE) in entry.key for entry in store.scan(""))
        (disk / "fill").unlink()
        giving_up.join(LONG_S)
        assert any(str(SAVE) in entry.key for entry in store.scan(""))


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
