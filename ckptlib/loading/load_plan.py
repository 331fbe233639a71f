"""The plan of a load: which saved tensor or value each name of the state gets, and which names are missing or do not
fit.

Knows tensors and values only. `ckptlib.loading.trees` makes objects of these, `ckptlib.loading.match` and
`ckptlib.loading.match_optimizers` modules and optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeGuard

import torch

from ckptlib.errors import StateMismatch
from ckptlib.format import tagged_values
from ckptlib.format.layout import OwnPerRank, Placed, TensorEntry
from ckptlib.format.paths import below_any
from ckptlib.format.sharding import Replicate
from ckptlib.format.values import Json
from ckptlib.loading.aliases import place, repeats
from ckptlib.loading.selection import Selection
from ckptlib.loading.targets import Targets
from ckptlib.reading.reader import Want
from ckptlib.reading.saved_names import SavedNames
from ckptlib.state.leaf import (
    Leaf,
    PerRank,
    Plain,
    Sharded,
    dtype_name,
    is_converted,
    is_elsewhere,
    leaf_of,
    local_of,
    refuse_freed,
    torch_dtype,
)
from ckptlib.state.subclasses import apart, difference, is_subclass, kind_in, place_name
from ckptlib.state.wrappers import is_extra_state

Setter = Callable[[object], None] | None

Make = Callable[[str, TensorEntry, object], torch.Tensor | Sharded]
"""Makes memory to fill with a saved tensor: from its path, its entry, and the object's own value, which does not
fit."""


class Filler(NamedTuple):
    """The saved tensor that fills a tensor of the state."""

    tensor: object
    """Kept alive, so that no other tensor gets its id."""
    saved_name: str
    """Name of the saved tensor."""


class LoadPlan:
    """Collects the targets of a load; changes nothing yet."""

    def __init__(self, saved: SavedNames, asked: Selection, cast: bool) -> None:
        self.saved, self._asked = saved, asked
        self.named, self.wanted = asked.named, asked.wanted
        self.cast = cast
        self._wants: list[Want[torch.Tensor]] = []
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._mismatched: list[str] = []
        self._kinds: dict[str, str] = {}
        """Message by missing name, if the checkpoint has another kind of entry there."""
        self._notes: dict[str, str] = {}
        """Message with more detail, by name that only one side has."""
        self._plain: set[str] = set()
        """Names, mostly of plain values, that one side lacks and that were not asked for by themselves."""
        self._foreign: dict[str, str] = {}
        self._values: dict[str, object] = {}
        self._finish: list[Callable[[], object]] = []
        self._used: set[str] = set()
        """Names of the checkpoint that were taken."""
        self._filled: dict[int, Filler] = {}
        """Fillers by id of a tensor of the state."""
        self._begins: dict[int, tuple[Leaf, str]] = {}
        """By address: the first leaf that begins there, and the saved tensor that fills it."""
        self._places: dict[Hashable, str] = {}
        """The saved tensor that fills a place in memory, for places that begin where another does. Two tensors of the
        state may have the same memory."""
        self._apart: set[str] = set()
        """See `Targets.apart`."""
        self.alone: list[str] = []
        """See `Targets.alone`."""

    def targets(self, tops: Sequence[str] = ()) -> Targets:
        """Returns everything that was collected. `tops`: the first level of the state's names."""
        for want in self._wants:  # `state_dict()` of a module that was met later may have freed the memory to fill
            for _, piece in want.pieces:
                refuse_freed(piece, want.name)
        idle, unused = self._asked.idle(), [*self._unexpected, *self._never_used()]
        if self._asked.patterns is None:
            saved = self.saved.values
            self._plain.update(name for name in unused if name in saved and is_plain_value(name, saved[name]))
        lacked = {*self._missing, *unused, *self._foreign}
        optional = {name for name in lacked if self._asked.is_optional(name)}
        return Targets(
            tuple(self._wants),
            tuple(self._missing),
            (*idle, *unused),
            tuple(self._mismatched),
            self._foreign,
            self._values,
            tuple(self._finish),
            {
                **self._notes,
                **self._kinds,
                **{name: why for name in idle if (why := self._asked.why_idle(name)) is not None},
            },
            frozenset(optional - self._kinds.keys() - {*idle}),
            frozenset(self._plain - self._kinds.keys() - {*idle}),
            self._used,
            tuple(tops) if self._asked.patterns is None else (),
            self._apart,
            tuple(self.alone),
        )

    def _never_used(self) -> Iterator[str]:
        """Yields all saved names that were not taken."""
        saved = self.saved
        in_object = below_any(saved.objects)
        for name in (*saved.tensors, *saved.values, *saved.objects):
            # the parts of an object that is loaded as a whole are taken, or not, with it
            if name not in self._used and self._asked.expects(name) and not in_object(name):
                yield name

    def is_used(self, saved_name: str) -> bool:
        return saved_name in self._used

    def use(self, saved_name: str) -> None:
        """Notes that a name of the checkpoint is taken."""
        self._used.add(saved_name)

    def miss(self, name: str, why: str | None = None) -> None:
        """Notes a name that the state has and the checkpoint lacks. `why`: a message that tells more."""
        self._missing.append(name)
        if why is not None:
            self._notes[name] = why

    def excuse(self, name: str) -> None:
        """Notes that lacking this name is no reason to refuse the rest, unless it was asked for by itself."""
        if not self._asked.is_asked_for(name):
            self._plain.add(name)

    def miss_kind(self, name: str, saved_name: str, here: str) -> bool:
        """Returns whether the checkpoint has another kind of entry, and notes it. `here`: the kind in the state."""
        saved = self.saved
        if saved_name in saved.tensors:
            entry = saved.tensors[saved_name]
            there = f"a tensor, {entry.dtype}{list(entry.shape)}"
        elif saved_name in (at := saved.values_at(saved_name)):
            there = f"a plain value, {tagged_values.brief(at[saved_name])}"
        elif saved_name in saved.objects:
            there = "an object's state"
        else:
            return False
        self.use(saved_name)
        self._kinds[name] = f"{name}: is {here} in the state; the checkpoint has {there}. Make it the same kind"
        self.miss(name)
        return True

    def leave(self, saved_name: str, why: str | None = None) -> None:
        """Notes a name that the checkpoint has and the state lacks; unused names are found without this. `why`: a
        message that tells more."""
        self._unexpected.append(saved_name)
        if why is not None:
            self._notes[saved_name] = why

    def leave_foreign(self, saved_name: str, why: str) -> None:
        """Does what `leave` does, for state that no optimizer of this rank understands, whatever others say."""
        self._foreign[saved_name] = why

    def mismatch(self, text: str) -> None:
        """Notes that something does not fit; `text` begins with its name."""
        self._mismatched.append(text)

    def then(self, action: Callable[[], object]) -> None:
        """Adds a call for when everything is filled; calls are made in the order given."""
        self._finish.append(action)

    def fill(self, leaf: Leaf | None, entry: TensorEntry) -> None:
        """Wants this rank's pieces of a tensor, if it has any, filled with a saved tensor that fits."""
        if leaf is None:
            return
        if not leaf.pieces or not self._tie(entry.name, self._filler(leaf, entry.name), leaf, entry):
            self._wants.append(want(leaf, entry))

    def _filler(self, leaf: Leaf, saved_name: str) -> str:
        """Returns the saved tensor that fills this memory: this one, unless another does already."""
        first, its_name = self._begins.setdefault(leaf.pieces[0][1].data_ptr(), (leaf, saved_name))
        if first is leaf:  # nearly all leaves: only a few need a place
            return saved_name
        self._places.setdefault(place(first.pieces), its_name)
        return self._places.setdefault(place(leaf.pieces), saved_name)

    def _tie(self, name: str, first: str, leaf: Leaf, entry: TensorEntry) -> bool:
        """Returns whether `first`, another saved tensor, fills the same memory; notes a mismatch of their values."""
        if first == entry.name:
            return False
        if not self.saved.same(first, entry.name, [box for box, _ in leaf.pieces]):
            self.mismatch(
                f"{name}: is tied to what {first} fills, but the checkpoint has different values for them; load them "
                "into tensors of their own"
            )
        return True

    def add_tensor(self, tensor: torch.Tensor | Sharded, name: str) -> None:
        """Plans to fill a tensor of the state in place."""
        if not self.wanted(name):
            return
        saved_name = self.named(name)
        if is_subclass(tensor):
            if not is_elsewhere(tensor):
                self.fill_subclass(tensor, name, saved_name, kind_in(self.saved.objects.get(saved_name)))
            elif saved_name in self.saved.objects:
                self.use(saved_name)
        else:
            self._fill(tensor, name, saved_name, self.cast)

    def fill_subclass(self, tensor: torch.Tensor, name: str, saved_name: str, kind: Mapping[str, Json] | None) -> None:
        """Plans to fill the inner tensors of an instance, if it is of the kind that was saved.

        Their dtypes must match even if `cast` is set: a class interprets them together.
        """
        if kind is None:
            if saved_name in self.saved.tensors:
                self.use(saved_name)
                cls = apart(tensor, name).kind["class"]
                self.mismatch(f"{name}: target is a {cls}, the checkpoint has a plain tensor")
            else:
                self.miss(name)
            return
        self.use(saved_name)
        target = apart(tensor, name)
        different = difference(target.kind, kind)
        if different is not None:
            self.mismatch(f"{name}: {different}")
            return
        if target.at is not None:
            at = place_name(saved_name)
            self.use(at)
            if self.saved.values.get(at) != target.at:
                self.mismatch(
                    f"{name}: the checkpoint keeps another shard of it for this rank, and what it is made of cannot be "
                    "resharded: load it with the ranks and the process group that it was saved with"
                )
                return
        for below, inner in target.tensors:
            self._fill(inner, f"{name}/{below}", f"{saved_name}/{below}", cast=False)
        self._filled.setdefault(id(tensor), Filler(tensor, saved_name))

    def _fill(self, tensor: torch.Tensor | Sharded, name: str, saved_name: str, cast: bool) -> None:
        entry = self.saved.tensors.get(saved_name)
        if entry is None:
            kind = kind_in(self.saved.objects.get(saved_name))
            if kind is not None:
                self.use(saved_name)
                self.mismatch(f"{name}: target is a plain tensor, the checkpoint has a {kind.get('class')}")
            elif not is_elsewhere(tensor) and not self.miss_kind(name, saved_name, "a tensor"):
                self.miss(name)  # if it is elsewhere, the ranks of its mesh report it
            return
        self.use(saved_name)
        leaf = leaf_of(tensor, name, per_rank=False, owner=None)
        if leaf is None:
            return
        converts = cast and is_converted(torch_dtype(entry.dtype), torch_dtype(leaf.dtype))
        if leaf.shape != entry.shape or (leaf.dtype != entry.dtype and not converts):
            why = "; cast=True does not convert these dtypes" if cast and not converts else ""
            here, there = f"{leaf.dtype}{list(leaf.shape)}", f"{entry.dtype}{list(entry.shape)}"
            self.mismatch(f"{name}: target is {here}, checkpoint has {there}{why}")
            return
        first = self._filled.get(id(tensor))
        if first is None:
            self._filled[id(tensor)] = Filler(tensor, entry.name)
            self.fill(leaf, entry)
        else:  # tied: filled once
            self._tie(name, first.saved_name, leaf, entry)

    def fills(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor of the state is going to be filled."""
        return id(tensor) in self._filled

    def add_value(self, path: str, setter: Setter) -> None:
        if not self.wanted(path):
            return
        name = self.named(path)
        if name not in self.saved.values_at(name):
            if not self.miss_kind(path, name, "a plain value"):
                self.miss(path)
                self.excuse(path)
            return
        value = self.take_value(path)
        if setter is not None:
            self.then(partial(setter, value))

    def take_value(self, path: str) -> object:
        """Returns the saved value of a name of the state; the report lists it."""
        name = self.named(path)
        self.use(name)
        value = self._values[path] = self.saved.value(name)
        return value

    def add_generator(self, generator: torch.Generator, path: str) -> None:
        state = generator.get_state()
        self.add_tensor(state, path)
        self._apart.add(path)
        if self.fills(state):
            self.then(partial(generator.set_state, state))

    def tensor_for(self, path: str, now: object, make: Make) -> torch.Tensor:
        """Returns a tensor to fill: the one that the object has if it fits, else one that `make` returns."""
        entry = self.saved.tensors.get(path)
        if entry is None:
            raise StateMismatch(f"{path}: the checkpoint has this tensor for other ranks alone, or not at all")
        if isinstance(now, PerRank):
            now = now.value
        if isinstance(now, Sharded):
            self._fill(now, path, path, self.cast)
            return now.tensor
        self.use(path)
        if fits(now, entry) and self._filled.setdefault(id(now), Filler(now, entry.name)).saved_name == entry.name:
            target: torch.Tensor | Sharded = now
        else:  # also if the object has one tensor in two places, and the checkpoint has two
            target = make(path, entry, now)
        self.fill(leaf_of(target, path, per_rank=False, owner=None), entry)
        return local_of(target)


def is_plain_value(name: str, value: Json) -> bool:
    """Returns whether a saved value was an entry of the state itself. Containers are walked: one is an object's."""
    if isinstance(value, dict):
        return len(value) == 1 and next(iter(value)).startswith("$") and not value.keys() & _CONTAINERS
    return not isinstance(value, list) and not is_extra_state(name.rpartition("/")[2])


_CONTAINERS = {"$dict", "$odict", "$counter", "$tuple"}


def want(leaf: Leaf, entry: TensorEntry) -> Want[torch.Tensor]:
    """Returns the want of a leaf. Raises StateMismatch, before anything is read, if torch does not know the dtype."""
    torch_dtype(entry.dtype)
    plain = isinstance(leaf.held, Plain) and not isinstance(entry.holding, OwnPerRank)
    return Want(entry.name, leaf.pieces, everywhere=plain and bool(leaf.pieces), outer=leaf.outer)


def fits(now: object, entry: TensorEntry) -> TypeGuard[torch.Tensor]:
    """Returns whether a tensor can be filled in place, and updated afterwards."""
    if not isinstance(now, torch.Tensor) or is_subclass(now) or now.is_meta or now.is_inference() or repeats(now):
        return False
    return (tuple(now.shape), dtype_name(now)) == (entry.shape, entry.dtype)


def is_whole(entry: TensorEntry) -> bool:
    """Returns whether each rank that had it had all of it."""
    return isinstance(entry.holding, Placed) and {*map(type, entry.holding.placements)} == {Replicate}


def made(entry: TensorEntry, device: torch.device | None) -> torch.Tensor:
    """Returns a tensor of the saved shape and dtype. Raises StateMismatch if there is no room for it."""
    with room_for(entry):
        return torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device=device)


@contextmanager
def room_for(entry: TensorEntry) -> Iterator[None]:
    """Raises StateMismatch if there is no room for a tensor that is made within."""
    try:
        yield
    except RuntimeError as error:  # also OutOfMemoryError, and strides beyond 64 bits beside a 0
        raise StateMismatch(f"{entry.name}: no room for {entry.dtype}{list(entry.shape)}: {error}") from error
