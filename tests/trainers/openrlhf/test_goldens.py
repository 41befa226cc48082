"""OpenRLHF's numbers, recomputed: its own functions at 3c3be6234e0c (0.11.0) and of 0.11.2 on 8 cases.

The results in float64 were made with the casts to float32 taken out; those in float32 with them.
"""

import pytest
import torch
from goldens.real_results import DTYPES, ROUNDED, evaluated, gradient_agrees, metrics_agree, results, token_advantages
from proof.claims import agree, compared, covers

from rolloutdoctor.trainers.openrlhf.trainer import TRAINER

pytestmark = [compared("golden", ROUNDED)]

RESULTS = {"0.11.0": results("openrlhf"), "0.11.2": results("openrlhf", "0.11.2")}
DEFAULTS = {
    "algo.advantage.estimator": "gae",
    "algo.advantage.no_std_norm": False,
    "algo.kl.estimator": "k1",
    "algo.kl.use_loss": False,
    "actor.policy_loss_type": "ppo",
    "train.dynamic_batch_enable": False,
}
OF_RELEASE = {
    "0.11.0": {"algo.advantage.is_correction_enable": False, "algo.advantage.is_correction_type": "tis"},
    "0.11.2": {
        "algo.kl.unbiased_gradient": False,
        "actor.loss_agg_mode": "token-mean",
        "algo.advantage.is_correction_level": "off",
        "algo.advantage.is_correction_mode": "mask",
        "algo.advantage.is_correction_gating": "ratio",
    },
}


def params():
    for release, of_release in RESULTS.items():
        for (case, config), result in of_release.items():
            defaults = DEFAULTS | OF_RELEASE[release]
            options = defaults | result.options
            marks = [covers("openrlhf", name, options[name]) for name in defaults]
            yield pytest.param(release, case, config, marks=marks, id=f"{release}-{case}-{config}")


@pytest.mark.slow
@pytest.mark.parametrize(("release", "case", "config"), [*params()])
@pytest.mark.parametrize("label", DTYPES)
def test_results(release, case, config, label):
    result = RESULTS[release][case, config]
    dtype, single = DTYPES[label], label == "f32"
    own = evaluated(f"openrlhf@{release}", result, label)
    lost = 1e-7 * (case == "tiny_spread")
    advantage_T, radius = token_advantages(own)
    mask_T = own.batch.column("response_mask")
    wanted_T = torch.tensor(result.advantage[label], dtype=torch.float64)[mask_T]
    radius = radius[mask_T] if isinstance(radius, torch.Tensor) and radius.dim() else radius
    scale = lost * float(wanted_T.abs().max())
    agree(advantage_T[mask_T], wanted_T, dtype, "advantage", rounding=radius if single else scale)
    wanted = dict(result.scalars[label])
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
    metrics_agree(own, TRAINER, wanted, label, lost, magnitude, "clip_ratio")
    gradient_agrees(own, result, label, lost)


def magnitude(own, name, value):
    """Terms of a loss cancel: the scale is the sum of their sizes."""
    if name.endswith("loss"):
        return max(abs(value), float(own.per_token.loss_T.abs().sum()))
    return max(abs(value), 1.0)
