"""slime's numbers, recomputed. All were made in float32."""

from dataclasses import replace
from fnmatch import fnmatch

import pytest
import torch
from goldens import golden_data as gold
from proof.claims import Bound, compared, fail_alike
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import RowResult, evaluate, evaluate_rows, stored_kl
from rolloutdoctor.formulas import kl
from rolloutdoctor.objective.objective import Objective, RowSet
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.results.errors import CannotComputeError
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.trainers.slime import trainer as slime

EPS = 2**-24
"""Half a unit in the last place of float32, relative: what one rounding loses."""
ROUNDED = Bound(
    1e-6,
    None,
    "the results were made in float32; on top of it what its sums lose, count x 2^-24 x sum of magnitudes, taken "
    "through the whitening and the division by the deviation",
)

pytestmark = [compared("golden", ROUNDED)]

LATER = ()
"""Functions and configurations that the package does not compute today."""

ENTRIES = [entry for entry in gold.entries() if entry[1].startswith(("slime.", "reference."))]


def later(function: str, config: str) -> bool:
    return any(function == name and fnmatch(config, pattern) for name, pattern in LATER)


def chosen(function: str, *, with_later: bool = False, like: str = "*") -> list:
    """Entries of a function as test parameters."""
    return [
        pytest.param(*entry, id="/".join(entry), marks=gold.options_of(*entry[1:3]))
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
    tested = (*KL, *REWARDS, *ADVANTAGES, *STORED, *LOGGED, *REFERENCE, *LOSSES)
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
        lost_T = gold.k3_rounding(policy_T - batch.column("ref_log_probs")) if rule.estimator == "k3" else 0.0
        gold.assert_close(own, gold.per_token(frame, step, "kl", "f32", batch), "f32", "kl", rounding=lost_T)


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
        objective = replace(
            objective, advantage=rule, baseline_rows=objective.baseline_rows.leaving_out(RowSet.REJECTED)
        )
    frame = gold.expected(case, "tokens")[function, config, variant]
    for step in gold.steps(case):
        batch = gold.batch(case, step)
        cells = dict(frame.filter(step=step, output="reward").select("sample_id", "f32").iter_rows())
        wanted = torch.tensor([cells[name][0] for name in batch.sample_ids], dtype=torch.float64)
        # The unbiased deviation of one row is NaN; slime turns the division off for groups of one, which gives 0.
        wanted = wanted.nan_to_num(0.0)
        own = evaluate_rows(batch, objective).advantage_N
        gold.assert_close(own, wanted, "f32", "rewards", rounding=residue(batch, objective))


def residue(batch: RolloutBatch, objective: Objective) -> Tensor:
    """What is left of equal rewards, ``[N]``: the mean of n of them is wrong by n roundings, and that is divided by the
    deviation, which is as small, plus epsilon."""
    reward_N, groups = batch.column("reward"), batch.groups
    size_N = groups.size_G[groups.index_N]
    lost_N = size_N * EPS * reward_N.abs()
    low_G, high_G = (pick(reward_N[groups.order_N], groups.offsets) for pick in (seg.low, seg.high))
    equal_N = (low_G == high_G)[groups.index_N] & (size_N > 1)
    divided_N = lost_N / objective.advantage.epsilon if objective.advantage.scale == "group" else lost_N
    return torch.where(equal_N, divided_N, 0.0)


ADVANTAGES = chosen("slime.advantages")


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize(("case", "function", "config", "variant"), ADVANTAGES)
def test_advantages(case, function, config, variant):
    objective = objective_of(config, variant)
    # Where every call of upstream raised there is nothing but the exceptions.
    frame = gold.expected(case, "tokens").get((function, config, variant))
    estimator = objective.advantage.estimator
    whitened = objective.advantage.whitened
    for step in gold.steps(case):
        batch = gold.batch(case, step, empty_rows=False)
        if gold.failures(frame_of(case, function, config, variant), step):
            with fail_alike("slime fails here"):
                evaluate_rows(batch, objective)
            continue
        if variant == "asis_accepted_only":
            batch = accepted(batch)
        # The rewards were normalised with the empty rows, and the advantages made without them.
        whole = gold.batch(case, step) if variant != "asis_accepted_only" and estimator != "gae" else batch
        wanted = gold.per_token(frame, step, "advantages", "f32", batch)
        found = evaluate_rows(whole, objective)
        own = found.advantage_T
        if own is None:
            own = seg.expand(found.advantage_N, whole.rows)
        plain = evaluate_rows(whole, replace(objective, advantage=replace(objective.advantage, whitened=False)))
        lost_T = unwhitened_rounding(plain, whole, objective)
        if whitened:
            lost_T = whitened_rounding(plain, whole, lost_T)
        gold.assert_close(own, wanted, "f32", "advantages", rounding=lost_T)
        if estimator == "gae":
            returns = plain.advantage_T + whole.column("values")
            wanted = gold.per_token(frame, step, "returns", "f32", batch)
            lost_T = unwhitened_rounding(plain, whole, objective)
            gold.assert_close(returns, wanted, "f32", "returns", rounding=lost_T)


def test_rows_without_a_token():
    """Which estimators fail on them, as stored for every case that has such rows."""
    seen = {"ok": 0, "IndexError": 0, "AssertionError": 0}
    for case, function, config, variant in ENTRIES:
        frame = frame_of(case, function, config, variant) if function == "slime.advantages" else None
        if frame is None or variant not in ("asis", "fixed") or later(function, config):
            continue
        for step in gold.steps(case):
            stored = frame.filter(step=step, output="with_empty_rows")["error"].to_list()
            if not stored:
                continue
            objective, batch = objective_of(config, variant), gold.batch(case, step)
            assert bool((batch.rows.diff() == 0).any())
            seen[stored[0].partition(":")[0]] += 1
            if stored[0] == "ok":
                evaluate_rows(batch, objective)
                continue
            with pytest.raises(CannotComputeError, match="slime fails here"):
                evaluate_rows(batch, objective)
    assert min(seen.values()) > 0, seen


def unwhitened_rounding(plain: RowResult, batch: RolloutBatch, objective: Objective) -> Tensor:
    """What slime's float32 loses before it whitens, ``[T]``: residue of equal rewards, or sums along the row."""
    if plain.advantage_T is None or objective.advantage.estimator == "penalised_group_scores":
        return seg.expand(residue(batch, objective), batch.rows)
    magnitude_T = plain.advantage_T.double().abs()
    if "values" in batch.per_token:
        magnitude_T = magnitude_T + batch.column("values").double().abs()
    count_N = batch.rows.diff()
    return seg.expand(count_N * EPS * seg.total(magnitude_T, batch.rows), batch.rows)


def whitened_rounding(plain: RowResult, batch: RolloutBatch, lost_T: Tensor) -> Tensor:
    """The same after the whitening, ``[T]``: its mean and its one-pass variance are float32 sums over all tokens.

    A mean is wrong by count x EPS of the mean magnitude, the variance by that of the mean square, which is large where
    the mean is far from zero; the result is divided by the deviation.
    """
    value_T = plain.advantage_T if plain.advantage_T is not None else seg.expand(plain.advantage_N, batch.rows)
    trained_t = value_T.double()[batch.column("response_mask")]
    count, worst = len(trained_t), float(lost_T.max())
    inverse = float((trained_t.var() + 1e-8).rsqrt())
    of_mean = count * EPS * trained_t.abs().mean() + worst
    of_variance = count * EPS * trained_t.square().mean() + 2 * worst * trained_t.abs().mean()
    away_T = (value_T.double() - trained_t.mean()).abs()
    return inverse * (lost_T + of_mean) + away_T * inverse**3 * of_variance / 2


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


def kl_rounding(batch: RolloutBatch, objective: Objective) -> Tensor | float:
    """What the stored KL loses, ``[T]``."""
    if objective.kl_reward.estimator != "k3":
        return 0.0
    return gold.k3_rounding(batch.column("old_log_probs") - batch.column("ref_log_probs"))


STORED = chosen("slime.advantages", with_later=True, like="ppo*")


@pytest.mark.parametrize(("case", "function", "config", "variant"), STORED)
def test_stored_kl(case, function, config, variant):
    """What is left in the stored KL: the reward buffer before the fix, the KL after it."""
    objective = objective_of(config, variant)
    frame = gold.expected(case, "tokens")[function, config, variant]
    for step in gold.steps(case):
        batch = gold.batch(case, step, empty_rows=False)
        wanted = gold.per_token(frame, step, "kl_after", "f32", batch)
        gold.assert_close(
            stored_kl(batch, objective), wanted, "f32", "stored KL", rounding=kl_rounding(batch, objective)
        )


LOGGED = chosen("slime.log_rollout_data")


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize(("case", "function", "config", "variant"), LOGGED)
def test_logged_kl(case, function, config, variant):
    objective = objective_of(config, variant)
    frame = gold.expected(case, "scalars")[function, config, variant]
    for step in gold.steps(case):
        batch = gold.batch(case, step, empty_rows=False)
        own = slime.metrics(evaluate(batch, objective))
        kl_T = stored_kl(batch, objective)
        scale = float(kl_T.abs().max())
        lost = float(torch.as_tensor(kl_rounding(batch, objective)).max())
        wanted = gold.scalar(frame, step, "rollout/kl", "f32")
        gold.assert_close(own["rollout/kl"], wanted, "f32", "rollout/kl", scale=scale, rounding=lost)
        wanted = gold.scalar(frame, step, "rollout/raw_reward", "f32")
        if not config.startswith("ppo"):
            assert wanted is None  # upstream was called with the KL alone there
            continue
        largest = batch.column("reward").abs().max()
        gold.assert_close(own["rollout/raw_reward"], wanted, "f32", "rollout/raw_reward", scale=largest)
        for name in ("log_probs", "ref_log_probs", "rollout_log_probs", "values"):
            wanted = gold.scalar(frame, step, f"rollout/{name}", "f32")
            gold.assert_close(own[f"rollout/{name}"], wanted, "f32", f"rollout/{name}", scale=1.0)


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
            lost = float(torch.as_tensor(kl_rounding(batch, objective)).max())
            gold.assert_close(own, gold.scalar(frame, step, output, "f64"), "f32", "rollout/kl", rounding=lost)


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


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize(("case", "function", "config", "variant"), LOSSES)
def test_policy_loss(case, function, config, variant):
    # Releases do not hand eps_clip_c on to the function that was called.
    objective = gold.objective("slime@0.3.2", **({"eps_clip": 0.2, "eps_clip_high": 0.28} | OPTIONS[config]))
    # Upstream was called with advantages whose KL is of the old log-probs.
    objective = replace(objective, kl_reward=replace(objective.kl_reward, log_probs="old_log_probs"))
    scalars = gold.expected(case, "scalars")[function, config, variant]
    tokens = gold.expected(case, "tokens")[function, config, variant]
    for step in gold.steps(case):
        # The rewards were normalised with the empty rows, and the loss was made without them.
        # Those of ppo are not normalised, and it fails on such rows.
        batch = gold.batch(case, step, empty_rows=objective.advantage.estimator != "gae")
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
            gold.assert_close(found.loss * share, wanted, "f32", "loss", scale=scale)
        wanted = gold.per_token(tokens, step, "grad", "f32", batch) / divisor
        own = found.per_token.grad_T.double() * share
        gold.assert_close(own, wanted, "f32", "gradient", where=where_T)
        u_T = batch.column("policy_log_probs") - batch.column("ref_log_probs")
        cancelled = float(gold.k3_rounding(u_T).max())
        sums = divisor if config.endswith("per_token") else rows
        own = slime.metrics(found)
        for name in TRAIN:
            wanted = gold.scalar(scalars, step, f"log_sum:{name}", "f32")
            if wanted is not None and not (residue and name == "pg_loss"):
                size = scale if name == "pg_loss" else None if name == "kl_loss" else 1.0
                lost = cancelled if name == "kl_loss" else 0.0
                value = own[f"train/{name}"] * share
                gold.assert_close(value, wanted / sums, "f32", f"train/{name}", scale=size, rounding=lost)
