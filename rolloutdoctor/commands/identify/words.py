"""An identification as text for people and as JSON for programs."""

import shlex
from collections.abc import Callable, Iterator, Sequence

from rolloutdoctor.results.identification import Identification, IdentifiedClass, Member, ReleaseFault, Stage, shown
from rolloutdoctor.views.structured import as_json
from rolloutdoctor.views.style import Style, plain
from rolloutdoctor.views.wrapping import wrapped

_LISTED = 4
"""Equivalent configurations that are named; more are counted."""

_INDENT = " " * 12


def text(identification: Identification, style: Style | None = None) -> str:
    """Return the identification as lines of text."""
    width = (style or Style()).width
    lines = [verdict(identification), ""]
    for stage in identification.stages:
        lines += _stage_lines(stage)
    lines.append(f"{'recorded':<12}{_recorded(identification)}")
    if not identification.use and not identification.nothing_identified:
        lines.append(f"{'use':<12}nothing: no options of one known trainer compute all of this")
    lines += [f"{'note':<12}{plain(note, 600)}" for note in identification.notes]
    return "\n".join([*wrapped(lines, width), *_command(identification.use, width)]) + "\n"


def verdict(identification: Identification) -> str:
    """Say in a sentence what was identified, and how the recorded options do."""
    if identification.nothing_identified:
        reasons = [stage.reason for stage in identification.stages if stage.reason]
        return f"Nothing was identified: {reasons[0] if reasons else 'no configuration reproduces the logged values'}."
    names = _listed([stage.stage for stage in identification.stages if stage.is_identified])
    agreeing = _listed([stage.stage for stage in identification.stages if stage.recorded == "agrees"])
    if identification.recorded == "agrees":
        return (
            f"The recorded options reproduce the logged {agreeing}{''.join(map(_with_fault, identification.faults))}."
        )
    contradicted = _listed([stage.stage for stage in identification.stages if stage.recorded == "contradicts"])
    start = f"The log contradicts the recorded options of {contradicted}. " if contradicted else ""
    if identification.use:
        return f"{start}The options under `use` reproduce the logged {names}."
    return f"{start}The formulas below reproduce the logged {names}; no single known trainer has all of them."


def _with_fault(fault: ReleaseFault) -> str:
    """Name what is reproduced with a fault of the release alone."""
    names = _listed([plain(name) for name in fault.quantities])
    return f"; {names} only with a fault that the release has ({fault.code}, fix {fault.fix})"


def _listed(names: Sequence[str]) -> str:
    """Join names as in a sentence.

    >>> _listed(["advantage", "kl", "loss"])
    'advantage, kl and loss'
    """
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _command(words: Sequence[str], width: int) -> Iterator[str]:
    """Options to copy into a shell: pairs of a name and its value, over several lines where one is too narrow."""
    if not words:
        return
    pairs = [plain(shlex.join(words[place : place + 2]), 500) for place in range(0, len(words), 2)]
    line = f"{'use':<12}"
    for place, pair in enumerate(pairs):
        more = place + 1 < len(pairs)
        if line.strip() not in ("", "use") and len(line) + 1 + len(pair) + 2 * more > width:
            yield f"{line} \\"
            line = _INDENT
        line += pair if line.endswith(" ") else f" {pair}"
    yield line


def _stage_lines(stage: Stage) -> Iterator[str]:
    name = f"{stage.stage:<12}"
    if stage.outcome == "untestable":
        yield f"{name}cannot be tested: {plain(stage.reason, 300)}"
        if stage.remedy:
            yield f"{_INDENT}to test it: {plain(stage.remedy, 300)}"
        return
    if stage.outcome == "none":
        yield f"{name}no configuration gives the logged values of {', '.join(map(plain, stage.quantities))}"
    for number, identified in enumerate(stage.classes):
        start = name if number == 0 and stage.outcome != "none" else _INDENT
        word = "nearest: " if stage.outcome == "none" else ("or: " if number else "")
        yield f"{start}{word}{plain(identified.words, 300)}{_belongs(identified)}"
        yield f"{_INDENT}{_evidence(stage, identified)}"
        yield from _also(identified)
    for out in stage.excluded:
        sample = "" if out.sample_id is None else f", sample {plain(out.sample_id, 40)}"
        yield (
            f"{_INDENT}not: {plain(out.words, 200)} (step {out.step}{sample}: logged {out.logged:.7g}, "
            f"predicted {out.predicted:.7g})"
        )
    if stage.separate and stage.is_identified:
        yield f"{_INDENT}to distinguish them: {stage.separate}"


def _belongs(identified: IdentifiedClass) -> str:
    if identified.trainer is None and not any(each.trainer for each in identified.equivalent):
        return "; no known trainer computes this"
    return ""


def _evidence(stage: Stage, identified: IdentifiedClass) -> str:
    is_all = identified.matched == stage.compared
    words = f"reproduces {'all ' if is_all else f'{identified.matched:,} of '}{stage.compared:,} logged values"
    if stage.distinct:
        words += f" ({stage.distinct:,} different ones, {stage.bits:.0f} bits of evidence each)"
    words += f"; largest error {identified.worst:.2g} times the rounding bound" if is_all else ""
    return words + (f"; {identified.where}" if identified.where else "")


def _also(identified: IdentifiedClass) -> Iterator[str]:
    members = [words for words in dict.fromkeys(map(_member, identified.equivalent)) if words]
    for words in members[:_LISTED]:
        yield f"{_INDENT}also: {plain(words, 400)}"
    if len(members) > _LISTED:
        yield f"{_INDENT}also: {len(members) - _LISTED} more that give the same values"


def _member(each: Member) -> str:
    options = ", ".join(f"{name}={shown(value)}" for name, value in each.options.items())
    if each.trainer is None:
        return each.apart
    return f"{each.trainer} {options}" + (f" ({each.apart})" if each.apart else "")


def _recorded(identification: Identification) -> str:
    words = {
        "agrees": "agrees",
        "contradicts": "contradicts the log",
        "cannot tell": "cannot be tested against the log",
        "absent": "no options are recorded",
    }[identification.recorded]
    options = [f"{plain(name)}={plain(shown(value))}" for name, value in identification.recorded_options.items()]
    wrong = [stage.stage for stage in identification.stages if stage.recorded == "contradicts"]
    where = f" ({', '.join(wrong)})" if wrong else ""
    return f"{', '.join(options)}: {words}{where}" if options else words


RENDERERS: dict[str, Callable[[Identification, Style], str]] = {"full": text, "json": as_json}
