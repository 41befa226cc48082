"""slime's numbers, recomputed. All were made in float32."""

from dataclasses import replace
from fnmatch import fnmatch

import pytest
import torch
from goldens import golden_data as gold
from torch import Tensor

from rolloutdoctor import kl
from rolloutdoctor.batch import Groups, RolloutBatch
from rolloutdoctor.errors import CannotComputeError
from rolloutdoctor.evaluation import RowPart, evaluate, evaluate_rows, stored_kl
from rolloutdoctor.fixes import choose
from rolloutdoctor.objective import Objective, RowSet
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.trainers import slime

LATER = ()
"""Functions and configurations that the package does not compute today."""

ENTRIES = [entry for entry in gold.entries() if entry[1].startswith(("slime.", "reference."))]


def later(function: str, config: str) -> bool:
    return any(function == name and fnmatch(config, pattern) for name, pattern in LATER)


def chosen(function: str, *, with_later: bool = False, like: str = "*") -> list:
    """Entries of a function as test parameters."""
    return [
        pytest.param(*entry, id="/".join(entry))
        for entry in ENTRIES
        if entry[1] == function and fnmatch(entry[2], like) and (with_later or not later(*entry[1:3]))
    ]


@pytest.mark.skip(reason="not computed today")
@pytest.mark.parametrize(
    ("function", "config"), sorted({entry[1:3] for entry in ENTRIES if later(*entry[1:3])}), ids="/".join
)
def test_not_computed_today(function, config):
    raise AssertionError("an entry of LATER that is computed belongs to a test")


def test_every_entry_is_tested_or_named():
    tested = {*KL, *REWARDS, *ADVANTAGES, *STORED, *LOGGED, *REFERENCE, *LOSSES}
    assert {param.values for param in tested} >= {entry for entry in ENTRIES if not later(*entry[1:3])}
    assert all(any(entry[1] == name and fnmatch(entry[2], pattern) for entry in ENTRIES) for name, pattern in LATER)


def objective_of(config: str, variant: str = "asis") -> Objective:
    """The objective of a configuration such as ``ppo|k3|c0.05|g0.99_l0.95``."""
    estimator, *parts = config.split("|")
    options = {"advantage_estimator": estimator}
    for part in parts:
        if part in slime.KL_TYPES:
            options["kl_loss_type"] = part
        elif part == "norm":
            options["normalize_advantages"] = True
        elif part.startswith("g") and "_l" not in part:
            options["gamma"] = float(part[1:])
        elif part.startswith("g"):
            gamma, lambd = part.split("_l")
            options |= {"gamma": float(gamma[1:]), "lambd": float(lambd)}
        elif part.startswith("c"):
            options["kl_coef"] = float(part[1:])
    whitened = options.get("normalize_advantages", False)
    if estimator.startswith("reinforce"):
        # slime insists on whitening; upstream's function was called without it too.
        options["normalize_advantages"] = True
    found = gold.objective("slime", **options)
    found = replace(found, advantage=replace(found.advantage, whitened=whitened))
    return choose("kl-inplace").apply(found) if variant == "fixed" and estimator == "ppo" else found


# --- KL --------------------------------------------------------------------------------------------------------------

KL = chosen("slime.compute_approx_kl")


@pytest.mark.parametrize(("case", "function", "config", "variant"), KL)
def test_approx_kl(case, function, config, variant):
    name, _, unbiased = config.partition("|")
    options = {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_unbiased_kl": bool(unbiased)}
    rule = gold.objective("slime", kl_loss_type=name, **options).kl_loss
    frame = gold.expected(case, "tokens")[function, config, variant]
    for step in gold.steps(case):
        batch = gold.batch(case, step)
        policy_T = batch.column("policy_log_probs" if unbiased else "old_log_probs")
        ratio_T = (policy_T - batch.column("old_log_probs")).exp() if rule.ratio_weighted else None
        own = kl.term(rule.estimator, policy_T - batch.column("ref_log_probs"), ratio_T, clamp=rule.clamp)[0]
        tolerance = "float32 k3" if rule.estimator == "k3" else "float32"
        gold.assert_close(own, gold.per_token(frame, step, "kl", "f32", batch), tolerance, f"{function} {name}")


# --- rewards and advantages ------------------------------------------------------------------------------------------

REWARDS = chosen("slime.rewards_post_process")


@pytest.mark.parametrize(("case", "function", "config", "variant"), REWARDS)
def test_rewards_post_process(case, function, config, variant):
    """slime normalises the rewards where they are sampled; here that is the advantage of grpo."""
    options = {"grpo_std_normalization": config == "grpo_std"}
    if config == "rfpp_baseline":
        options = {"advantage_estimator": "reinforce_plus_plus_baseline", "normalize_advantages": True}
    objective = gold.objective("slime", **options)
    objective = replace(objective, advantage=replace(objective.advantage, whitened=False))
    if variant == "fixed_per_group":
        rule = replace(objective.advantage, batch_if_unequal=False)
        objective = replace(objective, advantage=rule, vote=objective.vote.leaving_out(RowSet.REJECTED))
    frame = gold.expected(case, "tokens")[function, config, variant]
    for step in gold.steps(case):
        batch = gold.batch(case, step)
        cells = dict(frame.filter(step=step, output="reward").select("sample_id", "f32").iter_rows())
        wanted = torch.tensor([cells[name][0] for name in batch.sample_ids], dtype=torch.float64)
        # The unbiased deviation of one row is NaN; slime turns the division off for groups of one, which gives 0.
        wanted = wanted.nan_to_num(0.0)
        own = evaluate_rows(batch, objective).advantage_N
        filled_N = batch.rows.diff() > 0
        equal_N = torch.zeros_like(filled_N)
        equal_N[filled_N] = gold.equal_reward_tokens(batch)[batch.rows[:-1][filled_N]]
        gold.assert_close(own, wanted, "float32", function, where=~equal_N)
        gold.assert_close(own, wanted, "float32 equal rewards", f"{function} residue", where=equal_N)


ADVANTAGES = chosen("slime.advantages")


def row_scale(wanted: Tensor, batch: RolloutBatch) -> Tensor:
    """Largest magnitude of each token's row."""
    return seg.expand(seg.high(wanted.abs(), batch.rows), batch.rows)


@pytest.mark.parametrize(("case", "function", "config", "variant"), ADVANTAGES)
def test_advantages(case, function, config, variant):
    objective = objective_of(config, variant)
    # Where every call of upstream raised there is nothing but the exceptions.
    frame = gold.expected(case, "tokens").get((function, config, variant))
    estimator = objective.advantage.estimator
    whitened, baseline = objective.advantage.whitened, estimator == "slime_reinforce_plus_plus_baseline"
    for step in gold.steps(case):
        batch = gold.batch(case, step, empty_rows=False)
        if gold.failures(frame_of(case, function, config, variant), step):
            with pytest.raises(CannotComputeError, match="slime fails here"):
                evaluate_rows(batch, objective)
            continue
        if variant == "asis_accepted_only":
            batch = accepted(batch)
        # The rewards were normalised with the empty rows, and the advantages made without them.
        whole = gold.batch(case, step) if variant != "asis_accepted_only" else batch
        wanted = gold.per_token(frame, step, "advantages", "f32", batch)
        found = evaluate_rows(whole, objective)
        # Residue of equal rewards is whitened with the rest, so it shows in every value.
        normed = estimator in ("grpo", "slime_reinforce_plus_plus_baseline")
        equal_T = gold.equal_reward_tokens(whole) if normed else torch.zeros(whole.tokens, dtype=torch.bool)
        own = found.advantage_T
        if own is None:
            own = seg.expand(found.advantage_N, whole.rows)
        if whitened:
            kind = "float32 equal rewards" if estimator == "grpo" and bool(equal_T.any()) else "float32 whitened"
            plain = evaluate_rows(whole, replace(objective, advantage=replace(objective.advantage, whitened=False)))
            scale = cancellation(plain, whole) * wanted.abs().max()
            gold.assert_close(own, wanted, kind, f"{function} {estimator} whitened", scale=scale)
        elif own is found.advantage_T and not baseline:
            scale = row_scale(wanted, batch)
            gold.assert_close(own, wanted, "float32 scan", f"{function} {estimator}", scale=scale)
        else:
            gold.assert_close(own, wanted, "float32", f"{function} {estimator}", where=~equal_T)
            residue = "float32" if baseline else "float32 equal rewards"
            gold.assert_close(own, wanted, residue, f"{function} {estimator} residue", where=equal_T)
        if estimator == "gae":
            returns = evaluate_rows(whole, replace(objective, advantage=replace(objective.advantage, whitened=False)))
            returns = returns.advantage_T + whole.column("values")
            wanted = gold.per_token(frame, step, "returns", "f32", batch)
            # Returns are the sum of advantages and values, which may cancel.
            scale = torch.maximum(row_scale(wanted, batch), row_scale(batch.column("values").double(), batch))
            gold.assert_close(returns, wanted, "float32 scan", f"{function} ppo returns", scale=scale)


def cancellation(plain: RowPart, batch: RolloutBatch) -> float:
    """Square of the mean over the variance, one at least: slime's one-pass variance in float32 loses that factor."""
    value_T = plain.advantage_T if plain.advantage_T is not None else seg.expand(plain.advantage_N, batch.rows)
    trained = value_T[batch.column("response_mask")]
    return max(1.0, float(trained.mean() ** 2 / (trained.var() + 1e-8)))


def frame_of(case: str, function: str, config: str, variant: str):
    """Expected scalars, which hold upstream's exceptions; None if there are none."""
    return gold.expected(case, "scalars").get((function, config, variant))


def accepted(batch: RolloutBatch) -> RolloutBatch:
    """The rows with a trained token."""
    kept_N = seg.total(batch.column("response_mask"), batch.rows) > 0
    kept_T = torch.repeat_interleave(kept_N, batch.rows.diff())
    lengths_N = batch.rows.diff()[kept_N]
    return replace(
        batch,
        rows=torch.cat([lengths_N.new_zeros(1), lengths_N.cumsum(0)]),
        groups=Groups.of(batch.groups.index_N[kept_N], len(batch.groups)) if bool(kept_N.any()) else None,
        group_ids=batch.group_ids,
        per_row={name: column[kept_N] for name, column in batch.per_row.items()},
        per_token={name: column[kept_T] for name, column in batch.per_token.items()},
        rewards={},
        sample_ids=[name for name, kept in zip(batch.sample_ids, kept_N.tolist(), strict=True) if kept],
    )


# --- the stored KL and its metric ------------------------------------------------------------------------------------

STORED = chosen("slime.advantages", with_later=True, like="ppo*")


@pytest.mark.parametrize(("case", "function", "config", "variant"), STORED)
def test_stored_kl(case, function, config, variant):
    """What is left in the stored KL: the reward buffer before the fix, the KL after it."""
    objective = objective_of(config, variant)
    frame = gold.expected(case, "tokens")[function, config, variant]
    for step in gold.steps(case):
        batch = gold.batch(case, step, empty_rows=False)
        wanted = gold.per_token(frame, step, "kl_after", "f32", batch)
        tolerance = "float32 k3" if objective.kl_reward.estimator == "k3" else "float32"
        gold.assert_close(stored_kl(batch, objective), wanted, tolerance, f"stored KL {variant}")


LOGGED = chosen("slime.log_rollout_data")


@pytest.mark.parametrize(("case", "function", "config", "variant"), LOGGED)
def test_logged_kl(case, function, config, variant):
    objective = objective_of(config, variant)
    frame = gold.expected(case, "scalars")[function, config, variant]
    for step in gold.steps(case):
        batch = gold.batch(case, step, empty_rows=False)
        own = slime.metrics(evaluate(batch, objective))
        kl_T = stored_kl(batch, objective)
        tolerance = "float32 k3" if objective.kl_reward.estimator == "k3" else "float32"
        scale = float(kl_T.abs().max())
        wanted = gold.scalar(frame, step, "rollout/kl", "f32")
        gold.assert_close(own["rollout/kl"], wanted, tolerance, f"rollout/kl {variant}", scale=scale)
        wanted = gold.scalar(frame, step, "rollout/raw_reward", "f32")
        if not config.startswith("ppo"):
            assert wanted is None  # upstream was called with the KL alone there
            continue
        gold.assert_close(own["rollout/raw_reward"], wanted, "float32", "rollout/raw_reward", scale=1.0)
        for name in ("log_probs", "ref_log_probs", "rollout_log_probs", "values"):
            wanted = gold.scalar(frame, step, f"rollout/{name}", "f32")
            gold.assert_close(own[f"rollout/{name}"], wanted, "float32", f"rollout/{name}", scale=1.0)


REFERENCE = chosen("reference.rollout_kl")


@pytest.mark.parametrize(("case", "function", "config", "variant"), REFERENCE)
def test_reference_formulas(case, function, config, variant):
    before, after = objective_of(config), objective_of(config, "fixed")
    frame = gold.expected(case, "scalars")[function, config, variant]
    for step in gold.steps(case):
        batch = gold.batch(case, step, empty_rows=False)
        for output, objective in (("buggy_closed_form", before), ("mean_all_tokens", after)):
            # A float64 mean of upstream's float32 KL.
            own = slime.rollout_mean(batch, stored_kl(batch, objective))
            tolerance = "float32 k3" if objective.kl_reward.estimator == "k3" else "float32"
            gold.assert_close(own, gold.scalar(frame, step, output, "f64"), tolerance, output)


# --- losses ----------------------------------------------------------------------------------------------------------

LOSSES = chosen("slime.policy_loss")
COEF = 0.01
OPTIONS = {
    "grpo|default": {},
    "cispo|tight": {"advantage_estimator": "cispo", "eps_clip": 0.03, "eps_clip_high": 0.03},
    "gspo|tight": {"advantage_estimator": "gspo", "eps_clip": 0.0003, "eps_clip_high": 0.0004},
    "grpo|opsm": {"use_opsm": True},
    "grpo|tis": {"use_tis": True, "tis_clip": 1.02, "tis_clip_low": 0.5},
    "grpo|icepop": {
        "use_tis": True,
        "tis_clip": 1.05,
        "tis_clip_low": 0.95,
        "custom_tis_function_path": slime.ICEPOP,
    },
    "grpo|clip_c3|kl_k3": {"eps_clip_c": 3.0, "use_kl_loss": True, "kl_loss_coef": COEF, "kl_loss_type": "k3"},
    "grpo|kl_k2|per_token": {
        "use_kl_loss": True,
        "kl_loss_coef": COEF,
        "kl_loss_type": "k2",
        "calculate_per_token_loss": True,
    },
    "grpo|kl_low_var_unbiased": {
        "use_kl_loss": True,
        "kl_loss_coef": COEF,
        "kl_loss_type": "low_var_kl",
        "use_unbiased_kl": True,
    },
    "ppo|rollout_logprobs": {
        "advantage_estimator": "ppo",
        "kl_loss_type": "k3",
        "kl_coef": 0.05,
        "gamma": 0.99,
        "lambd": 0.95,
        "use_rollout_logprobs": True,
    },
}


TRAIN = (
    "pg_loss",
    "kl_loss",
    "ppo_kl",
    "pg_clipfrac",
    "ois",
    "tis",
    "tis_abs",
    "tis_clipfrac",
    "opsm_clipfrac",
    "train_rollout_logprob_abs_diff",
)


@pytest.mark.parametrize(("case", "function", "config", "variant"), LOSSES)
def test_policy_loss(case, function, config, variant):
    objective = gold.objective("slime", **({"eps_clip": 0.2, "eps_clip_high": 0.28} | OPTIONS[config]))
    # Upstream was called with advantages whose KL is of the old log-probs.
    objective = replace(objective, kl_reward=replace(objective.kl_reward, log_probs="old_log_probs"))
    scalars = gold.expected(case, "scalars")[function, config, variant]
    tokens = gold.expected(case, "tokens")[function, config, variant]
    for step in gold.steps(case):
        # The rewards were normalised with the empty rows, and the loss was made without them.
        batch = gold.batch(case, step)
        found = evaluate(batch, objective, per_token=True)
        rows = int((batch.rows.diff() > 0).sum())
        share = len(batch) / rows
        divisor = gold.scalar(scalars, step, "normalizer", "f32")
        if config.endswith("per_token"):
            # An empty row would count as one token.
            share = float(found.tokens.layout.optim_total(found.rows.length_N.clamp(min=1))[0]) / divisor
        scale = float(found.per_token.loss_T.abs().double().sum()) * share
        where_T = batch.column("response_mask")
        # The residue of equal rewards is in upstream's float32 loss and gradient.
        residue = case.startswith("g06") and not config.startswith("ppo")
        if residue:
            where_T = where_T & ~gold.equal_reward_tokens(batch)
        else:
            wanted = gold.scalar(scalars, step, "loss", "f32") / divisor
            gold.assert_close(found.loss * share, wanted, "float32", f"{function} loss", scale=scale)
        wanted = gold.per_token(tokens, step, "grad", "f32", batch) / divisor
        own = found.per_token.grad_T.double() * share
        gold.assert_close(own, wanted, "float32", f"{function} grad", where=where_T)
        sums = divisor if config.endswith("per_token") else rows
        own = slime.metrics(found)
        for name in TRAIN:
            wanted = gold.scalar(scalars, step, f"log_sum:{name}", "f32")
            if wanted is not None and not (residue and name == "pg_loss"):
                kind = "float32 k3" if name == "kl_loss" else "float32"
                size = scale if name == "pg_loss" else None if name == "kl_loss" else 1.0
                gold.assert_close(own[f"train/{name}"] * share, wanted / sums, kind, f"train/{name}", scale=size)
