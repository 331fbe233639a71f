"""Digests whole tensors where they are: in host memory by xxh3, on a device by operations of torch.

Only the digests are brought from a device, all of them in one transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import xxhash

from ckptlib.devices import accelerator
from ckptlib.staging.pair import bytes_at
from ckptlib.state.raw_bytes import bytes_of, dense

_ROW_WORDS = 1 << 20
_ROWS_AT_ONCE = 4
"""4 Mi words of 4 bytes at a time: the products take 32 MiB of the device's memory."""


def digests_of(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Returns one digest for each tensor's elements in row-major order, in hex. Waits for devices, once for each."""
    found = [""] * len(tensors)
    on_devices: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        device = accelerator.device_of(tensor)
        if device is None:
            data = dense(tensor)
            found[i] = xxhash.xxh3_128_hexdigest(bytes_at(data.data_ptr(), data.nbytes) if data.nbytes else b"")
        else:
            on_devices.setdefault(device, []).append(i)
    for indices in on_devices.values():
        words = torch.stack([digest_there(tensors[i]) for i in indices]).cpu()
        for i, word in zip(indices, words.tolist(), strict=True):
            found[i] = f"{word % 2**64:016x}"
    return found


@torch.no_grad()
def digest_there(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an int64 without dimensions on the tensor's own device; enqueued on the current stream, and not waited
    for.

    Each 32-bit word is multiplied by a random 64-bit number, and the products are added modulo 2**64 (multilinear
    hashing: Carter and Wegman). Two words that differ in their highest bits only still differ in 33 bits of the sum.
    """
    data = bytes_of(dense(tensor))
    if data.storage_offset() % 4 or data.data_ptr() % 4:
        data = data.clone()
    spare = -data.numel() % 4
    if spare:
        data = torch.cat([data, data.new_zeros(spare)])
    words, weights = data.view(torch.int32), _weights(data.device)
    sums: list[torch.Tensor] = []
    whole = words.numel() // _ROW_WORDS
    for first in range(0, whole, _ROWS_AT_ONCE):
        rows = words[first * _ROW_WORDS : min(first + _ROWS_AT_ONCE, whole) * _ROW_WORDS].view(-1, _ROW_WORDS)
        sums += (rows.to(torch.int64) * weights).sum(1).unbind()
    tail = words[whole * _ROW_WORDS :]
    sums.append((tail.to(torch.int64) * weights[: tail.numel()]).sum())
    # each sum in halves: differences in the highest bits of two of them could cancel otherwise
    folded = torch.stack(sums)
    halves = torch.cat([folded & 0xFFFFFFFF, folded >> 32])
    # by powers of two: if every size had its own, others would evict it, and bringing it anew waits
    weights = _more_weights(data.device, 1 << halves.numel().bit_length())
    return (halves * weights[: halves.numel()]).sum()


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> torch.Tensor:
    return _random_words(1, _ROW_WORDS).to(device)


@lru_cache(maxsize=64)
def _more_weights(device: torch.device, count: int) -> torch.Tensor:
    return _random_words(2, count).to(device)


def _random_words(key: int, count: int) -> torch.Tensor:
    """Returns random words, the same on every rank."""
    return torch.from_numpy(np.random.Philox(key=key).random_raw(count).view(np.int64))
