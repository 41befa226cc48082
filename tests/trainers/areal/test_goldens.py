"""AReaL's numbers, recomputed: its own actor at cbff54d645d2 on 8 cases under 77 configurations.

The results in float64 were made with its casts to float32 taken out; those in float32 with them.
"""

import pytest
import torch
from goldens.real_results import DTYPES, ROUNDED, evaluated, gradient_agrees, results, token_advantages
from proof.claims import agree, compared, covers

from rolloutdoctor.evaluation.radii.loss import loss_radius
from rolloutdoctor.evaluation.radii.metrics import metric_radius
from rolloutdoctor.trainers.areal.trainer import TRAINER

pytestmark = [compared("golden", ROUNDED)]

RESULTS = results("areal")
DEFAULTS = {
    "actor.reward_norm.mean_level": None,
    "actor.reward_norm.std_level": None,
    "actor.adv_norm.mean_level": None,
    "actor.adv_norm.std_level": None,
    "actor.overlong_reward_penalty": False,
    "actor.gae_timestep_unit": "token",
    "actor.use_decoupled_loss": False,
    "actor.recompute_logprob": False,
    "actor.prox_logp_method": "recompute",
    "actor.importance_sampling_level": "token",
    "actor.use_sapo_loss": False,
    "actor.use_cispo_loss": False,
    "actor.kl_estimator": "k1",
    "actor.rejection_sampling.level": None,
    "actor.rejection_sampling.action": "mask",
    "actor.rejection_sampling.agg": "mean",
    "actor.rejection_sampling.metric": "ratio",
}
NUMBERS = ("actor.reward_scaling", "actor.reward_bias")
ADVANTAGES_ALONE = ("loglinear", "m2", "m2, reject")


def params():
    for (case, config), result in RESULTS.items():
        options = DEFAULTS | result.options
        if config not in ADVANTAGES_ALONE:
            marks = [covers("areal", name, options[name]) for name in DEFAULTS]
            marks += [covers("areal", name, options[name]) for name in NUMBERS if name in options]
            yield pytest.param(case, config, marks=marks, id=f"{case}-{config}")


@pytest.mark.slow
@pytest.mark.parametrize(("case", "config"), [*params()])
@pytest.mark.parametrize("label", DTYPES)
def test_results(case, config, label):
    result = RESULTS[case, config]
    dtype, single = DTYPES[label], label == "f32"
    own = evaluated("areal", result, label)
    lost = 1e-8 * (case == "tiny_spread")
    size = advantages_agree(own, result, label, lost)
    found, wanted = TRAINER.metrics(own), dict(result.scalars[label])
    # Whitening leaves of an advantage of 0 a residue whose sign, the clip with it, goes by the order of a sum.
    advantage_T, mask_T = token_advantages(own)[0], own.batch.column("response_mask")
    upstream_T = torch.tensor(result.advantage[label], dtype=torch.float64)
    residue = float(((advantage_T != upstream_T) & (advantage_T.abs() < 1e-14))[mask_T].double().mean())
    # Terms and advantages of both signs cancel.
    sizes = {
        "ppo_actor/advantages/avg": size,
        "ppo_actor/update/actor_loss/avg": float(own.per_token.loss_T.abs().sum()),
    }
    loss, terms = wanted.pop("loss"), float(own.per_token.loss_T.abs().sum())
    agree(own.loss, loss, dtype, "loss", scale=terms, rounding=float(loss_radius(own)) if single else lost * terms)
    assert wanted.keys() - found.keys() == set()
    for name, value in wanted.items():
        rounding = float(metric_radius(own, TRAINER.log.kind_of(name), found[name])) if single else 0.0
        # Shares are divided in float32 upstream.
        rounding += 2**-22 * abs(value) * name.endswith("ratio/avg") + lost * sizes.get(name, size)
        rounding += residue * name.endswith("clip_ratio/avg")
        agree(found[name], value, dtype, name, scale=max(abs(value), sizes.get(name, 1e-3)), rounding=rounding)
    gradient_agrees(own, result, label, lost)


def advantages_agree(own, result, label, lost):
    """Compare the advantages of tokens; the largest one is returned."""
    advantage_T, radius = token_advantages(own)
    mask_T = own.batch.column("response_mask")
    wanted_T = torch.tensor(result.advantage[label], dtype=torch.float64)
    size = float(wanted_T[mask_T].abs().max())
    rounding = radius if label == "f32" else lost * size
    agree(advantage_T, wanted_T, DTYPES[label], "advantage", rounding=rounding, where=mask_T)
    return size


@covers("areal", "actor.reward_norm.mean_level", "group")
@pytest.mark.parametrize("config", ADVANTAGES_ALONE)
@pytest.mark.parametrize("label", DTYPES)
def test_a_loss_that_rows_do_not_give_leaves_the_advantages(config, label):
    own = evaluated("areal", RESULTS["ragged", config], label)
    advantages_agree(own, RESULTS["ragged", config], label, 0.0)
    with pytest.raises(ValueError, match=r"version of the token before|choice in each micro-batch"):
        assert own.loss
