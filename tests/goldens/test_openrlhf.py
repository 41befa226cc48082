"""OpenRLHF's numbers, recomputed: its own functions at 3c3be6234e0c on 8 cases under 31 configurations.

The results in float64 were made with the casts to float32 taken out; those in float32 with them.
"""

import math

import pytest
import torch
from goldens.real_results import DTYPES, evaluated, results, token_advantages
from proof.claims import Bound, agree, compared, covers

from rolloutdoctor.evaluation.radii.metrics import metric_radius
from rolloutdoctor.trainers.openrlhf.trainer import TRAINER

ROUNDED = Bound(1e-9, 1e-9, "in float32 within the derived rounding radius; in float64 ill-conditioned spreads of 1e-7")
pytestmark = [compared("golden", ROUNDED)]

RESULTS = results("openrlhf")
DEFAULTS = {
    "algo.advantage.estimator": "gae",
    "algo.advantage.no_std_norm": False,
    "algo.kl.estimator": "k1",
    "algo.kl.use_loss": False,
    "actor.policy_loss_type": "ppo",
    "algo.advantage.is_correction_enable": False,
    "algo.advantage.is_correction_type": "tis",
    "train.dynamic_batch_enable": False,
}


def params():
    for (case, config), result in RESULTS.items():
        options = DEFAULTS | result.options
        marks = [covers("openrlhf", name, options[name]) for name in DEFAULTS]
        yield pytest.param(case, config, marks=marks, id=f"{case}-{config}")


@pytest.mark.slow
@pytest.mark.parametrize(("case", "config"), [*params()])
@pytest.mark.parametrize("label", DTYPES)
def test_results(case, config, label):
    result = RESULTS[case, config]
    dtype, single = DTYPES[label], label == "f32"
    own = evaluated("openrlhf", result, label)
    lost = 1e-7 * (case == "tiny_spread")
    advantage_T, radius = token_advantages(own)
    mask_T = own.batch.column("response_mask")
    wanted_T = torch.tensor(result.advantage[label], dtype=torch.float64)[mask_T]
    radius = radius[mask_T] if isinstance(radius, torch.Tensor) and radius.dim() else radius
    scale = lost * float(wanted_T.abs().max())
    agree(advantage_T[mask_T], wanted_T, dtype, "advantage", rounding=radius if single else scale)
    found, wanted = TRAINER.metrics(own), dict(result.scalars[label])
    loss = wanted.pop("loss")
    if not single:
        agree(
            own.loss,
            loss,
            dtype,
            "loss",
            scale=magnitude(own, "loss", loss),
            rounding=lost * magnitude(own, "loss", loss),
        )
    assert wanted.keys() <= found.keys(), wanted.keys() - found.keys()
    for name, value in wanted.items():
        if math.isnan(value):
            assert math.isnan(found[name]), name
            continue
        kind = TRAINER.log.kind_of(name)
        # Upstream counts in float32; and float64 itself loses something of a spread of 1e-7.
        counted = 2**-24 * abs(value) * name.endswith("clip_ratio") + lost * magnitude(own, name, value)
        rounding = float(metric_radius(own, kind, found[name])) if single else counted
        agree(found[name], value, dtype, name, scale=magnitude(own, name, value), rounding=rounding)
    if not single:
        grad_T = torch.tensor(result.grad, dtype=torch.float64)
        agree(own.per_token.grad_T, grad_T, dtype, "gradient", rounding=lost * float(grad_T.abs().max()))


def magnitude(own, name, value):
    """Terms of a loss cancel: the scale is the sum of their sizes."""
    if name.endswith("loss"):
        return max(abs(value), float(own.per_token.loss_T.abs().sum()))
    return max(abs(value), 1.0)
