"""DCP's StorageWriter that commits a step of ckptlib, with planners that derive from its DefaultSavePlanner.

DCP's planner drops replicas before a storage sees data, so that nobody could prove them equal. But before that, the
storage sees each rank's own plan, which names everything that the rank holds. ckptlib saves all of that by its own
plan, which writes each replica once, proves replicas equal, and proves at the commit that nothing is missing. DCP's
global plan is compared with it, and not used otherwise.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from typing_extensions import override

from ckptlib.adapters import dcp
from ckptlib.adapters.checkpoint_id import place_of
from ckptlib.errors import StateError, UnsupportedState
from ckptlib.policy.codec import AUTO, Asked
from ckptlib.policy.keep import Keep
from ckptlib.ranks.meeting import group_or_world
from ckptlib.ranks.together import together
from ckptlib.saving.registry import registry
from ckptlib.state.leaf import Sharded
from ckptlib.state.subclasses import placed_like

Key: TypeAlias = tuple[str, tuple[int, ...] | None, tuple[int, ...] | None]
"""Name, offset and sizes of the data that an item writes."""


@dataclass(frozen=True)
class _Told:
    """The items that travel with a plan."""

    items: Sequence[WriteItem]
    """To the coordinator: everything that the rank holds. Back: what the global plan has the rank write."""


class StorageWriter(TorchStorageWriter):
    """Commits a step through `torch.distributed.checkpoint.save(storage_writer=)`, with a planner of your choice.

    The promises are those of `ckptlib.dcp.save`: the step is listed once all of it is durable and was proved whole.
    Data that the planner's `create_local_plan` names on a rank is saved of that rank; `resolve_data` gives tensors.
    Plain values are saved as they are, not as the pickles that `transform_object` makes.

    checkpoint_id, storage_options, codec, keep: as for `ckptlib.dcp.save`.
    process_group: the one that is given to DCP's save; DCP does not tell it.

    Raises, within DCP's CheckpointException: ValueError for a planner that does not derive from DefaultSavePlanner, or
    caches plans; StateError for a plan that drops, moves or doubles an item; and what `ckptlib.save` raises.
    """

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str] | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        storage_options: Mapping[str, object] | None = None,
        codec: Asked = AUTO,
        keep: Keep | None = None,
    ) -> None:
        self.checkpoint_id = checkpoint_id
        self._process_group = process_group
        self._storage_options, self._codec, self._keep = storage_options, codec, keep
        self._held: Sequence[WriteItem] = ()

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id

    @override
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        place_of(self.checkpoint_id)
        if not kwargs.get("use_collectives", True):
            raise ValueError("use_collectives=False: the ranks must agree on a checkpoint; leave it out")

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not getattr(plan, "usable", True):
            raise ValueError("enable_plan_caching=True: ckptlib must see every plan; leave it out")
        known: set[Key] = set()
        for item in plan.items:
            if (key := _key(item)) in known:
                raise StateError(f"{_shown(key)}: the planner has it twice in the plan of one rank")
            known.add(key)
        self._held = plan.items
        return dataclasses.replace(plan, storage_data=_Told(plan.items))

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Raises StateError if the planner has dropped what a rank holds, or plans what a rank does not hold."""
        group = group_or_world(self._process_group)
        size = 1 if group is None else group.size()
        if len(plans) != size:
            raise ValueError(
                f"{len(plans)} ranks save, and the writer knows {size}: give StorageWriter the process_group= that is "
                "given to save"
            )
        held = [{*map(_key, _told(plan))} for plan in plans]
        planned = [{*map(_key, plan.items)} for plan in plans]
        strange = set().union(*(mine - own for mine, own in zip(planned, held, strict=True)))
        if strange:
            raise StateError(
                f"{_some(strange)}: create_global_plan has a rank write it that does not hold it; change what ranks "
                "hold in create_local_plan"
            )
        dropped = set().union(*held) - set().union(*planned)
        if dropped:
            raise StateError(
                f"{_some(dropped)}: create_global_plan drops it, though a rank holds it; what is not to be saved must "
                "be left out in create_local_plan, on every rank"
            )
        return [dataclasses.replace(plan, storage_data=_Told(plan.items)) for plan in plans]

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Saves and commits. Collective; raises on all ranks or on none."""
        group = registry.group(self._process_group)
        state = together(group, "asking DCP's planner for its data", lambda: self._state(plan, planner))
        dcp.save(
            state,
            checkpoint_id=self.checkpoint_id,
            process_group=self._process_group,
            storage_options=self._storage_options,
            codec=self._codec,
            keep=self._keep,
        )
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])
        return done

    def _state(self, plan: SavePlan, planner: SavePlanner) -> dict[str, Any]:
        """Returns everything that this rank holds, nested as it was given to DCP."""
        if not isinstance(planner, DefaultSavePlanner):
            raise ValueError(
                f"planner={type(planner).__name__}: ckptlib asks the planner for values and placements; derive it from "
                "DefaultSavePlanner"
            )
        if [*map(_key, _told(plan))] != [*map(_key, plan.items)]:
            raise StateError("finish_plan changes the items of the global plan; change them in create_local_plan")
        flat: dict[str, Any] = {}
        for item in self._held:
            name = item.index.fqn
            if name in flat:
                raise UnsupportedState(f"{name}: a rank has several shards of it; ckptlib saves one box of each tensor")
            flat[name] = _value(item, planner)
        return unflatten_state_dict(flat, {name: planner.mappings.get(name, (name,)) for name in flat})

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Only sets `storage_meta`: the step is committed already, with metadata of its own."""
        metadata.storage_meta = self.storage_meta()

    @override
    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))


def _value(item: WriteItem, planner: DefaultSavePlanner) -> Any:
    """Returns the data of an item as ckptlib takes it."""
    if item.type == WriteItemType.BYTE_IO:
        return planner.lookup_object(item.index)
    assert item.tensor_data is not None
    found = planner.resolve_data(item)
    chunk, shape, name = item.tensor_data.chunk, tuple(item.tensor_data.size), item.index.fqn
    if not isinstance(found, torch.Tensor) or found.shape != chunk.sizes:
        kind = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise StateError(f"{name}: the plan says {list(chunk.sizes)}, and resolve_data gives {kind}")
    whole = planner.state_dict.get(name)
    if isinstance(whole, DTensor) and whole.to_local().shape == found.shape:
        return placed_like(whole, found.detach())
    if item.type == WriteItemType.TENSOR:
        return found.detach()
    return Sharded(found.detach(), tuple(chunk.offsets), shape)


def _told(plan: SavePlan) -> Sequence[WriteItem]:
    if not isinstance(plan.storage_data, _Told):
        raise StateError(
            "the planner makes plans without the storage_data of those it was given: use dataclasses.replace"
        )
    return plan.storage_data.items


def _key(item: WriteItem) -> Key:
    at, data = item.index.offset, item.tensor_data
    return item.index.fqn, None if at is None else tuple(at), None if data is None else tuple(data.chunk.sizes)


def _shown(key: Key) -> str:
    name, at, sizes = key
    if at is None or sizes is None:
        return name
    return f"{name}[{', '.join(f'{a}:{a + n}' for a, n in zip(at, sizes, strict=True))}]"


def _some(keys: set[Key]) -> str:
    shown = sorted(map(_shown, keys))
    return f"{', '.join(shown[:10])}{f' and {len(shown) - 10} more' if len(shown) > 10 else ''}"
