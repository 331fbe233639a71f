"""An error on one rank is an error on all of them, of a class that each of them knows."""

from __future__ import annotations

import gc
import importlib
import itertools
import logging
import pkgutil
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
from rankthreads import run_ranks

import ckptlib
from ckptlib.errors import AgreementFailed, CkptError, CorruptData, ObjectNotFound
from ckptlib.ranks import together as together_module
from ckptlib.ranks.group import Group
from ckptlib.ranks.together import by_rank_0, together, together_at_length


@pytest.mark.parametrize(
    "error", [CorruptData("w[0:3]: bad"), ObjectNotFound("packs/x: no such object"), OSError(5, "I/O")]
)
def test_together_all_fail_when_one_does(error: Exception) -> None:
    def on_rank(group: Group) -> BaseException:
        def act() -> None:
            if group.rank == 2:
                raise error

        with pytest.raises((CkptError, OSError)) as caught:
            together(group, "reading", act)
        return caught.value

    found = run_ranks(4, on_rank)
    assert found[2] is error
    expected = type(error) if isinstance(error, CkptError) else AgreementFailed
    for rank in (0, 1, 3):
        assert type(found[rank]) is expected
        assert str(found[rank]) == f"reading failed on 1 of 4 ranks; on rank 2: {error}"


def test_what_rank_0_finds_is_known_to_all_and_its_error_raised_by_all() -> None:
    def on_rank(group: Group) -> list[int]:
        asked: list[int] = []

        def find() -> bytes:
            asked.append(group.rank)
            if len(asked) > 1:
                raise CorruptData("w[0:3]: bad")
            return b"found"

        assert by_rank_0(group, "looking", find) == b"found"
        with pytest.raises(CorruptData, match="bad"):
            by_rank_0(group, "looking", find)
        return asked

    assert run_ranks(3, on_rank) == [[0, 0], [], []]


def errors_of_the_package() -> list[type[CkptError]]:
    """Every class that any module of it defines."""
    for module in pkgutil.walk_packages(ckptlib.__path__, "ckptlib."):
        if not module.name.endswith(("__main__", ".torchtitan")):  # which is not installed
            importlib.import_module(module.name)
    found, last = {CkptError}, set[type[CkptError]]()
    while found != last:
        last, found = found, found | {cls for one in found for cls in one.__subclasses__()}
    return sorted((cls for cls in found if cls.__module__.startswith("ckptlib.")), key=lambda cls: cls.__qualname__)


def test_together_raises_every_error_of_the_package_alike() -> None:
    """Also those that only some modules raise: a rank that caught another class would go on alone."""

    def on_rank(group: Group) -> list[BaseException]:
        found = []
        for cls in errors_of_the_package():

            def act(cls: type[CkptError] = cls) -> None:
                if group.rank == 1:
                    raise cls("w: bad")

            with pytest.raises(CkptError) as caught:
                together(group, "it", act)
            found.append(caught.value)
        return found

    classes = errors_of_the_package()
    assert len(classes) > 20
    for found in run_ranks(3, on_rank):
        assert [type(error) for error in found] == classes
        assert all("w: bad" in str(error) for error in found)


def test_together_knows_what_others_derive_from_our_errors_and_not_what_has_their_names() -> None:
    class ObjectNotFound(Exception):  # another's, of the same name
        pass

    class Gone(CorruptData):  # a user's store, loaded on one rank alone
        pass

    def raised(error: Exception) -> list[type[BaseException]]:
        def on_rank(group: Group) -> type[BaseException]:
            def act() -> None:
                if group.rank == 0:
                    raise error

            with pytest.raises(Exception, match="bad") as caught:
                together(group, "it", act)
            return type(caught.value)

        return run_ranks(2, on_rank)

    assert raised(Gone("bad")) == [Gone, CorruptData]
    assert raised(ObjectNotFound("bad")) == [ObjectNotFound, AgreementFailed]


def test_together_tells_of_what_is_no_unicode() -> None:
    """Names of files may hold lone surrogates; a rank that cannot say so would leave the others behind."""

    def on_rank(group: Group) -> str:
        def act() -> None:
            if group.rank == 1:
                raise CorruptData("w\udcff: bad")

        with pytest.raises(CorruptData) as caught:
            together(group, "reading", act)
        return str(caught.value)

    assert run_ranks(2, on_rank) == [r"reading failed on 1 of 2 ranks; on rank 1: w\udcff: bad", "w\udcff: bad"]


def test_together_all_raise_the_same_class_where_ranks_fail_differently() -> None:
    """restore() goes on after damage and stops at an outage; ranks that disagree on that would wait for each other."""
    errors = [None, CorruptData("w: bad"), OSError(5, "I/O"), CorruptData("b: bad")]

    def on_rank(group: Group) -> BaseException:
        def act() -> None:
            error = errors[group.rank]
            if error is not None:
                raise error

        with pytest.raises(CorruptData) as caught:
            together(group, "reading", act)
        return caught.value

    found = run_ranks(4, on_rank)
    assert found[1] is errors[1]
    assert found[3] is errors[3]
    assert found[2].__cause__ is errors[2]
    assert str(found[0]) == str(found[2]) == "reading failed on 3 of 4 ranks; on rank 1: w: bad"


def test_a_rank_that_most_others_wait_for_at_length_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its disk hangs: nobody would know which of a thousand it is. Those that take a little longer do not."""
    told, heard, now, going = list[str](), threading.Event(), [0.0], threading.Event()

    class Hears(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())
            heard.set()

    def on_rank(group: Group) -> bool:
        group.patience_s, start_sum = 0.01, group.start_sum
        meetings = itertools.count()

        def meet(values: Sequence[int]) -> Callable[[], list[int]]:
            num, wait = next(meetings), start_sum(values)

            def end() -> list[int]:
                found = wait()
                if num == 2:
                    now[0] = 600.0
                if num == 5:
                    going.set()
                if found[0] == 1:
                    now[0] = 661.0
                return found

            return end

        if group.rank == 0:  # it has done it at once, and has the clock
            monkeypatch.setattr(group, "start_sum", meet)
        awaited = {1: going, 2: going, 3: heard}.get(group.rank)
        return together_at_length(group, "reading", lambda: awaited is None or awaited.wait(60))

    monkeypatch.setattr(together_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    handler = Hears()
    together_module.log.addHandler(handler)
    try:
        assert run_ranks(4, on_rank, first_global_rank=8) == [True] * 4
    finally:
        together_module.log.removeHandler(handler)
    where = f"rank 11, on {socket.gethostname()},"
    assert told == [f"reading: {where} is still at it after 661 s; 3 ranks have done it"]


def test_no_rank_is_waited_for_at_length_where_another_has_lost_one() -> None:
    """As where the one that is lost reads from the disk that hangs: the job would stand still for ever. Whatever else
    was found, none tries another step together with those that are not there."""
    ended = threading.Event()

    def on_rank(group: Group) -> str:
        def act() -> None:
            if group.rank == 0:
                raise CorruptData("w: bad")
            if group.rank == 1:
                raise AgreementFailed("rank 2 did not answer")
            assert group.rank == 3 or ended.wait(30), "the others wait for it"

        group.patience_s = 0.01
        with pytest.raises(AgreementFailed) as caught:
            together_at_length(group, "reading", act)
        if group.rank == 1:
            ended.set()
        return str(caught.value)

    told = run_ranks(4, on_rank)
    others = "reading failed on 1 of 4 ranks; on rank 1: rank 2 did not answer"
    assert told == [others, "rank 2 did not answer", others, others]


class Model:
    """In the locals of whoever catches an error."""


@pytest.mark.parametrize("how", [together, together_at_length])
def test_what_the_caller_had_goes_with_the_error_before_garbage_is_collected(
    how: Callable[[Group, str, Callable[[], None]], None],
) -> None:
    """Who makes a new model and tries again would have the memory of two."""

    def fail() -> None:
        raise CorruptData("w: bad")

    def attempt(group: Group) -> weakref.ref[Model]:
        model = Model()
        with pytest.raises(CorruptData):
            how(group, "reading", fail if group.rank == 0 else lambda: None)
        return weakref.ref(model)

    gc.disable()
    try:
        assert run_ranks(2, lambda group: attempt(group)()) == [None, None]
    finally:
        gc.enable()


def test_together_returns_each_ranks_own() -> None:
    assert run_ranks(3, lambda group: together(group, "it", lambda: group.rank * 2)) == [0, 2, 4]
