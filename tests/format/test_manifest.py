"""Every kind of document there and back, and every damage found; roots, generations and manifests."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace

import pytest
from helpers.documents import DOCUMENTS, GENERATION, INCARNATION, MANIFEST, OLD, ROOT, SAVE, TRASH, WITH_PEERS, kinds
from hypothesis import given
from hypothesis import strategies as st
from support import flips, of_version, resealed

from ckptlib.errors import CkptError, CorruptData, FormatError, NewerFormat
from ckptlib.format.documents import VERSION, decode
from ckptlib.format.keys import PackSet, PartName, SaveId
from ckptlib.format.manifest import Generation, Manifest, Root, TrashRecord, ranks_by_layout
from ckptlib.policy.best import Best


def test_kinds_are_of_the_ranks_that_have_domains() -> None:
    for good in (WITH_PEERS, replace(WITH_PEERS, kinds=())):
        assert Generation.decode(good.encode(), "here") == good
    wrong = replace(WITH_PEERS, kinds=(0, 1))
    with pytest.raises(FormatError, match="kinds of 2 ranks, and domains of 3"):
        Generation.decode(wrong.encode(), "here")


@kinds
def test_there_and_back(kind: str) -> None:
    value, document, read = DOCUMENTS[kind]
    assert read(document) == value


@kinds
def test_every_flipped_bit_is_found(kind: str) -> None:
    value, document, read = DOCUMENTS[kind]
    body_at = document.index(b'"body":') + 7
    named_by_digest = kind in ("part", "failed part")
    for position, data in flips(document):
        if position == document.index(b":") + 1 and data[position] != ord(","):
            assert read(data) == value, "the digest says which version it is"
            continue
        with pytest.raises(CorruptData if named_by_digest or position >= body_at else (CorruptData, FormatError)):
            read(data)


@kinds
def test_every_truncation_is_found(kind: str) -> None:
    _, document, read = DOCUMENTS[kind]
    for length in range(len(document)):
        with pytest.raises((CorruptData, FormatError)):
            read(document[:length])


OPTIONAL = {
    "manifest": {"step", "uses", "nbytes_state"},  # the first for people and jq; version 1 has not the others
    "trash": {"manifest", "uses", "created", "layouts"},
    "part that reuses": {"bases", "lossy"},  # some chunks have none
}


@pytest.mark.parametrize(
    "kind", ["root", "generation", "part, renamed", "part that reuses", "part of version 1", "manifest", "trash"]
)
def test_unknown_fields_are_ignored_missing_ones_and_newer_versions_refused(kind: str) -> None:
    value, document, read = DOCUMENTS[kind]
    assert read(resealed(document, novelty={"a": 1})) == value
    for name in json.loads(document)["body"].keys() - OPTIONAL.get(kind, set()):
        told = "pack" if name == "places" else name  # without it, the table would be of version 1
        with pytest.raises(FormatError, match=f"'{told}'"):
            read(resealed(document, **{name: ...}))
    with pytest.raises(NewerFormat):
        read(of_version(document, VERSION + 1))


@kinds
def test_another_kind_of_document_is_refused(kind: str) -> None:
    _, document, read = DOCUMENTS[kind]
    for _, other, _ in DOCUMENTS.values():
        if other != document:
            with pytest.raises((CorruptData, FormatError)):
                read(other)


@kinds
@given(data=st.data())
def test_any_value_in_any_field_is_taken_or_refused(kind: str, data: st.DataObject) -> None:
    """Never another exception than one of ours, and never without an end."""
    _, document, read = DOCUMENTS[kind]
    name = data.draw(st.sampled_from(sorted(json.loads(document)["body"])))
    odd = st.sampled_from(
        [None, True, -1, 0, 2**63, 10**400, 1.5, -1e300, "", "../x", "\u0661", "f" * 32, "0" * 10_000, [], {}, [[]]]
    )
    value = data.draw(odd | st.lists(odd, max_size=3) | st.dictionaries(st.sampled_from(["../x", "0" * 32]), odd))
    with contextlib.suppress(CkptError):
        read(resealed(document, **{name: value}))


# -- root, generation, trash


def test_a_root_with_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(FormatError, match=r"'md5' is not one of xxh3, blake3; update ckptlib"):
        Root.decode(resealed(ROOT.encode(), algorithm="md5"), "here")
    for absurd in (2**53, 1e300, -1):
        with pytest.raises(FormatError, match="here: a save deadline of"):
            Root.decode(resealed(ROOT.encode(), save_deadline_s=absurd), "here")


def test_a_generation_that_began_anew_comes_back() -> None:
    anew = replace(INCARNATION, resumed_from=None, tags={})
    assert Generation.decode(anew.encode(), "here") == anew
    for hostile in ("../../etc", "", "000000000500-000007-0123abcd\n"):
        with pytest.raises(FormatError):
            Generation.decode(resealed(anew.encode(), resumed_from=hostile), "here")
    with pytest.raises(FormatError, match="goes back, but 'resumed_from' names no step"):
        Generation.decode(resealed(anew.encode(), rewind=True), "here")


def test_a_trash_record_says_what_it_was() -> None:
    fields = decode("trash", TRASH.encode(), "here")
    assert fields.text("save") == str(SAVE)
    assert fields.text("manifest") == SAVE.manifest_key
    assert fields.text("reason") == "dropped by retention"
    assert fields.mapping("uses") == {str(OLD): [0.5, [[0, 0], [2, 2]]], f"{OLD}-carried": 0.25}
    assert fields.texts("layouts") == ["3" * 32, "4" * 32]
    with pytest.raises(FormatError, match="layouts"):
        TrashRecord.decode(SAVE, resealed(TRASH.encode(), layouts=["../x"]), "here")
    with pytest.raises(FormatError, match="different saves"):
        TrashRecord.decode(OLD, TRASH.encode(), "here")


def test_a_trash_record_of_version_1_uses_nothing() -> None:
    first = of_version(resealed(TRASH.encode(), uses=..., created=..., layouts=...), 1)
    assert TrashRecord.decode(SAVE, first, "here") == TrashRecord(SAVE, "dropped by retention")


def test_a_manifest_of_version_1_uses_nothing() -> None:
    first = of_version(resealed(MANIFEST.encode(), uses=..., nbytes_state=...), 1)
    assert Manifest.decode(SAVE, first) == replace(MANIFEST, uses={}, users={}, nbytes_state=None)


def test_uses_are_written_in_one_order() -> None:
    """Whoever commits a step writes the same bytes."""
    turned = replace(MANIFEST, uses=dict(reversed(MANIFEST.uses.items())))
    assert turned.encode() == MANIFEST.encode()
    assert Manifest.decode(SAVE, turned.encode()) == MANIFEST


def test_users_of_the_largest_sets_are_left_out_where_they_are_too_many() -> None:
    """Readers take two million ranks: from 8,200 ranks on, 255 sets that all but one of them use are more."""
    sets = [PackSet(SaveId(step, GENERATION)) for step in range(22)]
    many = frozenset(range(100_000))
    told = {sets[0]: frozenset({7}), **dict.fromkeys(sets[2:], many)}
    users = {**told, sets[1]: many | {200_000}}
    uses = {of: float(of.save.step) for of in sets}
    manifest, record = replace(MANIFEST, uses=uses, users=users), replace(TRASH, uses=uses, users=users)
    assert Manifest.decode(SAVE, manifest.encode()) == replace(manifest, users=told)
    assert TrashRecord.decode(SAVE, record.encode(), "here") == replace(record, users=told)
    assert manifest.encode() == replace(manifest, users=dict(reversed(users.items()))).encode()


HOSTILE_USES = [
    [str(OLD)],
    {"../x": 1.0},
    {f"{OLD}-stolen": 1.0},
    {str(OLD): "1"},
    {str(OLD): True},
    {str(OLD): None},
    {str(OLD): 10**400},
    {str(OLD): [1.0]},
    {str(OLD): [None, [[0, 1]]]},
    {str(OLD): [1.0, [[1, 0]]]},
    {str(OLD): [1.0, [[0, 10**9]]]},
    {f"{step:012d}{str(OLD)[12:]}": [1.0, [[0, 10**6 - 1]]] for step in range(3)},
    None,
]


@pytest.mark.parametrize("uses", HOSTILE_USES)
def test_hostile_uses_are_refused(uses: object) -> None:
    with pytest.raises(FormatError):
        Manifest.decode(SAVE, resealed(MANIFEST.encode(), uses=uses))
    with pytest.raises(FormatError):
        TrashRecord.decode(SAVE, resealed(TRASH.encode(), uses=uses), "here")


# -- manifests


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_layouts_of_ranks_come_back(choice: list[int]) -> None:
    layouts = {f"{i}" * 32: tuple(r for r, c in enumerate(choice) if c == i) for i in range(4) if i in choice}
    parts = tuple(PartName(SAVE, rank, "a77e3b70", "1" * 32, "2" * 32) for rank in range(len(choice)))
    manifest = replace(MANIFEST, world_size=len(choice), parts=parts, layouts=layouts)
    assert Manifest.decode(SAVE, manifest.encode()) == manifest


def test_ranks_are_sorted_by_layout_in_one_pass() -> None:
    """Tuples that are made anew for each rank take half a minute for these."""
    began = time.process_time()
    found = ranks_by_layout(("ab"[rank % 1000 == 0], rank) for rank in range(200_000))
    assert time.process_time() - began < 5
    assert found == {
        "a": tuple(rank for rank in range(200_000) if rank % 1000),
        "b": tuple(range(0, 200_000, 1000)),
    }


def test_a_layout_of_all_ranks_takes_no_room() -> None:
    body = json.loads(replace(MANIFEST, layouts={"3" * 32: tuple(range(3))}).encode())["body"]
    assert body["layouts"] == {"3" * 32: [[0, 2]]}


KEYS = [part.key for part in MANIFEST.parts]


@pytest.mark.parametrize(
    "fields",
    [
        {"save": str(SaveId(501, GENERATION))},
        {"save": "../x"},
        {"step": 501},
        {"world_size": 4},
        {"world_size": 2**40},
        {"world_size": 0, "parts": [], "layouts": {}},
        {"parts": KEYS[:2]},
        {"parts": [KEYS[0], KEYS[2], KEYS[1]]},
        {"parts": [KEYS[0], KEYS[0], KEYS[2]]},
        {"parts": [*KEYS[:2], "../x"]},
        {"parts": [*KEYS[:2], KEYS[2].replace("500", "501")]},
        {"parts": [*KEYS[:2], PartName(SAVE, 2, "a77e3b70", None, "2" * 32).key]},
        {"parts": [*KEYS[:2], 3]},
        {"layouts": {}},
        {"layouts": {"3" * 32: [[0, 1]]}},
        {"layouts": {"3" * 32: [[0, 2]], "4" * 32: [[1, 1]]}},
        {"layouts": {"3" * 32: [[0, 3]]}},
        {"layouts": {"3" * 32: [[2, 0]]}},
        {"layouts": {"3" * 32: [[0, 1], [1, 2]]}},
        {"layouts": {"3" * 32: [0, 1, 2]}},
        {"layouts": {"3" * 32: [[0, 2**62]]}},
        {"layouts": {"3" * 32: [[0, 999_999]] * 10_000}},
        {"layouts": {"../x": [[0, 2]]}},
        {"layouts": {"": [[0, 2]]}},
        {"nbytes": -1},
        {"nbytes_state": -1},
        {"nbytes_state": 1.0},
        {"created": "now"},
    ],
)
def test_a_hostile_manifest_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        Manifest.decode(SAVE, resealed(MANIFEST.encode(), **fields))


def test_a_manifest_under_another_name_is_refused() -> None:
    with pytest.raises(FormatError, match="different saves"):
        Manifest.decode(SaveId(501, GENERATION), MANIFEST.encode())


def test_a_generation_with_peers_comes_back() -> None:
    with_peers = replace(INCARNATION, domains=("rack 1", "rack 1", "rack 2"), copies=1)
    assert Generation.decode(with_peers.encode(), "here") == with_peers
    assert b"peers" not in INCARNATION.encode()


def test_what_a_job_calls_best_and_what_is_exempt_come_back() -> None:
    judged = replace(INCARNATION, best=Best("val_loss", "min"))
    assert Generation.decode(judged.encode(), "here") == judged
    exempt = replace(MANIFEST, exempt=True)
    assert Manifest.decode(SAVE, exempt.encode()) == exempt
    assert b"exempt" not in MANIFEST.encode(), "documents of other steps are as they were"
    assert b"best" not in INCARNATION.encode()


@pytest.mark.parametrize("best", [{"metric": "loss", "mode": "median"}, {"metric": "", "mode": "min"}, None])
def test_a_rule_that_is_not_known_does_not_close_the_root(best: object) -> None:
    assert Generation.decode(resealed(INCARNATION.encode(), best=best), "here") == INCARNATION


@pytest.mark.parametrize("exempt", [1, 0, "true", [], {}])
def test_an_exemption_is_true_or_false(exempt: object) -> None:
    with pytest.raises(FormatError, match="field 'exempt' is not true or false"):
        Manifest.decode(SAVE, resealed(MANIFEST.encode(), exempt=exempt))
