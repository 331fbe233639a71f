"""NVIDIA's resiliency extension (NVRx): snapshots in the memory of a host, and in that of its peers, without CUDA.

It is made for tensors on a device. What stands in for that here: a state dict of host memory, and messages that take no
detour by a device. All else is its own: what it sends, in which order, and the files that it writes and reads. Its
saves wait until all is written; the asynchronous ones need CUDA, and send the replicas before they return, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvidia_resiliency_ext.checkpointing.local.replication.group_utils import GroupWrapper
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy
from typing_extensions import override

from benchmarks import states
from benchmarks.states import State


class Nvrx:
    """Every rank keeps the snapshots of all. Collective."""

    def __init__(self, directory: Path) -> None:
        """`directory`: of this rank's host, in memory."""
        group = _Group(dist.new_group(backend="gloo"))
        self._manager = LocalCheckpointManager(directory, repl_strategy=CliqueReplicationStrategy(group))

    def save(self, state: State, step: int) -> None:
        """Returns when the snapshot is whole here and at the peers."""
        self._manager.save(_HostState(dict(states.local(state))), step)

    def load(self, state: State) -> int:
        """Fills `state` in place; returns the step."""
        step: int = self._manager.find_latest()
        found, _ = self._manager.load()
        for name, target in states.local(state).items():
            target.copy_(found.held[name])
        return step


class _Group(GroupWrapper):
    """Messages out of host memory and into it."""

    @override
    def isend_state_dict(self, state_dict: _HostState, dst: int) -> dict[str, float]:
        tensors = state_dict.pop_tensors()
        self.send_object(state_dict, dst)
        for tensor in tensors:
            dist.send(tensor, dst, group=self.group)
        state_dict.insert_tensors(tensors)
        return {"data_sent": sum(tensor.nbytes for tensor in tensors)}

    @override
    def irecv_state_dict(self, src: int) -> tuple[_HostState, dict[str, float]]:
        found: _HostState = self.recv_object(src)
        found.init_tensors()
        for tensor in found.tensors:
            dist.recv(tensor, src, group=self.group)
        return found, {"data_recv": sum(tensor.nbytes for tensor in found.tensors)}


class _HostState(TensorAwareStateDict):
    """Tensors of host memory by name; hollow while only their shapes are there."""

    def __init__(self, held: State) -> None:
        self.held: dict[str, Any] = held
        self._hollow = False

    @override
    def pop_tensors(self) -> list[torch.Tensor]:
        tensors = list(self.tensors)
        self.held = {name: torch.empty_like(tensor, device="meta") for name, tensor in self.held.items()}
        self._hollow = True
        return tensors

    @property
    @override
    def tensors(self) -> Any:
        return iter(self.held.values())

    @property
    @override
    def is_hollow(self) -> bool:
        return self._hollow

    @override
    def insert_tensors(self, tensor_data: list[torch.Tensor]) -> None:
        self.held = dict(zip(self.held, tensor_data, strict=True))
        self._hollow = False

    @override
    def init_tensors(self) -> None:
        self.insert_tensors([torch.empty_like(tensor, device="cpu") for tensor in self.held.values()])

    @override
    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        pass

    @override
    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        pass
