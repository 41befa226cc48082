"""A few of the labelled runs, made and checked: what is named stays named, and what is clean stays silent."""

import pytest

pytest.importorskip("trl")

from labelled import outcomes
from labelled.clean import drawn, true_of
from labelled.kinds import KINDS
from labelled.trl_training import Training, train
from random_order import RandomOrder

import rolloutdoctor as rd
from rolloutdoctor.views.structured import body

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

FAULTS = {kind.name: kind for kind in KINDS}
NAMED = (
    ("rewards of the row before", 1),
    ("groups read as tiled", 2),
    ("KL is k2", 1),
    ("loss averaged by micro-batch", 0),
    ("sampler's log-probs one token late", 2),
    ("RLOO: baseline holds the row itself", 0),
)
"""Kinds and the place of their strength."""
CLEAN = (2, 8, 14, 21, 23, 34)


def judged(training, path, expected=(), information=False):
    train(training, path)
    with RandomOrder():
        in_any_order = verdicts(body(rd.check(path)))
    report = body(rd.check(path))
    assert verdicts(report) == in_any_order
    return outcomes.judged(report, expected, information, true_of(training))


def verdicts(report):
    return [(one["code"], one["severity"], one["verdict"]) for one in report["findings"]], report["clean"]


# The trainings themselves need one: what torch computes again for a gradient has to be the same.
@pytest.mark.one_order
@pytest.mark.slow(every=True)
@pytest.mark.parametrize(("name", "place"), NAMED)
def test_a_fault_is_named_first(tmp_path, name, place):
    kind = FAULTS[name]
    found = judged(kind.training(kind.strengths[place]), tmp_path / "run.parquet", kind.expected, kind.information)
    assert found["outcome"] == outcomes.NAMED, found


@pytest.mark.one_order
@pytest.mark.slow(every=True)
@pytest.mark.parametrize("number", CLEAN)
def test_a_clean_run_is_not_accused(tmp_path, number):
    assert judged(drawn(number), tmp_path / "run.parquet")["found"] == []


def test_an_edit_needs_its_passage_exactly_once(tmp_path):
    with pytest.raises(LookupError, match="exactly once"):
        train(Training(edits=(("_compute_loss", "loss = nothing", "loss = 1"),)), tmp_path / "run.parquet")


def found(code, severity="error", **more):
    return {"code": code, "severity": severity, **more}


def report(*findings, clean=(), skipped=()):
    return {"findings": findings, "clean": list(clean), "skipped": [{"code": code} for code in skipped]}


CAUSE = {"cause": {"hypothesis": "epsilon-1e-6"}}


@pytest.mark.parametrize(
    ("said", "expected", "word"),
    [
        (report(found("RDI003"), found("RDG005")), "RDI003", outcomes.NAMED),
        (report(found("RDO001"), found("RDI003")), "RDI003", outcomes.ALSO),
        (report(found("RDO001"), clean=["RDI003"]), "RDI003", outcomes.OTHER),
        (report(found("RDA004"), found("RDG005"), clean=["RDI003"]), "RDI003", outcomes.ONLY_AUDIT),
        # A rule of the audit names something with a cause alone.
        (report(found("RDA004"), found("RDG005")), "RDA004", outcomes.ONLY_AUDIT),
        (report(found("RDA004", **CAUSE), found("RDG005")), "RDA004", outcomes.NAMED),
        (report(found("RDI003", "info"), clean=["RDO001"]), "RDO001", outcomes.MISSED),
        (report(found("RDO001", "info")), "RDO001", outcomes.INFORMATION),
        (report(skipped=["RDO001"]), "RDO001", outcomes.SKIPPED),
        (report(), "RDO001", outcomes.NOT_TESTED),
    ],
)
def test_outcomes(said, expected, word):
    assert outcomes.outcome(said, (expected,)) == word


def test_what_is_clean_beside_an_unnamed_fault_counts():
    beside = report(found("RDA004"), clean=["RDI003"])
    assert outcomes.judged(beside, ("RDI003",), False, ())["clean_beside"]
    assert not outcomes.judged(report(found("RDI003"), clean=["RDO001"]), ("RDI003",), False, ())["clean_beside"]
    # A remark that is true of every such run is no accusation.
    assert outcomes.judged(report(found("RDA001")), (), False, ("RDA001",))["outcome"] == outcomes.SILENT


def test_a_fault_below_what_its_rule_excludes():
    def told(bound, planted):
        said = {**report(clean=["RDO011"]), "excluded": [{"code": "RDO011", "bound": bound}]}
        return outcomes.judged(said, ("RDO011",), False, (), planted)

    assert told(0.002, 0.001) == {"outcome": outcomes.BELOW, "found": [], "clean_beside": False}
    # A bound that does not hold the fault, and a fault of unknown size, count as before.
    for one in (told(0.002, 0.003), told(0.002, None)):
        assert (one["outcome"], one["clean_beside"]) == (outcomes.MISSED, True)
