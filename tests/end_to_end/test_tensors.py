"""Tensors of every dtype, shape and view come back bit for bit, into targets of every kind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.random_tensors import any_bits
from onerank import Root, bits, same
from safetensors import safe_open

from ckptlib.format import dtypes

DTYPES = [
    dtype
    for name in dir(torch)
    if isinstance(dtype := getattr(torch, name), torch.dtype) and dtypes.known(str(dtype)[6:])
]
DTYPES = sorted(set(DTYPES), key=str)


def test_no_dtype_of_torch_is_forgotten() -> None:
    """A new one is either known, or is one that has no elements of whole bytes."""
    names = {str(d)[6:] for n in dir(torch) if isinstance(d := getattr(torch, n), torch.dtype)}
    unknown = {name for name in names if not dtypes.known(name)}
    assert {name for name in unknown if not name.startswith(("bits", "qint", "quint"))} == {
        *(f"int{n}" for n in range(1, 8)),
        *(f"uint{n}" for n in range(1, 8)),
    }
    assert {dtypes.itemsize(str(d)[6:]) == d.itemsize for d in DTYPES} == {True}


VIEWS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "0-d": lambda dtype: any_bits(dtype),
    "empty": lambda dtype: any_bits(dtype, 3, 0, 2),
    "plain": lambda dtype: any_bits(dtype, 5, 7),
    "transposed": lambda dtype: any_bits(dtype, 5, 7).t(),
    "strided": lambda dtype: any_bits(dtype, 9, 6)[1::3, ::2],
    "one row of many": lambda dtype: any_bits(dtype, 4, 6)[2],
    "expanded": lambda dtype: any_bits(dtype, 1, 5).expand(4, 5),
    "large": lambda dtype: any_bits(dtype, 300, 1031),
    "large and transposed": lambda dtype: any_bits(dtype, 80, 90).t(),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit_in_every_shape(root: Root, dtype: torch.dtype) -> None:
    source = {name: make(dtype) for name, make in VIEWS.items()}
    expected = {name: bits(tensor) for name, tensor in source.items()}
    target = {name: torch.zeros(t.shape, dtype=torch.uint8).to(torch.bool) if dtype is torch.bool else
              torch.zeros(t.numel() * dtype.itemsize, dtype=torch.uint8).view(dtype).view(t.shape)
              for name, t in source.items()}  # fmt: skip
    root.move(source, target)
    assert {name: bits(tensor) for name, tensor in target.items()} == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_targets_may_be_views_and_their_surroundings_stay(root: Root, dtype: torch.dtype) -> None:
    source = any_bits(dtype, 90, 80)  # torch copies transposed matrices from some size on in a way of its own
    wide, high = any_bits(dtype, 90, 85), any_bits(dtype, 80, 90)
    around = bits(wide[:, 81:])
    root.save({"a": source})
    root.load({"a": wide[:, 1:81]})
    root.load({"a": high.t()})
    assert bits(wide[:, 1:81]) == bits(high.t()) == bits(source)
    assert bits(wide[:, 81:]) == around


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_conjugates_and_negatives_are_values_and_no_ties(root: Root, dtype: torch.dtype) -> None:
    base = torch.complex(torch.arange(6.0), torch.arange(6.0) + 1).to(dtype)
    views = {"base": base, "conj": base.conj(), "imag of conj": base.conj().imag, "imag": base.imag}
    assert views["imag of conj"].is_neg()
    assert views["conj"].is_conj()
    target = {name: torch.zeros_like(view).resolve_conj().resolve_neg() for name, view in views.items()}
    root.move(views, target)
    assert all(same(target[name], view) for name, view in views.items())


@pytest.mark.parametrize("numel", [6, 600_000])
def test_targets_may_have_a_conjugation_or_negation_pending(root: Root, numel: int) -> None:
    source = {"c": any_bits(torch.complex64, numel), "n": torch.randn(numel)}
    target = {"c": torch.zeros(numel, dtype=torch.complex64).conj(), "n": torch._neg_view(torch.zeros(numel))}
    root.move({"c": source["c"].nan_to_num(), "n": source["n"]}, target)
    assert torch.equal(target["c"], source["c"].nan_to_num())
    assert torch.equal(target["n"], source["n"])


def test_packs_are_safetensors_files_with_the_same_bytes(root: Root) -> None:
    """The oracle is safetensors' own reader."""
    source = {f"{dtype}/{name}": make(dtype) for dtype in DTYPES for name, make in VIEWS.items() if name != "large"}
    source["large"] = any_bits(torch.float32, 1200, 1031)
    root.save({"state": source})
    part, _ = root.saved()
    found: dict[str, list[tuple[int, bytes]]] = {}
    foreign = {}
    for pack in part.packs:
        with safe_open(root.path / pack.key, "pt") as file:
            for entry in file.keys():  # noqa: SIM118 (it is no dict)
                name, _, first = entry.rpartition("@")
                tensor = file.get_tensor(entry)
                found.setdefault(name, []).append((int(first or 0) if first.isdigit() else 0, bits(tensor)))
                if name.startswith("state/") and "%2F" in name:
                    dtype = source[name.removeprefix("state/").replace("%2F", "/")].dtype
                    foreign[entry] = tensor.dtype != dtype
    for name, tensor in source.items():
        key = "state/" + name.replace("/", "%2F")
        assert b"".join(data for _, data in sorted(found.get(key, []))) == bits(tensor), name
    assert {entry for entry, is_foreign in foreign.items() if is_foreign} == {
        entry for entry in foreign if not dtypes.has_own_word(entry.split("/")[1].split("%2F")[0][6:])
    }
