"""open-instruct's numbers, recomputed: its own step at e6c3044aa on 9 cases under 39 configurations.

The results in float64 were made with its casts to float32 taken out; those in float32 with them.
"""

import math
from dataclasses import replace

import pytest
import torch
from goldens.real_results import DTYPES, ROUNDED, evaluated, gradient_agrees, results
from proof.claims import agree, compared, covers

from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.evaluation.radii.advantages import advantage_radius
from rolloutdoctor.evaluation.radii.metrics import metric_radius
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.trainers.open_instruct.trainer import TRAINER

pytestmark = [compared("golden", ROUNDED)]

DEFAULTS = {
    "advantage_normalization_type": "centered",
    "loss_fn": "dapo",
    "loss_denominator": "token",
    "use_rho_correction": True,
    "use_vllm_logprobs": False,
    "load_ref_policy": True,
    "kl_estimator": 2,
    "rho_mask_sequence_level": False,
    "rho_mask_tv_divergence": False,
}
ESTIMATORS = ("k1", "k2", "k3", "k1 times the ratio")


def stored():
    """Every result; two mini-batches are an option of their case."""
    found = {}
    for (case, config), result in results("open_instruct").items():
        more = {"num_mini_batches": 2} if case == "two_steps" else {}
        found[case, config] = replace(result, options=result.options | more)
    return found


RESULTS = stored()
OF_PACKS = ("pack mean", "pack divergence, small")


def params():
    for (case, config), result in RESULTS.items():
        options = DEFAULTS | result.options
        options["loss_denominator"] = "token" if options["loss_denominator"] == "token" else "a number"
        options["kl_estimator"] = ESTIMATORS[options["kl_estimator"]]
        marks = [covers("open-instruct", name, options[name]) for name in DEFAULTS]
        yield pytest.param(case, config, marks=marks, id=f"{case}-{config}")


@pytest.mark.slow
@pytest.mark.parametrize(("case", "config"), [*params()])
@pytest.mark.parametrize("label", DTYPES)
def test_results(case, config, label):
    result = RESULTS[case, config]
    dtype, single = DTYPES[label], label == "f32"
    own = evaluated("open-instruct", result, label)
    lost = 1e-8 * (case == "tiny_spread")
    wanted_T = torch.tensor(result.advantage[label], dtype=torch.float64)
    radius = seg.expand(advantage_radius(own).likely, own.batch.rows)
    agree(
        seg.expand(own.rows.advantage_N, own.batch.rows),
        wanted_T,
        dtype,
        "advantage",
        rounding=radius if single else 0.0,
    )
    found, wanted = TRAINER.metrics(own), dict(result.scalars[label])
    size = float(own.per_token.loss_T.abs().sum())
    agree(own.loss, wanted.pop("loss"), dtype, "loss", scale=size, rounding=radius_of(own, "loss") if single else lost)
    assert wanted.keys() - found.keys() == set()
    for name, value in wanted.items():
        rounding = radius_of(own, name) if single else lost * size
        # Upstream divides shares of tokens in float32.
        rounding += 2**-22 * abs(value) * name.startswith(("policy/clipfrac", "val/rho"))
        scale = max(
            abs(value),
            size if name.startswith("loss/") else 0.0,
            float(wanted_T.abs().max()) * name.startswith("val/adv"),
        )
        agree(found[name], value, dtype, name, scale=max(scale, 1e-3), rounding=rounding)
    gradient_agrees(own, result, label, lost)


def radius_of(own, name):
    kind = "loss" if name == "loss" else TRAINER.log.kind_of(name)
    return float(metric_radius(own, kind, TRAINER.metrics(own).get(name, own.loss)))


@pytest.mark.parametrize("column", ["micro_batch_id", "rank"])
@pytest.mark.parametrize("config", OF_PACKS)
def test_means_over_packed_sequences_need_the_packs(config, column):
    """They mix responses: the same ones packed in another way have other weights."""
    own = evaluated("open-instruct", RESULTS["ragged", config], "f64")
    per_row = {name: x for name, x in own.batch.per_row.items() if name != column}
    unknown = evaluate(replace(own.batch, per_row=per_row), own.objective, dtype=torch.float64)
    assert unknown.rows is not None
    assert unknown.tokens is None
    other = {**own.batch.per_row, "micro_batch_id": torch.zeros(len(own.batch), dtype=torch.int64)}
    assert evaluate(replace(own.batch, per_row=other), own.objective, dtype=torch.float64).loss != own.loss


def test_the_logged_total_is_not_the_loss():
    """What the page says of it: policy and KL term add up to the loss, the total does not."""
    for case in ("ragged", "two_ranks", "ties"):
        scalars = RESULTS[case, "default"].scalars["f64"]
        assert math.isclose(scalars["loss/policy_avg"] + scalars["loss/kl_avg"], scalars["loss"], rel_tol=1e-9)
        assert abs(scalars["loss/total_avg"] / scalars["loss"] - 1) > 0.4, case
