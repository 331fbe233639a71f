"""The header of a slot is a page that comes back, and none that is torn, altered or hostile is taken for one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import ROOT_ID, SAVES_APART, flips, resealed

from ckptlib.errors import CorruptData, FormatError
from ckptlib.format.keys import MAX_RANK, GenerationId, SaveId
from ckptlib.pages import PAGE_BYTES
from ckptlib.slots.header import SlotHeader

SAVE = SaveId(500, GenerationId(7, "0123abcd"))
HEADER = SlotHeader(ROOT_ID, SAVE, 3, 8, 2, 4, 4 * PAGE_BYTES, {"layout": (20480, 100, "0" * 32)})

NUMBERS = st.integers(0, 2**40)


@given(
    st.builds(
        SlotHeader,
        st.just(ROOT_ID),
        st.sampled_from([SAVE, *SAVES_APART]),
        st.integers(0, MAX_RANK),
        st.integers(1, MAX_RANK + 1),
        NUMBERS,
        NUMBERS,
        NUMBERS,
        st.dictionaries(
            st.sampled_from(["layout", "table", "snapshot"]),
            st.tuples(st.integers(PAGE_BYTES, 2**50), st.integers(0, 2**40 - 1), st.just("f" * 32)),
        ),
    )
)
def test_a_header_is_a_page_and_comes_back(header: SlotHeader) -> None:
    data = header.encode()
    assert len(data) == PAGE_BYTES
    assert SlotHeader.decode(data, "here") == header
    assert header.ready == (header.sequence % 2 == 0)


def test_every_flipped_bit_of_a_header_is_found() -> None:
    data = HEADER.encode()
    written = len(data.rstrip(b"\0"))
    read = 0
    for _, flipped in flips(data[: written + 8]):  # a few bytes of padding with it
        try:
            found = SlotHeader.decode(flipped.ljust(PAGE_BYTES, b"\0"), "here")
        except (CorruptData, FormatError):
            continue
        assert found == HEADER
        read += 1
    assert 0 < read <= 8, "the version alone is outside of the digest, and what fits the digest is of version 1"


def test_every_torn_header_is_found() -> None:
    """The first bytes of the new one before the last bytes of the old one, or before nothing."""
    old, new = HEADER.encode(), replace(HEADER, save=SAVES_APART[1], rank=12345, sequence=5, documents={}).encode()
    for length in range(PAGE_BYTES):
        for torn in (new[:length], new[:length].ljust(PAGE_BYTES, b"\0"), new[:length] + old[length:]):
            if torn.rstrip(b"\0") not in (new.rstrip(b"\0"), old.rstrip(b"\0")):
                with pytest.raises((CorruptData, FormatError), match="here"):
                    SlotHeader.decode(torn, "here")


@pytest.mark.parametrize(
    "fields",
    [
        {"root": "../x"},
        {"save": "../x"},
        {"rank": -1},
        {"rank": 10**6},
        {"world_size": 0},
        {"sequence": 2.0},
        {"sequence": -2},
        {"body_nbytes": 2**63},
        {"documents": []},
        {"documents": {"table": 3}},
        {"documents": {"table": [PAGE_BYTES, 5]}},
        {"documents": {"table": [0, 5, "0" * 32]}},
        {"documents": {"table": [PAGE_BYTES, -5, "0" * 32]}},
        {"documents": {"table": [PAGE_BYTES, 2**40, "0" * 32]}},
        {"documents": {"table": [PAGE_BYTES, 5.0, "0" * 32]}},
        {"documents": {"table": ["a", 5, "0" * 32]}},
    ],
)
def test_a_hostile_header_is_refused(fields: dict[str, object]) -> None:
    data = resealed(HEADER.encode().rstrip(b"\0"), **fields)
    with pytest.raises(FormatError):
        SlotHeader.decode(data.ljust(PAGE_BYTES, b"\0"), "here")
