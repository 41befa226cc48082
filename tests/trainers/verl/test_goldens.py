"""verl's numbers, recomputed."""

from dataclasses import replace

import pytest
import torch
from goldens import golden_data as gold
from goldens.golden_data import DTYPES
from proof.claims import Bound, compared, fail_alike

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import evaluate, evaluate_rows
from rolloutdoctor.formulas import kl
from rolloutdoctor.objective.objective import Objective, RowSet
from rolloutdoctor.trainers.verl import trainer as verl

pytestmark = [compared("golden")]

ROUNDED = Bound(
    why="in float32 on top of it what verl itself rounds off, which is how far its stored results in float32 and in "
    "float64 are apart: it adds up tokens one by one, whitens what is nearly equal, divides residues by 1e-6"
)

ENTRIES = [entry for entry in gold.entries() if entry[1].startswith("verl.")]


def chosen(*functions: str) -> list:
    """Entries of some functions as test parameters."""
    return [
        pytest.param(*entry, id="/".join(entry), marks=gold.options_of(*entry[1:3]))
        for entry in ENTRIES
        if entry[1].startswith(functions)
    ]


def test_every_entry_is_tested():
    losses = (*POLICY_LOSSES, *POLICY_MODES, *VALUE_LOSSES)
    tested = (*ADVANTAGES, *CORRECTIONS, *KL_PENALTIES, *KL_LOSSES, *AGGREGATIONS, *losses)
    assert {param.values for param in tested} == set(ENTRIES)


# --- advantages ------------------------------------------------------------------------------------------------------

ADVANTAGES = chosen("verl.adv.")
CORRECTIONS = chosen("verl.adaptive_kl_controller", "verl.pipeline", "verl.rollout_")
"""Tested in `goldens.test_verl_corrections`."""
POLICY_MODES = [param for param in chosen("verl.policy_loss.") if not param.values[1].endswith("vanilla")]
"""Tested in `goldens.test_verl_policy`."""
VALUE_LOSSES = chosen("verl.value_loss")
"""Tested in `goldens.test_verl_values`."""

EACH_ADVANTAGE = {
    "gae": {"g0.99_l0.95": {"gamma": 0.99, "lam": 0.95}, "g1_l1": {}},
    "gdpo": {
        "ab": {"gdpo_reward_keys": "reward_a,reward_b"},
        "ab_w": {"gdpo_reward_keys": "reward_a,reward_b", "gdpo_reward_weights": "0.3,1.7"},
        "single": {"gdpo_reward_keys": "unused"},
    },
    "reinforce_plus_plus": {"gamma0.97": {"gamma": 0.97}, "gamma1": {}},
    "optimal_token_baseline": {"is": {"rollout_is": "token"}},
    "tir_optimal_token_baseline": {"is": {"rollout_is": "token"}},
}
"""Options of each configuration."""


def advantage_objective(function: str, config: str, variant: str) -> Objective:
    name = function.removeprefix("verl.adv.")
    options = EACH_ADVANTAGE.get(name, {}).get(config, {})
    found = gold.objective("verl", algorithm__adv_estimator=name, norm_adv_by_std_in_grpo=config != "nonorm", **options)
    if config == "single":
        # The trainer refuses to go without names; the function then takes the score.
        found = replace(found, advantage=replace(found.advantage, reward_keys=()))
    if config == "notail":
        # The trainer has no option for it.
        found = replace(found, advantage=replace(found.advantage, zero_tail=False))
    if config == "nonorm":
        # The trainer hands this option to grpo alone; the function itself takes it.
        found = replace(found, advantage=replace(found.advantage, scale="none"))
    if variant != "asis":
        found = replace(found, baseline_rows=found.baseline_rows.leaving_out(RowSet.REJECTED))
    return found


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize(("case", "function", "config", "variant"), ADVANTAGES)
@compared("golden", ROUNDED)
def test_advantages(case, function, config, variant):
    tokens = gold.expected(case, "tokens").get((function, config, variant))
    scalars = gold.expected(case, "scalars").get((function, config, variant))
    objective = advantage_objective(function, config, variant)
    steps_compared = 0
    for step in gold.steps(case):
        batch = gold.batch(case, step)
        if gold.failures(scalars, step):
            if variant != "fixed" or (function == "verl.adv.grpo_passk" and bool((batch.groups.size_G < 2).any())):
                with fail_alike():
                    evaluate_rows(batch, objective)
            elif function == "verl.adv.grpo_passk":
                # On the accepted rows alone upstream fails for lone survivors, which get 0 in its proposal and here.
                own = evaluate_rows(batch, objective)
                alone_N = own.in_baseline_N & (batch.groups.total(own.in_baseline_N)[batch.groups.index_N] == 1)
                assert alone_N.any()
                gold.assert_close(own.advantage_N, torch.zeros(len(batch)), "f64", "lone survivors", where=alone_N)
            steps_compared += 1
            continue
        skip_lone = variant == "fixed_skip_lone" and bool((batch.groups.size_G < 2).any())
        for precision, dtype in DTYPES.items():
            wanted = gold.per_token(tokens, step, "advantages", precision, batch)
            if wanted is None:
                continue
            steps_compared += 1
            if skip_lone:
                # Upstream was called without the groups of one row, and fails with them.
                with fail_alike():
                    evaluate_rows(batch, objective, dtype)
                continue
            found = evaluate_rows(batch, objective, dtype)
            own = gold.advantage_tokens(found, batch)
            where_T = batch.column("response_mask")
            scale = None
            if function.endswith("token_baseline"):
                # A return less its baseline cancels.
                scale = max(float(wanted.abs().max()), float(batch.column("reward").abs().max()))
            lost_T = gold.lost(tokens, step, "advantages", batch) if precision == "f32" else 0.0
            if function.endswith("token_baseline"):
                lost_T = 2 * lost_T  # path weights cancel, in float32 here too
            label = "advantages"
            gold.assert_close(own, wanted, precision, label, where=where_T, scale=scale, rounding=lost_T)
    assert steps_compared


# --- KL --------------------------------------------------------------------------------------------------------------

KL_PENALTIES = chosen("verl.kl_penalty")


def kl_objective(name: str, **options: object) -> Objective:
    return gold.objective(
        "verl", algorithm__adv_estimator="grpo", use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type=name, **options
    )


@pytest.mark.parametrize(("case", "function", "config", "variant"), KL_PENALTIES)
def test_kl_penalty(case, function, config, variant):
    rule = kl_objective(config).kl_loss
    frame = gold.expected(case, "tokens")[function, config, variant]
    for step in gold.steps(case):
        batch = gold.batch(case, step)
        for precision, dtype in DTYPES.items():
            u = batch.column("policy_log_probs").to(dtype) - batch.column("ref_log_probs").to(dtype)
            value, slope = kl.term(rule.estimator, u, straight_through=rule.straight_through)
            for output, own in (("kl", value), ("grad", slope)):
                wanted = gold.per_token(frame, step, output, precision, batch)
                if wanted is not None:
                    lost_T = gold.lost(frame, step, output, batch) if precision == "f32" and output == "kl" else 0.0
                    gold.assert_close(own, wanted, precision, output, rounding=lost_T)
        # k1 has the derivative 1 for every token, and only that is not stored.
        assert "grad" in frame["output"].to_list() or config == "k1"
        plus = kl.term(rule.estimator, u, straight_through=True)
        torch.testing.assert_close(plus[0], value, rtol=0, atol=0)
        torch.testing.assert_close(plus[1], u, rtol=0, atol=0)


def row_share(batch: RolloutBatch, mode: str) -> float:
    """Rows over rows with a token: without global batch sizes upstream's function leaves empty rows out of row means,
    while the engine, which always gives the sizes, counts them."""
    if not mode.startswith("seq-mean"):
        return 1.0
    lengths = evaluate_rows(batch, kl_objective("k1")).length_N
    return len(lengths) / int((lengths > 0).sum())


KL_LOSSES = chosen("verl.kl_loss")


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize(("case", "function", "config", "variant"), KL_LOSSES)
def test_kl_loss(case, function, config, variant):
    name, mode = config.split("|")
    objective = kl_objective(name, loss_agg_mode=mode, loss_scale_factor=gold.width(case))
    frame = gold.expected(case, "scalars")[function, config, variant]
    for step in gold.steps(case):
        batch = gold.batch(case, step)
        for precision, dtype in DTYPES.items():
            found = evaluate(batch, objective, dtype=dtype)
            own = found.kl_loss * row_share(batch, mode)
            wanted = gold.scalar(frame, step, "loss", precision)
            lost = gold.lost(frame, step, "loss") if precision == "f32" else 0.0
            gold.assert_close(own, wanted, precision, "KL loss", rounding=lost)
            assert verl.metrics(found)["actor/kl_loss"] == pytest.approx(found.kl_loss, rel=1e-12)


# --- aggregation -----------------------------------------------------------------------------------------------------

AGGREGATIONS = chosen("verl.agg_loss")


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize(("case", "function", "config", "variant"), AGGREGATIONS)
def test_aggregation(case, function, config, variant):
    """The loss of the k3 KL, and its derivative with respect to the KL, which is the weight of each token."""
    mode, scope = config.split("|")
    factor = 256 if scope == "global" else gold.width(case)
    objective = kl_objective("k3", loss_agg_mode=mode, loss_scale_factor=factor)
    scalars = gold.expected(case, "scalars")[function, config, variant]
    tokens = gold.expected(case, "tokens")[function, config, variant]
    for step in gold.steps(case):
        batch = gold.batch(case, step)
        count = int(batch.column("response_mask").sum())
        if scope == "local":
            share = row_share(batch, mode)
        else:
            # Two ranks, each with as many rows as this one; 17 tokens more than twice its tokens.
            share = {"token-mean": 2 * count / (2 * count + 17), "token-sum": 2.0}.get(mode, 1.0)
        for precision, dtype in DTYPES.items():
            found = evaluate(batch, objective, dtype=dtype)
            wanted = gold.scalar(scalars, step, "loss", precision)
            lost = gold.lost(scalars, step, "loss") if precision == "f32" else 0.0
            gold.assert_close(found.kl_loss * share, wanted, precision, "loss", rounding=lost)
            weight_T = torch.repeat_interleave(found.tokens.weight_N, batch.rows.diff()) * share
            gold.assert_close(
                weight_T * batch.column("response_mask"),
                gold.per_token(tokens, step, "grad", precision, batch),
                precision,
                "gradient",
            )


# --- losses ----------------------------------------------------------------------------------------------------------

POLICY_LOSSES = chosen("verl.policy_loss.vanilla", "verl.actor_loss")


def loss_objective(case: str, function: str, config: str, variant: str) -> tuple[Objective, str]:
    """The objective of an entry, and its aggregation mode where upstream was not told the sizes of the batch."""
    options = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "loss_agg_mode": "token-mean"}
    estimator = "opo" if config.startswith("adv_opo") else "gae" if config == "adv_gae" else "grpo"
    local = ""
    if config == "adv_gae":
        options |= {"gamma": 0.99, "lam": 0.95}
    if function == "verl.actor_loss":
        local = options["loss_agg_mode"] = config.split("|")[1]
        options |= {"clip_ratio_high": 0.2, "use_kl_loss": True, "kl_loss_coef": 0.05, "kl_loss_type": "low_var_kl"}
    elif config == "is_seq":
        local = options["loss_agg_mode"] = "seq-mean-token-sum"
        options["rollout_is"] = "sequence"
    elif config == "is_token":
        options["rollout_is"] = "token"
    elif config == "tight":
        options |= {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03, "clip_ratio_c": 1.05}
    elif config == "global":
        options |= {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 256}
    elif config == "adv_opo_seq":
        local = options["loss_agg_mode"] = "seq-mean-token-sum"
    elif not config.startswith("adv"):
        local = options["loss_agg_mode"] = config
        options["loss_scale_factor"] = gold.width(case)
    objective = gold.objective("verl", algorithm__adv_estimator=estimator, **options)
    if variant == "fixed" or config == "adv_grpo_fixed":
        objective = replace(objective, baseline_rows=objective.baseline_rows.leaving_out(RowSet.REJECTED))
    return objective, local


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize(("case", "function", "config", "variant"), POLICY_LOSSES)
def test_policy_loss(case, function, config, variant):
    objective, local = loss_objective(case, function, config, variant)
    scalars = gold.expected(case, "scalars")[function, config, variant]
    tokens = gold.expected(case, "tokens")[function, config, variant]
    for step in gold.steps(case):
        batch = gold.batch(case, step)
        share = row_share(batch, local)
        mask_T = batch.column("response_mask")
        for precision, dtype in DTYPES.items():
            found = evaluate(batch, objective, dtype=dtype, per_token=True)
            # The residue of equal rewards is in upstream's float32 loss; its gradients are stored in float64.
            residue = precision == "f32" and case.startswith("g06") and "opo" not in config
            # A loss cancels: its scale is the sum of its terms' magnitudes.
            scale = float(found.per_token.loss_T.abs().double().sum()) * share
            names = {"loss": found.loss, "pg_loss": found.policy_loss}
            if function == "verl.actor_loss":
                names["kl_loss"] = verl.metrics(found)["actor/kl_loss"]
            for output, own in names.items():
                wanted = gold.scalar(scalars, step, output, precision)
                if (wanted is None and output == "pg_loss") or (residue and output != "kl_loss"):
                    continue
                gold.assert_close(own * share, wanted, precision, output, scale=max(scale, abs(wanted)))
            gold.assert_close(
                found.per_token.grad_T.double() * share,
                gold.per_token(tokens, step, "grad", precision, batch),
                precision,
                "gradient",
                where=mask_T,
            )
            if function != "verl.actor_loss":
                wanted = gold.scalar(scalars, step, "metric:actor/ppo_kl", precision)
                own = verl.metrics(found)["actor/ppo_kl"]
                gold.assert_close(own, wanted, precision, "actor/ppo_kl", scale=1.0)
                clipped = verl.metrics(found)["actor/pg_clipfrac"]
                wanted = gold.scalar(scalars, step, "metric:actor/pg_clipfrac", precision)
                if case != "g06_equal_and_ties" or precision == "f64":
                    gold.assert_close(clipped, wanted, precision, "actor/pg_clipfrac", scale=1.0)
