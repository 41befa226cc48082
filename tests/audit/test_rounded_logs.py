"""A log that holds few digits is compared within them: a healthy run agrees, and a wrong option is still seen."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from rolloutdoctor.commands.identify.query import identify
from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.options import CheckOptions, ReadOptions
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.io.run import StepRange, open_run
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.trainers.options import Layer

SAMPLES = Path(__file__).parents[2] / "sample_data"
SOME = StepRange(0, 20)
PRINTED = {
    "3 significant digits": lambda x: float(f"{x:.3g}"),
    "4 significant digits": lambda x: float(f"{x:.4g}"),
    "6 significant digits": lambda x: float(f"{x:.6g}"),
    "3 decimals": lambda x: round(x, 3),
    "4 decimals": lambda x: round(x, 4),
    "8 bits": lambda x: float(torch.tensor(x, dtype=torch.float64).bfloat16()),
}


@cache
def logged(name):
    return open_run([SAMPLES / f"{name}.parquet"]).metrics


@cache
def as_it_is(name):
    """The report of a sample whose log has all digits."""
    return check(open_run([SAMPLES / f"{name}.parquet"]), CheckOptions(device="cpu", steps=SOME))


def run_with(name, printed):
    """A sample whose log is printed with few digits."""
    run, metrics = open_run([SAMPLES / f"{name}.parquet"]), logged(name)
    run.metrics = LoggedMetrics(
        {key: {each: printed(value) for each, value in metrics.at(key).items()} for key in metrics.steps()}
    )
    return run


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", ["run", "healthy", "verl_rejected", "slime_ppo"])
@pytest.mark.parametrize("words", PRINTED)
def test_a_log_of_few_digits_agrees(name, words):
    run = run_with(name, PRINTED[words])
    report, exact = check(run, CheckOptions(device="cpu", steps=SOME)), as_it_is(name)
    assert [(one.quantity, one.compared, one.agree) for one in report.audit] == [
        (one.quantity, one.compared, one.compared) for one in exact.audit
    ]
    assert {one.code for one in report.findings if one.severity > Severity.INFO} <= {
        one.code for one in exact.findings if one.severity > Severity.INFO
    }
    assert any(note.startswith(f"the log holds {words}:") for note in report.notes)


@pytest.mark.slow
def test_a_log_with_all_digits_is_not_said_to_be_rounded():
    assert not any("digit" in note for note in as_it_is("run").notes)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("words", ["4 significant digits", "3 decimals", "8 bits"])
def test_a_wrong_option_is_seen_all_the_same(words):
    run = run_with("healthy", PRINTED[words])
    wrong = CheckOptions(device="cpu", steps=SOME, layers=(Layer("test", {"loss_type": "dapo", "beta": 0.4}),))
    report = check(run, wrong)
    assert any(not one.agrees for one in report.audit)
    assert any(one.severity == Severity.ERROR for one in report.findings)


@pytest.mark.slow
def test_identification_goes_by_the_digits_that_there_are():
    whole = identify(open_run([SAMPLES / "healthy.parquet"]), ReadOptions(device="cpu", steps=SOME))
    found = identify(run_with("healthy", PRINTED["4 significant digits"]), ReadOptions(device="cpu", steps=SOME))
    for one, other in zip(found.stages, whole.stages, strict=True):
        mine, theirs = (each.classes[0] for each in (one, other))
        members = [mine, *mine.equivalent]
        assert any(dict(each.options) == dict(theirs.options) for each in members), one.stage


@pytest.mark.slow
def test_a_norm_that_was_printed_as_0_may_have_been_small():
    """RDG002: an error where the trainer logged a norm of 0, and none where three decimals show it."""
    run, metrics = open_run([SAMPLES / "run.parquet"]), logged("run")
    keys = metrics.steps()
    values = {key: dict(metrics.at(key)) for key in keys}
    for key in keys:
        if "grad_norm" in values[key]:
            values[key]["grad_norm"] = 0.0
    options = replace(CheckOptions(device="cpu", steps=SOME))
    run.metrics = LoggedMetrics(values)
    cut_off = {one.code: one for one in check(run, options).findings}["RDG002"]
    assert cut_off.severity == Severity.ERROR
    run.metrics = LoggedMetrics(
        {key: {name: round(x, 3) for name, x in found.items()} for key, found in values.items()}
    )
    assert {one.code: one for one in check(run, options).findings}["RDG002"].severity == Severity.INFO
