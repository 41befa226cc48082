"""Causes: the hypotheses that are tried where an audit disagrees."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rolloutdoctor.commands.explain.layout import indented, titled

if TYPE_CHECKING:
    from rolloutdoctor.search.hypotheses.bounded import BoundedHypothesis
    from rolloutdoctor.search.hypotheses.hypothesis import Family, Hypothesis

    Cause = Hypothesis | Family | BoundedHypothesis


def _every() -> "Sequence[Cause]":
    """Every cause, by the code of the rule that reports it; fixes are none."""
    from rolloutdoctor.search.hypotheses.bounded import BOUNDED
    from rolloutdoctor.search.hypotheses.table import FAMILIES, FIX_CODE, HYPOTHESES

    every: tuple[Cause, ...] = (*HYPOTHESES, *FAMILIES, *BOUNDED)
    return sorted((cause for cause in every if cause.code != FIX_CODE), key=lambda cause: cause.code)


def lines() -> Mapping[str, str]:
    """Return name to what the trainer did."""
    return {cause.name: cause.words for cause in _every()}


def is_known(name: str) -> bool:
    """Tell whether a cause has this name."""
    return name in lines()


def listing(*, verbose: bool = False) -> str:
    """List the causes by the rule that reports them; there is no more to say of all of them."""
    return listing_of(None)


def listing_of(code: str | None) -> str:
    """List the causes that one rule reports, or all.

    Raises:
        UsageError: if there is no such rule.
    """
    from rolloutdoctor.rules.table import find

    wanted = None if code is None else find(code).code
    listed: list[str] = []
    previous = None
    for cause in _every():
        if wanted not in (None, cause.code):
            continue
        if cause.code != previous:
            previous = cause.code
            listed += ["", f"{previous} {find(cause.code).name}"]
        listed += [f"  {cause.name}", indented(f"{cause.words}.", 4)]
    if not listed:
        return f"{wanted} has no causes: it looks at the rows themselves; `rolloutdoctor explain {wanted}` explains it."
    listed += [
        "",
        "Each is an edit of the objective, the rows or a metric, tested against the logged values; the fixes of",
    ]
    return "\n".join([*listed[1:], "`rolloutdoctor explain fixes` are tried first."])


def bodies() -> list[dict[str, object]]:
    """Return every cause for programs."""
    return bodies_of(None)


def bodies_of(code: str | None) -> list[dict[str, object]]:
    """Return the causes that one rule reports, or all, for programs.

    Raises:
        UsageError: if there is no such rule.
    """
    from rolloutdoctor.rules.table import find

    wanted = None if code is None else find(code).code
    return [_body(cause) for cause in _every() if wanted in (None, cause.code)]


def page(name: str, *, verbose: bool = False) -> str:
    """Explain a cause."""
    fields = body(name)
    trainers, references = fields["trainers"], fields["references"]
    assert isinstance(trainers, list)
    assert isinstance(references, list)
    return "\n".join(
        [
            f"{name} (cause that {fields['code']} {fields['rule']} reports)",
            "",
            titled("What", f"{fields['words']}."),
            titled("Shows in", f"logged {fields['shows_in']}"),
            titled("To do", f"{fields['remedy']}."),
            titled("Trainers", ", ".join(trainers) or "none as configured by default"),
            *(f"{'':<12}{reference}" for reference in references),
        ]
    )


def body(name: str) -> dict[str, object]:
    """Return a cause for programs."""
    return next(_body(cause) for cause in _every() if cause.name == name)


def _body(cause: "Cause") -> dict[str, object]:
    from rolloutdoctor.rules.table import find
    from rolloutdoctor.trainers.table import TRAINERS

    return {
        "name": cause.name,
        "code": cause.code,
        "rule": find(cause.code).name,
        "shows_in": cause.stage,
        "words": cause.words,
        "remedy": cause.remedy,
        "trainers": [trainer.name for trainer in TRAINERS.values() if cause.applies(trainer.example())],
        "references": list(cause.references),
    }
