"""A device that is not there: tensors of the host pose as its memory, and what is done to them is done when it must be.

Within `Simulation` every operation on memory of the device is put into the queue of the current stream. It runs when
somebody waits for it, or when the test lets it: as late as is legal, or at random. What a device would do wrong then
goes wrong here, too: a copy reads what was written since; memory that is freed while another stream has yet to read it
is reported; a copy to host memory that lies in two registrations fails, and one to memory in none holds up the host.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers.runtime import Runtime
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ckptlib.devices import accelerator

DEVICE = torch.device("cpu", 0)
"""Unlike torch.device("cpu"), and yet tensors are made there."""

aten = torch.ops.aten


@dataclass(eq=False)
class Event:
    stream: Stream
    at: int

    def query(self) -> bool:
        return self.stream.done >= self.at

    def synchronize(self) -> None:
        self.stream.simulation._wait(self)


@dataclass(eq=False)
class Task:
    run: Callable[[], None] | None
    """None: it waits for `event`."""
    event: Event | None = None
    link: bool = False
    """Whether it moves bytes between host and device."""


@dataclass(eq=False)
class Stream:
    simulation: Simulation
    name: str
    tasks: list[Task] = field(default_factory=list)
    done: int = 0
    device = DEVICE

    def record_event(self) -> Event:
        return Event(self, len(self.tasks))

    def wait_event(self, event: Event) -> None:
        self.tasks.append(Task(None, event))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()

    @property
    def runnable(self) -> bool:
        if self.done == len(self.tasks):
            return False
        event = self.tasks[self.done].event
        return event is None or event.query()

    def run_one(self) -> None:
        task = self.tasks[self.done]
        assert task.event is None or task.event.query()
        self.done += 1
        if task.run is not None:
            task.run()
            task.run = None  # what it held is free


class Simulation(TorchDispatchMode):
    """One device; one thread. `runtime`: what host memory is registered with it."""

    def __init__(self, runtime: Runtime, seed: int = 0) -> None:
        super().__init__()
        self.runtime = runtime
        self.random = random.Random(seed)
        self.compute = Stream(self, "compute")
        self.streams = [self.compute]
        self.violations: list[str] = []
        self.blocked: list[str] = []
        """Operations that held up the host."""
        self.fails_in: int | None = None
        """How many more operations the device takes; None: any number."""
        self.on_wait: Callable[[str], None] = lambda what: None
        """Told in any thread what it is about to wait for the device with."""
        self._current = [self.compute]
        self._owner: dict[StorageWeakRef, Stream] = {}
        """By memory of the device: the stream that it was made on."""

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts the device in the place of torch's."""
        for name in ("device_of", "new_stream", "current_stream", "on", "wait", "pinned"):
            monkeypatch.setattr(accelerator, name, getattr(self, f"_{name}"))
        monkeypatch.setattr(accelerator, "has_streams", lambda device: True)
        monkeypatch.setattr(accelerator, "capturing", lambda device: False)
        for module in (torch.cuda, torch.accelerator):
            monkeypatch.setattr(module, "synchronize", self._synchronize)

    # What ckptlib asks of an accelerator

    def _device_of(self, tensor: torch.Tensor) -> torch.device | None:
        return DEVICE if self.holds(tensor) else None

    def _new_stream(self, device: torch.device) -> Stream:
        self.streams.append(Stream(self, f"stream {len(self.streams)}"))
        return self.streams[-1]

    def _current_stream(self, device: torch.device) -> Stream:
        return self._current[-1]

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    on = _on

    def _wait(self, event: Event) -> None:
        self.on_wait("a wait for an event")
        self.finish(event)

    def _synchronize(self, device: object = None) -> None:
        self.on_wait("a wait for the whole device")
        self.settle()

    def _pinned(self, nbytes: int) -> torch.Tensor:
        with self.host():
            made = torch.zeros(nbytes, dtype=torch.uint8)
        self.runtime.give(made.data_ptr(), nbytes)
        return made

    # The schedule

    def finish(self, event: Event) -> None:
        """Runs what an event needs, and nothing else."""
        stream = event.stream
        while stream.done < event.at:
            needed = stream.tasks[stream.done].event
            if needed is not None:
                self.finish(needed)
            stream.run_one()

    def tick(self, number: int) -> None:
        """Runs so many operations, as chance has it."""
        for _ in range(number):
            ready = [stream for stream in self.streams if stream.runnable]
            if not ready:
                return
            self.random.choice(ready).run_one()

    def settle(self) -> None:
        """Runs all there is."""
        for stream in self.streams:
            self.finish(stream.record_event())

    def links_before(self, event: Event) -> int:
        """How many operations over the link an event needs, since the beginning."""
        seen: set[Task] = set()
        todo = [event]
        while todo:
            now = todo.pop()
            for task in now.stream.tasks[: now.at]:
                if task not in seen:
                    seen.add(task)
                    if task.event is not None:
                        todo.append(task.event)
        return sum(task.link for task in seen)

    # Memory

    def holds(self, tensor: torch.Tensor) -> bool:
        return StorageWeakRef(tensor.untyped_storage()) in self._owner

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory of the device from here on, made on the current stream."""
        self._owner[StorageWeakRef(tensor.untyped_storage())] = self._current[-1]
        return tensor

    def nbytes_alive(self) -> int:
        """Of the device."""
        with self.host():
            alive = [ref for ref in self._owner if not ref.expired()]
            return sum(torch.UntypedStorage._new_with_weak_ptr(ref.cdata).nbytes() for ref in alive)

    @contextmanager
    def host(self) -> Iterator[None]:
        """What is done in the body is done at once, and is nobody's affair."""
        with torch._C._DisableTorchDispatch():
            yield

    # What torch asks

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what it would have wrapped around every operation takes longer than the rest

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        if kwargs.get("device") == DEVICE and not _tensors((args, kwargs)):
            return self._make(func, args, {**kwargs, "device": torch.device("cpu")})
        if func is aten._to_copy.default and self._crosses(args[0], kwargs.get("device")):
            return self._carry(args[0], kwargs)
        if not any(self.holds(tensor) for tensor in _tensors((args, kwargs))):
            return func(*args, **kwargs)
        if func is aten.copy_.default:
            target, source = args[:2]
            return self._copy(target, source, bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))
        if func is aten._foreach_copy_.default and not all(map(self.holds, _tensors(args[:2]))):
            for target, source in zip(*args[:2], strict=True):
                self._copy(target, source, bool(kwargs.get("non_blocking")))
            return None
        if _tells_the_host(func, args):
            self._block(str(func))
        if func._schema.is_mutable:
            self._enqueue(lambda a, k: func(*a, **k), (args, kwargs))
            return args[0] if func._schema.returns else None
        with self.host():
            made = func(*args, **kwargs)
        for tensor in _tensors(made):
            self.to_device(tensor)

        def compute(made: Any, a: Any, k: Any) -> None:
            for target, result in zip(_tensors(made), _tensors(func(*a, **k)), strict=True):
                target.copy_(result)

        self._enqueue(compute, (made, args, kwargs))
        return made

    def _make(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """Holds garbage until it is its turn."""
        made = func(*args, **kwargs)
        content = made.clone()
        made.reshape(-1).view(torch.uint8).fill_(0xAB)
        self.to_device(made)
        self._enqueue(lambda target: target.copy_(content), (made,))
        return made

    def _crosses(self, source: torch.Tensor, device: torch.device | None) -> bool:
        """Whether a tensor asked for on `device` is somewhere else now."""
        return device is not None and self.holds(source) is not (device == DEVICE)

    def _carry(self, source: torch.Tensor, kwargs: Any) -> torch.Tensor:
        """A new tensor, in memory that is not pinned, if it is the host's."""
        with self.host():
            target = aten._to_copy.default(source, **{**kwargs, "device": torch.device("cpu")})
        if not self.holds(source):
            self.to_device(target)
        return self._copy(target, source, bool(kwargs.get("non_blocking")))

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        if self.holds(target) and self.holds(source):
            self._enqueue(lambda t, s: t.copy_(s), (target, source))
            return target
        on_host = source if self.holds(target) else target
        fits = self.runtime.check(on_host.data_ptr(), on_host.nbytes)
        if fits and non_blocking and target.is_conj() != source.is_conj():
            # as torch has it: the bytes are copied later, and the host's are conjugated now
            self._enqueue(lambda t, s: _raw(t).copy_(_raw(s)), (target, source), link=True)
            _raw(target).conj_physical_()
            return target
        self._enqueue(lambda t, s: t.copy_(s), (target, source), link=True)
        if not (fits and non_blocking):
            self._block("a copy to or from memory that is not pinned" if non_blocking else "a copy that blocks")
        return target

    def _block(self, what: str) -> None:
        self.blocked.append(what)
        self.on_wait(what)
        self.finish(self._current[-1].record_event())

    def _enqueue(self, run: Callable[..., object], arguments: Any, link: bool = False) -> None:
        if self.fails_in is not None:
            self.fails_in -= 1
            if self.fails_in < 0:
                raise torch.OutOfMemoryError("full, as planned")
        stream = self._current[-1]
        held = self._held(arguments, stream)

        def task() -> None:
            # torch has counted the writes when they were ordered, as it does on a device
            uncounted = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView))
            with self.host(), torch.inference_mode(), uncounted, suppress(_Freed):
                run(*held())

        stream.tasks.append(Task(task, link=link))

    def _held(self, tensor: Any, stream: Stream) -> Callable[[], Any]:
        """As the allocator has it: memory that is freed is its own stream's at once, whatever others have yet to do."""
        if isinstance(tensor, (tuple, list)):
            parts = [self._held(part, stream) for part in tensor]
            return lambda: [part() for part in parts]
        if isinstance(tensor, dict):
            named = {name: self._held(part, stream) for name, part in tensor.items()}
            return lambda: {name: part() for name, part in named.items()}
        if not isinstance(tensor, torch.Tensor):
            return lambda: tensor
        ref = StorageWeakRef(tensor.untyped_storage())
        if self._owner.get(ref, stream) is stream:
            return lambda: tensor
        dtype, size, steps, offset = tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()
        conj, neg = tensor.is_conj(), tensor.is_neg()

        def get() -> Any:
            if ref.expired():
                self.violations.append(
                    f"{stream.name} uses memory of {self._owner[ref].name} that is free: {dtype}{size}"
                )
                raise _Freed
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            found = torch.empty(0, dtype=dtype).set_(storage, offset, size, steps)
            torch._C._set_conj(found, conj)
            torch._C._set_neg(found, neg)
            return found

        return get


class _Freed(Exception):
    pass


def _tells_the_host(func: Any, args: Any) -> bool:
    """Whether its result, or the shape of it, depends on what is in the device's memory: the host has to have that."""
    if func in (aten.index.Tensor, aten.index_put_.default):
        return any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1]))
    named = (aten.equal.default, aten.allclose.default, aten.is_nonzero.default)
    return func in named or bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags})


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.conj() if tensor.is_conj() else tensor


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    return [tensor for part in tree for tensor in _tensors(part)]
