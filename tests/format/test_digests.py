"""Digests: the same whether bytes come at once or in pieces."""

from __future__ import annotations

import random

import pytest

from ckptlib.errors import FormatError
from ckptlib.format.digests import ALGORITHMS, HEX_WIDTH, digester, digester_of_pieces


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("piece", [1, 255, 256, 4096, 10**6])
def test_pieces_have_the_digest_of_the_whole(algorithm: str, piece: int) -> None:
    if algorithm == "blake3":
        pytest.importorskip("blake3")
    data = random.Random(0).randbytes(10_001)
    found = digester_of_pieces(algorithm)(data[at : at + piece] for at in range(0, len(data), piece))
    assert found == digester(algorithm)(data)
    assert len(found) == HEX_WIDTH
    assert digester_of_pieces(algorithm)([]) == digester(algorithm)(b"")


def test_an_unknown_algorithm_is_refused() -> None:
    for make in digester, digester_of_pieces:
        with pytest.raises(FormatError, match="'md5' is not one of xxh3, blake3; update ckptlib"):
            make("md5")
