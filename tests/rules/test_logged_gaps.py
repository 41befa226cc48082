"""Quantities that are NaN or are not logged any more: told, and nothing about them is called clean."""

import json
import math

import polars as pl
import pytest

import rolloutdoctor as rd
from rolloutdoctor.evaluation.run_tables import RunTables
from rolloutdoctor.metric_names.table import metric_quantities
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.logged_gaps import FEWEST_LINES, gaps_of
from rolloutdoctor.rules.table import RULES
from rolloutdoctor.views.verdict import verdict

STEPS = 40
CURVES = {
    "loss": lambda step: 0.01 + 0.001 * (step % 3),
    "grad_norm": lambda step: 0.5 + 0.01 * (step % 5),
    "learning_rate": lambda step: 1e-6,
    "reward": lambda step: 0.3 + 0.005 * step + 0.01 * (step % 4),
    "reward_std": lambda step: 0.3 + 0.01 * (step % 3),
    "frac_reward_zero_std": lambda step: 0.125 * (step % 3),
    "kl": lambda step: 0.001 + 0.0002 * step,
    "entropy": lambda step: 1.2 - 0.002 * step,
    "completions/mean_length": lambda step: 30.0 + step % 3,
    "completions/clipped_ratio": lambda step: 0.1 * (step % 2),
    "clip_ratio/region_mean": lambda step: 0.01 * (step % 2),
    "sampling/sampling_logp_difference/mean": lambda step: 0.003 + 0.0001 * (step % 4),
    "step_time": lambda step: 2.0 + 0.1 * (step % 3),
}
OF_WARNINGS = ("loss", "grad_norm", "learning_rate", "reward", "reward_std", "kl", "entropy", "completions/mean_length")


def lines_of(change=lambda line, step: line):
    return [{"step": step} | change({name: at(step) for name, at in CURVES.items()}, step) for step in range(STEPS)]


def checked(tmp_path, lines, name="log.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return rd.check(path)


def without(metric, left_out):
    """Leave a metric out of the lines that a predicate chooses."""
    return lambda line, step: {name: value for name, value in line.items() if name != metric or not left_out(step)}


def about(metric):
    """Return codes of the rules that are about the quantity of a metric."""
    quantity = metric_quantities([metric])[metric]
    return {rule.code for rule in RULES if quantity in getattr(rule, "about", ())}


def test_a_whole_log_has_no_gap(tmp_path):
    report = checked(tmp_path, lines_of())
    assert "RDM003" in dict(report.clean)
    assert [one for one in report.findings if one.severity > Severity.INFO] == []


@pytest.mark.slow
@pytest.mark.parametrize("metric", CURVES)
def test_what_ends_is_told_and_nothing_about_it_is_clean(metric, tmp_path):
    report = checked(tmp_path, lines_of(without(metric, lambda step: step >= 25)))
    finding = next(one for one in report.findings if one.code == "RDM003")
    assert finding.headline.startswith(f"{metric} is not logged after step 24, in the last 15 steps")
    assert finding.severity is (Severity.WARNING if metric in OF_WARNINGS else Severity.INFO)
    assert not about(metric) & dict(report.clean).keys()


@pytest.mark.slow
@pytest.mark.parametrize("metric", CURVES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_nan_is_told_and_nothing_about_it_is_clean(metric, value, tmp_path):
    report = checked(tmp_path, lines_of(lambda line, step: line | ({metric: value} if step == 20 else {})))
    assert any(one.code == "RDM003" and metric in one.headline for one in report.findings)
    assert not about(metric) & dict(report.clean).keys()


def has_ended(lines, metric="kl"):
    """Tell whether a metric has ended in a log whose lines are None where they lack it."""
    table = [(step, "train", "loss", 0.1) for step in range(len(lines))]
    table += [(step, "train", metric, value) for step, value in enumerate(lines) if value is not None]
    frame = pl.DataFrame(table, schema=["step", "split", "metric", "logged"], orient="row")
    return any(gap.ended for gaps in gaps_of(RunTables(metrics=frame), ["loss", metric]).values() for gap in gaps)


@pytest.mark.parametrize(("missing", "ended"), [(FEWEST_LINES - 1, False), (FEWEST_LINES, True)])
def test_a_few_lines_at_the_end_are_no_end(missing, ended):
    assert has_ended([0.1] * 20 + [None] * missing) is ended


@pytest.mark.parametrize(("missing", "ended"), [(29, False), (30, True)])
def test_what_is_logged_at_intervals_ends_after_three_of_them(missing, ended):
    assert has_ended([*[0.1, *[None] * 9] * 3, 0.1, *[None] * missing]) is ended


def test_one_value_has_no_interval():
    assert not has_ended([0.1, *[None] * 20])


def test_a_quantity_goes_on_under_another_name(tmp_path):
    def renamed(line, step):
        length = line.pop("completions/mean_length")
        return line | {"completion_length" if step < 20 else "completions/mean_length": length}

    assert "RDM003" in dict(checked(tmp_path, lines_of(renamed)).clean)


@pytest.mark.parametrize("since", [0, 20])
def test_none_in_a_console_is_a_metric_without_a_number(since, tmp_path):
    path = tmp_path / "train.log"
    lines = [line | {"epoch": line["step"] / STEPS} for line in lines_of()]
    path.write_text("".join(f"{line | ({'kl': None} if line['step'] >= since else {})}\n" for line in lines))
    report = rd.check(path)
    assert not {"RDT004", "RDT015", "RDG012"} & dict(report.clean).keys()
    reasons = {one.code: one.reason for one in report.skipped}
    assert ("kl is null in every line" if since == 0 else "kl is not logged after step") in reasons["RDT004"]
    if since == 0:
        assert "kl is null in every line (RDM003)." in verdict(report)
