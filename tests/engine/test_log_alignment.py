"""Lines of a log that may be those of other rows confirm nothing."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rolloutdoctor as rd
from rolloutdoctor.audit.tally import OF_JOIN
from rolloutdoctor.results.findings import Severity

OPTIONS = {"algorithm.adv_estimator": "grpo", "actor.use_kl_loss": False}


def written(folder, *, lines, updates=2, steps=(0, 2, 4, 6)):
    """A run of verl whose rows serve `updates` optimizer steps, with a score that no row gives at some lines."""
    rng = np.random.default_rng(0)
    rows = []
    for step in steps:
        for row in range(8):
            log_probs = rng.normal(-1, 0.1, 3).astype(np.float32)
            rows.append(
                {
                    "step": step,
                    "group_id": f"{row // 4}",
                    "reward": float(rng.integers(0, 5)),
                    "response_mask": [1, 1, 1],
                    "old_log_probs": log_probs,
                    "policy_log_probs": log_probs,
                    "optim_step_id": row % updates,
                }
            )
    pq.write_table(pa.Table.from_pylist(rows), folder / "run.parquet")
    logged = [{"step": step, "split": "train", "name": "critic/score/mean", "value": 9.0} for step in lines]
    pq.write_table(pa.Table.from_pylist(logged), folder / "run.metrics.parquet")
    return rd.check(rd.open(folder / "run.parquet"), trainer="verl", options=OPTIONS)


def score(report):
    return next(entry for entry in report.audit if entry.quantity == "critic/score/mean")


@pytest.mark.slow
def test_lines_between_the_rows_put_the_join_in_doubt(tmp_path):
    report = written(tmp_path, lines=range(8))
    assert score(report).not_compared == 4
    assert score(report).reason.endswith(OF_JOIN)
    assert not [found for found in report.findings if found.severity > Severity.INFO and found.verdict == "confirmed"]


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"lines": (0, 2, 4, 6)}, id="a line for each step"),
        pytest.param({"lines": range(8), "updates": 1}, id="one update for each step"),
        pytest.param({"lines": range(16), "steps": (0, 4, 8, 12)}, id="every fourth step recorded"),
    ],
)
def test_elsewhere_a_difference_counts(tmp_path, options):
    report = written(tmp_path, **options)
    assert score(report).compared == 4
    assert "RDM004" in {found.code for found in report.findings}
