"""AReaL's numbers, recomputed: its own actor at cbff54d645d2 on 8 cases under 77 configurations, and that of 1.0.4.

The results in float64 were made with its casts to float32 taken out; those in float32 with them.
"""

from dataclasses import replace

import pytest
import torch
from goldens.real_results import DTYPES, ROUNDED, batch_of, evaluated, gradient_agrees, results, token_advantages
from objectives import objective_of
from proof.claims import agree, compared, covers

from rolloutdoctor.evaluation.evaluate import evaluate_rows
from rolloutdoctor.evaluation.radii.loss import loss_radius
from rolloutdoctor.evaluation.radii.metrics import metric_radius
from rolloutdoctor.results.errors import CannotComputeError, UsageError
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
CLIPS = ("ppo_actor/update/clip_ratio", "ppo_actor/update/dual_clip_ratio")
NUMBERS = ("actor.reward_scaling", "actor.reward_bias")
ADVANTAGES_ALONE = ("loglinear",)


def params(stored):
    for (case, config), result in stored.items():
        options = DEFAULTS | result.options
        if config not in ADVANTAGES_ALONE:
            marks = [covers("areal", name, options[name]) for name in DEFAULTS]
            marks += [covers("areal", name, options[name]) for name in NUMBERS if name in options]
            yield pytest.param(case, config, marks=marks, id=f"{case}-{config}")


@pytest.mark.slow
@pytest.mark.parametrize(("case", "config"), [*params(RESULTS)])
@pytest.mark.parametrize("label", DTYPES)
def test_results(case, config, label):
    results_agree("areal", RESULTS[case, config], label)


OF_FIRST = results("areal", "1.0.4")
UNEQUAL = "singletons"
"""Case whose groups differ in size, which 1.0.4 cuts by position."""


def is_by_group(options):
    return any(
        options.get(f"actor.{part}_norm.{of}_level") == "group" for part in ("reward", "adv") for of in ("mean", "std")
    )


REFUSED = {
    key: result
    for key, result in OF_FIRST.items()
    if result.error or (key[0] == UNEQUAL and is_by_group(result.options))
}
COMPUTED = {key: result for key, result in OF_FIRST.items() if key not in REFUSED}


@pytest.mark.slow
@pytest.mark.parametrize(("case", "config"), [*params(COMPUTED)])
@pytest.mark.parametrize("label", DTYPES)
def test_results_of_the_first_release(case, config, label):
    results_agree("areal@1.0.4", COMPUTED[case, config], label)


@pytest.mark.parametrize(("case", "config"), list(REFUSED))
def test_what_is_not_computed_of_the_first_release(case, config):
    """It has no log-probs of the policy as proximal ones, and cuts groups that differ in size by position."""
    result = REFUSED[case, config]
    match = r"came with 2\.0\.0" if result.error else "groups of one size by position"
    with pytest.raises(UsageError if result.error else CannotComputeError, match=match):
        evaluated("areal@1.0.4", result, "f64")


def test_groups_of_the_first_release_are_those_that_it_cuts():
    """The batch has groups of 4; options of another size give no numbers, and 2.0.0 goes by the groups."""
    options = {"actor.reward_norm.mean_level": "group", "actor.kl_ctl": 0.0}
    batch = batch_of("areal", "ragged", torch.float64)
    for size, is_own in ((4, True), (8, False), (2, False)):
        given = {**options, "actor.reward_norm.group_size": size}
        objective = objective_of("areal@1.0.4", **given)
        assert evaluate_rows(batch, objective_of("areal@2.0.0", **given)) is not None
        if is_own:
            assert evaluate_rows(batch, objective).advantage_N.isfinite().all()
            continue
        with pytest.raises(CannotComputeError, match="groups of one size"):
            evaluate_rows(batch, objective)
    with pytest.raises(UsageError, match="group_size = 1 is not computed"):
        objective_of("areal@1.0.4", **options, **{"actor.reward_norm.group_size": 1})
    with pytest.raises(UsageError, match=r"use_cispo_loss.*came with 2\.0\.0"):
        objective_of("areal@1.0.4", **{"actor.use_cispo_loss": True, "actor.eps_clip_higher": 0.2})


def results_agree(trainer, result, label):
    """Compare everything that was stored of a case with what is recomputed."""
    case = result.case
    dtype, single = DTYPES[label], label == "f32"
    own = evaluated(trainer, result, label)
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
    unknown = wanted.keys() - found.keys()
    # With masks the first releases count what these drop as 0; such metrics are not recomputed.
    weighed = {name for name in wanted if name.startswith(("ppo_actor/update/importance_weight", *CLIPS))}
    if "actor.m2_threshold" in result.options:
        # Those of the update are of the tokens that are left.
        weighed = {name for name in wanted if name.startswith("ppo_actor/update/")}
    elif trainer == "areal" or not own.objective.gates:
        weighed = set()
    assert unknown <= weighed
    wanted = {name: value for name, value in wanted.items() if name in found}
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


@pytest.mark.parametrize("case", ["ragged", "extreme", "two_steps"])
def test_tokens_are_dropped_by_their_second_moment(case):
    """What was stored is not what the loss would be with all tokens."""
    result = RESULTS[case, "m2"]
    kept = evaluated("areal", result, "f64").per_token.grad_T != 0
    options = {name: value for name, value in result.options.items() if name != "actor.m2_threshold"}
    whole = evaluated("areal", replace(result, options=options), "f64").per_token.grad_T != 0
    assert 0 < int(kept.sum()) < int(whole.sum())


@pytest.mark.parametrize(
    "more",
    [
        {"actor.importance_sampling_level": "sequence"},
        {"actor.rejection_sampling.level": "sequence"},
        {"actor.use_decoupled_loss": False},
    ],
)
def test_second_moments_of_rows_leave_the_loss_unknown(more):
    options = {"actor.kl_ctl": 0.0, "actor.use_decoupled_loss": True, "actor.m2_threshold": 0.01} | more
    assert "m2_threshold = 0.01" in objective_of("areal", **options).unknown_loss


@covers("areal", "actor.reward_norm.mean_level", "group")
@pytest.mark.parametrize("config", ADVANTAGES_ALONE)
@pytest.mark.parametrize("label", DTYPES)
def test_a_loss_that_rows_do_not_give_leaves_the_advantages(config, label):
    own = evaluated("areal", RESULTS["ragged", config], label)
    advantages_agree(own, RESULTS["ragged", config], label, 0.0)
    with pytest.raises(ValueError, match="version of the token before"):
        assert own.loss
