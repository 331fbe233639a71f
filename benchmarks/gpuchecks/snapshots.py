"""Saves and snapshots from a GPU, compared with what was trained."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckptlib
from benchmarks.gpuchecks.training import Training, gib, in_child, output


def snapshots() -> dict[str, Any]:
    """Saves, asynchronous saves and snapshots of 1.5 GiB in both memory modes, with and without expandable segments:
    fenced ones equal, byte by byte; writes past the fence found; restored from memory and from the store."""
    found: dict[str, Any] = {}
    for expandable in (False, True):
        env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
        for memory in ("host", "device"):
            found[f"{memory}, expandable_segments:{expandable}"] = in_child(__name__, "_snapshots", memory, env=env)
    return {**found, "wrong": [f"{k}: {w}" for k, v in found.items() for w in v["wrong"]]}


def _snapshots(memory: str) -> dict[str, Any]:
    wrong, training, digests = [], Training(gib(1.5)), {}
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
                other = Training(gib(1.5), seed=1)
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
        training = Training(num_tensors * 4 * 12 * 1000, num_tensors)
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


def restore() -> dict[str, Any]:
    """Loads 4 GiB from /dev/shm into the GPU by pinned buffers, and as it was before, from ordinary memory."""
    training = Training(gib(4))
    training.step()
    digest = training.digest()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        ckptlib.save(directory, training.state, step=1)
        found: dict[str, Any] = {"wrong": []}
        for pinned in (True, False):
            for _ in range(2):  # the second time, buffers and pages are there
                for p in training.params:
                    p.data.zero_()
                if not pinned:  # as from a device without streams: by blocking copies
                    ckptlib.loading.landing.accelerator.has_streams = lambda device: False  # type: ignore[assignment]
                began = time.perf_counter()
                ckptlib.load(directory, training.state)
                torch.cuda.synchronize()
                seconds = time.perf_counter() - began
            found["pinned" if pinned else "pageable"] = {"gb_per_s": gib(4) / seconds / 1e9}
            if training.digest() != digest:
                found["wrong"].append(f"what was loaded differs, pinned={pinned}")
    return found


def two_processes() -> dict[str, Any]:
    """Two ranks on one GPU that train the same, with a snapshot at every step and replicas on each other; what the
    store has then is compared."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [*command, "-m", "benchmarks.gpuchecks.snapshots", "ddp", directory],
            capture_output=True,
            text=True,
            timeout=300,
        )
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        wrong = [] if done.returncode == 0 and len(found) == 2 else [done.stderr[-1500:]]
        return {"ranks": found, "wrong": wrong + [w for rank in found for w in rank["wrong"]]}


def _ddp(directory: str) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    training = Training(gib(1))
    url = Path(directory) / "root"
    peers = ckptlib.Peers(copies=1, every=1, domain=f"rank{rank}")
    with ckptlib.Checkpointer(url, training.state, every=5, peers=peers) as ckpt:
        for _ in ckpt.loop(0, 10):
            training.step()
        digest = training.digest()
    other = Training(gib(1), seed=1)
    other.step()
    ckptlib.load(url, other.state)
    contexts = output("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader")
    wrong = [] if other.digest() == digest else ["what was loaded differs"]
    print(json.dumps({"rank": rank, "contexts": contexts.splitlines(), "wrong": wrong}), flush=True)
    dist.destroy_process_group()


def capture() -> dict[str, Any]:
    """Captures a graph while a snapshot is staged, with drain() before it and without; replays it, saves, compares."""
    found = {str(drained): in_child(__name__, "_capture", drained) for drained in (True, False)}
    return {**found, "wrong": found["True"]["wrong"]}


def _capture(drained: bool) -> dict[str, Any]:
    training, wrong, torn = Training(gib(1)), [], 0
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
        ckpt.close()
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
                [sys.executable, "-m", "benchmarks.gpuchecks.snapshots", "train", directory],
                stdout=subprocess.PIPE,
                text=True,
            )
            assert child.stdout is not None
            line = ""
            while not line.startswith("step") or int(line.split()[1]) < 4 + 3 * round_:
                line = child.stdout.readline()
                if not line:
                    return {"wrong": [f"the training ended in round {round_}"]}
            time.sleep(0.01 * round_)  # so that each round is killed at another place of a step
            child.send_signal(signal.SIGKILL)
            child.wait()
        step, exact = in_child(__name__, "_restored", directory)
        if not exact:
            wrong.append(f"step {step} is not what was trained")
    return {"step": step, "wrong": wrong}


def _train(directory: str) -> None:
    training = Training(gib(1))
    peers = ckptlib.Peers(copies=0, every=1)
    with ckptlib.Checkpointer(Path(directory) / "root", training.state, every=1000, peers=peers) as ckpt:
        for step in ckpt.loop(ckpt.restore().step, 10**6):
            training.step()
            print(f"step {step}", flush=True)


def _restored(directory: str) -> tuple[int, bool]:
    training, expected = Training(gib(1), seed=1), Training(gib(1))
    peers = ckptlib.Peers(copies=0, every=1)
    with ckptlib.Checkpointer(Path(directory) / "root", training.state, every=1000, peers=peers) as ckpt:
        step = ckpt.restore().step
        for _ in range(step):
            expected.step()
        return step, training.digest() == expected.digest()


if __name__ == "__main__":
    {"ddp": _ddp, "train": _train}[sys.argv[1]](*sys.argv[2:])
