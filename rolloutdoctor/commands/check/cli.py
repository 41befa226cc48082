"""``rolloutdoctor check``."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from rolloutdoctor.cli import complete, groups, states, verdict
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.error_handling import guarded
from rolloutdoctor.cli.help import HelpAllOption
from rolloutdoctor.commands.check.baseline import Baselines
from rolloutdoctor.commands.check.modes import Asked, mode_of
from rolloutdoctor.commands.follow.cli import Following
from rolloutdoctor.commands.merge.cli import judge_saved
from rolloutdoctor.results.errors import UsageError

EPILOG = (
    "Exit codes: 0 nothing at or above --fail-on, 1 findings, 2 usage, unreadable input or internal error, "
    "3 no rule could be tested, or one of --require was skipped. "
    "Examples: rolloutdoctor check run.parquet; rolloutdoctor check 'runs/*.parquet' --trainer verl@0.9.1 "
    "--set algorithm.adv_estimator=rloo --steps 100:200 --format json"
)


@guarded
@groups.grouped
def check(
    context: typer.Context,
    *,
    paths: opt.Paths,
    source: groups.Source,
    fix: opt.FixOption = None,
    judging: verdict.Judging,
    part: groups.Measured,
    each: Annotated[
        bool, typer.Option("--each", help="Check several runs: one line for each, with its worst finding.")
    ] = False,
    list_: Annotated[
        str | None,
        typer.Option(
            "--list",
            metavar="CODE",
            help="List every row, group or step that this rule points at, and nothing else.",
            autocompletion=complete.codes,
        ),
    ] = None,
    scale: verdict.Saved,
    following: Following,
    baselines: Baselines,
    help_all: HelpAllOption = False,
) -> None:
    """Run the rules on a run and print the findings."""
    from rolloutdoctor.engine.options import CheckOptions
    from rolloutdoctor.engine.state_file import is_saved
    from rolloutdoctor.search.hypotheses.fixes import choose

    if any(map(is_saved, paths)):
        beside = {written or "paths": name not in _OF_MEASURED for name, (written, _) in states.given(context).items()}
        states.refuse_beside(f"{paths[0]} is what was measured, with the options of then", beside)
        raise SystemExit(judge_saved(paths, judging))
    executor, rules = scale.executor(), judging.rules()
    must_test = verdict.required(judging.require, rules)
    options = groups.read_options(CheckOptions, source, part, rules=rules)
    memory = replace(options.memory, beside=None if scale.state_dir is None else Path(scale.state_dir))
    options = replace(options, fixes=tuple(choose(text) for text in fix or []), memory=memory)
    asked = Asked(paths, source, options, judging, must_test, each, list_, scale, executor, following, baselines)
    _refuse_contradictions(asked)
    raise SystemExit(mode_of(asked)(asked))


_OF_MEASURED = {"paths", *verdict.Judging.__dataclass_fields__}
"""Options that judge what was measured."""


def _refuse_contradictions(asked: Asked) -> None:
    """Refuse options of which one leaves nothing for the other to do.

    Raises:
        UsageError: if such are given together.
    """
    each, list_, scale, baselines = asked.each, asked.list_, asked.scale, asked.baselines
    states.refuse_beside(
        "--each checks one run after the other" if each else "--list prints the places of one rule" if list_ else "",
        {
            "--follow": asked.following.follow,
            "--save-state": scale.save_state is not None,
            "--workers": scale.workers > 1,
            "--engine": scale.engine is not None,
            "--baseline": baselines.baseline is not None,
            "--write-baseline": baselines.write_baseline is not None,
            "--list": each and list_ is not None,
        },
    )
    asked.following.refuse_unless_followed()
    if asked.following.follow and not scale.is_one_process:
        raise UsageError("--follow takes one process; leave --workers and --engine out")
