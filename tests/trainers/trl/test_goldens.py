"""TRL's numbers, recomputed. All were made in float32.

The proposed masking of zero-std groups (variant `pr5640`) is compared with its own base (`pr5640_base`). It masks the
rows that TRL's flag marks, so here the fix's row set is replaced by that one.
"""

from dataclasses import replace
from fnmatch import fnmatch

import pytest
import torch
from goldens import golden_data as gold
from goldens.golden_data import SINGLE
from proof.claims import compared

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import evaluate, evaluate_rows
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.trainers.trl import grpo as trl

pytestmark = [compared("golden", SINGLE)]

LATER = ()
"""Functions and configurations that the package does not compute today."""

OLDER = {("trl.advantages", "unscorable", "pr5640"), ("trl.advantages", "unscorable", "pr5640_base")}
"""TRL 1.3, on which the proposal is based, counts an unscored row as a reward of 0; here all is that of the newest."""

ENTRIES = [entry for entry in gold.entries() if entry[1].startswith("trl.")]
METRICS = (
    "kl",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "clip_ratio/low_min",
    "clip_ratio/high_max",
    "cispo_clip_ratio",
    "vespo/phi_seq_mean",
)
EARLIER = {"clip_ratio/low_min", "clip_ratio/high_max"}
"""Metrics that were something else in TRL 1.3."""


def later(function: str, config: str) -> bool:
    return any(function == name and fnmatch(config, pattern) for name, pattern in LATER)


def chosen(function: str) -> list:
    """Entries of a function as test parameters."""
    return [
        pytest.param(*entry, id="/".join(entry), marks=gold.options_of(*entry[1:3]))
        for entry in ENTRIES
        if entry[1] == function and not later(*entry[1:3]) and entry[1:] not in OLDER
    ]


@pytest.mark.skip(reason="not computed today")
@pytest.mark.parametrize(
    ("function", "config"),
    sorted({entry[1:3] for entry in ENTRIES if later(*entry[1:3])} | {("trl.advantages", "unscorable in TRL 1.3")}),
    ids="/".join,
)
def test_not_computed_today(function, config):
    raise AssertionError("an entry of LATER that is computed belongs to a test")


def test_every_entry_is_tested_or_named():
    tested = {param.values for param in (*ADVANTAGES, *LOSSES)}
    assert tested == {entry for entry in ENTRIES if not later(*entry[1:3]) and entry[1:] not in OLDER}
    assert all(any(entry[1] == name and fnmatch(entry[2], pattern) for entry in ENTRIES) for name, pattern in LATER)


def truncation(config: str) -> str:
    return "masked" if config.endswith("truncated_masked") else "unscored" if config == "unscorable" else ""


# --- advantages ------------------------------------------------------------------------------------------------------

ADVANTAGES = chosen("trl.advantages")


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize(("case", "function", "config", "variant"), ADVANTAGES)
def test_advantages(case, function, config, variant):
    scale = config if config in ("batch", "none") else "group"
    options = {"scale_rewards": scale}
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
    if config == "two_rewards_normalize_then_sum":
        options = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": weights.tolist()}
    objective = gold.objective("trl", **options)
    tokens = gold.expected(case, "tokens")[function, config, variant]
    scalars = gold.expected(case, "scalars")[function, config, variant]
    for step in gold.steps(case):
        batch = gold.batch(case, step, truncated=truncation(config))
        if config.startswith("two_rewards"):
            reward_N = torch.stack([batch.rewards["reward_a"], batch.rewards["reward_b"]], 1) @ weights
            batch = replace(batch, per_row={**batch.per_row, "reward": reward_N})
        cells = dict(tokens.filter(step=step, output="advantage").select("sample_id", "f32").iter_rows())
        wanted = torch.tensor([cells[name][0] for name in batch.sample_ids], dtype=torch.float64)
        gold.assert_close(evaluate_rows(batch, objective).advantage_N, wanted, "f32", "advantages")
        metrics = trl.metrics(evaluate(batch, objective))
        for name in ("reward", "reward_std", "frac_reward_zero_std"):
            wanted = gold.scalar(scalars, step, f"metric:{name}", "f32")
            gold.assert_close(metrics[name], wanted, "f32", name, scale=max(1.0, abs(wanted)))
        assert_mask(batch, step, objective, variant, tokens)
        if variant == "asis":
            # The commit of the proposal counts raw completion lengths.
            counted = float(batch.column("response_mask").sum())
            assert counted == gold.scalar(scalars, step, "num_items_in_batch", "f32")


def assert_mask(batch: RolloutBatch, step: int, objective: Objective, variant: str, tokens) -> None:
    """The mask that the loss sees: with the proposal, that of the rows in the policy's scope."""
    if variant == "pr5640":
        objective = choose("zero-std:pr5640").apply(objective)
    scope_N = evaluate(batch, objective).in_scope(objective.policy)
    own = batch.column("response_mask") & torch.repeat_interleave(scope_N, batch.rows.diff())
    wanted = gold.per_token(tokens, step, "loss_mask", "f32", batch)
    gold.assert_close(own, wanted, "f32", "loss mask")


# --- losses ----------------------------------------------------------------------------------------------------------

LOSSES = chosen("trl.loss")
CHANGES = {
    "beta0": {"beta": 0.0},
    "bias_corrected_kl": {"use_bias_correction_kl": True},
    "delta1.1": {"delta": 1.1},
    "opsm": {"off_policy_mask_threshold": 0.001},
    "seq": {"beta": 0.0, "importance_sampling_level": "sequence"},
    "seq_is": {"importance_sampling_level": "sequence"},
    "vllm_seq_mask": {"use_vllm": True, "vllm_importance_sampling_clip_max": 1.05},
    "vllm_token_truncate": {
        "use_vllm": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 1.01,
    },
    "tight": {"epsilon": 0.02, "epsilon_high": 0.03},
}


def loss_objective(case: str, config: str) -> Objective:
    mode, *parts = config.split("|")
    options = {
        "loss_type": mode,
        "beta": 0.04,
        "use_bias_correction_kl": False,
        "max_completion_length": gold.width(case),
    }
    if mode == "dapo" and len(parts) == 1:
        options["epsilon_high"] = 0.28
    if mode == "dr_grpo":
        options["scale_rewards"] = "none"
    if mode == "cispo":
        options["epsilon_high"] = 1.02
    for part in parts:
        options |= CHANGES.get(part, {})
    return gold.objective("trl", **options)


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize(("case", "function", "config", "variant"), LOSSES)
def test_loss(case, function, config, variant):
    objective = loss_objective(case, config)
    if variant == "pr5640":
        objective = choose("zero-std:pr5640").apply(objective)
    tokens = gold.expected(case, "tokens")[function, config, variant]
    scalars = gold.expected(case, "scalars")[function, config, variant]
    for step in gold.steps(case):
        batch = gold.batch(case, step, truncated=truncation(config))
        found = evaluate(batch, objective, per_token=True)
        share = 1.0
        if variant != "asis" and config.startswith("dapo") and truncation(config):
            # The commit of the proposal counts truncated completions too.
            share = float(batch.column("response_mask").sum()) / batch.tokens
        scale = float(found.per_token.loss_T.abs().double().sum()) * share
        u_T = (batch.column("policy_log_probs") - batch.column("ref_log_probs"))[batch.column("response_mask")]
        cancelled = float(gold.k3_rounding(u_T).max()) if len(u_T) else 0.0
        coef = objective.kl_loss.coef if objective.kl_loss else 0.0
        wanted = gold.scalar(scalars, step, "loss", "f32")
        gold.assert_close(found.loss * share, wanted, "f32", "loss", scale=scale, rounding=coef * cancelled)
        gold.assert_close(
            found.per_token.grad_T.double() * share,
            gold.per_token(tokens, step, "grad", "f32", batch),
            "f32",
            "gradient",
            where=batch.column("response_mask"),
        )
        metrics = trl.metrics(found)
        for name in METRICS:
            wanted = gold.scalar(scalars, step, f"metric:{name}", "f32")
            if name in EARLIER and (wanted is None or variant != "asis"):
                continue
            assert (wanted is None) == (name not in metrics)
            if wanted is not None:
                lost = cancelled if name == "kl" else 0.0
                gold.assert_close(metrics[name], wanted, "f32", name, scale=max(1.0, abs(wanted)), rounding=lost)
