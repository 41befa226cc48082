"""The command line: parse, call, render, exit. The only place that prints."""

import sys

from rolloutdoctor.cli.border import guarded
from rolloutdoctor.cli.pages import page_for
from rolloutdoctor.cli.process import ShortWayOut, prepare_process


def program() -> None:
    """Run the command line as the whole of a process: the console script, and ``python -m rolloutdoctor``."""
    way_out = ShortWayOut()
    try:
        main()
    except SystemExit as stop:
        code = 0 if stop.code is None else stop.code
        way_out.code = code if isinstance(code, int) else None
        raise


def main() -> None:
    """Run the command line, and raise `SystemExit`."""
    page = page_for(sys.argv[1:])
    if page is None:
        prepare_process()
        from rolloutdoctor.cli.app import main as parse

        parse()
    else:
        guarded(lambda: print(page()))()
    sys.exit()


__all__ = ["main", "program"]
