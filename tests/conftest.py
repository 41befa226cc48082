import gc
import multiprocessing
import os
import signal
import sys
from functools import cache

import pytest
import typer.main
import typer.testing
from forked import Server
from hypothesis import HealthCheck, settings

# Small tensors gain nothing from threads, and on busy cores the barriers between them cost minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Many tests start the program: where no bytecode is kept, each start would compile it anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The parity tests call verl's functions, some of which are compiled on first use; that would take minutes.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

# The marks `covers` and `compared`, and the option `--proof`.
pytest_plugins = ["proof.plugin"]

# Nothing that is drawn is slow; a machine may be, or stop for a while.
settings.register_profile(
    "deterministic",
    derandomize=True,
    deadline=None,
    max_examples=40,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("deterministic")


@pytest.fixture(scope="session", autouse=True)
def heeded_signals():
    """Give commands the default handlers: under nohup, or in the background of a shell, they would ignore signals."""
    defaults = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGTERM: signal.SIG_DFL,
    }
    before = {number: signal.getsignal(number) for number in defaults}
    for number, handler in defaults.items():
        if before[number] is signal.SIG_IGN:
            signal.signal(number, handler)
    yield
    for number, handler in before.items():
        if handler is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def one_parser():
    """Make the parser of the command line once: for every command line it is the same."""
    made = cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", made)
        patch.setattr(typer.testing, "_get_command", made, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def warm_workers():
    """Fork the workers of commands in this process from a server that has imported what they need.

    `test_processes` spawns some, as commands do.
    """
    from rolloutdoctor.engine import processes

    multiprocessing.set_forkserver_preload(
        ["rolloutdoctor.engine.gathering", "rolloutdoctor.commands.export.token_parts"]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "START", "forkserver")
        yield


@pytest.fixture(scope="session", autouse=True)
def patience():
    """Let a machine be slow or stop for a while: recorders would drop steps, and a command would say what it is at."""
    from rolloutdoctor.cli import progress
    from rolloutdoctor.recorders import _background

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_background, "LONGEST_WAIT", 600)
        patch.setattr(progress, "SLOW_SECONDS", 3600)
        yield


@pytest.fixture(scope="session")
def started():
    """Start the program as a process of its own; see `forked`."""
    server = Server()
    yield server.start
    server.close()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Collect no doctests here: there are none, and to look for them imports what makes data, and trainers with it."""
    found = yield
    return [one for one in found if type(one) is pytest.Module]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Decide what is slow: `slow` families, and those that call real packages, but for a few of each.

    The first test of a parametrized family stays among the fast ones, unless `every` one is slow, and so does the first
    that compares a value of an option (`covers`): stored results of the real functions are in `goldens`.
    """
    from proof.claims import claims_of

    kept = set()
    for item in items:
        slow = item.get_closest_marker("slow")
        if not hasattr(item, "callspec") or not (slow or item.get_closest_marker("parity")):
            continue
        if slow and slow.kwargs.get("every"):
            continue
        shown = {item.nodeid.partition("[")[0], *map(repr, claims_of(item))}
        if shown <= kept:
            item.add_marker("slow")
        else:
            item.own_markers = [mark for mark in item.own_markers if mark.name != "slow"]
        kept |= shown


# Of what is imported and collected next to nothing is garbage, and there is ever more of it to look through.
gc.disable()


def pytest_collection_finish():
    """Take what was imported out of the garbage collector's sight: trainers collect after every run."""
    gc.enable()
    gc.freeze()
