"""Right dumps that say nothing of their options: nothing is found that their options would not show."""

import pytest
from goldens.option_free import DUMPED, Dump, dumps_of

import rolloutdoctor as rd
from rolloutdoctor.results.findings import Severity, weight_of

MOST = 70
"""Dumps of a trainer that are checked, evenly spread over all of them: some 800 of 2,900."""


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


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize("trainer", DUMPED)
def test_nothing_is_found_without_options(trainer, tmp_path):
    assert beyond(next(dumps_of(trainer)), tmp_path) == {}


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("trainer", DUMPED)
def test_nothing_is_found_in_any(trainer, tmp_path):
    dumps = list(dumps_of(trainer))
    assert {dump.trainer for dump in dumps} == {trainer}
    found = [beyond(dump, tmp_path) for dump in dumps[:: -(-len(dumps) // MOST)]]
    assert len(found) >= 10
    assert [each for each in found if each] == []
