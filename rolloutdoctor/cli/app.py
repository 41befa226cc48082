"""The application: its commands, its version, and the settings file that gives defaults to all of them."""

import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Annotated

import typer

from rolloutdoctor.cli import (
    check,
    compare,
    convert,
    demo,
    diff,
    identify,
    info,
    measure,
    merge,
    pages,
    plot,
    recompute,
    reference,
    report,
    verify,
    view,
    why,
)
from rolloutdoctor.cli.error_handling import fail, guarded
from rolloutdoctor.cli.help import GroupedCommand
from rolloutdoctor.cli.parsing import Commands
from rolloutdoctor.cli.settings import find_settings
from rolloutdoctor.cli.streams import printing
from rolloutdoctor.cli.terminal import show
from rolloutdoctor.results.errors import RolloutDoctorError

app = typer.Typer(
    cls=Commands,
    name="rolloutdoctor",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command("check", cls=GroupedCommand, epilog=check.EPILOG)(check.check)
app.command("merge", cls=GroupedCommand, epilog=merge.EPILOG)(merge.merge)
app.command("diff", cls=GroupedCommand, epilog=diff.EPILOG)(diff.diff)
app.command("compare", cls=GroupedCommand, epilog=compare.EPILOG)(compare.compare)
app.command("why", cls=GroupedCommand, epilog=why.EPILOG)(why.why)
app.command("recompute", cls=GroupedCommand, epilog=recompute.EPILOG)(recompute.recompute)
app.command("measure", cls=GroupedCommand, epilog=measure.EPILOG)(measure.measure)
app.command("plot", cls=GroupedCommand, epilog=plot.EPILOG)(plot.plot)
app.command("report", cls=GroupedCommand, epilog=report.EPILOG)(report.report)
app.command("view", cls=GroupedCommand, epilog=view.EPILOG)(view.view)
app.command("identify", cls=GroupedCommand, epilog=identify.EPILOG)(identify.identify)
app.command("verify", cls=GroupedCommand, epilog=verify.EPILOG)(verify.verify)
app.command("info", cls=GroupedCommand)(info.info)
app.command("convert", cls=GroupedCommand, epilog=convert.EPILOG)(convert.convert)
app.command("demo", cls=GroupedCommand)(demo.demo)
app.command("rule", cls=GroupedCommand)(reference.rule)
app.command("causes", cls=GroupedCommand)(reference.causes)
app.command("fixes", cls=GroupedCommand)(reference.fixes)
app.command("trainers", cls=GroupedCommand)(reference.trainers)
app.command("metrics", cls=GroupedCommand)(reference.metrics)
app.command("schema", cls=GroupedCommand)(reference.schema)


def _version(wanted: bool) -> None:
    if wanted:
        show(f"{pages.version()}\n")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Recompute advantages, KL, loss and gradients of RL post-training from logged rollouts, with and without fixes."""


def main() -> None:
    """Run the command line."""
    try:
        defaults = _defaults()
    except RolloutDoctorError as error:
        sys.exit(fail(str(error), error.exit_code))
    guarded(_parse)(defaults)


def _parse(defaults: Mapping[str, Mapping[str, object]]) -> None:
    # The option parser prints pages of help before a command is begun. A command raises no such error, except where
    # its traceback is asked for.
    with nullcontext() if os.environ.get("ROLLOUTDOCTOR_DEBUG") else printing():
        app(default_map=defaults)


def _defaults() -> Mapping[str, Mapping[str, object]]:
    """Defaults of the commands from the settings file, in the form that the option parser takes."""
    if any(word in sys.argv[1:] for word in ("-h", "--help", "--version")):
        return {}
    found = find_settings()
    # `format` is a word of Python, so its parameter carries an underscore.
    values = {{"format": "format_"}.get(key, key.replace("-", "_")): value for key, value in found.values.items()}
    # `check` has formats, and its own way to fail, that the others have not.
    known = {"full", "json", "jsonl"}
    shared = {name: value for name, value in values.items() if name != "format_" or value in known}
    return {
        "check": values,
        "merge": values,
        "info": values,
        "identify": shared,
        "diff": shared,
        "compare": shared,
        "verify": shared,
        "why": shared,
        "recompute": shared,
        "plot": values,
        "report": values,
    }
