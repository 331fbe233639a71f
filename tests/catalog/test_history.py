"""Which of a root's steps are visible, whatever generations went on from what."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.catalog.history import check_goes_on, history, last_step, newest, newest_first
from ckptlib.errors import ObjectNotFound, Superseded
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Generation


def generation_id(number: int) -> GenerationId:
    return GenerationId(number, f"{number:08x}")


def told(*story: tuple[int, tuple[int, int] | None, list[int]]) -> list[tuple[int, int]]:
    """(generation, step) of what is visible after (generation, (generation, step) resumed from, steps committed)."""
    records, saves = {}, []
    for number, origin, steps in story:
        resumed = None if origin is None else SaveId(origin[1], generation_id(origin[0]))
        records[generation_id(number)] = Generation(generation_id(number), 1, resumed, 0.0, {}, "here")
        saves += [SaveId(step, generation_id(number)) for step in steps]
    return [(save.generation.number, save.step) for save in history(reversed(saves), records)]


def test_history_of_one_generation() -> None:
    assert told() == []
    assert told((1, None, [])) == []
    assert told((1, None, [10, 30, 20])) == [(1, 10), (1, 20), (1, 30)]


def test_history_goes_on_where_a_generation_resumed() -> None:
    assert told((1, None, [10, 20]), (2, (1, 20), [30])) == [(1, 10), (1, 20), (2, 30)]


def test_history_forgets_what_lies_behind_a_rewind() -> None:
    assert told((1, None, [10, 20, 30]), (2, (1, 10), [15, 20])) == [(1, 10), (2, 15), (2, 20)]
    assert told((1, None, [10, 20, 30]), (2, (1, 20), [25, 30]), (3, (1, 10), [11])) == [(1, 10), (3, 11)]
    # a limit holds for all that came before, also through a generation that went further
    assert told((1, None, [10, 20]), (2, (1, 20), [30]), (3, (2, 15), [16])) == [(1, 10), (3, 16)]


def test_a_generation_that_never_committed_is_no_part_of_history() -> None:
    assert told((1, None, [10, 20]), (2, (1, 10), [])) == [(1, 10), (1, 20)]
    # but one that was resumed from in memory hands on what it came from
    assert told((1, None, [10, 20]), (2, (1, 20), []), (3, (2, 25), [30])) == [(1, 10), (1, 20), (3, 30)]


def test_a_new_beginning_hides_all_that_was() -> None:
    assert told((1, None, [10, 20]), (2, None, [5])) == [(2, 5)]


def test_records_that_run_in_a_circle_or_into_nothing_end() -> None:
    assert told((1, (2, 50), [10]), (2, (1, 50), [20])) == [(1, 10), (2, 20)]
    assert told((1, (1, 50), [10])) == [(1, 10)]
    assert told((2, (1, 5), [10])) == [(2, 10)]
    saves = [SaveId(step, generation_id(9)) for step in (1, 2)]
    assert history(saves, {}) == saves


@given(
    st.lists(
        st.tuples(
            st.none() | st.tuples(st.integers(1, 6), st.integers(0, 20)),
            st.lists(st.integers(0, 20), max_size=4, unique=True),
        ),
        max_size=6,
    )
)
def test_any_history_ends_and_shows_the_newest_generation(story: list[tuple[object, list[int]]]) -> None:
    found = told(*((i + 1, origin, steps) for i, (origin, steps) in enumerate(story)))  # type: ignore[arg-type, misc]
    committed = [(i + 1, step) for i, (_, steps) in enumerate(story) for step in steps]
    assert len(set(found)) == len(found)
    assert set(found) <= set(committed)
    if committed:
        head = max(committed)[0]
        assert {save for save in committed if save[0] == head} <= set(found)


@given(
    st.lists(
        st.tuples(
            st.none() | st.tuples(st.integers(1, 6), st.integers(0, 20)),
            st.lists(st.integers(0, 20), max_size=4, unique=True),
            st.booleans(),
            st.booleans(),
        ),
        max_size=6,
    )
)
def test_what_few_records_tell_is_what_all_of_them_do(
    story: list[tuple[tuple[int, int] | None, list[int], bool, bool]],
) -> None:
    """Whatever was resumed from, wherever records are lost, and however few are read."""
    records, saves, read = {}, [], []
    for number, (origin, steps, rewinds, has_record) in enumerate(story, 1):
        resumed = None if origin is None else SaveId(origin[1], generation_id(origin[0]))
        rewind = rewinds and resumed is not None
        if has_record:
            records[generation_id(number)] = Generation(
                generation_id(number), 1, resumed, 0.0, {}, "here", rewind=rewind
            )
        saves += [SaveId(step, generation_id(number)) for step in steps]

    def reading(generation: GenerationId) -> Generation:
        read.append(generation)
        return records[generation]

    found = newest(saves, records, reading)
    assert read == newest_first(records, saves)
    if found is not None:
        assert found == history(saves, records)[-1]
    elif saves:
        head = max(save.generation for save in saves)
        later = [record for record in records.values() if record.id > head]
        origin_of_head = records[head].resumed_from if head in records else None
        assert head not in records or any(record.rewind for record in later) or origin_of_head is not None


@given(
    st.lists(st.tuples(st.none() | st.tuples(st.integers(1, 6), st.integers(0, 20)), st.booleans()), max_size=6),
    st.integers(1, 6),
    st.integers(0, 20),
)
def test_what_may_yet_be_committed_is_on_the_history_of_the_newest_generation(
    story: list[tuple[tuple[int, int] | None, bool]], number: int, step: int
) -> None:
    """As if that had committed. Where a record is lost, no older generation may."""
    records = {}
    for one, (origin, rewind) in enumerate(story, 1):
        resumed = None if origin is None or origin[0] >= one else SaveId(origin[1], generation_id(origin[0]))
        rewinds = rewind and resumed is not None
        records[generation_id(one)] = Generation(generation_id(one), 1, resumed, 0.0, {}, "here", rewind=rewinds)
    save, last = SaveId(step, generation_id(number)), SaveId(10**6, max(records, default=generation_id(number)))
    may = step <= last_step(save.generation, [*records], records.__getitem__)
    assert may == (save in history({save, last}, records) or save.generation > last.generation)
    with nullcontext() if may else pytest.raises(Superseded, match="Two jobs use one root"):
        check_goes_on(save, [*records], records.__getitem__, "here")

    def lost(generation: GenerationId) -> Generation:
        raise ObjectNotFound(f"{generation} is gone, as planned")

    assert (last_step(save.generation, [*records], lost) < 0) == (save.generation < last.generation)


@pytest.mark.parametrize("origins", [{3: 3}, {3: 2, 2: 3}, {3: 4, 4: 3}])
def test_records_that_go_on_from_no_older_one_lead_nowhere(origins: dict[int, int]) -> None:
    """As a damage or a hand may have made them: nobody goes around in them forever."""
    asked: list[GenerationId] = []

    def read(of: GenerationId) -> Generation:
        asked.append(of)
        assert len(asked) < 9, "it goes around"
        return Generation(of, 1, SaveId(5, generation_id(origins[of.number])), 0.0, {}, "here")

    assert last_step(generation_id(1), map(generation_id, (1, 2, 3)), read) == -1
