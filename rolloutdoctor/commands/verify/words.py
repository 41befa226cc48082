"""A verification as text for people and as JSON for programs."""

from collections.abc import Callable

from rolloutdoctor.results.verification import DIFFERS, FOLLOWS, Verification, VerifiedStage
from rolloutdoctor.views.structured import as_json
from rolloutdoctor.views.style import Style, plain
from rolloutdoctor.views.wrapping import wrapped


def text(verification: Verification, style: Style | None = None) -> str:
    """Return the verification as lines of text: a verdict, then a line for each stage."""
    lines = [verdict(verification), ""]
    for stage in verification.stages:
        lines += _stage_lines(stage)
    lines += [f"{'note':<12}{plain(note, 600)}" for note in verification.notes]
    return "\n".join(wrapped(lines, (style or Style()).width)) + "\n"


def verdict(verification: Verification) -> str:
    """Say in a sentence whether every required stage follows."""
    by_outcome = {
        outcome: [stage.stage for stage in verification.stages if stage.required and stage.outcome == outcome]
        for outcome in {stage.outcome for stage in verification.stages}
    }
    whose = (
        ""
        if verification.trainer is None
        else f" of {verification.trainer} {verification.trainer_version or ''}".rstrip()
    )
    names = _listed(by_outcome.get(verification.worst(), []))
    if verification.worst() == FOLLOWS:
        return f"Verified: {names} follow from the options{whose}."
    if verification.worst() == DIFFERS:
        return f"Not what the options{whose} compute: {names}."
    return f"Cannot be told whether they follow from the options{whose}: {names}."


def _stage_lines(stage: VerifiedStage) -> list[str]:
    counts = f"{stage.agree:,} of {stage.compared:,} logged values follow" if stage.compared else ""
    if stage.outcome == DIFFERS and stage.agree == stage.compared:
        counts = f"all {stage.compared:,} logged values follow only with a known fault"
    remark = "" if stage.required else " (not required)"
    lines = [f"{stage.stage:<12}{stage.outcome}{remark}{': ' if counts else ''}{counts}"]
    if stage.reason:
        lines.append(f"{'':<12}{plain(f'{stage.code} {stage.reason}'.strip(), 600)}")
    if stage.remedy:
        lines.append(f"{'':<12}-> {plain(stage.remedy, 600)}")
    return lines


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


RENDERERS: dict[str, Callable[[Verification, Style], str]] = {"full": text, "json": as_json}
"""Format to its renderer."""
