"""Memory of the host that the driver knows, and memory of the GPU that is not the training's."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

import ckptlib
from benchmarks.gpuchecks.training import GIB, Training, gib, in_child, seconds
from ckptlib.devices import cuda
from ckptlib.staging import prepared_copies


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
    stop = threading.Event()
    torch.cuda.init()

    def launch() -> None:
        x = torch.zeros(1, device="cuda")
        while not stop.is_set():
            began = time.perf_counter()
            x.add_(1)
            latencies.append(time.perf_counter() - began)
            time.sleep(0.0005)  # as a training launches: not one behind the other

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
    rate = source.numel() / seconds(lambda: window[: source.numel() // 2].copy_(source[: source.numel() // 2])) / 2e9
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
from benchmarks.gpuchecks.memory import GIB, _Shared
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


def device_memory() -> dict[str, Any]:
    """memory="device" with iterations shorter than the link takes: what an iteration takes with and without; a spare at
    the edge of the memory: the training after it comes to its peak again without running out."""
    found: dict[str, Any] = {"wrong": []}
    for memory in (None, "host", "device"):
        found[str(memory)] = in_child(__name__, "_short_iterations", memory)
    found["edge"] = in_child(__name__, "_edge")
    found["wrong"] = found["edge"]["wrong"]
    return found


def _short_iterations(memory: str | None) -> dict[str, Any]:
    training = Training(gib(4))
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
    training = Training(2 * GIB)
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
    ours, theirs = socket.socketpair()
    nbytes = 20 * 10**9 // (2 << 20) * (2 << 20)
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpuchecks.memory", str(theirs.fileno()), str(nbytes)],
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
    driver = _Driver()
    handle = driver.make(int(nbytes))
    driver.fill(driver.map(handle, int(nbytes)), int(nbytes))
    with socket.socket(fileno=int(fd)) as to:
        socket.send_fds(to, [b"x"], [driver.give_out(handle)])
        time.sleep(300)  # with the memory in hand, until it is killed


if __name__ == "__main__":
    _descriptor(*sys.argv[1:])
