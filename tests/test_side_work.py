"""Host work beside the main thread: order, errors, interruptions."""

import threading

import pytest

from specter_jax.engine.side_work import InlineWork, SideWork


def test_work_runs_beside_and_its_result_is_waited_for():
    release = threading.Event()
    with SideWork() as side:
        assert side.wait() is None
        side.start(lambda: (release.wait(10), threading.current_thread().name)[1])
        release.set()
        assert side.wait().startswith("specter-side")
        assert side.wait() is None


def test_an_error_comes_out_where_it_is_waited_for():
    def fail():
        raise KeyboardInterrupt

    with SideWork() as side:
        side.start(fail)
        with pytest.raises(KeyboardInterrupt):
            side.wait()


def test_leaving_waits_for_what_is_running():
    done = []
    started, release = threading.Event(), threading.Event()

    def work():
        started.set()
        release.wait(10)
        done.append(True)

    def interrupted():
        with SideWork() as side:
            side.start(work)
            started.wait(10)
            threading.Timer(0.05, release.set).start()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert done == [True]


def test_a_second_interruption_does_not_leave_work_running(monkeypatch):
    done = []
    started, release = threading.Event(), threading.Event()

    def work():
        started.set()
        release.wait(10)
        done.append(True)

    side = SideWork()
    shutdown = side._thread.shutdown

    def interrupted_once(wait):
        if not release.is_set():
            release.set()
            raise KeyboardInterrupt
        shutdown(wait=wait)

    monkeypatch.setattr(side._thread, "shutdown", interrupted_once)

    def interrupted():
        with side:
            side.start(work)
            started.wait(10)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == [True]


def test_inline_work_is_done_when_it_is_waited_for():
    order = []
    with InlineWork() as side:
        side.start(lambda: order.append("work") or "result")
        order.append("after")
        assert side.wait() == "result"
        assert side.wait() is None
    assert order == ["after", "work"]
