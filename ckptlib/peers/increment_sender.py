"""The sending end of increments, from a rank to one holder of its snapshots: which parameters are sent so, by which
rules, and why others are not.

All that this takes is in the slots of both snapshots: names, groups and classes of optimizers, their hyper-parameters
as they were after the step, and the tensors. Nothing is asked of the training, so nothing waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ckptlib.codecs.optimizer_step import OptimizerStep
from ckptlib.errors import CkptError, FormatError
from ckptlib.format import values
from ckptlib.format.values import Json
from ckptlib.peers.increments import HEAD, RAW, STEP, Base, Stretch, are_lacking, stretches
from ckptlib.peers.parameters import Parameter, Parameters, Span, find_parameters
from ckptlib.peers.ranges import Ranges
from ckptlib.peers.update_guesses import Guess, Options, guesses
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.slot import Slot
from ckptlib.slots.snapshot import SnapshotReader
from ckptlib.state.optimizers import group_path, state_path

NO_BASE = "the holder has no snapshot of the step before"
NOT_NEXT = "its optimizer did not take one step"
NO_FIT = "no rule fits"
ELSEWHERE = "the holder has it"
REFUSED = "the holder refused"


NUM_SAMPLED = 8
"""How many parameters of one group and step are sampled, lest the holder wait for thousands. The rest is assumed to be
updated alike; a parameter for which that is wrong is sent whole."""


class Update(NamedTuple):
    """How one parameter was updated."""

    parameter: Parameter
    guess: Guess


class _Sent(NamedTuple):
    """A snapshot, and where it lies on this rank."""

    slot: Slot
    header: SlotHeader
    values: Mapping[str, Json]
    """Values of the state other than tensors."""


class StepSender:
    """The increments from this rank to one holder. For one thread."""

    def __init__(self) -> None:
        self._reader = SnapshotReader()
        self._coder = OptimizerStep()
        self._known: tuple[str, Parameters] | None = None
        """Digest of the table, and the parameters found by it."""
        self._next: _Sent | None = None
        self._last: _Sent | None = None
        """The snapshot that the holder sealed last."""
        self.coded = 0
        """Bytes of the newest snapshot that went as increments, before they were coded."""
        self.left: Mapping[str, int] = {}
        """Bytes of it that did not, and that its holder lacked, by reason."""

    @property
    def base(self) -> Slot | None:
        """The slot that must not be overwritten while something is sent. Any thread may ask."""
        last = self._last
        return None if last is None else last.slot

    def begin(self, void: Callable[[int], bool]) -> None:
        """Prepares to send another snapshot. `void`: whether nothing may build on the snapshot of a step."""
        self.coded, self.left = 0, {}
        if self._last is not None and void(self._last.header.save.step):
            self._last = None

    def offer(self, slot: Slot, header: SlotHeader) -> None:
        """Notes the snapshot that is sent next. Raises CorruptData, FormatError."""
        snapshot = self._reader.read(slot, header)
        digest = header.documents["table"][2]
        if self._known is None or self._known[0] != digest:
            self._known = digest, find_parameters(snapshot.layout, snapshot.table)
        self._next = _Sent(slot, header, snapshot.values)

    def sealed(self) -> None:
        """Notes that the holder has sealed the snapshot."""
        self._last, self._next = self._next, None

    def plan(self, lacking: Ranges, base: Base | None) -> list[Update]:
        """Returns the parameters that are sent as increments, and the rule of each."""
        new, last = self._next, self._last
        assert new is not None
        assert self._known is not None
        parameters = self._known[1]
        left = Counter(parameters.left)
        found: list[Update] = []
        if last is None or not self._is_base(last, new.header, base):
            left[NO_BASE] += sum(span.nbytes for p in parameters.found for span in p.spans)
        else:
            found = list(self._updates(parameters, new, last, lacking, left))
        self.coded = sum(span.nbytes for update in found for span in update.parameter.spans)
        self.left = +left
        return found

    def refused(self, updates: Sequence[Update]) -> None:
        """Notes that the holder refused: the planned parameters are sent whole."""
        self.left = {**self.left, REFUSED: sum(span.nbytes for update in updates for span in update.parameter.spans)}
        self.coded = 0

    def frames(self, updates: Sequence[Update]) -> Iterator[tuple[bytes, bytes]]:
        """Yields the head and the frame of each stretch in turn."""
        assert self._next is not None
        assert self._last is not None
        for parameter, guess in updates:
            for stretch in stretches([parameter.spans]):
                new = stretch.words(self._next.slot)
                frame = self._coder.encode(guess.rule, guess.by, stretch.words(self._last.slot), new)
                if frame is None:
                    frame, how = b"".join(words.tobytes() for words in new), RAW
                    self.coded -= stretch.nbytes
                    self.left = {**self.left, NO_FIT: self.left.get(NO_FIT, 0) + stretch.nbytes}
                else:
                    how = STEP
                yield HEAD.pack(how, len(frame)), frame

    def intact(self) -> bool:
        """Returns whether the base is unchanged since this transfer began."""
        try:
            return self._last is not None and self._last.slot.read_header() == self._last.header
        except CkptError:  # it is being overwritten, or was closed, since it was too small
            return False

    def _is_base(self, last: _Sent, header: SlotHeader, base: Base | None) -> bool:
        return (
            Base.of(last.header) == base
            and last.header.documents["table"] == header.documents["table"]
            and self.intact()
        )

    def _updates(
        self, parameters: Parameters, new: _Sent, last: _Sent, lacking: Ranges, left: Counter[str]
    ) -> Iterator[Update]:
        steps: dict[tuple[str, int], Span] = {}
        """A span with the step of each optimizer and group, for parameters whose own is another rank's to write."""
        for p in parameters.found:
            span = parameters.scalars.get(state_path(p.optimizer, p.name, "step"))
            if span is not None:
                steps.setdefault((p.optimizer, p.group), span)
        likely: dict[tuple[str, int, float | None], Guess] = {}
        tried: Counter[tuple[str, int, float | None]] = Counter()
        for p in parameters.found:
            nbytes = sum(span.nbytes for span in p.spans)
            if not are_lacking(p.spans, lacking):
                left[ELSEWHERE] += nbytes
                continue
            span = parameters.scalars.get(state_path(p.optimizer, p.name, "step"), steps.get((p.optimizer, p.group)))
            step = None if span is None else _number(span, new.slot)
            if span is not None and step is not None and step != (_number(span, last.slot) or 0) + 1:
                left[NOT_NEXT] += nbytes
                continue
            alike = p.optimizer, p.group, step
            guess = likely.get(alike)
            if guess is None or tried[alike] < NUM_SAMPLED:
                guess = self._choose(p, parameters, new, last, step, guess)
                tried[alike] += guess is not None
            if guess is None:
                left[NO_FIT] += nbytes
            else:
                likely[alike] = guess
                yield Update(p, guess)

    def _choose(
        self, p: Parameter, parameters: Parameters, new: _Sent, last: _Sent, step: float | None, likely: Guess | None
    ) -> Guess | None:
        """Returns how a parameter was updated, as far as a sample tells; `likely` if that fits, as for others like
        it."""
        old_words, new_words = (Stretch(p.spans, 0, p.count).words(sent.slot) for sent in (last, new))

        def share(guess: Guess) -> float:
            return self._coder.try_sample(guess.rule, guess.by, old_words, new_words) or 2.0

        if likely is not None and share(likely) < 1:
            return likely
        now, before = (_options(p, parameters, sent) for sent in (new, last))
        kind = parameters.classes.get(p.optimizer, "")
        found = [(share(guess), guess) for guess in guesses(p.family, kind, now, before, step, new.header.save.step)]
        best = min(found, key=lambda pair: pair[0], default=(2.0, None))
        return best[1] if best[0] < 1 else None


def _options(p: Parameter, parameters: Parameters, sent: _Sent) -> Options:
    """Returns the options of the parameter's group; {} if they cannot be told."""
    path = group_path(p.optimizer, p.group)
    try:
        found = values.decode(sent.values.get(path, {}), path)
    except FormatError:
        return {}
    options = dict(found) if isinstance(found, Mapping) else {}
    rate = parameters.scalars.get(f"{path}/lr")
    return options if rate is None else {**options, "lr": _number(rate, sent.slot)}


def _number(span: Span, slot: Slot) -> float | None:
    """Returns the only element of a tensor."""
    dtype = {"float32": np.float32, "float64": np.float64, "int64": np.int64}.get(span.dtype)
    return None if dtype is None else float(np.frombuffer(slot.body[span.offset : span.end], dtype)[0])
