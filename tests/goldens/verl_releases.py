"""Steps and options with which the real functions of older verl releases were called; `make_verl_releases.py` does.

What they gave is in ``data/verl_releases.npz``: equal results of several releases are stored once.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch
from goldens import golden_data as gold

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.releases import parse_version

FILE = gold.DATA / "verl_releases.npz"
RELEASES = ("0.3.0.post1", "0.4.0", "0.4.1", "0.5.0", "0.6.0", "0.6.1", "0.7.0", "0.7.1", "0.8.0")

RANKS, MINI, MICRO = 2, 2, 2
"""Ranks, mini-batches of a rank, and micro-batches of a mini-batch, of two rows each."""

CASES = ("ragged", "tools", "singles", "dense", "extreme", "equal", "tiny_spread", "off_policy", "empty")
"""`tools` masks tokens inside responses, `empty` all tokens of some rows."""

FEW_TOKENS = 12
"""Tokens of a micro-batch of varying size."""


@cache
def step_of(case: str) -> RolloutBatch:
    """Sixteen rows in groups of four, cut into micro-batches of two rows on two ranks and in two mini-batches."""
    sizes = (5, 4, 3, 2, 1, 1) if case == "singles" else (4, 4, 4, 4)
    spread = {"extreme": 6.0, "off_policy": 0.4}.get(case, 0.1)
    batch = random_batch(
        40 + CASES.index(case),
        sizes=sizes,
        spread=spread,
        empty=0.0,
        holes=0.3 if case == "tools" else 0.0,
        rejected=0.3 if case == "empty" else 0.0,
        longest=11,
        dtype=torch.float64,
    )
    # Columns are what float32 holds, so that both precisions start from the same numbers.
    tokens = {name: x_T.float().double() if x_T.is_floating_point() else x_T for name, x_T in batch.per_token.items()}
    mask_T = tokens["response_mask"].clone()
    if case != "empty":
        mask_T[batch.rows[:-1]] = True
    tokens["response_mask"] = mask_T
    tokens["response_mask_pre"] = torch.ones_like(mask_T) if case == "empty" else mask_T
    reward_N = batch.per_row["reward"].float().double()
    if case == "equal":
        reward_N = torch.full_like(reward_N, 0.3).float().double()
        reward_N[-5:] = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    if case == "tiny_spread":
        reward_N = (0.5 + 1e-7 * reward_N).float().double()
    if case == "dense":
        draw = torch.Generator().manual_seed(9)
        reward_T = torch.randn(batch.tokens, generator=draw, dtype=torch.float64).float().double() * mask_T
        tokens["token_rewards"] = reward_T
        reward_N = torch.stack(
            [reward_T[start:stop].sum() for start, stop in zip(batch.rows, batch.rows[1:], strict=False)]
        )
    row_N = torch.arange(len(batch))
    per_rank = len(batch) // RANKS
    rows = {
        "reward": reward_N,
        "reward_baseline": reward_N.flip(0) / 2,
        "rank": row_N // per_rank,
        "optim_step_id": row_N % per_rank // (per_rank // MINI),
        "micro_batch_id": row_N % per_rank // (per_rank // MINI // MICRO),
    }
    return replace(batch, per_row=rows, per_token=tokens)


def estimators(release: str) -> Iterator[tuple[str, dict]]:
    """Estimators that a release has, and that are computed for it."""
    at = parse_version(release)
    # 0.3 has a penalty in the reward wherever it has none in the loss.
    base, switch = ({"kl_ctrl.kl_coef": 0.0}, {}) if at < (0, 4) else ({}, {"use_kl_in_reward": True})
    yield "grpo", {"adv_estimator": "grpo", **base}
    yield "rloo", {"adv_estimator": "rloo", **base}
    yield "remax", {"adv_estimator": "remax", **base}
    yield "reinforce_plus_plus", {"adv_estimator": "reinforce_plus_plus", "gamma": 0.9, **base}
    yield "penalty", {"adv_estimator": "grpo", **switch, "kl_ctrl.kl_coef": 0.3, "kl_penalty": "low_var_kl"}
    if at >= (0, 4):
        yield "grpo_unscaled", {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False}
        yield "opo", {"adv_estimator": "opo"}
        yield "grpo_passk", {"adv_estimator": "grpo_passk"}
        yield "reinforce_plus_plus_baseline", {"adv_estimator": "reinforce_plus_plus_baseline"}
    if at >= (0, 5):
        yield "gpg", {"adv_estimator": "gpg"}
        yield "gae", {"adv_estimator": "gae", "gamma": 0.97, "lam": 0.9}
    if at >= (0, 6):
        yield "rloo_vectorized", {"adv_estimator": "rloo_vectorized"}
    if at >= (0, 8):
        yield "grpo_vectorized", {"adv_estimator": "grpo_vectorized"}


def losses(release: str) -> Iterator[tuple[str, dict]]:
    """Sets of options of the loss that the first actor of a release has; their advantages are grpo's."""
    at = parse_version(release)
    base = {"adv_estimator": "grpo"}
    if at >= (0, 8):
        return
    yield "plain", base | ({"kl_ctrl.kl_coef": 0.0} if at < (0, 4) else {})
    yield "kl", {**base, "use_kl_loss": True, "kl_loss_coef": 0.05}
    yield "dynamic", {**base, "use_dynamic_bsz": True, "use_kl_loss": True, "kl_loss_type": "mse"}
    if at >= (0, 4):
        for mode in ("seq-mean-token-sum", "seq-mean-token-mean"):
            yield mode, {**base, "loss_agg_mode": mode, "use_kl_loss": True, "kl_loss_type": "kl"}
            yield f"{mode} dynamic", {**base, "loss_agg_mode": mode, "use_dynamic_bsz": True}
        yield "asymmetric", {**base, "clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 1.5}
    if at >= (0, 5):
        yield "gpg", {**base, "policy_loss.loss_mode": "gpg"}
    if at >= (0, 6):
        yield "gspo", {**base, "policy_loss.loss_mode": "gspo", "clip_ratio_low": 0.05, "clip_ratio_high": 0.08}
    if at >= (0, 7):
        yield "cispo", {**base, "policy_loss.loss_mode": "cispo"}
        yield "sapo", {**base, "policy_loss.loss_mode": "sapo", "tau_pos": 1.3, "tau_neg": 1.7}
    if at >= (0, 7, 1):
        for mode in ("dppo_tv", "dppo_kl"):
            yield mode, {**base, "policy_loss.loss_mode": mode, "clip_ratio_low": 0.05, "clip_ratio_high": 0.08}


def entries() -> list[tuple[str, str, str, str, dict]]:
    """Kind (advantages or loss), release, case, name and options; the cases of a loss take turns."""
    found = []
    for release in RELEASES:
        at = parse_version(release)
        for name, options in estimators(release):
            for case in CASES:
                # Masks are those of the responses before 0.5; a group of one ends a run of grpo_passk.
                masked = case == "tools" and at < (0, 5) and name != "grpo"
                if case == "empty" or masked or (case == "singles" and name == "grpo_passk"):
                    continue
                found.append(("advantages", release, case, name, options))
        for number, (name, options) in enumerate(losses(release)):
            for place, case in enumerate(CASES):
                if case == "empty" and at < (0, 6, 1):
                    continue  # a mean of rows is NaN there
                if (place + number) % 3 == 0 or case == "empty" or name in ("plain", "dynamic"):
                    found.append(("loss", release, case, name, options))
    return found
