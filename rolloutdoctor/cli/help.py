"""Pages of help: options in groups, without types that say nothing, and environment variables in one line."""

import re
from textwrap import wrap
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from rolloutdoctor.cli.terminal import show

_GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("The run", ("trainer", "settings", "trainer_config", "fix", "against", "steps", "split")),
    ("The change", ("metric", "at", "before", "after")),
    ("Dumps and logs", ("importer", "columns", "allow_pickle")),
    ("Left out", ("without", "top_tokens", "afresh")),
    ("Rules", ("select", "ignore", "require", "each", "list_")),
    (
        "Result",
        (
            "what",
            "logits",
            "by",
            "top",
            "no_text",
            "format_",
            "output",
            "output_file",
            "also",
            "verbose",
            "quiet",
            "color",
        ),
    ),
    ("Exit code", ("baseline", "write_baseline", "fail_on", "exit_code")),
    ("Computing", ("device", "dtype")),
    ("Options", ("help", "help_all")),
    ("Following a run", ("follow", "state_file", "on_finding", "until_idle", "every")),
    ("Scale", ("workers", "memory", "engine", "state_dir", "save_state")),
)
"""Title of a group to the parameters in it; what is in none comes under "Options"."""

RARE = "rare"
"""Panel of the options that the first page of help leaves out, where a command has ``--help-all``."""

EXAMPLES = "Examples: "
"""Comes before the examples at the end of what a command says below its options."""

_JOINED = "\ue000"
"""Stands for a blank at which no line ends."""

ENVIRONMENT = "An option can also be set by its environment variable: ROLLOUTDOCTOR_FORMAT for --format, and so on."


_EVERY = "rolloutdoctor.every_option"
"""Key of what a context is told: that every option is wanted."""


def _help_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.meta[_EVERY] = True
        show(f"{context.get_help()}\n")
        raise typer.Exit


HelpAllOption = Annotated[
    bool,
    typer.Option(
        "--help-all", is_eager=True, callback=_help_all, help="Show this page with every option, the rare ones too."
    ),
]


class GroupedCommand(TyperCommand):
    """A command whose page of help has its options in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401  # classes of the option parser
        """Write arguments, then the options by group; see `click.Command.format_options`."""
        titles = {name: title for title, names in _GROUPS for name in names}
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Arguments", *dict(_GROUPS))}
        reads_environment, every = False, self.get_params(ctx)
        leaves_out = any(each.name == "help_all" for each in every) and not ctx.meta.get(_EVERY)
        for each in every:
            parameter: Any = each
            reads_environment = reads_environment or bool(getattr(parameter, "envvar", None))
            parameter.show_envvar = False
            if leaves_out and getattr(parameter, "rich_help_panel", None) == RARE:
                continue
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            name, words = record
            if parameter.param_type_name == "argument":
                # The type of a value that has a name of its own says nothing.
                sections["Arguments"].append((str(parameter.metavar or name), words))
            else:
                sections.setdefault(titles.get(str(parameter.name), "Options"), []).append((name, words))
        for title, lines in sections.items():
            if lines:
                with formatter.section(title):
                    formatter.write_dl(lines)
        if reads_environment:
            formatter.write_paragraph()
            formatter.write_text(ENVIRONMENT)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        """Write what is to be said, then each example on lines of its own; see `click.Command.format_epilog`."""
        words, _, examples = (self.epilog or "").partition(EXAMPLES)
        for paragraph in filter(None, map(str.strip, words.split("\n\n"))):
            formatter.write_paragraph()
            formatter.write_text(paragraph)
        if examples:
            with formatter.section("Examples"):
                for example in examples.split("; "):
                    formatter.write(_continued(example, formatter.width, formatter.current_indent))


def _continued(command: str, width: int, indent: int) -> str:
    r"""A command as a shell takes it, on several lines where it is too long for one.

    >>> print(_continued("rolloutdoctor check run.parquet --steps 100:200", 32, 2), end="")
      rolloutdoctor check \
          run.parquet \
          --steps 100:200
    """
    margin = " " * indent
    lines = wrap(
        re.sub(r"(--?[a-z][a-z-]*) (?!-)", r"\1" + _JOINED, command),
        width - 2,
        initial_indent=margin,
        subsequent_indent=margin + "    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return " \\\n".join(lines).replace(_JOINED, " ") + "\n"
