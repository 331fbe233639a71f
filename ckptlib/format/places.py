"""Where the chunks of a part lie in packs, as their own bytes or as frames of a codec. Types and JSON; no I/O."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptlib.format.documents import Fields
from ckptlib.format.values import Json

MAX_CODED_BYTES = 64 * 1024 * 1024
"""The most bytes of a chunk that is stored as a frame: a reader allocates all of it, whatever the frame's own size is.
ckptlib writes chunks of a sixteenth of that."""

MAX_PACKS = 10**6

_CODEC_NAME = "[a-z0-9-]{1,40}"


class Base(NamedTuple):
    """The chunk that a frame was made against; an earlier save stored it whole."""

    pack: int
    """Position in the part's packs."""
    offset: int
    stored: int
    """Bytes in the pack."""
    codec: str | None
    """Codec of these bytes; None: they are the chunk as it is."""
    digest: str
    """Digest of the decoded base, which has as many bytes as the chunk that refers to it."""


class Loss(NamedTuple):
    """The loss of a frame that does not give back exactly what was saved."""

    raw_digest: str
    """Digest of the bytes that were saved; a later save compares with it."""
    absolute: float
    """The largest error of a number, in the tensor's own unit."""
    relative: float
    """The largest error of a number, as a fraction of the largest absolute value in its block."""


@dataclass(frozen=True, slots=True)
class Coding:
    """How a chunk is stored, if not as its own bytes."""

    codec: str
    stored: int
    """Bytes of the frame."""
    base: Base | None = None
    loss: Loss | None = None
    """None if decoding gives back exactly the bytes that were saved."""


class Places(NamedTuple):
    """The places of the chunks of a table."""

    packs: tuple[int, ...]
    """Position in the part's packs, per chunk."""
    offsets: tuple[int, ...]
    """Bytes from the start of the pack's file, per chunk."""
    codings: Mapping[int, Coding]
    """Codings of the chunks that are not stored as they are, by chunk."""

    def stored(self, nbytes: Sequence[int]) -> Sequence[int]:
        """Returns the bytes of each chunk in the pack. `nbytes`: of the chunks themselves."""
        if not self.codings:
            return nbytes
        found = [*nbytes]
        for chunk, coding in self.codings.items():
            found[chunk] = coding.stored
        return found


def encode_places(places: Places, nbytes: Sequence[int]) -> dict[str, Json]:
    """Returns the fields of a part that say where its chunks are. `nbytes`: of the chunks themselves."""
    stored = places.stored(nbytes)
    fields: dict[str, Json] = {"runs": _to_runs(places.packs, places.offsets, stored)}
    if not places.codings:
        return {"places": fields}
    codings = places.codings
    based = {chunk: coding.base for chunk, coding in sorted(codings.items()) if coding.base is not None}
    names = sorted({coding.codec for coding in codings.values()})
    names += sorted({base.codec for base in based.values() if base.codec is not None} - {*names})
    number: dict[str | None, int] = {None: 0, **{name: at for at, name in enumerate(names, 1)}}
    codec = [number[codings[chunk].codec] if chunk in codings else 0 for chunk in range(len(nbytes))]
    fields |= {"codecs": list(names), "codec": list(codec), "stored": list(stored)}
    found: dict[str, Json] = {"places": fields}
    if based:
        found["bases"] = {
            "chunk": list(based),
            "pack": [base.pack for base in based.values()],
            "offset": [base.offset for base in based.values()],
            "stored": [base.stored for base in based.values()],
            "codec": [number[base.codec] for base in based.values()],
            "digests": "".join(base.digest for base in based.values()),
        }
    lossy = {chunk: coding.loss for chunk, coding in sorted(codings.items()) if coding.loss is not None}
    if lossy:
        found["lossy"] = {
            "chunk": list(lossy),
            "absolute": [loss.absolute for loss in lossy.values()],
            "relative": [loss.relative for loss in lossy.values()],
            "digests": "".join(loss.raw_digest for loss in lossy.values()),
        }
    return found


def _to_runs(packs: Sequence[int], offsets: Sequence[int], stored: Sequence[int]) -> Json:
    """Returns runs of chunks that follow one another in a pack: [pack, offset, number of chunks]."""
    runs: list[list[int]] = []
    last, end = -1, -1
    for pack, offset, nbytes in zip(packs, offsets, stored, strict=True):
        if pack == last and offset == end:
            runs[-1][2] += 1
        else:
            runs.append([pack, offset, 1])
            last = pack
        end = offset + nbytes
    return runs  # type: ignore[return-value]


def decode_places(part: Fields, nbytes: Sequence[int]) -> Places:
    """Returns the places of chunks of these sizes. Raises FormatError unless each has a valid one."""
    fields = part.inner("places")
    codings = _decode_codings(part, fields, nbytes) if "codec" in fields else {}
    stored = Places((), (), codings).stored(nbytes)
    packs, offsets = _decode_runs(fields, stored)
    return Places(packs, offsets, codings)


def _decode_runs(fields: Fields, stored: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Counts the runs before it expands them: a few bytes can stand for a billion chunks."""
    rows = []
    for row in fields.items("runs"):
        match row:
            case [int(pack), int(offset), int(count)] if (
                {*map(type, row)} == {int}  # True is an int, too
                and 0 <= pack < MAX_PACKS
                and 0 <= offset <= 2**62
                and count >= 1
            ):
                rows.append((pack, offset, count))
            case _:
                raise fields.fail(f"not a run of chunks: {str(row)[:80]}")
    if sum(count for _, _, count in rows) != len(stored):
        raise fields.fail(f"runs are not of {len(stored)} chunks")
    packs: list[int] = []
    offsets: list[int] = []
    for pack, offset, count in rows:
        first = len(packs)
        packs += [pack] * count
        offsets += itertools.accumulate(stored[first : first + count - 1], initial=offset)
    return tuple(packs), tuple(offsets)


def _decode_codings(part: Fields, fields: Fields, nbytes: Sequence[int]) -> dict[int, Coding]:
    names = fields.texts("codecs", _CODEC_NAME)
    codec, stored = fields.integers("codec", 0, len(names)), fields.integers("stored", 1)
    if not len(codec) == len(stored) == len(nbytes):
        raise fields.fail("columns of chunks differ in length")
    bases, lossy = _decode_bases(part, names, nbytes), _decode_lossy(part, len(nbytes))
    found: dict[int, Coding] = {}
    for chunk, number in enumerate(codec):
        if number == 0:
            if stored[chunk] != nbytes[chunk]:
                raise fields.fail(f"chunk {chunk} of {nbytes[chunk]} bytes is stored as it is in {stored[chunk]}")
            continue
        if nbytes[chunk] > MAX_CODED_BYTES:
            raise fields.fail(f"chunk {chunk} has {nbytes[chunk]} bytes; a coded one has at most {MAX_CODED_BYTES}")
        if stored[chunk] > nbytes[chunk]:
            raise fields.fail(f"chunk {chunk} of {nbytes[chunk]} bytes is coded in {stored[chunk]}, which are more")
        found[chunk] = Coding(names[number - 1], stored[chunk], bases.get(chunk), lossy.get(chunk))
    if (bases.keys() | lossy.keys()) - found.keys():
        raise fields.fail("a chunk that is stored as it is has a base, or is lossy")
    return found


def _decode_bases(part: Fields, names: Sequence[str], nbytes: Sequence[int]) -> dict[int, Base]:
    if "bases" not in part:
        return {}
    fields = part.inner("bases")
    chunks = _decode_chunks(fields, len(nbytes))
    columns = (
        fields.integers("pack", 0, MAX_PACKS - 1),
        fields.integers("offset"),
        fields.integers("stored", 1),
        [None if at == 0 else names[at - 1] for at in fields.integers("codec", 0, len(names))],
        fields.digests(len(chunks)),
    )
    if any(len(column) != len(chunks) for column in columns):
        raise fields.fail("columns of bases differ in length")
    found = dict(zip(chunks, itertools.starmap(Base, zip(*columns, strict=True)), strict=True))
    for chunk, base in found.items():
        if base.stored > nbytes[chunk] or (base.codec is None and base.stored != nbytes[chunk]):
            raise fields.fail(f"the base of chunk {chunk}, of {nbytes[chunk]} bytes, is stored in {base.stored}")
    return found


def _decode_lossy(part: Fields, num: int) -> dict[int, Loss]:
    if "lossy" not in part:
        return {}
    fields = part.inner("lossy")
    chunks = _decode_chunks(fields, num)
    digests = fields.digests(len(chunks))
    bounds = [fields.numbers("absolute"), fields.numbers("relative")]
    if any(len(column) != len(chunks) or min(column, default=0.0) < 0 for column in bounds):
        raise fields.fail(f"not the bounds of {len(chunks)} chunks")
    return dict(zip(chunks, itertools.starmap(Loss, zip(digests, *bounds, strict=True)), strict=True))


def _decode_chunks(fields: Fields, num: int) -> list[int]:
    chunks = fields.integers("chunk", 0, num - 1)
    if any(a >= b for a, b in itertools.pairwise(chunks)):
        raise fields.fail("chunks are not in order")
    return chunks
