"""The audit, the causes and `identify` on runs that slime's real code made in float32; see `slime_runs`.

By default half of the planted runs are read; with ``ROLLOUTDOCTOR_FUZZ=1`` all of them.
"""

import os

import pytest
from parity.real_faults import outcome
from parity.real_slime_faults import CASES
from parity.slime_runs import stored

import rolloutdoctor as rd
from rolloutdoctor.results.findings import Severity

RUNS = {run.name: run for run in stored()}
HEALTHY = [name for name in RUNS if name.startswith("healthy")]
UNDEFINED = ("healthy flat 6", "healthy flat 57")
PLANTED = [name for name in RUNS if name not in HEALTHY]
if "ROLLOUTDOCTOR_FUZZ" not in os.environ:
    # Severe and mild by turns.
    PLANTED = [name for place, name in enumerate(PLANTED) if place % 4 in (0, 3)]


def opened(name, tmp_path):
    return rd.open(RUNS[name].write(tmp_path / "run.parquet"))


def true_findings(name):
    """What is wrong in the release itself: its buffer for the KL, masked responses in baselines, and NaN."""
    found = {"RDM001"} if RUNS[name].options["advantage_estimator"] == "ppo" else {"RDA001"}
    # Of the drawn numbers: rewards that are all equal.
    found |= {"RDA011"}
    # The variance of equal advantages, as a difference of two means, comes out below 0: they are NaN.
    return found | {"RDM003", "RDI001"} if name in UNDEFINED else found


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_agrees(name, tmp_path):
    report = rd.check(opened(name, tmp_path))
    off = [entry for entry in report.audit if not entry.agrees or entry.with_fixes]
    assert not off
    # Of advantages that are NaN nothing can be said.
    assert sum(entry.compared for entry in report.audit) > (50 if name in UNDEFINED else 200)
    bad = {one.code for one in report.findings if one.severity == Severity.ERROR or one.cause is not None}
    assert bad <= true_findings(name)


def holds(members, options):
    """Whether one of them has the options of the run, as far as it names them."""
    return any(
        one.trainer == "slime" and all(options.get(name, value) in (value, None) for name, value in one.options.items())
        for one in members
    )


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", HEALTHY[::4])
def test_identify_agrees_with_the_options(name, tmp_path):
    options = RUNS[name].options
    result = rd.identify(opened(name, tmp_path))
    assert result.recorded == "agrees"
    for stage in result.stages:
        if stage.outcome == "untestable":
            continue
        assert stage.outcome in ("one", "several")
        members = [one for each in stage.classes for one in (each, *each.equivalent)]
        assert any(
            one.trainer == "slime"
            and all(options.get(key, value) in (value, None) for key, value in one.options.items())
            for one in members
        )


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_is_named(name, tmp_path):
    cause, strength = name.rsplit(", ", 1)
    report = rd.check(opened(name, tmp_path))
    word, what = outcome(CASES[cause], report)
    assert word == CASES[cause].expected("slime", strength), what
    if word == "only the audit":
        assert {one.code for one in report.findings} & {"RDA004", "RDG005", "RDM004"}


@pytest.mark.slow
def test_an_option_that_the_release_does_not_use_is_named(tmp_path):
    name = next(each for each in HEALTHY if RUNS[each].options["eps_clip_c"] is not None)
    (note,) = (note for note in rd.check(opened(name, tmp_path)).notes if "eps_clip_c" in note)
    assert "has no effect: up to release 0.3.1" in note
    later = rd.check(opened(name, tmp_path), trainer="slime@0.3.2")
    assert not any("eps_clip_c" in note for note in later.notes)
