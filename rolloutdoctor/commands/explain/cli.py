"""``rolloutdoctor explain``: rules, fixes, causes, trainers, metrics, columns and terms, from the code."""

import json
from typing import Annotated

import typer

from rolloutdoctor.cli import complete
from rolloutdoctor.cli.error_handling import guarded
from rolloutdoctor.cli.options import PageFormat
from rolloutdoctor.cli.terminal import show
from rolloutdoctor.commands.explain import book

EPILOG = (
    "A name shared by several kinds is explained for each; put the kind first to choose one: explain column entropy. "
    "explain causes RDA004 lists the causes that one rule reports, explain metrics verl defines the metrics of one "
    "trainer, explain schema check prints the JSON Schema of an output. "
    "Examples: rolloutdoctor explain; rolloutdoctor explain RDG001; rolloutdoctor explain trl@1.16.0; "
    "rolloutdoctor explain frac_reward_zero_std; rolloutdoctor explain fixes; rolloutdoctor explain zero-variance group"
)


@guarded
def explain(
    *,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]",
            help=(
                "A rule's code, or the beginning of its name; a fix, cause, trainer, metric, column, option or term; "
                "or all of a kind: rules, fixes, causes, trainers, metrics, columns, options, terms, schemas."
            ),
            autocompletion=complete.codes,
        ),
    ] = None,
    format_: Annotated[PageFormat, typer.Option("--format", help="Text, or JSON for programs.")] = PageFormat.full,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Of trainers and fixes: every option, every variant.")
    ] = False,
) -> None:
    """Explain a rule, fix, cause, trainer, metric, column or term; without a name, list them."""
    if format_ is PageFormat.json:
        show(json.dumps(book.bodies(words or []), indent=2) + "\n")
    else:
        show(book.explained(words or [], verbose=verbose) + "\n")
