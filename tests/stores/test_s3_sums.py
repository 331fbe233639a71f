"""The sums that a server is sent go by what it tells back, and every body is checked by one of them."""

from __future__ import annotations

from typing import Any

import pytest

from ckptlib.stores.s3_body import Body
from ckptlib.stores.s3_sums import Sums

CRC32, MD5 = "ChecksumCRC32", "ContentMD5"


def sent(sums: Sums, tells: bool) -> list[set[str]]:
    """The sums of each try of one body, until the server has checked it; `tells`: whether it tells the CRC32 back."""
    tries: list[set[str]] = []
    while len(tries) < 10:
        given = sums.of(Body([memoryview(b"data")]))
        tries.append({*given})
        answer: dict[str, Any] = {CRC32: given[CRC32]} if tells and CRC32 in given else {}
        if sums.checked(given, answer):
            return tries
    pytest.fail("it is sent again and again")


def test_a_server_that_tells_it_back() -> None:
    sums = Sums()
    assert [sent(sums, True) for _ in range(3)] == [[{CRC32, MD5}], [{CRC32}], [{CRC32}]]


def test_a_server_that_does_not() -> None:
    sums = Sums()
    assert [sent(sums, False) for _ in range(3)] == [[{CRC32, MD5}], [{MD5}], [{MD5}]]


def test_a_server_that_tells_it_back_no_longer() -> None:
    """As for parts, or behind a proxy that drops the header: each body was sent for ever."""
    sums = Sums()
    assert sent(sums, True) == [{CRC32, MD5}]
    assert sent(sums, False) == [{CRC32}, {CRC32, MD5}]
    assert [sent(sums, False) for _ in range(2)] == [[{MD5}], [{MD5}]]
    assert sent(sums, True) == [{MD5}]
