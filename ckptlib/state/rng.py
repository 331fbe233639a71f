"""The state of the process's random number generators as tensors, so that draws go on where they stopped.

Covers what training draws from without being handed a generator: Python's `random`, numpy's legacy global
`numpy.random`, torch's default CPU generator, and the default generators of the accelerator. Each is one uint8 tensor:

    python     2513 bytes   uint32 version (3), 624 uint32 words, uint32 position, uint8 has gauss, float64 gauss
    numpy      2512 bytes   624 uint32 words, uint32 position, uint32 has gauss, float64 gauss
    torch                   what torch.get_rng_state() gives
    cuda                    the current device; likewise xpu, mps
    cuda:<n>                the other devices, when the process sees several

The first two are little-endian, without padding; the float is 0 when there is none. The current device has a name of
its own because its index may be another one when the job is resumed.
"""

from __future__ import annotations

import hashlib
import logging
import random
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

import numpy as np
import torch

from ckptlib.devices import accelerator
from ckptlib.errors import FormatError, StateMismatch, UnsupportedState

_log = logging.getLogger(__name__)

RNG = "@rng"
"""The name of the generators' states, beside the user's own names."""

_PYTHON = struct.Struct("<I625IBd")
_NUMPY = struct.Struct("<624IIId")
_NUMPY_TAIL = struct.Struct("<IId")


def is_random(name: str) -> bool:
    """Returns whether a name of the whole state is that of the generators, or of one of them."""
    return name.partition("/")[0] == RNG


class RngState:
    """The generators of this process as a member of the state that is saved: for each rank its own."""

    def __init__(self) -> None:
        self._given: dict[str, torch.Tensor] = {}
        self.restored: LoadedRng | None = None
        """What the generators were put back to, which is saved whatever was drawn since; None to save them as they
        are."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the generators' states. The tensors are the same objects at every call, and hold the newest state, so
        a plan stays valid."""
        state = capture()
        if self.restored is not None:
            state |= {name: kept for name, kept in self.restored.loaded().items() if name in state}
        for name, new in state.items():
            given = self._given.get(name)
            if given is None or given.shape != new.shape:
                self._given[name] = new.clone()  # restored states are put back later, whatever is saved meanwhile
            else:
                given.copy_(new)
        return {name: self._given[name] for name in state}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        restore(state)


class LoadedRng:
    """The saved state of the random generators, until it is put back."""

    def __init__(self, rank: int, world_size: int) -> None:
        """`world_size`: the saved one; a rank beyond it has no state of its own and derives one from rank 0's."""
        self._rank = rank
        self._world_size = world_size
        self._state: dict[str, torch.Tensor] | None = None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the tensors to fill: in host memory, wherever the script has new tensors made."""
        with suppress(UnsupportedState):  # then it cannot be put back, but maybe nobody asks for that
            return capture()
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        if self._rank >= self._world_size:
            if self._rank == self._world_size:  # one line for all of them: there may be hundreds
                _log.warning(
                    "the checkpoint of %d ranks has no RNG state for ranks %d and up; each derives one from rank 0's",
                    self._world_size,
                    self._world_size,
                )
            state = derive(state, self._rank)
        self._state = state

    def loaded(self) -> Mapping[str, torch.Tensor]:
        """Returns what `restore` puts back; empty if the step has none."""
        return self._state or {}

    def restore(self) -> None:
        """Puts the generators back; each time to the same state.

        Raises StateMismatch for a state that this process cannot take. That is no damage: an older step would be no
        better.
        """
        try:
            if self._state is not None:
                restore(self._state)
        except FormatError as error:
            raise StateMismatch(
                f"{error}; it was saved by other versions, or on another kind of device. To resume without RNG state, "
                "call ckptlib.load(url, state), which leaves the generators alone, instead of Checkpointer.restore()"
            ) from error


def capture() -> dict[str, torch.Tensor]:
    """Returns the state of every generator, in new CPU tensors. Draws nothing.

    An accelerator that this process has not initialised is left out: nothing was drawn there. Raises UnsupportedState
    if numpy's global generator is not its MT19937.
    """
    state = {"python": _tensor(python_bytes()), "numpy": _tensor(_numpy_bytes()), "torch": torch.get_rng_state()}
    module = _accelerator_module()
    if module is not None and accelerator.is_initialized(module):
        state[_kind()] = module.get_rng_state()
        for index in _other_devices(module):
            state[f"{_kind()}:{index}"] = module.get_rng_state(index)
    return state


def restore(state: Mapping[str, torch.Tensor]) -> None:
    """Puts every generator into the given state. The tensors are not kept.

    Everything is checked before anything is set. A device that this process lacks is skipped with a warning. Raises
    StateMismatch if a generator that every process has is missing, FormatError for bytes that are no state.
    """
    missing = {"python", "numpy", "torch"} - state.keys()
    if missing:
        raise StateMismatch(f"random state: missing {sorted(missing)}, got {sorted(state)}")
    python = python_state(_bytes(state, "python"))
    numpy = _numpy_state(_bytes(state, "numpy"))
    _check_generator(state, "torch", "cpu")
    devices = _present_devices(state)
    for name in devices:
        _check_generator(state, name, name)

    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(state["torch"])
    for name in devices:
        torch.get_device_module(name).set_rng_state(state[name], name)


def derive(state: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Returns a state for a rank that has none, made from another rank's.

    It is always the same for the same arguments, and different for each rank given the same `state`, even in the 32
    bits of a seed that torch's CPU generator uses. The global generators are not touched. Devices that this process
    lacks are left out.
    """
    seeds = {name: _seed(state, name, rank) for name in state}
    derived = {
        "python": _tensor(python_bytes(random.Random(seeds["python"]))),
        "numpy": _tensor(_numpy_bytes(np.random.RandomState(list(divmod(seeds["numpy"], 2**32))))),
        "torch": torch.Generator("cpu").manual_seed(seeds["torch"]).get_state(),
    }
    for name in _present_devices(state):
        derived[name] = torch.Generator(name).manual_seed(seeds[name]).get_state()
    return derived


def _seed(state: Mapping[str, torch.Tensor], name: str, rank: int) -> int:
    # The rank is added, not hashed: hashes of many ranks collide in 32 bits (3 % at 16384 ranks), sums do not.
    digest = hashlib.sha256(name.encode())
    for key in sorted(state):
        digest.update(hashlib.sha256(_bytes(state, key)).digest())
    return (int.from_bytes(digest.digest()[:8], "little") + rank) % 2**64


# -- Python and numpy --


def python_bytes(source: random.Random | None = None) -> bytes:
    """Returns the state of a generator, or of the global one."""
    version, words, gauss = random.getstate() if source is None else source.getstate()
    return _PYTHON.pack(version, *words, gauss is not None, gauss or 0.0)


def python_state(data: bytes) -> tuple[int, tuple[int, ...], float | None]:
    """Returns the arguments of `setstate()`. Raises FormatError for bytes that are no state."""
    version, *words, position, has_gauss, gauss = _unpack(_PYTHON, data, "python")
    if version != random.Random.VERSION:
        raise FormatError(f"random state of python: expected version {random.Random.VERSION}, got {version}")
    _check_twister(words, position, has_gauss, "python")
    return version, (*words, position), gauss if has_gauss else None


def _numpy_bytes(source: np.random.RandomState | None = None) -> bytes:
    state = np.random.get_state(legacy=False) if source is None else source.get_state(legacy=False)
    assert isinstance(state, dict)
    if state["bit_generator"] != "MT19937":
        raise UnsupportedState(
            f"random state of numpy: its global generator was replaced by {state['bit_generator']}, expected MT19937; "
            "use numpy.random.Generator objects and save their bit_generator.state"
        )
    words, position = state["state"]["key"], state["state"]["pos"]
    head: bytes = words.astype("<u4").tobytes()
    return head + _NUMPY_TAIL.pack(position, state["has_gauss"], state["gauss"])


def _numpy_state(data: bytes) -> tuple[str, np.ndarray[tuple[int], np.dtype[np.uint32]], int, int, float]:
    *words, position, has_gauss, gauss = _unpack(_NUMPY, data, "numpy")
    _check_twister(words, position, has_gauss, "numpy")
    return "MT19937", np.array(words, dtype=np.uint32), position, has_gauss, gauss


def _check_twister(words: Sequence[int], position: int, has_gauss: int, name: str) -> None:
    # Beyond its words numpy reads foreign memory; from words of zeros come only zeros, and normals loop for ever.
    if position > len(words) or has_gauss > 1 or not any(words):
        raise FormatError(
            f"random state of {name}: expected position <= {len(words)}, gauss flag <= 1 and words that are not all 0, "
            f"got position {position}, flag {has_gauss}"
        )


def _unpack(layout: struct.Struct, data: bytes, name: str) -> tuple[Any, ...]:
    if len(data) != layout.size:
        raise FormatError(f"random state of {name}: expected {layout.size} bytes, got {len(data)}")
    return layout.unpack(data)


# -- torch --


def _kind() -> str:
    device = accelerator.available()
    return "" if device is None else device.type


def _accelerator_module() -> ModuleType | None:
    kind = _kind()
    return torch.get_device_module(kind) if kind else None


def _other_devices(module: ModuleType) -> list[int]:
    count = module.device_count()
    return [i for i in range(count) if i != module.current_device()] if count > 1 else []


def _present_devices(state: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns the names of devices in `state` that this process has; the current one comes last, to win over its
    index."""
    names = sorted(state.keys() - {"python", "numpy", "torch"}, reverse=True)
    here = {_kind(), *(f"{_kind()}:{index}" for index in range(torch.accelerator.device_count()))} - {""}
    skipped = [name for name in names if name not in here]
    if skipped:
        _log.warning("random state of %s skipped: this process has no such device", ", ".join(skipped))
    return [name for name in names if name in here]


def _check_generator(state: Mapping[str, torch.Tensor], name: str, device: str) -> None:
    data = _bytes(state, name)
    try:
        torch.Generator(device).set_state(state[name])
    except RuntimeError as error:
        raise FormatError(f"random state of {name}: {len(data)} bytes that torch refuses: {error}") from error


# -- bytes --


def _tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))


def _bytes(state: Mapping[str, torch.Tensor], name: str) -> bytes:
    data = state[name]
    if not isinstance(data, torch.Tensor) or data.dtype != torch.uint8 or data.ndim != 1 or data.device.type != "cpu":
        raise FormatError(f"random state of {name}: expected a 1-d uint8 tensor in host memory, got {data!r:.200}")
    return data.numpy().tobytes()
