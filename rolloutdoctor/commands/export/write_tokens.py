"""`export --what tokens`: the values of every token, and the numbers of every step."""

from rolloutdoctor.cli import dumps, groups, verdict
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.output import check_target
from rolloutdoctor.cli.terminal import say
from rolloutdoctor.commands.export.request import Asked
from rolloutdoctor.results.errors import UsageError


def write(
    asked: Asked,
    scale: verdict.Scale,
    *,
    logits: bool,
    form: opt.NumbersFormat,
    output_file: str | None,
    color: opt.Color,
    verbose: bool,
) -> None:
    """Recompute a run, print the numbers of its steps and, where it was said, write the values of its tokens.

    Raises:
        UsageError: if an option cannot be used, or the output cannot be written.
        InputError: if a file cannot be read, breaks the contract, or lacks what the advantages need.
    """
    output, quiet = asked.output, asked.quiet
    if logits and output is None:
        raise UsageError("--logits adds a column to the file: name it with -o OUT.parquet")
    where = scale.executor()
    fixes = asked.fixes()
    from rolloutdoctor.cli.progress import progress_bar
    from rolloutdoctor.commands.export.token_parts import is_folder
    from rolloutdoctor.commands.export.tokens import RecomputeOptions, recompute
    from rolloutdoctor.commands.export.words import RENDERERS

    options = groups.read_options(RecomputeOptions, asked.source, asked.part, fixes=fixes, logits=logits)
    run = dumps.opened(asked.paths, asked.source, quiet=quiet)
    if output is not None and not is_folder(output):
        check_target(output, whole="a Parquet file")
    check_target(output_file, "--output-file")
    with progress_bar(run.unit, quiet=quiet) as progress:
        result = recompute(run, options, output, progress, where)
    style = opt.style_of(color, to_file=output_file is not None, verbose=verbose)
    opt.deliver(RENDERERS[form.value](result, style), output_file, colored=style.color)
    opt.warn_of_partial(run, quiet=quiet)
    if output is not None and not quiet:
        say(f"wrote {result.input.rows:,} rows to {output}")
