"""The name on which the ranks of one incarnation agree, in a store that may have what others wrote."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from ckptlib._version import __version__
from ckptlib.errors import AgreementFailed
from ckptlib.ranks.incarnation import agree

RANKS = (3, 5, 7)
"""Numbers in the world."""

WITHIN = timedelta(seconds=60)


def agreed(store: dist.Store, rank: int) -> str:
    return agree(store, RANKS, rank, f"nonce{rank}", WITHIN)


def come(store: dist.Store, rank: int, *version: str) -> None:
    """Comes as a rank of this version does."""
    store.wait(["offer"])
    store.set(f"came/{rank}", " ".join([store.get("offer").decode(), f"nonce{rank}", *version]))


def test_ranks_agree_past_what_an_earlier_incarnation_wrote() -> None:
    """Its version, too, may have been another one."""
    store = dist.HashStore()
    for key, value in {"offer": "old", "came/1": "old n1 0.0.1", "came/2": "old n2", "go/old": "n1 n2\nwhy"}.items():
        store.set(key, value)
    with ThreadPoolExecutor(3) as ranks:
        names = [*ranks.map(lambda rank: agreed(store, rank), (2, 1, 0))]
    assert len({*names}) == 1
    assert names[0] != "old"


@pytest.mark.parametrize(
    ("version", "said"), [((), "of an older version"), (("9.9",), "9.9")], ids=["without", "with another"]
)
def test_all_ranks_are_told_that_one_has_another_version(version: tuple[str, ...], said: str) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as ranks:
        found = [ranks.submit(agreed, store, 0), ranks.submit(agreed, store, 2)]
        ranks.submit(come, store, 1, *version)
        errors = [str(each.exception()) for each in found]
    why = f"rank 5 runs ckptlib {said}, and rank 3 ckptlib {__version__}. All ranks of a job need the same version"
    assert all(error.startswith(why) for error in errors), errors


def test_a_first_rank_of_an_older_version() -> None:
    """As 0.2.0 wrote it."""
    store = dist.HashStore()
    store.set("offer", "name")
    with ThreadPoolExecutor(1) as ranks:
        found = ranks.submit(agreed, store, 1)
        store.wait(["came/1"])
        store.set("go/name", f"{store.get('came/1').decode().partition(' ')[2]} nonce2")
        with pytest.raises(AgreementFailed, match=rf"rank 3 runs ckptlib of an older version than {__version__}"):
            found.result()
