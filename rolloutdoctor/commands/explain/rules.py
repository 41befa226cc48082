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

    families: dict[str, dict[str, str]] = {}
    for rule in RULES:
        families.setdefault(f"{rule.code[:3]}, {family(rule)}", {})[f"{rule.code}  {rule.name}"] = rule.title()
    return families


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
    listed = [hanging(f"{each.code}  {each.name:<22} ", each.title()) for each in chosen]
    return "\n".join([*listed, "", "`rolloutdoctor explain CODE` explains one."])


def page(name: str, *, verbose: bool = False) -> str:
    """Explain a rule, or list those whose codes begin so.

    Raises:
        UsageError: if there is no such rule.
    """
    from rolloutdoctor.rules.table import RULES, family, find

    begun = [rule for rule in RULES if rule.code.startswith(name.upper())]
    if len(begun) > 1:
        return _listed(begun)
    rule = find(_exact(name))
    parts = [
        f"{rule.code} {rule.name} ({family(rule)})",
        _rendered(inspect.getdoc(type(rule)) or ""),
        "Measures\n" + indented(", ".join(rule.measures(None)), 2),
        "References\n" + "\n".join(f"  {reference}" for reference in rule.references),
    ]
    if rule.fix:
        fix = rule.fix.partition(":")[0]
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


def _body(rule: "AnyRule") -> dict[str, object]:
    from rolloutdoctor.rules.table import family

    return {
        "code": rule.code,
        "name": rule.name,
        "family": family(rule),
        "summary": rule.title(),
        "page": inspect.getdoc(type(rule)),
        "measures": list(rule.measures(None)),
        "fix": rule.fix,
        "references": list(rule.references),
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
