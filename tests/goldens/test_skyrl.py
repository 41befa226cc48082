"""SkyRL's numbers, recomputed: its own functions at a9564572eb8e on 8 cases under 39 configurations.

The results in float64 were made with the cast to float32 in `safe_exp_delta` taken out; those in float32 with it.
"""

import pytest
import torch
from goldens.real_results import DTYPES, evaluated, results, token_advantages
from proof.claims import Bound, agree, compared, covers

from rolloutdoctor.evaluation.radii.metrics import metric_radius
from rolloutdoctor.trainers.skyrl.trainer import TRAINER

ROUNDED = Bound(1e-9, 1e-9, "in float32 within the derived rounding radius; in float64 ill-conditioned spreads of 1e-7")
pytestmark = [compared("golden", ROUNDED)]

RESULTS = results("skyrl")
DEFAULTS = {
    "advantage_estimator": "grpo",
    "policy_loss_type": "regular",
    "loss_reduction": "token_mean",
    "kl_estimator_type": "k3",
    "cispo.cispo_anchor": "old",
    "dppo.dppo_type": "binary_tv",
}
CORRECTIONS = ("off_policy_correction.tis_ratio_type", "off_policy_correction.sequence_mask_metric")


def params():
    for (case, config), result in RESULTS.items():
        options = DEFAULTS | result.options
        marks = [covers("skyrl", name, options[name]) for name in (*DEFAULTS, *CORRECTIONS) if name in options]
        yield pytest.param(case, config, marks=marks, id=f"{case}-{config}")


@pytest.mark.slow
@pytest.mark.parametrize(("case", "config"), [*params()])
@pytest.mark.parametrize("label", DTYPES)
def test_results(case, config, label):
    result = RESULTS[case, config]
    dtype, single = DTYPES[label], label == "f32"
    own = evaluated("skyrl", result, label, **{"trainer.algorithm.max_seq_len": 17})
    lost = 1e-8 * (case == "tiny_spread")
    advantage_T, radius = token_advantages(own)
    wanted_T = torch.tensor(result.advantage[label], dtype=torch.float64)
    agree(advantage_T, wanted_T, dtype, "advantage", rounding=radius if single else 0.0)
    found, wanted = TRAINER.metrics(own), dict(result.scalars[label])
    wanted["policy/final_loss"] = wanted.pop("loss")
    assert wanted.keys() <= found.keys(), wanted.keys() - found.keys()
    for name, value in wanted.items():
        kind = TRAINER.log.kind_of(name)
        # Upstream counts in float32; and float64 itself loses something of a spread of 1e-7.
        counted = 2**-24 * abs(value) * name.endswith("clip_ratio") + lost * magnitude(own, name, value)
        rounding = float(metric_radius(own, kind, found[name])) if single else counted
        agree(found[name], value, dtype, name, scale=magnitude(own, name, value), rounding=rounding)
    if not single:
        grad_T = torch.tensor(result.grad, dtype=torch.float64)
        agree(own.per_token.grad_T, grad_T, dtype, "gradient", rounding=lost * float(grad_T.abs().max()))


def magnitude(own, name, value):
    """Terms of a loss and of a mean advantage cancel: the scale is the sum of their sizes."""
    if name.endswith("_loss"):
        return max(abs(value), float(own.per_token.loss_T.abs().sum()))
    return max(abs(value), 1.0) if "advantages" in name or name == "policy/policy_kl" else max(abs(value), 1e-3)
