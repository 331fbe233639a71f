"""Bars as high as their values, by another reader of XML."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from ckptlib.reporting.charts import MAX_BARS, Bar, bar_chart, share_bar
from ckptlib.reporting.scale import bytes_axis, count_axis


def bars(values: list[float], **more: object) -> list[Bar]:
    return [Bar([("a", value)], f"value {value:g}", str(n), **more) for n, value in enumerate(values)]  # type: ignore[arg-type]


def heights(chart: str, kind: str = "a") -> list[float]:
    return [
        float(rect.attrib["height"])
        for rect in ElementTree.fromstring(chart).iter("rect")
        if rect.attrib["class"] == kind
    ]


def test_heights_are_in_proportion() -> None:
    found = heights(bar_chart(bars([10, 20, 40]), count_axis, "x"))
    assert found == pytest.approx([found[0], 2 * found[0], 4 * found[0]], abs=0.02)


def test_stacked_parts_meet() -> None:
    bar = Bar([("a", 30.0), ("b", 10.0)], "t", "n", level=50.0)
    root = ElementTree.fromstring(bar_chart([bar], bytes_axis, "x"))
    low, high = (next(r for r in root.iter("rect") if r.attrib["class"] == kind).attrib for kind in ("a", "b"))
    assert float(low["y"]) == pytest.approx(float(high["y"]) + float(high["height"]), abs=0.02)
    level = next(line for line in root.iter("line") if line.attrib["class"] == "level").attrib
    assert float(level["y1"]) < float(high["y"])


def test_of_too_many_the_highest_ones_stand() -> None:
    values = [1.0] * 5000
    values[1234] = 7.0
    chart = bar_chart(bars(values), count_axis, "x")
    found = heights(chart)
    assert len(found) == MAX_BARS
    assert max(found) == pytest.approx(7 * min(found), abs=0.1)
    assert "value 7" in chart


def test_nothing_leaves_the_chart() -> None:
    for values in ([], [0.0], [0.0, 2.0**62], [1e-300]):
        root = ElementTree.fromstring(bar_chart(bars(values), bytes_axis, "x"))
        width, height = map(float, root.attrib["viewBox"].split()[2:])
        for rect in root.iter("rect"):
            x, y, w, h = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
            assert 0 <= x <= x + w <= width
            assert 0 <= y <= y + h <= height


def test_shares_fill_the_bar() -> None:
    rects = [*ElementTree.fromstring(share_bar([("a", 1, "x"), ("b", 0, "y"), ("c", 3, "z")], "l")).iter("rect")]
    assert [rect.attrib["class"] for rect in rects] == ["a", "c"]
    assert float(rects[1].attrib["x"]) == pytest.approx(275)
    assert share_bar([("a", 0, "x")], "l").count("rect") == 0


def test_names_have_room() -> None:
    chart = ElementTree.fromstring(bar_chart(bars([1.0] * 200), count_axis, "x"))
    names = [float(t.attrib["x"]) for t in chart.iter("text") if t.attrib.get("text-anchor") == "middle"]
    assert 5 < len(names) < 40
