"""Nothing changes in steps that are drawn alike, however many there are: every rule is silent about change.

A scan for the worst or the changing place of a run looks at as many places as the run has; chance is what its
threshold has to exceed.
"""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rolloutdoctor as rd
from rolloutdoctor.rules.series import FEWEST_OF_TAIL, chance_limit

OPTIONS = {"loss_type": "dapo", "beta": 0.04, "num_generations": 4}
METADATA = {"schema_version": 1, "trainer": "trl", "trainer_version": "1.16.0", "config": OPTIONS}
SIGMAS = {"rollout_log_probs": 0.01, "policy_log_probs": 0.05, "ref_log_probs": 0.2}
TAILS = {
    "normal": lambda draw, *size: draw.normal(0, 1, size),
    "heavy": lambda draw, *size: draw.standard_t(3, size) / 3**0.5,
}


def write_rows(path, steps, rows, tokens, tails, seed=0):
    """Rows whose log-probs of sampler, policy and reference differ by noise alone."""
    draw, count = np.random.default_rng(seed), steps * rows
    ends = pa.array(np.arange(0, tokens * count + 1, tokens, dtype=np.int32))
    old = -draw.exponential(0.5, tokens * count)
    columns = {"old_log_probs": old}
    columns |= {name: np.minimum(old + sigma * TAILS[tails](draw, len(old)), 0) for name, sigma in SIGMAS.items()}
    step = np.repeat(np.arange(steps), rows)
    table = {
        "step": step,
        "group_id": [f"{step}-{row // 4}" for step in range(steps) for row in range(rows)],
        "sample_id": [str(row) for row in range(count)],
        "reward": draw.integers(0, 2, count).astype(float),
        "response_mask": pa.ListArray.from_arrays(ends, pa.array(np.ones(tokens * count, np.uint8))),
    }
    table |= {name: pa.ListArray.from_arrays(ends, pa.array(x.astype(np.float32))) for name, x in columns.items()}
    pq.write_table(pa.table(table).replace_schema_metadata({"rolloutdoctor": json.dumps(METADATA)}), path)
    return path


def warnings_of(report):
    return [f"{one.code} {one.headline}" for one in report.findings if one.severity.name != "INFO"]


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(
    ("steps", "rows", "tokens", "tails"),
    [
        (1000, 4, 2, "heavy"),
        (1000, 4, 2, "normal"),
        (1000, 4, 50, "heavy"),
        (1000, 16, 4, "heavy"),
        (300, 64, 30, "heavy"),
        (40, 512, 100, "normal"),
        (20_000, 4, 2, "normal"),
    ],
)
def test_rows(tmp_path, steps, rows, tokens, tails):
    assert warnings_of(rd.check(write_rows(tmp_path / "run.parquet", steps, rows, tokens, tails))) == []


LOGGED = {
    "grad_norm": 1.0,
    "kl": 0.02,
    "loss": 0.01,
    "reward": 0.5,
    "reward_std": 0.3,
    "entropy": 0.6,
    "completions/mean_length": 300.0,
    "clip_ratio/region_mean": 0.02,
}


def write_log(path, steps, sigma, tails, seed=0):
    """Lines whose numbers vary by noise alone, log-normal or heavier."""
    draw = np.random.default_rng(seed)
    noise = {name: np.exp(sigma * TAILS[tails](draw, steps)) for name in LOGGED}
    lines = []
    for step in range(steps):
        values = {name: value * float(noise[name][step]) for name, value in LOGGED.items()}
        values |= {
            "reward": min(values["reward"], 1.0),
            "clip_ratio/region_mean": min(values["clip_ratio/region_mean"], 0.2),
        }
        lines.append(json.dumps({"step": step + 101, "learning_rate": 1e-6, **values}))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(
    ("steps", "sigma", "tails"),
    [
        (1000, 0.1, "normal"),
        (1000, 0.5, "normal"),
        (1000, 1.0, "normal"),
        (1000, 0.5, "heavy"),
        # A minute each.
        pytest.param(100_000, 0.5, "heavy", marks=pytest.mark.slow(every=True)),
    ],
)
def test_logs(tmp_path, steps, sigma, tails):
    assert warnings_of(rd.check(write_log(tmp_path / "log.jsonl", steps, sigma, tails))) == []


def test_what_chance_reaches():
    draw = np.random.default_rng(0)
    for size in (100, 1000, 10_000, 100_000):
        values = np.exp(draw.normal(0, 1, (20, size)))
        assert all(chance_limit(row, 10.0) > row.max() for row in values)
        # Beside values that hardly vary, one far above stands out.
        assert chance_limit(np.exp(0.1 * draw.normal(0, 1, size)), 10.0) < 3
    assert chance_limit(np.ones(FEWEST_OF_TAIL - 1), 10.0) == 0
    assert chance_limit(np.ones(FEWEST_OF_TAIL), 10.0) == 1
