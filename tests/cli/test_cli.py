"""The commands on real saves: what they say, in both ways of saying it, and that looking changes nothing."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import boto3
import pytest
from places import ROOT, WORKERS
from rich.text import Text
from support import ROOT_ID, age, make_generation, make_root, make_save, state

from ckptlib.catalog.catalog import Catalog
from ckptlib.cli import host
from ckptlib.cli.app import run
from ckptlib.cli.options import OPTIONS_VARIABLE
from ckptlib.cli.output import Output, duration, plain, size
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Generation, Root
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.slot import Slot
from ckptlib.stores import open_store
from ckptlib.stores.local import LocalStore
from ckptlib.stores.testing import flip_bit
from ckptlib.verify.findings import Damage

WORKER = WORKERS / "cli_saves.py"
DAY_S = 86400.0


class Result:
    """How a command ended and what it said."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        """Of all that is on stdout."""
        return json.loads(self.out)

    def lines(self) -> list[list[str]]:
        """Words of each line."""
        return [line.split() for line in self.out.splitlines()]


Ckptlib = Callable[..., Result]


@pytest.fixture
def ckptlib(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ckptlib:
    """Runs the command in this process."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # no terminal, whoever runs the tests
    monkeypatch.setenv("COLUMNS", "80")  # people's terminals are narrow: nothing may be lost or cut

    def call(*arguments: object) -> Result:
        with pytest.raises(SystemExit) as ended:
            run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        assert "Traceback" not in captured.err
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 2 and 4 of two ranks; then a rewind to 2, and step 3 of one rank."""
    root = tmp_path_factory.mktemp("cli") / "root"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for command in ([*launcher, str(WORKER), str(root), "two"], [str(WORKER), str(root), "one"]):
        done = subprocess.run(
            [sys.executable, *command],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.fixture
def made(tmp_path: Path) -> LocalStore:
    """Steps 1 to 5, by hand."""
    store = LocalStore(str(tmp_path / "made"))
    catalog = make_root(store)
    generation = make_generation(catalog)
    for step in range(1, 6):
        make_save(catalog, generation, step, state(step))
    return store


def files(root: Path | str) -> dict[str, tuple[int, int]]:
    """Everything below a directory: size and time of change."""
    found = Path(str(root).removeprefix("file://")).rglob("*")
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in found if path.is_file()}


def path_of(store: LocalStore) -> Path:
    return Path(store.url.removeprefix("file://"))


def of_step(root: Path, kind: str, step: int, number: int = 0) -> Path:
    return sorted((root / kind).glob(f"{step:012d}-*/*"))[number]


# -- ls


def test_ls(ckptlib: Ckptlib, saved: Path) -> None:
    header, *rows = ckptlib("ls", saved).lines()
    assert header == ["STEP", "GEN", "AGE", "RANKS", "SIZE", "METRICS"]
    assert [row[:2] for row in rows] == [["2", "1"], ["3", "2"]]
    assert [row[4:] for row in rows] == [
        ["2", "12.0", "MB", "loss", "2.5"],
        ["1", "12.0", "MB", "loss", "2.25", "note", r"rewound\x1b[31m"],
    ]


def test_ls_all(ckptlib: Ckptlib, root: Path) -> None:
    store = LocalStore(str(root))
    store.put(SaveId(9, GenerationId(2, "f" * 8)).pack_key(0, "0" * 8, 0), bytes(1000))
    store.put(SaveId(1, GenerationId(1, "f" * 8)).trash_key, b"{}")
    document = ckptlib("ls", root, "--all", "--json").json
    assert [(row["step"], row["state"]) for row in document["steps"]] == [
        (1, "trash"),
        (2, "committed"),
        (3, "committed"),
        (4, "left behind"),
        (9, "uncommitted"),
    ]
    assert document["steps"][-1]["nbytes"] == 1000
    shown = ckptlib("ls", root, "--all")
    assert "loss nan" in shown.out
    assert len(shown.lines()) == 1 + 5 + 1
    assert [row["step"] for row in ckptlib("ls", root, "--json").json["steps"]] == [2, 3]


def test_ls_of_a_damaged_manifest(ckptlib: Ckptlib, root: Path) -> None:
    flip_bit(next((root / "steps").glob("*2-000001-*")), 300)
    result = ckptlib("ls", root)
    assert result.code == 1
    assert result.lines()[1][:6] == ["2", "1", "-", "-", "-"]
    assert "does not match its digest" in result.err
    assert [row["state"] for row in ckptlib("ls", root, "--json").json["steps"]] == ["damaged", "committed"]


def test_ls_where_there_is_nothing(ckptlib: Ckptlib, tmp_path: Path) -> None:
    result = ckptlib("ls", tmp_path / "nowhere")
    assert (result.code, result.out) == (1, "")
    assert result.err.count("\n") == 1
    assert "holds no checkpoints" in result.err
    assert not (tmp_path / "nowhere").exists()
    make_root(LocalStore(str(tmp_path / "empty")))
    result = ckptlib("ls", tmp_path / "empty")
    assert result.code == 0
    assert "no committed step" in result.out


# -- show


def test_show(ckptlib: Ckptlib, saved: Path) -> None:
    shown = ckptlib("show", saved)
    assert shown.code == 0
    text = " ".join(shown.out.split())
    assert "step 3 12.0 MB by 1 rank" in text
    assert "resumed from step 2 of generation 1" in text
    assert "total 9 12.0 MB" in text
    assert "\x1b" not in shown.out

    document = ckptlib("show", saved, 2, "--tensors", "model/*", "--values", "--json").json
    assert (document["step"], document["world_size"], document["visible"]) == (2, 2, True)
    assert document["values"]["epoch"] == 2
    assert document["totals"]["model"] == {"num_tensors": 5, "nbytes": 12_000_000 + 30 + 3 + 64 + 8}
    assert document["totals"]["cursor"] == {"num_tensors": 1, "nbytes": 32}
    tensors = {tensor["name"]: tensor for tensor in document["tensors"]}
    assert tensors["model/large"] == {
        "name": "model/large",
        "dtype": "float32",
        "shape": [3000, 1000],
        "held": "S0 on 2",
        "nbytes": 12_000_000,
    }
    assert tensors["model/complex"]["dtype"] == "complex128"
    assert set(tensors) == {f"model/{name}" for name in ("large", "small", "flags", "complex", "count")}
    packs = [path for path in files(saved) if "/packs/000000000002" in path]
    assert document["objects"]["packs"] == {"number": 2, "nbytes": sum(files(saved)[path][0] for path in packs)}
    assert set(document["generations"][0]["versions"]) == {"python", "torch", "ckptlib"}


def test_show_a_step_that_was_left_behind_by_its_name(ckptlib: Ckptlib, saved: Path) -> None:
    name = next(row["name"] for row in ckptlib("ls", saved, "--all", "--json").json["steps"] if row["step"] == 4)
    document = ckptlib("show", saved, name, "--json").json
    assert (document["step"], document["visible"]) == (4, False)
    missing = ckptlib("show", saved, 4)
    assert missing.code == 1
    assert "holds no step 4; the last ones are: 2, 3" in missing.err


def test_errors_are_json_too(ckptlib: Ckptlib, saved: Path) -> None:
    result = ckptlib("show", saved, 7, "--json")
    assert result.code == 1
    assert result.json["error"]["kind"] == "CheckpointNotFound"
    assert result.err.count("\n") == 1


# -- verify


def test_verify_real_saves(ckptlib: Ckptlib, saved: Path) -> None:
    before = files(saved)
    document = ckptlib("verify", saved, "--all", "--json").json
    assert document["good"]
    assert document["findings"] == []
    assert [step["step"] for step in document["steps"]] == [2, 3, 4]
    assert document["nbytes"] == sum(size for path, (size, _) in before.items() if "/packs/" in path)
    shown = ckptlib("verify", saved)
    assert shown.code == 0
    assert shown.lines()[0][:3] == ["good", "step", "3"]
    assert "all good" in shown.out
    assert files(saved) == before


def test_verify_names_what_is_damaged(ckptlib: Ckptlib, root: Path) -> None:
    pack = of_step(root, "packs", 2, 1)
    flip_bit(pack, pack.stat().st_size // 2)
    of_step(root, "packs", 4, 0).unlink()
    flip_bit(of_step(root, "packs", 3), 40)
    result = ckptlib("verify", root, "--all", "--json")
    assert result.code == 1
    flipped, header, lost = result.json["findings"]
    assert (flipped["step"], flipped["damage"], flipped["rank"]) == (2, "altered", 1)
    assert flipped["key"] == str(pack.relative_to(root))
    assert flipped["tensors"] == [{"name": "model/large", "box": [[1500, 3000], [0, 1000]]}]
    assert flipped["offset"] <= pack.stat().st_size // 2 < flipped["offset"] + flipped["nbytes"]
    assert (header["step"], header["damage"]) == (3, "malformed")
    assert (lost["step"], lost["damage"], lost["rank"]) == (4, "missing", 0)
    assert {"name": "model/large", "box": [[0, 1500], [0, 1000]]} in lost["tensors"]

    shown = ckptlib("verify", root, 2)
    assert shown.code == 1
    assert shown.lines()[0][:3] == ["bad", "step", "2"]
    assert "model/large[1500:3000, 0:1000] of rank 1" in shown.out
    assert "1 finding" in shown.out
    assert ckptlib("verify", root).code == 1
    assert ckptlib("verify", root, 4).code == 1  # not on the history


def test_verify_with_a_damaged_history(ckptlib: Ckptlib, root: Path) -> None:
    """The generations cannot be read: the newest save is looked at all the same."""
    for record in (root / "generations").iterdir():
        flip_bit(record, 100)
    (root / "ckptlib.json").unlink()
    document = ckptlib("verify", root, "--json").json
    assert [(one["damage"], one["key"].split("/")[0]) for one in document["findings"]] == [
        ("missing", "ckptlib.json"),
        ("altered", "generations"),
        ("altered", "generations"),
    ]
    assert [step["step"] for step in document["steps"]] == [3]


def test_verify_wants_a_step_or_all(ckptlib: Ckptlib, saved: Path) -> None:
    assert ckptlib("verify", saved, 2, "--all").code == 2


# -- gc


def test_gc_dry_run_changes_nothing(ckptlib: Ckptlib, made: LocalStore) -> None:
    before = files(made.url)
    document = ckptlib("gc", made.url, "--keep-last", 2, "--keep-every", 2, "--dry-run", "--json").json
    assert document["dry_run"]
    assert [row["step"] for row in document["dropped"]] == [1, 3]
    assert document["deleted"] == []
    shown = ckptlib("gc", made.url, "--keep-last", 2, "--keep-every", 2, "--dry-run")
    assert shown.lines()[0][:4] == ["would", "drop", "step", "1"]
    assert files(made.url) == before


def test_gc(ckptlib: Ckptlib, made: LocalStore) -> None:
    document = ckptlib("gc", made.url, "--keep-last", 2, "--json").json
    assert [row["step"] for row in document["dropped"]] == [1, 2, 3]
    assert all(row["nbytes"] > 0 for row in document["dropped"])
    assert [row["step"] for row in ckptlib("ls", made.url, "--json").json["steps"]] == [4, 5]
    assert [row["state"] for row in ckptlib("ls", made.url, "--all", "--json").json["steps"]] == ["trash"] * 3 + [
        "committed"
    ] * 2
    age(made, 2 * DAY_S)
    freed = ckptlib("gc", made.url, "--keep-last", 2, "--dry-run", "--json").json["nbytes_deleted"]
    done = ckptlib("gc", made.url, "--keep-last", 2)
    assert done.lines()[0][0] == "deleted"
    assert freed > 0
    assert ckptlib("ls", made.url, "--all", "--json").json["steps"] == ckptlib("ls", made.url, "--json").json["steps"]
    assert ckptlib("verify", made.url, "--all").code == 0
    assert ckptlib("gc", made.url, "--keep-last", 2).out == "nothing to do\n"


def test_gc_drops_what_a_rewind_left_behind(ckptlib: Ckptlib, root: Path) -> None:
    assert ckptlib("gc", root, "--keep-last", 9, "--json").json["dropped"] == []
    assert [row["step"] for row in ckptlib("gc", root, "--keep-last", 9, "--abandoned", "--json").json["dropped"]] == [
        4
    ]


@pytest.mark.parametrize(
    "arguments", [["--keep-last", 0], [], ["--keep-last", 1, "--keep-every", 0], ["--keep-last", 1, "--grace", 0.01]]
)
def test_gc_usage(ckptlib: Ckptlib, made: LocalStore, arguments: list[object]) -> None:
    before = files(made.url)
    result = ckptlib("gc", made.url, *arguments)
    assert (result.code, result.out) == (2, "")
    assert files(made.url) == before


@pytest.mark.parametrize(("answer", "left"), [(b"n\n", 5), (b"y\n", 1)])
def test_gc_asks_on_a_terminal(made: LocalStore, answer: bytes, left: int) -> None:
    code, said = on_terminal(["gc", made.url, "--keep-last", "1"], answer)
    assert "would drop" in said
    assert "Drop 4 steps? [y/N]" in said
    assert code == (1 if left == 5 else 0)
    assert len(list((path_of(made) / "steps").iterdir())) == left


def test_gc_does_not_ask_when_told_so(made: LocalStore) -> None:
    code, said = on_terminal(["gc", made.url, "--keep-last", "1", "--yes"], b"")
    assert code == 0
    assert "[y/N]" not in said


def test_verify_on_a_terminal_draws_a_bar_and_wipes_it_away(made: LocalStore) -> None:
    code, said = on_terminal(["verify", made.url], b"")
    assert code == 0
    assert "\x1b[2K" in said  # the line was erased
    assert said.rstrip().endswith("all good\x1b[0m")


def on_terminal(arguments: list[str], answer: bytes) -> tuple[int, str]:
    """Runs the command on a terminal of its own."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    command = [sys.executable, "-m", "ckptlib.cli", *arguments]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    said = b""
    if answer:
        os.write(ours, answer)
    try:
        while data := os.read(ours, 65536):
            said += data
    except OSError:  # how a terminal says that nobody is there any more
        pass
    os.close(ours)
    return process.wait(60), said.decode()


# -- doctor


def test_doctor(ckptlib: Ckptlib, tmp_path: Path) -> None:
    document = ckptlib("doctor", "--json").json
    verdicts = {check["name"]: check["verdict"] for check in document["checks"]}
    assert {
        "shared memory",
        "cgroup memory",
        "RemoveIPC",
        "ulimit -l",
        "kernel",
        "versions",
        "slots",
    } <= verdicts.keys()
    assert verdicts["versions"] == "ok"
    shown = ckptlib("doctor", tmp_path / "not" / "there", "--size", 1)
    assert shown.code == (0 if document["good"] else 1)
    assert "MB/s" in shown.out or "GB/s" in shown.out
    assert "direct I/O" in shown.out
    assert list(tmp_path.iterdir()) == []  # left as it was


def test_doctor_leaves_a_root_as_it_was(ckptlib: Ckptlib, saved: Path) -> None:
    before = files(saved)
    ckptlib("doctor", saved, "--size", 1)
    assert files(saved) == before
    assert not (saved / "probe").exists()


def test_doctor_of_a_store_that_fails(ckptlib: Ckptlib, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = ckptlib("doctor", tmp_path / "file" / "below", "--json")
    assert result.code == 1
    assert {c["name"]: c["verdict"] for c in result.json["checks"]}["store"] == "bad"


def test_slots_alive_and_abandoned(tmp_path: Path) -> None:
    holder = (
        "import sys; from pathlib import Path; from ckptlib.slots.slot import Slot\n"
        "slot = Slot.create(Path(sys.argv[1]), 'ckptlib-00', 1 << 20); print(slot.path, flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holder, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    path = process.stdout.readline().strip()
    slot = Slot.open(Path(path))
    slot.close()
    other = Slot.create(tmp_path, "ckptlib-01", 1 << 16)
    other.write_header(SlotHeader(ROOT_ID, SaveId(7, GenerationId(1, "0" * 8)), 3, 4, 1, 2, 100, {}))
    other.close()
    try:
        alive, abandoned = host.slots([tmp_path])
    finally:
        process.communicate("\n", timeout=60)
    assert (alive.verdict, abandoned.verdict) == ("ok", "warning")
    assert [s["path"] for s in alive.numbers["slots"]] == [path]  # type: ignore[attr-defined]
    assert [s["content"] for s in abandoned.numbers["slots"]] == ["step 7 of rank 3 of 4"]  # type: ignore[attr-defined]
    assert [check.verdict for check in host.slots([tmp_path])] == ["warning"]


def test_slots_of_a_job_and_what_it_survives(ckptlib: Ckptlib, tmp_path: Path) -> None:
    with open_store(str(tmp_path / "root")) as store:
        catalog = Catalog(store)
        catalog.open_root(Root(ROOT_ID, "xxh3", 60.0))
        generation = GenerationId(1, "0" * 8)
        domains = ("h0", "h0", "h1", "h1", "h2", "h2")
        catalog.put_generation(Generation(generation, 6, None, 0.0, {}, "here", domains=domains, copies=1))
    arena = tmp_path / "arena"
    arena.mkdir()
    mine = Slot.create(arena, f"ckptlib-{ROOT_ID[:16]}-{generation}", 1 << 16)
    mine.write_header(SlotHeader(ROOT_ID, SaveId(7, generation), 3, 6, 1, 2, 100, {}))
    other = Slot.create(arena, f"ckptlib-{'1' * 16}-{generation}", 1 << 16)
    other.write_header(SlotHeader("1" * 32, SaveId(9, generation), 0, 1, 1, 1, 100, {}))
    mine.close()
    other.close()

    found = ckptlib("slots", tmp_path / "root", "--arena", arena, "--json").json
    assert [(s["path"], s["step"], s["rank"], s["state"]) for s in found["slots"]] == [
        (str(mine.path), 7, 3, "ready, left behind")
    ]
    assert found["placement"]["num_losses_survived"] == 1
    assert found["placement"]["holders"] == [[2], [3], [4], [5], [0], [1]]
    shown = ckptlib("slots", tmp_path / "root", "--arena", arena)
    assert "survives the loss of any 1" in shown.out
    every = ckptlib("slots", "--arena", arena, "--json").json["slots"]
    assert {(s["path"], s["state"]) for s in every} >= {
        (str(mine.path), "ready, left behind"),
        (str(other.path), "being written, left behind"),
    }

    cleaned = ckptlib("slots", tmp_path / "root", "--arena", arena, "--clean", "--json").json
    assert cleaned["removed"] == [str(mine.path)]
    assert not mine.path.exists()
    assert other.path.exists()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_cgroup_limits_of_both_versions(tmp_path: Path) -> None:
    mount, membership = tmp_path / "cgroup", tmp_path / "membership"
    gigabyte = 1 << 30
    write(membership, "0::/job/step\n")
    write(mount / "job" / "step" / "memory.max", "max\n")
    write(mount / "job" / "memory.max", f"{4 * gigabyte}\n")
    write(mount / "job" / "memory.current", f"{gigabyte}\n")
    found = host.cgroup_memory(mount, membership)
    assert (found.verdict, found.numbers) == ("ok", {"nbytes_limit": 4 * gigabyte, "nbytes_used": gigabyte})
    write(mount / "job" / "memory.current", f"{4 * gigabyte - 5}\n")
    assert host.cgroup_memory(mount, membership).verdict == "warning"

    write(membership, "4:memory:/from/the/host\n0::/\n")
    write(mount / "memory" / "memory.limit_in_bytes", f"{2 * gigabyte}\n")
    write(mount / "memory" / "memory.usage_in_bytes", "5\n")
    assert host.cgroup_memory(mount, membership).numbers == {"nbytes_limit": 2 * gigabyte, "nbytes_used": 5}
    write(mount / "memory" / "memory.limit_in_bytes", "9223372036854771712\n")
    assert host.cgroup_memory(mount, membership).found == "no limit"
    assert host.cgroup_memory(mount, tmp_path / "nothing").found == "no limit"


def test_remove_ipc(tmp_path: Path) -> None:
    assert host.remove_ipc(tmp_path, 1000).verdict == "ok"  # no logind
    (tmp_path / "run/systemd/sessions").mkdir(parents=True)
    assert host.remove_ipc(tmp_path, 1000).verdict == "warning"  # its default
    assert host.remove_ipc(tmp_path, 0).verdict == "ok"
    write(tmp_path / "etc/systemd/logind.conf", "[Login]\n#RemoveIPC=yes\nRemoveIPC=no\n")
    assert host.remove_ipc(tmp_path, 1000).verdict == "ok"
    write(tmp_path / "etc/systemd/logind.conf.d/site.conf", "[Login]\nRemoveIPC=yes\n")
    assert host.remove_ipc(tmp_path, 1000).verdict == "warning"


def test_shared_memory(tmp_path: Path) -> None:
    assert host.shared_memory(tmp_path / "nothing").verdict == "bad"
    assert host.shared_memory(tmp_path).numbers["nbytes"] == shutil.disk_usage(tmp_path).total


# -- the command itself


def test_needs_no_torch(made: LocalStore, tmp_path: Path) -> None:
    code = (
        "import sys; from ckptlib.cli.app import run\n"
        "for arguments in ARGUMENTS:\n"
        "    try: run(arguments)\n"
        "    except SystemExit as ended: assert ended.code == 0, (arguments, ended.code)\n"
        "assert 'torch' not in sys.modules\n"
    )
    url = made.url
    arguments = [
        ["ls", url, "--all"],
        ["show", url, "--values", "--tensors", "*"],
        ["verify", url, "--all"],
        ["gc", url, "--keep-last", "3"],
        ["doctor", url, "--size", "1", "--json"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", code.replace("ARGUMENTS", repr(arguments))], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from ckptlib.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == f"the ckptlib command needs {missing}, which is not installed: pip install 'ckptlib[cli]'\n"


def test_as_a_module(saved: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ckptlib.cli", "ls", saved, "--json"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert len(json.loads(done.stdout)["steps"]) == 2


@pytest.mark.parametrize(
    "arguments",
    [["ls"], ["ls", "x", "--option", "key"], ["ls", "x", "--option", "key={"], ["frobnicate"], ["ls", "nope://x"]],
)
def test_wrong_usage(ckptlib: Ckptlib, arguments: list[str]) -> None:
    result = ckptlib(*arguments)
    assert (result.code, result.out) == (2, "")


@pytest.mark.parametrize("text", ["{", "[]"])
def test_wrong_options_in_the_environment(ckptlib: Ckptlib, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(OPTIONS_VARIABLE, text)
    result = ckptlib("ls", "x")
    assert result.code == 2
    assert OPTIONS_VARIABLE in result.err


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            assert server.poll() is None, "moto's server did not start"
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        endpoint = f"http://127.0.0.1:{port}"
        client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id="testing",
            aws_secret_access_key="123456",
        )
        client.create_bucket(Bucket="bucket")
        yield endpoint
    finally:
        server.terminate()
        server.wait(30)


def test_on_s3(ckptlib: Ckptlib, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options come from both places; a secret of digits stays text."""
    url = f"s3://bucket/{uuid.uuid4().hex}"
    store = open_store(url, {"key": "testing", "secret": "123456", "endpoint_url": s3_endpoint})
    catalog = make_root(store)
    generation = make_generation(catalog)
    saves = [make_save(catalog, generation, step, state(step)) for step in (1, 2)]
    monkeypatch.setenv(OPTIONS_VARIABLE, json.dumps({"key": "testing", "endpoint_url": s3_endpoint}))
    options = ["--option", "secret=123456", "--option", 'client_kwargs={"region_name": "us-east-1"}']

    assert [row["step"] for row in ckptlib("ls", url, *options, "--json").json["steps"]] == [1, 2]
    assert ckptlib("verify", url, "--all", *options, "--json").json["good"]
    assert ckptlib("doctor", url, "--size", 1, *options).code == 0
    pack = store.scan(saves[1].packs_prefix)[0].key
    data = store.get(pack)
    store.delete(pack)
    store.put(pack, data[:-5000] + bytes([data[-5000] ^ 1]) + data[-4999:])
    assert ckptlib("verify", url, 1, *options).code == 0
    assert [row["step"] for row in ckptlib("gc", url, "--keep-last", 1, *options, "--json").json["dropped"]] == [1]
    assert {entry.key for entry in store.scan(keys.STEPS)} == {saves[1].manifest_key}
    failed = ckptlib("ls", "s3://nobucket/x", *options)
    assert failed.code == 1
    assert "123456" not in failed.err


# -- words


def test_sizes() -> None:
    numbers = [0, 999, 1000, 9994, 9996, 99_949, 99_951, 999_499, 999_501, 5 * 10**12, 10**19]
    assert [size(n) for n in numbers] == [
        *("0 B", "999 B", "1.00 kB", "9.99 kB", "10.0 kB", "99.9 kB", "100 kB", "999 kB", "1.00 MB", "5.00 TB"),
        "10000 PB",
    ]


def test_durations() -> None:
    seconds = [0.0004, 0.9, 1, 119, 120, 7199, 7200, 172_799, 172_800, -5]
    assert [duration(s) for s in seconds] == [
        *("0.4 ms", "900.0 ms", "1 s", "119 s", "2 min", "120 min", "2 h", "48 h", "2 d", "-5 s"),
    ]


def test_nothing_from_a_store_orders_the_terminal_about() -> None:
    assert plain("ok \u00e9 \u4e2d") == "ok \u00e9 \u4e2d"
    assert plain("a\x1b[2Jb\nc\x07\u202e") == "a\\x1b[2Jb\\nc\\x07\\u202e"


def test_columns_line_up_whatever_is_in_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Wide characters count twice, escaped ones as they are shown; nothing is taken for markup or cut."""
    rows = [
        ("\u4e2d\u6587", "1", "[red]x"),
        ("a", "1,000", ""),
        ("b\x1b", "22", "y" * 300),
        (Text("c", "bold"), "3", "z"),
    ]
    Output(as_json=False).columns(("NAME", "N", "REST"), rows, right=("N",))
    assert capsys.readouterr().out.splitlines() == [
        "NAME       N  REST",
        "\u4e2d\u6587       1  [red]x",
        "a      1,000",
        "b\\x1b     22  " + "y" * 300,
        "c          3  z",
    ]


def test_a_long_table_takes_no_longer_than_to_make_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.process_time()
    Output(as_json=False).columns(("A", "B"), [(f"row {i}", f"{i:,}") for i in range(100_000)], right=("B",))
    assert time.process_time() - began < 8  # styled one by one: 25 and more
    assert len(capsys.readouterr().out.splitlines()) == 100_001


# -- docs


def test_what_the_docs_say(ckptlib: Ckptlib, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    monkeypatch.chdir(saved.parent)
    (saved.parent / "runs").mkdir()
    (saved.parent / "runs" / "7").symlink_to(saved)
    commands = [line[2:].partition(" | ")[0] for line in text.splitlines() if line.startswith("$ ckptlib")]
    assert len(commands) > 10
    for command in commands:
        assert ckptlib(*shlex.split(command)[1:]).code == 0, command
    names: dict[str, Any] = {}
    for snippet in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(snippet, names)
    assert names["findings"] == []
    for damage in get_args(Damage):
        assert f"| `{damage}` |" in text
