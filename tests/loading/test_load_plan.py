"""Objects whose state is rebuilt: filled in place where that can be, and refused where a layout tells of none."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from onerank import Holder, Root, same

from ckptlib import PerRank, Sharded, StateMismatch
from ckptlib.catalog.catalog import Catalog
from ckptlib.errors import FormatError
from ckptlib.format import values
from ckptlib.loading.load_plan import LoadPlan
from ckptlib.loading.reader import Reader
from ckptlib.loading.selection import Selection
from ckptlib.loading.trees import maker, rebuild
from ckptlib.reading.committed import Committed
from ckptlib.reading.saved_names import SavedNames
from ckptlib.stores import open_store


def test_objects_are_filled_in_place_where_they_can_be(root: Root) -> None:
    kept = torch.zeros(3)
    content: Mapping[str, object] = {
        "same": kept,
        "other": torch.zeros(5),
        "shared": torch.zeros(1).expand(4),
        "list": [],
    }
    holder = Holder(content)
    source = {"same": torch.ones(3), "other": torch.ones(4), "shared": torch.ones(4), "list": [torch.ones(1)]}
    root.move({"h": Holder(source)}, {"h": holder})
    assert same(holder.content, source)
    assert holder.content["same"] is kept  # type: ignore[index]


def test_one_tensor_of_an_object_in_two_places_takes_two_values(root: Root) -> None:
    shared = torch.zeros(2)
    holder = Holder([shared, shared])
    root.move({"h": Holder([torch.ones(2), torch.full((2,), 2.0)])}, {"h": holder})
    assert same(holder.content, [torch.ones(2), torch.full((2,), 2.0)])
    holder = Holder()
    root.move({"h": Holder([shared, shared, PerRank(torch.ones(1))])}, {"h": holder})
    assert same(holder.content, [shared, shared, torch.ones(1)])


def test_pieces_cut_by_hand_in_an_object(root: Root) -> None:
    whole = torch.randn(5, 2)
    mine = torch.zeros(2, 2)
    root.save({"h": Holder({"w": Sharded(whole, (0, 0), (5, 2))})})
    holder = Holder({"w": Sharded(mine, (3, 0), (5, 2))})
    root.load({"h": holder})
    assert torch.equal(mine, whole[3:])
    assert holder.content["w"] is mine  # type: ignore[index]


def test_pieces_cut_by_hand_in_objects_that_were_renamed(root: Root) -> None:
    def make(fill: float) -> Holder:
        return Holder({"w": Sharded(torch.full((2,), fill), (0,), (2,))})

    root.save({"a": make(1.0), "b": make(2.0)})
    a, b, c = make(0.0), make(0.0), make(0.0)
    root.load({"a": a, "b": b}, map={"a": "b", "b": "a"})
    root.load({"c": c}, map={"c": "a"}, only="c")
    assert same([a.content, b.content, c.content], [{"w": torch.full((2,), fill)} for fill in (2.0, 1.0, 1.0)])


def test_a_value_that_became_an_object_and_the_like_are_told(root: Root) -> None:
    root.save({"a": 1, "b": torch.ones(1), "c": Holder({"t": torch.ones(1)})})
    for name, node, told in (
        ("a", torch.ones(1), "is a tensor in the state; the checkpoint has a plain value, 1. Make it the same kind"),
        ("b", 1, r"is a plain value in the state; the checkpoint has a tensor, float32\[1\]. Make it the same kind"),
        ("c", 1, "is a plain value in the state; the checkpoint has an object's state. Make it the same kind"),
        ("b", Holder(), r"is an object in the state; the checkpoint has a tensor, float32\[1\]. Make it the same kind"),
        ("c", torch.ones(1), "is a tensor in the state; the checkpoint has an object's state. Make it the same kind"),
    ):
        for asked in ({"only": name}, {}, {"only": name, "optional": name}):
            with pytest.raises(StateMismatch, match=f"{name}: {told}"):
                root.load({name: node}, **asked)
        report = root.load({name: node}, strict=False)
        assert report.missing == (name,)


def test_an_object_of_which_the_dict_was_saved_is_told(root: Root) -> None:
    """It may be left as it is, but not without a word that the step has something there."""
    root.save({"h": {"last": 3, "rates": [0.5]}, "w": torch.ones(1)})
    holder, weights = Holder({"last": 0}), torch.zeros(1)
    with pytest.raises(StateMismatch, match=r"h: is an object in the state; .* optional='h', .* only='h'\) has there"):
        root.load({"h": holder, "w": weights})
    assert root.load({"h": holder, "w": weights}, optional="h").missing == ("h",)
    assert (holder.content, weights.item()) == ({"last": 0}, 1.0)
    with pytest.raises(StateMismatch, match="g: not in the checkpoint"):
        root.load({"g": Holder(), "w": weights})


# -- what a layout may say


TREES = ["tensor", "value", 5, {"set": []}, {"dict": ["ab"]}, {"dict": [[[0], {"list": []}]]}, {"odict": [[1]]}]


@pytest.mark.parametrize("tree", [*TREES, {"dict": [[{"$tuple": [[1]]}, {"list": []}]]}])
def test_trees_that_nothing_can_be_built_of_are_refused(root: Root, tree: values.Json) -> None:
    root.save({"a": torch.ones(2), "b": 1})
    with open_store(root.url) as store:
        catalog = Catalog(store)
        saved = SavedNames(Reader(Committed(catalog, catalog.manifest(catalog.resolve(root.step))), 0))
        filling = LoadPlan(saved, Selection(None, None), cast=False)
        with pytest.raises((StateMismatch, FormatError), match=r"^c"):
            rebuild(filling, tree, "c", None, maker())
