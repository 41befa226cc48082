"""The command line: parse, call, render, exit. The only place that prints."""

import sys

from rolloutdoctor.cli.border import guarded
from rolloutdoctor.cli.pages import page_for
from rolloutdoctor.cli.process import prepare_process


def main() -> None:
    """Run the command line."""
    page = page_for(sys.argv[1:])
    if page is None:
        prepare_process()
        from rolloutdoctor.cli.app import main as parse

        parse()
    else:
        guarded(lambda: print(page()))()
    sys.exit()


__all__ = ["main"]
