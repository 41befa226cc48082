"""Shares of zero-variance groups that are logged in percent, or under a name that says so."""

import json

import pytest

import rolloutdoctor as rd


@pytest.mark.parametrize(
    ("name", "values", "share"),
    [
        ("percent zero-variance groups", [40.0, 50.0, 0.5], 0.4),
        ("pct_zero_variance_groups", [40.0, 50.0, 0.0], 0.4),
        ("zero_std/percentage", [40.0, 50.0, 0.0], 0.4),
        # What miles calls a percentage is a fraction.
        ("rollout/zero_std/percentage", [0.4, 0.5, 0.0], 0.4),
        ("zero_std_ratio", [0.4, 0.5, 0.0], 0.4),
        ("frac_zero_std", [0.4, 0.5, 0.0], 0.4),
        # Of few tenths nobody knows which they are; 140 of 100 are neither; of one reward; of something else.
        ("pct_zero_variance_groups", [0.4, 0.5, 0.0], None),
        ("pct_zero_variance_groups", [40.0, 140.0, 0.0], None),
        ("zero_std/percentage", [40.0, -1.0, 0.0], None),
        ("zero_std/all_one_percentage", [40.0, 50.0, 0.0], None),
        ("nonzero_std_percentage", [40.0, 50.0, 0.0], None),
    ],
)
def test_a_share_in_percent(tmp_path, name, values, share):
    path = tmp_path / "log.jsonl"
    rows = [{"step": step, "reward": 0.1 * step, "loss": 0.1, name: value} for step, value in enumerate(values, 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = rd.check(path)
    shares = [vital.series[0] for vital in report.vitals if vital.name == "zero_variance_share"]
    assert shares == ([] if share is None else [share])
    is_told = any("of zero-variance groups" in note for note in report.notes)
    assert is_told == (share is not None and ("perc" in name or "pct" in name))
