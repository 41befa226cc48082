"""Shell completion: codes, fixes, trainers, their options and kinds of pictures. None of it imports torch."""

from collections.abc import Iterable


def _starting(begun: str, words: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(word, help_) for word, help_ in words if word.lower().startswith(begun.lower())]


def codes(incomplete: str) -> list[tuple[str, str]]:
    """Codes and names of rules, and families.

    >>> codes("RDG001")
    [('RDG001', 'zero-std-kl')]
    """
    from rolloutdoctor.rules.table import RULES

    families = sorted({rule.code[:3] for rule in RULES})
    words = [(family, f"all rules {family}") for family in families]
    words += [(rule.code, rule.name) for rule in RULES]
    return _starting(incomplete, words + [(rule.name, rule.code) for rule in RULES if incomplete[:1].islower()])


def fixes(incomplete: str) -> list[tuple[str, str]]:
    """Names of fixes, with their variants once a colon is typed."""
    from rolloutdoctor.search.hypotheses.fixes import FIXES

    words = list(FIXES)
    if ":" in incomplete:
        words = [f"{name}:{variant}" for name, fix in FIXES.items() for variant in fix.variants]
    return _starting(incomplete, [(word, "") for word in words])


def trainers(incomplete: str) -> list[tuple[str, str]]:
    """Names of trainers."""
    from rolloutdoctor.trainers.table import TRAINERS

    return _starting(incomplete, [(trainer.name, trainer.title) for trainer in TRAINERS.values()])


def options(incomplete: str) -> list[tuple[str, str]]:
    """Names of the trainers' options, each with an equals sign."""
    from rolloutdoctor.trainers.table import TRAINERS

    words = {option.name: trainer.name for trainer in reversed(TRAINERS.values()) for option in trainer.options}
    return _starting(incomplete, [(f"{name}=", words[name]) for name in sorted(words)])


def kinds(incomplete: str) -> list[tuple[str, str]]:
    """Kinds of pictures.

    >>> kinds("adv")
    [('advantages', '')]
    """
    from rolloutdoctor.results.figures import ASKED, KINDS

    return _starting(incomplete, [(kind, "") for kind in (*KINDS, *ASKED)])
