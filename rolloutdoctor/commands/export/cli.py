"""``rolloutdoctor export``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import typer

from rolloutdoctor.cli import groups, verdict
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.error_handling import guarded
from rolloutdoctor.commands.export import write_run, write_tables, write_tokens
from rolloutdoctor.commands.export.request import Asked
from rolloutdoctor.results.errors import UsageError, nearest

EPILOG = (
    "tables: rows.parquet (one line per response), tokens.parquet (a sample of the tokens), metrics.parquet (logged "
    "against recomputed) and _measured.json, which check judges without reading the run again; rows, metrics and lists "
    "such as rows,metrics write only these tables. docs/python.md has their columns.\n\n"
    "tokens: one row per response with advantages_re, kl_re, ratio_re, loss_re (they sum to the loss of the step) and "
    "grad_re (derivative of that loss with respect to policy_log_probs), 0 where the mask is 0; with --fix each again "
    "with the suffix _fixed; where a rollout correction is configured, is_weights_re and response_mask_re. The means "
    "over the steps are printed beside what was logged, and without -o nothing else is written.\n\n"
    "run: a trainer's own dump as a run file, with its logged metrics beside it. "
    "Examples: rolloutdoctor export run.parquet -o tables/; rolloutdoctor export run.parquet --what tokens -o "
    "tokens.parquet; rolloutdoctor export run.parquet --what tokens --format json; rolloutdoctor export "
    "outputs/completions --what run -o run.parquet; rolloutdoctor export mine.jsonl --what run --map "
    "reward=info.score --map group_id=prompt_id -o run.parquet"
)

TABLES, TOKENS, RUN = "tables", "tokens", "run"
_SAME = {"per-token": TOKENS, "rows,tokens,metrics": TABLES}
"""Other words for one of the three."""

_READ = frozenset({"paths", "output", "what", "importer", "columns", "map_file", "allow_pickle", "quiet"})
_COMPUTED = _READ | {"trainer", "settings", "trainer_config", "fix", "steps", "split", "device", "dtype"}


@dataclass(frozen=True, kw_only=True)
class Exported(groups.Computed):
    """The same, in a type that goes by what is exported."""

    dtype: Annotated[
        opt.Dtype | None,
        typer.Option(
            "--dtype",
            envvar="ROLLOUTDOCTOR_DTYPE",
            help="Floating-point type of token values; by default float64 for tokens, and float32 for tables.",
        ),
    ] = None  # type: ignore[assignment]  # of the others it has a default


@guarded
@groups.grouped
def export(
    context: typer.Context,
    *,
    paths: opt.Paths,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="OUT",
            help="A folder for tables, OUT.parquet for a run file, either for tokens: OUT/ has a file for each part.",
        ),
    ] = None,
    what: Annotated[
        str, typer.Option("--what", metavar="tables|tokens|run", help="What to write: see below.")
    ] = TABLES,
    source: groups.Source,
    fix: opt.CompareFixOption = None,
    part: Exported,
    logits: Annotated[
        bool,
        typer.Option(
            "--logits", help="For tokens, also grad_logits_re: |grad_re| sqrt(1 - 2p + S), S = sum_pi_squared."
        ),
    ] = False,
    no_text: Annotated[bool, typer.Option("--no-text", help="Leave prompts and responses out of a run file.")] = False,
    format_: Annotated[
        opt.NumbersFormat, typer.Option("--format", help="Format of the per-step numbers that are printed for tokens.")
    ] = opt.NumbersFormat.full,
    output_file: opt.OutputOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every option and its origin.")] = False,
    color: opt.ColorOption = opt.Color.auto,
    quiet: opt.QuietOption = False,
    scale: verdict.Scale,
) -> None:
    """Write a run as tables, as values of every token, or a dump as a run file."""
    kind, tables = _kind(what)
    _refuse_unused(context, kind)
    asked = Asked(paths, output, source, fix or [], part, quiet, tables)
    if kind == RUN:
        write_run.write(asked, no_text=no_text)
    elif kind == TABLES:
        write_tables.write(asked)
    else:
        write_tokens.write(
            asked, scale, logits=logits, form=format_, output_file=output_file, color=color, verbose=verbose
        )


def _kind(wanted: str) -> tuple[str, frozenset[str]]:
    """Return which of the three is meant, and the tables if it is not all.

    Raises:
        UsageError: if it is none.
    """
    wanted = _SAME.get(wanted, wanted)
    if wanted in (TABLES, TOKENS, RUN):
        return wanted, frozenset()
    words = wanted.split(",")
    names = (TABLES, TOKENS, RUN, "rows", "metrics", "per-token")
    for word in words:
        if word not in ("rows", "tokens", "metrics"):
            raise UsageError(
                f"--what {wanted}: no {word!r} to export{nearest(word, names)} (known: {', '.join(names)})"
            )
    return TABLES, frozenset(words) if len({*words}) < len(("rows", "tokens", "metrics")) else frozenset()


def _refuse_unused(context: typer.Context, kind: str) -> None:
    """Refuse options that say nothing of what is exported.

    Raises:
        UsageError: if one is on the command line.
    """
    used: Mapping[str, Callable[[str], bool]] = {
        TABLES: lambda name: name in _COMPUTED,
        TOKENS: lambda name: name != "no_text",
        RUN: lambda name: name in _READ or name == "no_text",
    }
    for option in context.command.params:
        name = option.name or ""
        origin = context.get_parameter_source(name)
        if origin is not None and origin.name == "COMMANDLINE" and not used[kind](name):
            raise UsageError(f"--what {kind} takes no {option.opts[0]}; leave it out")
