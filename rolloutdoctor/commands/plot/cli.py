"""``rolloutdoctor plot``."""

from enum import StrEnum
from typing import Annotated

import typer

from rolloutdoctor.cli import complete, groups, states, verdict
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.error_handling import guarded
from rolloutdoctor.cli.output import check_target, write_whole
from rolloutdoctor.commands.why.cli import AfterOption, AtOption, BeforeOption, MetricOption
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.results.figures import ASKED, KINDS, known_kind

EPILOG = (
    "KIND: overview (what the trainer logged, with the steps at which findings begin; from a log alone, too), "
    "audit (logged against recomputed values, and their difference in rounding radii, by step; of a log alone the "
    "identities between its metrics), rewards (each function, and how many responses of a group pass, by step), "
    "advantages (distribution, with zero and sign flips marked), kl (logged and recomputed series, KL per token, "
    "and the KL recovered from a corrupted series), baseline (drift of the group baseline against the share of fully "
    "masked responses), loss (logged, and recomputed in its parts), "
    "gradient (policy and KL parts, and what a fix changes), ratio (importance ratios with the clip "
    "range, and trainer against sampler; with --fix only for fixes that mask tokens), mismatch (the sampler's "
    "log-probs against the trainer's, their gap by step, position and version lag, and the cause that was found), "
    "lengths (response lengths, truncation and end tokens by step), why (the change of --metric at --at as a waterfall "
    "of the lines that add up to it; from a log alone, too). "
    "Only training rows are drawn unless --split says otherwise. "
    "Examples: rolloutdoctor plot advantages run.parquet --fix rejected-rows --by step -o advantages.svg; "
    "rolloutdoctor plot gradient run.parquet -o gradient.png; "
    "rolloutdoctor plot kl run.parquet --steps :1000 --save-state a.state; "
    "rolloutdoctor plot kl a.state b.state -o kl.png"
)


class By(StrEnum):
    """Keys by which a picture is broken down."""

    step = "step"


@guarded
@groups.grouped
def plot(
    context: typer.Context,
    *,
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND", help=", ".join((*KINDS, *ASKED)), show_default=False, autocompletion=complete.kinds
        ),
    ],
    paths: opt.Paths,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Output file: PNG, SVG or PDF, by its suffix.")
    ] = None,
    source: groups.Source,
    fix: opt.CompareFixOption = None,
    by: Annotated[By | None, typer.Option("--by", help="Draw one histogram per range of steps (advantages).")] = None,
    metric: MetricOption = "reward",
    at: AtOption = None,
    before: BeforeOption = 20,
    after: AfterOption = 20,
    part: groups.Measured,
    scale: verdict.Saved,
    quiet: opt.QuietOption = False,
) -> None:
    """Plot a run; with --fix, before and after the fix."""
    from rolloutdoctor.search.hypotheses.fixes import choose

    known_kind(kind)
    if output is None and scale.save_state is None:
        raise UsageError("nothing to write: name the picture with --output, or a state with --save-state")
    fixes = tuple(choose(text) for text in fix or [])
    from rolloutdoctor.engine.options import CheckOptions

    options = groups.read_options(CheckOptions, source, part)
    from rolloutdoctor.pictures.table import drawn_file, figure_of, format_for, known_by

    form = "" if output is None else format_for(output)
    by_step = known_by(kind, by)
    from rolloutdoctor.cli.progress import progress_bar
    from rolloutdoctor.commands.plot.query import draw
    from rolloutdoctor.commands.why.query import Question
    from rolloutdoctor.commands.why.query import why as explain

    run, executor = states.opened(context, paths, source, scale, quiet=quiet, logs_alone=True, says_notes=True)
    check_target(output)
    with progress_bar(run.unit, quiet=quiet, hint=verdict.faster(scale.engine, scale.workers)) as progress:
        data = (
            explain(run, options, Question(metric, at, before, after), progress, executor)
            if kind in ASKED
            else draw(run, kind, options, fixes, progress, executor)
        )
    if output is not None:
        write_whole(drawn_file(figure_of(kind, data, by_step=by_step), kind, form), output)
    opt.warn_of_partial(run, quiet=quiet)
