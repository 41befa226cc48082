"""Run files with written numbers, for the tests of commands that evaluate."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

TRL = {
    "schema_version": 1,
    "trainer": "trl",
    "trainer_version": "1.16.0",
    "config": {"loss_type": "dapo", "beta": 0.5, "scale_rewards": "none", "use_bias_correction_kl": False},
}
VERL = {
    "schema_version": 1,
    "trainer": "verl",
    "trainer_version": "0.9.1",
    "config": {"algorithm.adv_estimator": "rloo", "trainer.use_v1": False},
}


def small(**columns):
    """Four rows in two groups: rewards 1 and 0, and twice 1; the last token of the second row is masked."""
    return {
        "step": [0, 0, 0, 0],
        "group_id": ["a", "a", "b", "b"],
        "sample_id": ["1", "2", "3", "4"],
        "reward": [1.0, 0.0, 1.0, 1.0],
        "response_mask": [[1, 1], [1, 0], [1], []],
        "policy_log_probs": [[-1.0, -1.0], [-1.0, float("nan")], [-1.0], []],
        "ref_log_probs": [[-1.5, -1.5], [-1.5, float("nan")], [-1.5], []],
    } | columns


def random_columns(seed, *, steps=3, groups=6, size=4, longest=12):
    """Columns of a run with rejected rows, zero-std groups and every log-prob column."""
    draw = np.random.default_rng(seed)
    count = steps * groups * size
    lengths = draw.integers(1, longest, count)
    reward = draw.integers(0, 3, count).astype(float)
    reward[: size * 2] = 1.0
    rejected = draw.random(count) < 0.2

    def tokens(width=1.0, around=None):
        if around is None:
            return [-np.abs(draw.normal(0, 1, n)).astype("float32") for n in lengths]
        return [(row + draw.normal(0, width, len(row))).astype("float32") for row in around]

    policy = tokens()
    return {
        "step": np.repeat(np.arange(steps), groups * size).tolist(),
        "group_id": [f"g{row // size}" for row in range(count)],
        "sample_id": [f"r{row}" for row in range(count)],
        "reward": reward.tolist(),
        "response_mask": [np.full(n, 0 if dead else 1, "uint8") for n, dead in zip(lengths, rejected, strict=True)],
        "policy_log_probs": policy,
        "old_log_probs": tokens(0.2, policy),
        "ref_log_probs": tokens(0.3, policy),
    }


def full_columns(seed=3, *, steps=7):
    """The same with versions, entropies, tokens, statuses and logged advantages, which nobody computed."""
    columns, draw = random_columns(seed, steps=steps), np.random.default_rng(0)
    lengths = [len(mask) for mask in columns["response_mask"]]
    version = draw.integers(0, 3, len(lengths))
    return columns | {
        "rollout_log_probs": [row + 0.05 for row in columns["policy_log_probs"]],
        "entropy": [np.abs(row) for row in columns["policy_log_probs"]],
        "response_ids": [draw.integers(2, 9, length) for length in lengths],
        "status": draw.choice(["stop", "length"], len(lengths)).tolist(),
        "policy_version_min": version.tolist(),
        "policy_version_max": (version + 1).tolist(),
        "advantage": draw.normal(size=len(lengths)).tolist(),
    }


def write(path, columns, metadata=TRL, *, rows=None, row_group_size=None, logged=None):
    """Write columns, or some of their rows, as a run file."""
    if rows is not None:
        columns = {name: [cells[row] for row in rows] for name, cells in columns.items()}
    table = pa.table(columns)
    if metadata is not None:
        table = table.replace_schema_metadata({"rolloutdoctor": json.dumps(metadata)})
    pq.write_table(table, path, row_group_size=row_group_size)
    if logged is not None:
        lines = [{"step": step, "split": "train", "name": name, "value": value} for step, name, value in logged]
        path.with_name(f"{path.stem}.metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
