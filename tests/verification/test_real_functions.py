"""TRL's and verl's own functions by the fixture: each passes as itself, and not as its neighbour."""

import re
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from labelled.trl_training import edited
from parity.test_verl_policy import AGGREGATIONS, CLIP, CORRECTIONS, INSIDE, VARIANTS
from parity.test_verl_rejected import LEAKING
from verification.trainers import bypass_loss, grpo_loss, rloo_loss, verl_estimator, verl_loss, written

from rolloutdoctor.commands.verify.checks import RolloutCases
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers.verl import trainer as verl

pytestmark = [pytest.mark.parity, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CASES = RolloutCases()
ESTIMATORS = (*LEAKING, "gae", "reinforce_plus_plus", "remax", "optimal_token_baseline", "tir_optimal_token_baseline")
KL = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3_clamped"}


@pytest.fixture(scope="module")
def algos():
    return pytest.importorskip("verl.trainer.ppo.core_algos")


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_passes_as_itself_alone(algos, name):
    function, more, options = verl_estimator(algos, name)
    cases = CASES.without("groups of several sizes") if name == "grpo_passk" else CASES  # which fails on a group of one
    cases.check(function, written("verl@0.9.1", options), **more)
    other = "opo" if name in ("grpo", "grpo_vectorized") else "grpo"
    with pytest.raises(AssertionError):
        cases.only("ragged").check(function, f"verl@0.9.1:adv_estimator={other}", **more)


def test_every_estimator_is_compared(algos):
    assert set(ESTIMATORS) == set(algos.ADV_ESTIMATOR_REGISTRY)
    assert {*VARIANTS, "bypass_mode"} == set(algos.POLICY_LOSS_REGISTRY)


@pytest.mark.parametrize("name", KL)
def test_a_kl_penalty_passes_as_itself_alone(algos, name):
    def penalty(log_probs, ref_log_probs):
        return algos.kl_penalty(log_probs, ref_log_probs, name)

    options = "verl@0.9.1:adv_estimator=grpo,use_kl_loss=true,kl_loss_type="
    CASES.check_kl(penalty, options + name)
    other = "mse" if name == "kl" else "kl"
    with pytest.raises(AssertionError, match=f"it computes {KL[name]}"):
        CASES.check_kl(penalty, options + other)


@pytest.mark.parametrize("mode", ["vanilla", "gspo", "geo_mean"])
def test_a_policy_loss_passes_as_itself_alone(algos, mode):
    from verl.workers.config import ActorConfig, PolicyLossConfig

    sizes = {"global_batch_size": 8, "dp_size": 1}
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode="seq-mean-token-mean",
        policy_loss=PolicyLossConfig(loss_mode=mode),
    )
    config.global_batch_info.update(sizes)
    function = algos.get_policy_loss_fn(mode)
    more = {"config": config, "loss_agg_mode": "seq-mean-token-mean", "rollout_is_weights": None}
    options = f"verl@0.9.1:adv_estimator=grpo,loss_agg_mode=seq-mean-token-mean,loss_mode={mode}"
    CASES.check_loss(function, options, part="policy", **more)
    other = options.replace(mode, "sapo")
    with pytest.raises(AssertionError, match="by the options"):
        CASES.check_loss(function, other, part="policy", **more)


EQUAL = CASES.without("groups of several sizes")
"""TRL takes groups of one size alone."""
TRL = {"num_generations": 4, "max_completion_length": 40}
BETAS = ({}, {"beta": 0.04, "use_bias_correction_kl": False}, {"beta": 0.04, "use_bias_correction_kl": True})


@pytest.fixture(scope="module")
def trainers():
    modules = {name: pytest.importorskip(f"trl.trainer.{name.lower()}_trainer") for name in ("GRPO", "RLOO")}
    return {name: (module, getattr(module, f"{name}Trainer")) for name, module in modules.items()}


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"])
def test_every_loss_of_grpo_passes(trainers, kind, level, beta):
    high = {"epsilon_high": 5.0} if kind == "cispo" else {}
    options = {"loss_type": kind, "importance_sampling_level": level, **TRL, **high, **beta}
    EQUAL.check_loss(grpo_loss(trainers["GRPO"][1], options), written("trl@1.16.0", options))


@pytest.mark.parametrize("more", [{"beta": 0.0}, {"beta": 0.05}, {"beta": 0.0, "epsilon_high": 0.4}])
def test_the_loss_of_rloo_passes(trainers, more):
    options = {"num_generations": 4, **more}
    EQUAL.check_loss(rloo_loss(trainers["RLOO"][1], options), written("trl-rloo@1.16.0", options))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("mode", VARIANTS)
def test_every_policy_loss_of_verl_passes(algos, mode, aggregation):
    chosen = {"loss_mode": mode, "loss_agg_mode": aggregation, "loss_scale_factor": 37, **CLIP, **VARIANTS[mode]}
    as_ = written("verl@0.9.1", {"adv_estimator": "grpo", **chosen})
    CASES.check_loss(verl_loss(algos, mode, aggregation), as_, part="policy")


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("kind", ["ppo_clip", "reinforce"])
def test_every_loss_of_bypass_mode_passes(algos, kind, correction):
    inside = {"loss_type": kind, **CORRECTIONS[correction]}
    chosen = {"loss_mode": "bypass_mode", "rollout_correction.bypass_mode": True, **CLIP}
    options = {"adv_estimator": "grpo", **chosen, **{f"{INSIDE}.{name}": value for name, value in inside.items()}}
    CASES.check_loss(bypass_loss(algos, inside), written("verl@0.9.1", options), part="policy")


@pytest.mark.parametrize("name", sorted(name + plus for name in verl.KL_TYPES for plus in ("", "+")))
def test_every_kl_of_verl_passes(algos, name):
    options = f"verl@0.9.1:adv_estimator=grpo,use_kl_loss=true,kl_loss_type={name}"
    CASES.check_kl(lambda log_probs, ref_log_probs: algos.kl_penalty(log_probs, ref_log_probs, name), options)


STALE = {
    "use_bias_correction_kl": (
        {"beta": 0.04, "use_bias_correction_kl": True},
        ("per_token_kl = per_token_kl * coef_1", "pass"),
    ),
    "off_policy_mask_threshold": (
        {"off_policy_mask_threshold": 0.02},
        ("per_token_loss = per_token_loss * off_policy_mask", "pass"),
    ),
    "entropy_coef": ({"entropy_coef": 0.01}, ("loss = loss - apply_coef * entropy_loss", "pass")),
    "entropy_coef, detached": (
        {"entropy_coef": 0.01},
        ("loss = loss - apply_coef * entropy_loss", "loss = loss - apply_coef * entropy_loss.detach()"),
    ),
    "router_aux_loss_coef": (
        {"router_aux_loss_coef": 0.01},
        ("loss = loss + self.router_aux_loss_coef * aux_loss / normalizer", "pass"),
    ),
    "router_aux_loss_coef, detached": (
        {"router_aux_loss_coef": 0.01},
        ("self.router_aux_loss_coef * aux_loss / normalizer", "self.router_aux_loss_coef * aux_loss.detach()"),
    ),
    "images": ({}, ('mm_token_type_ids=inputs.get("mm_token_type_ids"),', "")),
    "delta": ({"delta": 1.1}, ("coef_1 = torch.clamp(coef_1, max=self.args.delta)", "pass")),
}
"""Options that a copy of the loss ignores, as that of `gspo_token` ignores all but the last."""


@pytest.mark.parametrize("name", STALE)
def test_a_copy_of_the_loss_that_ignores_an_option_is_found(trainers, name):
    more, edit = STALE[name]
    options = {"loss_type": "dapo", **TRL, **more}
    module, cls = trainers["GRPO"]
    loss = partial(grpo_loss, options=options, images=name == "images")
    EQUAL.check_loss(loss(cls), written("trl@1.16.0", options))
    with edited(module, cls, (("_compute_loss", *edit),), 0.0), pytest.raises(AssertionError, match="by the options"):
        EQUAL.check_loss(loss(cls), written("trl@1.16.0", options))


@pytest.mark.parametrize("name", [name for name in STALE if "detached" not in name and name != "delta"])
def test_gspo_token_ignores_them(name):
    """The copy itself, where the installed TRL has it: 1.16.0 has none."""
    cls = pytest.importorskip("trl.experimental.gspo_token").GRPOTrainer
    options, release = {"loss_type": "dapo", **TRL, **STALE[name][0]}, f"trl@{version('trl')}"
    plain = {"loss_type": "dapo", **TRL, "use_bias_correction_kl": False}
    EQUAL.check_loss(grpo_loss(cls, plain), written(release, plain))
    with pytest.raises(AssertionError, match="by the options"):
        EQUAL.check_loss(grpo_loss(cls, options, images=name == "images"), written(release, options))


def test_an_entropy_coefficient_that_adapts_is_left_to_a_recorded_run(trainers):
    options = {"loss_type": "dapo", **TRL, "use_adaptive_entropy": True, "entropy_coef": 0.01}
    with pytest.raises(UsageError, match="adapts from step to step; a recorded run shows"):
        EQUAL.check_loss(grpo_loss(trainers["GRPO"][1], options), written("trl@1.16.0", options))


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_zero_variance_groups_push_through_the_kl_in_the_loss_of_trl(trainers, beta):
    options = {"loss_type": "dapo", **TRL, "beta": beta}
    loss = grpo_loss(trainers["GRPO"][1], options)
    if not beta:
        EQUAL.check_loss_laws(loss, "equal rewards")
        return
    with pytest.raises(AssertionError, match=r"case 'zero variance' response \d has advantage 0 and a gradient"):
        EQUAL.only("zero variance").check_loss_laws(loss, "equal rewards")


@pytest.mark.parametrize("name", ESTIMATORS)
def test_rejected_rows_shift_the_baseline_in_the_estimators_of_verl(algos, name):
    """All with a baseline of the group but `opo`, which weighs responses by their trained tokens."""
    function, more, _ = verl_estimator(algos, name)
    cases = CASES.only("fully masked")
    if name not in LEAKING or name == "opo":
        cases.check_laws(function, "masked response", **more)
        return
    with pytest.raises(AssertionError, match=r"changes the advantage of no other one: .* 'fully masked'"):
        cases.check_laws(function, "masked response", **more)


class Batch(dict):
    """Tensors by name."""

    batch_size = None


def test_advantages_of_other_trajectories_are_found(algos):
    """verl's `use_pf_ppo` resamples the batch, and the V1 trainer gives the result to the rows in their old order."""

    def resampled(token_level_rewards, values, response_mask):
        advantages, _ = algos.compute_gae_advantage_return(token_level_rewards, values, response_mask, 1.0, 0.95)
        batch = Batch(token_level_scores=token_level_rewards, advantages=advantages)
        torch.manual_seed(0)
        data = SimpleNamespace(batch=batch, non_tensor_batch={}, meta_info={})
        return algos.compute_pf_ppo_reweight_data(data, "pow", 2.0).batch["advantages"]

    with pytest.raises(AssertionError, match=r"values of .* differ"):
        CASES.check(resampled, "verl@0.9.1:adv_estimator=gae,gamma=1.0,lam=0.95")


def test_whitening_by_slices_is_found():
    """slime 0.3.1 whitens each context-parallel slice of the sequences by its own mean and deviation."""

    def whitened(case, slices):
        centered = case.rewards[:, None].expand(case.response_mask.shape) * case.response_mask
        found, length = torch.zeros_like(centered), centered.shape[1]
        for part in torch.arange(length).chunk(slices):
            own, mask = centered[:, part], case.response_mask[:, part]
            count = mask.sum()
            mean = own.sum() / count
            spread = ((own.square().sum() / count - mean**2) * count / (count - 1) + 1e-8).rsqrt()
            found[:, part] = (own - mean) * spread
        return found

    options = "slime@0.3.1:advantage_estimator=reinforce_plus_plus,normalize_advantages=true,kl_coef=0"
    CASES.only("ragged", "tied").check(lambda case: whitened(case, 1), options)
    with pytest.raises(AssertionError, match=r"values of .* differ"):
        CASES.only("ragged", "tied").check(lambda case: whitened(case, 2), options)


def test_the_recipe_of_the_page_runs(trainers):
    page = Path(__file__).parents[2] / "docs" / "verify.md"
    (recipe,) = (code for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) if "trl_loss" in code)
    scope = {}
    exec(recipe, scope)
    scope["test_dapo"](CASES)
