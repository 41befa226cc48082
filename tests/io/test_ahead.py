"""Reading ahead: order, bounds, errors, and that the thread ends."""

import threading
import time

import pytest

from rolloutdoctor.io.ahead import FULL_ROOM, LEAST_ROOM, Ahead, room_beside


def counting(count, size, made):
    for number in range(count):
        made.append(number)
        yield number, size


def as_found(item):
    return item, 10**6


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
    with Ahead(lambda _: counting(1000, 10**6, made), as_found) as ahead:
        assert list(ahead) == list(range(1000))
    assert not readers()


@pytest.mark.parametrize(("room", "waiting"), [(0, 1), (25, 3), (10**9, 20)])
def test_no_more_than_the_room_is_read_ahead(room, waiting):
    made = []
    ahead = Ahead(lambda _: counting(20, 10, made), lambda item: (item, 10))
    ahead.room = room
    with ahead:
        assert settled(made, waiting) == waiting
        found = iter(ahead)
        assert next(found) == 0
        assert settled(made, min(20, waiting + 1)) == min(20, waiting + 1)
        ahead.room = 10**9
        assert list(found) == list(range(1, 20))


def test_an_error_comes_after_what_was_before():
    def broken(_):
        yield "first", 1
        raise ValueError("row 7")

    seen = []
    with Ahead(broken, as_found) as ahead, pytest.raises(ValueError, match="row 7"):
        seen.extend(ahead)
    assert seen == ["first"]
    assert not readers()


def test_items_are_finished_where_they_are_taken():
    found, threads = [], []

    def finish(item):
        threads.append(threading.current_thread())
        return item * 10, 1

    with Ahead(lambda _: counting(5, 1, found), finish) as ahead:
        assert settled(found, 5) == 5
        assert not threads
        assert list(ahead) == [0, 10, 20, 30, 40]
    assert set(threads) == {threading.main_thread()}


def test_what_is_finished_holds_less():
    made = []
    ahead = Ahead(lambda _: counting(100, 100, made), lambda item: (item, 10))
    ahead.room = 250
    with ahead:
        assert settled(made, 3) == 3
        # Three that hold 10 each leave room for three more of 100.
        ahead.widen(0)
        assert settled(made, 6) == 6
        ahead.widen(300)
        assert settled(made, 7) > 6
        assert list(ahead) == list(range(100))


def test_an_item_that_cannot_be_finished_comes_after_what_was_before():
    def finish(item):
        if item == 2:
            raise ValueError("row 7")
        return item, 1

    def taken(ahead):
        for item in ahead:
            # In the middle of the caller's work nothing is said.
            ahead.widen(1)
            seen.append(item)

    made, seen = [], []
    with Ahead(lambda _: counting(5, 1, made), finish) as ahead:
        assert settled(made, 5) == 5
        with pytest.raises(ValueError, match="row 7"):
            taken(ahead)
    assert seen == [0, 1]
    assert not readers()


def test_leaving_early_ends_the_thread_and_closes_what_it_reads():
    closed = threading.Event()

    def endless(_):
        try:
            while True:
                yield 0, 1
        finally:
            closed.set()

    with Ahead(endless, as_found) as ahead:
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

    with Ahead(slow, as_found) as ahead:
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

    ahead = Ahead(start, as_found).__enter__()
    assert left.wait(5)
    ahead.__exit__(None, None, None)
    assert not readers()
