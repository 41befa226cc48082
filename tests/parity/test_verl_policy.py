"""Every policy loss of the real verl, under every aggregation and KL, against the packed code.

The real functions are called as verl's engine calls them: micro-batch by micro-batch, with the sizes of the
mini-batch; micro-batches are added, ranks and mini-batches averaged.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from objectives import objective_of
from parity.padded import pack, pad, precision
from proof.claims import agree, compared, covers, values_of

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import evaluate_all
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.verl import policy as verl_policy
from rolloutdoctor.trainers.verl import trainer as verl

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), compared("package")]

DTYPES = {"float32": torch.float32, "float64": torch.float64}
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
KL_NAMES = {"wide": [name + plus for name in sorted(verl.KL_TYPES) for plus in ("", "+")], "cut": ["k3", "k1+"]}
METRICS = ("actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower")
COEF, FACTOR = 0.07, 37
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}
VARIANTS = {
    "vanilla": {},
    "dppo_tv": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08},
    "dppo_kl": {"clip_ratio_low": 0.01, "clip_ratio_high": 0.02, "clip_ratio_c": 1.2},
    "gspo": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08},
    "sapo": {"tau_pos": 1.3, "tau_neg": 1.7},
    "gpg": {},
    "clip_cov": {"policy_loss.clip_cov_ratio": 1.0, "policy_loss.clip_cov_lb": 0.1, "policy_loss.clip_cov_ub": 2.0},
    "kl_cov": {"policy_loss.kl_cov_ratio": 0.2, "policy_loss.ppo_kl_coef": 0.4},
    "geo_mean": {"clip_ratio_low": 0.15, "clip_ratio_high": 0.25},
    "dro": {"policy_loss.dro_beta": 0.6},
    "cispo": {},
}


@pytest.fixture(scope="module")
def algos():
    return pytest.importorskip("verl.trainer.ppo.core_algos")


def objective(*, version: str = "", **options: object) -> Objective:
    named = {"adv_estimator": "grpo", "loss_scale_factor": FACTOR, **CLIP, **options}
    return objective_of(f"verl@{version}", **named)


@cache
def batch_of(layout: str, dtype: torch.dtype) -> RolloutBatch:
    """Wide ratios in one micro-batch, or narrow ones in mini-batches, micro-batches and ranks."""
    if layout == "wide":
        batch = random_batch(1, sizes=(6, 5, 4), spread=3.0, longest=12, dtype=dtype)
        cut = {"micro_batch_id": [0] * 15}
    else:
        batch = random_batch(2, sizes=(6, 6), spread=0.2, longest=9, dtype=dtype)
        cut = {
            "micro_batch_id": [0, 0, 1, 1, 1, 2] * 2,
            "rank": [0, 1] * 6,
            "optim_step_id": [0] * 6 + [1] * 6,
        }
    return replace(batch, per_row={**batch.per_row, **{name: torch.tensor(ids) for name, ids in cut.items()}})


def actor_config(mode: str, aggregation: str):
    from verl.workers.config import ActorConfig, PolicyLossConfig

    options = {**CLIP, **VARIANTS[mode]}
    nested = {name.removeprefix("policy_loss."): value for name, value in options.items() if "." in name}
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=aggregation,
        policy_loss=PolicyLossConfig(loss_mode=mode, **nested),
        **{name: value for name, value in options.items() if "." not in name},
    )


def parts_of(batch: RolloutBatch):
    """Rows of every micro-batch with the sizes that the engine tells it, and its share of the logged step."""
    zero = torch.zeros(len(batch), dtype=torch.int64)
    optim, rank, micro = (batch.per_row.get(name, zero) for name in ("optim_step_id", "rank", "micro_batch_id"))
    mask = pad(batch, batch.column("response_mask"))
    optims, ranks = optim.unique().tolist(), rank.unique().tolist()
    for step in optims:
        sizes = {
            "dp_size": len(ranks),
            "batch_num_tokens": int(mask[optim == step].sum()),
            "global_batch_size": int((optim == step).sum()),
            "loss_scale_factor": FACTOR,
        }
        for each in ranks:
            for part in micro[(optim == step) & (rank == each)].unique().tolist():
                rows = (optim == step) & (rank == each) & (micro == part)
                yield rows, sizes, 1 / len(ranks) / len(optims)


def upstream_policy(algos, batch: RolloutBatch, mode: str, aggregation: str, advantage_T, dtype):
    """Policy loss, gradient and metrics of the step."""
    config = actor_config(mode, aggregation)
    leaf = pad(batch, batch.column("policy_log_probs"), dtype).requires_grad_()
    old, adv, mask = (
        pad(batch, column, kind)
        for column, kind in (
            (batch.column("old_log_probs"), dtype),
            (advantage_T, dtype),
            (batch.column("response_mask"), None),
        )
    )
    total, logged = torch.zeros((), dtype=dtype), []
    with precision(dtype):
        for rows, sizes, share in parts_of(batch):
            config.global_batch_info.update(sizes)
            loss, metrics = algos.get_policy_loss_fn(mode)(
                old[rows], leaf[rows], adv[rows], mask[rows], loss_agg_mode=aggregation, config=config
            )
            total = total + share * loss
            logged.append(metrics)
        total.backward()
    means = {name: sum(each[name] for each in logged) / len(logged) for name in logged[0]}
    return total.item(), pack(batch, leaf.grad), means


@cache
def upstream_kl(layout: str, aggregation: str, name: str, dtype):
    """KL loss and its gradient."""
    from verl.trainer.ppo import core_algos

    batch = batch_of(layout, dtype)
    leaf = pad(batch, batch.column("policy_log_probs"), dtype).requires_grad_()
    ref, mask = pad(batch, batch.column("ref_log_probs"), dtype), pad(batch, batch.column("response_mask"))
    total = torch.zeros((), dtype=dtype)
    with precision(dtype):
        for rows, sizes, share in parts_of(batch):
            mat = core_algos.kl_penalty(leaf[rows], ref[rows], name)
            total = total + share * core_algos.agg_loss(mat, mask[rows], aggregation, **sizes)
        total.backward()
    return total.item(), pack(batch, leaf.grad)


def test_every_mode_is_compared():
    assert set(VARIANTS) == set(verl_policy.LOSS_MODES)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=covers("verl", "kl_loss_type", *names)) for layout, names in KL_NAMES.items()],
)
@pytest.mark.parametrize("aggregation", values_of("verl", "loss_agg_mode", AGGREGATIONS))
@pytest.mark.parametrize("mode", values_of("verl", "loss_mode", VARIANTS))
def test_loss_gradient_metrics(algos, mode, aggregation, layout, dtype):
    batch = batch_of(layout, dtype)
    options = {"loss_mode": mode, "loss_agg_mode": aggregation, **VARIANTS[mode]}
    objectives = {"": objective(**options)}
    for name in KL_NAMES[layout]:
        objectives[name] = objective(**options, use_kl_loss=True, kl_loss_coef=COEF, kl_loss_type=name)
    evaluations = evaluate_all(batch, objectives, dtype=dtype, per_token=True)
    advantage_T = torch.repeat_interleave(evaluations[""].rows.advantage_N, batch.rows.diff())
    policy, policy_grad_T, logged = upstream_policy(algos, batch, mode, aggregation, advantage_T, dtype)
    mask_T = batch.column("response_mask")
    for name, found in evaluations.items():
        kl_loss, kl_grad_T = upstream_kl(layout, aggregation, name, dtype) if name else (0.0, 0.0)
        scale = float(found.per_token.loss_T.double().abs().sum())
        agree(found.policy_loss, policy, dtype, "policy loss", scale=scale)
        agree(found.kl_loss, COEF * kl_loss, dtype, "KL loss", scale=scale)
        wanted_T = policy_grad_T + COEF * kl_grad_T
        agree(found.per_token.grad_T, wanted_T, dtype, "gradient", where=mask_T)
        agree(found.per_token.loss_T.double().sum(), found.loss, dtype, "sum of terms", scale=scale)
        own = verl.metrics(found)
        assert {each for each in own if each in METRICS} == set(logged)
        for metric, value in logged.items():
            agree(own[metric], value, dtype, metric, scale=1.0)
        assert own["actor/pg_loss"] == found.policy_loss


INSIDE = "policy_loss.rollout_correction"
CORRECTIONS = {
    "nothing": {"rollout_is": None},
    "token weights": {"rollout_is": "token", "rollout_is_threshold": 1.3},
    "row weights, rows rejected": {
        "rollout_is": "sequence",
        "rollout_is_threshold": "0.2_4.0",
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.9_1.1",
    },
    "tokens rejected": {
        "rollout_is": "sequence",
        "rollout_rs": "token_k1,token_k3",
        "rollout_rs_threshold": "0.8_1.2,0.03",
    },
}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss_type", values_of("verl", f"{INSIDE}.loss_type", ["ppo_clip", "reinforce"]))
@covers("verl", "loss_mode", "bypass_mode")
def test_bypass_mode(algos, loss_type, aggregation, correction, dtype):
    """What is rejected inside the loss keeps its KL term, and its tokens stay in the count of token-mean."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.workers.config import ActorConfig, PolicyLossConfig

    batch = random_batch(7, sizes=(6, 5, 4), spread=0.2, longest=9, dtype=dtype)
    inside = {"loss_type": loss_type, **CORRECTIONS[correction]}
    mine = objective(
        loss_mode="bypass_mode",
        loss_agg_mode=aggregation,
        use_kl_loss=True,
        kl_loss_coef=COEF,
        **{"rollout_correction.bypass_mode": True},
        **{f"{INSIDE}.{name}": value for name, value in inside.items()},
    )
    found = evaluate_all(batch, {"": mine}, dtype=dtype, per_token=True)[""]
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(rollout_correction=RolloutCorrectionConfig(bypass_mode=True, **inside)),
        **CLIP,
    )
    ((_, sizes, _),) = parts_of(batch)
    config.global_batch_info.update(sizes)
    leaf = pad(batch, batch.column("policy_log_probs"), dtype).requires_grad_()
    rollout, ref = (pad(batch, batch.column(name), dtype) for name in ("rollout_log_probs", "ref_log_probs"))
    advantage_T = torch.repeat_interleave(found.rows.advantage_N, batch.rows.diff())
    mask = pad(batch, batch.column("response_mask"))
    with precision(dtype):
        policy, logged = algos.compute_policy_loss_bypass_mode(
            rollout, leaf, pad(batch, advantage_T, dtype), mask, loss_agg_mode=aggregation, config=config
        )
        kl = algos.agg_loss(algos.kl_penalty(leaf, ref, "low_var_kl"), mask, aggregation, **sizes)
        (policy + COEF * kl).backward()
    scale = float(found.per_token.loss_T.double().abs().sum())
    agree(found.policy_loss, policy.item(), dtype, "policy loss", scale=scale)
    agree(found.kl_loss, COEF * kl.item(), dtype, "KL loss", scale=scale)
    mask_T = batch.column("response_mask")
    agree(found.per_token.grad_T, pack(batch, leaf.grad), dtype, "gradient", where=mask_T)
    own = verl.metrics(found)
    assert {each for each in own if each in METRICS} == {each for each in logged if each in METRICS}
    for metric in set(METRICS) & set(logged):
        agree(own[metric], logged[metric], dtype, metric, scale=1.0)
    kept = float(found.tokens.counted_N.sum() / mask_T.sum())
    assert (0.2 < kept < 0.95) if "rejected" in correction else kept == 1
