"""The thread that does jobs in order."""

from __future__ import annotations

import threading

import pytest

from ckptlib.jobs import JobThread


def test_jobs_are_done_in_order_and_finish_waits_for_all() -> None:
    thread, done = JobThread("test"), list[int]()
    for n in range(100):
        thread.put(lambda n=n: done.append(n))  # type: ignore[misc]
    thread.finish()
    assert done == list(range(100))
    assert not thread.busy


def test_busy_until_the_last_job_has_come_to_its_end() -> None:
    thread, gate = JobThread("test"), threading.Event()
    assert not thread.busy
    thread.put(lambda: None)
    thread.put(lambda: bool(gate.wait(60)) and None)
    assert thread.busy
    gate.set()
    thread.finish()
    assert not thread.busy


def test_the_thread_is_named_and_holds_up_no_exit() -> None:
    seen: list[threading.Thread] = []
    thread = JobThread("test")
    thread.put(lambda: seen.append(threading.current_thread()))
    thread.finish()
    assert (seen[0].name, seen[0].daemon) == ("ckptlib-test", True)


def test_one_that_runs_is_put_jobs_though_the_system_has_no_thread_more() -> None:
    thread, other, done = JobThread("test"), JobThread("test"), list[int]()
    thread.start()
    before = threading.stack_size(1 << 46)
    try:
        thread.start()
        thread.put(lambda: done.append(1))
        with pytest.raises(RuntimeError):
            other.put(lambda: done.append(2))
    finally:
        threading.stack_size(before)
    other.put(lambda: done.append(3))
    other.finish()
    thread.finish()
    assert sorted(done) == [1, 3]


def test_an_error_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `threading.excepthook` has it: the writer's ends the process."""
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda failure: seen.append(failure.exc_type))
    thread, done = JobThread("test"), list[int]()
    thread.put(lambda: 1 // 0 and None)
    thread.put(lambda: done.append(1))
    thread.finish()
    assert (seen, done) == ([ZeroDivisionError], [])


@pytest.mark.parametrize("runs", [True, False], ids=["it runs", "it does not"])
def test_a_thread_that_was_interrupted_as_it_began(monkeypatch: pytest.MonkeyPatch, runs: bool) -> None:
    """By Ctrl-C, which a program may catch and go on."""
    start, begun = threading.Thread.start, list[threading.Thread]()

    def interrupted(thread: threading.Thread) -> None:
        if runs:
            start(thread)
            begun.append(thread)
        raise KeyboardInterrupt

    thread, done = JobThread("test"), list[int]()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            thread.put(lambda: done.append(0))
    thread.finish()  # as by a close
    assert not thread.busy
    for n in range(1, 10):
        thread.put(lambda n=n: done.append(n))  # type: ignore[misc]
    thread.finish()
    assert done == list(range(1, 10)), "what was put as it began was not put"
    for left in begun:
        left.join(60)
        assert not left.is_alive()
