"""What every store must do: inherit `StoreConformance`, override the fixture `store`, and the contract is tested.

The tests put real bytes into a real store. Each test gets an empty one.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import pytest

from ckptlib.errors import FormatError, ObjectExists, ObjectNotFound, StoreError
from ckptlib.stores import LateHead, Store, base

PAGE_NBYTES = 4096

PARTS_NBYTES = (33 << 20) + 5
PIECE_NBYTES = (5 << 20) + 3

BAD_KEYS = [
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    "..",
    "../a",
    "a/../b",
    ".",
    ".a",
    "a/.b",
    "a b",
    "a\\b",
    "a\n",
    "a\0",
    "é",
    "a" * 600,
]
BAD_PREFIXES = [key for key in BAD_KEYS if key not in ("", "a/")]


def pages(num: int) -> mmap.mmap:
    """Page-aligned memory, no two pages alike."""
    memory = mmap.mmap(-1, num * PAGE_NBYTES)
    memory.write(os.urandom(num * PAGE_NBYTES))
    return memory


def keys(store: Store, prefix: str = "") -> list[str]:
    return [entry.key for entry in store.scan(prefix)]


class StoreConformance:
    tells_existing = True
    """Whether a second put of a key is refused; a store that cannot tell overwrites."""

    knows_sizes = True
    """Whether `get` knows what an object has before all of it is in memory."""

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError

    # -- put and get

    @pytest.mark.parametrize("data", [b"", b"x", os.urandom(100_000)], ids=len)
    def test_get_gives_what_was_put(self, store: Store, data: bytes) -> None:
        store.put("a/b-1.json", data)
        assert store.get("a/b-1.json") == data
        assert keys(store) == ["a/b-1.json"]

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_put_takes_any_buffer(self, store: Store, kind: type) -> None:
        store.put("a", kind(b"12345678"))
        store.put("b", memoryview(bytearray(b"12345678")).cast("i"))
        assert store.get("a") == store.get("b") == b"12345678"

    def test_ranges(self, store: Store) -> None:
        store.put("a", b"0123456789")
        to_the_end = [(3, None), (9, None), (10, None)]
        for offset, nbytes in [(0, 10), (0, 3), (3, 4), (9, 1), *to_the_end, (10, 0), (0, 0), (4, 0)]:
            expected = b"0123456789"[offset:] if nbytes is None else b"0123456789"[offset : offset + nbytes]
            got = store.get("a", offset, nbytes)
            assert (offset, nbytes, got) == (offset, nbytes, expected)
            assert type(got) is bytes

    def test_an_object_that_ends_early(self, store: Store) -> None:
        store.put("a", b"0123456789")
        for offset, nbytes in [(0, 11), (9, 2), (10, 1), (11, 0), (11, None), (0, 1 << 50)]:
            with pytest.raises(FormatError, match="10 bytes"):
                store.get("a", offset, nbytes)

    def test_an_object_that_is_too_large_for_a_document(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its size is known before memory is taken for it."""
        if not self.knows_sizes:
            pytest.skip("does not tell the size before the bytes")
        monkeypatch.setattr(base, "MAX_WHOLE_NBYTES", 6)
        store.put("a", b"0123456789")
        for offset in (0, 3):
            with pytest.raises(FormatError, match="10 bytes, expected a document"):
                store.get("a", offset)
        assert store.get("a", 4) == b"456789"
        assert store.get("a", 0, 10) == b"0123456789"

    def test_an_empty_object_has_no_range(self, store: Store) -> None:
        store.put("a", b"")
        assert store.get("a", 0, 0) == store.get("a", 0, None) == b""
        with pytest.raises(FormatError):
            store.get("a", 0, 1)

    def test_a_negative_range_is_refused(self, store: Store) -> None:
        store.put("a", b"0123456789")
        for offset, nbytes in [(-1, 1), (0, -1), (-1, None)]:
            with pytest.raises(ValueError, match="invalid range"):
                store.get("a", offset, nbytes)

    def test_an_absent_object(self, store: Store) -> None:
        store.put("a/b/c", b"neighbour")
        ranges = [(0, None), (0, 0), (0, 1), (5, 5), (5, None)]
        for key, (offset, nbytes) in product(["nothing", "a/nothing", "a/b", "a/b/c/d"], ranges):
            with pytest.raises(ObjectNotFound, match=key):
                store.get(key, offset, nbytes)
            with pytest.raises(ObjectNotFound, match=key):
                store.get_into(key, offset, memoryview(bytearray(nbytes or 1)))

    def test_get_into_fills_exactly_the_buffer(self, store: Store) -> None:
        store.put("a", b"0123456789")
        memory = bytearray(b"..........")
        store.get_into("a", 3, memoryview(memory)[2:6])
        assert memory == b"..3456...."
        store.get_into("a", 10, memoryview(memory)[:0])
        with pytest.raises(FormatError, match="10 bytes"):
            store.get_into("a", 8, memoryview(memory)[:4])
        with pytest.raises(FormatError, match="10 bytes"):
            store.get_into("a", 11, memoryview(memory)[:0])

    def test_get_into_a_large_buffer(self, store: Store) -> None:
        data = os.urandom(3 << 20)
        store.put("a", data)
        memory = bytearray(len(data) - 5)
        store.get_into("a", 5, memoryview(memory))
        assert memory == data[5:]

    def test_an_object_that_exists(self, store: Store) -> None:
        store.put("a", b"first")
        if self.tells_existing:
            with pytest.raises(ObjectExists, match="a"):
                store.put("a", b"second")
            with pytest.raises(ObjectExists, match="a"):
                store.put("a", b"", [b"third"])
            with pytest.raises(ObjectExists, match="a"):
                store.put("a", b"fourth", create=True)
            assert store.get("a") == b"first"
        else:
            store.put("a", b"second")
            assert store.get("a") == b"second"
        assert keys(store) == ["a"]

    # -- scan and delete

    def test_an_empty_store_lists_nothing(self, store: Store) -> None:
        assert store.scan("") == store.scan("steps/") == store.scan("steps/00") == []

    def test_prefixes(self, store: Store) -> None:
        for key in ["steps/001-a.json", "steps/002-b.json", "parts/001-a/0", "parts/001-a/1", "parts/001-ab/0", "top"]:
            store.put(key, key.encode())
        assert keys(store) == sorted(keys(store))
        assert len(keys(store)) == 6
        assert keys(store, "steps/") == keys(store, "steps") == ["steps/001-a.json", "steps/002-b.json"]
        assert keys(store, "steps/002") == ["steps/002-b.json"]
        assert keys(store, "parts/001-a/") == ["parts/001-a/0", "parts/001-a/1"]
        assert keys(store, "parts/001-a") == ["parts/001-a/0", "parts/001-a/1", "parts/001-ab/0"]
        assert keys(store, "parts/001-ab/0") == ["parts/001-ab/0"]
        assert keys(store, "t") == ["top"]
        for prefix in ["parts/001-a/0/", "parts/0/", "s/", "steps/003"]:
            assert keys(store, prefix) == []
        if "file://" in store.url:  # a file in the place of a directory, whose steps must not look like none
            with pytest.raises(StoreError, match="in the place of a directory"):
                store.scan("top/")
        else:
            assert keys(store, "top/") == []

    def test_a_listing_begins_behind_a_key(self, store: Store) -> None:
        for key in ["a/1", "a/2", "a/3", "b"]:
            store.put(key, b"")
        assert [entry.key for entry in store.scan("a/", after="a/1")] == ["a/2", "a/3"]
        assert [entry.key for entry in store.scan("", after="a/2")] == ["a/3", "b"]
        assert [entry.key for entry in store.scan("a/", after="a/11")] == ["a/2", "a/3"]
        assert store.scan("a/", after="a/3") == store.scan("a/", after="b") == []

    def test_an_entry_has_size_and_time(self, store: Store) -> None:
        before = time.time()
        store.put("a/b", b"12345")
        after = time.time()
        (entry,) = store.scan("a/")
        assert (entry.key, entry.nbytes) == ("a/b", 5)
        assert before - 2 < entry.modified < after + 2  # some stores give whole seconds

    def test_an_entry_is_of_its_very_key(self, store: Store) -> None:
        for key in ("a/b", "a/bc", "a/b-1"):
            store.put(key, key.encode())
        assert store.entry("a/bc") in store.scan("a/b")
        assert [store.entry(key) for key in ("a", "a/b-", "a/c")] == [None] * 3

    def test_a_peek_shows_some_of_what_is_there(self, store: Store) -> None:
        assert store.peek(10) == []
        for name in ("b.pt", "a.pt", "c.pt"):
            store.put(name, b"data")
        assert sorted(store.peek(10)) == ["a.pt", "b.pt", "c.pt"]
        assert len(store.peek(2)) == 2

    def test_a_listing_is_fresh(self, store: Store) -> None:
        for n in range(5):
            assert len(store.scan("")) == len(store.scan("a/")) == n
            store.put(f"a/{n}", b"")
        for n in reversed(range(5)):
            store.delete(f"a/{n}")
            assert len(store.scan("")) == len(store.scan("a/")) == n

    def test_delete(self, store: Store) -> None:
        store.put("a/b/c", b"1")
        store.put("a/d", b"2")
        for _ in range(2):  # an absent object is no error
            store.delete("a/b/c")
            assert keys(store) == ["a/d"]
        for key in ["a/b", "a/d/e", "nothing/at/all"]:
            store.delete(key)
        assert store.get("a/d") == b"2"
        store.put("a/b/c", b"3")
        assert store.get("a/b/c") == b"3"

    def test_delete_of_many(self, store: Store) -> None:
        for n in range(5):
            store.put(f"a/{n}", b"")
        store.delete()
        store.delete("a/0", "a/2", "nothing", "a/3", "a/2")
        assert keys(store) == ["a/1", "a/4"]
        with pytest.raises(ValueError, match="invalid object key"):
            store.delete("a/1", "../a")
        assert "a/4" in keys(store)

    def test_delete_of_a_prefix_deletes_nothing(self, store: Store) -> None:
        store.put("a/b", b"1")
        store.delete("a")
        assert keys(store) == ["a/b"]

    # -- objects in pieces

    def test_whole_pages(self, store: Store) -> None:
        memory = pages(8)
        view = memoryview(memory)
        store.put("packs/p", b"h" * PAGE_NBYTES, [view[: 5 * PAGE_NBYTES], view[5 * PAGE_NBYTES :]])
        assert store.get("packs/p") == b"h" * PAGE_NBYTES + memory[:]

    def test_odd_pieces(self, store: Store) -> None:
        memory = pages(4)
        view = memoryview(memory)
        pieces = [
            view[:PAGE_NBYTES],  # aligned: all three
            view[PAGE_NBYTES : 2 * PAGE_NBYTES + 7],  # pages and a tail
            view[2 * PAGE_NBYTES : 3 * PAGE_NBYTES],  # aligned memory at an odd offset
            view[: PAGE_NBYTES - 7],  # back to an even offset
            view[1 : PAGE_NBYTES + 1],  # an odd address
            view[:0],
            b"",
            bytearray(b"tail"),
            memoryview(bytearray(16)).cast("d"),
        ]
        body = b"".join(bytes(memoryview(p).cast("B")) if len(p) else b"" for p in pieces)
        store.put("p", memoryview(b"h" * PAGE_NBYTES), pieces)
        assert store.get("p") == b"h" * PAGE_NBYTES + body
        store.put("q", memoryview(b"h" * 7), iter(pieces))
        assert store.get("q") == b"h" * 7 + body

    def test_heads(self, store: Store) -> None:
        for head_nbytes, num_pages, late in product([0, 1, 100, PAGE_NBYTES], [0, 2], [False, True]):
            head, body = b"h" * head_nbytes, pages(num_pages)[:] if num_pages else b""
            key = f"{head_nbytes}/{num_pages}/{late}"
            store.put(key, LateHead(head_nbytes, partial(bytes, head)) if late else head, [body])
            assert store.get(key) == head + body, key

    @pytest.mark.parametrize("late", [False, True])
    def test_many_parts(self, store: Store, late: bool) -> None:
        """As many bytes as object stores are given in several requests, in pieces that fit none of them."""
        memory = bytearray(os.urandom(PARTS_NBYTES))
        taken: list[int] = []

        def pieces() -> Iterator[memoryview]:
            for start in range(0, len(memory), PIECE_NBYTES):
                taken.append(start)
                yield memoryview(memory)[start : start + PIECE_NBYTES]

        def head() -> bytes:
            assert len(taken) == -(-len(memory) // PIECE_NBYTES)
            return b"h" * 1000

        store.put("p", LateHead(1000, head) if late else b"h" * 1000, pieces())
        assert store.get("p", 0, 1000) == b"h" * 1000
        into = bytearray(len(memory))
        store.get_into("p", 1000, memoryview(into))
        assert into == memory

    def test_a_late_head_of_another_size_is_refused(self, store: Store) -> None:
        for head in (b"", b"123", b"12345"):
            with pytest.raises(ValueError, match="expected a head of 4 bytes"):
                store.put("p", LateHead(4, partial(bytes, head)), [b"body"])
            assert keys(store) == []

    @pytest.mark.parametrize("nbytes_before", [0, 4, PARTS_NBYTES])
    def test_an_exception_leaves_nothing(self, store: Store, nbytes_before: int) -> None:
        def fail() -> Iterator[bytes]:
            yield bytes(nbytes_before)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            store.put("p", b"head", fail())

        def no_head() -> bytes:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            store.put("p", LateHead(4, no_head), [bytes(nbytes_before)])
        assert keys(store) == []
        with pytest.raises(ObjectNotFound):
            store.get("p")

    def test_a_deadline_that_is_far_does_not_matter(self, store: Store) -> None:
        store.put("p", b"head", [b"body"], deadline=time.monotonic() + 60)
        into = bytearray(8)
        store.get_into("p", 0, memoryview(into), deadline=time.monotonic() + 60)
        assert into == b"headbody"

    # -- keys, threads

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_what_is_no_key_is_refused(self, store: Store, key: str) -> None:
        calls = [
            lambda: store.put(key, b""),
            lambda: store.put(key, b"", [b"data"]),
            lambda: store.get(key),
            lambda: store.get_into(key, 0, memoryview(bytearray(1))),
            lambda: store.delete(key),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="invalid object key"):
                call()

    @pytest.mark.parametrize("prefix", BAD_PREFIXES)
    def test_what_is_no_prefix_is_refused(self, store: Store, prefix: str) -> None:
        with pytest.raises(ValueError, match="invalid object key"):
            store.scan(prefix)

    def test_threads(self, store: Store) -> None:
        def work(n: int) -> None:
            data = bytes([n]) * 10_000
            store.put(f"t/{n}/small", data)
            store.put(f"t/{n}/large", b"head", [data[start : start + 3000] for start in range(0, len(data), 3000)])
            assert store.get(f"t/{n}/large") == b"head" + data
            assert store.get(f"t/{n}/small", 5, 5) == data[:5]
            assert keys(store, f"t/{n}/") == [f"t/{n}/large", f"t/{n}/small"]
            store.delete(f"t/{n}/small")

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(work, range(24)))
        assert keys(store) == sorted(f"t/{n}/large" for n in range(24))

    def test_puts_and_deletes_beside_each_other(self, store: Store) -> None:
        def work(n: int) -> None:
            for _ in range(20):  # each delete may empty the directories that another put is about to use
                store.put(f"d/e/f/{n}", b"data")
                assert store.get(f"d/e/f/{n}") == b"data"
                store.delete(f"d/e/f/{n}")

        with ThreadPoolExecutor(6) as threads:
            list(threads.map(work, range(6)))
        assert keys(store) == []
