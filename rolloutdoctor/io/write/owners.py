"""Tags of temporary files with their process, so that stale ones can be removed.

A name carries the process, when that started, and the place in which its number means something: the machine, and the
namespace of process numbers there. Only what was made in the same place can be known to be left behind.
"""

import os
import re
import socket
from functools import cache
from hashlib import blake2b
from pathlib import Path
from uuid import uuid4

_TAG = re.compile(r"(?P<pid>[0-9]+)-(?P<start>[0-9]+)-(?P<place>[0-9a-f]{10})-[0-9a-f]{8}")


def tag() -> str:
    """Return a unique word that names the process that made it."""
    return f"{os.getpid()}-{_start_of(os.getpid())}-{_place()}-{uuid4().hex[:8]}"


def is_left_behind(name: str, *, prefix: str = "", suffix: str = "") -> bool:
    """Tell whether a name was made with `tag`, by a process that is known to have ended.

    >>> is_left_behind(f"run-{tag()}", prefix="run-")
    False
    """
    if not (name.startswith(prefix) and name.endswith(suffix)):
        return False
    match = _TAG.fullmatch(name[len(prefix) : len(name) - len(suffix)].rpartition(".")[2])
    if match is None or match["place"] != _place():
        return False
    pid, start = int(match["pid"]), int(match["start"])
    return not _is_running(pid) or _start_of(pid) not in (start, 0)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        # It is there, and somebody else's.
        return True
    return True


def _start_of(pid: int) -> int:
    """Return the time when a process started, in ticks of its machine; 0 where that cannot be known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    # The name of the command may hold anything, a bracket included.
    return int(stat.rpartition(b")")[2].split()[19])


@cache
def _place() -> str:
    try:
        # A number means another process in each container, even where all go by the name of the machine.
        numbers = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - not a path
    except OSError:
        numbers = ""
    return blake2b(f"{socket.gethostname()} {numbers}".encode(), digest_size=5).hexdigest()
