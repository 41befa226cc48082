"""``rolloutdoctor recompute``."""

from dataclasses import dataclass
from typing import Annotated

import typer

from rolloutdoctor.cli import dumps, groups, verdict
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.error_handling import guarded
from rolloutdoctor.cli.output import check_target
from rolloutdoctor.cli.terminal import say
from rolloutdoctor.results.errors import UsageError

EPILOG = (
    "Columns: advantages_re, kl_re, ratio_re, loss_re (they sum to the loss of the step) and grad_re (derivative of "
    "that loss with respect to policy_log_probs), 0 where the mask is 0; with --fix each again with the suffix "
    "_fixed. Where a rollout correction is configured, is_weights_re and response_mask_re. Rows keep step, split, "
    "group_id and sample_id. Examples: rolloutdoctor recompute run.parquet; rolloutdoctor recompute run.parquet -o "
    "tokens.parquet; rolloutdoctor recompute run.parquet --format json; rolloutdoctor recompute run.parquet "
    "--workers 4 -o tokens/"
)


@dataclass(frozen=True, kw_only=True)
class RecomputedPart(groups.Computed):
    """The same, in float64 by default."""

    dtype: opt.DtypeOption = opt.Dtype.float64


@guarded
@groups.grouped
def recompute(
    *,
    paths: opt.Paths,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="OUT",
            help=(
                "Write the values of every token to this Parquet file or folder (OUT/). Without it: print the table "
                "of means only."
            ),
        ),
    ] = None,
    source: groups.Source,
    fix: opt.CompareFixOption = None,
    logits: Annotated[
        bool,
        typer.Option("--logits", help="Also grad_logits_re: |grad_re| sqrt(1 - 2p + S), S being sum_pi_squared."),
    ] = False,
    part: RecomputedPart,
    format_: Annotated[
        opt.NumbersFormat, typer.Option("--format", help="Format of the per-step numbers on stdout.")
    ] = opt.NumbersFormat.full,
    output_file: opt.OutputOption = None,
    workers: verdict.WorkersOption = 1,
    engine: verdict.EngineOption = None,
    state_dir: verdict.StateDirOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every option and its origin.")] = False,
    color: opt.ColorOption = opt.Color.auto,
    quiet: opt.QuietOption = False,
) -> None:
    """Recompute advantage, KL, ratio, loss and gradient per token, and metrics per step."""
    from rolloutdoctor.search.hypotheses.fixes import choose

    if logits and output is None:
        raise UsageError("--logits adds a column to the file: name it with -o OUT.parquet")
    where = verdict.executor(engine, workers, state_dir)
    fixes = tuple(choose(text) for text in fix or [])
    from rolloutdoctor.cli.progress import progress_bar
    from rolloutdoctor.commands.recompute.parts import is_folder
    from rolloutdoctor.commands.recompute.query import RecomputeOptions
    from rolloutdoctor.commands.recompute.query import recompute as run_recompute
    from rolloutdoctor.commands.recompute.words import RENDERERS

    options = groups.read_options(RecomputeOptions, source, part, fixes=fixes, logits=logits)
    run = dumps.opened(paths, source, quiet=quiet)
    if output is not None and not is_folder(output):
        check_target(output, whole="a Parquet file")
    check_target(output_file, "--output-file")
    with progress_bar(run.unit, quiet=quiet) as progress:
        result = run_recompute(run, options, output, progress, where)
    style = opt.style_of(color, to_file=output_file is not None, verbose=verbose)
    opt.deliver(RENDERERS[format_.value](result, style), output_file, colored=style.color)
    opt.warn_of_partial(run, quiet=quiet)
    if output is not None and not quiet:
        say(f"wrote {result.input.rows:,} rows to {output}")
