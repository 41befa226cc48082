"""RDA025: optimizer steps by rows, and numbers of updates that go by something else."""

import pytest
from rules.checking import found_by, outcomes, report_on, values

from rolloutdoctor.testing import toy_batch

CODE = "RDA025"


def step(number, rows, updates, trajectories=4):
    """So many trajectories of so many rows each, in so many optimizer steps."""
    count = trajectories * rows
    columns = {
        "trajectory_id": [row // rows for row in range(count)],
        "optim_step_id": [row * updates // count for row in range(count)],
    }
    return toy_batch([[float(row % 2) for row in range(count)]], lengths=1, per_row=columns, step=number)


def test_updates_go_by_the_rows():
    found = found_by(CODE, [step(0, 1, 2), step(1, 2, 4), step(2, 1, 2)], trainer=None)
    assert (found.severity.label, found.verdict) == ("warning", "confirmed")
    assert values(found) == {"times": 2, "most_updates": 4, "fewest_updates": 2, "rows_per_trajectory": 16 / 12}
    assert [(one.step, one.note) for one in found.examples] == [
        (1, "4 trajectories in 8 rows: 4 updates, and 2 elsewhere")
    ]


@pytest.mark.parametrize(
    "steps",
    [
        # Trajectories are counted.
        [step(0, 1, 2), step(1, 3, 2)],
        # More trajectories take more updates.
        [step(0, 2, 2), step(1, 2, 4, trajectories=8), step(2, 2, 2)],
        # It goes by something else: those with more rows have fewer, or as many rows more updates.
        [step(0, 2, 2), step(1, 1, 4)],
        [step(0, 2, 2), step(1, 2, 4)],
    ],
)
def test_look_alikes_are_clean(steps):
    assert outcomes(report_on(steps, select=[CODE], trainer=None)) == {CODE: "clean"}


@pytest.mark.parametrize("steps", [[step(0, 2, 2)], [step(0, 1, 2), step(1, 1, 4)]])
def test_not_applicable(steps):
    assert outcomes(report_on(steps, select=[CODE], trainer=None)) == {CODE: "not applicable"}
