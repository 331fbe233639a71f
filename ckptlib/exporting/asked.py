"""The settings of exports that a run makes by itself. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptlib.exporting.casting import dtype_of
from ckptlib.exporting.export import HF, SAFETENSORS, ExportOrder, local_path
from ckptlib.exporting.files import INDEX, parse_size, shard_names
from ckptlib.exporting.names import Naming
from ckptlib.format.values import Json
from ckptlib.policy.when import Policy, policy_of

STEP = "{step}"


@dataclass(frozen=True, slots=True)
class Export:
    """What `Checkpointer(export=)` writes for other libraries, as the run ends and at some steps before.

        export=ckptlib.Export("out/{step}", format="hf", only="model", strip="model/", dtype="bf16", steps=10_000)

    Another process on rank 0's host exports a step once it is committed; training does not wait for it. A restart after
    a kill exports the step that it goes on from, where `steps` names that and it is not there; of earlier steps, what
    the killed job still owed is left to `ckptlib export`.

    out:   a path of rank 0's host, as for `ckptlib.export`; "{step}" in it becomes the step.
    steps: what is exported besides the run's last step: the first save from each of these steps on, every so many or by
           a function of the step. None: only the last step.

    The other fields are the arguments of `ckptlib.export`.
    """

    out: str | Path
    format: str = SAFETENSORS
    only: str | Sequence[str] | None = None
    strip: str = ""
    map: Mapping[str, str] = field(default_factory=dict)
    dtype: str | None = None
    max_shard_size: str | int = "5GB"
    steps: Policy | int | Callable[[int], bool] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for settings that cannot work, before a run begins."""
        order_of(self.document())
        local_path(self.out, self.format)
        if self.steps is not None:
            if not policy_of(self.steps).by_step:
                raise ValueError(f"Export(steps={self.steps!r}): expected what can be told from the step alone")
            if STEP not in str(self.out):
                raise ValueError(
                    f"Export(out={str(self.out)!r}, steps=...): each step needs a place; put {STEP} into out"
                )

    def is_due(self, step: int) -> bool:
        """Whether the first save from this step on is to be exported."""
        return self.steps is not None and policy_of(self.steps).due(step)

    def path(self, step: int) -> Path:
        """Returns the path that the step is exported to."""
        return Path(str(self.out).replace(STEP, str(step))).absolute()

    def is_there(self, step: int) -> bool:
        """Whether the step's export is there, whole. For "hf", this looks for files: the directory is there before
        them."""
        out = self.path(step)
        return out.exists() if self.format != HF else any((out / name).exists() for name in (*shard_names(1), INDEX))

    def document(self) -> dict[str, Json]:
        """Returns the settings for another process; see `order_of`."""
        only = [self.only] if isinstance(self.only, str) else self.only
        return {
            "format": self.format,
            "only": None if only is None else [*only],
            "strip": self.strip,
            "map": dict(self.map),
            "dtype": self.dtype,
            "max_shard_size": self.max_shard_size,
        }


def check_export(export: object) -> None:
    """Raises TypeError for a value that is neither an Export nor None."""
    if export is not None and not isinstance(export, Export):
        raise TypeError(f"export={export!r}: expected Export, such as Export('out/{STEP}', steps=10_000)")


def order_of(document: Mapping[str, object]) -> ExportOrder:
    """Returns the order in a document that `Export.document` returned."""
    only, strip, renames = document["only"], document["strip"], document["map"]
    dtype, most = document["dtype"], document["max_shard_size"]
    assert only is None or isinstance(only, list)
    assert isinstance(strip, str)
    assert isinstance(renames, dict)
    assert dtype is None or isinstance(dtype, str)
    assert isinstance(most, (str, int))
    return ExportOrder(str(document["format"]), Naming(only, strip, renames), dtype_of(dtype), parse_size(most))
