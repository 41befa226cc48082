"""A few of the labelled runs of agents: what is named stays named, and what is clean stays silent."""

import pytest

pytest.importorskip("verl")
pytest.importorskip("trl")

from labelled import agents, outcomes

import rolloutdoctor as rd
from rolloutdoctor.views.structured import body

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

FAULTS = {kind.name.removeprefix("agents: "): kind for kind in agents.kinds_of_agents()}
CLEAN = {name: (make, true) for name, make, true in agents.clean_agents()}
NAMED = (
    ("first turn masked", "middle"),
    ("advantage of another turn", "weak"),
    ("advantage of another turn", "strong"),
    ("all run to the cap on turns", "weak"),
    ("stripped thinking", "weak"),
)


def judged(make, path, *about):
    make(path)
    return outcomes.judged(body(rd.check(path)), *about)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(("name", "strength"), NAMED)
def test_a_fault_is_named_first(tmp_path, name, strength):
    kind = FAULTS[name]
    found = judged(kind.makers[strength], tmp_path / "run.parquet", kind.expected, kind.information, ())
    assert found["outcome"] == outcomes.NAMED, found


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", ["the last turn alone is trained, 1", "sub-agents, 2", "turns sampled twice, 1"])
def test_a_clean_run_is_not_accused(tmp_path, name):
    make, true = CLEAN[name]
    assert judged(make, tmp_path / "run.parquet", (), False, true)["found"] == []
