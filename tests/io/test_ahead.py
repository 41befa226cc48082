"""Reading ahead: order, bounds, errors, and that the thread ends."""

import threading
import time

import pytest

from rolloutdoctor.io.ahead import FULL_ROOM, LEAST_ROOM, Ahead, room_beside


def counting(count, size, made):
    for number in range(count):
        made.append(number)
        yield number, size


def readers():
    return [thread for thread in threading.enumerate() if thread.name == "rolloutdoctor-reader"]


def settled(made):
    """What was made once nothing more is."""
    before = -1
    while before != len(made):
        before = len(made)
        time.sleep(0.05)
    return before


def test_everything_comes_in_order():
    made = []
    with Ahead(lambda _: counting(1000, 10**6, made)) as ahead:
        assert list(ahead) == list(range(1000))
    assert not readers()


@pytest.mark.parametrize(("room", "waiting"), [(0, 1), (25, 3), (10**9, 20)])
def test_no_more_than_the_room_is_read_ahead(room, waiting):
    made = []
    ahead = Ahead(lambda _: counting(20, 10, made))
    ahead.room = room
    with ahead:
        assert settled(made) == waiting
        found = iter(ahead)
        assert next(found) == 0
        assert settled(made) == min(20, waiting + 1)
        ahead.room = 10**9
        assert list(found) == list(range(1, 20))


def test_an_error_comes_after_what_was_before():
    def broken(_):
        yield "first", 1
        raise ValueError("row 7")

    seen = []
    with Ahead(broken) as ahead, pytest.raises(ValueError, match="row 7"):
        seen.extend(ahead)
    assert seen == ["first"]
    assert not readers()


def test_leaving_early_ends_the_thread_and_closes_what_it_reads():
    closed = threading.Event()

    def endless(_):
        try:
            while True:
                yield 0, 1
        finally:
            closed.set()

    with Ahead(endless) as ahead:
        ahead.room = 5
        next(iter(ahead))
    assert closed.is_set()
    assert not readers()


def test_it_knows_whether_it_is_waited_for():
    seen = []

    def slow(ahead):
        while not ahead.is_waited_for:
            time.sleep(0.01)
        yield "first", 10
        while ahead.is_waited_for:
            time.sleep(0.01)
        seen.append("working")
        yield "second", 10

    with Ahead(slow) as ahead:
        for _ in ahead:
            while not seen:
                time.sleep(0.01)
    assert seen == ["working"]


@pytest.mark.parametrize(
    ("held", "room"),
    [(0, LEAST_ROOM), (FULL_ROOM // 2, FULL_ROOM // 2), (FULL_ROOM * 3 // 2, FULL_ROOM), (10**9, 5 * 10**8)],
)
def test_room(held, room):
    assert room_beside(held) == room


def test_a_forgotten_caller_may_be_found_in_the_thread_itself():
    left = threading.Event()

    def start(ahead):
        yield 0, 1
        # As the collector of garbage does, in whichever thread it runs.
        ahead.__exit__(None, None, None)
        left.set()
        yield 1, 1

    ahead = Ahead(start).__enter__()
    assert left.wait(5)
    ahead.__exit__(None, None, None)
    assert not readers()
