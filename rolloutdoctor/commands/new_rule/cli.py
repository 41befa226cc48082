"""``rolloutdoctor new-rule``: the skeleton of a rule of one's own package."""

import re
from pathlib import Path
from typing import Annotated

import typer

from rolloutdoctor.cli.error_handling import guarded
from rolloutdoctor.cli.output import write_whole
from rolloutdoctor.cli.terminal import show
from rolloutdoctor.commands.new_rule import template
from rolloutdoctor.results.errors import UsageError

_NAME = re.compile(r"[a-z]+(-[a-z]+)*")
_CODE = re.compile(r"(?!RD[A-Z])[A-Z]{2,8}\d{2,4}")

NEXT = """\
wrote {rule} and {test}

In the pyproject.toml of your package, so that every command knows the rule once the package is installed:

    [project.entry-points."rolloutdoctor.rules"]
    {name} = "PACKAGE.{module}:RULE"

They run as they are: pip install --editable . && pytest {test}
"""


@guarded
def new_rule(
    name: Annotated[str, typer.Argument(metavar="NAME", help="In kebab case: long-responses.")],
    code: Annotated[str, typer.Argument(metavar="CODE", help="Letters of your own and digits: ACME01.")],
    folder: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Where the rule and its test are written.")
    ] = Path(),
) -> None:
    """Write the skeleton of a rule for a package of your own, with its test."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name of a rule: expected kebab case, such as long-responses")
    if not _CODE.fullmatch(code):
        raise UsageError(
            f"{code!r} is no code of your own: expected two to eight capitals that do not begin with RD "
            "and a family, and digits, such as ACME01"
        )
    module = name.replace("-", "_")
    texts = {
        folder / f"{module}.py": template.RULE + template.INSTANCE,
        folder / f"test_{module}.py": template.TEST,
    }
    there = [path for path in texts if path.exists()]
    if there:
        raise UsageError(f"{there[0]} is there already: choose another name or -o DIR")
    for path, text in texts.items():
        write_whole(template.filled(text, name, code).encode(), str(path))
    rule, test = texts
    show(NEXT.format(rule=rule, test=test, name=name, module=module))
