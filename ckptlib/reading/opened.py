"""A committed step, opened without a state to be filled: safetensors' `safe_open` for checkpoints."""

from __future__ import annotations

import difflib
import math
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self, override

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.resolving import resolve_manifest
from ckptlib.errors import StateMismatch, UnsupportedState
from ckptlib.format import dtypes, values
from ckptlib.format.box import Box
from ckptlib.format.keys import checked_step
from ckptlib.format.layout import TensorEntry, TensorSpec
from ckptlib.format.manifest import Manifest
from ckptlib.format.values import Json
from ckptlib.reading import frameworks
from ckptlib.reading.arrays import ArrayReader, Raw, empty
from ckptlib.reading.committed import Committed
from ckptlib.reading.reader import Want
from ckptlib.reading.saved_names import SavedNames
from ckptlib.reading.slices import cut
from ckptlib.stores import Store, open_store, url_text


def open(
    url: str | Path,
    step: int | str = "latest",
    framework: str | None = None,
    *,
    rank: int = 0,
    storage_options: Mapping[str, object] | None = None,
) -> CheckpointReader:
    """Opens a committed step to read tensors and values by name, in any process, without the state's own classes.

        with ckptlib.open("s3://bucket/run7") as step:
            head = step.get_tensor("model/lm_head.weight")
            rows = step.get_slice("model/embedding.weight")[:1000]

    Reads a few documents now, and later only the ranges of bytes that are asked for; every chunk is compared with its
    digest. Needs no process group, and no torch for `framework="numpy"`.

    step:      a number, "latest", "best", or a name as `ckptlib ls --json` prints it.
    framework: "pt" or "numpy": the kind of result. Default: torch's tensors if torch is installed.
    rank:      the rank whose values and tensors are read, of those that each rank had of its own (`PerRank`, RNG
               state).

    Raises CheckpointNotFound; CorruptData and FormatError for damaged documents; StoreError.
    """
    step = step if isinstance(step, str) else checked_step(step)
    framework = frameworks.framework_of(framework)
    store = open_store(url_text(url), storage_options)
    try:
        catalog = Catalog(store)
        manifest = resolve_manifest(catalog, step)
        return CheckpointReader(store, catalog, manifest, framework, rank)
    except BaseException:
        store.close()
        raise


class CheckpointReader:
    """An opened step, made by `open`. Any thread may call it; it does one read at a time, by several requests. So may a
    forked child, if the store can be used there."""

    def __init__(self, store: Store, catalog: Catalog, manifest: Manifest, framework: str, rank: int) -> None:
        if not 0 <= rank < manifest.world_size:
            raise ValueError(
                f"rank={rank}: step {manifest.save.step} was saved by ranks 0 to {manifest.world_size - 1}"
            )
        self._store, self._catalog, self._manifest = store, catalog, manifest
        self._framework = framework
        self._reader = ArrayReader(Committed(catalog, manifest), rank)
        self._saved = SavedNames(self._reader)
        self._lock = threading.Lock()
        _readers.add(self)

    @property
    def step(self) -> int:
        """Number of the step."""
        return self._manifest.save.step

    @property
    def url(self) -> str:
        """URL of its root, without credentials."""
        return self._store.url

    @property
    def nbytes_read(self) -> int:
        """Bytes of packs that were read so far."""
        return self._reader.nbytes_read

    @property
    def rounded(self) -> Mapping[str, float]:
        """Bounds of the errors of tensors read so far that `codec=Lossy` had rounded: see `LoadReport.rounded`."""
        return dict(self._reader.rounded)

    def keys(self) -> list[str]:
        """Returns the names of all tensors, sorted; of a tensor with several, such as tied weights, all of them."""
        return sorted(self._saved.tensors)

    def aliases(self) -> dict[str, str]:
        """Returns further names of tensors, each with the name that the data is saved under."""
        return {name: entry.name for name, entry in self._saved.tensors.items() if name != entry.name}

    def metadata(self) -> dict[str, object]:
        """Returns properties of the step: url, step, name, created (seconds since the epoch), world_size, metrics."""
        manifest = self._manifest
        return {
            "url": self._store.url,
            "step": self.step,
            "name": str(manifest.save),
            "created": manifest.created,
            "world_size": manifest.world_size,
            "metrics": {name: values.decode(value, name) for name, value in manifest.metrics.items()},
        }

    @cached_property
    def values(self) -> Mapping[str, object]:
        """All plain values by name; this rank's own, else those of the first rank that has them.

        Each is decoded when it is asked for. Raises UnsupportedState for one that only torch can make, without torch.
        """
        with self._lock:
            return Values(self._saved.all_values())

    @property
    def trees(self) -> Mapping[str, Json]:
        """Trees by path: how to build the state of objects that hold tensors, as FORMAT.md says."""
        return self._saved.objects

    def groups(self, path: str) -> dict[str, int]:
        """Returns the names of an optimizer's parameters on all ranks, each with the position of its group."""
        return {name: group.index for name, group in self._saved.groups.get(path, {}).items()}

    def get_tensor(self, name: str) -> Any:
        """Reads a whole tensor.

        Raises StateMismatch for a name that is no tensor's, UnsupportedState for a dtype that the framework lacks,
        CorruptData that names the tensor, StoreError, NoRoom.
        """
        return self.get_tensors([name])[name]

    def get_tensors(self, names: Iterable[str]) -> dict[str, Any]:
        """Reads several tensors in parallel; names of one tensor share its memory."""
        entries = {name: self._entry(name) for name in names}
        for name, entry in entries.items():
            frameworks.check(self._framework, name, entry.dtype)
        found = self.get_raw({entry.name: Box.whole(entry.shape) for entry in entries.values()})
        shown = {name: frameworks.present(self._framework, name, raw) for name, raw in found.items()}
        return {name: shown[entry.name] for name, entry in entries.items()}

    def get_slice(self, name: str) -> Slice:
        """Returns a tensor that is read in part when it is indexed; reads nothing now."""
        return Slice(self, name, self._entry(name))

    def spec(self, name: str) -> TensorSpec:
        """Returns the shape and dtype (torch's name) of a tensor; reads nothing. Raises StateMismatch."""
        return self._entry(name)

    def read_once(self) -> None:
        """Announces that much is read from now on, and only once: a local disk leaves the page cache to others."""
        self._store.reads_once = True

    def chunk_begins(self, name: str) -> list[int]:
        """Returns flat positions at which a tensor is best cut: see `StepReader.chunk_begins`. Raises StateMismatch."""
        entry = self._entry(name)
        with self._lock:
            return self._reader.chunk_begins(entry.name)

    def fill(self, wants: Sequence[Want[Raw]]) -> None:
        """Fills boxes of tensors, in parallel; any of a tensor's names will do."""
        own = [Want(self._entry(want.name).name, want.pieces) for want in wants]
        with self._lock:
            self._reader.read(own, lambda nbytes: None)

    def check_there(self, name: str, box: Box | None = None) -> None:
        """Checks that packs have as much as documents say, before memory or a disk is filled with a large tensor.

        Raises CorruptData, FormatError, StoreError.
        """
        entry = self._entry(name)
        with self._lock:
            self._reader.check_there(entry.name, box or Box.whole(entry.shape), dtypes.itemsize(entry.dtype))

    def _entry(self, name: str) -> TensorEntry:
        found = self._saved.tensors.get(name)
        if found is not None:
            return found
        below = f"{name}/"
        if name in self.values:
            why = "it is a plain value, see values"
        elif any(other.startswith(below) for other in self._saved.tensors):
            why = f"it holds {sum(other.startswith(below) for other in self._saved.tensors)} tensors: see keys()"
        else:
            close = difflib.get_close_matches(name, self._saved.tensors, 3)
            why = f"did you mean {' or '.join(close)}?" if close else "keys() lists those that there are"
        raise StateMismatch(f"{name}: no tensor of step {self.step} of {self._store.url} has this name; {why}")

    def get_raw(self, boxes: Mapping[str, Box]) -> dict[str, Raw]:
        """Reads the bytes of a box of each tensor, whatever its dtype. Returns them by name."""
        for name, box in boxes.items():
            self.check_there(name, box)
        found = {name: empty(name, self._entry(name).dtype, box.shape) for name, box in boxes.items()}
        wants = [Want(name, ((boxes[name], raw),)) for name, raw in found.items() if raw.array.size]
        if wants:
            self.fill(wants)
        return found

    def close(self) -> None:
        """Ends the connection to the store. Tensors that were read stay valid."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_readers: weakref.WeakSet[CheckpointReader] = weakref.WeakSet()


def _renew_locks() -> None:
    """Renews the locks in a forked child, whose one thread would wait for ever for a read under way in another."""
    for reader in _readers:
        reader._lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_renew_locks)


class Values(Mapping[str, object]):
    """Plain values by name, each decoded when it is asked for."""

    def __init__(self, saved: Mapping[str, Json]) -> None:
        self._saved = saved

    @override
    def __getitem__(self, name: str) -> object:
        saved = self._saved[name]
        try:
            return values.decode(saved, name)
        except ModuleNotFoundError as error:
            raise UnsupportedState(
                f"{name}: the value is one of {error.name}'s own types, and {error.name} is not installed; install it, "
                "or ask for other values by only="
            ) from error

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._saved)

    @override
    def __len__(self) -> int:
        return len(self._saved)

    @override
    def __repr__(self) -> str:
        return f"<{len(self)} values: {', '.join(list(self)[:10])}{', ...' if len(self) > 10 else ''}>"


class Slice:
    """A tensor of an opened step, to be read in part: `reader.get_slice(name)[:10, ...]`."""

    def __init__(self, reader: CheckpointReader, name: str, entry: TensorEntry) -> None:
        self._reader, self._name, self._entry = reader, name, entry

    def get_shape(self) -> list[int]:
        """Returns the shape of the whole tensor, over all ranks."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """Returns safetensors' name, such as "BF16"; torch's name if safetensors has none."""
        dtype = self._entry.dtype
        return dtypes.safetensors_name(dtype) if dtypes.has_own_word(dtype) else dtype

    def __getitem__(self, index: object) -> Any:
        """Reads the chunks that hold the indexed elements, and returns these; steps of slices are at least 1.

        The elements between the steps are in memory until this returns.

        Raises what `get_tensor` raises, and IndexError outside of the tensor.
        """
        framework = self._reader._framework
        frameworks.check(framework, self._name, self._entry.dtype)
        box, inside = cut(self._name, self._entry.shape, index)
        raw = self._reader.get_raw({self._name: box})[self._name]
        found = frameworks.present(framework, self._name, raw)[inside]
        return found if math.prod(found.shape) == box.numel else frameworks.copied(framework, found)
