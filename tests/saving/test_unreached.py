"""Patterns of codec= that decide for no tensor are warned about once, by name, whichever rank has what they mean."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from rankthreads import run_ranks

import ckptlib
from ckptlib.format.layout import Layout, OwnPerRank, TensorEntry
from ckptlib.policy.codec import CodecRules
from ckptlib.policy.lossy import Lossy
from ckptlib.ranks.group import Group
from ckptlib.saving.unreached import warn_of_unreached


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "codec={" in r.getMessage()]


def test_a_job_is_told_once_and_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(300, 300)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 300)).sum().backward()
    optim.step()
    codec: Mapping[str, str | Lossy] = {
        "optin/**": Lossy(bits=8),
        "optim/**": Lossy(bits=8),
        "modle": "planes",
        "model/bias": "raw",
        "model": "planes",
        "model/weight": "raw",
    }
    state = {"model": model, "optim": optim}
    with ckptlib.Checkpointer(tmp_path, state, every=10**9, codec=codec) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step).wait_committed()
    shadowed, misspelt, lossy = sorted(warned(caplog))
    assert "codec={'model/weight': 'raw'} decides for no tensor of step 1" in shadowed
    assert "codec={'modle': 'planes'}" in misspelt
    assert "codec={'optin/**': Lossy(dtype=None, bits=8)}" in lossy
    assert "model/" in lossy.partition("are called")[2]


@pytest.mark.parametrize("codec", ["auto", "raw", "planes", {"model/**": "planes", "*": "raw"}])
def test_nothing_is_said_of_patterns_that_decide(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, codec: str | Mapping[str, str]
) -> None:
    state = {"model": torch.nn.Linear(3, 3), "x": 1}
    with ckptlib.Checkpointer(tmp_path, state, every=10**9, codec=codec) as ckpt:
        ckpt.save(1).wait_committed()
    assert warned(caplog) == []


@pytest.mark.parametrize("codec", [{"b": "raw", "c": "raw"}, {"b": "raw", "x/exp_avg": Lossy(bits=8), "c": "planes"}])
def test_another_rank_may_have_what_is_meant(
    caplog: pytest.LogCaptureFixture, codec: Mapping[str, str | Lossy]
) -> None:
    rules, tensors = CodecRules.of(codec), [("a", "float32"), ("b", "float32"), ("x/exp_avg", "float32")]

    def on_rank(group: Group) -> None:
        name, dtype = tensors[group.rank]
        layout = Layout(3, (TensorEntry(name, dtype, (4,), OwnPerRank()),))
        warn_of_unreached(group, rules if group.rank != 2 else CodecRules(), layout, 7)

    run_ranks(3, on_rank)
    expected = ["c", "x/exp_avg"] if len(codec) == 3 else ["c"]  # a rank that was given no rule knows none
    assert [text.split("'")[1] for text in sorted(warned(caplog))] == expected


def test_lossy_decides_for_what_it_rounds_alone(caplog: pytest.LogCaptureFixture) -> None:
    rules = CodecRules.of({"w": Lossy(bits=8), "h/exp_avg": Lossy(bits=8), "x/exp_avg": Lossy(bits=8), "**": "raw"})
    entries = [("h/exp_avg", "bfloat16"), ("w", "float32"), ("x/exp_avg", "float32")]
    layout = Layout(1, tuple(TensorEntry(name, dtype, (4,), OwnPerRank()) for name, dtype in entries))
    run_ranks(1, lambda group: warn_of_unreached(group, rules, layout, 7))
    assert [text.split("'")[1] for text in sorted(warned(caplog))] == ["h/exp_avg", "w"]


def test_nothing_is_said_where_there_is_no_tensor(caplog: pytest.LogCaptureFixture) -> None:
    """As of an import of plain values."""
    run_ranks(1, lambda group: warn_of_unreached(group, CodecRules.of("auto"), Layout(1, ()), 7))
    assert warned(caplog) == []


def test_rank_0_tells_of_what_other_ranks_alone_have(caplog: pytest.LogCaptureFixture) -> None:
    tensors = TensorEntry("model/w", "float32", (4,), OwnPerRank())
    layouts, rules = [Layout(2, ()), Layout(2, (tensors,))], CodecRules.of({"modle": "planes"})
    run_ranks(2, lambda group: warn_of_unreached(group, rules, layouts[group.rank], 7))
    (text,) = warned(caplog)
    assert "Tensors are called model/w;" in text
