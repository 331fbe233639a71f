"""The shuffled order of an epoch, computed place by place. Pure integers: no torch, no I/O.

A Feistel network works on the smallest even number of bits that holds the length; results beyond the length are sent
through again until they are below it (cycle walking: Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
Each place of the order is found without the others, so a resume skips at no cost and 10**12 items need no list. It uses
only 64-bit integers and SHA-512: a checkpoint in the middle of an epoch is valid only with the order it was written
with, and the shuffles of torch, numpy and Python may change between versions.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

SHUFFLED = "feistel-8"
"""The name of this order in checkpoints. Another order needs another name."""

MAX_LENGTH = 2**62

_MIN_HALF_BITS = 3
"""The least bits of a half. Smaller halves have too few round functions: permutations of five items come out
unevenly."""


def shuffled(places: NDArray[np.uint64], length: int, seed: int, epoch: int) -> NDArray[np.uint64]:
    """Returns the items at these places of the epoch's order; a permutation of range(length). `places` are below
    `length`."""
    half_bits = max(_MIN_HALF_BITS, ((length - 1).bit_length() + 1) // 2)
    keys = np.frombuffer(hashlib.sha512(f"{seed} {epoch}".encode()).digest(), "<u8").astype(np.uint64)
    items = _permuted(places, half_bits, keys)
    while (outside := items >= length).any():
        items[outside] = _permuted(items[outside], half_bits, keys)
    return items


def _permuted(values: NDArray[np.uint64], half_bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Maps [0, 4 ** half_bits) onto itself, with one round per key."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for i in range(len(keys)):
        left, right = right, left ^ (_mixed(right + keys[i : i + 1]) & mask)
    return (left << shift) | right


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Applies the finaliser of SplitMix64: every bit of `x` flips about half of the bits of the result."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
