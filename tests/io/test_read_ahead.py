"""Reading ahead: order, bounds, errors, and that the thread ends."""

import threading
import time

import pytest

from rolloutdoctor.io.read_ahead import ReadAhead


def counting(count, size, made):
    for number in range(count):
        made.append(number)
        yield number, size


def readers():
    return [thread for thread in threading.enumerate() if thread.name == "rolloutdoctor-reader"]


def settled(made, count):
    """What was made, some time after so many were, however slow the machine is."""
    end = time.monotonic() + 30
    while len(made) < count and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(0.05)
    return len(made)


def test_everything_comes_in_order():
    made = []
    with ReadAhead(counting(1000, 10**6, made)) as ahead:
        assert list(ahead) == list(range(1000))
    assert not readers()


@pytest.mark.parametrize(("room", "waiting"), [(0, 1), (25, 2), (30, 3), (10**9, 20)])
def test_no_more_than_the_room_is_read_ahead(room, waiting):
    made = []
    ahead = ReadAhead(counting(20, 10, made))
    ahead.room = room
    with ahead:
        assert settled(made, waiting) == waiting
        found = iter(ahead)
        assert next(found) == 0
        assert settled(made, min(20, waiting + 1)) == min(20, waiting + 1)
        ahead.room = 10**9
        assert list(found) == list(range(1, 20))


def test_an_error_comes_after_what_was_before():
    def broken():
        yield "first", 1
        raise ValueError("row 7")

    seen = []
    with ReadAhead(broken()) as ahead, pytest.raises(ValueError, match="row 7"):
        seen.extend(ahead)
    assert seen == ["first"]
    assert not readers()


def test_leaving_early_ends_the_thread_and_closes_what_it_reads():
    closed = threading.Event()

    def endless():
        try:
            while True:
                yield 0, 1
        finally:
            closed.set()

    with ReadAhead(endless()) as ahead:
        ahead.room = 5
        next(iter(ahead))
    assert closed.is_set()
    assert not readers()


def test_it_knows_whether_it_is_waited_for():
    seen = []

    def slow():
        while not ahead.is_waited_for:
            time.sleep(0.01)
        yield "first", 10
        while ahead.is_waited_for:
            time.sleep(0.01)
        seen.append("working")
        yield "second", 10

    ahead = ReadAhead(slow())
    with ahead:
        for _ in ahead:
            while not seen:
                time.sleep(0.01)
    assert seen == ["working"]


def test_a_forgotten_caller_may_be_found_in_the_thread_itself():
    left = threading.Event()

    def items():
        yield 0, 1
        # As the collector of garbage does, in whichever thread it runs.
        ahead.__exit__(None, None, None)
        left.set()
        yield 1, 1

    ahead = ReadAhead(items())
    ahead.__enter__()
    assert left.wait(5)
    ahead.__exit__(None, None, None)
    assert not readers()
