"""Standard input as a file: a footer is at the end, and logs are read twice, so that what comes is kept first."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rolloutdoctor.io.locations.paths import call
from rolloutdoctor.io.write.scratch import scratch_folder
from rolloutdoctor.results.errors import InputError

STANDARD_INPUT = "-"
"""Name of standard input among paths."""


@contextmanager
def standard_input() -> Iterator[str]:
    """Give the path of a file that holds what came in; removed on leaving.

    Raises:
        InputError: if nothing comes, because it is a terminal or empty, or it cannot be kept.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise InputError("standard input is a terminal; pipe a file into it, or name the file")
    with scratch_folder() as folder:
        path = folder / "standard-input"
        try:
            with path.open("wb") as copy:
                shutil.copyfileobj(sys.stdin.buffer, copy, 2**20)
        except OSError as error:
            raise InputError(f"standard input: {error.strerror or error}; name the file instead") from None
        if not path.stat().st_size:
            raise InputError("standard input is empty; pipe a run file or a log into it")
        with call(str(path), "standard input"):
            yield str(path)
