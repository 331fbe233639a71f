"""What DeepSpeed 0.19.8 wrote (write_deepspeed.py): ZeRO 0 to 3, universal checkpoints, and damaged ones."""

from __future__ import annotations

import random
import shutil
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sources import WRITTEN, read, refuses, same, whole
from torch import nn

import ckptlib

HOME = WRITTEN / "deepspeed-0.19.8"
TAG = "global_step3"
ZERO = ["zero1", "zero2", "zero3", "zero1-universal", "zero3-universal"]


class Net(nn.Module):
    """As write_deepspeed.py trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 5)
        self.down = nn.Linear(5, 8, bias=False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        self.conv = nn.Conv1d(4, 3, 2)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)


def trained(net: Net) -> list[tuple[str, nn.Parameter]]:
    """In the order in which the job gave them to its optimizer."""
    named = [(name, param) for name, param in net.named_parameters() if param.requires_grad]
    return [item for item in named if item[1].ndim > 1] + [item for item in named if item[1].ndim <= 1]


def optimizer_of(net: Net) -> torch.optim.Optimizer:
    params = [param for _, param in trained(net)]
    return torch.optim.AdamW([{"params": params[:4]}, {"params": params[4:]}], lr=1.0)


def truth(name: str) -> dict[str, torch.Tensor]:
    return torch.load(HOME / f"{name.partition('-')[0]}.truth.pt", weights_only=True)


@pytest.mark.parametrize("name", ["zero0", *ZERO])
def test_weights_are_those_of_the_engine(tmp_path: Path, name: str) -> None:
    """As DeepSpeed's own functions gave them at the end of the training: fp32 of what it trained."""
    report = ckptlib.convert(HOME / name, tmp_path / "root")
    assert (report.kind, report.step) == ("DeepSpeed", 3)
    assert report.aliases == {"model/head.weight": "model/emb.weight"} or name == "zero0"
    net = Net()
    ckptlib.load(tmp_path / "root", {"model": net}, only="model", cast=True)
    assert torch.equal(net.get_buffer("count"), torch.arange(3))
    found = whole(read(HOME / name))
    for key, tensor in truth(name).items():
        assert same(found[f"model/{key}"], tensor), key
        assert torch.equal(net.get_parameter(key), tensor.float()), key


@pytest.mark.parametrize("name", ZERO)
def test_optimizers_go_on_by_name(tmp_path: Path, name: str) -> None:
    """Moments as DeepSpeed's converter to universal checkpoints puts them together; those of ZeRO 2 as without ZeRO."""
    ckptlib.convert(HOME / name, tmp_path / "root")
    net = Net()
    optimizer = optimizer_of(net)
    ckptlib.load(tmp_path / "root", {"model": net, "optimizer": optimizer}, strict=False, cast=True)
    numbered = torch.load(HOME / "zero0" / TAG / "mp_rank_00_model_states.pt", weights_only=True)["optimizer"]["state"]
    for number, (key, param) in enumerate(trained(net)):
        state = optimizer.state[param]
        assert same(state["step"], torch.tensor(3.0))
        for kind in ("exp_avg", "exp_avg_sq"):
            if name == "zero2":
                assert torch.allclose(state[kind], numbered[number][kind], rtol=1e-5, atol=1e-12), (key, kind)
                continue
            file = HOME / f"{name.partition('-')[0]}-universal" / TAG / "zero" / key / f"{kind}.pt"
            saved = torch.load(file, weights_only=True)
            saved = saved["param"] if isinstance(saved, dict) else saved  # flat, where ZeRO 3 was converted
            assert same(state[kind].flatten(), saved.flatten()), (key, kind)
    if name != "zero2":  # it is elastic, which keeps no options
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        assert optimizer.param_groups[0]["lr"] == 0.0025


def test_without_zero_parameters_are_numbered(tmp_path: Path) -> None:
    names = [f"model/{name}" for name, _ in trained(Net())]
    ckptlib.convert(HOME / "zero0", tmp_path / "root", params={"optimizer": names})
    net = Net()
    optimizer = optimizer_of(net)
    ckptlib.load(tmp_path / "root", {"model": net, "optimizer": optimizer}, strict=False)
    numbered = torch.load(HOME / "zero0" / TAG / "mp_rank_00_model_states.pt", weights_only=True)["optimizer"]["state"]
    for number, (_, param) in enumerate(trained(net)):
        assert same(optimizer.state[param]["exp_avg"], numbered[number]["exp_avg"])


def test_what_the_engine_and_its_caller_kept(tmp_path: Path) -> None:
    foreign = read(HOME / "zero3" / TAG)  # the directory of a tag is a source as well
    assert (foreign.plain["seen"], foreign.plain["note"], foreign.plain["global_samples"]) == (12, "x", 18)
    ckptlib.convert(HOME / "zero3", tmp_path / "root")
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    ckptlib.load(tmp_path / "root", {"scheduler": scheduler}, strict=False)
    assert scheduler.last_epoch == 3


def test_a_run_begins_from_it(tmp_path: Path) -> None:
    net = Net()
    with ckptlib.Checkpointer(
        tmp_path / "root",
        {"model": net},
        every=1,
        init_from=ckptlib.Init(HOME / "zero3", cast=True),
        init_only="model",
    ) as ckpt:
        assert ckpt.restore().step == 0
    assert all(torch.equal(net.get_parameter(key), tensor.float()) for key, tensor in truth("zero3").items())


# What is damaged


class _Plain:
    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments


@pytest.fixture
def edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, Callable[[Any], None]], Path]:
    """Changes what one file of a copied checkpoint says; classes of DeepSpeed's are stood in for."""
    for module, names in {
        "deepspeed": [],
        "deepspeed.utils.tensor_fragment": ["fragment_address"],
        "deepspeed.runtime.fp16.loss_scaler": ["LossScaler"],
        "deepspeed.runtime.zero.config": ["ZeroStageEnum"],
    }.items():
        made = types.ModuleType(module)
        for name in names:
            setattr(made, name, type(name, (_Plain,), {"__module__": module}))
        monkeypatch.setitem(sys.modules, module, made)

    def change(name: str, file: str, by: Callable[[Any], None]) -> Path:
        source = tmp_path / "source"
        shutil.copytree(HOME / name / TAG, source)
        (path,) = source.glob(file)
        state = torch.load(path, weights_only=False)
        by(state)
        torch.save(state, path)
        return source

    return change


def _move_fragment(state: Any) -> None:
    state["optimizer_state_dict"]["param_slice_mappings"][0]["conv.weight"].start += 1


def _shorten_fragment(state: Any) -> None:
    state["optimizer_state_dict"]["param_slice_mappings"][0]["conv.weight"].numel -= 1


def _negative_fragment(state: Any) -> None:
    state["optimizer_state_dict"]["param_slice_mappings"][0]["conv.weight"].start = -4


def _rename(state: Any) -> None:
    mapping = state["optimizer_state_dict"]["param_slice_mappings"][0]
    mapping["other.weight"] = mapping.pop("conv.weight")


def _no_slices(state: Any) -> None:
    del state["optimizer_state_dict"]["param_slice_mappings"]


def _other_ranks(state: Any) -> None:
    state["optimizer_state_dict"]["partition_count"] = [3, 3]


def _factored(state: Any) -> None:
    state["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"] = torch.ones(2, 2)


def _short_group(state: Any) -> None:
    flats = state["optimizer_state_dict"]["fp32_flat_groups"]
    flats[-1] = flats[-1].detach()[:-1].clone()


def _huge(state: Any) -> None:
    state["param_shapes"][0]["emb.weight"] = torch.Size([2**40, 2**20])


def _no_module(state: Any) -> None:
    state["module"] = [1]


def _frozen_lost(state: Any) -> None:
    state["frozen_param_fragments"] = {}


@pytest.mark.parametrize(
    ("name", "file", "by", "match"),
    [
        ("zero1", "*rank_1_mp*", _move_fragment, "said to be at"),
        ("zero1", "*rank_1_mp*", _shorten_fragment, "ranks' files have 23 elements"),
        ("zero1", "*rank_1_mp*", _negative_fragment, "a fragment that is none"),
        ("zero1", "*rank_1_mp*", _rename, "has no such parameter"),
        ("zero1", "*rank_0_mp*", _no_slices, "ds_to_universal"),
        ("zero1", "*rank_0_mp*", _other_ranks, "has 2 files .* of 3 ranks"),
        ("zero1", "*rank_0_mp*", _factored, "is no flat tensor"),
        ("zero3", "*rank_2_mp*optim*", _short_group, "is not within flat tensors"),
        ("zero3", "*rank_0_mp*model*", _huge, "is not within flat tensors"),
        ("zero3", "*rank_1_mp*model*", _frozen_lost, "no flat part of it"),
        ("zero0", "mp_rank_00*", _no_module, "expected a dict"),
    ],
)
def test_files_that_do_not_fit(
    edit: Callable[[str, str, Callable[[Any], None]], Path],
    tmp_path: Path,
    name: str,
    file: str,
    by: Callable[[Any], None],
    match: str,
) -> None:
    refuses(edit(name, file, by), tmp_path / "root", match)


@pytest.mark.parametrize(
    ("name", "gone", "match"),
    [
        ("zero1", "*rank_1_mp*", "has 1 files .* of 2 ranks"),
        ("zero3", "*rank_1_mp*optim*", "has 2 files .* of 3 ranks"),
        ("zero3", "*rank_2_mp*model*", "frozen, with"),
        ("zero3-universal", "zero/conv.weight/fp32.pt", "has no fp32.pt"),
        ("zero1-universal", "zero/optimizer_state.pt", "cannot be read"),
    ],
)
def test_a_file_that_was_not_copied(tmp_path: Path, name: str, gone: str, match: str) -> None:
    source = tmp_path / "source"
    shutil.copytree(HOME / name / TAG, source)
    for path in source.glob(gone):
        path.unlink()
    refuses(source, tmp_path / "root", match)


@pytest.mark.parametrize("extra", ["mp_rank_01_model_states.pt", "layer_00-model_states.pt", "expert_0_mp_rank_00.pt"])
def test_models_in_parallel_parts_are_refused(tmp_path: Path, extra: str) -> None:
    source = tmp_path / "source"
    shutil.copytree(HOME / "zero1" / TAG, source)
    shutil.copy(source / "mp_rank_00_model_states.pt", source / extra)
    refuses(source, tmp_path / "root", "ds_to_universal")


@pytest.mark.parametrize("tag", ["../zero1/global_step3", "..", "", "gone", "x" * 10000])
def test_a_tag_that_leads_elsewhere(tmp_path: Path, tag: str) -> None:
    (tmp_path / "source").mkdir()
    shutil.copytree(HOME / "zero1", tmp_path / "zero1")
    (tmp_path / "source" / "latest").write_text(tag)
    refuses(tmp_path / "source", tmp_path / "root", "is of no format")


def test_tied_weights_that_no_file_tells_of(
    edit: Callable[[str, str, Callable[[Any], None]], Path],
) -> None:
    found = read(edit("zero3", "*rank_0_mp*model*", lambda state: state["shared_params"].clear()))
    assert any("head.weight" in note and "--tie" in note for note in found.notes)


@pytest.mark.parametrize("name", ["zero1", pytest.param("zero3", marks=pytest.mark.slow), "zero3-universal"])
def test_any_byte_of_the_pickles(tmp_path: Path, name: str) -> None:
    """Whatever changes, it is an error of ckptlib's, or tensors of the same shapes."""
    rng = random.Random(name)
    files = sorted(path for path in (HOME / name / TAG).rglob("*.pt"))
    shapes = {key: tensor.shape for key, tensor in whole(read(HOME / name)).items()}
    refused = 0
    for _ in range(150):
        path = rng.choice(files)
        with zipfile.ZipFile(path) as archive:
            (pickled,) = [info for info in archive.infolist() if info.filename.endswith("data.pkl")]
            data = bytearray(path.read_bytes())
            at = data.index(archive.read(pickled)) + rng.randrange(pickled.file_size)
        data[at] ^= 1 << rng.randrange(8)
        source = tmp_path / "source"
        shutil.copytree(HOME / name / TAG, source)
        (source / path.relative_to(HOME / name / TAG)).write_bytes(data)
        try:
            foreign = read(source)
            assert foreign.flat.leaves
            found = whole(foreign)
            assert all(found[key].shape == shape for key, shape in shapes.items() if key in found)
        except ckptlib.CkptError:
            refused += 1
        shutil.rmtree(source)
    assert refused > 30


def test_no_file_of_an_optimizer_was_copied(tmp_path: Path) -> None:
    """The weights that are trained are in them alone."""
    shutil.copytree(HOME / "zero1", tmp_path / "zero1")
    for path in (tmp_path / "zero1").rglob("*_optim_states.pt"):
        path.unlink()
    refuses(tmp_path / "zero1", tmp_path / "root", "has no file .*_optim_states.pt")
