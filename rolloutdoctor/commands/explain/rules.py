"""Rules: the page of each, and their list."""

import inspect
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rolloutdoctor.commands.explain.layout import hanging, indented

if TYPE_CHECKING:
    from rolloutdoctor.rules.table import AnyRule


def lines() -> Mapping[str, str]:
    """Return code and name of every rule to its title."""
    from rolloutdoctor.rules.table import RULES

    return {f"{rule.code}  {rule.name}": rule.title() for rule in RULES}


def by_family() -> Mapping[str, Mapping[str, str]]:
    """Return family to its lines."""
    from rolloutdoctor.rules.table import RULES, family

    found: dict[str, dict[str, str]] = {}
    for rule in RULES:
        found.setdefault(f"{rule.code[:3]}, {family(rule)}", {})[f"{rule.code}  {rule.name}"] = rule.title()
    return found


def codes() -> list[str]:
    """Return every code."""
    from rolloutdoctor.rules.table import RULES

    return [rule.code for rule in RULES]


def names() -> list[str]:
    """Return the name of every rule."""
    from rolloutdoctor.rules.table import RULES

    return [rule.name for rule in RULES]


def is_known(name: str) -> bool:
    """Tell whether a rule has this code or name."""
    return name.upper() in codes() or name.lower() in names()


def _exact(name: str) -> str:
    return name if name.upper() in codes() else name.lower()


def listing(*, verbose: bool = False) -> str:
    """List the rules; there is no more to say of all of them."""
    from rolloutdoctor.rules.table import RULES

    return _listed(RULES)


def _listed(chosen: "Sequence[AnyRule]") -> str:
    found = [hanging(f"{each.code}  {each.name:<22} ", each.title()) for each in chosen]
    return "\n".join([*found, "", "`rolloutdoctor explain CODE` explains one."])


def page(name: str, *, verbose: bool = False) -> str:
    """Explain a rule, or list those whose codes begin so.

    Raises:
        UsageError: if there is no such rule.
    """
    from rolloutdoctor.rules.table import RULES, family, find

    begun = [rule for rule in RULES if rule.code.startswith(name.upper())]
    if len(begun) > 1:
        return _listed(begun)
    one = find(_exact(name))
    parts = [
        f"{one.code} {one.name} ({family(one)})",
        _rendered(inspect.getdoc(type(one)) or ""),
        "Measures\n" + indented(", ".join(one.measures(None)), 2),
        "References\n" + "\n".join(f"  {reference}" for reference in one.references),
    ]
    if one.fix:
        fix = one.fix.partition(":")[0]
        parts.insert(3, f"Fix\n  {fix} (see `rolloutdoctor explain fix {fix}`)")
    return "\n\n".join(parts)


def body(name: str) -> object:
    """Return a rule for programs, or a list of those whose codes begin so.

    Raises:
        UsageError: if there is no such rule.
    """
    from rolloutdoctor.rules.table import RULES, find

    begun = [rule for rule in RULES if rule.code.startswith(name.upper())]
    return [_body(rule) for rule in begun] if len(begun) > 1 else _body(find(_exact(name)))


def _body(one: "AnyRule") -> dict[str, object]:
    from rolloutdoctor.rules.table import family

    return {
        "code": one.code,
        "name": one.name,
        "family": family(one),
        "summary": one.title(),
        "page": inspect.getdoc(type(one)),
        "measures": list(one.measures(None)),
        "fix": one.fix,
        "references": list(one.references),
    }


def bodies() -> list[dict[str, object]]:
    """Return every rule for programs."""
    from rolloutdoctor.rules.table import RULES

    return [_body(rule) for rule in RULES]


def _rendered(page: str) -> str:
    """The page of a rule without its markup: a heading on a line, what is below it indented and filled."""
    title, *sections = page.split("\n## ")
    parts = [title.strip()]
    for section in sections:
        heading, _, text = section.partition("\n")
        blocks = [
            textwrap.indent(block, "  ") if ">>>" in block or "\n-" in f"\n{block}" else indented(block, 2)
            for block in text.strip().split("\n\n")
        ]
        parts.append("\n".join([heading, "\n\n".join(blocks)]))
    return "\n\n".join(parts)
