"""The command line: parse, call, render, exit. The only place that prints."""

import sys

from rolloutdoctor.cli import signals


def program() -> None:
    """Run the command line as the whole of a process: the console script, and ``python -m rolloutdoctor``."""
    # Before anything that takes time is imported.
    signals.heed()
    try:
        with signals.Stopping():
            _run()
    except signals.Stopped as stop:
        signals.report(stop)
        raise SystemExit(stop.exit_code) from None
    finally:
        signals.unheed()


def _run() -> None:
    from rolloutdoctor.cli.process import FastExit
    from rolloutdoctor.cli.streams import prepare_streams

    prepare_streams()
    way_out = FastExit()
    try:
        main()
    except SystemExit as stop:
        code = 0 if stop.code is None else stop.code
        way_out.code = code if isinstance(code, int) else None
        raise


def main() -> None:
    """Run the command line, and raise `SystemExit`."""
    from rolloutdoctor.cli.error_handling import ABNORMAL, fail, guarded
    from rolloutdoctor.cli.process import prepare_process, too_few_addresses
    from rolloutdoctor.cli.shortcuts import page_for, renamed
    from rolloutdoctor.cli.terminal import show

    sys.argv[1:] = renamed(sys.argv[1:])
    page = page_for(sys.argv[1:])
    if page is None:
        if (few := too_few_addresses()) is not None:
            sys.exit(fail(few, ABNORMAL))
        prepare_process()
        from rolloutdoctor.cli.app import main as parse

        parse()
    else:
        guarded(lambda: show(f"{page()}\n"))()
    sys.exit()


__all__ = ["main", "program"]
