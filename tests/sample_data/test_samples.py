"""The sample files: what `check` finds in them, and that what the real functions made and logged is reproduced."""

from functools import cache, cached_property
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.configure import configure
from rolloutdoctor.engine.devices import DTYPES, find_dtype
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.evaluation.evaluate import evaluate, reward_kl_tokens, stored_kl
from rolloutdoctor.evaluation.radii.metrics import metric_radius
from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.table import find
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.trainers.slime.trainer import rollout_mean

FOLDER = Path(__file__).parents[2] / "sample_data"
NAMES = ("verl_rejected", "run", "slime_ppo", "healthy")
FOUND = {
    "run": {
        ("RDA011", "info", "confirmed"),
        ("RDA012", "info", "exposed"),
        ("RDG001", "info", "confirmed"),
        ("RDG002", "info", "confirmed"),
        ("RDG003", "info", "confirmed"),
        ("RDI009", "info", "confirmed"),
        ("RDM002", "info", "confirmed"),
        ("RDT016", "info", "confirmed"),
    },
    "verl_rejected": {
        ("RDA001", "warning", "confirmed"),
        ("RDA002", "warning", "confirmed"),
        ("RDA011", "info", "confirmed"),
        ("RDG001", "info", "exposed"),
        ("RDG002", "info", "confirmed"),
        ("RDI009", "info", "confirmed"),
        ("RDO001", "info", "confirmed"),
        ("RDO007", "info", "confirmed"),
        ("RDT016", "info", "confirmed"),
    },
    "slime_ppo": {
        ("RDM001", "error", "confirmed"),
        ("RDA011", "info", "confirmed"),
        ("RDG002", "info", "confirmed"),
        ("RDT016", "info", "confirmed"),
    },
    "healthy": {
        ("RDA008", "info", "confirmed"),
        ("RDA011", "info", "confirmed"),
        ("RDA013", "info", "exposed"),
        ("RDG001", "info", "confirmed"),
        ("RDG002", "info", "confirmed"),
        ("RDI009", "info", "confirmed"),
        ("RDT016", "info", "confirmed"),
    },
}
# Three samples have no log-probs of the sampler, and the steps of the fourth are short, as are its prompts.
OF_THE_SAMPLER = {"RDI005", "RDI010", *(f"RDO{number:03}" for number in (1, 2, 3, 4, 5, 8, 9, 10, 11, 17))}
# No sample has reference answers, versions of weights, packs, prompts that recur, responses long enough to repeat,
# trajectories or turns.
OF_OTHER_RUNS = {
    *("RDA014", "RDA016", "RDA018", "RDA025", "RDA027", "RDG015", "RDI017", "RDI019", "RDI021", "RDO013", "RDO014"),
    *("RDT011", "RDT020", "RDT021"),
}
UNTESTED = {
    # They need rewards by function (one of them the outcome), advantages of tokens, or a mark of rows without a reward.
    "run": {"RDA006", "RDA021", "RDA023", "RDA008", "RDI011", *OF_THE_SAMPLER, *OF_OTHER_RUNS},
    "verl_rejected": {
        "RDA008",
        "RDA021",
        "RDA023",
        "RDO006",
        "RDA009",
        "RDO002",
        "RDO008",
        "RDO010",
        "RDO011",
        *OF_OTHER_RUNS,
    },
    # It says of no row how it ended.
    "slime_ppo": {
        *("RDA005", "RDA013", "RDA023", "RDA015", "RDA017", "RDI007", "RDI009", "RDI011", "RDI016", "RDI020", "RDO016"),
        *OF_THE_SAMPLER,
        *OF_OTHER_RUNS,
    },
    # Its entropies show a temperature.
    "healthy": {"RDA006", "RDA021", "RDA023", *OF_THE_SAMPLER, *OF_OTHER_RUNS},
}
MOST_BYTES = 6 * 2**20

every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_sample = pytest.mark.parametrize("name", NAMES)


class Sample:
    """A sample, its configuration and its steps evaluated."""

    def __init__(self, name: str, dtype: str) -> None:
        self.run = open_run([FOLDER / f"{name}.parquet"])
        self.configured = configure(self.run.metadata, None, [])
        self.objective = self.configured.objective
        self.dtype = find_dtype(dtype)

    @cached_property
    def evaluations(self):
        return [
            evaluate(batch, self.objective, dtype=self.dtype, per_token=True)
            for batch in self.run.batches(self.run.columns, dtype=self.dtype)
        ]

    def logged(self, batch):
        return self.run.metrics.at(batch.key)


@cache
def sample_of(name: str, dtype: str) -> Sample:
    return Sample(name, dtype)


# --- findings --------------------------------------------------------------------------------------------------------


@cache
def report_of(name, dtype="float32"):
    return check(open_run([FOLDER / f"{name}.parquet"]), CheckOptions(device="cpu", dtype=dtype))


@pytest.mark.slow
@every_dtype
@every_sample
def test_check_finds_what_the_sample_was_made_for(name, dtype):
    report = report_of(name, dtype)
    assert {(found.code, found.severity.label, found.verdict) for found in report.findings} == FOUND[name]
    assert {one.code for one in report.skipped if find(one.code).needs_rows} == UNTESTED[name]
    assert not report.notes


def test_healthy_has_nothing_to_warn_of():
    assert all(found.severity < Severity.WARNING for found in report_of("healthy").findings)


@pytest.mark.slow
def test_verl_sample_is_worth_looking_at():
    report = report_of("verl_rejected")
    value = {found.code: {k: m.value for k, m in found.measures.items()} for found in report.findings}
    assert 0.03 < value["RDA001"]["rejected_rows"] / report.input.rows < 0.1
    assert value["RDA001"]["affected_groups"] >= 40
    assert value["RDA001"]["sign_flips"] >= 5
    assert value["RDA002"]["groups"] >= 3


def test_together_they_are_small():
    files = [path for path in FOLDER.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
    page = (FOLDER / "README.md").read_text()
    assert [path.name for path in files if path.name not in page and path.name != "README.md"] == []


# --- advantages ------------------------------------------------------------------------------------------------------


WIDEST = 0.025
"""No radius is larger than this share of its value, or of 0.002: it would not tell one formula from another."""


@pytest.mark.slow
@every_dtype
@every_sample
def test_recomputed_advantages_are_the_logged_ones(name, dtype):
    sample, worst, largest = sample_of(name, dtype), 0.0, 0.0
    for found in sample.evaluations:
        batch = found.batch
        if "advantage" in batch.per_row:
            own, logged = found.rows.advantage_N, batch.column("advantage")
        elif found.rows.advantage_N is None:
            own, logged = found.rows.advantage_T, batch.column("advantages")
        else:
            own, logged = found.per_token.advantage_T, batch.column("advantages")
        worst = max(worst, float((own - logged).abs().max()))
        largest = max(largest, float(logged.abs().max()))
    assert worst <= 1e-6 * largest


# --- logged metrics --------------------------------------------------------------------------------------------------


AT_LEAST = {
    "run": {"loss", "kl", "reward", "reward_std", "frac_reward_zero_std"},
    "healthy": {"loss", "kl", "reward", "reward_std", "frac_reward_zero_std", "clip_ratio/region_mean"},
    "verl_rejected": {"actor/pg_loss", "actor/kl_loss", "actor/ppo_kl", "critic/advantages/mean", "critic/score/mean"},
    "slime_ppo": {"rollout/kl", "rollout/raw_reward", "train/loss", "train/pg_loss"},
}


@pytest.mark.slow
@every_dtype
@every_sample
def test_logged_metrics_are_reproduced(name, dtype):
    sample, compared = sample_of(name, dtype), set()
    for found in sample.evaluations:
        logged, own = sample.logged(found.batch), sample.configured.trainer.metrics(found)
        for metric in sorted(own.keys() & logged.keys()):
            compared.add(metric)
            radius = float(metric_radius(found, sample.configured.trainer.log.kind_of(metric), own[metric]))
            assert abs(own[metric] - logged[metric]) <= radius, (found.batch.key, metric)
            # A token at a clip bound is clipped or not by rounding alone, and its weight is a third in a row of three.
            if not sample.configured.trainer.log.kind_of(metric).startswith("clip_"):
                assert radius <= WIDEST * max(abs(own[metric]), 2e-3), (found.batch.key, metric)
    assert compared >= AT_LEAST[name]


@every_dtype
def test_corrupted_kl_is_inverted(dtype):
    """`rollout/kl` = mean reward / mean length - kl_coef * KL by rank, so the KL comes back out of it."""
    sample = sample_of("slime_ppo", dtype)
    coef = sample.objective.kl_reward.coef
    copied = choose("kl-inplace").apply(sample.objective)
    series = []
    for batch in (found.batch for found in sample.evaluations):
        true_T = reward_kl_tokens(batch, sample.objective, sample.dtype)
        assert torch.equal(true_T, stored_kl(batch, copied, sample.dtype))
        buffer_T = stored_kl(batch, sample.objective, sample.dtype)
        stored_T = batch.column("kl")
        assert float((buffer_T - stored_T).abs().max()) <= 1e-6 * float(stored_T.abs().max())
        reward_T = torch.zeros(batch.tokens, dtype=torch.float64)
        reward_T[batch.rows[1:] - 1] = batch.column("reward")
        logged = sample.logged(batch)["rollout/kl"]
        assert rollout_mean(batch, stored_T) == pytest.approx(logged, rel=1e-6)
        inverted = (rollout_mean(batch, reward_T) - logged) / coef
        series.append((inverted, rollout_mean(batch, true_T)))
        # What was logged is float32, and the inversion divides its rounding by the coefficient.
        rounding = 2**-23 * abs(logged) / coef
        assert inverted == pytest.approx(series[-1][1], rel=1e-5, abs=rounding)
    inverted, true = (sum(column) / len(series) for column in zip(*series, strict=True))
    assert inverted == pytest.approx(true, rel=1e-6)


def test_slime_formulas_row_by_row():
    """The stored columns against the definitions, in plain float64."""
    frame = pl.read_parquet(FOLDER / "slime_ppo.parquet")
    for row in frame.head(40).iter_rows(named=True):
        old, ref, values = (np.array(row[name]) for name in ("old_log_probs", "ref_log_probs", "values"))
        rewards = -0.05 * (np.exp(ref - old) - 1 - (ref - old))
        rewards[-1] += row["reward"]
        np.testing.assert_allclose(row["kl"], rewards, atol=1e-7)
        following, expected = np.append(values[1:], 0.0), []
        for t in range(len(values)):
            deltas = rewards[t:] + following[t:] - values[t:]
            expected.append(np.sum(deltas * 0.95 ** np.arange(len(deltas))))
        np.testing.assert_allclose(row["advantages"], expected, atol=1e-6)
        np.testing.assert_allclose(row["returns"], expected + values, atol=1e-6)
