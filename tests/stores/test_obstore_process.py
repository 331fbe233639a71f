"""What a process that puts through obstore needs, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys

from helpers.servers import ObjectStorage

MiB = 1 << 20

PUT = """
import json, mmap, sys, threading, time
from ckptlib.stores import open_store

url, options, nbytes, piece_nbytes = json.loads(sys.argv[1])
memory = mmap.mmap(-1, nbytes)  # not counted: it is shared
memory.write(b"data" * (nbytes // 4))
view = memoryview(memory)

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

store = open_store(url, options)
store.put("first", b"data")
idle = most = anonymous()
done = threading.Event()

def watch():
    global most
    while not done.wait(0.005):
        most = max(most, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
store.put("p", b"head", (view[start : start + piece_nbytes] for start in range(0, nbytes, piece_nbytes)))
done.set()
watcher.join()
print(most - idle)

"""


def put_in_process(storage: ObjectStorage, nbytes: int, piece_nbytes: int) -> int:
    """Anonymous memory above that of an idle store, in bytes. The store is not closed before the process ends."""
    given = json.dumps([storage.url(), {**storage.options(), "client": "obstore"}, nbytes, piece_nbytes])
    done = subprocess.run([sys.executable, "-c", PUT, given], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    return int(done.stdout)


def test_memory_of_a_put(juicefs: ObjectStorage) -> None:
    assert put_in_process(juicefs, 256 * MiB, 4 * MiB) < 32 * MiB  # sent in place; 8 parts alone would be 128


def test_a_process_ends_right_after_a_put(juicefs: ObjectStorage) -> None:
    """Every third one was aborted, by threads of the client that were still telling of the result."""
    for _ in range(4):
        put_in_process(juicefs, 20 * MiB, 5 * MiB)


FORK = """
import json, os, sys
from ckptlib.stores import open_store

url, options = json.loads(sys.argv[1])
with open_store(url, options) as store:
    store.put("a", b"data")
    child = os.fork()
    if not child:
        for used in (store, open_store(url, options)):
            try:
                used.get("a")
            except RuntimeError as error:
                print(error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    assert store.get("a") == b"data"
"""


def test_a_forked_process_says_so_instead_of_waiting(juicefs: ObjectStorage) -> None:
    given = json.dumps([juicefs.url(), {**juicefs.options(), "client": "obstore"}])
    done = subprocess.run([sys.executable, "-c", FORK, given], capture_output=True, text=True, timeout=150)
    assert done.stdout.count("forked") == 2, done
    assert done.returncode == 0, done.stderr
