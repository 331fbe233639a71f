"""Trainings that keep snapshots in the memory of several hosts, and faults in the midst of them.

A host is a directory of slots, and a failure domain, of its own. `train` is started by `crash_jobs.start`, or by
torchrun: peers.py <directory> <arguments of train as JSON>; it tells what it does in JSON lines. Each step of training
waits until the snapshot of the one before has come to its end, so what a kill finds does not depend on timing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).parent.parent))

from workers.crash_jobs import Teller

import ckptlib
from ckptlib import Peers
from ckptlib.loading.reader import Reader
from ckptlib.peers import replicator
from ckptlib.ranks import link
from ckptlib.recovery import memory_source
from ckptlib.saving import snapshots
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.slot import Slot
from ckptlib.staging import stager

WIDTHS = {"fsdp": 64, "ddp": 288, "hsdp": 384}
"""Of layers; where others hold the same, a rank's shard of a weight is large enough to be copied by them."""

WAIT_S = 60.0
TIMEOUT = timedelta(seconds=60)

CHUNK_BYTES = 1 << 14
"""Per message of a link, here: a small body takes several."""


def _be_a_group() -> None:
    """One rank is a group, too."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Training:
    """A model and an optimizer, whose every bit after a step follows from the number of ranks and of that step."""

    def __init__(self, kind: str, rank: int, own_data: bool) -> None:
        """`own_data`: drawn by each rank from its own generator; else alike on all.

        Means over 1, 2 or 4 equal gradients are exact, so these numbers of ranks come to the same.
        """
        _be_a_group()
        torch.manual_seed(0)
        self._width = WIDTHS[kind]
        self.model = torch.nn.Sequential(*[torch.nn.Linear(self._width, self._width) for _ in range(4)])
        self._forward: Callable[[torch.Tensor], torch.Tensor] = self.model
        if kind in ("fsdp", "hsdp"):
            size, replicas = dist.get_world_size(), 2 if kind == "hsdp" and dist.get_world_size() > 1 else 1
            mesh = init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("replicas", "shards"))
            mesh = mesh if replicas > 1 else mesh["shards"]
            for layer in self.model:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        else:
            self._forward = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.state: dict[str, object] = {"model": self.model, "optim": self.optimizer}
        self._own_data = own_data
        torch.manual_seed(1000 + rank)

    def body(self, step: int) -> None:
        generator = None if self._own_data else torch.Generator().manual_seed(step)
        self._forward(torch.randn(4, self._width, generator=generator)).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def drift(self) -> None:
        """Makes this rank's weights others than those of the ranks that have replicas of them."""
        for parameter in self.model.parameters():
            parameter.add_(1.0)

    def digest(self) -> str:
        """Of all weights, all of the optimizer's state and, where they count, this rank's generators. Collective."""
        found = hashlib.sha256()
        for name, parameter in self.model.named_parameters():
            for key, value in (("", parameter.detach()), *sorted(self.optimizer.state[parameter].items())):
                whole = value.full_tensor() if isinstance(value, dist.tensor.DTensor) else value
                found.update(f"{name} {key} {whole.dtype}".encode() + whole.numpy().tobytes())
        if self._own_data:
            found.update(torch.get_rng_state().numpy().tobytes())
        return found.hexdigest()[:16]


class Stages(Training):
    """Layers that learn apart from one another: each rank has some of them, and an optimizer of its own."""

    def __init__(self, rank: int) -> None:
        _be_a_group()
        torch.manual_seed(0)
        layers, size = [torch.nn.Linear(64, 64) for _ in range(4)], dist.get_world_size()
        mine = range(rank * len(layers) // size, (rank + 1) * len(layers) // size)
        self._layers = {i: layers[i] for i in mine}
        groups = [{"params": [*layer.parameters()], "lr": 1e-3 * (i + 1)} for i, layer in self._layers.items()]
        self.optimizer = torch.optim.AdamW(groups)
        self.model = torch.nn.Sequential()
        for i, layer in self._layers.items():
            self.model.add_module(str(i), layer)
        self.state = {"model": self.model, "optim": self.optimizer}
        torch.manual_seed(1000 + rank)

    @override
    def body(self, step: int) -> None:
        for i, layer in self._layers.items():
            generator = torch.Generator().manual_seed(4 * step + i)
            layer(torch.randn(4, 64, generator=generator)).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.99

    @override
    def digest(self) -> str:
        mine = []
        for layer, group in zip(self._layers.values(), self.optimizer.param_groups, strict=True):
            found = hashlib.sha256(str(group["lr"]).encode())
            for parameter in layer.parameters():
                for _, value in (("", parameter.detach()), *sorted(self.optimizer.state[parameter].items())):
                    found.update(value.numpy().tobytes())
            mine.append(found.hexdigest()[:8])
        stages: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(stages, mine)
        return " ".join(digest for stage in stages for digest in stage)


def _training(kind: str, rank: int, own_data: bool) -> Training:
    if kind == "stages":
        return Stages(rank)
    return Training(kind, rank, own_data)


def practise(tell: Teller, rank: int, *, kind: str, own_data: bool, total: int) -> None:
    """The same training without ckptlib: what all others must come to."""
    training = _training(kind, rank, own_data)
    for step in range(total):
        training.body(step)
        tell("digest", step=step + 1, digest=training.digest())


def train(
    tell: Teller,
    rank: int,
    *,
    url: str,
    hosts: Sequence[str],
    arenas: dict[str, str],
    total: int,
    kind: str = "fsdp",
    own_data: bool = True,
    copies: int = 1,
    everything: bool = False,
    every: int = 10**6,
    pauses: Sequence[int] = (),
    gates: str = "",
    traps: Sequence[dict[str, Any]] = (),
    pause_when_held: int | None = None,
    load_step: int | None = None,
    timeout_s: float = 60.0,
    settle: bool = True,
    drags: Sequence[float] = (),
) -> None:
    """Restores, trains up to `total`, and tells the digest.

    hosts:           by rank. arenas: by host.
    every:           to the store; the last step goes there, too.
    pauses:          steps behind which it waits for a word; see `_pause`.
    pause_when_held: it waits as soon as all ranks hold this step, or a later one.
    traps:           see `_set_traps`.
    load_step:       loaded from the store, instead of a restore.
    settle:          whether a step waits until the snapshot of the one before has come to its end.
    drags:           by rank, seconds that each message of a body takes longer.
    """
    link.CHUNK_BYTES = CHUNK_BYTES
    replicator.FIRST_BACKOFF_S = 0.2
    snapshots.RECLAIM_EVERY_S = 0.0
    logging.getLogger("ckptlib").setLevel(logging.INFO)
    training = _training(kind, rank, own_data)
    received = _watch_recoveries()
    if load_step is not None:
        ckptlib.load(url, training.state, step=load_step, random=True)
    host = hosts[rank]
    peers = Peers(copies=copies, everything=everything, domain=host, timeout=timedelta(seconds=timeout_s))
    with ckptlib.Checkpointer(
        url, training.state, every=every, peers=peers, arena=arenas.get(host), timeout=TIMEOUT
    ) as ckpt:
        _mark_sealed(rank, gates)
        for trap in traps:
            if trap["rank"] == rank:
                _set_trap(Path(gates), len(hosts), **trap)
        if drags:
            _wrap(link.Link, "_begin_send", before=_on_chunk(lambda: time.sleep(drags[rank])))
        tell("made", pid=os.getpid(), generation=str(ckpt._session.generation))
        start = load_step
        if start is None:
            report = ckpt.restore()
            start = report.step
            tell(
                "restored",
                step=report.step,
                in_memory=report.in_memory,
                received=sum(received),
                save=str(report.save),
                skipped=report.skipped,
            )
        for step in ckpt.loop(start, total):
            if settle:
                _await_settled(ckpt)
            held = ckpt._session.snapshots
            assert held.coverage is not None
            tell("step", step=step, held=held.own.newest, held_by_all=held.held_by_all, sent=held.coverage.sent)
            again = pause_when_held is not None and held.held_by_all >= pause_when_held
            if step in pauses or again:
                if _pause(tell, ckpt, rank, step, gates) == "drift":
                    training.drift()
                pause_when_held = None if again else pause_when_held
            training.body(step)
        tell("done", step=total, digest=training.digest())
    dist.barrier()


def _watch_recoveries() -> list[int]:
    """How many slots of other hosts were read here, for each snapshot that was tried."""
    found: list[int] = []
    close = memory_source.InMemory.close

    def watched(self: memory_source.InMemory) -> None:
        found.append(self.num_received)
        close(self)

    memory_source.InMemory.close = watched  # type: ignore[method-assign]
    return found


def _await_settled(ckpt: ckptlib.Checkpointer) -> None:
    """Returns when the snapshots that were begun, and what is made of them, have come to their ends on this rank.

    So that there is a slot at every step, whatever the writer is busy with.
    """
    deadline = time.monotonic() + WAIT_S
    while ckpt._session.snapshots.settling or ckpt._session.snapshots.persisting:
        ckpt._session.outcomes.poll(0.002)
        assert time.monotonic() < deadline, "a snapshot does not come to its end"


# What a test may say at a pause


def _pause(tell: Teller, ckpt: ckptlib.Checkpointer, rank: int, step: int, gates: str) -> str | None:
    """Waits for the file of this step: words by rank, for those who are to do something before they go on."""
    held = ckpt._session.snapshots
    tell("paused", step=step, held=held.own.newest, held_by_all=held.held_by_all)
    path = Path(gates) / str(step)
    deadline = time.monotonic() + WAIT_S
    while not path.exists():
        ckpt._session.outcomes.poll(0.002)
        assert time.monotonic() < deadline, "nobody said what to do"
    word: str | None = json.loads(path.read_text()).get(str(rank))
    if word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif word == "cut":
        _cut(ckpt)
    elif word == "raise":
        raise KeyError("the trainer's own trouble")
    else:
        assert word in (None, "drift"), word
    return word


def _cut(ckpt: ckptlib.Checkpointer) -> None:
    """Ends every connection of the link, as a network does that goes away."""
    for fd in _sockets_of_last_link:
        try:
            connection = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue
        with connection:
            connection.shutdown(socket.SHUT_RDWR)


_sockets_of_last_link: list[int] = []

_connect = link.connect


def _connect_and_note(*args: Any) -> Any:
    before = _connected()
    made = _connect(*args)
    _sockets_of_last_link[:] = sorted(_connected() - before)
    return made


link.connect = _connect_and_note


def _connected() -> set[int]:
    """Sockets that have a peer on the network."""
    found = set()
    for entry in list(Path("/proc/self/fd").iterdir()):
        fd = int(entry.name)
        try:
            with socket.socket(fileno=os.dup(fd)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()
                    found.add(fd)
        except OSError:
            continue
    return found


# Traps: SIGKILL in the midst of the real code


def _mark_sealed(rank: int, gates: str) -> None:
    """A file for each snapshot that this rank has sealed: no trap may depend on who is faster."""

    def mark(staging: stager.Staging) -> None:
        Path(gates, f"sealed{staging.step}.rank{rank}").touch()

    _wrap(stager, "_seal", after=mark)


def _set_trap(gates: Path, size: int, *, stage: str, rank: int, step: int | None = None) -> None:
    """Kills this process at a stage of a snapshot, when all ranks, or all others, have sealed theirs of this `step`.

    staging     copied, not sealed
    sealing     before the header that makes it ready
    sealed      after it
    sending     in the middle of a body
    receiving   in the middle of a body
    received    before the header of the replica
    replicated  after it, before the peer is told
    reading     in the middle of what another host reads out to it, for a restore
    serving     in the middle of what it reads out itself
    loading     some tensors are filled
    loaded      all of them are; nothing of the new generation is anywhere
    """

    def die() -> None:
        if step is not None:
            others = [r for r in range(size) if r != rank or _in("to") or _in("from")]
            while not all((gates / f"sealed{step}.rank{r}").exists() for r in others):
                time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGKILL)

    def on_header(thread: str) -> Callable[..., None]:
        def check(slot: Slot, header: SlotHeader) -> None:
            if _in(thread) and header.ready and step in (None, header.save.step):
                die()

        return check

    def on_message(thread: str) -> Callable[..., None]:
        def check(self: link.Link, peer: int, data: torch.Tensor, tag: int) -> None:
            if not _in(thread) or data.numel() != CHUNK_BYTES:
                return
            if step is None or begun[-1] == step:
                die()

        return check

    def on_thread(thread: str) -> Callable[..., None]:
        return lambda *args: die() if _in(thread) else None

    begun: list[int] = []
    _wrap(replicator.Replicator, "begin", before=lambda itself, now, staging, twins: begun.append(now.save.step))

    def on_staging(staging: Any) -> None:
        if staging.step == step:
            die()

    match stage:
        case "staging":
            _wrap(sys.modules["ckptlib.staging.stager"], "_seal", before=on_staging)
        case "sealing":
            _wrap(Slot, "write_header", before=on_header("stage"))
        case "sealed":
            _wrap(Slot, "write_header", after=on_header("stage"))
        case "sending":
            _wrap(link.Link, "_begin_send", after=on_message("to"))
        case "receiving":
            _wrap(link.Link, "_begin_recv", after=on_message("from"))
        case "received":
            _wrap(Slot, "write_header", before=on_header("from"))
        case "replicated":
            _wrap(Slot, "write_header", after=on_header("from"))
        case "reading":
            _wrap(link.Link, "_wait", before=on_thread("read"))
        case "serving":
            _wrap(link.Link, "answer", before=on_thread("serve"))
        case "loading":
            _wrap(Reader, "_run", after=lambda *args: die())
        case "loaded":
            _wrap(replicator.Replicator, "begin", before=lambda *args: die())
        case _:
            raise AssertionError(stage)


def _wrap(
    owner: Any, name: str, *, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None
) -> None:
    """Calls these with the arguments of the original, which is called as ever."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args)
        result = original(*args, **kwargs)
        if after is not None:
            after(*args)
        return result

    setattr(owner, name, wrapped)


def _on_chunk(call: Callable[[], None]) -> Callable[..., None]:
    def check(self: link.Link, peer: int, data: torch.Tensor, tag: int) -> None:
        if data.numel() == CHUNK_BYTES:
            call()

    return check


def _in(thread: str) -> bool:
    return threading.current_thread().name.startswith(f"ckptlib-{thread}")


def main() -> None:
    """A rank that torchrun has started."""
    directory, arguments = Path(sys.argv[1]), json.loads(sys.argv[2])
    rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    logging.basicConfig()
    store, _, size = next(iter(dist.rendezvous("env://")))
    if os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":  # else it is a new one each time, with nothing in it
        store = dist.PrefixStore(f"attempt{attempt}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    train(Teller(str(directory / f"attempt{attempt}.rank{rank}.jsonl")), rank, **arguments)
    os._exit(0)


if __name__ == "__main__":
    main()
