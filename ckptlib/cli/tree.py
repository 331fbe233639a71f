"""The tree of a root's generations: which went on from which, which are on the history, which steps were abandoned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.history import limits_of
from ckptlib.cli.output import Output
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Generation
from ckptlib.words import age, count, plain, span


@dataclass(frozen=True, slots=True)
class Branch:
    """One generation."""

    id: GenerationId
    record: Generation | None
    """None if it cannot be read."""
    on_history: bool
    listed: tuple[SaveId, ...]
    abandoned: tuple[SaveId, ...]

    @property
    def origin(self) -> SaveId | None:
        return None if self.record is None else self.record.resumed_from


def branches(catalog: Catalog) -> list[Branch]:
    """Returns all generations that have a record or a step, ascending."""
    saves = catalog.saves()
    records, lost = catalog.generations.records(saves, newer=True)
    return branches_of(saves, records, lost)


def branches_of(
    saves: Iterable[SaveId], records: Mapping[GenerationId, Generation], lost: Iterable[GenerationId]
) -> list[Branch]:
    """Returns the branches of these saves and records, ascending. Pure. `lost`: generations whose records cannot be
    read."""
    by_generation: dict[GenerationId, list[SaveId]] = {}
    for save in sorted(saves):
        by_generation.setdefault(save.generation, []).append(save)
    limits = limits_of(by_generation, records)
    found = []
    for of in sorted({*records, *lost, *by_generation}):
        limit, own = limits.get(of, -1), by_generation.get(of, [])
        listed = tuple(save for save in own if save.step <= limit)
        found.append(Branch(of, records.get(of), of in limits, listed, tuple(own[len(listed) :])))
    return found


def drawn(found: Sequence[Branch]) -> list[tuple[int, Branch]]:
    """Returns the branches in the order in which they are drawn, each with its depth. Pure.

    A generation's main successor is drawn at the same depth: the one on the history if there is one, else the newest.
    Other generations that went on from it are drawn between the two, a level deeper.
    """
    by_id = {branch.id: branch for branch in found}
    children: dict[GenerationId | None, list[Branch]] = {}
    for branch in found:
        parent = None if branch.origin is None else branch.origin.generation
        children.setdefault(parent if parent in by_id else None, []).append(branch)
    rows: list[tuple[int, Branch]] = []
    left = dict(by_id)
    roots = [*children.get(None, []), *found]  # the latter matter only if records form a cycle
    for root in roots:
        stack = [(0, root)]
        while stack:
            depth, branch = stack.pop()
            if left.pop(branch.id, None) is None:
                continue
            rows.append((depth, branch))
            below = sorted(children.get(branch.id, []), key=lambda child: (child.on_history, child.id))
            stack += [(depth, child) for child in below[-1:]]
            stack += [(depth + 1, child) for child in reversed(below[:-1])]
    return rows


def print_tree(output: Output, found: Sequence[Branch]) -> None:
    """Prints a line for each generation: * if it is on the history, - if it has left it."""
    for depth, branch in drawn(found):
        style = "" if branch.on_history else "dim"
        mark = "*" if branch.on_history else "-"
        output.line(Text(f"{'  ' * depth}{mark} {plain(_words(branch))}", style=style))


def _words(branch: Branch) -> str:
    record, what = branch.record, []
    if record is None:
        what.append("its record cannot be read")
    else:
        if record.resumed_from is not None:
            what.append(f"{'goes back to' if record.rewind else 'from'} step {record.resumed_from.step}")
        what += [count(record.world_size, "rank"), f"{age(record.created)} ago"]
    if branch.listed:
        what.append(span([save.step for save in branch.listed]))
    if branch.abandoned:
        what.append(f"abandoned: {span([save.step for save in branch.abandoned])}")
    if not (branch.listed or branch.abandoned):
        what.append("no step")
    return f"generation {branch.id.number}: {', '.join(what)}"


def document(branch: Branch) -> dict[str, object]:
    record = branch.record
    return {
        "generation": branch.id.number,
        "name": str(branch.id),
        "on_history": branch.on_history,
        "resumed_from": None if branch.origin is None else str(branch.origin),
        "rewind": record.rewind if record else None,
        "world_size": record.world_size if record else None,
        "created": record.created if record else None,
        "host": record.host if record else None,
        "tags": dict(record.tags) if record else {},
        "steps": [*map(str, branch.listed)],
        "abandoned": [*map(str, branch.abandoned)],
    }
