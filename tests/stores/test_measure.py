"""How fast a store is, and that nothing stays behind of the measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from store_conformance import keys
from typing_extensions import override

from ckptlib.errors import StoreError
from ckptlib.stores import InPlace, open_store
from ckptlib.stores.measure import MIB, SHAPES, WHOLE_ROUNDS, Line, Transfer, line, measure
from ckptlib.stores.memory import MemoryStore
from ckptlib.stores.testing import write_plan


@pytest.mark.parametrize(("latency_s", "bandwidth"), [(0.03, 6e6), (0.0, 1e9), (2.0, 1e3)])
def test_a_line_through_what_one_request_takes(latency_s: float, bandwidth: float) -> None:
    alone = [Transfer(n, 1, n / (latency_s + n / bandwidth)) for n in (MIB, 4 * MIB, 16 * MIB)]
    found = line([*alone, Transfer(16 * MIB, 8, 1e12)])
    assert found.latency_s == pytest.approx(latency_s, abs=1e-6)
    assert found.bytes_per_second == pytest.approx(bandwidth)
    assert found.knee_nbytes == pytest.approx(latency_s * bandwidth, abs=1)


def test_a_line_where_larger_requests_were_no_slower() -> None:
    found = line([Transfer(MIB, 1, MIB / 0.5), Transfer(2 * MIB, 1, 2 * MIB / 0.4)])
    assert found.latency_s >= 0
    assert found.bytes_per_second == 2 * MIB / 0.4
    assert line([Transfer(MIB, 1, 1e6)]) == Line(pytest.approx(0.0, abs=1e-9), 1e6)


@pytest.mark.parametrize("nbytes", [1, MIB, 20 * MIB, pytest.param(160 * MIB, marks=pytest.mark.slow)])
def test_every_size_that_fits_is_tried_and_all_is_deleted(nbytes: int) -> None:
    store = MemoryStore()
    speeds = measure(store, nbytes)
    assert keys(store) == []
    fit = [(n, at_once) for n, at_once in SHAPES if n * at_once <= max(nbytes, MIB)]
    assert [(t.nbytes, t.at_once) for t in speeds.up] == [(t.nbytes, t.at_once) for t in speeds.down] == fit
    assert {*speeds.latency_s} == {"put", "list", "get", "delete"}
    assert min(speeds.best_up, speeds.best_down, speeds.puts_per_second, speeds.gets_per_second) > 0


def test_a_whole_object_is_put_as_a_pack_of_a_snapshot_is() -> None:
    """Read far ahead from memory that is there anyway; else a store that sends parts side by side would seem slower."""
    put: list[int] = []

    class Noting(MemoryStore):
        @override
        def put(self, key: str, head: Any, pieces: Any = (), **more: Any) -> None:
            if isinstance(pieces, InPlace):
                put.append(pieces.nbytes)
            super().put(key, head, pieces, **more)

    measure(Noting(), 20 * MIB)
    assert {*put} == {20 * MIB}
    assert len(put) <= WHOLE_ROUNDS


def test_a_latency_and_a_bandwidth_are_found(tmp_path: Path) -> None:
    """Never faster than they are; how much slower is the machine's matter."""
    store = open_store(f"latency+file://{tmp_path}?latency=0.01&bandwidth=1e8")
    speeds = measure(store, 16 * MIB)
    assert min(speeds.latency_s.values()) >= 0.01
    assert max(speeds.best_up, speeds.best_down) <= 1e8
    assert speeds.up[0].bytes_per_second <= MIB / (0.01 + MIB / 1e8)


@pytest.mark.parametrize("op", ["put", "commit", "get", "get_into"])
def test_what_was_put_goes_where_a_measurement_fails(tmp_path: Path, op: str) -> None:
    plan = tmp_path / "plan.json"
    write_plan(plan, [{"op": op, "nth": 2, "action": "error"}])
    store = open_store(f"fault+file://{tmp_path}/run?plan={plan}")
    with pytest.raises(StoreError, match="as planned"):
        measure(store, 16 * MIB)
    assert keys(store) == []


def test_who_may_not_put_is_told_so_where_he_may_not_delete_either(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan", [{"op": op, "action": "denied"} for op in ("put", "delete")])
    with (
        open_store(f"fault+file://{tmp_path}/root?plan={tmp_path}/plan") as store,
        pytest.raises(StoreError, match=": put: denied"),
    ):
        measure(store, MIB)
