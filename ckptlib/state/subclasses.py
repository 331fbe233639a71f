"""Takes tensor subclasses apart that name their inner tensors, by torch's protocol `__tensor_flatten__`.

Their inner tensors are saved as tensors of their own. What the class adds, its kind, is saved only to be compared, and
never used to make anything: a load fills the inner tensors of an existing instance. Classes of torch itself are not
taken apart: those that follow the protocol stand for a value that is not there yet, or for several tensors.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor

from ckptlib.errors import UnsupportedState
from ckptlib.format import sharding, values
from ckptlib.format.paths import join
from ckptlib.format.values import Json
from ckptlib.state.leaf import PLAIN, dtype_name, mesh_of, placements_of
from ckptlib.state.places import own_part, places

MAX_NESTED = 8
"""The most levels of subclasses within subclasses."""
_MAX_CONTEXT = 32
"""The most levels of a class's own context."""


@dataclass(frozen=True, slots=True)
class Apart:
    """An instance, taken apart."""

    kind: dict[str, Json]
    """Everything except the inner tensors' data; equal for two instances that may be filled with each other's."""
    tensors: tuple[tuple[str, torch.Tensor], ...]
    """The innermost tensors, each with its path below the instance's name."""
    at: list[int] | None
    """For a DTensor's local tensor, this rank's coordinate in the mesh. Each rank has its own: no placement is known of
    its inner tensors."""

    @property
    def tree(self) -> Json:
        """The instance's entry in the layout."""
        return {"subclass": self.kind}


def is_subclass(tensor: object) -> TypeGuard[torch.Tensor]:
    """Returns whether a tensor can be taken apart: an instance of such a class, or a DTensor around one."""
    if type(tensor) in PLAIN:  # asked of each of thousands
        return False
    return isinstance(tensor, torch.Tensor) and _tells(type(own_part(tensor)))


def any_subclass(tensors: Iterable[torch.Tensor]) -> bool:
    """Returns whether any of thousands is such a tensor, at a tenth of a microsecond for each."""
    kinds = set(map(type, tensors))
    if any(issubclass(cls, DTensor) for cls in kinds):
        kinds |= {type(tensor._local_tensor) for tensor in tensors if isinstance(tensor, DTensor)}
    return any(map(_tells, kinds))


@lru_cache(maxsize=256)
def _tells(cls: type) -> bool:
    known = cls.__module__ == "torch" or cls.__module__.startswith("torch.")
    return not known and all(
        callable(getattr(cls, method, None)) for method in ("__tensor_flatten__", "__tensor_unflatten__")
    )


def apart(tensor: torch.Tensor, name: str) -> Apart:
    """Returns the instance as its kind and its inner tensors. Raises UnsupportedState, by name, if it cannot be
    described."""
    found: list[tuple[str, torch.Tensor]] = []
    kind = _kind(own_part(tensor), "", name, found, 0)
    at = None
    if isinstance(tensor, DTensor):
        at = list(tensor.device_mesh.get_coordinate() or ())
        mesh = mesh_of(tensor)
        kind["placed"] = {
            "shape": list(tensor.shape),
            "mesh": list(mesh.shape),
            "ranks": list(mesh.ranks),
            "placements": [sharding.encode(p) for p in placements_of(tensor, name)],
        }
    return Apart(kind, tuple(found), at)


def _kind(
    tensor: torch.Tensor, path: str, name: str, found: list[tuple[str, torch.Tensor]], depth: int
) -> dict[str, Json]:
    cls = class_name(type(tensor))
    if depth > MAX_NESTED:
        raise UnsupportedState(
            f"{name}: over {MAX_NESTED} tensor subclasses within each other; does it contain itself?"
        )
    keys, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner: list[Json] = []
    for key in keys:
        value = getattr(tensor, key, None)
        if not isinstance(value, torch.Tensor):
            raise UnsupportedState(f"{name}: {cls} names an inner tensor {key!r}, which is a {type(value).__name__}")
        again = getattr(tensor, key)
        below = join(path, key)
        if is_subclass(value) and not isinstance(value, DTensor):
            own = value is again
            inner.append([key, _kind(value, below, name, found, depth + 1)])
        else:
            own = value is again or places([value]) == places([again])
            inner.append([key, "tensor"])
            found.append((below, value))
        if not own:
            raise UnsupportedState(
                f"{name}: {cls} returns a copy of its inner tensor {key!r}, so it could not be loaded"
            )
    return {
        "class": cls,
        "dtype": dtype_name(tensor),
        "shape": list(tensor.shape),
        # for a dim with one index it means nothing
        "stride": [step if n > 1 else 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)],
        "context": json.dumps(_told(context, name, cls, 0), separators=(",", ":")),
        "tensors": inner,
    }


def class_name(cls: type) -> str:
    """Returns a class's name with its module."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _told(value: object, name: str, cls: str, depth: int) -> Json:
    """Returns what a class says of itself, in a form that differs if that differs. Nothing is ever made of it.

    A device is left out, as it is for plain tensors.
    """
    if depth > _MAX_CONTEXT:
        raise UnsupportedState(f"{name}: the context of {cls} is nested deeper than {_MAX_CONTEXT} levels")

    def told(inner: object) -> Json:
        return _told(inner, name, cls, depth + 1)

    kind = type(value)
    if kind is bool or value is None:
        return {"value": value}  # type: ignore[dict-item]
    of = class_name(kind)
    if isinstance(value, torch.device):
        return {"of": of}
    if isinstance(value, (torch.layout, torch.memory_format)):
        return {"of": of, "name": str(value)}
    if isinstance(value, Enum):
        return {"of": of, "name": str(value.name)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
        if getattr(value, "__dict__", {}).keys() <= set(fields):
            return {"of": of, "fields": [[field, told(getattr(value, field))] for field in fields]}
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return {"of": of, "fields": [[field, told(getattr(value, field))] for field in kind._fields]}
    if isinstance(value, Mapping) and kind is dict:
        return {"dict": sorted(([told(k), told(v)] for k, v in value.items()), key=json.dumps)}
    if isinstance(value, (list, tuple)) and kind in (list, tuple, torch.Size):
        return {"tuple" if kind is torch.Size else kind.__name__: [told(item) for item in value]}
    try:
        return {"value": values.encode(value, name)}
    except UnsupportedState:
        raise UnsupportedState(
            f"{name}: the context of {cls} has a {of}, which cannot be saved and compared; save the plain tensors "
            "that it is made of"
        ) from None


def place_name(name: str) -> str:
    """Returns the name of the value that keeps `Apart.at`. It is in no layout: that would be another for each rank."""
    return f"{name}/@at"


def kind_in(tree: object) -> dict[str, Any] | None:
    """Returns the kind in what a layout keeps under a name; None if there is none."""
    kind = tree.get("subclass") if isinstance(tree, dict) else None
    return kind if isinstance(kind, dict) else None


def difference(target: Mapping[str, Json], saved: Mapping[str, Json]) -> str | None:
    """Returns how an instance differs from the saved one, for people; None if it does not."""
    if _text(target) == _text(saved):
        return None
    keys = [key for key in sorted({*target, *saved}) if _text(target.get(key)) != _text(saved.get(key))]
    some = "; ".join(f"{key} {_brief(target.get(key))}, saved {_brief(saved.get(key))}" for key in keys)
    hint = ". What it is made of cannot be resharded: load it on the mesh it was saved on" if "placed" in keys else ""
    return f"target is a {target['class']} of another kind than was saved: {some}{hint}"


def _text(tree: object) -> str:
    return json.dumps(tree, sort_keys=True)  # True is not 1 here


def _brief(tree: object) -> str:
    text = tree if isinstance(tree, str) else _text(tree)
    return text if len(text) <= 200 else f"{text[:200]}..."


def like(tensor: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Returns another instance like this one, with each innermost tensor made by `make` from this one's."""
    if isinstance(tensor, DTensor):
        return placed_like(tensor, like(tensor._local_tensor, make))
    if not is_subclass(tensor):
        return make(tensor)
    keys, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {key: like(getattr(tensor, key), make) for key in keys}
    made: torch.Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())  # type: ignore[attr-defined]
    return made


def nature(kind: Mapping[str, Json]) -> str:
    """Returns what instances of other shapes or placements have in common: class, context, dtype, inner tensors."""
    return _text({key: kind.get(key) for key in ("class", "context", "dtype", "tensors")})


def another(
    known: torch.Tensor, param: torch.Tensor, make: Callable[[str, torch.Tensor], torch.Tensor | None]
) -> torch.Tensor | None:
    """Returns an instance with the nature of `known`, shaped and placed as a parameter; None if that cannot be made.

    `make`: makes an inner tensor, from its name and the known one; None for subclasses within each other.
    """
    local, like_this = own_part(param), own_part(known)
    keys, context = like_this.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {key: make(key, getattr(like_this, key)) for key in keys}
    if any(tensor is None for tensor in inner.values()):
        return None
    stride = torch.empty(local.shape, device="meta").stride()
    made: torch.Tensor = type(like_this).__tensor_unflatten__(inner, context, local.shape, stride)  # type: ignore[attr-defined]
    return placed_like(param, made)


def plain_like(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns an empty plain tensor with a parameter's shape and placement."""
    if not is_subclass(param):
        return torch.empty_like(param, dtype=dtype, requires_grad=False)
    local = own_part(param)
    return placed_like(param, torch.empty(local.shape, dtype=dtype, device=local.device))


def placed_like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Returns a DTensor around this rank's own tensor if the other is a DTensor."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
