"""Files that each name a step of the root beside them in a line of JSON; Lightning keeps one for each checkpoint.

This module knows neither Lightning nor tensors.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path, PurePosixPath

from lightning.fabric.utilities.cloud_io import get_filesystem

from ckptlib.adapters.step_folders import MOST, ROOT
from ckptlib.errors import FormatError
from ckptlib.format.keys import SaveId, parse_save
from ckptlib.stores.flushing import flush_path


def root_of(where: str) -> str:
    scheme, found, rest = where.rpartition("://")
    return f"{scheme}{found}{PurePosixPath(rest).parent / ROOT}"


def save_at(where: str) -> SaveId:
    """Returns the step that a file names. Raises FileNotFoundError; FormatError for a file of another kind."""
    fs = get_filesystem(where)
    if not fs.exists(where):
        raise FileNotFoundError(where)
    with fs.open(where, "rb") as file:
        data = file.read(MOST)
    try:
        found = json.loads(data)
        if found["ckptlib"] != ROOT:
            raise ValueError(found["ckptlib"])
        return parse_save(found["step"])
    except (FormatError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(
            f"{where}: expected a line of JSON that names a step, as CkptlibCheckpointIO writes it, got {data[:40]!r}; "
            "a file that Lightning wrote itself loads without the plugin"
        ) from error


def named_beside(where: str) -> set[SaveId]:
    """Returns the steps that files of the same directory name."""
    fs, found = get_filesystem(where), set()
    for entry in fs.ls(where.rpartition("/")[0] or ".", detail=True):
        if entry["type"] != "directory" and (entry["size"] or 0) <= MOST:
            with suppress(FormatError, FileNotFoundError):  # another file, or one that has just been removed
                found.add(save_at(fs.unstrip_protocol(entry["name"])))
    return found


def write(where: str, save: SaveId) -> SaveId | None:
    """Writes a file that names a step. Returns the step that it named before, if any."""
    fs = get_filesystem(where)
    text = json.dumps({"ckptlib": ROOT, "step": str(save)}) + "\n"
    partial = f"{where}.{save.step}.part"
    with fs.open(partial, "w") as file:
        file.write(text)
    is_local = "://" not in where
    if is_local:
        flush_path(partial)
    replaced = None
    with suppress(FormatError, OSError):  # there is none, or another kind of file
        replaced = save_at(where)
    fs.mv(partial, where)
    if is_local:
        flush_path(Path(where).parent)
    return replaced
