"""Names below paths, compared with a look at each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptlib.format.paths import below_any

PATHS = st.text(alphabet="ab/-0", max_size=5)


@given(paths=st.lists(PATHS, max_size=6), name=PATHS)
def test_below_any(paths: list[str], name: str) -> None:
    assert below_any(paths)(name) == any(name.startswith(f"{path}/") for path in paths)
