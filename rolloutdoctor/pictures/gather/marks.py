"""Marks that findings add to pictures."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from rolloutdoctor.results.figures import AuditData, Gallery, Mark, MismatchData, OverviewData
from rolloutdoctor.results.findings import Finding, Report

UNSURE = math.log(0.9)
"""The sampler's log-prob below which a token counts, in nats: above, sampler and trainer agree whatever the cause."""

Values = Mapping[str, float | int | None]


def _onset(values: Values) -> Mark | None:
    step = values.get("onset_step")
    return None if step is None else Mark("RDO002", f"the gap rises at step {int(step)}", step=int(step))


def _temperature(values: Values) -> Mark | None:
    temperature = values.get("temperature")
    # A normaliser for each context is in it, which the tokens of the picture say.
    return (
        None
        if not temperature
        else Mark(
            "RDO003", f"slope 1/T, T = {temperature:.3g}", 1 / temperature, math.nan, label=f"T = {temperature:.3g}"
        )
    )


def _support(values: Values) -> Mark | None:
    top_p = values.get("top_p")
    if not top_p:
        return None
    return Mark("RDO004", f"bound -ln {top_p:.3g} above the trainer", slope=1.0, offset=-math.log(top_p))


_MARKS: Mapping[str, Callable[[Values], Mark | None]] = {
    "RDO002": _onset,
    "RDO003": _temperature,
    "RDO004": _support,
}

MARKING = tuple(_MARKS)
"""Codes of the rules whose findings are drawn."""


def marks_of(findings: Iterable[Finding]) -> tuple[Mark, ...]:
    """The marks of some findings, in their order."""
    marks = []
    for finding in findings:
        make = _MARKS.get(finding.code)
        mark = make({name: measure.value for name, measure in finding.measures.items()}) if make else None
        if mark is not None:
            marks.append(mark)
    return tuple(marks)


def _fitted(mark: Mark, data: MismatchData) -> Mark:
    """Return a line of known slope through the mean of the unsure tokens, where nothing says how high it lies."""
    if mark.slope is None or not math.isnan(mark.offset):
        return mark
    place = [data.low * (1 - (number + 0.5) / len(data.counts)) for number in range(len(data.counts))]
    gaps = [
        (count, place[row] - mark.slope * place[column])
        for row, counts in enumerate(data.counts)
        for column, count in enumerate(counts)
        if count and place[row] < UNSURE
    ]
    tokens = sum(count for count, _ in gaps)
    return replace(mark, offset=math.fsum(count * gap for count, gap in gaps) / tokens if tokens else 0.0)


def marked(gallery: Gallery, report: Report, *, logged: bool) -> Gallery:
    """Return the pictures with what was found drawn in; the overview is made of the report alone.

    Args:
        gallery: the pictures.
        report: what was found.
        logged: the run has logged metrics.
    """
    drawn, left_out = dict(gallery.drawn), dict(gallery.left_out)
    data = drawn.get("mismatch")
    if isinstance(data, MismatchData):
        drawn["mismatch"] = replace(data, marks=tuple(_fitted(mark, data) for mark in marks_of(report.findings)))
    audit = drawn.get("audit")
    if isinstance(audit, AuditData):
        fixes = {entry.quantity: entry.with_fixes for entry in report.audit}
        rows = (replace(row, with_fixes=fixes.get(row.quantity, ())) for row in audit.quantities)
        drawn["audit"] = replace(
            audit, quantities=tuple(sorted(rows, key=lambda row: (not row.differs, not row.fault)))
        )
    if drawn.pop("overview", None) is not None:
        if report.vitals:
            begun = {code for vital in report.vitals for _, code in vital.marks}
            headlines = {finding.code: finding.headline for finding in report.findings if finding.code in begun}
            drawn = {"overview": OverviewData(report.vitals, headlines), **drawn}
        else:
            left_out["overview"] = (
                "no logged metric has a name that is known here; `rolloutdoctor explain metrics` lists them"
                if logged
                else "nothing was logged: give the trainer's log as well"
            )
    return Gallery(drawn, left_out)
