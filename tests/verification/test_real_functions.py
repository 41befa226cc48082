"""verl's own functions by the fixture: each passes as itself, and not as its neighbour."""

import pytest

from rolloutdoctor.commands.verify.checks import RolloutCases

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
}
KL = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3_clamped"}


@pytest.fixture(scope="module")
def algos():
    return pytest.importorskip("verl.trainer.ppo.core_algos")


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_estimator_passes_as_itself_alone(algos, name):
    function = algos.get_adv_estimator_fn(name)
    more = {"config": {}, **ADVANTAGES[name]}
    options = "".join(f",{key}={value}" for key, value in ADVANTAGES[name].items())
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
