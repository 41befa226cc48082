"""Relations between findings: the one that says more of what another one measures."""

from collections.abc import Iterable

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


def explanation(code: str, found: Iterable[str]) -> str:
    """Say in a few words which other finding explains a finding, or nothing.

    >>> explanation("RDG002", ["RDG001", "RDG002"]), explanation("RDG001", ["RDG001", "RDG002"])
    ('RDG001 shows where the KL-only part of the gradient comes from', '')
    >>> explanation("RDO001", ["RDO001", "RDO008"])
    'RDO008 shows a likely cause: other experts'
    """
    others = set(found)
    return next((f"{other} shows {words}" for other, words in EXPLAINED_BY.get(code, ()) if other in others), "")
