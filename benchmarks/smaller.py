"""How small is the next checkpoint? Bytes of the second save, of increments, and of trained state, for every library.

Four cases, one process each: a model of which nine tenths are frozen; a LoRA fine-tune; an embedding table of which few
rows are touched at each step (SparseAdam, ids by Zipf's law); and a GPT that was really trained. Each state is saved by
ckptlib as it is used (`codec` named where it is not the default), by DCP, and by DCP with its own zstd extension. Bytes
are those of all files of a step; what changed is counted from the tensors, by an oracle of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint._extension import ZStandard

import ckptlib
from benchmarks import trained
from benchmarks.common import tell, told
from benchmarks.figures import Figures, Options, run

State = dict[str, Tensor]
Saver = Callable[[Mapping[str, State], Path, int], None]

CASES = ("nine tenths frozen", "LoRA", "touched rows", "trained GPT")
SAVES = 21
"""Of the table of touched rows: a keyframe and the increments up to about the next one."""


def main(arguments: list[str]) -> None:
    run(arguments, "smaller", measure, gb=0.5, rounds=1)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    for case in CASES:
        given = {"case": case, "nbytes": int(options.gb * 1e9), "toy": options.toy, "directory": str(directory)}
        for line in figures.attempt(case, "all", __name__, 1, given, options.timeout_s):
            figures.add(case, line["subject"], line["what"], line["unit"], [line["value"]])


def work() -> None:
    """One case."""
    given = told()
    directory, nbytes = Path(given["directory"]) / given["case"].replace(" ", "-"), int(given["nbytes"])
    if given["toy"]:
        nbytes = 4_000_000
    if given["case"] == CASES[3]:
        _trained(directory, trained.TOY if given["toy"] else trained.REAL)
    elif given["case"] == CASES[2]:
        _touched(directory, nbytes, 4 if given["toy"] else SAVES)
    else:
        _part_trained(directory, given["case"] == CASES[1], nbytes)


def _part_trained(directory: Path, lora: bool, nbytes: int) -> None:
    """Two saves, one step of AdamW between them."""
    width = int((nbytes / 4 / 10 / (1.0 if lora else 1.2)) ** 0.5) // 64 * 64
    model = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(10))
    if lora:
        model.requires_grad_(False)
        model.append(nn.ModuleList(nn.Linear(width, 8, bias=False) for _ in range(10)))
    else:
        model[:9].requires_grad_(False)
    owned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(owned)
    for subject, save in _savers({"ckptlib": None}):
        _step(owned, optimizer)
        state = _state(model, optimizer)
        save(state, directory / subject, 1)
        before = {name: value.clone() for name, value in _flat(state).items()}
        _step(owned, optimizer)
        state = _state(model, optimizer)
        save(state, directory / subject, 2)
        changed = sum(v.nbytes for name, v in _flat(state).items() if not torch.equal(v, before[name]))
        first, second = (_nbytes(directory / subject, step) for step in (1, 2))
        whole = sum(value.nbytes for value in before.values())
        _tell(subject, "second save over what changed", "ratio", second / changed)
        _tell(subject, "second save over first", "ratio", second / first)
        _tell(subject, "second save over the trained share of the first", "ratio", second / (first * changed / whole))
        _tell(subject, "beside what changed, of the state", "ratio", (second - changed) / whole)


def _step(owned: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
    for parameter in owned:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, State]:
    held = [(f"{i}/{key}", v) for i, of in enumerate(optimizer.state.values()) for key, v in of.items()]
    moments = {name: value for name, value in held if isinstance(value, Tensor)}
    return {"model": {name: value.detach() for name, value in model.named_parameters()}, "optim": moments}


def _touched(directory: Path, nbytes: int, num_saves: int) -> None:
    """A table and its two moments; at each step one row of a hundred is touched, by hashed ids."""
    width = 64
    rows = nbytes // 3 // (4 * width)
    table = nn.Embedding(rows, width, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    weights = 1.0 / torch.arange(1, rows + 1, dtype=torch.float64) ** 1.05
    hashed = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    for subject, save in _savers({"ckptlib, planes": "planes", "ckptlib": None}):
        generator = torch.Generator().manual_seed(2)
        sizes, touched = [], []
        for step in range(1, num_saves + 1):
            ids = torch.multinomial(weights, rows // 55, replacement=True, generator=generator).unique()
            table(hashed[ids]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            state = _state(table, optimizer)
            save(state, directory / subject, step)
            sizes.append(_nbytes(directory / subject, step))
            touched.append(3 * len(ids) * 4 * width)
        whole = sum(value.nbytes for value in _flat(state).values())
        _tell(subject, "rows touched per step", "ratio", touched[-1] / whole)
        _tell(subject, "state over a save, mean of all saves but the first", "times", whole / _mean(sizes[1:]))
        _tell(subject, "state over a save, mean of all saves", "times", whole / _mean(sizes))


def _trained(directory: Path, size: trained.Size) -> None:
    """One save of each kind of state."""
    for kind, values in trained.states(size, [trained.STEPS[0]])[trained.STEPS[0]].items():
        whole = sum(value.nbytes for value in values.values())
        for subject, save in _savers({"ckptlib, planes": "planes", "ckptlib": None}):
            path = directory / subject / kind
            save({"optim" if kind.startswith("exp") else "model": values}, path, 1)
            _tell(subject, f"save over state, {kind}", "ratio", _nbytes(path, 1) / whole)


def _savers(codecs: Mapping[str, str | None]) -> Iterator[tuple[str, Saver]]:
    """ckptlib with each of these codecs (None: the default), and its peers."""
    for name, codec in codecs.items():
        yield name, _Ckptlib({} if codec is None else {"codec": codec})
    yield "DCP", lambda state, path, step: _dcp(state, path, step, None)
    yield "DCP + its zstd", lambda state, path, step: _dcp(state, path, step, ZStandard())


class _Ckptlib:
    """Saves as a training script does; one Checkpointer for all steps of a path."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = options
        self._open: dict[Path, tuple[dict[str, State], ckptlib.Checkpointer]] = {}

    def __call__(self, state: Mapping[str, State], path: Path, step: int) -> None:
        if path not in self._open:
            path.mkdir(parents=True)
            held = {group: dict(values) for group, values in state.items()}
            codec = self._options.get("codec", "auto")
            self._open[path] = held, ckptlib.Checkpointer(path, held, every=10**9, codec=codec)
        held, checkpointer = self._open[path]
        for group, values in state.items():
            held[group].update(values)
        checkpointer.save(step).wait_committed()


def _dcp(state: Mapping[str, State], path: Path, step: int, extension: ZStandard | None) -> None:
    extensions = None if extension is None else [extension]
    writer = dcp.FileSystemWriter(path / f"{step:012d}", _extensions=extensions)
    dcp.save(dict(state), storage_writer=writer, no_dist=True)


def _flat(state: Mapping[str, State]) -> State:
    return {f"{group}/{name}": value for group, values in state.items() for name, value in values.items()}


def _nbytes(root: Path, step: int) -> int:
    """Of all files that a save of this step put."""
    paths = [path for path in root.rglob("*") if path.is_file() and f"{step:012d}" in str(path.relative_to(root))]
    return sum(path.stat().st_size for path in paths)


def _mean(values: list[int]) -> float:
    return sum(values) / len(values)


def _tell(subject: str, what: str, unit: str, value: float) -> None:
    tell(subject=subject, what=what, unit=unit, value=value)


if __name__ == "__main__":
    work()
