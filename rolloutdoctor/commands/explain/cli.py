"""``rule``, ``causes``, ``fixes``, ``trainers``, ``metrics`` and ``schema``: the reference pages, with options."""

from typing import Annotated

import typer

from rolloutdoctor.cli import complete, pages
from rolloutdoctor.cli.error_handling import guarded
from rolloutdoctor.cli.options import PageFormat
from rolloutdoctor.cli.terminal import show

FormatOption = Annotated[PageFormat, typer.Option("--format", help="Text, or JSON for programs.")]


@guarded
def rule(
    code: Annotated[
        str | None,
        typer.Argument(
            metavar="[CODE]", help="A rule's code or name; all rules if omitted.", autocompletion=complete.codes
        ),
    ] = None,
    format_: FormatOption = PageFormat.full,
) -> None:
    """Explain one rule, or list them all."""
    show(pages.rule(code, as_json=format_ is PageFormat.json) + "\n")


@guarded
def causes(
    code: Annotated[
        str | None, typer.Argument(metavar="[CODE]", help="Causes that one rule reports; all if omitted.")
    ] = None,
    format_: FormatOption = PageFormat.full,
) -> None:
    """List the causes tried when logged values do not match the recorded options."""
    show(pages.causes(code, as_json=format_ is PageFormat.json) + "\n")


@guarded
def fixes(format_: FormatOption = PageFormat.full) -> None:
    """List the fixes, their variants, and their status upstream."""
    show(pages.fixes(as_json=format_ is PageFormat.json) + "\n")


@guarded
def trainers(
    name: Annotated[str | None, typer.Argument(metavar="[NAME[@VERSION]]", help="One trainer; all if omitted.")] = None,
    format_: FormatOption = PageFormat.full,
) -> None:
    """List the trainers, their options and defaults."""
    show(pages.trainers(name, as_json=format_ is PageFormat.json) + "\n")


@guarded
def metrics(
    trainer: Annotated[str | None, typer.Argument(metavar="[TRAINER]", help="One trainer; all if omitted.")] = None,
    format_: FormatOption = PageFormat.full,
) -> None:
    """List the metric names that are understood, with their exact definitions."""
    show(pages.metrics(trainer, as_json=format_ is PageFormat.json) + "\n")


@guarded
def schema(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="An output; a list of them if omitted.")] = None,
) -> None:
    """Print the JSON Schema of a command's JSON output."""
    show(pages.schema(name) + "\n")
