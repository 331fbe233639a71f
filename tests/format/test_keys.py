"""Names of objects: there and back, sorted as their numbers are, and nothing else is taken for one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import SAVES_APART

from ckptlib.errors import FormatError
from ckptlib.format import keys
from ckptlib.format.check import Check
from ckptlib.format.keys import MAX_GENERATION, MAX_RANK, MAX_STEP, GenerationId, PackSet, PartName, SaveId
from ckptlib.stores import check_key

NONCES = st.text("0123456789abcdef", min_size=8, max_size=8)
DIGESTS = st.text("0123456789abcdef", min_size=32, max_size=32)
GENERATIONS = st.builds(GenerationId, st.integers(0, MAX_GENERATION), NONCES)
SAVES = st.builds(SaveId, st.integers(0, MAX_STEP), GENERATIONS)
CHECKS = st.builds(Check, st.integers(0, 2**32 - 1), st.integers(0, 2**40 - 88), st.integers(0, 2**40 - 88))
RANKS = st.integers(0, MAX_RANK)
USES = st.text("0123456789abcdef", min_size=16, max_size=16)
FAILED = st.builds(PartName, SAVES, RANKS, NONCES, st.none(), DIGESTS)
FIRST = st.builds(PartName, SAVES, RANKS, NONCES, DIGESTS, DIGESTS, st.none() | CHECKS)
"""Of version 1."""
SECOND = st.builds(
    PartName, SAVES, RANKS, NONCES, DIGESTS, DIGESTS, st.none() | CHECKS, USES, st.integers(0, 2**64 - 1)
)
PARTS = FAILED | FIRST | SECOND

SAVE = SaveId(500, GenerationId(7, "0123abcd"))
PART = PartName(SAVE, 3, "a77e3b70", "1" * 32, "2" * 32)

PARSERS: dict[str, Callable[[str], object]] = {
    "generation": keys.parse_generation_key,
    "manifest": keys.parse_manifest_key,
    "trash": keys.parse_trash_key,
    "part": keys.parse_part_key,
    "pack": keys.pack_save,
    "refresh": keys.parse_refresh_key,
    "pin": keys.parse_pin_key,
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
    carried = SAVE.pack_key(3, "a77e3b70", 12, carried=True)
    assert carried == "packs/000000000500-000007-0123abcd/000003-a77e3b70-carried-000012.safetensors"
    assert keys.layout_key("3" * 32) == f"layouts/{'3' * 32}.json"
    assert all(keys.is_layout_key(key) for key in (keys.layout_key("3" * 32), keys.copy_key(keys.layout_key("3" * 32))))
    assert not any(keys.is_layout_key(f"layouts/{name}") for name in ("3.json", f"{'3' * 32}.json.bak", "desktop.ini"))
    assert SAVE.refresh_key == "steps/000000000500-000007-0123abcd.refresh"
    assert SAVE.pin_key("a77e3b70") == "steps/000000000500-000007-0123abcd-a77e3b70.pin"


def test_the_name_of_a_part_tells_what_it_uses_and_what_was_put_for_it() -> None:
    stem = f"parts/000000000500-000007-0123abcd/000003-a77e3b70-ok-{'1' * 32}-{'2' * 32}"
    using = replace(PART, check=Check(1, 2, 3), uses="99aa06d3014798d8", nbytes=4096)
    assert using.key == f"{stem}-0000000100000000020000000003-99aa06d3014798d8-0000000000001000.json"
    assert replace(using, check=None).key == f"{stem}-99aa06d3014798d8-0000000000001000.json"
    for tail in ("-99aa06d3014798d8", "-99aa06d3014798d8-1000", "-99AA06D3014798D8-0000000000001000", "-1-2"):
        assert keys.parse_part_key(f"{stem}{tail}.json") is None
        assert keys.parse_part_key(f"{stem}-0000000100000000020000000003{tail}.json") is None
    failed = PartName(SAVE, 3, "a77e3b70", None, "2" * 32).key
    for tail in ("-0000000100000000020000000003", "-99aa06d3014798d8-0000000000001000"):
        assert keys.parse_part_key(failed.replace(".json", f"{tail}.json")) is None


@given(SAVES, st.booleans(), RANKS, st.integers(0, 999_999))
def test_sets_of_packs_are_told_by_their_names(save: SaveId, carried: bool, rank: int, n: int) -> None:
    of = PackSet(save, carried)
    assert keys.parse_pack_set(str(of)) == of
    assert str(of) == f"{save}-carried" if carried else str(save)
    key = save.pack_key(rank, "0ddba110", n, carried)
    assert keys.pack_set(key) == of
    assert keys.pack_save(key) == save


@pytest.mark.parametrize("tail", ["-carried-carried", "-Carried", "-", "carried", "-carried\n", "-stolen", "/"])
def test_what_is_almost_a_set_is_none(tail: str) -> None:
    with pytest.raises(FormatError, match="is not <step>-<generation>-<nonce> or that and -carried"):
        keys.parse_pack_set(f"{SAVE}{tail}")


@given(st.lists(st.builds(PackSet, SAVES, st.booleans()), max_size=8))
def test_sets_sort_as_their_names_do(sets: list[PackSet]) -> None:
    """The digest in the name of a part is of them in order."""
    assert sorted(map(str, sets)) == list(map(str, sorted(sets)))


@given(SAVES, PARTS, st.integers(0, 999_999))
def test_there_and_back(save: SaveId, part: PartName, n: int) -> None:
    assert keys.parse_save(str(save)) == save
    assert keys.parse_generation_key(save.generation.key) == save.generation
    assert keys.parse_manifest_key(save.manifest_key) == save
    assert keys.parse_trash_key(save.trash_key) == save
    assert keys.parse_part_key(part.key) == part
    assert part.key.startswith(part.save.parts_prefix)
    assert keys.pack_save(save.pack_key(part.rank, part.attempt, n)) == save
    assert keys.parse_refresh_key(save.refresh_key) == save
    assert keys.parse_pin_key(save.pin_key(part.attempt)) == save


@given(PARTS)
def test_every_name_is_a_key_of_a_store_and_of_one_kind_only(part: PartName) -> None:
    save = part.save
    packs = [save.pack_key(part.rank, "0" * 8, 1, carried) for carried in (False, True)]
    marks = [save.refresh_key, save.pin_key("0" * 8)]
    names = [save.generation.key, save.manifest_key, save.trash_key, part.key, packs[0], *marks]
    assert keys.pack_save(packs[1]) == save
    assert keys.is_known(packs[1])
    for name, kind in zip(names, PARSERS, strict=True):
        assert check_key(name) == name
        assert keys.is_known(name)
        assert [k for k, parse in PARSERS.items() if parse(name) is not None] == [kind]


@given(st.lists(SAVES, max_size=8))
def test_names_sort_as_their_numbers_do(saves: list[SaveId]) -> None:
    assert sorted(map(str, saves)) == list(map(str, sorted(saves)))
    generations = [save.generation for save in saves]
    assert sorted(map(str, generations)) == list(map(str, sorted(generations)))


@given(st.text(max_size=60))
def test_text_is_no_name(text: str) -> None:
    assert all(parse(text) is None for parse in PARSERS.values())
    assert not keys.is_known(text)
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
            assert not keys.is_known(name.replace(old, new, 1))
    if old in str(SAVE):
        with pytest.raises(FormatError):
            keys.parse_save(str(SAVE).replace(old, new, 1))


@pytest.mark.parametrize("name", ["ckptlib.json", "generations/000007-0123abcd.json", f"layouts/{'3' * 32}.json"])
def test_what_all_steps_need_is_known_by_both_of_its_names(name: str) -> None:
    assert keys.is_known(name)
    assert keys.is_known(f"copies/{name}")


def test_what_lies_elsewhere_is_of_somebody_else() -> None:
    packs = SAVE.pack_key(3, "a77e3b70", 12)
    for name in ("datasets/laion.tar", "packs/laion.tar", f"run1/{packs}", f"copies/{packs}", "run1/ckptlib.json"):
        assert not keys.is_known(name)


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
