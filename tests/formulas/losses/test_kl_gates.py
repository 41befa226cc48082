"""Multipliers of policy and KL term together, of rows by their geometric mean, and GSPO-token: against autograd."""

from dataclasses import replace

import pytest
import torch
from objectives import objective_of
from proof.claims import ONLY_DOUBLE, agree, compared, covers

from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.formulas.losses.gates import weights
from rolloutdoctor.formulas.losses.terms import TokenInputs
from rolloutdoctor.objective.corrections import TermWeight
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.testing import random_batch

WEIGHT = TermWeight(kind="importance", high=1.1, log_ratio_bound=0.3, on_kl=True)
GATES = {
    "token, cut": (WEIGHT,),
    "token, zero": (replace(WEIGHT, outside="zero"),),
    "row, cut": (replace(WEIGHT, level="geometric"),),
    "token by row": (replace(WEIGHT, high=None), replace(WEIGHT, level="geometric", outside="zero", indicator=True)),
    "off-policy": (TermWeight(kind="off_policy", against="old_log_probs", high=0.0, on_kl=True),),
    "policy alone": (replace(WEIGHT, on_kl=False),),
}


def slow_weight(gate, log_T, drift, advantage):
    """The multiplier of the tokens of one row."""
    if gate.kind == "off_policy":
        return torch.full_like(log_T, float(not (advantage < 0 and drift > gate.high)))
    log_T = log_T.clamp(-gate.log_ratio_bound, gate.log_ratio_bound)
    free_T = log_T.mean().exp().expand_as(log_T) if gate.level == "geometric" else log_T.exp()
    if gate.high is None:
        return free_T
    if gate.outside == "cut":
        return free_T.clamp(max=gate.high)
    return torch.where(free_T > gate.high, 0.0, torch.ones_like(free_T) if gate.indicator else free_T)


@pytest.mark.parametrize("level", ["token", "sequence-token"])
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("seed", range(2))
@covers("trl", "beta", 0.3)
@compared("autograd", ONLY_DOUBLE)
def test_against_autograd(level, name, seed):
    batch = random_batch(seed, sizes=(4, 4, 4), spread=0.5, dtype=torch.float64)
    mine = objective_of("trl", loss_type="grpo", beta=0.3)
    mine = replace(mine, gates=GATES[name], surrogate=replace(mine.surrogate, level=level))
    found = evaluate(batch, mine, dtype=torch.float64, per_token=True)
    leaf = batch.column("policy_log_probs").clone().requires_grad_()
    old, ref, sampler = (batch.column(f"{one}_log_probs") for one in ("old", "ref", "rollout"))
    mask, losses = batch.column("response_mask"), []
    for row, (start, stop) in enumerate(zip(batch.rows, batch.rows[1:], strict=False)):
        kept = torch.arange(start, stop)[mask[start:stop]]
        advantage, delta = found.rows.advantage_N[row], leaf[kept] - old[kept]
        if not len(kept):
            losses.append(0 * leaf.sum())
            continue
        ratio = delta.exp()
        if level != "token":
            ratio = (leaf[kept] - leaf[kept].detach() + delta.mean().detach()).exp()
        term = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        u = leaf[kept] - ref[kept]
        kl = 0.3 * ((-u).exp() - 1 + u) * (delta.exp() if mine.kl_loss.ratio_weighted else 1)
        own = [
            slow_weight(gate, (old - sampler)[kept], float(-delta.mean().detach()), advantage) for gate in mine.gates
        ]
        weight = torch.stack(own).prod(0)
        losses.append((weight * term + (weight if mine.gates[0].on_kl else 1) * kl).mean())
    loss = torch.stack(losses).mean()
    loss.backward()
    agree(found.loss, loss.item(), torch.float64, "loss", scale=found.per_token.loss_T.abs().sum())
    agree(found.per_token.loss_T.sum(), found.loss, torch.float64, "loss by token", scale=1.0)
    agree(found.per_token.grad_T, torch.where(mask, leaf.grad, 0.0), torch.float64, "gradient")


def test_a_row_without_tokens_keeps_a_weight_of_one():
    nothing = torch.zeros(0)
    given = TokenInputs(nothing, nothing, nothing, nothing, seg.Runs(torch.tensor([0, 0])))
    assert weights(nothing, given, replace(WEIGHT, level="geometric")).tolist() == [1.0]
