"""A run file of slime with its mismatch helper, read and recomputed: statuses, trajectories, weights, what is kept."""

import json
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rolloutdoctor as rd
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.slime.mis import MIS

OPTIONS = {
    "advantage_estimator": "grpo",
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "use_tis": True,
    "custom_tis_function_path": MIS,
    "tis_mode": "mask",
    "tis_lower_bound": 0.8,
    "tis_upper_bound": 1.25,
    "tis_batch_normalize": False,
    "use_rs": False,
}
NAMES = ("old_log_probs", "policy_log_probs", "ref_log_probs", "rollout_log_probs")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    batch = random_batch(3, sizes=(4, 4, 4), adjacent=True, empty=0.0, rejected=0.0)
    lengths = batch.rows.diff().tolist()
    cells: dict[str, list] = {
        "step": [1] * 12,
        "group_id": [str(row // 4) for row in range(12)],
        "sample_id": [str(row) for row in range(12)],
        "reward": batch.column("reward").tolist(),
        "trajectory_id": [0, 0, *range(2, 11), None],
        "status": ["completed", "truncated", None] * 4,
        "response_mask": [list(map(int, row)) for row in batch.column("response_mask").split(lengths)],
    }
    cells |= {name: [row.tolist() for row in batch.column(name).split(lengths)] for name in NAMES}
    metadata = {"schema_version": 1, "trainer": "slime", "trainer_version": "0.3.1", "config": OPTIONS}
    table = pa.table(cells).replace_schema_metadata({"rolloutdoctor": json.dumps(metadata)})
    pq.write_table(table, tmp_path / "run.parquet")
    return tmp_path / "run.parquet"


def test_statuses_and_trajectories_are_read(path):
    run = rd.open(path)
    (batch,) = rd.batches(run, rd.objective_of(run))
    assert list(batch.statuses) == ["completed", "truncated", None] * 4
    assert batch.has("status")
    assert batch.per_row["trajectory_id"].tolist() == [0, 0, *range(2, 11), -1]
    weights_N = rd.evaluate(batch, rd.objective_of(run)).tokens.weight_N
    # Eleven trajectories; the first two rows share one.
    lengths_N = batch.column("response_mask").split(batch.rows.diff().tolist())
    count = [max(int(row.sum()), 1) for row in lengths_N]
    assert weights_N[:3].tolist() == pytest.approx([1 / 11 / (count[0] + count[1])] * 2 + [1 / 11 / count[2]])


def test_weights_and_the_mask_after_rejection(path, tmp_path):
    rd.recompute(rd.open(path), tmp_path / "tokens.parquet")
    given, made = pl.read_parquet(path), pl.read_parquet(tmp_path / "tokens.parquet")
    rejected = 0
    for row in range(12):
        old, sampler, mask = (given[name][row].to_list() for name in (NAMES[0], NAMES[3], "response_mask"))
        ratios = [2.718281828459045 ** (one - two) for one, two in zip(old, sampler, strict=True)]
        kept = [int(on and 0.8 <= ratio <= 1.25) for on, ratio in zip(mask, ratios, strict=True)]
        rejected += sum(mask) - sum(kept)
        assert made["response_mask_re"][row].to_list() == kept
        wanted = [ratio * on for ratio, on in zip(ratios, kept, strict=True)]
        assert made["is_weights_re"][row].to_list() == pytest.approx(wanted, rel=1e-6)
        # What is rejected has neither a policy nor a KL gradient.
        assert [value != 0 for value in made["grad_re"][row].to_list()] == [bool(on) for on in kept]
    assert rejected > 0
