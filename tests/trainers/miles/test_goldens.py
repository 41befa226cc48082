"""miles' numbers, recomputed: its own functions at 31f1ca961a94 on 9 cases under 40 configurations.

The results in float64 were made with the casts to float32 taken out; those in float32 with them.
"""

import pytest
import torch
from goldens.real_results import DTYPES, ROUNDED, evaluated, gradient_agrees, metrics_agree, results, token_advantages
from proof.claims import agree, compared, covers

from rolloutdoctor.results.errors import CannotComputeError
from rolloutdoctor.trainers.miles.trainer import TRAINER

pytestmark = [compared("golden", ROUNDED)]

RESULTS = results("miles")
SPELLINGS = next(one.spellings for one in TRAINER.options if one.name == "custom_tis_function_path")
DEFAULTS = {
    "advantage_estimator": "grpo",
    "kl_loss_type": "k1",
    "grpo_std_normalization": True,
    "rewards_normalization": True,
    "normalize_advantages": False,
    "use_unbiased_kl": False,
    "calculate_per_token_loss": False,
    "use_rollout_logprobs": False,
    "use_tis": False,
    "custom_tis_function_path": None,
    "tis_level": "token",
    "tis_mode": "truncate",
    "rs_level": "token",
    "use_opsm": False,
    "skip_actor_forward_only": False,
}


def params():
    for (case, config), result in RESULTS.items():
        options = DEFAULTS | result.options
        tis = options["custom_tis_function_path"]
        options["custom_tis_function_path"] = SPELLINGS.get(tis, tis)
        for label in DTYPES:
            marks = [covers("miles", name, options[name]) for name in DEFAULTS if not without_numbers(result, label)]
            yield pytest.param(case, config, label, marks=marks, id=f"{case}-{config}-{label}")


def without_numbers(result, label):
    """Upstream fails, or has NaN alone."""
    return result.error is not None or any(value != value for value in result.advantage[label])


@pytest.mark.slow
@pytest.mark.parametrize(("case", "config", "label"), [*params()])
def test_results(case, config, label):
    result = RESULTS[case, config]
    dtype, single = DTYPES[label], label == "f32"
    if result.error is not None:
        with pytest.raises(CannotComputeError, match="miles fails here"):
            evaluated("miles", result, label)
        return
    stated = (DEFAULTS | result.options)["advantage_estimator"]
    own = evaluated("miles", result, label, advantage_estimator=stated)
    lost = 1e-8 * (case == "tiny_spread")
    advantage_T, radius = token_advantages(own)
    wanted_T = torch.tensor(result.advantage[label], dtype=torch.float64)
    if single and bool(wanted_T.isnan().any()):
        # Upstream's variance of a spread of 1e-7 is a difference of float32 sums, and negative.
        assert case == "tiny_spread"
        assert bool(torch.as_tensor(radius).isinf().all())
        return
    agree(advantage_T, wanted_T, dtype, "advantage", rounding=radius if single else lost * wanted_T.abs().max())
    wanted = dict(result.scalars[label])
    assert wanted.pop("loss") == pytest.approx(wanted["train/loss"], rel=1e-5, abs=1e-6)
    metrics_agree(own, TRAINER, wanted, label, lost, magnitude, "clipfrac")
    gradient_agrees(own, result, label, lost)


def magnitude(own, name, value):
    """Terms of a loss and of a mean advantage cancel: the scale is the sum of their sizes."""
    if name.endswith("loss"):
        return max(abs(value), float(own.per_token.loss_T.abs().sum()))
    return max(abs(value), 1.0)
