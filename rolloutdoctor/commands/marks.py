"""Marks that findings add to pictures."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from rolloutdoctor.results.figures import AuditData, Gallery, Mark, MismatchData, OverviewData
from rolloutdoctor.results.findings import Finding, Report

Values = Mapping[str, float | int | None]


def _onset(values: Values) -> Mark | None:
    step = values.get("onset_step")
    return None if step is None else Mark("RDO002", f"the gap rises at step {int(step)}", step=int(step))


def _temperature(values: Values) -> Mark | None:
    found = values.get("temperature")
    return None if not found else Mark("RDO003", f"slope 1/T, T = {found:.3g}", slope=1 / found)


def _support(values: Values) -> Mark | None:
    found = values.get("top_p")
    if not found:
        return None
    return Mark("RDO004", f"bound -ln {found:.3g} above the trainer", slope=1.0, offset=-math.log(found))


_MARKS: Mapping[str, Callable[[Values], Mark | None]] = {
    "RDO002": _onset,
    "RDO003": _temperature,
    "RDO004": _support,
}

MARKING = tuple(_MARKS)
"""Codes of the rules whose findings are drawn."""


def marks_of(findings: Iterable[Finding]) -> tuple[Mark, ...]:
    """The marks of some findings, in their order."""
    found = []
    for finding in findings:
        make = _MARKS.get(finding.code)
        mark = make({name: one.value for name, one in finding.measures.items()}) if make else None
        if mark is not None:
            found.append(mark)
    return tuple(found)


def marked(gallery: Gallery, report: Report) -> Gallery:
    """Return the pictures with what was found drawn in; the overview is made of the report alone."""
    drawn, left_out = dict(gallery.drawn), dict(gallery.left_out)
    data = drawn.get("mismatch")
    if isinstance(data, MismatchData):
        drawn["mismatch"] = replace(data, marks=marks_of(report.findings))
    audit = drawn.get("audit")
    if isinstance(audit, AuditData):
        fixes = {entry.quantity: entry.with_fixes for entry in report.audit}
        known = (replace(one, with_fixes=fixes.get(one.quantity, ())) for one in audit.quantities)
        drawn["audit"] = replace(audit, quantities=tuple(sorted(known, key=lambda one: not one.differs)))
    if drawn.pop("overview", None) is not None:
        if report.vitals:
            drawn = {"overview": OverviewData(report.vitals), **drawn}
        else:
            left_out["overview"] = "no logged metric has a name that is known here; `rolloutdoctor metrics` lists them"
    return Gallery(drawn, left_out)
