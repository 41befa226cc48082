"""Drawn edge cases against the real verl and TRL functions in float64: what they fail on is refused, the rest agrees.

Rows of no token, of one, all masked; groups of one; rewards that are equal, tied, infinite or NaN; log-ratios beyond
every bound; one row in a micro-batch. ``FUZZ=20000 pytest tests/parity/test_fuzz.py`` draws more.
"""

import math
import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from parity import test_trl as trl_loss
from parity.padded import precision
from parity.test_verl_advantages import Config, algos, upstream
from parity.test_verl_policy import AGGREGATIONS, METRICS, VARIANTS, objective, upstream_policy
from proof.claims import compared

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import evaluate, evaluate_rows
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.results.errors import CannotComputeError
from rolloutdoctor.trainers.trl import grpo as trl
from rolloutdoctor.trainers.verl import trainer as verl

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), compared("package")]

__all__ = ["algos"]

SEED = 20261122
EXAMPLES = int(os.environ.get("FUZZ", "240"))
PARTS = 8
WIDE = (0.0, 0.1, 1.0, 12.0, 25.0)
"""How far log-probs differ: within the clip range, beyond it, beyond the clamps of the KL, beyond those of ratios.

Rewards that are not finite, and TRL's terms, which cancel, come with the first three alone."""
ESTIMATORS: dict[str, dict[str, object]] = {
    "gae": {"gamma": 0.97, "lam": 0.9},
    "reinforce_plus_plus": {"gamma": 0.95},
    "remax": {},
    "optimal_token_baseline": {},
    "tir_optimal_token_baseline": {},
    "gdpo": {"gdpo_reward_keys": "a,b"},
    "grpo": {},
    "grpo_vectorized": {},
    "grpo_passk": {},
    "rloo": {},
    "rloo_vectorized": {},
    "opo": {},
    "gpg": {},
    "reinforce_plus_plus_baseline": {},
}


ODD = (math.nan, math.inf, -math.inf)
TIMED = ("gae", "reinforce_plus_plus", "remax", "optimal_token_baseline", "tir_optimal_token_baseline")


def drawn(number: int, *, adjacent: bool = False, odd: tuple[float, ...] = ODD) -> RolloutBatch:
    """A batch of one to ten rows; `adjacent`: groups of one size, as TRL has them, and no row without a token."""
    draw = np.random.default_rng([SEED, number])
    rows = int(draw.integers(1, 5)) * 2 if adjacent else int(draw.integers(1, 11))
    lengths = draw.integers(1 if adjacent else 0, 6, rows)
    if lengths.max() < 2:
        # Of completions that are all one token long TRL takes values per token for values per row.
        lengths[0] = 2
    tokens = int(lengths.sum())
    index = np.arange(rows) // 2 if adjacent else draw.integers(0, max(1, rows // 2), rows)
    names, index = np.unique(index, return_inverse=True)
    mask = draw.random(tokens) < draw.choice([0.5, 0.9, 1.0])
    if draw.random() < 0.5:
        mask &= ~np.repeat(draw.random(rows) < draw.choice([0.3, 0.9]), lengths)
    kinds = [
        draw.normal(size=rows),
        draw.integers(0, 2, rows),
        np.ones(rows),
        np.zeros(rows),
        draw.choice([0.3, 0.7], rows),
    ]
    reward = np.asarray(kinds[draw.integers(len(kinds))], dtype=float)
    if odd and draw.random() < 0.2:
        reward[draw.integers(rows)] = draw.choice(odd)
    reward[lengths == 0] = 0.0
    widths = WIDE[:3] if adjacent or not np.isfinite(reward).all() else WIDE
    policy = -draw.random(tokens) * draw.choice([0.0, 3.0, 20.0])
    columns = {"policy_log_probs": policy, "values": draw.normal(size=tokens), "entropy": draw.random(tokens)}
    for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs"):
        columns[name] = policy + draw.choice(widths) * draw.normal(size=tokens)
    p = np.minimum(np.exp(columns["old_log_probs"]), 1.0)
    columns["sum_pi_squared"] = p**2 + draw.random(tokens) * (1 - p) ** 2
    if not adjacent and draw.random() < 0.4:
        columns["token_rewards"] = draw.normal(size=tokens) * (draw.random(tokens) < 0.5)
    per_token = {name: torch.tensor(values) for name, values in columns.items()} | {"response_mask": torch.tensor(mask)}
    cut = draw.integers(0, 3, rows) if draw.random() < 0.5 else np.zeros(rows, dtype=int)
    per_row = {"reward": reward, "reward_baseline": draw.normal(size=rows), "micro_batch_id": np.sort(cut)}
    return RolloutBatch(
        step=0,
        rows=torch.tensor([0, *lengths]).cumsum(0),
        groups=Groups.of(torch.tensor(index)),
        per_row={name: torch.tensor(values) for name, values in per_row.items()},
        per_token=per_token,
        rewards={"a": torch.tensor(reward), "b": torch.tensor(draw.normal(size=rows))},
        group_ids=[f"g{name}" for name in names],
        sample_ids=[f"r{row}" for row in range(rows)],
    )


def same(own: torch.Tensor | float, wanted: torch.Tensor | float, what: str) -> None:
    """Equal up to rounding of the sums; NaN and infinity at the same places."""
    own, wanted = (torch.as_tensor(x, dtype=torch.float64) for x in (own, wanted))
    scale = float(wanted[wanted.isfinite()].abs().max()) if bool(wanted.isfinite().any()) else 1.0
    torch.testing.assert_close(
        own, wanted, rtol=1e-9, atol=1e-9 * max(1.0, scale), equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def verl_advantages(algos, number: int) -> None:
    """Every estimator."""
    name = list(ESTIMATORS)[number % len(ESTIMATORS)]
    # Those with a time axis take what is not finite at a masked token times 0, in padded matrices; passk gives what is
    # not finite to the first of equal rows.
    batch = drawn(number, odd=() if name in TIMED or name == "grpo_passk" else ODD)
    options = ESTIMATORS[name]
    config = Config(norm_adv_by_std_in_grpo=True, gamma=1.0, lam=1.0) | options
    config = Config(config, gdpo_reward_keys=["a", "b"])
    if number % 3 == 0 and name in ("grpo", "grpo_passk"):
        options = {**options, "norm_adv_by_std_in_grpo": False}
        config["norm_adv_by_std_in_grpo"] = False
    mine = objective(**{"adv_estimator": name, **options})
    try:
        with precision(torch.float64):
            wanted_T = upstream(algos, name, batch, torch.float64, config)
    except Exception:
        with pytest.raises(CannotComputeError):
            evaluate_rows(batch, mine, torch.float64)
        return
    found = evaluate_rows(batch, mine, torch.float64)
    own_T = found.advantage_T
    if own_T is None:
        own_T = torch.repeat_interleave(found.advantage_N, batch.rows.diff())
    mask_T = batch.column("response_mask")
    same(own_T[mask_T], wanted_T[mask_T], name)


def verl_losses(algos, number: int) -> None:
    """Every policy loss under every aggregation; an infinite advantage is NaN where a token of its row is masked."""
    batch = drawn(number, odd=(math.nan,))
    mode = list(VARIANTS)[number % len(VARIANTS)]
    aggregation = AGGREGATIONS[number // len(VARIANTS) % len(AGGREGATIONS)]
    name = ("grpo", "remax", "opo")[number % 3]
    mine = objective(loss_mode=mode, loss_agg_mode=aggregation, **{**VARIANTS[mode], "adv_estimator": name})
    if not bool(batch.column("response_mask").any()):
        return  # the sums that the engine tells are 0 then
    try:
        found = evaluate(batch, mine, dtype=torch.float64, per_token=True)
    except CannotComputeError:
        if mode != "clip_cov":  # which draws at random
            raise
        return
    rows, mask_T = found.rows, batch.column("response_mask")
    advantage_T = rows.advantage_T
    if advantage_T is None:
        advantage_T = torch.repeat_interleave(rows.advantage_N, batch.rows.diff())
    loss, grad_T, logged = upstream_policy(algos, batch, mode, aggregation, advantage_T, torch.float64)
    same(found.per_token.grad_T[mask_T], grad_T[mask_T], f"{mode}, {aggregation}, gradient")
    same(found.policy_loss, loss, f"{mode}, {aggregation}, loss")
    own = verl.metrics(found)
    for metric in METRICS:
        if metric in logged:
            same(own[metric], logged[metric], metric)


def trl_losses(_: object, number: int) -> None:
    """Every loss type under both levels, with and without a KL term."""
    cls = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    batch = drawn(number, adjacent=True, odd=())
    options: dict[str, object] = {
        "loss_type": trl_loss.LOSS_TYPES[number % len(trl_loss.LOSS_TYPES)],
        "importance_sampling_level": ("token", "sequence")[number // 8 % 2],
        "beta": (0.0, 0.1)[number // 16 % 2],
        "scale_rewards": ("group", "batch", "none")[number % 3],
        "use_bias_correction_kl": number % 5 < 2,
    }
    mine = trl_loss.objective(max_completion_length=trl_loss.WIDTH, **options)
    found = evaluate(batch, mine, dtype=torch.float64, per_token=True)
    with precision(torch.float64):
        loss, grad_T, metrics = trl_loss.upstream(cls, batch, mine, options, torch.float64, False)
    mask_T = batch.column("response_mask")
    same(found.per_token.grad_T[mask_T], grad_T[mask_T], f"{options}, gradient")
    same(found.loss, loss, f"{options}, loss")
    own = trl.metrics(found)
    for name in trl_loss.METRICS:
        if name in own and name in metrics:
            same(own[name], metrics[name], name)


SUBJECTS: dict[str, Callable[[object, int], None]] = {
    "verl advantages": verl_advantages,
    "verl losses": verl_losses,
    "trl losses": trl_losses,
}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("subject", SUBJECTS)
def test_drawn(algos, subject, part):
    for number in range(part, EXAMPLES, PARTS):
        try:
            SUBJECTS[subject](algos, number)
        except Exception as error:
            raise AssertionError(f"{subject}, example {number} of seed {SEED}") from error
