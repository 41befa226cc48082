"""How the benchmarks measure: two works in turn, processes of their own, peaks of memory."""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent


# Installed packages are compiled; this one would be at every start where the environment forbids to keep that.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


class Row(NamedTuple):
    """A line of the table; a ratio says how often `against` fits into `what`, unless the line says otherwise."""

    what: str
    against: str
    found: str
    aim: str


def ratio(what, against, value, aim):
    return Row(what, against, f"{value:.2f}", aim)


def interleaved(repeats, *works):
    """Median seconds of each work, measured in turn."""
    found = [[] for _ in works]
    for _ in range(repeats):
        for work, seconds in zip(works, found, strict=True):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in found]


def interleaved_cpu(repeats, *works):
    """Median processor seconds of each work, measured in turn: who else is on the machine counts less."""
    found = [[] for _ in works]
    for _ in range(repeats):
        for work, seconds in zip(works, found, strict=True):
            start = sum(os.times()[:2])
            work()
            seconds.append(sum(os.times()[:2]) - start)
    return [statistics.median(seconds) for seconds in found]


def process(*words):
    subprocess.run([sys.executable, *map(str, words)], check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT)


def peak_mib(*words):
    """Peak resident memory of a process of its own, MiB."""
    code = (
        "import resource, subprocess, sys;"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, sys.executable, *map(str, words)],
        capture_output=True,
        check=True,
        env=ENVIRONMENT,
    )
    return int(found.stdout) / 1024


def memory_mib(name):
    """`VmRSS`, the resident memory of this process, or `VmHWM`, its peak; Linux only."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def forget_peak():
    """Start `VmHWM` again from here."""
    Path("/proc/self/clear_refs").write_text("5")
