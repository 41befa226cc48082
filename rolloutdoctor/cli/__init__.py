"""The command line: parse, call, render, exit. The only place that prints."""

import os
import sys

from rolloutdoctor.cli.border import guarded
from rolloutdoctor.cli.pages import page_for


def main() -> None:
    """Run the command line."""
    page = page_for(sys.argv[1:])
    if page is None:
        # Arrow's jemalloc reads this when it is loaded: one arena, so that a step takes the place of the last.
        # See `io.allocation`, which is too late for it.
        os.environ.setdefault("JE_ARROW_MALLOC_CONF", "narenas:1,dirty_decay_ms:10,muzzy_decay_ms:0")
        from rolloutdoctor.cli.app import main as parse

        parse()
    else:
        guarded(lambda: print(page()))()
    sys.exit()


__all__ = ["main"]
