"""Every rule, in the order of their codes, and how `--select` and `--ignore` pick among them."""

from collections.abc import Sequence
from typing import Any

from rolloutdoctor import packs
from rolloutdoctor.plugins import offered, own
from rolloutdoctor.results.errors import UsageError, nearest
from rolloutdoctor.rules.table_rule import Rule

AnyRule = Rule[Any]

RULES: tuple[AnyRule, ...] = tuple(rule() for rule in own(packs.RULES))

RULES += offered("rolloutdoctor.rules", ("code", "judge", "quantities"), (rule.code for rule in RULES), "code")

FAMILIES = {
    "RDA": "advantages and baselines",
    "RDG": "gradients and KL",
    "RDI": "integrity",
    "RDM": "metrics",
    "RDO": "off-policy",
    "RDT": "dynamics of the training",
}


def pick(select: Sequence[str], ignore: Sequence[str]) -> tuple[AnyRule, ...]:
    """Return the rules that `select` names (all if it is empty) less those that `ignore` names.

    A name is a code, the start of one (``RDA``), or a rule's name.

    Raises:
        UsageError: if a name matches no rule.
    """
    for word in [*select, *ignore]:
        if not any(_matches(rule, word) for rule in RULES):
            names = [rule.code for rule in RULES] + [rule.name for rule in RULES]
            raise UsageError(f"no rule {word!r}{nearest(word, names)}; `rolloutdoctor explain rules` lists them")
    chosen = [rule for rule in RULES if not select or any(_matches(rule, word) for word in select)]
    return tuple(rule for rule in chosen if not any(_matches(rule, word) for word in ignore))


def find(word: str) -> AnyRule:
    """Return one rule by code or name.

    Raises:
        UsageError: if there is none.
    """
    for rule in RULES:
        if word.upper() == rule.code or word == rule.name:
            return rule
    names = [rule.code for rule in RULES] + [rule.name for rule in RULES]
    raise UsageError(
        f"no rule {word!r}{nearest(word.upper(), names) or nearest(word, names)}; "
        "`rolloutdoctor explain rules` lists them"
    )


def family(rule: AnyRule) -> str:
    """Return what a rule is about; of a rule of another package, that package."""
    return FAMILIES.get(rule.code[:3]) or f"of the package {type(rule).__module__.partition('.')[0]}"


def _matches(rule: AnyRule, word: str) -> bool:
    is_start = word[:2].upper() == "RD" or word.upper() == rule.code
    return rule.name == word or (is_start and rule.code.startswith(word.upper()))
