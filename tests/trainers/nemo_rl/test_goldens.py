"""NeMo-RL's numbers, recomputed: its own functions of 7ea279abfbeb on eight steps, in float32 and float64."""

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from goldens.nemo_rl_cases import ESTIMATORS, LOSSES, SIZES, STORED, case, folded
from proof.claims import Bound, agree, compared, covers

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import Evaluation, evaluate, evaluate_rows
from rolloutdoctor.evaluation.radii.advantages import advantage_radius, token_advantage_radius
from rolloutdoctor.evaluation.radii.metrics import metric_radius
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.trainers.nemo_rl.trainer import TRAINER
from rolloutdoctor.trainers.options import Layer, resolve

DTYPES = {"f32": torch.float32, "f64": torch.float64}
SINGLE = Bound(
    1e-6,
    1e-9,
    "in float32 on top of it the rounding radius; upstream keeps the factor n / (n - 1) of a variance in float32 in "
    "float64 too, and takes the variance in one pass: siblings that are equal to rounding are left out",
)
pytestmark = [compared("golden", SINGLE)]

AFTER = (0, 7, 1)
"""Code after the release: with weights of gdpo."""


@cache
def stored():
    """Every stored array, by key, and the names of each configuration's metrics."""
    with np.load(STORED) as data:
        keys, sizes = data["keys"].tolist(), data["sizes"]
        found, names = {}, dict(line.split("=") for line in data["metrics"].tolist())
        for precision, values in (("f32", data["single"]), ("f64", data["double"])):
            own = [place for place, key in enumerate(keys) if key.startswith(precision)]
            parts = np.split(values.astype(np.float64), sizes[own].cumsum()[:-1])
            found |= {keys[place]: torch.from_numpy(part) for place, part in zip(own, parts, strict=True)}
        return found, {label: names[label].split(",") for label in names}


@cache
def batch_of(name):
    step = case(name)
    token = step["token"]
    rows = torch.cat([torch.zeros(1, dtype=torch.int64), torch.full((len(token),), token.shape[1]).cumsum(0)])
    trained = token & step["kept"][:, None]
    columns = ("policy_log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs")
    return RolloutBatch(
        step=0,
        rows=rows,
        groups=Groups.of(step["group"]),
        per_row={"reward": step["reward"], "optim_step_id": step["optim"], "micro_batch_id": step["micro"]},
        rewards={key: step[f"reward/{key}"] for key in "ba"},
        per_token={
            **{column: step[column].flatten() for column in columns},
            "response_mask": trained.flatten(),
            "response_mask_pre": token.flatten(),
        },
        group_ids=[str(group) for group in range(len(SIZES[name]))],
        sample_ids=list(range(len(token))),
    )


def objective_of(options, version=(0, 7, 0)):
    return TRAINER.objective(resolve(TRAINER.options, version, [Layer("test", options)], trainer="nemo-rl"))


def estimator_options(options):
    named = {f"grpo.adv_estimator.{name}": value for name, value in options.items() if name not in ("clip", "kl")}
    low, high = options.get("clip", (None, None))
    named |= {"grpo.advantage_clip_low": low, "grpo.advantage_clip_high": high}
    if "kl" in options:
        named |= {"loss_fn.use_kl_in_reward": True, "loss_fn.reference_policy_kl_type": options["kl"]}
        named["loss_fn.reference_policy_kl_penalty"] = 0.1
    return named


def marked(table):
    """Configurations as parameters, with the options that they cover."""
    found = []
    for label, options in table.items():
        marks = [
            covers("nemo-rl", f"grpo.adv_estimator.{name}", value) for name, value in options.items() if name == "name"
        ]
        if not marks and table is ESTIMATORS:
            marks = [covers("nemo-rl", "grpo.adv_estimator.name", "grpo")]
        if table is ESTIMATORS:
            flags = {"use_leave_one_out_baseline": True, "normalize_rewards": True}
            marks += [
                covers("nemo-rl", f"grpo.adv_estimator.{name}", options.get(name, value))
                for name, value in flags.items()
            ]
        else:
            named = {"reference_policy_kl_type": "k3", **options}
            words = {name: value for name, value in named.items() if isinstance(value, str | bool)}
            marks += [covers("nemo-rl", f"loss_fn.{name}", value) for name, value in words.items()]
        found.append(pytest.param(label, marks=marks, id=label))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("label", marked(ESTIMATORS))
def test_advantages(label):
    for name, precision in product(SIZES, DTYPES):
        check_advantages(label, name, precision)


DECIDED = 0.01
"""Radius of an advantage from which on rounding decides what it is divided by."""


def check_advantages(label, name, precision):
    batch, dtype = batch_of(name), DTYPES[precision]
    mine = objective_of(estimator_options(ESTIMATORS[label]), AFTER)
    if precision == "f64":
        mine = replace(mine, advantage=replace(mine.advantage, single=False))
    found = Evaluation(batch, mine, evaluate_rows(batch, mine, dtype), None, dtype)
    own_T, radius = found.rows.advantage_T, None
    if own_T is None:
        own_T = torch.repeat_interleave(found.rows.advantage_N, batch.rows.diff())
        radius = advantage_radius(found).likely
    else:
        radius = token_advantage_radius(found).likely.expand(len(batch))
    trained = batch.column("response_mask").reshape(len(batch), -1)
    own = folded(own_T.reshape(trained.shape), trained)
    lost = radius * trained.sum(1)
    if precision == "f64":
        # Rounding of float64, and that of a variance's factor, a float32 number upstream.
        lost = lost * 2**-29 + (2**-24 * own.abs().amax(1) if mine.advantage.one_pass else 0.0)
    # Where siblings are equal to float32 rounding, the bound is that of a choice, and says nothing of float64.
    known = ((radius < DECIDED) | (precision == "f32"))[:, None].expand(own.shape)
    wanted = stored()[0][f"{precision}/{name}/advantage/{label}"].reshape(own.shape)
    agree(own, wanted, dtype, "advantages", rounding=lost[:, None].expand(own.shape).nan_to_num(0.0), where=known)


def test_most_advantages_are_known():
    """Rows of equal siblings are the exception, and those of spreads of 1e-7."""
    unknown = {}
    for name in SIZES:
        batch, mine = batch_of(name), objective_of({})
        radius = advantage_radius(Evaluation(batch, mine, evaluate_rows(batch, mine), None)).likely
        unknown[name] = int((radius >= DECIDED).sum())
    assert {name for name, rows in unknown.items() if rows} == {"ties", "tiny"}


@pytest.mark.slow
@pytest.mark.parametrize("label", marked(LOSSES))
def test_losses(label):
    for name, precision in product(SIZES, DTYPES):
        check_losses(label, name, precision)


def check_losses(label, name, precision):
    batch, dtype = batch_of(name), DTYPES[precision]
    options = {f"loss_fn.{option}": value for option, value in LOSSES[label].items()}
    mine = objective_of({**options, "grpo.adv_estimator.normalize_rewards": False})
    found = evaluate(batch, mine, dtype=dtype, per_token=True)
    arrays, names = stored()
    trained = batch.column("response_mask").reshape(len(batch), -1)
    own = folded(found.per_token.grad_T.reshape(trained.shape), trained)
    # A token's term moves with its advantage.
    moved = advantage_radius(found).likely * found.tokens.policy_N.abs() / found.rows.advantage_N.abs().clamp(min=1e-30)
    moved = moved * found.tokens.policy_weight_N * (1 if precision == "f32" else 2**-29)
    agree(
        own,
        arrays[f"{precision}/{name}/gradient/{label}"].reshape(own.shape),
        dtype,
        "gradient",
        rounding=moved[:, None].expand(own.shape).clone(),
    )
    wanted = dict(zip(names[label], arrays[f"{precision}/{name}/metrics/{label}"].tolist(), strict=True))
    total = wanted.pop("total")
    size = float(found.per_token.loss_T.abs().sum())
    agree(found.loss, total, dtype, "loss", scale=size, rounding=float(moved.sum()))
    logged = TRAINER.metrics(found)
    for metric, value in wanted.items():
        metric = f"train/{metric}"
        if metric == "train/kl_penalty" and mine.kl_loss is None:
            assert value == 0
        elif metric == "train/sampling_importance_ratio" and metric not in logged:
            assert LOSSES[label] == {"token_level_loss": False}  # of tokens or of rows: nothing says
        elif value in (float("inf"), float("-inf")):
            assert logged[metric] == value
        else:
            radius = metric_radius(found, TRAINER.log.kind_of(metric), value).likely
            is_single = precision == "f32" or metric == "train/is_oob_ratio"  # a float32 number upstream
            rounding = float(radius) * (1 if is_single else 2**-29)
            agree(logged[metric], value, dtype, "metrics", scale=max(abs(value), 1e-9), rounding=rounding)
