"""An interrupt comes after the call, wherever in it or before it the interrupt was raised."""

import signal
import threading

import pytest

from rolloutdoctor.io.uninterrupted import uninterrupted


def test_it_returns_and_raises_what_the_function_does():
    assert uninterrupted(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        uninterrupted(lambda: 1 / 0)


def test_an_interrupt_waits_for_the_function(monkeypatch):
    done, interrupted = [], threading.Event()

    def interrupt(number, frame):
        interrupted.set()
        raise KeyboardInterrupt

    def call():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        interrupted.wait()
        done.append("all")

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            uninterrupted(call)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == ["all"]


@pytest.mark.parametrize("has_begun", [True, False])
def test_an_interrupt_while_the_thread_starts(monkeypatch, has_begun):
    done, begun = [], threading.Event()
    start = threading.Thread.start

    def interrupted(thread):
        if has_begun:
            start(thread)
            begun.wait()
        raise KeyboardInterrupt

    def call():
        begun.set()
        done.append("all")

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(call)
    assert done == ["all"] * has_begun
