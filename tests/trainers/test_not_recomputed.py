"""What is listed as not recomputed is not recomputed, and the book says so."""

import json
from dataclasses import replace
from fnmatch import fnmatch

import pytest
import torch
from typer.testing import CliRunner

from rolloutdoctor.cli.app import app
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.options import Layer, resolve
from rolloutdoctor.trainers.releases import parse_version
from rolloutdoctor.trainers.slime.mis import MIS
from rolloutdoctor.trainers.table import TRAINERS

ESTIMATOR = {"algo.advantage.estimator": "gae"}
OPTIONS = {
    "trl": {"beta": 0.1, "use_vllm": True},
    "trl-rloo": {},
    "skyrl": {"tis_ratio_type": "token"},
    "open-instruct": {"num_epochs": 2},
    "areal": {"kl_ctl": 0.0, "use_decoupled_loss": True, "actor.rejection_sampling.level": "token"},
    "miles": {
        "advantage_estimator": "grpo",
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "use_opsm": True,
        "use_tis": True,
        "use_rollout_entropy": True,
    },
    "ms-swift": {"rollout_importance_sampling_mode": "token_mask"},
    "openrlhf": {
        **ESTIMATOR,
        "algo.kl.use_loss": True,
        "actor.entropy_coef": 0.0,
        "algo.advantage.is_correction_level": "token",
    },
    "slime": {
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "use_opsm": True,
        "use_tis": True,
        "custom_tis_function_path": MIS,
        "use_rollout_entropy": True,
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_no_metric_is_on_both_sides(name):
    spec = TRAINERS[name]
    mine = spec.objective(
        resolve(spec.options, parse_version(spec.newest), [Layer("test", OPTIONS[name])], trainer=name)
    )
    batch = random_batch(0, sizes=(4, 4))
    columns = {**batch.per_token, "entropy": -batch.column("policy_log_probs")}
    rows = {**batch.per_row, "micro_batch_id": torch.tensor([0, 1] * 4)}
    batch = replace(batch, per_token=columns, per_row=rows, statuses=["stop", "length"] * 4)
    batch = replace(batch, rewards={"f": batch.column("reward")})
    own = spec.metrics(evaluate(batch, mine))
    assert len(own) > (8 if name in ("skyrl", "openrlhf") else 15)
    patterns = [pattern for names in spec.log.not_recomputed for pattern in names.split(", ")]
    assert patterns
    assert not [metric for metric in own for pattern in patterns if fnmatch(metric, pattern)]


def test_the_book_lists_them():
    text = CliRunner().invoke(app, ["explain", "slime", "-v"]).stdout
    assert "logged metrics that are not recomputed:" in text
    body = json.loads(CliRunner().invoke(app, ["explain", "slime", "--format", "json"]).stdout)
    assert body["not_recomputed"] == dict(TRAINERS["slime"].log.not_recomputed)
