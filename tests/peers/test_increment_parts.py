"""The parts of increments by themselves: which shards belong together, how they may be updated, and what peers say."""

from __future__ import annotations

import json
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import ROOT_ID, layout_of, shards_of
from workers import rank_slots
from workers.no_threads import NO_STACK

from ckptlib.codecs.update_rules import Adam, Lion, Momentum, Nesterov
from ckptlib.errors import AgreementFailed, FormatError
from ckptlib.format.body_layout import body_nbytes, lay_out
from ckptlib.format.box import Box
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.layout import Layout
from ckptlib.peers import increments
from ckptlib.peers.increment_receiver import StepReceiver
from ckptlib.peers.increment_sender import NO_BASE, StepSender
from ckptlib.peers.increments import RAW, STEP, Base, Stretch, beside, receive_increments, send_increments, stretches
from ckptlib.peers.parameters import ADAM, DTYPE, LION, OTHER, SEVERAL, SGD, SMALL, Span, find_parameters
from ckptlib.peers.ranges import MAX_RANGES, ByteRange, everything
from ckptlib.peers.update_guesses import guesses
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.slot import Slot
from ckptlib.slots.snapshot import Snapshot

COUNT = 20_000


def layout(keys: dict[str, Any], groups: list[list[str]]) -> Layout:
    """Of arrays by name; the optimizer is called `optim`."""
    found = layout_of(keys)
    return replace(found, objects={"optim": {"optimizer": {"groups": groups, "class": "AdamW", "keys": []}}})  # type: ignore[dict-item]


def arrays(name: str, *keys: str, dtype: Any = np.float32, count: int = COUNT) -> dict[str, Any]:
    return {name: np.zeros(count, dtype), **{f"optim/{name}/{key}": np.zeros(count, dtype) for key in keys}}


# Which shards belong together


def test_parameters() -> None:
    made = layout(
        {
            **arrays("adam", "exp_avg", "exp_avg_sq"),
            **arrays("lion", "exp_avg"),
            **arrays("sgd", "momentum_buffer"),
            **arrays("wide", "exp_avg", "exp_avg_sq", dtype=np.float64),
            **arrays("small", "exp_avg", "exp_avg_sq", count=100),
            **arrays("odd", "square_avg"),
            **arrays("frozen"),
            "optim/adam/step": np.zeros((), np.float32),
        },
        [["adam", "lion"], ["sgd", "wide", "small", "odd", "never saved"]],
    )
    found = find_parameters(made, lay_out(made, shards_of(made, 0)))
    assert [(p.name, p.group, p.family, p.count) for p in found.found] == [
        ("adam", 0, ADAM, COUNT),
        ("lion", 0, LION, COUNT),
        ("sgd", 1, SGD, COUNT),
    ]
    assert found.left == {DTYPE: 3 * 8 * COUNT, SMALL: 3 * 400, OTHER: (2 + 1) * 4 * COUNT + 4}
    assert found.scalars.keys() == {"optim/adam/step"}
    assert found.classes == {"optim": "AdamW"}
    table = lay_out(made, shards_of(made, 0))
    names = [[made.tensors[table.tensors[span.shard]].name for span in p.spans] for p in found.found]
    assert names[0] == ["optim/adam/exp_avg", "optim/adam/exp_avg_sq", "adam"]


@pytest.mark.parametrize("lacking", ["adam", "optim/adam/exp_avg", "optim/adam/exp_avg_sq"])
def test_state_with_several_writers(lacking: str) -> None:
    """Whole tensors, or the boxes of some of them."""
    made = layout(arrays("adam", "exp_avg", "exp_avg_sq"), [["adam"]])
    shards = [(name, box) for name, box in shards_of(made, 0) if name != lacking]
    assert find_parameters(made, lay_out(made, shards)).left == {SEVERAL: 2 * 4 * COUNT}
    cut = [*shards, (lacking, Box((0,), (COUNT // 2,)))]
    found = find_parameters(made, lay_out(made, cut))
    assert (found.found, found.left) == ((), {SEVERAL: 2 * 4 * COUNT + 2 * COUNT})


def test_tied_weights() -> None:
    made = layout(arrays("adam", "exp_avg", "exp_avg_sq"), [["also"]])
    moments = {f"optim/also/{key}": np.zeros(COUNT, np.float32) for key in ADAM}
    made = replace(layout({"adam": np.zeros(COUNT, np.float32), **moments}, [["also"]]), aliases={"also": "adam"})
    assert len(find_parameters(made, lay_out(made, shards_of(made, 0))).found) == 1


# How they may be updated

ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def floats(by: Any) -> list[float]:
    return [float(value) for value in by]


def test_guesses_of_adam() -> None:
    (found,) = guesses(ADAM, "AdamW", ADAMW, ADAMW, 31.0, 7)
    assert isinstance(found.rule, Adam)
    at = {"betas": (0.9, 0.95), "eps": 1e-8}
    assert floats(found.by) == floats(Adam.scalars(lr=1e-3, decay=0.1, step=31.0, **at))  # type: ignore[arg-type]
    both = guesses(ADAM, "AdamW", ADAMW, {**ADAMW, "lr": 2e-3}, None, 7)
    rates = [floats(Adam.scalars(lr=lr, decay=0.1, step=7, **at)) for lr in (1e-3, 2e-3)]  # type: ignore[arg-type]
    assert [floats(guess.by) for guess in both] == rates, "a scheduler may have stepped; no step is known"
    decays = [floats(guess.by)[6] for guess in guesses(ADAM, "Unknown", ADAMW, ADAMW, 31.0, 7)]
    assert decays == [np.float32(1 - 1e-4), 1.0]
    for options in ({"decoupled_weight_decay": False}, {"weight_decay": 0}):
        (guess,) = guesses(ADAM, "Adam", {**ADAMW, **options}, {}, 31.0, 7)
        assert floats(guess.by)[6] == 1.0


def test_guesses_of_others() -> None:
    options = {"lr": 1e-2, "momentum": 0.9, "dampening": 0, "nesterov": False, "weight_decay": 0.1}
    (found,) = guesses(SGD, "SGD", options, options, None, 7)
    assert (type(found.rule), floats(found.by)) == (Momentum, floats(Momentum.scalars(lr=1e-2, momentum=0.9)))
    (found,) = guesses(SGD, "SGD", {**options, "nesterov": True}, options, None, 7)
    assert isinstance(found.rule, Nesterov)
    (found,) = guesses(LION, "Lion", ADAMW, ADAMW, None, 7)
    assert floats(found.by) == floats(Lion.scalars(lr=1e-3, betas=(0.9, 0.95), decay=0.1))
    assert len(guesses(LION, "MyLion", ADAMW, ADAMW, None, 7)) == 2


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"lr": None}, {"lr": True}, {"lr": "1e-3"}, {"lr": float("nan")}, {"lr": 1e300}, {"lr": [1e-3]}),
        *({"betas": 0.9}, {"betas": (0.9,)}, {"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)}, {"betas": ("a", "b")}),
        *({"eps": None}, {"eps": float("inf")}),
    ],
)
def test_groups_that_do_not_say_what_a_rule_needs(options: dict[str, object]) -> None:
    assert guesses(ADAM, "AdamW", {**ADAMW, **options} if options else {}, {}, 31.0, 7) == []


def test_steps_that_are_none() -> None:
    for step in (0.0, -1.0, float("nan")):
        assert guesses(ADAM, "AdamW", ADAMW, ADAMW, step, 7) == []


# What peers say


def snapshot() -> Snapshot:
    made = layout({**arrays("a", "exp_avg", "exp_avg_sq"), **arrays("b", "exp_avg", count=COUNT + 1)}, [["a", "b"]])
    table = lay_out(made, shards_of(made, 0))
    save = SaveId(7, GenerationId(1, "0" * 8))
    header = SlotHeader(ROOT_ID, save, 0, 2, 7, 14, body_nbytes(table), {})
    return Snapshot(header, table, made, "xxh3", (), {}, {}, 0.0)


def test_plans() -> None:
    found = snapshot()
    whole = [ByteRange(0, found.header.body_nbytes)]
    names = [found.layout.tensors[tensor].name for tensor in found.table.tensors]
    state = [names.index(name) for name in ("optim/a/exp_avg", "optim/a/exp_avg_sq", "a")]
    other = [names.index(name) for name in ("optim/b/exp_avg", "b")]
    receiver = StepReceiver()
    for plan in ([], [state], [other, state]):
        accepted = receiver.accept(json.dumps(plan).encode(), found, whole)
        assert [[span.shard for span in spans] for spans in accepted] == plan
        assert receiver.used == bool(plan)
    for wrong in (
        *(b"", b"7", b"[7]", b"[[1.5e400, 0]]", b'[["a", "b"]]', b"[" * 100_000, b"\xff", b"null"),
        *(json.dumps(plan).encode() for plan in ([[]], [[0]], [[0] * 4], [[-1, 0]], [[0, 99]], [[0, 0]])),
        *(json.dumps(plan).encode() for plan in ([state, state], [[state[0], other[0]]])),
    ):
        with pytest.raises(FormatError, match="plan of increments of rank 0"):
            receiver.accept(wrong, found, whole)
    with pytest.raises(FormatError, match="are not lacking"):
        receiver.accept(json.dumps([state]).encode(), found, [ByteRange(0, 4096)])


def test_no_base_is_named_for_what_lies_otherwise(tmp_path: Path) -> None:
    """As when a parameter was added since: the same place holds something else, or nothing."""
    slot, receiver = Slot.create(tmp_path, "slot", 4096), StepReceiver()
    tables = [{"table": (4096, 100, digit * 32)} for digit in "01"]
    one, same, other = (
        SlotHeader(ROOT_ID, SaveId(step, GenerationId(1, "0" * 8)), 0, 1, step, 2 * step, 4096, tables[table])
        for step, table in ((1, 0), (2, 0), (2, 1))
    )
    slot.write_header(one)
    receiver.sealed(slot, one)
    assert receiver.offer(same) == Base.of(one)
    assert receiver.offer(other) is None
    slot.close()


@pytest.mark.parametrize("closed", [False, True], ids=["overwritten", "closed"])
def test_nothing_builds_on_a_slot_that_holds_its_snapshot_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    """Though the holder has that snapshot: an arena closes a slot that has become too small."""
    monkeypatch.setattr(rank_slots, "layout_of", lambda keys: layout(keys, [["w"]]))
    first, second = (Slot.create(tmp_path, name, 1 << 20) for name in ("first", "second"))
    sender, state = StepSender(), arrays("w", "exp_avg", "exp_avg_sq")
    header = rank_slots.seal(first, 1, 0, state)
    sender.offer(first, header)
    sender.sealed()
    newer = rank_slots.seal(second, 2, 0, state)
    sender.offer(second, newer)
    if closed:
        first.close()
    else:
        rank_slots.seal(first, 3, 0, state)
    assert sender.plan(everything(newer), Base.of(header)) == []
    assert sender.left == {NO_BASE: 3 * 4 * COUNT}


def test_what_is_left_beside_increments() -> None:
    large = tuple(Span(n, n * 303_104, 300_000, "float32") for n in range(2))
    assert beside([ByteRange(0, 2 * 303_104 + 10)], [large]) == [ByteRange(606_208, 606_218)], "nor what is between"
    small = (Span(0, 100, 50, "float32"), Span(1, 300, 50, "float32"))
    many = [(Span(n, 100 * n, 50, "float32"),) for n in range(2 * MAX_RANGES)]
    assert len(beside([ByteRange(0, 200 * MAX_RANGES)], many)) <= MAX_RANGES, "each costs a message"
    assert beside([ByteRange(0, 400)], [small]) == [ByteRange(0, 100), ByteRange(150, 300), ByteRange(350, 400)]


class Wire:
    """A link by which these messages come, and no others."""

    broken = False

    def __init__(self, *messages: bytes) -> None:
        self.messages = deque(messages)

    def begin_recv(self, frm: int, buffer: memoryview, tag: int) -> Callable[[], None]:
        def wait() -> None:
            buffer[:] = self.messages.popleft()

        return wait

    def give_up(self, peer: int, why: str) -> AgreementFailed:
        self.broken = True
        return AgreementFailed(why)


def head(how: int, nbytes: int) -> bytes:
    return struct.pack("<BI", how, nbytes)


def receive(wire: Any, expected: list[Stretch], receiver: StepReceiver, slot: Slot) -> FormatError | None:
    def decode(how: int, frame: memoryview, stretch: Stretch) -> None:
        receiver.decode(slot, how, frame, stretch)

    return receive_increments(wire, 1, 0, expected, decode)


def test_frames_that_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that was announced is received, and the first of what is wrong told; what cannot be, ends the link."""
    monkeypatch.setattr(increments, "STRETCH", 100)
    slot = Slot.create(tmp_path, "slot", 1 << 20)
    spans = (Span(0, 0, 1000, "float32"), Span(1, 4096, 1000, "float32"))
    expected = [*stretches([spans])]
    assert [(s.start, s.stop, s.nbytes) for s in expected] == [(0, 100, 800), (100, 200, 800), (200, 250, 400)]
    good = [(head(RAW, s.nbytes), bytes([n + 1]) * s.nbytes) for n, s in enumerate(expected)]

    def messages(*pairs: tuple[bytes, bytes]) -> list[bytes]:
        # as they are received: the next head is asked for before a frame is waited for, and comes behind it
        return [part for pair in pairs for part in pair]

    receiver = StepReceiver()
    assert receive(Wire(*messages(*good)), expected, receiver, slot) is None
    assert bytes(slot.body[:1000]) == b"\1" * 400 + b"\2" * 400 + b"\3" * 200
    for at, wrong in product((0, 1), (head(RAW, 7), head(9, 800), head(STEP, 800))):
        pairs = [*good[:at], (wrong, bytes(struct.unpack("<BI", wrong)[1])), *good[at + 1 :]]
        wire = Wire(*messages(*pairs))
        error = receive(wire, expected, receiver, slot)
        assert error is not None
        assert (not wire.messages, wire.broken) == (True, False)
    for nbytes in (0, 801, 2**32 - 1):
        wire = Wire(*messages(good[0]), head(RAW, nbytes))
        with pytest.raises(AgreementFailed, match=f"{nbytes:,} bytes for an increment of 800"):
            receive(wire, expected, receiver, slot)
        assert wire.broken
    slot.close()


class EchoingWire(Wire):
    """Keeps what is sent, as the messages that come."""

    def begin_send(self, to: int, buffer: memoryview, tag: int) -> Callable[[], None]:
        self.messages.append(bytes(buffer))
        return lambda: None


def test_where_the_system_has_no_thread_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that gave up here would leave the other in the middle of a transfer, which takes the next one's first
    message for the rest, and gloo ends the process in which a message is longer than expected."""
    monkeypatch.setattr(increments, "STRETCH", 100)
    slot, wire = Slot.create(tmp_path, "slot", 1 << 20), EchoingWire()
    expected = [*stretches([(Span(0, 0, 1000, "float32"), Span(1, 4096, 1000, "float32"))])]
    frames = [(head(RAW, s.nbytes), bytes([n + 1]) * s.nbytes) for n, s in enumerate(expected)]
    before = threading.stack_size(NO_STACK)
    try:
        assert send_increments(wire, 1, 0, iter(frames)) == 2000 + 3 * 5  # type: ignore[arg-type]
        assert receive(wire, expected, StepReceiver(), slot) is None
    finally:
        threading.stack_size(before)
    assert bytes(slot.body[:1000]) == b"\1" * 400 + b"\2" * 400 + b"\3" * 200
    slot.close()
