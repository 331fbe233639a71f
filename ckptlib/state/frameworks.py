"""Recognises objects of other frameworks by the names of their classes, so that no framework is imported for it."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ckptlib.errors import UnsupportedState

log = logging.getLogger(__name__)

_WRAPPERS = {("accelerate.optimizer", "AcceleratedOptimizer"): "optimizer"}
"""By class: the attribute that holds the wrapped optimizer. Such a wrapper never runs `Optimizer.__init__`."""

_LOADERS = {("accelerate.data_loader", "DataLoaderAdapter")}
"""The base of DataLoaderShard and DataLoaderDispatcher."""

_TENSOR_DICTS = {("tensordict.base", "TensorDictBase")}

SEEDABLE = (
    "Make the Accelerator with DataLoaderConfiguration(use_seedable_sampler=True): then shuffle=True gives an order "
    "that a resume finds again"
)
"""Advice for data loaders of accelerate."""

_STATEFUL_LOADERS = {("torchdata.stateful_dataloader.stateful_dataloader", "StatefulDataLoader")}
_NODE_LOADERS = {("torchdata.nodes.loader", "Loader")}
_STATELESS = (
    torch.utils.data.RandomSampler,
    torch.utils.data.SubsetRandomSampler,
    torch.utils.data.WeightedRandomSampler,
)
"""torch's samplers that draw their order as an epoch begins. For `shuffle=True` torchdata has one of its own."""
_SEEDED = {("accelerate.data_loader", "SeedableRandomSampler")}
"""Subclasses of these whose order is a function of seed and epoch."""
_COUNT_ALONE = _STATEFUL_LOADERS | _NODE_LOADERS

FINISHED, EPOCH = "_iterator_finished", "ckptlib_epoch"
"""Keys of the state of a StatefulDataLoader, and of ours beside them for one of accelerate."""


def known_class(node: object, known: Container[tuple[str, str]]) -> tuple[str, str] | None:
    """Returns the module and name of an object's class, or of its nearest base, that is in `known`.

    Uses `type`: a wrapper may claim the class of the object in it.
    """
    for cls in type(node).__mro__:
        name = (cls.__module__, cls.__name__)
        if name in known:
            return name
    return None


def is_tensor_dict(node: object) -> bool:
    """Returns whether this is a dict of tensordict's. Beside its entries, its `state_dict()` only tells how it was
    made."""
    return known_class(node, _TENSOR_DICTS) is not None


def unwrapped(optimizer: object) -> object:
    """Returns the optimizer that does the work."""
    known = known_class(optimizer, _WRAPPERS)
    return unwrapped(getattr(optimizer, _WRAPPERS[known])) if known else optimizer


def torch_optimizer(node: torch.optim.Optimizer, path: str) -> torch.optim.Optimizer:
    """Returns the optimizer that does the work, as `unwrapped` does. Raises UnsupportedState if it is not torch's."""
    inner = unwrapped(node)
    if not isinstance(inner, torch.optim.Optimizer):
        raise UnsupportedState(
            f"{path}: this {type(node).__name__} wraps a {type(inner).__module__}.{type(inner).__qualname__}, which is "
            "no torch.optim.Optimizer, so its state cannot be named by parameter; use a plain optimizer"
        )
    return inner


def keeps_no_state(node: object) -> bool:
    """Returns whether this is accelerate's loader around one without a state: its `state_dict()` raises."""
    return known_class(node, _LOADERS) is not None and "dl_state_dict" not in vars(node)


def refuse_loader(node: object, path: str) -> None:
    """Raises UnsupportedState for a data loader without a state: torch's own, or accelerate's `state_dict()` of it."""
    if isinstance(node, torch.utils.data.DataLoader) and not callable(getattr(node, "state_dict", None)):
        raise UnsupportedState(
            f"{path}: torch's DataLoader does not tell which batch comes next, so a resume would begin the epoch anew; "
            "save ckptlib.data.resumable(loader) instead, and take the batches from it, or use torchdata's "
            "StatefulDataLoader"
        )
    if keeps_no_state(node):
        raise UnsupportedState(
            f"{path}: accelerate's {type(node).__name__} has no state to save, since its DataLoader keeps none; "
            "create one that does with Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader="
            "True)), or save the number of batches instead, and resume with accelerator.skip_first_batches"
        )


def loader_of(node: Any, path: str) -> Callable[[Any], object]:
    """Returns the function that gives an object its state back.

    A StatefulDataLoader gives its place to its next iterator. An iterator that the program has already goes on from its
    own place, but `state_dict()` tells the loaded one from then on: that is logged.

    A Loader of torchdata.nodes goes to its place at once: see `_put_to_place`.
    """

    def load(state: object) -> None:
        if _is_told() and _is_being_read(node):
            log.warning(
                "%s: an iterator over this StatefulDataLoader was made before its place was loaded, and is still held. "
                "It goes on from where it was, and each save from here on would tell the loaded place. Take the "
                "batches from a new one: iter(loader) behind restore",
                path,
            )
        _warn_in_epoch(
            node, path, state, "Pass shuffle=True in its place, or a sampler with state_dict() and load_state_dict()"
        )
        node.load_state_dict(state)

    if known_class(node, _NODE_LOADERS):
        return partial(_put_to_place, node)
    return load if known_class(node, _STATEFUL_LOADERS) else node.load_state_dict


class AcceleratedLoader:
    """The state of a stateful data loader of accelerate, and its epoch. That decides on the order of a seeded sampler;
    accelerate's own `state_dict()` lacks it, so a resume in a later epoch would go on in the first one's order."""

    def __init__(self, loader: Any, path: str) -> None:
        self._loader = loader
        self._path = path

    @staticmethod
    def of(node: object) -> bool:
        return known_class(node, _LOADERS) is not None

    def state_dict(self) -> dict[str, object]:
        """The epoch is the next one if the loop has the last batch: accelerate counts it when it is asked for more."""
        loader = self._loader
        under_way = any(each is loader for each in loader.gradient_state.dataloader_references)
        return {**loader.state_dict(), EPOCH: loader.iteration + (under_way and loader.end_of_dataloader)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Sets `dl_state_dict`, too, which tells the state of the last batch: else a save between a load and the first
        batch, as by `Checkpointer.restore` with peers, would begin the epoch anew."""
        loader = self._loader
        place = {key: value for key, value in state.items() if key != EPOCH}
        _warn_in_epoch(loader, self._path, place, SEEDABLE)
        loader.load_state_dict(place)
        loader.dl_state_dict = copy.deepcopy(place)
        loader.iteration = state.get(EPOCH, loader.iteration)
        if place.get(FINISHED):
            read_anew(loader)  # workers would end the epoch once more, and the sampler count it twice


def read_anew(loader: Any) -> None:
    """Has the workers of a stateful loader of accelerate begin with the next epoch. Without workers, nothing is read
    ahead."""
    if getattr(loader, "use_stateful_dataloader", False) and loader.num_workers:
        loader.base_dataloader.load_state_dict({})  # drops what reads ahead, but not a place that was loaded
        loader.base_dataloader.next_iter_state = None


def _warn_in_epoch(loader: object, path: str, state: object, advice: str) -> None:
    """Warns as `warn_of_order` does, unless the loaded place is the end of an epoch: the next one is drawn whole."""
    if not (isinstance(state, Mapping) and state.get(FINISHED)):
        warn_of_order(loader, path, advice)


def warn_of_order(loader: object, path: str, advice: str) -> None:
    """Logs a sampler that draws another order for what is left of the epoch, if a loader has such a one."""
    batches = getattr(loader, "batch_sampler", None)
    sampler = batches if batches is not None else getattr(loader, "sampler", None)
    passed = set[int]()
    while not (sampler is None or isinstance(sampler, _STATELESS) or id(sampler) in passed):
        passed.add(id(sampler))  # one may refer back to what holds it
        sampler = getattr(sampler, "sampler", getattr(sampler, "batch_sampler", None))
    draws = isinstance(sampler, _STATELESS) and not known_class(sampler, _SEEDED)
    if not draws or hasattr(sampler, "state_dict") or not _is_told():
        return
    log.warning(
        "%s: the %s of this %s has no state, so its order may be drawn anew: what is left of the epoch would have "
        "items that were trained on already, and lack others. %s",
        path,
        type(sampler).__name__,
        type(loader).__name__,
        advice,
    )


def _is_told() -> bool:
    """Returns whether this rank speaks for all."""
    return not (dist.is_initialized() and dist.get_rank())


def _put_to_place(loader: Any, state: object) -> None:
    """Has a Loader of torchdata.nodes, and each iterator over it, go on from a saved place.

    `load_state_dict()` alone leaves that to a later `iter()`. The next one would return the iterator that
    `state_dict()` made, which is at the beginning: every state is looked at once before it is restored.

    At the end of an epoch, torchdata begins the next one in `iter()`. To detect the end it draws an item, before the
    random generators are put back, and from then on its state is that of the end. Here the first batch begins the
    epoch.
    """
    kind: Any = next(cls for cls in type(loader).__mro__ if (cls.__module__, cls.__name__) in _NODE_LOADERS)
    restarts = loader.restart_on_stop_iteration
    loader.load_state_dict(state)
    loader._iter_for_state_dict, loader.restart_on_stop_iteration = False, False
    try:
        iterator = kind.__iter__(loader)  # a subclass may wrap it in a generator, which runs later
    finally:
        loader.restart_on_stop_iteration = restarts
    iterator._cached_state_dict = None
    loader._iter_for_state_dict = _NothingLoaded(loader)  # the next iter() leaves it where it is

    def first() -> object:
        del iterator.next
        loader._iter_for_state_dict = False  # a caller that already had this iterator has not called iter() since
        try:
            return iterator.next()
        except StopIteration:
            if not restarts:
                raise
            iterator.reset(None)
            return iterator.next()

    iterator.next = first


class _NothingLoaded:
    """True until the program gives a Loader of torchdata.nodes another place itself, where its next iterator begins."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __bool__(self) -> bool:
        return self._loader._next_iter_state_dict is None


def _is_being_read(loader: Any) -> bool:
    """Returns whether somebody other than a StatefulDataLoader holds an iterator over it that has not ended.

    The iterator of a loop that was left is held by the loader alone, as is the one that `state_dict()` made.
    """
    iterator = getattr(loader, "_iterator", None)
    if iterator is None or getattr(iterator, "_finished", False):
        return False
    return sys.getrefcount(iterator) > _REFERENCES


def _references() -> int:
    """Returns what `sys.getrefcount` reports for an object that one attribute, and a name here, refer to."""
    holder = type("Holder", (), {})()
    holder.attribute = object()
    held = holder.attribute
    return sys.getrefcount(held)


_REFERENCES = _references()


def counts_alone(node: object) -> bool:
    """Returns whether this is a data loader whose place is the number of batches that one rank has had: it holds while
    the same number of ranks share the data."""
    return isinstance(node, AcceleratedLoader) or known_class(node, _COUNT_ALONE) is not None
