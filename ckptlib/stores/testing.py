"""Stores that are slow or that fail, and ways to damage a file: for tests of ckptlib and of what is built on it.

    latency+file:///tmp/run?latency=0.005        every request takes 5 ms more
    latency+file:///tmp/run?latency=0.005&bandwidth=2e8
                                                 and all requests of a process share 0.2 GB/s to the store, and as much
                                                 from it; such a store is not local, whatever lies below
    fault+file:///tmp/run?plan=/tmp/plan.json    faults by the rules of a plan, which may change while the test runs

A plan is a JSON list of rules, each an object with

    op        put; write and commit, of an object that is put in pieces: of each piece, and of the whole; get, get_into,
              scan, delete (of each key)
    key       a regular expression that is searched for in the key, or in the prefix of a scan; absent: any
    nth       which of the operations of this process that the rule is about, from 0; absent: each of them
    action    error (StoreError), unreadable (ObjectUnreadable), full (StoreFull), denied (StoreDenied), stall,
              hold (a stall until the plan no longer has the rule), flip (one bit of the data put), kill-before or
              kill-after (SIGKILL of this process before or after the operation)
    seconds   how long a stall lasts
    once      true: at most one of all the processes that share the plan meets the fault, and only one time

`write_plan` replaces a plan at once for all who read it. If it is written in place, they may read half of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import signal
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import ClassVar, TypeAlias, TypedDict
from urllib.parse import unquote

from typing_extensions import Buffer, NotRequired, override

from ckptlib.errors import ObjectUnreadable, StoreDenied, StoreError, StoreFull
from ckptlib.stores.base import Entry, LateHead, Store, as_bytes

__all__ = ["FaultStore", "LatencyStore", "flip_bit", "open_testing_store", "truncate", "write_plan"]

OpenStore: TypeAlias = Callable[[str, "Mapping[str, object] | None"], Store]

_OPS = {"put", "write", "commit", "get", "get_into", "scan", "delete"}
_OPS_WITH_DATA = {"put", "write", "commit"}
_ACTIONS = {"kill-before", "kill-after", "error", "unreadable", "full", "denied", "stall", "hold", "flip"}


def open_testing_store(url: str, options: Mapping[str, object] | None, open_store: OpenStore) -> Store:
    """Opens the store of a `latency+...` or `fault+...` URL; `open_store` opens what follows the plus."""
    kind, _, rest = url.partition("+")
    if kind == "latency":
        inner, latency = _split_parameter(rest, "latency")
        bandwidth = None
        if "bandwidth=" in inner.partition("?")[2]:
            inner, bandwidth = _split_parameter(inner, "bandwidth")
        return LatencyStore(open_store(inner, options), float(latency), None if bandwidth is None else float(bandwidth))
    if kind == "fault":
        inner, plan = _split_parameter(rest, "plan")
        return FaultStore(open_store(inner, options), unquote(plan))
    raise ValueError(f"{url}: expected latency+... or fault+...")


def _split_parameter(url: str, name: str) -> tuple[str, str]:
    base, _, query = url.partition("?")
    parameters = query.split("&") if query else []
    values = [p.partition("=")[2] for p in parameters if p.partition("=")[0] == name]
    if len(values) != 1:
        raise ValueError(f"{url}: expected one parameter {name}=..., got {len(values)}")
    rest = "&".join(p for p in parameters if p.partition("=")[0] != name)
    return (f"{base}?{rest}" if rest else base), values[0]


class _HookedStore(Store):
    """A store around another one; every operation passes through `_around`."""

    def __init__(self, inner: Store, prefix: str) -> None:
        self._inner = inner
        self.url = f"{prefix}+{inner.url}"
        self.pack_nbytes, self.late_nbytes = inner.pack_nbytes, inner.late_nbytes
        self.is_local = inner.is_local

    @abstractmethod
    def _around(self, op: str, key: str, data: Buffer = b"") -> AbstractContextManager[Buffer]:
        """Returns the context around an operation, which yields the data to put."""

    @override
    def put(
        self,
        key: str,
        head: Buffer | LateHead,
        pieces: Iterable[Buffer] = (),
        *,
        create: bool = False,
        deadline: float | None = None,
    ) -> None:
        if not isinstance(head, LateHead) and pieces == ():
            with self._around("put", key, head) as data:
                self._inner.put(key, data, create=create, deadline=deadline)
            return

        def written(piece: Buffer) -> Buffer:
            with self._around("write", key, piece) as data:
                return data

        def committed() -> Buffer:
            return commit.enter_context(self._around("commit", key, given.make()))

        given = LateHead.of(head)
        late = LateHead(given.nbytes, committed)
        with ExitStack() as commit:
            self._inner.put(key, late, map(written, pieces), create=create, deadline=deadline)

    @override
    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        with self._around("get", key):
            return self._inner.get(key, offset, nbytes)

    @override
    def get_into(self, key: str, offset: int, buffer: memoryview, *, deadline: float | None = None) -> None:
        with self._around("get_into", key):
            self._inner.get_into(key, offset, buffer, deadline=deadline)

    @override
    def scan(self, prefix: str, after: str = "") -> list[Entry]:
        with self._around("scan", prefix):
            return self._inner.scan(prefix, after)

    @override
    def flush(self, prefix: str) -> None:
        self._inner.flush(prefix)

    @override
    def delete(self, *keys: str) -> None:
        for key in keys:
            with self._around("delete", key):
                self._inner.delete(key)

    @override
    def free_nbytes(self) -> int | None:
        return self._inner.free_nbytes()

    @override
    def clean(self, before: float, is_ours: Callable[[str], bool]) -> None:
        self._inner.clean(before, is_ours)

    @override
    def close(self) -> None:
        self._inner.close()


class _Link:
    """One direction between a process and a store: passes bytes at a fixed rate, in the order in which they come."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def reserve(self, nbytes: int) -> float:
        """Returns when the last of these bytes is through, by the monotonic clock."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / self._bytes_per_second
            return self._free_at


class LatencyStore(_HookedStore):
    """Simulates an object store's round trips on a laptop: every operation waits `latency_s` seconds first.

    The pieces of an object do not wait: an object store publishes none of them before the commit. With a bandwidth, in
    bytes per second, what is put and got takes the time that it then would, beside all other requests of this process.
    """

    _links: ClassVar[dict[tuple[str, float, str], _Link]] = {}
    """Links of this process, by URL, bandwidth and direction, however often the store is opened."""

    _links_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, inner: Store, latency_s: float, bandwidth: float | None = None) -> None:
        super().__init__(inner, "latency")
        if latency_s < 0 or (bandwidth is not None and not bandwidth > 0):
            raise ValueError(f"{self.url}: latency={latency_s}, bandwidth={bandwidth}; expected >= 0 s, > 0 bytes/s")
        self._latency_s = latency_s
        self._to, self._from = self._link(bandwidth, "to"), self._link(bandwidth, "from")
        if bandwidth is not None:
            self.is_local = False

    def _link(self, bandwidth: float | None, direction: str) -> _Link | None:
        if bandwidth is None:
            return None
        with LatencyStore._links_lock:
            return LatencyStore._links.setdefault((self.url, bandwidth, direction), _Link(bandwidth))

    @override
    @contextmanager
    def _around(self, op: str, key: str, data: Buffer = b"") -> Iterator[Buffer]:
        if op != "write":
            time.sleep(self._latency_s)
        nbytes = as_bytes(data).nbytes
        through = 0.0 if self._to is None or not nbytes else self._to.reserve(nbytes)
        yield data
        _sleep_until(through)

    @override
    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        data = super().get(key, offset, nbytes)
        if self._from is not None:
            _sleep_until(self._from.reserve(len(data)))
        return data

    @override
    def get_into(self, key: str, offset: int, buffer: memoryview, *, deadline: float | None = None) -> None:
        through = 0.0 if self._from is None else self._from.reserve(buffer.nbytes)
        super().get_into(key, offset, buffer, deadline=deadline)
        _sleep_until(through)


def _sleep_until(when: float) -> None:
    """Sleeps until this time of the monotonic clock."""
    left = when - time.monotonic()
    if left > 0:
        time.sleep(left)


_HOLD_POLL_S = 0.01
"""Seconds between two looks at the plan for an operation that is held."""


class Rule(TypedDict):
    """One rule of a plan."""

    op: str
    action: str
    key: NotRequired[str]
    nth: NotRequired[int]
    seconds: NotRequired[float]
    once: NotRequired[bool]


class FaultStore(_HookedStore):
    """Fails by the plan in the file `plan_path`, which is read again at each operation; no file, no faults.

    `<plan_path>.log` gets one JSON line for each operation before it is done: n (its number in this process), pid, op,
    key, fault (the action that a rule has called for, or null).
    """

    _counts: ClassVar[Counter[tuple[str, str]]] = Counter()
    """Operations that a rule was about, by plan and rule, in this process, however often the store is opened."""

    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, inner: Store, plan_path: str) -> None:
        super().__init__(inner, "fault")
        self._plan_path = os.path.abspath(plan_path)
        self._read_plan()

    @override
    @contextmanager
    def _around(self, op: str, key: str, data: Buffer = b"") -> Iterator[Buffer]:
        rule = self._next_rule(op, key)
        action = rule["action"] if rule else None
        where = f"{self.url}/{key}: {op}"
        if rule and action == "stall":
            time.sleep(rule["seconds"])
        elif rule and action == "hold":
            while rule in self._read_plan():
                time.sleep(_HOLD_POLL_S)
        elif action == "error":
            raise StoreError(f"{where}: an error, as planned")
        elif action == "unreadable":
            raise ObjectUnreadable(f"{where}: cannot be read, as planned")
        elif action == "full":
            raise StoreFull(f"{where}: no space, as planned")
        elif action == "denied":
            raise StoreDenied(f"{where}: denied, as planned")
        elif action == "flip":
            data = _flipped(data)
        elif action == "kill-before":
            os.kill(os.getpid(), signal.SIGKILL)
        yield data
        if action == "kill-after":
            os.kill(os.getpid(), signal.SIGKILL)

    def _next_rule(self, op: str, key: str) -> Rule | None:
        """Counts and logs the operation; returns the first rule that is due, if any."""
        with FaultStore._lock:
            due = [rule for rule in self._read_plan() if self._is_due(rule, op, key)]
            rule = next((rule for rule in due if not rule.get("once") or self._is_first(rule)), None)
            number = self._count("every operation") - 1
        line = {"n": number, "pid": os.getpid(), "op": op, "key": key, "fault": rule["action"] if rule else None}
        _append_line(self._plan_path + ".log", json.dumps(line))
        return rule

    def _is_due(self, rule: Rule, op: str, key: str) -> bool:
        if rule["op"] != op or re.search(rule.get("key", ""), key) is None:
            return False
        count = self._count(json.dumps(rule, sort_keys=True))
        return rule.get("nth", count - 1) == count - 1

    def _count(self, what: str) -> int:
        FaultStore._counts[self._plan_path, what] += 1
        return FaultStore._counts[self._plan_path, what]

    def _is_first(self, rule: Rule) -> bool:
        """Returns whether no process has met this fault yet; a file says so, since the one that did may be dead."""
        name = hashlib.sha256(json.dumps(rule, sort_keys=True).encode()).hexdigest()[:16]
        try:
            os.close(os.open(f"{self._plan_path}.fired-{name}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _read_plan(self) -> list[Rule]:
        try:
            rules: list[Rule] = json.loads(Path(self._plan_path).read_text())
        except FileNotFoundError:
            return []
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{self._plan_path}: expected a JSON list of rules: {error}. If it was just being written: write_plan "
                "replaces it at once"
            ) from None
        for rule in rules:
            _check_rule(rule)
        return rules


def write_plan(path: str | os.PathLike[str], rules: Iterable[Mapping[str, object]]) -> None:
    """Makes a plan, or replaces it; processes may be reading it meanwhile."""
    temporary = Path(f"{os.fspath(path)}.{secrets.token_hex(8)}")
    temporary.write_text(json.dumps([*rules]))
    temporary.replace(path)


def _check_rule(rule: Rule) -> None:
    op, action = rule.get("op"), rule.get("action")
    if op not in _OPS or action not in _ACTIONS or rule.keys() - Rule.__annotations__.keys():
        raise ValueError(f"{rule}: not a rule; expected an op of {sorted(_OPS)} and an action of {sorted(_ACTIONS)}")
    if action == "flip" and op not in _OPS_WITH_DATA:
        raise ValueError(f"{rule}: {op} puts no data in which a bit could be flipped")
    if action == "stall" and "seconds" not in rule:
        raise ValueError(f"{rule}: a stall needs seconds")


def _append_line(path: str, line: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(fd, (line + "\n").encode())  # one call: lines of several processes do not mix
    finally:
        os.close(fd)


def _flipped(data: Buffer) -> bytes:
    flipped = bytearray(as_bytes(data))
    if flipped:
        flipped[len(flipped) // 2] ^= 1
    return bytes(flipped)


def flip_bit(path: str | os.PathLike[str], offset: int) -> None:
    """Flips the lowest bit of the byte at `offset` of a file, in place; from the end when negative."""
    with open(path, "r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        position = file.tell()
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def truncate(path: str | os.PathLike[str], nbytes: int) -> None:
    """Cuts a file to its first `nbytes` bytes."""
    os.truncate(path, nbytes)
