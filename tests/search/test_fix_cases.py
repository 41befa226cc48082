"""The fixes in their degenerate cases and on every loss that holds the KL, against loops and against autograd."""

import math
from dataclasses import replace
from itertools import product

import oracles
import pytest
import torch

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.results.errors import CannotComputeError
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.testing import toy_batch
from rolloutdoctor.trainers.options import Layer, resolve
from rolloutdoctor.trainers.releases import parse_version
from rolloutdoctor.trainers.slime.mis import MIS
from rolloutdoctor.trainers.table import TRAINERS


def objective_of(trainer: str, **options: object) -> Objective:
    spec = TRAINERS[trainer]
    return spec.objective(resolve(spec.options, parse_version(spec.newest), [Layer("test", options)], trainer=trainer))


# rejected-rows: rewards by group, and which rows are rejected (x).

CASES = {
    "nobody": ([[1.0, 0.0, 0.3], [0.2, 0.7, 0.1]], ["...", "..."]),
    "some": ([[1.0, 0.0, 0.3], [0.2, 0.7, 0.1]], ["x..", "..x"]),
    "one survivor": ([[100.0, 1.0], [0.5, 0.2]], ["x.", ".."]),
    "one survivor in each": ([[100.0, 1.0], [0.5, 0.2]], ["x.", "x."]),
    "a whole group": ([[1.0, 0.0, 0.3], [0.2, 0.7, 0.1]], ["xxx", "..."]),
    "a whole group, one survivor": ([[1.0, 0.0], [0.2, 0.7]], ["xx", ".x"]),
    "equal survivors": ([[9.0, 0.3, 0.3], [0.2, 0.7, 0.1]], ["x..", "..."]),
    "everything but one row": ([[1.0, 0.0], [0.2, 0.7]], ["x.", "xx"]),
    "everything": ([[1.0, 0.0], [0.2, 0.7]], ["xx", "xx"]),
    "unequal groups": ([[1.0, 0.0, 0.3], [0.2, 0.7]], ["x..", ".."]),
    "unequal groups, one rejected": ([[1.0, 0.0, 0.3], [0.2], [0.9]], ["...", "x", "."]),
    "unscored": ([[math.nan, 0.0, 0.3], [0.2, 0.7, math.nan]], ["...", "x.."]),
    "unscored and one survivor": ([[math.nan, 0.0, 0.3], [0.2, 0.7, 0.5]], [".x.", "..."]),
}
SETTINGS = {
    "trl group": ("trl", {}),
    "trl batch": ("trl", {"scale_rewards": "batch"}),
    "trl none": ("trl", {"scale_rewards": "none"}),
    "trl gdpo": ("trl", {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [0.5, 2.0]}),
    "rloo": ("trl-rloo", {"beta": 0.0}),
    "rloo normalised": ("trl-rloo", {"beta": 0.0, "normalize_advantages": True}),
    "slime": ("slime", {}),
    "slime mean": ("slime", {"grpo_std_normalization": False}),
    "slime whitened": ("slime", {"normalize_advantages": True}),
    "slime baseline": (
        "slime",
        {"advantage_estimator": "reinforce_plus_plus_baseline", "normalize_advantages": True},
    ),
}


def case(name: str) -> tuple[RolloutBatch, list[float], list[bool], list[int]]:
    """The batch, its scores, who votes under the fix, and the tokens of each row."""
    rewards, marks = CASES[name]
    scores = [score for group in rewards for score in group]
    live = [mark == "." for group in marks for mark in group]
    lengths = [1 + row % 3 for row in range(len(scores))]
    batch = toy_batch(rewards, mask=[[int(on)] * length for on, length in zip(live, lengths, strict=True)])
    second = [math.nan if row % 4 == 1 else float(row * row % 5) for row in range(len(scores))]
    scored = [float("nan") if math.isnan(score) else other for score, other in zip(scores, second, strict=True)]
    named = {"a": torch.tensor(scores, dtype=torch.float64), "b": torch.tensor(scored, dtype=torch.float64)}
    votes = [on and not math.isnan(score) for on, score in zip(live, scores, strict=True)]
    return replace(batch, rewards=named), scores, votes, [length * on for length, on in zip(lengths, live, strict=True)]


def looped(
    setting: str, batch: RolloutBatch, scores: list[float], votes: list[bool], lengths: list[int]
) -> list[float]:
    """Advantages under the fix, one row after another."""
    trainer, options = SETTINGS[setting]
    groups = batch.groups.index_N.tolist()
    if setting == "trl gdpo":
        parts = [values.tolist() for values in batch.rewards.values()]
        return oracles.normalized_then_summed(parts, options["reward_weights"], groups, votes, 1e-4)
    if trainer == "trl":
        scale = options.get("scale_rewards", "group")
        return oracles.advantages("grpo", scores, groups, votes, lengths, scale=scale, epsilon=1e-4, singleton="zero")
    if trainer == "trl-rloo":
        found = oracles.advantages("rloo", scores, groups, votes, lengths, singleton="zero")
        if "normalised" not in setting:
            return found
        # A row that is alone has no advantage to normalise.
        able = [vote and len(oracles.voters_of(row, groups, votes)) > 1 for row, vote in enumerate(votes)]
        known = [value for value, on in zip(found, able, strict=True) if on]
        if len(known) < 2:
            return [0.0] * len(found)
        middle, spread = oracles.mean(known), oracles.std(known)
        return [(value - middle) / (spread + 1e-4) if on else 0.0 for value, on in zip(found, able, strict=True)]
    sizes = {groups.count(group) for group in groups}
    if len(sizes) > 1:
        groups = [0] * len(groups)  # slime's one group for the whole batch
    scale = "none" if "mean" in setting or "baseline" in setting else "group"
    found = oracles.advantages("grpo", scores, groups, votes, lengths, scale=scale, singleton="zero")
    if not options.get("normalize_advantages"):
        return found
    tokens = [value for value, length in zip(found, lengths, strict=True) for _ in range(length)]
    middle = oracles.mean(tokens)
    variance = oracles.std(tokens) ** 2 if len(tokens) > 1 else 0.0
    return [(value - middle) / math.sqrt(variance + 1e-8) for value in found]


@pytest.mark.parametrize("variant", ["singleton-raw", "singleton-zero"])
@pytest.mark.parametrize(
    ("setting", "name"),
    # slime has no unscored rows
    [(setting, name) for setting, name in product(SETTINGS, CASES) if "slime" not in setting or "unscored" not in name],
)
def test_rejected_rows_in_every_degenerate_case(setting, name, variant):
    batch, scores, votes, lengths = case(name)
    trainer, options = SETTINGS[setting]
    fixed = choose(f"rejected-rows:{variant}").apply(objective_of(trainer, **options))
    if options.get("normalize_advantages") and trainer == "slime" and not any(lengths):
        with pytest.raises(CannotComputeError, match="needs a trained token"):
            evaluate(batch, fixed, dtype=torch.float64)
        return
    found = evaluate(batch, fixed, dtype=torch.float64).rows
    assert found.in_baseline_N.tolist() == votes
    wanted = looped(setting, batch, scores, votes, lengths)
    live = [length > 0 for length in lengths]
    # Whitening moves rows without a token too; nothing multiplies their advantage.
    own = [value for value, on in zip(found.advantage_N.tolist(), live, strict=True) if on]
    assert own == pytest.approx([value for value, on in zip(wanted, live, strict=True) if on], rel=1e-9, abs=1e-9)
    if "whitened" not in setting and "baseline" not in setting:
        assert found.advantage_N[~torch.tensor(live)].abs().sum() == 0


def test_rejected_rows_leaves_slimes_fallback_as_it_is():
    """Groups of equal size stay groups although their voters are not equally many."""
    batch, *_ = case("some")
    fixed = choose("rejected-rows").apply(objective_of("slime"))
    found = evaluate(batch, fixed, dtype=torch.float64).rows
    # Of 0 and 0.3 in the first group: half their distance, over its root of one half.
    assert found.advantage_N[1:3].tolist() == pytest.approx(
        [-0.15 / (0.3 * 0.5**0.5 + 1e-6), 0.15 / (0.3 * 0.5**0.5 + 1e-6)]
    )


@pytest.mark.parametrize("estimator", ["ppo", "reinforce_plus_plus"])
def test_rejected_rows_changes_nothing_where_nobody_votes(estimator):
    options = {"advantage_estimator": estimator, "normalize_advantages": True}
    mine = objective_of("slime", **options)
    batch = toy_batch([[1, 0], [0.5, 0.2]], mask=[[1, 1], [1], [1, 0], [1]], values=0.3, ref=-1.5)
    first, second = (evaluate(batch, each).rows.advantage_T for each in (mine, choose("rejected-rows").apply(mine)))
    assert torch.equal(first, second)


# zero-std: 30 tokens, of which the group without spread has 14.

LENGTHS = [8, 6, 9, 7]
DEAD, KEPT = slice(0, 14), slice(14, 30)


def factors(mine: Objective, label: str, **columns: list[int]) -> list[float]:
    """What the fix multiplies the derivative of each kept row by; those of the dead rows vanish."""
    batch = toy_batch([[1, 1], [1, 0]], lengths=LENGTHS, policy=-1.0, ref=-1.5, rollout=-1.1, per_row=columns)
    before, after = (
        evaluate(batch, each, dtype=torch.float64, per_token=True).per_token.grad_T
        for each in (mine, choose(label).apply(mine))
    )
    assert bool((before != 0).all())
    assert bool((after[DEAD] == 0).all())
    rows = (after[KEPT] / before[KEPT]).split(LENGTHS[2:])
    assert all(float(row.max() - row.min()) < 1e-12 for row in rows)
    return [float(row[0]) for row in rows]


HELPER = {"use_tis": True, "custom_tis_function_path": MIS, "tis_batch_normalize": False}
SLIME_LOSSES = {
    "grpo": {},
    "gspo": {"advantage_estimator": "gspo"},
    "cispo": {"advantage_estimator": "cispo"},
    "opsm": {"use_opsm": True},
    "tis": {"use_tis": True},
    "helper": HELPER,
}


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize("loss", SLIME_LOSSES)
def test_zero_std_on_every_loss_of_slime(loss, kl_type, unbiased, per_token):
    options = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": kl_type, "use_unbiased_kl": unbiased}
    mine = objective_of("slime", calculate_per_token_loss=per_token, **options, **SLIME_LOSSES[loss])
    # slime counts one token for each row without any.
    factor = 30 / (16 + 2) if per_token else 1
    assert factors(mine, "zero-std:loss") == pytest.approx([1, 1])
    assert factors(mine, "zero-std:renormalised") == pytest.approx([factor, factor])


def test_zero_std_and_trajectories():
    """A row of the dead group that shares a trajectory with a kept one leaves its mean."""
    mine = objective_of("slime", use_kl_loss=True, kl_loss_coef=0.1)
    shared = [0, 1, 0, 2]
    assert factors(mine, "zero-std:loss", trajectory_id=shared) == pytest.approx([1, 1])
    assert factors(mine, "zero-std:renormalised", trajectory_id=shared) == pytest.approx([17 / 9, 1])


TRL_FACTORS = {
    # loss type: with the proposed mask, and with every token count recomputed
    "grpo": (1, 1),
    "bnpo": (30 / 16, 30 / 16),
    "dr_grpo": (1, 1),
    "dapo": (1, 30 / 16),
    "cispo": (1, 30 / 16),
    "vespo": (1, 30 / 16),
    "sapo": (1, 1),
    "luspo": (1, 1),
}


@pytest.mark.parametrize(
    ("loss_type", "level", "corrected"), [*product(TRL_FACTORS, ("token", "sequence"), (False, True))]
)
def test_zero_std_on_every_loss_of_trl(loss_type, level, corrected):
    mine = objective_of(
        "trl", beta=0.1, loss_type=loss_type, importance_sampling_level=level, use_bias_correction_kl=corrected
    )
    proposed, renormalised = TRL_FACTORS[loss_type]
    assert factors(mine, "zero-std:loss") == pytest.approx([1, 1])
    assert factors(mine, "zero-std:pr5640") == pytest.approx([proposed] * 2)
    assert factors(mine, "zero-std:renormalised") == pytest.approx([renormalised] * 2)
