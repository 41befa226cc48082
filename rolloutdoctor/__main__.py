"""``python -m rolloutdoctor``."""

# Imported by the interpreter before the working folder is in the path.
import os
import sys


def _leave_working_folder() -> None:
    """Take the working folder, which ``python -m`` puts first, out of the import path: its files are data.

    A source tree that is not installed lies there itself; then the folder comes last.
    """
    try:
        cwd = os.getcwd()  # noqa: PTH109 - importing pathlib imports from the path
    except OSError:
        cwd = ""
    if not sys.flags.safe_path and sys.path and sys.path[0] in ("", cwd):
        del sys.path[0]
        if os.path.dirname(os.path.dirname(os.path.abspath(__file__))) == cwd:  # noqa: PTH100, PTH120 - as above
            sys.path.append(cwd)


_leave_working_folder()

from rolloutdoctor.cli import program  # noqa: E402 - only now

program()
