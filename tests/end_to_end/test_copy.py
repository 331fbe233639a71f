"""`ckptlib copy`: what stands in the new root stands alone, whole or not at all, whatever befalls the copy."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch
from helpers.commands import DAY_S, on_terminal
from helpers.increments import body_of, save_steps
from helpers.servers import ObjectStorage
from helpers.sparse_training import tensors, train
from places import ROOT
from support import age, replace_object, resealed

import ckptlib
from ckptlib.catalog.catalog import Catalog
from ckptlib.cli import app as cli
from ckptlib.errors import CheckpointNotFound
from ckptlib.format import keys
from ckptlib.format.manifest import TrashRecord
from ckptlib.stores import open_store
from ckptlib.stores.local import LocalStore
from ckptlib.stores.testing import flip_bit, truncate, write_plan
from ckptlib.verify.root import verify_root, verify_save


def run(*arguments: object) -> tuple[int, str]:
    """The command: its status, and what it said."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said), pytest.raises(SystemExit) as ended:
        cli.run([*map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code, said.getvalue()


def run_apart(*arguments: object) -> tuple[int, str]:
    """The same, in a process of its own, which may be killed."""
    command = [sys.executable, "-m", "ckptlib.cli", *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, timeout=120, text=True)
    return ran.returncode, ran.stdout + ran.stderr


def copy(*arguments: object) -> None:
    code, said = run("copy", *arguments)
    assert code == 0, said


def listed(url: Path | str) -> list[int]:
    try:
        return [info.step for info in ckptlib.checkpoints(url)]
    except CheckpointNotFound:
        return []


def is_good(root: Path) -> bool:
    catalog = Catalog(LocalStore(str(root)))
    return not [*verify_root(catalog), *(found for save in catalog.saves() for found in verify_save(catalog, save))]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 to 5, each of which shares most with the first. Not to be changed."""
    root = tmp_path_factory.mktemp("source") / "root"
    save_steps(root)
    return root


def loaded(root: Path) -> torch.Tensor:
    state = {"model": {"w0": torch.zeros(300, 300), "w1": torch.zeros(300, 300)}}
    ckptlib.load(root, state, only=["model/w*"], strict=False)
    return torch.cat([state["model"]["w0"], state["model"]["w1"]])


def test_a_copy_outlives_the_root_it_was_made_of(tmp_path: Path) -> None:
    """Frames, patches of earlier frames, and chunks in packs of several steps; then a job goes on from it."""
    root, new = tmp_path / "root", tmp_path / "new"
    state, wanted = train(root, "planes")
    uses = body_of(next((root / "steps").glob("000000000004-*.json")))["uses"]
    assert uses, "it needs packs of others"
    copy(root, 4, new)
    shutil.rmtree(root)
    assert listed(new) == [4]
    assert is_good(new)
    for value in tensors(state):
        value.data.zero_()
    ckptlib.load(new, state)
    assert all(map(torch.equal, tensors(state), wanted[4]))

    with ckptlib.Checkpointer(new, state, every=1, codec="planes", keep=ckptlib.Keep(last=1)) as ckpt:
        assert ckpt.restore().step == 4
        ckpt.save(5).wait_committed()
    for _ in range(2):
        age(LocalStore(str(new)), 2 * DAY_S)
        assert run("gc", new, "--keep-last", 1)[0] == 0
    assert listed(new) == [5]
    assert is_good(new)
    ckptlib.load(new, state)
    assert all(map(torch.equal, tensors(state), wanted[4])), "nothing was trained since"


def test_a_pin_stays_where_it_was_put(source: Path, tmp_path: Path) -> None:
    """The new run decides itself what it keeps; a copy of a pinned step keeps no other one, and takes no pin away."""
    root, new = tmp_path / "root", tmp_path / "new"
    shutil.copytree(source, root)
    assert run("pin", root, 3)[0] == 0
    copy(root, 3, new)
    assert not (new / "pins").exists()
    assert "pinned" not in run("ls", new)[1]
    assert run("pin", new, 3)[0] == 0
    assert run("unpin", root, 3)[0] == 0
    for url, left in ((root, [5]), (new, [3])):
        age(LocalStore(str(url)), 2 * DAY_S)
        assert run("gc", url, "--keep-last", 1)[0] == 0
        assert listed(url) == left
        assert is_good(url)
    state = {"model": {"w0": torch.zeros(300, 300)}}
    with ckptlib.Checkpointer(new, state, every=1, keep=ckptlib.Keep(last=1)) as ckpt:
        ckpt.restore(only=["model/w0"])
        for step in range(4, 7):
            ckpt.save(step).wait_committed()
    age(LocalStore(str(new)), 2 * DAY_S)
    assert run("gc", new, "--keep-last", 1)[0] == 0
    assert listed(new) == [3, 6], "the pin of the copy holds"
    assert is_good(new)


@pytest.mark.parametrize("written_by", ["0.1", "0.2"])
def test_what_earlier_versions_wrote_is_copied(tmp_path: Path, written_by: str) -> None:
    root, new = ROOT / "tests" / "data" / f"written-by-{written_by}" / "root", tmp_path / "new"
    copy(root, "latest", new)
    assert listed(new) == listed(root)[-1:]
    assert is_good(new)


def test_nothing_binds_the_copy_to_its_source(source: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    copy(source, 3, new)
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before
    assert body_of(new / "ckptlib.json")["id"] != body_of(source / "ckptlib.json")["id"]
    names = [path.relative_to(new) for path in new.rglob("*.*") if path.is_file() and path.name != "ckptlib.json"]
    assert all((new / name).read_bytes() == (source / name).read_bytes() for name in names)
    assert [name.parts[0] for name in sorted(names)] == [
        "copies",
        "copies",
        "generations",
        "layouts",
        "packs",
        "packs",
        "parts",
        "steps",
    ]


OPERATIONS = [*(("put", n) for n in range(8)), *(("commit", n) for n in range(2)), ("write", 1)]
"""Of the copy of a step with two packs: root, the packs and within, layout, copies of both, record, its copy, part,
manifest."""


# Killed before the next put, it has left what it leaves when it is killed after the one before.
@pytest.mark.parametrize("action", [pytest.param("kill-before", marks=pytest.mark.slow), "kill-after"])
def test_killed_at_each_put_it_lists_nothing_and_goes_on(source: Path, tmp_path: Path, action: str) -> None:
    wanted = loaded_of(source, tmp_path)
    killed = 0
    for op, nth in OPERATIONS:
        new, plan = tmp_path / f"{op}{nth}", tmp_path / f"{op}{nth}.json"
        write_plan(plan, [{"op": op, "nth": nth, "action": action}])
        code, said = run_apart("copy", source, 4, f"fault+file://{new}?plan={quote(str(plan))}")
        assert code == -signal.SIGKILL, said
        last = (op, nth, action) == ("put", 7, "kill-after")
        assert listed(new) == ([4] if last else []), (op, nth)
        killed += 1
        copy(source, 4, new)
        assert listed(new) == [4]
        assert is_good(new)
        assert torch.equal(loaded(new), wanted)
    assert killed == len(OPERATIONS)


def loaded_of(source: Path, tmp_path: Path) -> torch.Tensor:
    """Step 4, from a root that has no other."""
    root = tmp_path / "only"
    shutil.copytree(source, root)
    next((root / "steps").glob("000000000005-*.json")).unlink()
    return loaded(root)


def test_there_and_back_by_way_of_a_bucket(source: Path, tmp_path: Path, s3: ObjectStorage) -> None:
    url, new = s3.url(), tmp_path / "new"
    given = {name: value if isinstance(value, str) else json.dumps(value) for name, value in s3.options().items()}
    options = [f"{name}={value}" for name, value in given.items()]
    copy(source, 4, url, *(text for option in options for text in ("--new-option", option)))
    with open_store(url, s3.options()) as store:
        (save,) = Catalog(store).saves()
        assert not [*verify_save(Catalog(store), save)]
    copy(url, 4, new, *(text for option in options for text in ("--option", option)))
    assert torch.equal(loaded(new), loaded_of(source, tmp_path))
    assert is_good(new)


def corrupt_pack(root: Path) -> None:
    path = next((root / "packs").glob("000000000004-*/*"))
    flip_bit(path, path.stat().st_size // 2)


def cut_pack(root: Path) -> None:
    path = next((root / "packs").glob("000000000001-*/*"))
    truncate(path, path.stat().st_size - 1)


def lose_pack(root: Path) -> None:
    next((root / "packs").glob("000000000001-*/*")).unlink()


def lose_part(root: Path) -> None:
    next((root / "parts").glob("000000000004-*/*")).unlink()


def alter_manifest(root: Path) -> None:
    flip_bit(next((root / "steps").glob("000000000004-*")), 200)


def forge(**fields: object) -> Callable[[Path], None]:
    def forged(root: Path) -> None:
        store = LocalStore(str(root))
        key = f"steps/{next((root / 'steps').glob('000000000004-*')).name}"
        replace_object(store, key, resealed(store.get(key), **fields))

    return forged


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (corrupt_pack, "does not match its digest"),
        (cut_pack, "bytes, expected"),
        (lose_pack, "no such object; the step needs it"),
        (lose_part, "parts/000000000004-"),
        (alter_manifest, "does not match its digest"),
        (forge(uses={}), "its use of other steps is not that of its parts"),
        (forge(nbytes=1), "its size is not that of its parts"),
        (forge(metrics={"loss": 0.0}), "its set of metrics is not that of its parts"),
        (forge(parts=["../../../etc/passwd"]), "not a part of this save"),
        (forge(parts=[]), "does not name one part for each of 1 ranks"),
        (forge(layouts={"f" * 32: [[0, 0]]}), "layout"),
        (forge(world_size=10**6), "does not name one part"),
    ],
)
def test_what_is_not_whole_is_not_copied(
    source: Path, tmp_path: Path, damage: Callable[[Path], None], told: str
) -> None:
    root, new = tmp_path / "root", tmp_path / "new"
    shutil.copytree(source, root)
    damage(root)
    code, said = run("copy", root, 4, new)
    assert (code, listed(new)) == (1, []), said
    assert told in said
    assert not [*new.glob("steps/*"), *new.glob("parts/*/*")]


@pytest.mark.parametrize("damaged", ["layouts", "copies/layouts"])
def test_of_a_layout_that_is_there_twice_one_is_enough(source: Path, tmp_path: Path, damaged: str) -> None:
    """Loads take the other: so a step can be brought away from a disk that begins to fail."""
    root, new = tmp_path / "root", tmp_path / "new"
    shutil.copytree(source, root)
    for path in (root / damaged).iterdir():
        flip_bit(path, 200)
    copy(root, 4, new)
    assert listed(new) == [4]
    assert is_good(new)
    assert torch.equal(loaded(new), loaded_of(source, tmp_path))


def test_what_the_way_alters_is_found(source: Path, tmp_path: Path) -> None:
    new, plan = tmp_path / "new", tmp_path / "plan.json"
    write_plan(plan, [{"op": "write", "nth": 0, "action": "flip"}])
    code, said = run("copy", source, 4, f"fault+file://{new}?plan={quote(str(plan))}")
    assert (code, listed(new)) == (1, []), said
    assert "is not whole, so it has no step" in said
    shutil.rmtree(new)
    copy(source, 4, new)
    assert is_good(new)


def test_a_root_in_use_and_other_directories_are_refused(source: Path, tmp_path: Path) -> None:
    used, other, new = tmp_path / "used", tmp_path / "other", tmp_path / "new"
    save_steps(used, 1, 1)
    (other / "notes").mkdir(parents=True)
    (other / "notes" / "mine.txt").write_text("mine")
    for target, told in ((used, "in use: it has steps"), (other, "is not empty, and is no root"), (source, "in use")):
        before = sorted(target.rglob("*"))
        code, said = run("copy", source, 4, target)
        assert code == 1
        assert told in said
        assert sorted(target.rglob("*")) == before
    code, said = run("copy", source, 9, new)
    assert (code, new.exists()) == (1, False)
    assert "holds no step 9; the last ones are: 1, 2, 3, 4, 5" in said
    assert "holds no checkpoints" in run("copy", tmp_path / "nothing", 1, new)[1]
    code, said = run("copy", source, 4, "memory://new")
    assert code == 2
    assert "gone when it ends" in said


def test_a_person_sees_a_bar_and_a_program_one_document(source: Path, tmp_path: Path) -> None:
    status, said = on_terminal(["copy", str(source), "4", str(tmp_path / "new")], b"")
    assert status == 0
    assert "copying step 4" in said
    assert "verifying step 4" in said
    code, text = run("copy", source, 4, tmp_path / "other", "--json")
    told = json.loads(text)
    assert (code, told["step"], told["packs"], told["nbytes"]) == (0, 4, 2, told["nbytes_copied"])


# -- sweeps of the new root


def interrupted(source: Path, tmp_path: Path) -> Path:
    """A copy of step 4 that was killed before its part, days ago."""
    new = tmp_path / "new"
    copy(source, 4, new)
    shutil.rmtree(new / "steps")
    shutil.rmtree(new / "parts")
    age(LocalStore(str(new)), 2 * DAY_S)
    return new


def run_overtaken(
    monkeypatch: pytest.MonkeyPatch, source: Path, new: Path, happens: Callable[[], object]
) -> tuple[int, str]:
    """Copies step 4; something happens right before its manifest is put."""
    put = LocalStore.put

    def overtaken(self: LocalStore, key: str, *data: Any, **more: Any) -> None:
        if key.startswith(keys.STEPS):
            happens()
        put(self, key, *data, **more)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "put", overtaken)
        return run("copy", source, 4, new)


def sweep_and_age(new: Path, times: int) -> None:
    for _ in range(times):
        assert run("gc", new, "--keep-last", 1)[0] == 0
        age(LocalStore(str(new)), 2 * DAY_S)


@pytest.mark.parametrize("sweeps", [1, 2, 3])
def test_a_sweep_that_overtakes_a_copy_leaves_no_step(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sweeps: int
) -> None:
    """One has found the packs of step 1, two have deleted these and found those of step 4, three have deleted all and
    their records."""
    new = interrupted(source, tmp_path)
    code, said = run_overtaken(monkeypatch, source, new, lambda: sweep_and_age(new, sweeps))
    assert (code, listed(new)) == (1, []), said
    assert "took what an earlier copy had left for the remains of a crash. The step is taken back: delete" in said

    before = sorted(new.rglob("*"))
    code, said = run("copy", source, 4, new)
    assert (code, sorted(new.rglob("*"))) == (1, before), said
    assert "has a trash record, trash/000000000004-" in said
    age(LocalStore(str(new)), 2 * DAY_S)
    sweep_and_age(new, 3)
    copy(source, 4, new)
    assert listed(new) == [4]
    assert is_good(new)


@pytest.mark.parametrize("lost", ["packs", "parts"])
def test_what_has_lost_something_without_a_trace_is_no_step(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """As on a machine that was suspended for days, of which sweeps have spared the one and not the other."""
    new = tmp_path / "new"
    code, said = run_overtaken(monkeypatch, source, new, lambda: shutil.rmtree(next((new / lost).iterdir())))
    assert (code, listed(new)) == (1, []), said
    assert "The step is taken back" in said


def test_a_layout_that_a_sweep_deletes_meanwhile_is_put_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = tmp_path / "new"

    def happens() -> None:
        shutil.rmtree(new / "layouts")
        shutil.rmtree(new / "copies" / "layouts")

    code, said = run_overtaken(monkeypatch, source, new, happens)
    assert (code, listed(new)) == (0, [4]), said
    assert is_good(new)
    assert [path.name for path in new.glob("layouts/*")] == [path.name for path in new.glob("copies/layouts/*")] != []


def test_what_another_copy_has_put_is_not_taken_back(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one has looked before there was a trash record, and has said that the step is there."""
    new = tmp_path / "new"

    def happens() -> None:
        (new / "steps").mkdir()
        shutil.copy(next((source / "steps").glob("000000000004-*.json")), new / "steps")
        (save,) = Catalog(LocalStore(str(new))).saves()
        LocalStore(str(new)).put(save.trash_key, TrashRecord(save, "never committed").encode())

    code, said = run_overtaken(monkeypatch, source, new, happens)
    assert (code, listed(new)) == (1, [4]), said
    assert "The step is what another copy put" in said
