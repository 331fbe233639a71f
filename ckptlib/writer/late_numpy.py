"""Imports numpy only when there is something to compute: it is a third of what the imports of a writer take, just when
the training starts, or restores.

`defer` puts an empty module in numpy's place. Modules may import it; it becomes numpy when it is first asked for
anything, and other threads wait until it is.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from types import ModuleType

from typing_extensions import override

NAME = "numpy"

_BEGUN = "__ckptlib_begun__"
_importing = threading.RLock()
"""Held during the import: numpy asks for itself then, and goes on; other threads that ask wait."""


class _Deferred(ModuleType):
    """Stands in for numpy. Has what an import looks at: a spec and a path."""

    @override
    def __getattribute__(self, name: str) -> object:
        if not (name.startswith("__") and name.endswith("__")):
            _become(self)
        return ModuleType.__getattribute__(self, name)  # not super(): the module is of another class by now


def defer() -> None:
    """Defers the import. Call it before numpy is imported: it does nothing if numpy is there, or cannot be found."""
    spec = None if NAME in sys.modules else importlib.util.find_spec(NAME)
    if spec is not None and spec.loader is not None:
        module = _Deferred(NAME)
        module.__spec__, module.__path__ = spec, spec.submodule_search_locations or []
        sys.modules[NAME] = module


def load() -> None:
    """Imports numpy now, rather than when it is first asked for something."""
    _become(sys.modules.get(NAME))


def _become(module: ModuleType | None) -> None:
    with _importing:
        if not isinstance(module, _Deferred) or _BEGUN in module.__dict__:
            return
        module.__dict__[_BEGUN] = True
        spec = module.__spec__
        assert spec is not None
        assert spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        module.__dict__.update(made.__dict__)
        spec.loader.exec_module(module)
        del module.__dict__[_BEGUN]
        module.__class__ = ModuleType  # type: ignore[assignment]
