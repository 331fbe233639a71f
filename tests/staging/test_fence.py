"""The fence: every optimizer of the state goes through it, it is told apart who did, and it goes without a trace."""

from __future__ import annotations

import copy
import functools
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.inside import fence_of, stager_of
from helpers.interrupted import interrupted_at
from helpers.stage import held, is_installed, num_installed, pending_of, replace_pending, unhooked
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import override
from workers.torn import OpensGate, params_of, raw, step_with_gradients

import ckptlib
from ckptlib.devices import accelerator
from ckptlib.errors import WaitTimeout
from ckptlib.staging import stager
from ckptlib.staging.fence import Fence, wait_for_copies
from ckptlib.staging.pair import CopySource


class Copy:
    """A copy that is done when it is waited for, and says so."""

    def __init__(self, on_device: bool = False) -> None:
        self.waited = 0
        self.landed = not on_device
        """Whether it is over for whoever has not waited, too."""

    def wait_copied(self) -> None:
        self.waited += 1

    @property
    def copied(self) -> bool:
        return self.waited > 0 and self.landed

    def wait_done(self, timeout_s: float | None) -> None:
        self.landed = True


def make_optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.randn(20000))])


def test_hooks_that_write_to_parameters_before_a_step_find_the_copy_done() -> None:
    """Whoever registered them, and whenever: those of all optimizers before the first fence, too."""
    pending, optimizer = Copy(), make_optimizer()
    found: list[int] = []

    def write(*_: object) -> None:
        found.append(pending.waited)

    with unhooked():
        register_optimizer_step_pre_hook(write)
        fence = Fence()
        fence.install([optimizer])
        register_optimizer_step_pre_hook(write)
        optimizer.register_step_pre_hook(write)
        fence.guard(pending)
        step_with_gradients(optimizer)
    assert found == [1, 1, 1]


def test_a_step_waits_once_for_every_copy() -> None:
    fence, copies, optimizer = Fence(), [Copy(), Copy()], make_optimizer()
    fence.install([optimizer])
    for pending in copies:
        fence.guard(pending)
    step_with_gradients(optimizer)
    step_with_gradients(optimizer)
    assert [pending.waited for pending in copies] == [1, 1]
    assert fence.waited_s >= 0


def test_who_fired_is_known_until_forgotten() -> None:
    fence, one, other = Fence(), make_optimizer(), make_optimizer()
    fence.install([one, other])
    assert not fence.fired(one)
    step_with_gradients(one)
    assert (fence.fired(one), fence.fired(other)) == (True, False)
    fence.forget()
    assert not fence.fired(one)
    step_with_gradients(one)
    assert fence.fired(one), "earned anew"


def test_nothing_is_earned_by_another_one_at_the_same_address() -> None:
    fence = Fence()
    for _ in range(20):
        gone = make_optimizer()
        fence.install([gone])
        step_with_gradients(gone)
        del gone
        gc.collect(1)
        new = make_optimizer()
        assert not fence.fired(new)
        step_with_gradients(new)
        assert fence.fired(new)


def test_each_thread_waits_for_a_copy_on_its_own_stream() -> None:
    """Until the copy is over: what holds up one stream holds up no other."""
    fence, pending = Fence(), Copy(on_device=True)
    one, other = make_optimizer(), make_optimizer()
    fence.install([one, other])
    fence.guard(pending)
    step_with_gradients(one)
    thread = threading.Thread(target=step_with_gradients, args=[other])
    thread.start()
    thread.join()
    assert pending.waited == 2
    pending.landed = True
    step_with_gradients(one)
    assert pending.waited == 2


def test_a_thread_that_drains_takes_no_copy_from_others() -> None:
    """As one that loads beside the training does: the training's stream has yet to be made to wait."""
    fence, optimizer, draining, landed = Fence(), make_optimizer(), threading.Event(), threading.Event()

    class Slow(Copy):
        def wait_done(self, timeout_s: float | None) -> None:
            draining.set()
            assert landed.wait(30)
            self.landed = True

    fence.install([optimizer])
    fence.guard(pending := Slow(on_device=True))
    thread = threading.Thread(target=fence.drain)
    thread.start()
    assert draining.wait(30)
    step_with_gradients(optimizer)
    assert pending.waited == 1
    landed.set()
    thread.join()
    assert not pending_of(fence)


def test_many_threads_at_the_fence_lose_no_copy() -> None:
    fence, threads = Fence(), []
    optimizers = [make_optimizer() for _ in range(4)]
    fence.install(optimizers)
    copies = [Copy(on_device=True) for _ in range(200)]

    def steps(optimizer: torch.optim.Optimizer) -> None:
        while not all(pending.landed for pending in copies):
            fence.before_step(optimizer)

    for optimizer in optimizers:
        threads.append(threading.Thread(target=steps, args=[optimizer]))
        threads[-1].start()
    for pending in copies:
        fence.guard(pending)
    for pending in copies:
        while not pending.waited:
            time.sleep(0)
        pending.landed = True
    for thread in threads:
        thread.join()
    fence.wait()
    assert not pending_of(fence)


def test_a_step_that_is_captured_earns_nothing_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay calls no hook; and a capture cannot wait for what is outside of it, so that is over before."""
    fence, pending, optimizer = Fence(), Copy(on_device=True), make_optimizer()
    fence.install([optimizer])
    step_with_gradients(optimizer)  # to warm up
    assert fence.fired(optimizer)
    fence.guard(pending)
    with monkeypatch.context() as patch:
        patch.setattr(accelerator, "capturing", lambda device: True)
        step_with_gradients(optimizer)
    assert (pending.waited, pending.landed) == (0, True)
    assert not fence.fired(optimizer), "nor for the steps before the capture, which the replays follow"
    fence.forget()
    step_with_gradients(optimizer)
    assert not fence.fired(optimizer)


class TellsItsDeviceAlone(torch.Tensor):
    """As torch's ShardedTensor, which raises for nearly all that is asked of it. torchrec's optimizers have such."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func != torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            raise RuntimeError(f"{func} is not supported")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_optimizers_of_tensors_that_tell_little_take_their_steps() -> None:
    fence, optimizer = Fence(), make_optimizer()
    fence.install([])
    with torch._C.DisableTorchFunctionSubclass():
        optimizer.param_groups[0]["params"] = [torch.ones(2).as_subclass(TellsItsDeviceAlone)]
    optimizer.register_step_pre_hook(lambda *_: optimizer.param_groups[0]["params"].clear())
    optimizer.step()
    assert fence.fired(optimizer)


def test_optimizers_of_tensors_without_memory_take_their_steps() -> None:
    fence = Fence()
    fence.install([])
    weights = torch.ones(3, device="meta", requires_grad=True)
    weights.grad = torch.ones(3, device="meta")
    optimizer = torch.optim.SGD([weights], lr=0.1)
    optimizer.step()
    assert fence.fired(optimizer)


def test_drained_before_a_capture(tmp_path: Path) -> None:
    optimizer = make_optimizer()
    with ckptlib.Checkpointer(tmp_path, {"optim": optimizer}, every=1, arena=tmp_path) as ckpt:
        for step in (1, 2):
            step_with_gradients(optimizer)
            ckpt.after_step(step)
        staging = ckpt.pending.staging
        ckpt.drain()
        assert staging.done
        assert not pending_of(fence_of(ckpt))


def test_drained_behind_a_save_that_was_asked_for(tmp_path: Path) -> None:
    """No optimizer waits for it, and whoever moves the state off a device would not have its memory."""
    ckpt = ckptlib.Checkpointer(tmp_path, {"w": torch.ones(100)}, every=10**6, arena=tmp_path)
    with ckpt, held(stager_of(ckpt)) as gate:
        staging = ckpt.save(1).staging
        threading.Timer(0.1, gate.set).start()
        ckpt.drain()
        assert staging.done


def test_drained_behind_a_save_that_was_interrupted_as_it_began(tmp_path: Path) -> None:
    with ckptlib.Checkpointer(tmp_path, {"w": torch.ones(100)}, every=10**6, arena=tmp_path) as ckpt:
        with interrupted_at("Stager.copy"):
            ckpt.save(1)
        ckpt.drain()
        ckpt.save(2).wait_committed(150.0)


def test_drained_behind_a_step_whose_save_was_interrupted_as_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fence is closed for it, and nobody lets it go on."""
    monkeypatch.setattr("ckptlib.staging.fence.DRAIN_TIMEOUT_S", 5.0)
    with ckptlib.Checkpointer(tmp_path, {"w": torch.ones(100)}, every=1, arena=tmp_path) as ckpt:
        with interrupted_at("TrainingSteps._warn_of_metrics"):
            ckpt.after_step(1)
        ckpt.drain()
        assert not pending_of(fence_of(ckpt))
        ckpt.save(2).wait_committed(150.0)


def test_hooks_of_others_stay_as_they_are() -> None:
    fence, optimizer, seen = Fence(), make_optimizer(), []
    optimizer.register_step_pre_hook(lambda *args: seen.append(args))
    fence.install([optimizer])
    fence.install([optimizer])
    fence.remove()
    pending = Copy()
    fence.guard(pending)
    step_with_gradients(optimizer)
    assert (len(seen), pending.waited) == (1, 0)


def test_a_fence_that_nobody_has_any_more_holds_up_no_step() -> None:
    before = num_installed()
    fence = Fence()
    fence.install([])
    assert num_installed() == before + 1
    del fence
    assert num_installed() == before


def test_an_optimizer_of_no_state_waits_too() -> None:
    """It may write to what another one owns."""
    fence, pending, stranger = Fence(), Copy(), make_optimizer()
    fence.install([])
    fence.guard(pending)
    step_with_gradients(stranger)
    assert pending.waited == 1


def test_fences_come_and_go_while_other_threads_step() -> None:
    done, errors = threading.Event(), []

    def steps() -> None:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        try:
            while not done.is_set():
                optimizer.step()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=steps)
    thread.start()
    for number in range(2000):
        fence = Fence()
        fence.install([])
        if number % 2:
            fence.remove()
    done.set()
    thread.join()
    assert not errors


def test_a_step_that_is_skipped_earns_nothing() -> None:
    """torch.amp's scaler does not call step() when gradients are not finite."""
    fence, optimizer = Fence(), make_optimizer()
    fence.install([optimizer])
    scaler = torch.amp.GradScaler("cpu")
    for p in params_of(optimizer):
        scaler.scale(p.sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not fence.fired(optimizer)
    optimizer.zero_grad()
    for p in params_of(optimizer):
        scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    assert fence.fired(optimizer)


def test_a_closure_is_called_behind_the_fence() -> None:
    fence, pending = Fence(), Copy()
    param = torch.nn.Parameter(torch.randn(10))
    optimizer = torch.optim.LBFGS([param], max_iter=3)
    fence.install([optimizer])
    fence.guard(pending)

    def closure() -> torch.Tensor:
        assert pending.waited == 1
        optimizer.zero_grad()
        loss = param.pow(2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def test_a_wait_ends_with_an_error_that_says_what_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = make_optimizer()
    state = {"optim": optimizer}
    with ckptlib.Checkpointer(tmp_path, state, every=1, arena=tmp_path) as ckpt:
        step_with_gradients(optimizer)
        ckpt.after_step(1)
        step_with_gradients(optimizer)
        with held(stager_of(ckpt)):
            ckpt.after_step(2)
            monkeypatch.setattr(stager, "COPY_TIMEOUT_S", 0.01)
            with pytest.raises(WaitTimeout, match="copy of step 2"):
                step_with_gradients(optimizer)
        monkeypatch.undo()


class Stuck(Copy):
    """The thread that copies is not there."""

    @override
    def wait_copied(self) -> None:
        raise AssertionError("nobody ends it")

    @override
    def wait_done(self, timeout_s: float | None) -> None:
        raise AssertionError("nobody ends it")


def test_a_forked_process_waits_for_no_copy() -> None:
    """Neither to step nor to load: what its parent copies is not its own memory."""
    fence, optimizer = Fence(), make_optimizer()
    fence.install([optimizer])
    fence.guard(Stuck())
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            step_with_gradients(optimizer)
            wait_for_copies()
            os._exit(0)
        os._exit(1)
    fence.remove()
    assert os.waitpid(child, 0)[1] == 0


# In a Checkpointer


def test_every_step_waits_until_the_end(tmp_path: Path) -> None:
    first, second = make_optimizer(), make_optimizer()
    state = {"a": first, "deep": {"in": [{"a list": second}]}}
    with ckptlib.Checkpointer(tmp_path, state, every=1, arena=tmp_path) as ckpt:
        assert is_installed(fence_of(ckpt))
        for step in (1, 2):
            step_with_gradients(first)
            ckpt.after_step(step)
        ckpt.pending.staging.wait_copied()
    assert not is_installed(fence_of(ckpt))


class Rows(torch.optim.Optimizer):
    """Writes to a few rows, which no sample shows."""

    def __init__(self, table: torch.nn.Parameter) -> None:
        super().__init__([table], {})

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["params"][0][-3:] += 1


@pytest.mark.parametrize("is_new", [True, False], ids=["came later", "in no state"])
def test_an_optimizer_waits_for_the_copy_of_what_it_shares(tmp_path: Path, is_new: bool) -> None:
    table = torch.nn.Embedding(20000, 8)
    state: dict[str, Any] = {"table": table}
    if is_new:  # before the one that the table is taken to be of
        state["rows"] = Rows(table.weight)
    state["all"] = torch.optim.SGD(table.parameters(), momentum=0.9)
    with ckptlib.Checkpointer(tmp_path, state, every=1, arena=tmp_path) as ckpt:
        for step in (1, 2):
            step_with_gradients(state["all"])
            ckpt.after_step(step)
            ckpt.pending.wait_committed(60)
        step_with_gradients(state["all"])
        expected = raw(table.weight)
        with held(stager_of(ckpt)) as gate:
            ckpt.after_step(3)
            replace_pending(fence_of(ckpt), [OpensGate(gate, ckpt.pending.staging)])
            rows = Rows(table.weight)
            if is_new:
                state["rows"] = rows
            rows.step()
        ckpt.pending.wait_committed(60)
    with ckptlib.open(tmp_path, 3) as saved:
        assert raw(saved.get_tensor("table/weight")) == expected


def test_a_load_waits_for_the_copy(tmp_path: Path) -> None:
    """Into a part of the state, of which few rows differ: no sample shows it."""
    table = torch.nn.Embedding(20000, 8)
    optimizer = torch.optim.SGD(table.parameters(), momentum=0.9)
    with ckptlib.Checkpointer(tmp_path, {"table": table, "all": optimizer}, every=1, arena=tmp_path) as ckpt:
        for step in (1, 2):
            step_with_gradients(optimizer)
            ckpt.after_step(step)
            ckpt.pending.wait_committed(60)
        with torch.no_grad():
            table.weight[-3:] += 1  # all that step 2 has otherwise
        table.weight.grad = torch.zeros_like(table.weight)
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        expected = raw(table.weight)
        with held(stager_of(ckpt)) as gate:
            ckpt.after_step(3)
            replace_pending(fence_of(ckpt), [OpensGate(gate, ckpt.pending.staging)])
            ckptlib.load(tmp_path, {"table": table}, 2, only="table")
        assert raw(table.weight) != expected
        ckpt.pending.wait_committed(60)
    with ckptlib.open(tmp_path, 3) as saved:
        assert raw(saved.get_tensor("table/weight")) == expected


def test_who_writes_on_any_stream_waits_for_the_device() -> None:
    """And for all fences that are installed."""
    fences, pending = [Fence(), Fence()], [Copy(on_device=True), Copy(on_device=True)]
    for fence, copied in zip(fences, pending, strict=True):
        fence.install([])
        fence.guard(copied)
    wait_for_copies()
    assert [copied.copied for copied in pending] == [True, True]


def test_copies_that_are_over_are_not_kept_where_no_optimizer_steps(tmp_path: Path) -> None:
    state = {"w": torch.zeros(1000)}
    with ckptlib.Checkpointer(tmp_path, state, every=1, arena=tmp_path) as ckpt:
        for step in range(1, 51):
            ckpt.after_step(step)
            ckpt.pending.wait_committed(60)
            assert len(pending_of(fence_of(ckpt))) <= 2
        assert ckpt.pending.step == 50


def test_overlap_is_earned_anew_by_each_step(tmp_path: Path) -> None:
    """Of two optimizers only what the one that stepped owns is left to the thread."""
    first, second = make_optimizer(), make_optimizer()
    both = {"first": first, "second": second}
    state = {**both, "w": torch.nn.ParameterDict({name: params_of(o)[0] for name, o in both.items()})}
    for optimizer in both.values():
        step_with_gradients(optimizer)  # so that the layout stays as it is
    with ckptlib.Checkpointer(tmp_path, state, every=3, arena=tmp_path) as ckpt:
        for third, who in enumerate((["first"], ["second"], [], ["first", "second"], [], ["second"])):
            ckpt.after_step(3 * third + 1)
            ckpt.after_step(3 * third + 2)
            for name in who:
                step_with_gradients(both[name])
            with recorded_overlaps(ckpt) as overlaps:
                ckpt.after_step(3 * third + 3)
            owned = {name for name, overlap in overlaps.items() if overlap}
            expected = {f"w/{name}" for name in who}
            assert {name for name in owned if name.startswith("w/")} == expected
            assert {name for name in owned if name.endswith("exp_avg")} == {f"{name}/w/{name}/exp_avg" for name in who}
            ckpt.pending.wait_committed(60)


@contextmanager
def recorded_overlaps(ckpt: ckptlib.Checkpointer) -> Iterator[dict[str, bool]]:
    """Which sources `copy` was given as those that wait at the fence."""
    staged, found = stager_of(ckpt), {}

    class Recording(stager.Stager):
        @override
        def copy(self, staging: stager.Staging, sources: Sequence[CopySource], *args: Any, **kwargs: Any) -> None:
            found.update({source.name: source.overlap for source in sources})
            super().copy(staging, sources, *args, **kwargs)

    staged.__class__ = Recording
    yield found
    staged.__class__ = stager.Stager


@pytest.mark.parametrize("compiled", ["step", "train"])
def test_compiled(tmp_path: Path, compiled: str) -> None:
    """A compiled optimizer.step(), or a compiled step of training, goes through the fence and saves what it comes to
    without ckptlib. Eager is no oracle for the last bit: it rounds otherwise with torch 2.6."""
    torch.manual_seed(0)
    alone = torch.nn.Linear(200, 200)
    model = copy.deepcopy(alone)
    train, _ = training(alone, compiled)
    for batch in batches():
        train(batch)
    train, optimizer = training(model, compiled)
    state, fired = {"model": model, "optim": optimizer}, []
    with ckptlib.Checkpointer(tmp_path, state, every=2, arena=tmp_path) as ckpt:
        for _, batch in zip(ckpt.loop(0, 4), batches(), strict=True):
            train(batch)
            fired.append(fence_of(ckpt).fired(optimizer))
    assert fired == [True] * 4
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert ckptlib.load(tmp_path, state).step == 4
    assert [raw(p) for p in model.parameters()] == [raw(p) for p in alone.parameters()]


def training(model: torch.nn.Module, compiled: str) -> tuple[Callable[[torch.Tensor], None], torch.optim.Optimizer]:
    """A step of training, and its optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    compile_ = functools.partial(torch.compile, backend="eager")
    update = compile_(lambda: optimizer.step()) if compiled == "step" else optimizer.step

    def train(x: torch.Tensor) -> None:
        model(x).pow(2).mean().backward()
        update()
        optimizer.zero_grad()

    return compile_(train) if compiled == "train" else train, optimizer


def batches() -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return (torch.randn(8, 200, generator=draw) for _ in range(4))


def test_the_fence_waits_in_whatever_thread_steps() -> None:
    """Optimizers that step in a backward hook do so in a thread of autograd's."""
    fence, pending, optimizer = Fence(), Copy(), make_optimizer()
    fence.install([optimizer])
    fence.guard(pending)
    thread = threading.Thread(target=step_with_gradients, args=[optimizer])
    thread.start()
    thread.join()
    assert pending.waited == 1
    assert fence.fired(optimizer)
