"""verl's policy losses other than vanilla: loss, gradient and metrics, recomputed."""

from dataclasses import replace

import pytest
import torch
from goldens import golden_data as gold
from goldens.golden_data import DTYPES
from proof.claims import compared
from trainers.verl.test_goldens import POLICY_MODES, row_share

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import Evaluation, evaluate
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.trainers.verl import trainer as verl

pytestmark = [compared("golden")]

GAE = {"adv_estimator": "gae", "gamma": 0.99, "lam": 0.95}
TOKEN_WEIGHTS = {"algorithm.rollout_correction.rollout_is": "token"}
INSIDE = "policy_loss.rollout_correction"
REJECTED = {f"{INSIDE}.rollout_rs": "token_k1", f"{INSIDE}.rollout_rs_threshold": "0.8_1.25"}


def clip(low: float, high: float, **options: object) -> dict[str, object]:
    return {"clip_ratio_low": low, "clip_ratio_high": high, **options}


def bypass(loss_type: str, level: str) -> dict[str, object]:
    rejected = REJECTED if level == "sequence" else {}
    return {
        "rollout_correction.bypass_mode": True,
        f"{INSIDE}.loss_type": loss_type,
        f"{INSIDE}.rollout_is": level,
        **rejected,
    }


CONFIGS = {
    ("bypass_mode", "ppo_clip|seq_is_rs"): bypass("ppo_clip", "sequence"),
    ("bypass_mode", "ppo_clip|tok_is"): bypass("ppo_clip", "token"),
    ("bypass_mode", "reinforce|seq_is_rs"): bypass("reinforce", "sequence"),
    ("bypass_mode", "reinforce|tok_is"): bypass("reinforce", "token"),
    ("cispo", "default"): clip(1.0, 0.28),
    ("cispo", "tight_seq"): clip(0.02, 0.02, loss_agg_mode="seq-mean-token-mean"),
    ("clip_cov", "all"): {
        "policy_loss.clip_cov_ratio": 1.0,
        "policy_loss.clip_cov_lb": 0.05,
        "policy_loss.clip_cov_ub": 5.0,
    },
    ("dppo_kl", "default"): clip(0.002, 0.002, clip_ratio_c=20.0),
    ("dppo_tv", "default"): clip(0.02, 0.02, clip_ratio_c=20.0),
    ("dro", "beta0.1"): {"policy_loss.dro_beta": 0.1},
    ("geo_mean", "default"): clip(0.4, 0.4),
    ("geo_mean", "tight_adv_gae_is_token"): clip(0.01, 0.02) | GAE | TOKEN_WEIGHTS,
    ("gpg", "default"): {},
    ("gpg", "is_token"): {"loss_agg_mode": "seq-mean-token-sum", **TOKEN_WEIGHTS},
    ("gspo", "adv_gae_is_token"): clip(0.0003, 0.0004, loss_agg_mode="seq-mean-token-mean") | GAE | TOKEN_WEIGHTS,
    ("gspo", "seq-mean-token-mean"): clip(0.0003, 0.0004, loss_agg_mode="seq-mean-token-mean"),
    ("gspo", "wide_token-mean"): clip(0.2, 0.2),
    ("gspo", "wide_token-mean_v0.9.0"): clip(0.2, 0.2),
    ("kl_cov", "default"): {"policy_loss.kl_cov_ratio": 0.0002, "policy_loss.ppo_kl_coef": 1.0},
    ("kl_cov", "top5pct"): {"policy_loss.kl_cov_ratio": 0.05, "policy_loss.ppo_kl_coef": 0.1},
    ("sapo", "adv_gae_agg_ignored"): GAE,
    ("sapo", "default"): {"loss_agg_mode": "seq-mean-token-mean"},
}
METRICS = ("actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower")


def objective_of(mode: str, config: str) -> Objective:
    named = {"adv_estimator": "grpo", "loss_mode": mode, **clip(0.2, 0.28), **CONFIGS[mode, config]}
    return gold.objective("verl@0.9.0" if config.endswith("v0.9.0") else "verl", **named)


def local_share(batch: RolloutBatch, found: Evaluation, variant: str) -> float:
    """What upstream's function makes of the loss, as it was called without the sizes of the mini-batch."""
    rule = found.objective.policy_aggregation or found.objective.aggregation
    if variant == "fixed":
        # geo_mean was called on the accepted rows alone, with the advantages of all.
        return len(batch) / int((found.rows.length_N > 0).sum())
    if rule.mode == "token-mean":
        # Told the size, token-mean keeps the tokens that bypass mode rejects in its count.
        return float(found.rows.length_N.sum() / found.tokens.counted_N.sum())
    return row_share(batch, rule.mode)


def test_every_configuration_has_its_options():
    seen = {(param.values[1].removeprefix("verl.policy_loss."), param.values[2]) for param in POLICY_MODES}
    assert seen == set(CONFIGS)


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize(("case", "function", "config", "variant"), POLICY_MODES)
def test_policy_mode(case, function, config, variant):
    mode = function.removeprefix("verl.policy_loss.")
    objective = objective_of(mode, config)
    scalars = gold.expected(case, "scalars")[function, config, variant]
    tokens = gold.expected(case, "tokens").get((function, config, variant))
    # Of the variant that was called on the accepted rows alone neither gradient nor metrics were kept.
    assert (tokens is None) == (variant == "fixed")
    for step in gold.steps(case):
        batch = gold.batch(case, step)
        batch = replace(batch, per_row={**batch.per_row, "micro_batch_id": torch.zeros(len(batch), dtype=torch.int64)})
        mask_T = batch.column("response_mask")
        for precision, dtype in DTYPES.items():
            found = evaluate(batch, objective, dtype=dtype, per_token=True)
            share = local_share(batch, found, variant)
            # The residue of equal rewards is in upstream's float32 loss; its gradients are stored in float64.
            residue = precision == "f32" and case.startswith("g06") and "gae" not in config
            scale = float(found.per_token.loss_T.abs().double().sum()) * share
            wanted = gold.scalar(scalars, step, "loss", precision)
            if not residue:
                gold.assert_close(found.loss * share, wanted, precision, "loss", scale=max(scale, abs(wanted)))
            if tokens is not None:
                gold.assert_close(
                    found.per_token.grad_T.double() * share,
                    gold.per_token(tokens, step, "grad", precision, batch),
                    precision,
                    "gradient",
                    where=mask_T,
                )
            if variant == "fixed":
                continue
            own = {name: value for name, value in verl.metrics(found).items() if name in METRICS}
            logged = {name: gold.scalar(scalars, step, f"metric:{name}", precision) for name in METRICS}
            assert own.keys() == {name for name, value in logged.items() if value is not None}
            for name, value in own.items():
                if not (residue and "clipfrac" in name):
                    gold.assert_close(value, logged[name], precision, name, scale=1.0)
