"""Names of objects: there and back, sorted as their numbers are, and nothing else is taken for one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import SAVES_APART

from ckptlib.errors import FormatError
from ckptlib.format import keys
from ckptlib.format.keys import MAX_GENERATION, MAX_RANK, MAX_STEP, GenerationId, PartName, SaveId
from ckptlib.stores import check_key

NONCES = st.text("0123456789abcdef", min_size=8, max_size=8)
DIGESTS = st.text("0123456789abcdef", min_size=32, max_size=32)
GENERATIONS = st.builds(GenerationId, st.integers(0, MAX_GENERATION), NONCES)
SAVES = st.builds(SaveId, st.integers(0, MAX_STEP), GENERATIONS)
PARTS = st.builds(PartName, SAVES, st.integers(0, MAX_RANK), NONCES, st.none() | DIGESTS, DIGESTS)

SAVE = SaveId(500, GenerationId(7, "0123abcd"))
PART = PartName(SAVE, 3, "a77e3b70", "1" * 32, "2" * 32)

PARSERS: dict[str, Callable[[str], object]] = {
    "generation": keys.parse_generation_key,
    "manifest": keys.parse_manifest_key,
    "trash": keys.parse_trash_key,
    "part": keys.parse_part_key,
    "pack": keys.pack_save,
}


def test_names_are_those_of_the_format() -> None:
    assert SAVE.manifest_key == "steps/000000000500-000007-0123abcd.json"
    assert SAVE.trash_key == "trash/000000000500-000007-0123abcd.json"
    assert SAVE.generation.key == "generations/000007-0123abcd.json"
    assert PART.key == f"parts/000000000500-000007-0123abcd/000003-a77e3b70-ok-{'1' * 32}-{'2' * 32}.json"
    failed = PartName(SAVE, 3, "a77e3b70", None, "2" * 32)
    assert failed.key == f"parts/000000000500-000007-0123abcd/000003-a77e3b70-failed-{'2' * 32}.json"
    assert (PART.ok, failed.ok) == (True, False)
    assert SAVE.pack_key(3, "a77e3b70", 12) == "packs/000000000500-000007-0123abcd/000003-a77e3b70-000012.safetensors"
    assert keys.layout_key("3" * 32) == f"layouts/{'3' * 32}.json"


@given(SAVES, PARTS, st.integers(0, 999_999))
def test_there_and_back(save: SaveId, part: PartName, n: int) -> None:
    assert keys.parse_save(str(save)) == save
    assert keys.parse_generation_key(save.generation.key) == save.generation
    assert keys.parse_manifest_key(save.manifest_key) == save
    assert keys.parse_trash_key(save.trash_key) == save
    assert keys.parse_part_key(part.key) == part
    assert part.key.startswith(part.save.parts_prefix)
    assert keys.pack_save(save.pack_key(part.rank, part.attempt, n)) == save


@given(PARTS)
def test_every_name_is_a_key_of_a_store_and_of_one_kind_only(part: PartName) -> None:
    save = part.save
    names = [save.generation.key, save.manifest_key, save.trash_key, part.key, save.pack_key(part.rank, "0" * 8, 1)]
    for name, kind in zip(names, PARSERS, strict=True):
        assert check_key(name) == name
        assert [k for k, parse in PARSERS.items() if parse(name) is not None] == [kind]


@given(st.lists(SAVES, max_size=8))
def test_names_sort_as_their_numbers_do(saves: list[SaveId]) -> None:
    assert sorted(map(str, saves)) == list(map(str, sorted(saves)))
    generations = [save.generation for save in saves]
    assert sorted(map(str, generations)) == list(map(str, sorted(generations)))


@given(st.text(max_size=60))
def test_text_is_no_name(text: str) -> None:
    assert all(parse(text) is None for parse in PARSERS.values())
    with pytest.raises(FormatError):
        keys.parse_save(text)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (".json", ".json\n"),
        (".json", ".JSON"),
        (".json", ""),
        ("500-", "5000-"),
        ("0500-", "500-"),
        ("500-", "50x-"),
        ("500-", "50\u0660-"),  # a digit in another script
        ("-000007-", "-0000007-"),
        ("0123abcd", "0123ABCD"),
        ("0123abcd", "0123abc"),
        ("000000000500", "../000000500"),
        ("/", "//"),
        ("/", "/../"),
        ("s", "/s"),
    ],
)
def test_what_is_almost_a_name_is_none(old: str, new: str) -> None:
    for name in (SAVE.manifest_key, PART.key, SAVE.trash_key, SAVE.generation.key):
        if old in name:
            assert all(parse(name.replace(old, new, 1)) is None for parse in PARSERS.values()), name
    if old in str(SAVE):
        with pytest.raises(FormatError):
            keys.parse_save(str(SAVE).replace(old, new, 1))


def test_the_smallest_and_the_largest_numbers_have_the_same_width() -> None:
    small, large = map(str, SAVES_APART)
    assert len(small) == len(large)
    assert (keys.parse_save(small), keys.parse_save(large)) == SAVES_APART


def test_what_a_sweep_puts_beside_trash_records_is_none() -> None:
    assert keys.parse_trash_key("trash/clock-0123abcd.json") is None


def test_nonces_are_of_the_form_that_names_take() -> None:
    found = {keys.new_nonce() for _ in range(100)}
    assert len(found) == 100
    for nonce in found:
        assert keys.parse_save(str(SaveId(1, GenerationId(1, nonce)))).generation.nonce == nonce
