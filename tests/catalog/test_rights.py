"""Whether a generation may change its root, or commit a step there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import make_generation, replace_object

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.rights import check_may_change, check_may_commit
from ckptlib.errors import StoreError, Superseded
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Generation
from ckptlib.stores import Store


def test_a_save_of_before_is_orphaned_where_another_process_sweeps(catalog: Catalog) -> None:
    """Not where the newer job is the one that commits it, as from a local disk: that one knows of it, and spares it."""
    save = SaveId(1, make_generation(catalog, 1))
    assert not check_may_commit(catalog, save)
    newest = Generation(GenerationId(2, "00000002"), 1, save, 0.0, {}, "here")
    catalog.generations.put(newest)
    assert check_may_commit(catalog, save)
    catalog.shared.own_record = newest
    assert not check_may_commit(catalog, save)


@pytest.mark.parametrize("commits", [False, True])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_generation_that_began_in_another_root_changes_nothing(
    store: Store, catalog: Catalog, lost: int, commits: bool
) -> None:
    """Its record and the copy of it are gone together; a damage takes one of them."""
    own = make_generation(catalog, 3)

    def check() -> None:
        if commits:
            check_may_commit(catalog, SaveId(1, own))
        else:
            check_may_change(catalog, own)

    check()
    store.delete(*[own.key, keys.copy_key(own.key)][:lost])
    if lost < 2:
        check()
        return
    before = catalog.root()
    check()  # the record alone is lost
    replace_object(store, keys.ROOT, replace(before, id="0" * 32).encode())
    with pytest.raises(StoreError, match="is not there any more: it has no record of generation 000003"):
        check()
    make_generation(catalog, 1)
    with pytest.raises(Superseded, match="another root is there now"):
        check()
    make_generation(catalog, 4)
    with pytest.raises(Superseded, match="Two jobs use one root"):
        check()


def test_who_was_told_which_root_was_opened_takes_no_other_for_it(store: Store, catalog: Catalog) -> None:
    """Though this process reads the root for the first time when it is another one."""
    own = make_generation(catalog, 3)
    late = Catalog(store)
    late.shared.opened_id = catalog.root().id
    store.delete(own.key, keys.copy_key(own.key))
    check_may_change(late, own)
    replace_object(store, keys.ROOT, replace(catalog.root(), id="0" * 32).encode())
    late.root()
    with pytest.raises(StoreError, match="is not there any more"):
        check_may_change(late, own)
