"""Estimators against loops, on ragged batches with empty rows, holes and groups that are not adjacent."""

import oracles
import pytest
import torch
from proof.claims import ONLY_DOUBLE, agree, compared, covers, values_of

from rolloutdoctor.evaluation.evaluate import evaluate_rows
from rolloutdoctor.formulas.advantages.scores import Scores
from rolloutdoctor.formulas.advantages.table import ESTIMATORS
from rolloutdoctor.objective.objective import AdvantageRule
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers import table
from rolloutdoctor.trainers.options import Layer, parse_version, resolve
from rolloutdoctor.trainers.verl import advantages as verl_advantages

VERL = verl_advantages.ESTIMATORS


def marked(name, scale):
    """An estimator, and the options that stand for it."""
    marks = [covers("verl", "adv_estimator", *(own for own, ours in VERL.items() if ours == name))]
    if name == "grpo":
        marks += [covers("trl", "scale_rewards", scale), covers("slime", "advantage_estimator", "grpo")]
    if name == "normalize_then_sum":
        marks.append(covers("trl", "multi_objective_aggregation", name))
    if name == "raw":
        marks.append(covers("slime", "rewards_normalization", False))
    return pytest.param(name, scale, marks=marks, id=f"{name}-{scale}")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("lone", ["raw", "zero"])
@pytest.mark.parametrize("live", [False, True], ids=["all vote", "live vote"])
@pytest.mark.parametrize(
    ("name", "scale"),
    [*[marked(name, scale) for name in ESTIMATORS for scale in ("group", "none")], marked("grpo", "batch")],
)
@compared("loop", ONLY_DOUBLE)
def test_estimators(name, live, scale, lone, seed):
    sizes = (6, 5, 4, 3, 2) if name == "grpo_passk" else (6, 5, 4, 3, 2, 1, 1)
    batch = random_batch(seed, sizes=sizes, rejected=0.3, binary=seed == 4)
    lengths = torch.tensor(
        [int(batch.column("response_mask")[a:b].sum()) for a, b in zip(batch.rows[:-1], batch.rows[1:], strict=True)]
    )
    in_baseline_N = lengths > 0 if live else torch.ones(len(batch), dtype=torch.bool)
    score_N = batch.column("reward")
    rule = AdvantageRule(estimator=name, scale=scale, singleton=lone)
    found = ESTIMATORS[name](
        Scores(torch.where(in_baseline_N, score_N, 0.0), in_baseline_N, lengths, batch.groups), rule
    )
    wanted = oracles.advantages(
        name,
        score_N.tolist(),
        batch.groups.index_N.tolist(),
        in_baseline_N.tolist(),
        lengths.tolist(),
        scale=scale,
        singleton=lone,
    )
    wanted = torch.tensor(wanted, dtype=torch.float64)
    agree(found.value_N, wanted, torch.float64, "advantages")
    if name in ("rloo", "opo") or (name == "grpo" and scale == "none"):
        difference_N = torch.where(in_baseline_N, score_N - found.baseline_N, 0.0)
        torch.testing.assert_close(difference_N, found.value_N, rtol=1e-11, atol=1e-11, equal_nan=True)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("kl_type", values_of("slime", "kl_loss_type", ["k1", "k2", "k3", "low_var_kl"]))
@covers("slime", "advantage_estimator", "ppo")
@compared("loop", ONLY_DOUBLE)
def test_gae(kl_type, gamma, lambd, seed):
    batch = random_batch(seed, empty=0.0, dtype=torch.float64)
    options = {"advantage_estimator": "ppo", "kl_coef": 0.1, "kl_loss_type": kl_type, "gamma": gamma, "lambd": lambd}
    spec = table.TRAINERS["slime"]
    mine = spec.objective(resolve(spec.options, parse_version(spec.newest), [Layer("test", options)], trainer="slime"))
    found = evaluate_rows(batch, mine, torch.float64).advantage_T.tolist()
    name = "k3" if kl_type == "low_var_kl" else kl_type
    for row, (start, stop) in enumerate(zip(batch.rows[:-1].tolist(), batch.rows[1:].tolist(), strict=True)):
        columns = [batch.column(each)[start:stop].tolist() for each in ("old_log_probs", "ref_log_probs", "values")]
        rewards = [-0.1 * oracles.kl(name, old, ref) for old, ref in zip(*columns[:2], strict=True)]
        rewards[-1] += float(batch.column("reward")[row])
        agree(found[start:stop], oracles.gae(rewards, columns[2], gamma, lambd), torch.float64, "advantages")
