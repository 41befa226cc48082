"""Relations between findings: the one that says more of what another one measures, and families of one subject."""

from collections.abc import Iterable, Iterator, Sequence

from rolloutdoctor.results.findings import Finding, Severity

FAMILIES: dict[str, tuple[str, ...]] = {
    "zero variance": ("RDT001", "RDG001", "RDG003", "RDG004", "RDG013", "RDA011"),
    "truncation": ("RDT006", "RDI012", "RDI011"),
    "constant reward terms": ("RDT002", "RDA009"),
    "loss": ("RDG005", "RDG006", "RDG007", "RDG008", "RDG009", "RDG010"),
    "advantages": ("RDA004", "RDA005", "RDA010"),
    "sampler mismatch": (
        "RDO001",
        "RDO002",
        "RDO004",
        "RDO005",
        "RDO008",
        "RDO010",
        "RDO011",
        "RDO013",
        "RDO014",
        "RDI008",
        "RDI017",
    ),
}
"""Rules that look at one thing from several sides; where all are information, the first here speaks for the others."""

PROPERTIES = frozenset({"RDA012", "RDA013", "RDA017", "RDA019", "RDO007", "RDI009", "RDT010"})
"""Rules whose information describes the run, and asks for nothing."""

EXPLAINED_BY: dict[str, tuple[tuple[str, str], ...]] = {
    "RDA011": (("RDG001", "what these groups still add to the gradient"),),
    "RDA002": (("RDA001", "fully masked responses in the same baselines"),),
    "RDG002": (
        ("RDG003", "the steps in which the whole gradient is KL"),
        ("RDG001", "where the KL-only part of the gradient comes from"),
    ),
    "RDG003": (("RDG001", "the groups that make up these steps"),),
    "RDG004": (("RDG001", "the groups that make up these steps"),),
    "RDO001": (
        ("RDO008", "a likely cause: other experts"),
        ("RDO005", "part of it: log-probs with few digits"),
    ),
}
"""Code of a rule to the rules whose finding says why, the likeliest first, each with what it says."""


def explanation(code: str, codes: Iterable[str]) -> str:
    """Say in a few words which other finding explains a finding, or nothing.

    >>> explanation("RDG002", ["RDG001", "RDG002"]), explanation("RDG001", ["RDG001", "RDG002"])
    ('RDG001 shows where the KL-only part of the gradient comes from', '')
    >>> explanation("RDO001", ["RDO001", "RDO008"])
    'RDO008 shows a likely cause: other experts'
    """
    others = set(codes)
    return next((f"{other} shows {words}" for other, words in EXPLAINED_BY.get(code, ()) if other in others), "")


def by_family(findings: Sequence[Finding]) -> Iterator[tuple[Finding, tuple[str, ...]]]:
    """Yield each finding that speaks for itself, with the codes of its family for which it speaks.

    Every fault speaks for itself. Information of a family is told by its first fault, or, where there is none, by the
    information that the family names first.
    """
    for finding in findings:
        members = _members(finding, findings)
        faults = [other for other in findings if other in members and _is_fault(other)]
        speaker = (faults or members)[0]
        if finding is speaker:
            yield finding, tuple(other.code for other in members if other is not speaker and not _is_fault(other))
        elif _is_fault(finding):
            yield finding, ()


def _members(finding: Finding, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings of the family of one, in the order of the family."""
    codes = next((codes for codes in FAMILIES.values() if finding.code in codes), (finding.code,))
    return [other for code in codes for other in findings if other.code == code]


def _is_fault(finding: Finding) -> bool:
    return finding.severity > Severity.INFO
