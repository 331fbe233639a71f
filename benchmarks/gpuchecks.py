"""The checks of `scripts/gpu-check`: each measures, and says under "wrong" what should not be.

What is said in numbers is in GB (1e9 bytes) and seconds.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import ckptlib
from ckptlib.devices import cuda
from ckptlib.staging import prepared_copies

GIB = 1 << 30


def machine() -> dict[str, Any]:
    """Whose answers they are."""
    found: dict[str, Any] = {"host": platform.platform(), "torch": torch.__version__, "cpus": os.cpu_count()}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except OSError as error:
        return str(error)


def _seconds(call: Any) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


class _Shared:
    """A file in /dev/shm, mapped."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        fd, name = tempfile.mkstemp(dir="/dev/shm", prefix="ckptlib-gpu-check-")
        try:
            os.unlink(name)
            os.posix_fallocate(fd, 0, nbytes)
            self.map = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        self.tensor = torch.frombuffer(self.map, dtype=torch.uint8)
        self.tensor.zero_()

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()


def registration() -> dict[str, Any]:
    """Registers 2 GiB of /dev/shm in pieces of 1 GiB: seconds per GiB, launch latency meanwhile; a copy over the
    boundary in one piece, which should fail, and in pieces, which should not."""
    memory, device = _Shared(2 * GIB + 4096), torch.cuda.current_device()
    alone = _launches(0.5)
    latencies: list[float] = []
    import threading

    stop = threading.Event()
    torch.cuda.init()

    def launch() -> None:
        x = torch.zeros(1, device="cuda")
        while not stop.is_set():
            began = time.perf_counter()
            x.add_(1)
            latencies.append(time.perf_counter() - began)
            time.sleep(0.0005)

    thread = threading.Thread(target=launch)
    thread.start()
    began = time.perf_counter()
    cuda.pin(memory.address, memory.nbytes, device)
    registered = (time.perf_counter() - began) * GIB / memory.nbytes
    stop.set()
    thread.join()
    boundary = -memory.address % cuda.PIN_BYTES or cuda.PIN_BYTES
    source = torch.arange(1 << 24, dtype=torch.int32, device="cuda").view(torch.uint8)
    window = memory.tensor[boundary - source.numel() // 2 :][: source.numel()]
    whole = _copy_whole(window.data_ptr() - memory.address)
    wrong = []
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for start, end in cuda.stretches(window.data_ptr(), window.numel(), prepared_copies.MOVE_BYTES):
            window[start:end].copy_(source[start:end], non_blocking=True)
    stream.synchronize()
    if not torch.equal(window, source.cpu()):
        wrong.append("bytes differ across the boundary")
    rate = source.numel() / _seconds(lambda: window[: source.numel() // 2].copy_(source[: source.numel() // 2])) / 2e9
    cuda.unpin(memory.address, memory.nbytes, device)
    return {
        "seconds_per_gib": registered,
        "launch_s": {"alone": alone, "meanwhile": max(latencies, default=0.0)},
        "over_the_boundary_in_one": whole,
        "gb_per_s": rate,
        "wrong": wrong,
    }


def _launches(seconds: float) -> float:
    """The longest launch of a kernel."""
    x, longest, until = torch.zeros(1, device="cuda"), 0.0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        x.add_(1)
        longest = max(longest, time.perf_counter() - began)
    return longest


def _copy_whole(offset: int) -> str:
    """What becomes of one copy over a boundary; in a process of its own, whose context it may cost."""
    code = """
import torch
from benchmarks.gpuchecks import GIB, _Shared
from ckptlib.devices import cuda
memory = _Shared(2 * GIB + 4096)
cuda.pin(memory.address, memory.nbytes, 0)
at = (-memory.address % cuda.PIN_BYTES or cuda.PIN_BYTES) - (1 << 20)
source = torch.ones(1 << 21, dtype=torch.uint8, device="cuda")
memory.tensor[at : at + (1 << 21)].copy_(source, non_blocking=True)
torch.cuda.synchronize()
print("copied" if bool((memory.tensor[at : at + (1 << 21)] == 1).all()) else "wrong bytes")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    return (done.stdout.strip() or done.stderr.strip().splitlines()[-1])[-200:]


class _Training:
    """Layers with AdamW, of about so many bytes; every number follows from the step."""

    def __init__(self, nbytes: int, num_tensors: int = 48, seed: int = 0) -> None:
        torch.manual_seed(seed)
        each = max(nbytes // 12 // num_tensors, 16)
        self.params = [torch.nn.Parameter(torch.randn(each, device="cuda")) for _ in range(num_tensors)]
        self.model = torch.nn.ParameterList(self.params)
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-3, fused=True)
        self.state: dict[str, object] = {"model": self.model, "optim": self.optimizer}

    def step(self) -> None:
        for n, p in enumerate(self.params):
            p.grad = torch.full_like(p, 0.1 * (n + 1))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digest(self) -> str:
        found = hashlib.sha256()
        for p in self.params:
            for tensor in (p.detach(), *self.optimizer.state[p].values()):
                found.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()


def snapshots() -> dict[str, Any]:
    """Saves, asynchronous saves and snapshots of 1.5 GiB in both memory modes, with and without expandable segments:
    fenced ones equal, byte by byte; writes past the fence found; restored from memory and from the store."""
    found: dict[str, Any] = {}
    for expandable in (False, True):
        env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
        for memory in ("host", "device"):
            found[f"{memory}, expandable_segments:{expandable}"] = _child("_snapshots", memory, env=env)
    return {**found, "wrong": [f"{k}: {w}" for k, v in found.items() for w in v["wrong"]]}


def _child(function: str, *arguments: object, env: dict[str, str] | None = None, timeout: float = 280) -> Any:
    code = f"import json, benchmarks.gpuchecks as g; print(json.dumps(g.{function}(*{arguments!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=timeout)
    if done.returncode:
        raise RuntimeError(f"{function}{arguments}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _snapshots(memory: str) -> dict[str, Any]:
    wrong, training, digests = [], _Training(int(1.5 * GIB)), {}
    peers = ckptlib.Peers(copies=0, every=1, memory=memory)
    with tempfile.TemporaryDirectory() as directory:
        url = Path(directory) / "root"
        with ckptlib.Checkpointer(url, training.state, every=4, peers=peers) as ckpt:
            for step in ckpt.loop(0, 12):
                training.step()
                if (step + 1) % 4 == 0:
                    digests[step + 1] = training.digest()
            waited = ckpt.fence_waited_s
            ckpt.after_step(13)
            with torch.no_grad():
                for p in training.params:  # past the fence
                    p.add_(1.0)
            ckpt.drain()
        for info in ckptlib.checkpoints(url):
            if info.step in digests:
                other = _Training(int(1.5 * GIB), seed=1)
                other.step()
                began = time.perf_counter()
                ckptlib.load(url, other.state, step=info.step)
                torch.cuda.synchronize()
                seconds = time.perf_counter() - began
                if other.digest() != digests[info.step]:
                    wrong.append(f"step {info.step} differs from what was trained")
                del other
        if {info.step for info in ckptlib.checkpoints(url)} < set(digests):
            wrong.append("a step is missing")
    return {"fence_waited_s": waited, "load_s": seconds, "wrong": wrong}


def host_cost() -> dict[str, Any]:
    """Synchronising calls and the training thread's time in after_step, for 300, 1,500 and 10,000 tensors."""
    found: dict[str, Any] = {"wrong": []}
    for num_tensors in (300, 1500, 10_000):
        training = _Training(num_tensors * 4 * 12 * 1000, num_tensors)
        peers = ckptlib.Peers(copies=0, every=1)
        with (
            tempfile.TemporaryDirectory() as directory,
            ckptlib.Checkpointer(Path(directory) / "root", training.state, every=10**9, peers=peers) as ckpt,
        ):
            times = []
            for step in range(1, 12):
                training.step()
                torch.cuda.synchronize()
                if step == 10:
                    torch.cuda.set_sync_debug_mode("error")
                began = time.perf_counter()
                try:
                    ckpt.after_step(step)
                except RuntimeError as error:
                    found["wrong"].append(f"{num_tensors} tensors: after_step synchronises: {str(error)[-300:]}")
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                times.append(time.perf_counter() - began)
                ckpt.drain()
            found[str(num_tensors)] = {"after_step_s": sorted(times[4:])[len(times[4:]) // 2]}
    return found


def device_memory() -> dict[str, Any]:
    """memory="device" with iterations shorter than the link takes: what an iteration takes with and without; a spare at
    the edge of the memory: the training after it comes to its peak again without running out."""
    found: dict[str, Any] = {"wrong": []}
    for memory in (None, "host", "device"):
        found[str(memory)] = _child("_short_iterations", memory)
    found["edge"] = _child("_edge")
    found["wrong"] = found["edge"]["wrong"]
    return found


def _short_iterations(memory: str | None) -> dict[str, Any]:
    training = _Training(4 * GIB)
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def iterate() -> None:
        for _ in range(40):
            x @ x
        training.step()

    peers = None if memory is None else ckptlib.Peers(copies=0, every=1, memory=memory)
    with (
        tempfile.TemporaryDirectory() as directory,
        ckptlib.Checkpointer(Path(directory) / "root", training.state, every=10**9, peers=peers) as ckpt,
    ):
        for step in range(1, 6):
            iterate()
            ckpt.after_step(step)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for step in range(6, 46):
            iterate()
            ckpt.after_step(step)
        torch.cuda.synchronize()
        return {"iteration_s": (time.perf_counter() - began) / 40, "fence_waited_s": ckpt.fence_waited_s}


def _edge() -> dict[str, Any]:
    """The training's peak leaves room for one spare and a half."""
    free, _ = torch.cuda.mem_get_info()
    training = _Training(2 * GIB)
    peak = free - 2 * GIB - int(4.5 * GIB)
    wrong = []
    peers = ckptlib.Peers(copies=0, every=1, memory="device")
    with (
        tempfile.TemporaryDirectory() as directory,
        ckptlib.Checkpointer(Path(directory) / "root", training.state, every=10**9, peers=peers) as ckpt,
    ):
        for step in range(1, 8):
            try:
                torch.empty(peak, dtype=torch.uint8, device="cuda")  # activations
            except torch.OutOfMemoryError as error:
                wrong.append(f"the training runs out of memory at step {step}: {error}")
                break
            training.step()
            ckpt.after_step(step)
        spares = [len(spare._spares) for spare in ckpt._session.stager._devices._spares.values()]
    return {"spares": spares, "wrong": wrong}


def restore() -> dict[str, Any]:
    """Loads 4 GiB from /dev/shm into the GPU by pinned buffers, and as it was before, from ordinary memory."""
    training = _Training(4 * GIB)
    training.step()
    digest = training.digest()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        ckptlib.save(directory, training.state, step=1)
        found: dict[str, Any] = {"wrong": []}
        for pinned in (True, False):
            for _ in range(2):  # the second time, buffers and pages are there
                for p in training.params:
                    p.data.zero_()
                if not pinned:
                    ckptlib.loading.landing.accelerator.has_streams = lambda device: False  # type: ignore[assignment]
                began = time.perf_counter()
                ckptlib.load(directory, training.state)
                torch.cuda.synchronize()
                seconds = time.perf_counter() - began
            found["pinned" if pinned else "pageable"] = {"gb_per_s": 4 * GIB / seconds / 1e9}
            if training.digest() != digest:
                found["wrong"].append(f"what was loaded differs, pinned={pinned}")
    return found


def two_processes() -> dict[str, Any]:
    """Two ranks of a DDP job on one GPU, with a snapshot at every step and replicas on each other."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [*command, "-m", "benchmarks.gpuchecks", "ddp", directory], capture_output=True, text=True, timeout=300
        )
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        wrong = [] if done.returncode == 0 and len(found) == 2 else [done.stderr[-1500:]]
        return {"ranks": found, "wrong": wrong + [w for rank in found for w in rank["wrong"]]}


def _ddp(directory: str) -> None:
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    training = _Training(GIB)
    url = Path(directory) / "root"
    peers = ckptlib.Peers(copies=1, every=1, domain=f"rank{rank}")
    with ckptlib.Checkpointer(url, training.state, every=5, peers=peers) as ckpt:
        for _ in ckpt.loop(0, 10):
            training.step()
        digest = training.digest()
    other = _Training(GIB, seed=1)
    other.step()
    ckptlib.load(url, other.state)
    contexts = _output("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader")
    wrong = [] if other.digest() == digest else ["what was loaded differs"]
    print(json.dumps({"rank": rank, "contexts": contexts.splitlines(), "wrong": wrong}), flush=True)
    dist.destroy_process_group()


def capture() -> dict[str, Any]:
    """Captures a graph while a snapshot is staged, with drain() before it and without; replays it, saves, compares."""
    found = {str(drained): _child("_capture", drained) for drained in (True, False)}
    return {**found, "wrong": found["True"]["wrong"]}


def _capture(drained: bool) -> dict[str, Any]:
    training, wrong, torn = _Training(GIB), [], 0
    training.optimizer.param_groups[0]["capturable"] = True
    grads = [torch.ones_like(p) for p in training.params]
    for p, grad in zip(training.params, grads, strict=True):
        p.grad = grad
    training.optimizer.step()
    peers = ckptlib.Peers(copies=0, every=1)
    with (
        tempfile.TemporaryDirectory() as directory,
        ckptlib.Checkpointer(Path(directory) / "root", training.state, every=1, peers=peers) as ckpt,
    ):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            training.optimizer.step()
        torch.cuda.current_stream().wait_stream(side)
        ckpt.after_step(1)
        training.optimizer.step()
        ckpt.after_step(2)
        if drained:
            ckpt.drain()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                training.optimizer.step()
        except RuntimeError as error:
            return {"captured": False, "error": str(error)[-300:], "wrong": [str(error)[-300:]] if drained else []}
        digests = {}
        for step in range(3, 9):
            graph.replay()
            digests[step] = training.digest()
            ckpt.after_step(step)
            if ckpt.pending is not None and ckpt.pending.staging is not None:
                ckpt.pending.staging.wait_done(60)
                torn += ckpt.pending.staging.error is not None
        ckpt.save(9).wait_committed()
        for info in ckptlib.checkpoints(Path(directory) / "root"):
            if info.step in digests:
                ckptlib.load(Path(directory) / "root", training.state, step=info.step)
                if training.digest() != digests[info.step]:
                    wrong.append(f"step {info.step} differs")
    return {"captured": True, "torn": torn, "wrong": wrong + ([f"{torn} torn"] if torn else [])}


def killed() -> dict[str, Any]:
    """SIGKILL in the middle of a copy from the GPU: what is restored is a step that was whole."""
    wrong = []
    with tempfile.TemporaryDirectory() as directory:
        for round_ in range(5):
            child = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpuchecks", "train", directory], stdout=subprocess.PIPE, text=True
            )
            assert child.stdout is not None
            line = ""
            while not line.startswith("step") or int(line.split()[1]) < 4 + 3 * round_:
                line = child.stdout.readline()
                if not line:
                    return {"wrong": [f"the training ended in round {round_}"]}
            time.sleep(0.01 * round_)
            child.send_signal(signal.SIGKILL)
            child.wait()
        step, exact = _child("_restored", directory)
        if not exact:
            wrong.append(f"step {step} is not what was trained")
    return {"step": step, "wrong": wrong}


def _train(directory: str) -> None:
    training = _Training(GIB)
    peers = ckptlib.Peers(copies=0, every=1)
    with ckptlib.Checkpointer(Path(directory) / "root", training.state, every=1000, peers=peers) as ckpt:
        for step in ckpt.loop(ckpt.restore().step, 10**6):
            training.step()
            print(f"step {step}", flush=True)


def _restored(directory: str) -> tuple[int, bool]:
    training, expected = _Training(GIB, seed=1), _Training(GIB)
    peers = ckptlib.Peers(copies=0, every=1)
    with ckptlib.Checkpointer(Path(directory) / "root", training.state, every=1000, peers=peers) as ckpt:
        step = ckpt.restore().step
        for _ in range(step):
            expected.step()
        return step, training.digest() == expected.digest()


class _Prop(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location_type", ctypes.c_int), ("location_id", ctypes.c_int), ("flags", ctypes.c_int))


def descriptors() -> dict[str, Any]:
    """Memory of the GPU behind a file descriptor: made, exported, its maker killed, imported, compared; the time that
    mapping 20 GB takes. Whether a snapshot in the GPU could outlive its trainer."""
    import socket

    ours, theirs = socket.socketpair()
    nbytes = 20 * 10**9 // (2 << 20) * (2 << 20)
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpuchecks", "descriptor", str(theirs.fileno()), str(nbytes)],
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    ours.settimeout(120)
    _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    child.send_signal(signal.SIGKILL)
    child.wait()
    driver = _Driver()
    began = time.perf_counter()
    address = driver.map(driver.take_in(fds[0]), nbytes)
    seconds = time.perf_counter() - began
    found = driver.read(address, 1 << 20)
    wrong = [] if found == bytes([7]) * (1 << 20) else ["what was imported differs"]
    return {"gb": nbytes / 1e9, "import_and_map_s": seconds, "wrong": wrong}


class _Driver:
    """The few calls of libcuda that this needs."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")  # the context of this thread
        self._cuda = ctypes.CDLL("libcuda.so.1")

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} failed with code {code}")

    def make(self, nbytes: int) -> int:
        prop = _Prop(type=1, handle_types=1, location_type=1, location_id=torch.cuda.current_device())
        handle = ctypes.c_ulonglong()
        self._call(
            "cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(nbytes), ctypes.byref(prop), ctypes.c_ulonglong(0)
        )
        return handle.value

    def give_out(self, handle: int) -> int:
        fd = ctypes.c_int()
        arguments = ctypes.c_ulonglong(handle), ctypes.c_int(1), ctypes.c_ulonglong(0)
        self._call("cuMemExportToShareableHandle", ctypes.byref(fd), *arguments)
        return fd.value

    def take_in(self, fd: int) -> int:
        handle = ctypes.c_ulonglong()
        self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), ctypes.c_int(1))
        return handle.value

    def map(self, handle: int, nbytes: int) -> int:
        address, size = ctypes.c_ulonglong(), ctypes.c_size_t(nbytes)
        none = ctypes.c_ulonglong(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), none, none)
        self._call("cuMemMap", address, size, ctypes.c_size_t(0), ctypes.c_ulonglong(handle), none)
        access = _Access(1, torch.cuda.current_device(), 3)
        self._call("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
        return address.value

    def fill(self, address: int, nbytes: int) -> None:
        self._call("cuMemsetD8_v2", ctypes.c_ulonglong(address), ctypes.c_ubyte(7), ctypes.c_size_t(nbytes))
        self._call("cuCtxSynchronize")

    def read(self, address: int, nbytes: int) -> bytes:
        host = ctypes.create_string_buffer(nbytes)
        self._call("cuMemcpyDtoH_v2", host, ctypes.c_ulonglong(address), ctypes.c_size_t(nbytes))
        return host.raw


def _descriptor(fd: str, nbytes: str) -> None:
    import socket

    driver = _Driver()
    handle = driver.make(int(nbytes))
    driver.fill(driver.map(handle, int(nbytes)), int(nbytes))
    with socket.socket(fileno=int(fd)) as to:
        socket.send_fds(to, [b"x"], [driver.give_out(handle)])
        time.sleep(300)


def benchmark() -> dict[str, Any]:
    """Runs `scripts/bench gpu`: stalls, turns with and without, and the copy's share of the link."""
    done = subprocess.run([sys.executable, "-m", "benchmarks", "gpu"], capture_output=True, text=True, timeout=580)
    return {"output": done.stdout[-8000:], "wrong": [] if done.returncode == 0 else [done.stderr[-1500:]]}


if __name__ == "__main__":
    {"ddp": _ddp, "train": _train, "descriptor": _descriptor}[sys.argv[1]](*sys.argv[2:])
