"""Right dumps that say nothing of their options: nothing is found that their options would not show."""

import pytest
from goldens.option_free import Dump, dumps

import rolloutdoctor as rd
from rolloutdoctor.results.findings import Severity, weight_of

EVERY = 29
"""One of so many dumps is in the fast test."""

MOST = 60
"""Dumps of a trainer that are checked, evenly spread over all of them: some 700 of 2,900."""


def beyond(dump: Dump, folder) -> dict[str, str]:
    """Codes that are found without the options and not, or not as surely, with them; and what is said."""
    silent = rd.check(dump.write(folder / "silent.parquet", stated=False))
    found = {one.code: one for one in silent.findings if one.severity > Severity.INFO}
    if not found:
        return {}
    stated = rd.check(dump.write(folder / "stated.parquet", stated=True))
    known = {one.code: weight_of(one.severity, one.verdict) for one in stated.findings}
    return {
        code: f"{dump.trainer}, {dump.name}: {one.headline}"
        for code, one in found.items()
        if weight_of(one.severity, one.verdict) > known.get(code, (0, False))
    }


@pytest.mark.parametrize("dump", [dump for number, dump in enumerate(dumps()) if number % EVERY == 0], ids=str)
def test_nothing_is_found_without_options(dump, tmp_path):
    assert beyond(dump, tmp_path) == {}


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("trainer", sorted({dump.trainer for dump in dumps()}))
def test_nothing_is_found_in_any(trainer, tmp_path):
    own = [dump for dump in dumps() if dump.trainer == trainer]
    found = [beyond(dump, tmp_path) for dump in own[:: -(-len(own) // MOST)]]
    assert len(found) >= 10
    assert [each for each in found if each] == []
