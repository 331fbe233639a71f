"""Another process that has slots open: makes them as an arena does, or reads one; lives until its stdin ends.

make ROOT_ID GENERATION NONCE DIRECTORY     prints the paths of its slots
read PATH                                   prints "reading" when it holds the content's lock
"""

from __future__ import annotations

import sys
from pathlib import Path

from ckptlib.slots.slot import Slot


def main() -> None:
    if sys.argv[1] == "make":
        from ckptlib.format.keys import GenerationId
        from ckptlib.staging.arena import Arena

        root_id, number, nonce, directory = sys.argv[2:]
        arena = Arena(root_id, GenerationId(int(number), nonce), Path(directory), 2)
        arena.warm(1 << 16)
        arena.take(1 << 16, -1, [])
        print(*(slot.path for slot in arena.slots), flush=True)
    else:
        slot = Slot.open(Path(sys.argv[2]))
        assert slot.read_lock()
        print("reading", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
