"""The ranks of a job: the same answers from one process, from threads, and from real processes over gloo."""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from places import WORKERS
from rankthreads import run_ranks

import ckptlib
from ckptlib.errors import AgreementFailed, CkptError, CorruptData, ObjectNotFound
from ckptlib.ranks.group import Group, SoloGroup, TorchGroup, group_of, meet, together

WORKER = WORKERS / "groups.py"


def test_three_real_ranks() -> None:
    """Every collective, every failure, groups of some ranks, meetings, and a rank that stays away."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(WORKER)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(line for line in done.stdout.splitlines() if line.endswith("done")) == [
        f"rank {rank} done" for rank in range(3)
    ]


def check_alone(group: Group) -> None:
    assert (group.rank, group.size, group.global_rank(0)) == (0, 1, 0)
    assert group.gather(b"x") == [b"x"]
    assert group.gather(b"") == [b""]
    assert group.broadcast(b"y") == b"y"
    assert group.broadcast(b"") == b""
    buffer = torch.arange(4, dtype=torch.uint8)
    group.broadcast_from(0, buffer)
    assert buffer.tolist() == [0, 1, 2, 3]
    assert group.max([3, -4]) == [3, -4]
    assert group.any(True)
    assert not group.any(False)
    assert group.same(b"z")
    assert together(group, "it", lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        together(group, "it", lambda: 1 // 0)


def test_a_job_of_one_process() -> None:
    group = group_of(None, timedelta(seconds=1))
    assert type(group) is SoloGroup
    check_alone(group)
    meet(None, "here", "save", timedelta(seconds=0))
    group.close()


def test_a_job_of_one_process_that_has_a_process_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = group_of(None, timedelta(seconds=30))
        assert type(group) is TorchGroup
        check_alone(group)
        meet(None, "here", "save", timedelta(seconds=0))
        group.close()
    finally:
        dist.destroy_process_group()


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


def errors_of_the_package() -> list[type[CkptError]]:
    """Every class that any module of it defines."""
    for module in pkgutil.walk_packages(ckptlib.__path__, "ckptlib."):
        if not module.name.endswith("__main__"):
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


def test_together_returns_each_ranks_own() -> None:
    assert run_ranks(3, lambda group: together(group, "it", lambda: group.rank * 2)) == [0, 2, 4]


def test_same_compares_all_ranks() -> None:
    for different in range(3):
        answers = run_ranks(3, lambda group, odd=different: group.same(b"a" if group.rank == odd else b"b"))  # type: ignore[misc]
        assert answers == [False] * 3
    assert run_ranks(3, lambda group: group.same(b"a")) == [True] * 3
