"""TRL's and verl's own functions by the fixture: each passes as itself, and not as its neighbour."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from labelled.trl_training import edited
from parity.test_verl_policy import AGGREGATIONS, CLIP, VARIANTS
from verification.trainers import grpo_loss, rloo_loss, verl_loss, written

from rolloutdoctor.commands.verify.checks import RolloutCases
from rolloutdoctor.trainers.verl import trainer as verl

pytestmark = [pytest.mark.parity, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CASES = RolloutCases()
ADVANTAGES = {
    "grpo": {},
    "rloo": {},
    "rloo_vectorized": {},
    "grpo_vectorized": {},
    "opo": {},
    "reinforce_plus_plus_baseline": {},
    "gpg": {},
    "gae": {"gamma": 1.0, "lam": 0.95},
    "reinforce_plus_plus": {"gamma": 0.95},
}
"""Those that need no column beside rewards, values and groups."""
KL = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3_clamped"}


@pytest.fixture(scope="module")
def algos():
    return pytest.importorskip("verl.trainer.ppo.core_algos")


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_estimator_passes_as_itself_alone(algos, name):
    function = algos.get_adv_estimator_fn(name)
    more = {"config": {}, **ADVANTAGES[name]}
    options = "".join(f",{key}={value}" for key, value in ADVANTAGES[name].items())
    if name == "reinforce_plus_plus":
        more = {"config": SimpleNamespace(**ADVANTAGES[name])}
    CASES.check(function, f"verl@0.9.1:adv_estimator={name}{options}", **more)
    other = "opo" if name.startswith("grpo") else "grpo"
    with pytest.raises(AssertionError):
        CASES.check(function, f"verl@0.9.1:adv_estimator={other}", **more)


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


@pytest.mark.parametrize("name", sorted(verl.KL_TYPES))
def test_every_kl_of_verl_passes(algos, name):
    options = f"verl@0.9.1:adv_estimator=grpo,use_kl_loss=true,kl_loss_type={name}"
    CASES.check_kl(lambda log_probs, ref_log_probs: algos.kl_penalty(log_probs, ref_log_probs, name), options)


STALE = {
    "use_bias_correction_kl": (
        {"beta": 0.04, "use_bias_correction_kl": True},
        ("_compute_loss", "per_token_kl = per_token_kl * coef_1", "pass"),
    ),
    "off_policy_mask_threshold": (
        {"off_policy_mask_threshold": 0.02},
        ("_compute_loss", "per_token_loss = per_token_loss * off_policy_mask", "pass"),
    ),
    "delta": (
        {"delta": 1.1},
        ("_compute_loss", "coef_1 = torch.clamp(coef_1, max=self.args.delta)", "pass"),
    ),
}
"""Options that a copy of the loss ignores, as that of `gspo_token` does the first two."""


@pytest.mark.parametrize("name", STALE)
def test_a_copy_of_the_loss_that_ignores_an_option_is_found(trainers, name):
    more, edit = STALE[name]
    options = {"loss_type": "dapo", **TRL, **more}
    module, cls = trainers["GRPO"]
    EQUAL.check_loss(grpo_loss(cls, options), written("trl@1.16.0", options))
    with edited(module, cls, (edit,), 0.0), pytest.raises(AssertionError, match="by the options"):
        EQUAL.check_loss(grpo_loss(cls, options), written("trl@1.16.0", options))


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
