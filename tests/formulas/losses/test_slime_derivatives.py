"""slime's losses, every KL and both aggregations: the closed-form derivative against autograd of the same."""

import pytest
import torch
from formulas.losses.test_levels import objective, row_means
from proof.claims import ONLY_DOUBLE, agree, compared, covers, values_of

from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.slime import trainer as slime

CORRECTIONS = {
    "none": {},
    "cut": {"use_tis": True, "tis_clip": 1.5, "tis_clip_low": 0.6},
    "icepop": {"use_tis": True, "tis_clip": 1.5, "tis_clip_low": 0.6, "custom_tis_function_path": slime.ICEPOP},
    "opsm": {"use_opsm": True, "opsm_delta": 0.05},
}


def marked(name):
    marks = [covers("slime", option, True) for option in CORRECTIONS[name] if option.startswith("use_")]
    return pytest.param(name, marks=marks)


def kl_terms(kind, u):
    k3 = (-u).exp() - 1 + u
    return {"k1": u, "k2": u**2 / 2, "k3": k3, "low_var_kl": k3}[kind]


@pytest.mark.slow
@pytest.mark.parametrize("correction", [marked(name) for name in CORRECTIONS])
@pytest.mark.parametrize("per_token", values_of("slime", "calculate_per_token_loss", [False, True]))
@pytest.mark.parametrize("unbiased", values_of("slime", "use_unbiased_kl", [False, True]))
@pytest.mark.parametrize("kind", values_of("slime", "kl_loss_type", slime.KL_TYPES))
@pytest.mark.parametrize("estimator", values_of("slime", "advantage_estimator", ["grpo", "gspo", "cispo"]))
@compared("autograd", ONLY_DOUBLE)
def test_derivative(estimator, kind, unbiased, per_token, correction):
    batch = random_batch(4, sizes=(4, 4, 4), spread=0.8, dtype=torch.float64)
    options = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": kind, "use_unbiased_kl": unbiased}
    options |= {"calculate_per_token_loss": per_token, "eps_clip": 0.2, "eps_clip_high": 0.3, **CORRECTIONS[correction]}
    mine = objective("slime", advantage_estimator=estimator, **options)
    found = evaluate(batch, mine, dtype=torch.float64, per_token=True)
    leaf = batch.column("policy_log_probs").clone().requires_grad_()
    old, ref, sampler = (batch.column(f"{name}_log_probs") for name in ("old", "ref", "rollout"))
    mask, lengths = batch.column("response_mask"), batch.rows.diff().tolist()
    advantage = torch.repeat_interleave(found.rows.advantage_N, batch.rows.diff())
    of_row = torch.repeat_interleave(row_means(old - leaf, mask, lengths), batch.rows.diff())
    ratio = (-of_row).exp() if estimator == "gspo" else (leaf - old).exp()
    cut = ratio.clamp(0.8, 1.3)
    term = -cut.detach() * advantage * leaf if estimator == "cispo" else torch.max(-advantage * ratio, -advantage * cut)
    if correction == "opsm":
        term = term * ~((advantage < 0) & (of_row > 0.05))
    if "use_tis" in CORRECTIONS[correction]:
        weight = (old - sampler).exp()
        inside = (weight >= 0.6) & (weight <= 1.5)
        term = term * (weight.clamp(0.6, 1.5) if correction == "cut" else torch.where(inside, weight, 0.0))
    kl = kl_terms(kind, leaf - ref) * ((leaf - old).exp() if unbiased else 1.0)
    term = term + 0.1 * (kl.clamp(-10, 10) if kind == "low_var_kl" else kl)
    if per_token:
        counts = [max(1, int(row.sum())) for row in mask.split(lengths)]
        loss = torch.where(mask, term, 0.0).sum() / sum(counts)
    else:
        loss = row_means(term, mask, lengths).mean()
    loss.backward()
    agree(found.loss, loss.item(), torch.float64, "loss", scale=found.per_token.loss_T.abs().sum())
    agree(found.per_token.grad_T, torch.where(mask, leaf.grad, 0.0), torch.float64, "gradient")
