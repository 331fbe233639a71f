"""Hashes the rows of a chunk, to tell which rows changed without the bytes that the rows had before.

The writer process does not hold the bytes of the chunk that a patch is made against. It keeps these hashes, 12 bytes
per row. A row that changed and hashes alike would be left out of the patch. The digest of the chunk would then refuse
the load: nothing wrong is ever loaded, but the step is lost. No check at save time could tell, for what the changed
rows were before is not known; `stand_in` proves the rest of a patch. So the hash must be one whose collisions are
proven to be rare, whatever the data. It is Multilinear (Lemire and Kaser, "Strongly universal string hashing is fast",
2014). With c[i] the 32-bit characters of a row, and m[i] random 64-bit keys:

    h = (m[0] + m[1] c[1] + m[2] c[2] + ... mod 2**64) >> 32

Two rows that differ, however little, hash alike with a probability of 2**-32 over the keys. Three such hashes, each
with its own keys, make it 2**-96. The keys are constants, so this holds for data that was not made from them. With 1e9
rows changed at each of 1e5 saves, which is 2**47 comparisons, the probability that any step is lost is 2**-49. It would
be 2**-17 for hashes of 64 bits. In numpy, hashes that mix words well cost as much as this one, and nothing is proven of
them.

This file knows rows of equal length only; `rows` says where they lie.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

NUM_LANES = 3
"""Number of 32-bit hashes per row, each with keys of its own."""

HASH_BYTES = 4 * NUM_LANES
"""Bytes of hashes per row."""

_BLOCK_BYTES = 512 * 1024
"""Bytes of rows that are hashed at once: enough to outweigh the cost of calls, and less than the second-level cache."""


def hash_rows(table: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Returns the hashes of [num, nbytes] rows: [NUM_LANES, num]. Allocates `_BLOCK_BYTES` twice besides them."""
    num, nbytes = table.shape
    words = -(-nbytes // 8)
    block = max(1, min(num, _BLOCK_BYTES // (8 * words)))
    high = np.empty((block, words), np.uint64)
    padded = None if nbytes % 8 == 0 else np.zeros((block, 8 * words), np.uint8)
    hashes = np.empty((NUM_LANES, num), np.uint32)
    for start in range(0, num, block):
        rows = table[start : start + block]
        if padded is not None:
            padded[: len(rows), :nbytes] = rows
            rows = padded[: len(rows)]
        _hash_block(rows.view("<u8"), high[: len(rows)], hashes[:, start : start + len(rows)])
    return hashes


def _hash_block(words: NDArray[np.uint64], high: NDArray[np.uint64], hashes: NDArray[np.uint32]) -> None:
    """Hashes two characters per word, low, high: low * a + high * b == word * a + high * (b - 2**32 * a) mod 2**64."""
    np.right_shift(words, 32, out=high)
    offsets, of_words, of_high = _keys(words.shape[1])
    for lane in range(NUM_LANES):
        sums = np.einsum("ij,j->i", words, of_words[lane])
        sums += np.einsum("ij,j->i", high, of_high[lane])
        sums += offsets[lane]
        sums >>= np.uint64(32)
        hashes[lane] = sums


@lru_cache(maxsize=16)
def _keys(words: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """Returns m[0] of each lane, and for each lane and word a and b - 2**32 * a. Shorter rows use the first keys."""
    stream = hashlib.shake_128(b"ckptlib row hashes").digest(8 * NUM_LANES * (1 + 2 * words))
    keys = np.frombuffer(stream, "<u8").astype(np.uint64)
    low, high = keys[NUM_LANES:].reshape(words, 2, NUM_LANES).transpose(1, 2, 0)
    return keys[:NUM_LANES], np.ascontiguousarray(low), np.ascontiguousarray(high - (low << np.uint64(32)))
