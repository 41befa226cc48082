"""Processes of Python that import nothing from the working folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_SAFE_PATH = "PYTHONSAFEPATH"


@contextmanager
def without_working_folder() -> Iterator[None]:
    """Start processes of Python inside whose first import path is not the working folder.

    `multiprocessing` starts them as ``python -c ...``, so that a ``struct.py`` beside a run would be executed. The
    environment is as before on leaving: a command of the user's own (``--on-finding``) has that of the user.
    """
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before
