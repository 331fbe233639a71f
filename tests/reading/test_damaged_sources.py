"""Damaged and hostile roots: every flipped bit is found, and no memory is taken for what is not there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from places import ROOT
from support import commit_unproved, make_generation, make_root, make_save, put_parts, state

import ckptlib
from ckptlib.format.box import Box
from ckptlib.format.layout import ByHand, Layout, TensorEntry
from ckptlib.stores.local import LocalStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    catalog = make_root(LocalStore(str(tmp_path)))
    make_save(catalog, make_generation(catalog, world_size=2), 1, state(1), 2)
    return tmp_path


def objects(path: Path) -> Iterator[Path]:
    return (found for found in sorted(path.rglob("*")) if found.is_file())


def test_a_flipped_bit_in_any_object(path: Path) -> None:
    whole = {name: array.tobytes() for name, array in ckptlib.read(path, framework="numpy").items()}
    for found in objects(path):
        data = found.read_bytes()
        for at in range(0, len(data), max(1, len(data) // 40)):
            flipped = bytearray(data)
            flipped[at] ^= 1 << at % 8
            found.write_bytes(flipped)
            try:
                read = ckptlib.read(path, framework="numpy")
            except ckptlib.CkptError:
                continue
            assert {name: array.tobytes() for name, array in read.items()} == whole, (found, at)
        found.write_bytes(data)


def test_damaged_data_is_named(path: Path) -> None:
    [pack, _] = sorted((path / "packs").rglob("*.safetensors"))
    data = bytearray(pack.read_bytes())
    data[-4:] = bytes(reversed(data[-4:]))
    with ckptlib.open(path, framework="numpy") as step:
        names = step.keys()
        pack.write_bytes(bytes(byte ^ 1 for byte in data))
        for name in ("w", "b"):
            with pytest.raises(ckptlib.CorruptData, match=f"{name}.*does not match"):
                step.get_tensor(name)
        pack.unlink()
        with pytest.raises(ckptlib.ObjectNotFound, match=r"safetensors: no such object; step 1 needs it\. Try"):
            step.get_tensor("w")
        assert names == step.keys()


def test_a_lost_part_or_layout(path: Path) -> None:
    for folder in ("parts", "layouts"):
        for found in objects(path / folder):
            data, copy = found.read_bytes(), path / "copies" / folder / found.name
            found.unlink()
            copy.unlink(missing_ok=True)
            with pytest.raises(ckptlib.ObjectNotFound, match=f"{folder}/.*step 1 needs it.*ckptlib verify URL 1"):
                ckptlib.read(path, framework="numpy")
            found.write_bytes(data)
            assert ckptlib.read(path, framework="numpy")


HUGE = 1 << 60

LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32))
import ckptlib
for read in (lambda s: s.get_tensor("w"), lambda s: s.get_slice("w")[...], lambda s: s.get_slice("w")[: 1 << 40]):
    with ckptlib.open(sys.argv[1], framework="numpy") as step:
        try:
            read(step)
        except ckptlib.CkptError as error:
            print(type(error).__name__, error)
        else:
            raise AssertionError
try:
    ckptlib.export(sys.argv[1], sys.argv[1] + "/x.safetensors")
except ckptlib.NoRoom as error:
    print(error)
status = open("/proc/self/status").read()
peak_kb = int(status.split("VmHWM:")[1].split()[0])
assert peak_kb < 200_000, peak_kb
"""


def test_a_claim_of_absurd_size_takes_no_memory(tmp_path: Path) -> None:
    """The manifest, the layout and the part agree on 2**60 bytes, and no pack has them."""
    store = LocalStore(str(tmp_path))
    catalog = make_root(store)
    generation = make_generation(catalog)
    save, [small] = put_parts(catalog, generation, 1, {"w": np.zeros(8, np.uint8)})
    part = catalog.part(small)
    layout = Layout(1, (TensorEntry("w", "uint8", (HUGE,), ByHand()),))
    catalog.shared.put_layout(layout.digest, layout.encoded)
    table = replace(part.table, layout=layout.digest, boxes=(Box((0,), (HUGE,)),), nbytes=(HUGE,))
    packs = (replace(part.packs[0], nbytes=2 * HUGE),)
    name, document = replace(part, attempt="0" * 8, table=table, packs=packs).encode()
    store.put(name.key, document)
    commit_unproved(store, save, [name])
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall("FormatError .*truncated", done.stdout)) == 3, done.stdout
    assert "1,152,921,504,606,8" in done.stdout
    assert not (tmp_path / "x.safetensors").exists()
