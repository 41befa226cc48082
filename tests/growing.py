"""Runs that grow: steps for a recorder, with a fault from one step on, and whole runs cut into files."""

import json

import numpy as np

from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.write.writer import MetricsWriter, RunWriter, metrics_path

CONFIG = {
    **{"beta": 0.04, "num_generations": 4, "logging_steps": 1, "steps_per_generation": 1},
    # A fault of the advantages is confirmed where what decides them is stated.
    **{"scale_rewards": "group", "multi_objective_aggregation": "sum_then_normalize"},
}
METADATA = RunMetadata("trl", "1.16.0", CONFIG)
ROWS, TOKENS = 8, 6


def columns(step, *, seed=0, fault_from=None):
    """Rows of a step; from some step on the logged advantages are 1.5 times what the options give."""
    draw = np.random.default_rng([seed, step])
    reward = draw.integers(0, 2, ROWS).astype(float)
    groups = reward.reshape(-1, 4)
    scale = groups.std(1, ddof=1, keepdims=True) + 1e-4
    advantage = ((groups - groups.mean(1, keepdims=True)) / scale).ravel().astype(np.float32).astype(float)
    policy = -draw.random((ROWS, TOKENS)).astype(np.float32)
    return {
        "group_id": [str(row // 4) for row in range(ROWS)],
        "sample_id": [f"{step}-{row}" for row in range(ROWS)],
        "reward": reward,
        "advantage": advantage * (1.5 if fault_from is not None and step >= fault_from else 1.0),
        "response_mask": np.ones((ROWS, TOKENS), np.uint8),
        "policy_log_probs": policy,
        "ref_log_probs": policy + 0.1 * draw.standard_normal((ROWS, TOKENS)).astype(np.float32),
    }


def logged(step):
    return {"reward": float(columns(step)["reward"].mean()), "learning_rate": 1e-6}


def record(recorder, step, **options):
    own = columns(step, **options)
    recorder.record_step(step, lengths=[TOKENS] * ROWS, metrics=logged(step), **own)


def write(path, steps, *, metrics=True, **options):
    """Write a run file with its metrics table; each takes its name at once."""
    with RunWriter(path, METADATA) as run:
        for step in steps:
            own = columns(step, **options)
            run.write({"step": [step] * ROWS} | {name: list(cells) for name, cells in own.items()})
    if metrics:
        with MetricsWriter(metrics_path(path)) as table:
            for step in steps:
                table.write(step, "train", logged(step))


def lines(step):
    """A step as verl writes it."""
    own = columns(step)
    return [
        json.dumps(
            {
                "input": f"prompt {own['group_id'][row]}",
                "output": f"answer {step} {row}",
                "score": own["reward"][row],
                "step": step,
                "uid": f"{own['group_id'][row]}_{row}_0",
            }
        )
        + "\n"
        for row in range(ROWS)
    ]
