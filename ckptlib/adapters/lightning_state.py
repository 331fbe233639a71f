"""The state of a Trainer of Lightning while it fits: collects it and gives it back. Knows nothing of when."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from torch.distributed.tensor import DTensor

from ckptlib.adapters.plain_tree import plain_of
from ckptlib.state.leaf import PerRank

IN_OBJECTS = ("optimizer_states", "lr_schedulers")
"""Entries of Lightning's own checkpoint, besides "state_dict", that the objects themselves have."""

WEIGHTS = "state_dict"
LOADERS = "combined_loader"
RESTORE = "_restore_modules_and_callbacks"
"""The method by which Lightning lets strategies load a file when everything is set up."""


class LightningState:
    """The state of one `fit`, from the time that its strategy is set up. Main thread.

    objects: the state as a Checkpointer takes it.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._rest = _Rest(trainer)
        self._loaders = _Loaders(trainer)
        self._begins_epoch = False
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self.objects: dict[str, object] = {
            "model": trainer.lightning_module,
            "optim": _one_or_all(trainer.optimizers),
            "sched": _one_or_all(schedulers),
            "trainer": self._rest,
            "data": PerRank(self._loaders),  # Lightning's own files have only rank 0's
        }

    def hand_out(self) -> None:
        """Gives the loaded state to Lightning, by the calls and in the order in which it loads a file of its own.

        Replaces such a load: Lightning forgets what `ckpt_path` says. `place_data` has to follow, in on_train_start.
        """
        connector = self._trainer._checkpoint_connector
        checkpoint = copy.deepcopy(self._rest.loaded)  # hooks may have put the live weights into it, too
        checkpoint[WEIGHTS] = {**self._trainer.lightning_module.state_dict(), **checkpoint.get(WEIGHTS, {})}
        loops = checkpoint["loops"]["fit_loop"]
        self._begins_epoch = bool(loops["epoch_loop.batch_progress"]["is_last_batch"])
        if self._begins_epoch:  # its last step is told in the next one; Lightning resumes within an epoch or behind it
            for progress in (loops["epoch_progress"]["total"], loops["epoch_progress"]["current"]):
                progress.update(dict.fromkeys(("ready", "started", "completed"), progress["processed"]))
        if self._trainer.strategy.restore_checkpoint_after_setup:
            vars(connector)[RESTORE] = self._restored
        connector._loaded_checkpoint = checkpoint
        try:
            connector.restore_datamodule()
            connector.restore_model()
            connector.restore_callbacks()
            connector.restore_precision_plugin_state()
            connector.restore_loops()
        finally:
            connector._loaded_checkpoint = {}

    def _restored(self, *_: object) -> None:
        """Replaces Lightning's own method, which would load what `ckpt_path` says behind on_fit_start. Called once."""
        self.let_go()

    def let_go(self) -> None:
        """Lets Lightning load files again."""
        vars(self._trainer._checkpoint_connector).pop(RESTORE, None)

    def place_data(self) -> None:
        """Puts the data loaders back to where they were, and lets the loops begin the next epoch if one had ended.

        Lightning would load them before it tells their samplers the epoch, by which these shuffle.
        """
        loop = self._trainer.fit_loop
        loader, fetcher = loop._combined_loader, loop._data_fetcher
        if loader is not None and fetcher is not None and self._loaders.loaded:
            for each in loader.flattened:
                _set_sampler_epoch(each, self._trainer.current_epoch)
            loader._load_state_dicts(self._loaders.loaded)
            iter(loader if self._begins_epoch else fetcher)  # reads nothing ahead of an epoch that is over
        if self._begins_epoch:
            for one in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
                one.on_iteration_done()


class _Rest:
    """Lightning's own checkpoint without the objects' entries: loops, callbacks, data module, precision, hooks."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        with _nothing_gathered(self._trainer.strategy):
            checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        live = self._trainer.lightning_module.state_dict()
        hooked = {k: v for k, v in checkpoint.pop(WEIGHTS).items() if not _is_same(v, live.get(k))}
        for name in IN_OBJECTS:
            del checkpoint[name]
        checkpoint["loops"]["fit_loop"]["state_dict"].pop(LOADERS, None)
        if hooked:  # such as the averaged weights, in place of the model's
            checkpoint[WEIGHTS] = hooked
        plain: dict[str, Any] = plain_of(checkpoint)
        return plain

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class _Loaders:
    """The positions of data loaders that can tell theirs, on this rank."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.loaded: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        combined = self._trainer.fit_loop._combined_loader
        return {"loaders": [] if combined is None else plain_of(combined._state_dicts())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["loaders"]


@contextmanager
def _nothing_gathered(strategy: Any) -> Iterator[None]:
    """Makes a strategy return weights and optimizers, which are saved as they are, as the base class does.

    ModelParallelStrategy makes copies of all of them. And if an optimizer has no state yet, torch's
    get_optimizer_state_dict makes some by a step of it, which changes the training.
    """
    names = ("lightning_module_state_dict", "optimizer_state")
    vars(strategy).update({name: partial(getattr(Strategy, name), strategy) for name in names})
    try:
        yield
    finally:
        for name in names:
            del vars(strategy)[name]


def _one_or_all(objects: list[Any]) -> object:
    return objects[0] if len(objects) == 1 else objects


def _is_same(a: object, b: object) -> bool:
    """Returns whether two entries are one tensor: the state dict of a module makes a new object at each call."""
    if isinstance(a, DTensor) and isinstance(b, DTensor):
        a, b = a.to_local(), b.to_local()
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
    return a is b
