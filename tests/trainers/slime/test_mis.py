"""slime's helper for train-inference mismatch against loops over lists, and its derivative against autograd."""

import math
from dataclasses import replace
from functools import partial
from itertools import product

import oracles
import pytest
import torch
from objectives import objective_of
from proof.claims import ONLY_DOUBLE, agree, compared, covers

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.objective.required_columns import loss_columns
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.slime import trainer as slime
from rolloutdoctor.trainers.slime.mis import MIS

MICRO = [0, 0, 1, 1, 2, 2] * 2
OPTIM = [0] * 6 + [1] * 6
LEVELS = ("token", "sequence", "geometric")
BOUNDS = {
    "tis_lower_bound": 0.7,
    "tis_upper_bound": 1.4,
    "rs_lower_bound": 0.6,
    "rs_upper_bound": 1.7,
    "rs_veto_threshold": 0.65,
}


objective = partial(
    objective_of,
    "slime@0.3.1",
    use_tis=True,
    custom_tis_function_path=MIS,
    use_kl_loss=True,
    kl_loss_coef=0.1,
    kl_loss_type="k2",
)


def batch_of(seed: int) -> RolloutBatch:
    batch = random_batch(seed, sizes=(4, 4, 4), adjacent=True, spread=0.3, dtype=torch.float64)
    entropy_T = torch.rand(batch.tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    columns = {"micro_batch_id": torch.tensor(MICRO), "optim_step_id": torch.tensor(OPTIM)}
    return replace(batch, per_row={**batch.per_row, **columns}, per_token={**batch.per_token, "entropy": entropy_T})


def bounded(log_ratio: float) -> float:
    return math.exp(oracles.clipped(log_ratio, -20.0, 20.0))


def at_level(gaps: list[float], mask: list[int], level: str) -> list[float]:
    """Ratio of every token of a row."""
    on = [gap for gap, kept in zip(gaps, mask, strict=True) if kept]
    if level == "token":
        return [bounded(gap) for gap in gaps]
    whole = sum(on) if level == "sequence" else sum(on) / max(len(on), 1)
    return [bounded(whole)] * len(gaps)


def helper(rows: list[tuple[list[float], list[float], list[int]]], rule: dict) -> tuple[list, list, dict]:
    """One micro-batch: weights and kept tokens of every row, and the metrics of every token."""
    weights, kept, metrics = [], [], {}

    def note(name: str, values: list[float]) -> None:
        metrics.setdefault(name, []).append([float(value) for value in values])

    low = 1 / rule["tis_upper_bound"] if rule["tis_lower_bound"] is None else rule["tis_lower_bound"]
    high = rule["tis_upper_bound"]
    for old, sampler, mask in rows:
        gaps = [o - q for o, q in zip(old, sampler, strict=True)]
        count = max(sum(mask), 1)
        means = [sum(x for x, on in zip(column, mask, strict=True) if on) / count for column in (old, sampler)]
        total = oracles.clipped(sum(gap for gap, on in zip(gaps, mask, strict=True) if on), -20.0, 20.0)
        squares = [bounded(gap) ** 2 for gap, on in zip(gaps, mask, strict=True) if on]
        for name, value in {
            "training_log_ppl": -means[0],
            "training_ppl": math.exp(-means[0]),
            "rollout_log_ppl": -means[1],
            "rollout_ppl": math.exp(-means[1]),
            "log_ppl_diff": means[1] - means[0],
            "log_ppl_abs_diff": abs(means[1] - means[0]),
            "ppl_ratio": math.exp(means[1] - means[0]),
            "chi2_token": sum(squares) / count - 1,
            "chi2_seq": math.exp(2 * total) - 1,
        }.items():
            note(name, [value] * len(mask))
        note("kl", [-gap for gap in gaps])
        note("k3_kl", [math.exp(gap) - gap - 1 for gap in gaps])
        if not rule["use_tis"]:
            weights.append([1.0] * len(mask))
            kept.append(mask)
            continue
        free = at_level(gaps, mask, rule["tis_level"])
        mode = rule["tis_mode"]
        note("tis_weight_before_bound", free)
        keep = list(mask)
        if mode == "truncate":
            note("tis_truncate_fraction", [ratio > high for ratio in free])
            weight = [min(ratio, high) for ratio in free]
        else:
            note(f"tis_{mode}_fraction_low", [ratio < low for ratio in free])
            note(f"tis_{mode}_fraction_high", [ratio > high for ratio in free])
            weight = [oracles.clipped(ratio, low, high) for ratio in free] if mode == "clip" else free
        if mode == "mask":
            keep = [on and oracles.kept(ratio, low, high) for on, ratio in zip(keep, free, strict=True)]
        weight = [value if on else 0.0 for value, on in zip(weight, mask, strict=True)]
        note("tis_weight_after_bound", weight)
        note("is_ratio_mean_after_tis_rs", weight)
        if rule["use_rs"]:
            bottom = low if rule["rs_lower_bound"] is None else rule["rs_lower_bound"]
            top = high if rule["rs_upper_bound"] is None else rule["rs_upper_bound"]
            ratios = at_level(gaps, mask, rule["rs_level"])
            note("rs_mask_fraction_low", [ratio < bottom for ratio in ratios])
            note("rs_mask_fraction_high", [ratio > top for ratio in ratios])
            keep = [on and oracles.kept(ratio, bottom, top) for on, ratio in zip(keep, ratios, strict=True)]
            if rule["rs_veto_threshold"] is not None:
                bad = [on and gap < math.log(rule["rs_veto_threshold"]) for on, gap in zip(mask, gaps, strict=True)]
                note("rs_catastrophic_token_fraction", bad)
                note("rs_catastrophic_seq_fraction", [any(bad)] * len(mask))
                keep = [on and not any(bad) for on in keep]
        weights.append(weight)
        kept.append([bool(on) for on in keep])
    if not rule["use_tis"]:
        return weights, kept, metrics
    masks = [mask for _, _, mask in rows]
    if rule["tis_batch_normalize"]:
        sums = [sum(weight) for weight in weights]
        if rule["tis_level"] == "token":
            factor = sum(sums) / max(sum(map(sum, masks)), 1)
        else:
            factor = sum(each / max(sum(mask), 1) for each, mask in zip(sums, masks, strict=True)) / len(rows)
        factor = factor if factor > 1e-8 else 1.0
        weights = [[value / factor for value in weight] for weight in weights]
        for mask in masks:
            note("batch_norm_factor", [factor] * len(mask))
    for weight, mask in zip(weights, masks, strict=True):
        on = [value for value, trained in zip(weight, mask, strict=True) if trained]
        note("is_ratio_mean_final", [sum(on) / max(len(on), 1)] * len(mask))
        note("is_ratio_min_final", [min(on, default=0.0)] * len(mask))
        note("is_ratio_max_final", [max(on, default=0.0)] * len(mask))
    return weights, kept, metrics


def looped(batch: RolloutBatch, rule: dict) -> tuple[list, list, dict]:
    """The same for every row of the step; metrics as lists of rows."""
    offsets = batch.rows.tolist()
    columns = [
        oracles.cut(batch.column(name).tolist(), offsets)
        for name in ("old_log_probs", "rollout_log_probs", "response_mask")
    ]
    rows = [(old, sampler, list(map(int, mask))) for old, sampler, mask in zip(*columns, strict=True)]
    weights, kept, metrics = [None] * len(rows), [None] * len(rows), {}
    for part in sorted(set(zip(OPTIM, MICRO, strict=True))):
        here = [row for row, cell in enumerate(zip(OPTIM, MICRO, strict=True)) if cell == part]
        found = helper([rows[row] for row in here], rule)
        for place, row in enumerate(here):
            weights[row], kept[row] = found[0][place], found[1][place]
            for name, values in found[2].items():
                metrics.setdefault(name, [None] * len(rows))[row] = values[place]
    return weights, kept, metrics


RULES = [
    {"tis_level": level, "tis_mode": mode, "rs_level": other, "tis_batch_normalize": level != "geometric"}
    for level, mode, other in product(LEVELS, ("truncate", "clip", "mask"), LEVELS)
]
RULES += [
    {"use_rs": False, "tis_mode": "mask", "tis_lower_bound": None},
    {"rs_lower_bound": None, "rs_upper_bound": None, "rs_veto_threshold": None, "tis_batch_normalize": False},
    {"rs_lower_bound": 30.0, "rs_upper_bound": 40.0},
    {"use_tis": False, "get_mismatch_metrics": True},
]


def marked(rule: dict) -> object:
    """A set of options as a parameter, marked with the values that it covers."""
    chosen = {"custom_tis_function_path": MIS} | {key: rule[key] for key in rule if "bound" not in key}
    marks = [covers("slime", option, value) for option, value in chosen.items()]
    return pytest.param(rule, marks=marks, id="-".join(map(str, rule.values())))


@pytest.mark.parametrize("rule", [marked(rule) for rule in RULES])
@compared("loop", ONLY_DOUBLE)
def test_weights_rejections_and_metrics(rule):
    rule = {"use_tis": True, "use_rs": True, "tis_level": "token", "tis_mode": "truncate"} | BOUNDS | rule
    rule = {"rs_level": "token", "tis_batch_normalize": True} | rule
    batch, mine = batch_of(3), objective(**rule)
    weights, kept, metrics = looped(batch, rule)
    gate_T, kept_T = (
        torch.tensor([value for row in rows for value in row], dtype=torch.float64) for rows in (weights, kept)
    )
    mask_T, kept_T = batch.column("response_mask"), kept_T.bool()
    if rule["use_tis"] and rule["use_rs"]:
        assert bool((kept_T < mask_T).any())

    leaf = batch.column("policy_log_probs").clone().requires_grad_()
    ratio_T = (leaf - batch.column("old_log_probs")).exp()
    found = evaluate(batch, mine, dtype=torch.float64, per_token=True)
    advantage_T = torch.repeat_interleave(found.rows.advantage_N, batch.rows.diff())
    policy_T = torch.maximum(-ratio_T * advantage_T, -ratio_T.clamp(0.8, 1.2) * advantage_T) * gate_T
    kl_T = 0.1 * (leaf - batch.column("ref_log_probs")) ** 2 / 2
    # Two optimizer steps of six rows; the denominators are those of the mask before rejection.
    length_N = torch.tensor([max(int(row.sum()), 1) for row in mask_T.split(batch.rows.diff().tolist())])
    weight_T = torch.repeat_interleave(1 / (length_N.double() * 12), batch.rows.diff())
    loss = (torch.where(kept_T, policy_T + kl_T, 0.0) * weight_T).sum()
    loss.backward()
    agree(found.loss, loss, torch.float64, "loss", scale=1.0)
    assert found.kl_loss == pytest.approx(float((torch.where(kept_T, kl_T, 0.0) * weight_T).sum().detach()), rel=1e-12)
    agree(found.per_token.grad_T, leaf.grad, torch.float64, "gradient")

    own = slime.metrics(found)

    def reduced(values: torch.Tensor, where_T: torch.Tensor) -> float:
        return float((torch.where(where_T, values, 0.0) * weight_T).sum().detach())

    for name, rows in metrics.items():
        wanted = reduced(torch.tensor([value for row in rows for value in row], dtype=torch.float64), mask_T)
        agree(own[f"train/mis_{name}"], wanted, torch.float64, name)
    assert {name for name in own if name.startswith("train/mis_")} == {f"train/mis_{name}" for name in metrics}
    # The other numbers of the loss are of what is left; the ratio itself is of all.
    assert own["train/entropy_loss"] == pytest.approx(reduced(batch.column("entropy"), kept_T))
    gap_T = (batch.column("old_log_probs") - batch.column("rollout_log_probs")).abs()
    assert own["train/train_rollout_logprob_abs_diff"] == pytest.approx(reduced(gap_T, kept_T))
    assert own["train/ppo_kl"] == pytest.approx(reduced(batch.column("old_log_probs") - leaf, kept_T))
    assert own["train/ois"] == pytest.approx(reduced(ratio_T, mask_T))
    assert own["train/kl_loss"] == pytest.approx(reduced(kl_T / 0.1, kept_T))


def test_normalisation_needs_the_micro_batches():
    assert "micro_batch_id" in loss_columns(objective())
    assert "micro_batch_id" not in loss_columns(objective(tis_batch_normalize=False))
    assert {"old_log_probs", "rollout_log_probs"} <= loss_columns(objective(tis_batch_normalize=False))


def test_the_file_name_that_slimes_help_writes():
    assert objective(custom_tis_function_path=slime.MIS_FILE).sampler_correction == objective().sampler_correction
    own = objective(custom_tis_function_path="my.function")
    assert "a custom function is not part of the run file" in own.unknown_loss


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tis_level": "geometric"}, "tis_batch_normalize knows no tis_level = geometric"),
        ({"tis_mode": "clip", "tis_lower_bound": 3.0}, "tis_lower_bound = 3 is not below tis_upper_bound = 2"),
        ({"rs_lower_bound": 2.0}, "rs_lower_bound = 2 is not below rs_upper_bound = 2"),
        ({"tis_upper_bound": 0.0}, "tis_upper_bound = 0 leaves no weight"),
    ],
)
def test_refused(options, message):
    with pytest.raises(UsageError, match=message):
        objective(**options)
