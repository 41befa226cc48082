"""``rolloutdoctor rule``, ``fixes`` and ``trainers``: the book, printed from the code."""

import inspect
import json
import textwrap
from typing import Annotated

import typer

from rolloutdoctor.cli.border import guarded
from rolloutdoctor.cli.options import BookFormat

FormatOption = Annotated[BookFormat, typer.Option("--format", help="Text, or JSON for programs.")]


@guarded
def rule(
    code: Annotated[str | None, typer.Argument(metavar="[CODE]", help="A rule's code or name; none: all.")] = None,
    format_: FormatOption = BookFormat.full,
) -> None:
    """Explain one rule, or list them all."""
    from rolloutdoctor.rules.table import FAMILIES, RULES, find

    chosen = RULES if code is None else (find(code),)
    if format_ is BookFormat.json:
        pages = [
            {
                "code": each.code,
                "name": each.name,
                "family": FAMILIES[each.code[:3]],
                "summary": each.title(),
                "page": inspect.getdoc(type(each)),
                "measures": list(each.measures(each.tally())),
                "fix": each.fix,
                "references": list(each.references),
            }
            for each in chosen
        ]
        typer.echo(json.dumps(pages if code is None else pages[0], indent=2))
        return
    if code is None:
        for each in chosen:
            typer.echo(f"{each.code}  {each.name:<22} {each.title()}")
        typer.echo("\n`rolloutdoctor rule CODE` explains one.")
        return
    (each,) = chosen
    typer.echo(f"{each.code} {each.name} ({FAMILIES[each.code[:3]]})\n")
    typer.echo(inspect.getdoc(type(each)))
    typer.echo("\n## Measures\n" + ", ".join(each.measures(each.tally())))
    if each.fix:
        typer.echo(f"\n## Fix\n{each.fix.partition(':')[0]} (`rolloutdoctor fixes` tells its story)")
    typer.echo("\n## References\n" + "\n".join(each.references))


@guarded
def fixes(format_: FormatOption = BookFormat.full) -> None:
    """List the fixes, their variants, and how they stand upstream."""
    from rolloutdoctor.fixes import FIXES

    if format_ is BookFormat.json:
        body = [
            {
                "name": fix.name,
                "summary": fix.summary,
                "story": fix.story,
                "contested": fix.contested,
                "trainers": list(fix.trainers),
                "variants": [
                    {"name": name, "note": fix.notes[name], "trainers": list(fix.only_for.get(name, fix.trainers))}
                    for name in fix.variants
                ],
                "references": list(fix.references),
            }
            for fix in FIXES.values()
        ]
        typer.echo(json.dumps(body, indent=2))
        return
    for fix in FIXES.values():
        contested = "contested upstream" if fix.contested else "accepted upstream"
        typer.echo(f"{fix.name}  ({', '.join(fix.trainers)}; {contested})")
        typer.echo(_indented(f"{fix.summary}.", 2))
        typer.echo(_indented(fix.story, 2))
        for position, (name, note) in enumerate(fix.notes.items()):
            default = " (default)" if position == 0 else ""
            only = f" [{', '.join(fix.only_for[name])} only]" if name in fix.only_for else ""
            typer.echo(_indented(f"{fix.name}:{name}{default}{only}: {note}", 4))
        for reference in fix.references:
            typer.echo(f"    {reference}")
        typer.echo("")


@guarded
def trainers(
    name: Annotated[str | None, typer.Argument(metavar="[NAME[@VERSION]]", help="One trainer; none: all.")] = None,
    format_: FormatOption = BookFormat.full,
) -> None:
    """List the trainers and every option that is understood, with its default."""
    from rolloutdoctor.trainers.options import parse_version
    from rolloutdoctor.trainers.table import PLANNED, TRAINERS, find

    wanted, _, version = (name or "").partition("@")
    chosen = [find(wanted)] if wanted else list(TRAINERS.values())
    body = []
    for trainer in chosen:
        at = parse_version(version or trainer.newest)
        options = [
            {
                "name": option.name,
                "default": option.default_at(at),
                "takes": option.wanted(),
                "computed": None if option.computed is None else list(option.computed),
                "decides": option.decides,
                "meaning": option.meaning,
                "changed": None if option.changes is None else {"in": option.changes[0], "before": option.changes[1]},
            }
            for option in trainer.options
        ]
        body.append(
            {
                "name": trainer.name,
                "version": version or trainer.newest,
                "options": options,
                "not_recomputed": dict(trainer.not_recomputed),
            }
        )
    if format_ is BookFormat.json:
        typer.echo(json.dumps(body, indent=2))
        return
    for page, trainer in zip(body, chosen, strict=True):
        typer.echo(f"{trainer.name}  (versions from {trainer.oldest}; defaults of {page['version']})")
        for option in trainer.options:
            default = option.default_at(parse_version(version or trainer.newest))
            typer.echo(f"  {option.name} = {_word(default)}")
            words = f"{option.meaning}; takes {option.wanted()}"
            if option.computed is not None:
                able = ", ".join(_word(value) for value in option.computed)
                words += f"; computed here: {able} ({option.why_not})"
            if option.changes is not None:
                words += f"; before {option.changes[0]} the default was {_word(option.changes[1])}"
            typer.echo(_indented(words, 6))
        if trainer.not_recomputed:
            typer.echo("  logged metrics that are not recomputed:")
        for names, why in trainer.not_recomputed.items():
            typer.echo(_indented(f"{names}: {why}", 6))
        typer.echo("")
    if not wanted:
        for planned, why in PLANNED.items():
            typer.echo(f"{planned}: {why}.")


def _word(value: object) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _indented(text: str, spaces: int) -> str:
    margin = " " * spaces
    return textwrap.fill(text, 100, initial_indent=margin, subsequent_indent=margin)
