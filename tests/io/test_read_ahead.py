"""Reading ahead: order, bounds, errors, and that the thread ends."""

import subprocess
import sys
import threading
import time

import pytest

from rolloutdoctor.io.read_ahead import read_ahead


def counting(count, made):
    for number in range(count):
        made.append(number)
        yield number


@pytest.fixture(autouse=True)
def others():
    """Threads of other tests: one that failed may hold what it read."""
    OTHERS[:] = threading.enumerate()


OTHERS = []


def readers():
    new = [thread for thread in threading.enumerate() if thread not in OTHERS]
    return [thread for thread in new if thread.name.startswith("rolloutdoctor-reader")]


def settled(made, count):
    """What was made, some time after so many were, however slow the machine is."""
    end = time.monotonic() + 120
    while len(made) < count and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(0.05)
    return len(made)


def no_thread_is_left():
    end = time.monotonic() + 120
    while readers() and time.monotonic() < end:
        time.sleep(0.005)
    return not readers()


def test_everything_comes_in_order():
    assert list(read_ahead(counting(1000, []))) == list(range(1000))
    assert no_thread_is_left()


def test_one_item_is_read_ahead():
    made = []
    found = read_ahead(counting(20, made))
    assert next(found) == 0
    assert settled(made, 2) == 2
    assert next(found) == 1
    assert settled(made, 3) == 3
    assert list(found) == list(range(2, 20))


def test_an_error_comes_after_what_was_before():
    def broken():
        yield "first"
        raise ValueError("row 7")

    found = read_ahead(broken())
    assert next(found) == "first"
    with pytest.raises(ValueError, match="row 7"):
        next(found)
    assert no_thread_is_left()


def test_leaving_early_ends_the_thread_and_closes_what_it_reads():
    closed = threading.Event()

    def endless():
        try:
            while True:
                yield 0
        finally:
            closed.set()

    found = read_ahead(endless())
    next(found)
    found.close()
    assert closed.is_set()
    assert no_thread_is_left()


def test_an_iterator_that_is_left_at_the_end_of_the_program():
    code = (
        "from rolloutdoctor.io.read_ahead import read_ahead\n"
        "found = read_ahead(iter_ for iter_ in range(1, 9))\n"
        "print(next(found))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("1\n", "")
