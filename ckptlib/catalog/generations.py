"""The generations of a root: which have begun there, and what their records tell.

`history` decides what that means for steps; `shared_documents` reads and puts each record and its copy. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ckptlib.catalog.history import check_goes_on, check_head, read_records
from ckptlib.catalog.reading import warm
from ckptlib.catalog.shared_documents import SharedDocuments
from ckptlib.catalog.unreadable import UNREADABLE
from ckptlib.errors import CkptError, NewerFormat
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Generation


class Generations:
    """The generations of one root in one store. Each record is read once and kept."""

    def __init__(self, shared: SharedDocuments) -> None:
        self._shared = shared
        self._store = shared.store
        self._records: dict[GenerationId, Generation] = {}
        self._accounted: frozenset[GenerationId] = frozenset()

    def ids(self) -> list[GenerationId]:
        """Lists every generation that has put its record, ascending."""
        listed = [entry.key for entry in self._store.scan(keys.GENERATIONS)]
        self._accounted = frozenset(filter(None, map(keys.parse_account_key, listed)))
        return sorted(filter(None, map(keys.parse_generation_key, listed)))

    def was_accounted(self, generation: GenerationId) -> bool:
        """Whether the generation had left an account of its time when `ids` last listed them; see `accounts`."""
        return generation in self._accounted

    def record(self, generation: GenerationId) -> Generation:
        """Returns the generation's record. Raises ObjectNotFound, CorruptData or FormatError."""
        if generation not in self._records:
            self._records[generation] = self._shared.generation(generation)
        return self._records[generation]

    def warm(self, ids: Iterable[GenerationId]) -> None:
        """Reads the records of these generations ahead, many at once."""
        warm(self.record, [generation for generation in ids if generation not in self._records])

    def records(
        self, saves: Iterable[SaveId], newer: bool = False, ids: Sequence[GenerationId] | None = None
    ) -> tuple[dict[GenerationId, Generation], dict[GenerationId, CkptError]]:
        """Returns the record of each generation, or why it cannot be read; history ends at a generation without one.

        `saves`: the committed ones, listed before `ids`, since a committer puts its record first. `ids`: the
        generations, if listed since. Raises NewerFormat, unless `newer`.
        """
        ids = self.ids() if ids is None else ids
        self.warm(ids)
        return read_records(ids, saves, self.record, newer)

    def check_versions(self, ids: Sequence[GenerationId] | None = None) -> None:
        """Raises NewerFormat if a newer ckptlib has written the root's document or the record of a generation.

        This version could take an abandoned step for the newest, and delete packs that are needed. Other damage of
        these documents is reported when they are needed. `ids`: the generations, if listed before.
        """
        ids = self.ids() if ids is None else ids
        self.warm(ids)
        reads: list[Callable[[], object]] = [partial(self.record, generation) for generation in ids]
        for read in reads if self._shared.has_read_root else [self._shared.root, *reads]:
            try:
                read()
            except NewerFormat:
                raise
            except UNREADABLE:
                continue

    def check_head(self, generation: GenerationId) -> None:
        """Raises Superseded if a newer generation has put its record."""
        check_head(generation, self.ids(), self._store.url)

    def check_goes_on(self, save: SaveId) -> None:
        """Raises Superseded if a newer generation has put its record, and this save is not on the history of the newest
        one: the save may not be committed any more."""
        check_goes_on(save, self.ids(), self.record, self._store.url)

    def put(self, generation: Generation) -> None:
        """Puts a generation's record, which supersedes older ones; a rewind also hides steps after its origin.

        Raises FormatError for a record that nobody could read, which would close the root; puts nothing then.
        """
        document = generation.encode()
        Generation.decode(document, generation.id.key)
        self._shared.put_generation(generation.id, document)
