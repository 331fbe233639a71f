"""Opens a session's part in its host's memory: slots, the writer that reads them, and the link to peers."""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

import torch.distributed as dist

from ckptlib.format.keys import SaveId
from ckptlib.peers.replicator import Replicator
from ckptlib.ranks.group import Group
from ckptlib.ranks.together import together, together_while_all_live
from ckptlib.saving.lineage import Lineage
from ckptlib.saving.peer_link import PeerLink
from ckptlib.saving.settings import Settings
from ckptlib.saving.snapshots import NUM_SLOTS_WITH_PEERS, Snapshots
from ckptlib.saving.stopwatch import Stopwatch
from ckptlib.slots import files
from ckptlib.slots.writer_lock import WriterLock
from ckptlib.staging.arena import Arena, directories
from ckptlib.staging.other_slots import prefix_of
from ckptlib.writer.client import Writer

NUM_SLOTS = 2
"""One slot is written to the store while the next snapshot is taken."""

WRITER_WAITS_S = 2.0
"""With peers, the longest that a writer waits for the end of the restore before it begins: two ranks on two cores
restored 0.5 GB each from memory in 0.25 s, in which their writers took 0.2 s of CPU each, and delayed each rank at each
collective. Before the restore ends there is nothing to write."""


class Memory(NamedTuple):
    snapshots: Snapshots
    writer: Writer
    link: PeerLink


def open_memory(
    settings: Settings, group: Group, over: dist.ProcessGroup | None, lineage: Lineage, stopwatch: Stopwatch
) -> Memory:
    """Opens the slots, the writer and the link to peers. Collective. Raises on all ranks if one of them fails; none of
    their writers is left then."""
    peers, placement, root = settings.peers, lineage.placement, lineage.root

    def make_arena(writer: Writer, pin: bool = True) -> Arena:
        num_slots = NUM_SLOTS if peers is None else NUM_SLOTS_WITH_PEERS
        arena = Arena(root.id, lineage.host_id, settings.arena, num_slots, pin)
        arena.on_made, arena.on_gone = writer.add_slot, writer.forget_slot
        return arena

    def make_room(opened: ExitStack) -> tuple[Arena, Writer]:
        if settings.keep is not None:
            settings.keep.check(root.save_deadline_s)
        if settings.arena is not None:
            files.check_given(settings.arena)
        setup = settings.for_writer(group.rank, group.size, root)
        if group.rank == 0 and (fd := stopwatch.share()) is not None:
            setup |= {"account_fd": fd, "generation": str(lineage.generation)}
        unread = WriterLock.take(directories(settings.arena), prefix_of(root.id, lineage.host_id))
        writer = Writer(setup, unread, 0.0 if peers is None else WRITER_WAITS_S)
        opened.callback(writer.leave)  # it has no order yet
        arena = make_arena(writer)
        if peers is None:
            arena.others.reclaim()
        return arena, writer

    with ExitStack() as opened:
        arena, writer = together(group, "making room for snapshots", lambda: make_room(opened))
        replicator = None
        if peers is not None and placement is not None:
            replicator = Replicator(over, group.rank, placement, peers, lambda: make_arena(writer, pin=False))
            together_while_all_live(group, "connecting peers", replicator.connection.connect)

        def on_held(step: int) -> None:
            writer.held(SaveId(step, lineage.generation))

        snapshots = Snapshots(root.id, arena, placement, replicator, on_held)
        memory = Memory(snapshots, writer, PeerLink(group, replicator))
        opened.pop_all()
    return memory
