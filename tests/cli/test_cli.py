"""The command itself: what it needs, how it is called wrongly, on S3, the words it says, and what the docs show."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any, get_args

import numpy as np
import pytest
from helpers.commands import Ckptlib
from helpers.servers import ObjectStorage
from places import ROOT
from rich.text import Text
from support import make_generation, make_root, make_save, state

from ckptlib.cli.options import OPTIONS_VARIABLE
from ckptlib.cli.output import Output
from ckptlib.format import keys
from ckptlib.stores import open_store
from ckptlib.stores.local import LocalStore
from ckptlib.verify.findings import Damage
from ckptlib.words import cut, duration, last, listed, one_line, plain, seconds, size, span

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
        ["du", url],
        ["diff", url, "1", "2", "--deep"],
        ["refresh", url, "2"],
        ["pin", url, "2"],
        ["unpin", url, "2"],
        ["verify", url, "--all"],
        ["report", url, "-o", str(tmp_path / "report.html")],
        ["watch", url, "--once"],
        ["gc", url, "--keep-last", "3"],
        ["doctor", url, "--size", "1", "--json"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", code.replace("ARGUMENTS", repr(arguments))], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from ckptlib.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150)
    assert done.returncode == 1
    assert done.stderr == f"the ckptlib command needs {missing}, which is not installed: pip install 'ckptlib[cli]'\n"


def test_an_interrupt_while_it_imports_prints_no_traceback() -> None:
    code = """
import sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "ckptlib.cli.app":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
from ckptlib.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150)
    assert (done.returncode, done.stderr) == (1, "\nAborted!\n")


def test_a_server_that_is_not_there_as_the_store_is_opened() -> None:
    command = [sys.executable, "-m", "ckptlib.cli", "ls", "ftp://127.0.0.1:1/run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 1
    assert done.stderr.startswith("ftp://127.0.0.1:1/run: cannot be reached: ConnectionRefusedError")


def test_traces_that_clients_of_buckets_log_are_not_printed() -> None:
    """The error that ends the command says what the matter is."""
    program = (
        "import logging\nfrom ckptlib.cli.app import run\ntry:\n    run(['--version'])\nexcept SystemExit:\n"
        "    logging.getLogger('gcsfs').exception('a try\\x1b failed')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150)
    assert (done.returncode, done.stderr) == (0, "a try\\x1b failed\n")


@pytest.mark.parametrize(
    "arguments", [["ls"], ["pin", "2"], ["export", "out"], ["copy", "2", "new"], ["doctor"], ["slots"]]
)
def test_it_is_told_by_a_document_where_that_was_asked_for(ckptlib: Ckptlib, arguments: list[str]) -> None:
    command, *others = arguments
    found = ckptlib(command, "ftp://127.0.0.1:1/run", *others, "--json")
    assert (found.code, found.json["error"]["kind"]) == (1, "StoreTimeout")


@pytest.mark.parametrize("module", ["ckptlib", "ckptlib.cli"])
def test_as_a_module(saved: Path, module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "ls", saved, "--json"], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0
    assert len(json.loads(done.stdout)["steps"]) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls"],
        ["export", "nope://x", "out"],
        ["export", "", "out"],
        ["import", ".", "nope://x"],
        ["import", ".", "x", "--step", "1000000000000"],
        ["ls", "x", "--option", "key=" + "[" * 100_000],
        ["ls", "x", "--option", "key"],
        ["ls", "x", "--option", "key={"],
        ["frobnicate"],
        ["ls", "nope://x"],
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_wrong_usage(ckptlib: Ckptlib, arguments: list[str]) -> None:
    result = ckptlib(*arguments)
    assert (result.code, result.out) == (2, "")


def test_an_import_from_a_bucket_says_what_to_do(ckptlib: Ckptlib, tmp_path: Path) -> None:
    said = ckptlib("import", "s3://bucket/a.pt", tmp_path / "root")
    assert (said.code, "copy them here first" in said.err) == (1, True)
    assert "does not exist" in ckptlib("import", tmp_path / "gone.pt", tmp_path / "root").err


def test_a_url_is_named_once(ckptlib: Ckptlib) -> None:
    for url in ("s3:/bucket/run7", "nope://x"):
        assert f"{url}: {url}" not in (said := ckptlib("ls", url).err)
        assert url in said


def test_a_working_directory_that_was_removed(
    ckptlib: Ckptlib, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    said = ckptlib("ls", "runs/7")
    assert (said.code, said.out) == (2, "")
    assert "runs/7: the working directory is not there: No such file" in said.err


def test_a_file_of_the_options_that_is_not_there(ckptlib: Ckptlib, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="pip install obstore")
    options = {"client": "obstore", "client_kwargs": {"verify": "/nowhere/ca.pem"}}
    monkeypatch.setenv(OPTIONS_VARIABLE, json.dumps(options))
    said = ckptlib("ls", "s3://bucket/run7")
    assert (said.code, said.out) == (2, "")
    assert "s3://bucket/run7: client_kwargs={'verify': '/nowhere/ca.pem'}: No such file" in said.err


@pytest.mark.parametrize("text", ["{", "[]"])
def test_wrong_options_in_the_environment(ckptlib: Ckptlib, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(OPTIONS_VARIABLE, text)
    result = ckptlib("ls", "x")
    assert result.code == 2
    assert OPTIONS_VARIABLE in result.err


def test_on_s3(ckptlib: Ckptlib, s3: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options come from both places; a secret of digits stays text."""
    url, (key, secret) = s3.url(), (s3.secrets["key"], s3.secrets["secret"])
    store = open_store(url, s3.options())
    catalog = make_root(store)
    generation = make_generation(catalog)
    saves = [make_save(catalog, generation, step, state(step)) for step in (1, 2)]
    monkeypatch.setenv(OPTIONS_VARIABLE, json.dumps({"key": key, "endpoint_url": s3.endpoint}))
    options = ["--option", f"secret={secret}", "--option", 'client_kwargs={"region_name": "us-east-1"}']

    assert [row["step"] for row in ckptlib("ls", url, *options, "--json").json["steps"]] == [1, 2]
    assert ckptlib("verify", url, "--all", *options, "--json").json["good"]
    assert [row["step"] for row in ckptlib("watch", url, "--once", *options, "--json").json["recent"]] == [1, 2]
    assert "all 2 committed saves" in ckptlib("report", url, "-o", "-", *options).out
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
    assert secret not in failed.err


# -- words


def test_sizes() -> None:
    numbers = [0, 999, 1000, 9994, 9996, 99_949, 99_951, 999_499, 999_501, 5 * 10**12, 10**19]
    assert [size(n) for n in numbers] == [
        *("0 B", "999 B", "1.00 kB", "9.99 kB", "10.0 kB", "99.9 kB", "100 kB", "999 kB", "1.00 MB", "5.00 TB"),
        "10000 PB",
    ]


def test_durations() -> None:
    times = [0.0004, 0.9, 1, 119, 120, 7199, 7200, 172_799, 172_800, -5]
    assert [duration(s) for s in times] == [
        *("0.4 ms", "900.0 ms", "1 s", "119 s", "2 min", "120 min", "2 h", "48 h", "2 d", "-5 s"),
    ]


def test_times_that_are_compared() -> None:
    assert [seconds(s) for s in (0.0004, 1, 119.94, 120, 7199, 7200, 252_720, 9e6, -5)] == [
        *("0.4 ms", "1.0 s", "119.9 s", "2.0 min", "120.0 min", "2.0 h", "70.2 h", "2,500.0 h", "-5 s"),
    ]


def test_what_is_cut() -> None:
    assert [listed(range(n), 2) for n in (0, 2, 3)] == ["", "0, 1", "0, 1, ..."]
    assert [last(range(n), 2) for n in (0, 2, 3)] == ["", "0, 1", "..., 1, 2"]
    assert [cut("abcdef", most) for most in (6, 5)] == ["abcdef", "ab..."]
    assert one_line(" a\n\n b ") == "a; b"
    assert [span(steps) for steps in ([7], [10, 30, 20])] == ["step 7", "3 steps from 10 to 30"]


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


def test_a_very_long_name_moves_no_other_line(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("x" * 400, "1", "a"), ("y", "22", "b")]
    Output(as_json=False).columns(("NAME", "N", "REST"), rows, right=("N",))
    assert capsys.readouterr().out.splitlines() == ["NAME   N  REST", f"{'x' * 400}   1  a", "y     22  b"]


def test_a_terminal_without_unicode(tmp_path: Path) -> None:
    """What it has no character for is escaped; a page is UTF-8 wherever it goes."""
    state = {"\u6f22e\u0301": np.ones(2, np.float32)}
    catalog = make_root(LocalStore(str(tmp_path / "root")))
    make_save(catalog, make_generation(catalog), 1, state)
    names = {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}

    def said(*arguments: str) -> bytes:
        command = [sys.executable, "-m", "ckptlib.cli", *arguments]
        return subprocess.run(command, env={**os.environ, **names}, capture_output=True, check=True).stdout

    root = str(tmp_path / "root")
    assert rb"\u6f22e\u0301" in said("show", root, "--tensors", "*")
    assert "\u2015 what a load" in said("report", root, "-o", "-").decode()


@pytest.mark.parametrize(
    "step", ["\u00b2", "\u0663", "9" * 5000, "1_0", "-1", " 1", "1\x1b[31m", ""], ids=lambda step: ascii(step)[:16]
)
@pytest.mark.parametrize("command", [["show"], ["pin"], ["rewind", "--yes"]], ids=lambda command: command[0])
def test_steps_that_are_none(ckptlib: Ckptlib, made: LocalStore, command: list[str], step: str) -> None:
    """Digits of other scripts, and more than Python reads, among them."""
    result = ckptlib(*command, made.url, "--", step)
    assert result.code == 1
    assert "is neither a step's number, nor its full name" in result.err


@pytest.mark.parametrize("command", ["show", "diff", "verify", "pin", "unpin", "refresh", "rewind", "copy"])
def test_a_place_that_is_no_root_is_not_told_as_a_root_without_the_step(
    ckptlib: Ckptlib, tmp_path: Path, command: str
) -> None:
    """As where a mount is missing."""
    others = {"diff": ["latest"], "copy": [tmp_path / "new"]}
    result = ckptlib(command, tmp_path, "latest", *others.get(command, []))
    assert (result.code, result.out) == (1, "")
    assert "holds no checkpoints: there is no ckptlib.json. Is this a run's URL, and its file system mou" in result.err


@pytest.mark.parametrize("arguments", [["ls"], ["ls", "--json"], ["report", "-o", "-"]])
def test_where_the_output_cannot_be_written(made: LocalStore, arguments: list[str]) -> None:
    """A full disk is told; who reads no further, as `head` does, is told nothing; a caller may close stdout."""
    command = [sys.executable, "-m", "ckptlib.cli", *arguments, made.url.removeprefix("file://")]

    def run(stdout: IO[bytes] | int | None, close: str = "") -> tuple[int, str]:
        given = ["sh", "-c", f'exec "$@" {close}', "sh", *command]
        done = subprocess.run(given, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=150)
        return done.returncode, done.stderr

    with open("/dev/full", "wb") as full:
        code, said = run(full)
    assert code == 1
    assert said.startswith("the output cannot be written: No space left on device")
    assert said.count("\n") == 1
    reader, writer = os.pipe()
    os.close(reader)
    assert run(writer) == (1, "")
    os.close(writer)
    assert run(None, ">&-") == (0, "")


def test_a_password_in_a_url_is_not_shown(ckptlib: Ckptlib) -> None:
    for url in ("sftp://me:hunter2@127.0.0.1/run", "nothing://me:hunter2@127.0.0.1/run"):
        said = ckptlib("ls", url)
        assert said.code == 2
        assert "://127.0.0.1/run" in said.err
        assert "hunter2" not in said.err


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
    shutil.copytree(saved, saved.parent / "runs" / "7")
    commands = [line[2:].partition(" | ")[0] for line in text.splitlines() if line.startswith("$ ckptlib")]
    assert len(commands) > 10
    for command in commands:
        found = ckptlib(*shlex.split(command)[1:])
        assert found.code == 0, (command, found.err)
    names: dict[str, Any] = {}
    for snippet in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(snippet, names)
    assert names["findings"] == []
    for damage in get_args(Damage):
        assert f"| `{damage}` |" in text
