"""A log that numbers its steps otherwise than the rows is named, and hides nothing else."""

from functools import cache
from pathlib import Path

import pytest

from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.io.run import StepRange, open_run
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.trainers.options import Layer

SAMPLES = Path(__file__).parents[2] / "sample_data"
SOME = StepRange(0, 40)


def checked(name, offset, change=None, layers=()):
    """A sample whose log has other numbers of steps, and values that were changed."""
    run = open_run([SAMPLES / f"{name}.parquet"])
    values = {key: dict(run.metrics.at(key)) for key in run.metrics.steps()}
    for metrics in values.values() if change else ():
        change(metrics)
    run.metrics = LoggedMetrics({StepKey(key.step + offset, key.split): found for key, found in values.items()})
    return check(run, CheckOptions(device="cpu", steps=SOME, layers=layers))


@cache
def as_logged(name):
    """The same as it is."""
    return checked(name, 0)


def serious(report):
    return {one.code: one for one in report.findings if one.severity > Severity.INFO}


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", ["healthy", "run", "verl_rejected"])
@pytest.mark.parametrize("offset", [1, -1, 2])
def test_the_offset_is_named_and_nothing_else_is_found(name, offset):
    found, exact = serious(checked(name, offset)), serious(as_logged(name))
    assert found.keys() - {"RDM004"} <= exact.keys()
    later = f"{abs(offset)} step{'s' if abs(offset) > 1 else ''} {'later' if offset > 0 else 'earlier'} than the rows"
    cause = found["RDM004"].cause
    assert cause.hypothesis == "log-numbered-otherwise"
    assert cause.words == f"the log numbers its steps {later}"
    assert cause.as_found == cause.compared > cause.as_recorded
    assert {"loss", "kl"} & set(cause.explains) or "actor/pg_loss" in cause.explains


@pytest.mark.slow
def test_a_log_without_a_step_of_the_rows_is_a_note():
    report, exact = checked("healthy", 1000), as_logged("healthy")
    assert serious(report).keys() <= serious(exact).keys()
    why = "no step of the rows was logged: the log has steps 1001 to 1100, and the rows 1 to 39; number both alike"
    assert set(report.notes) - set(exact.notes) == {why}


@pytest.mark.slow
def test_another_fault_is_named_under_the_numbers_of_the_log():
    def twice(metrics):
        if "kl" in metrics:
            metrics["kl"] *= 2

    report = checked("healthy", 1, twice)
    codes = serious(report)
    assert codes["RDM004"].cause.hypothesis == "log-numbered-otherwise"
    assert "kl" not in codes["RDM004"].cause.explains
    assert "RDM007" in codes


@pytest.mark.slow
def test_wrong_options_are_no_offset():
    report = checked("healthy", 0, layers=(Layer("test", {"loss_type": "dapo", "beta": 0.4}),))
    assert all(one.cause is None or one.cause.hypothesis != "log-numbered-otherwise" for one in report.findings)
    assert any(one.severity == Severity.ERROR for one in report.findings)


@pytest.mark.slow
def test_one_metric_that_is_wrong_is_no_offset():
    def more(metrics):
        metrics["reward"] = metrics.get("reward", 0.0) + 0.25

    report = checked("healthy", 0, more)
    assert serious(report)["RDM004"].cause is None or (
        serious(report)["RDM004"].cause.hypothesis != "log-numbered-otherwise"
    )
