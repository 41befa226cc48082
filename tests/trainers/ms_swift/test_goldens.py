"""ms-swift's numbers, recomputed: its own functions on 8 cases under 50 configurations.

Those of 4.5 are of 3602360a5623, whose functions 4.5.0 to 4.5.3 have. Those of 4.6.0 are stored where they are not the
same, which is dapo, cispo and fipo in several micro-batches.
"""

import pytest
import torch
from goldens.real_results import DTYPES, ROUNDED, evaluated, inputs, results
from proof.claims import agree, compared, covers

from rolloutdoctor.evaluation.radii.advantages import advantage_radius
from rolloutdoctor.evaluation.radii.metrics import metric_radius
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.trainers.ms_swift.trainer import TRAINER

pytestmark = [compared("golden", ROUNDED)]

RESULTS = {"4.5.0": results("ms_swift"), "4.6.0": results("ms_swift") | results("ms_swift", "4.6.0")}
WORDS = ("loss_type", "advantage_estimator", "scale_rewards", "importance_sampling_level")
DEFAULTS = {"loss_type": "grpo", "advantage_estimator": "grpo", "importance_sampling_level": "token"}
MODE = "rollout_importance_sampling_mode"


FLAT = ("ragged", "ties", "tiny_spread", "singletons")
"""Cases with a row whose advantage is 0 to rounding, so that the sign of the residue decides whether it is kept."""


def params():
    for release, case, config in ((release, *key) for release, found in RESULTS.items() for key in found):
        options = DEFAULTS | RESULTS[release][case, config].options
        if release == "4.6.0" and options["loss_type"] not in ("dapo", "cispo", "fipo"):
            continue
        marks = [covers("ms-swift", name, options[name]) for name in (*WORDS, MODE) if name in options]
        if "scale_rewards" not in options and options["advantage_estimator"] == "grpo":
            marks.append(covers("ms-swift", "scale_rewards", "group"))
        yield pytest.param(release, case, config, marks=marks, id=f"{release}-{case}-{config}")


def options_of(case, result):
    """Options that a case decides."""
    frame = inputs("ms_swift", case)
    micros = frame["micro"].n_unique()
    named = result.options.get("scale_rewards") == "gdpo"
    weights = {"reward_weights": frame["weights"][0].to_list()} if named else {}
    return {"gradient_accumulation_steps": micros, "max_completion_length": 9, **weights}


@pytest.mark.slow
@pytest.mark.parametrize(("release", "case", "config"), [*params()])
@pytest.mark.parametrize("label", DTYPES)
def test_results(release, case, config, label):
    result = RESULTS[release][case, config]
    masked = bool(result.options.get("overlong_filter"))
    own = evaluated(f"ms-swift@{release}", result, label, masked=masked, **options_of(case, result))
    dtype = DTYPES[label]
    single = label == "f32"
    # Each reward is divided by a deviation that may be 0 but for its residue, plus 1e-8.
    named, residue = config == "gdpo", 4 * 2**-53 / 1e-8
    rounding = advantage_radius(own).likely if single else residue * named
    size = own.rows.advantage_N.abs().max()
    advantage_N = torch.tensor(result.advantage[label], dtype=torch.float64)
    agree(own.rows.advantage_N, advantage_N, dtype, "advantage", scale=size, rounding=rounding)
    found, wanted = TRAINER.metrics(own), result.scalars[label]
    silent = wanted.keys() - found.keys()
    # Where rounding decides which rows a mask keeps, its token means are not given.
    assert not silent or (config.startswith(("off-policy", "fipo")) and case in FLAT), silent
    for name in wanted.keys() & found.keys():
        value = wanted[name]
        kind = TRAINER.log.kind_of(name)
        # Residue has a sign, and clipped tokens are counted by it.
        loose = single or (named and kind.startswith("clip"))
        radius = float(metric_radius(own, kind, found[name])) if loose else stored(name) * abs(value)
        scale = magnitude(own, name, value)
        agree(found[name], value, dtype, name, scale=scale, rounding=radius)
    if not single:
        grad_T = torch.tensor(result.grad, dtype=torch.float64)
        agree(own.per_token.grad_T, grad_T, dtype, "gradient", rounding=rounding)


def test_what_a_release_changed():
    changed = results("ms_swift", "4.6.0")
    assert {config for _, config in changed} == {
        config
        for (_, config), result in RESULTS["4.5.0"].items()
        if (DEFAULTS | result.options)["loss_type"] in ("dapo", "cispo", "fipo")
    }
    assert {case for case, _ in changed} == {"rejected", "several_rewards", "ties", "two_steps"}


def stored(name):
    """Upstream counts shares in float32, whatever the precision of the log-probs."""
    return 2**-24 if "clip" in name or name.startswith("frac") or name.endswith("keep_ratio") else 0.0


def magnitude(own, name, value):
    """Terms of a loss cancel: its scale is the sum of their sizes."""
    terms = seg.total(own.per_token.loss_T.abs(), own.batch.rows).sum()
    return max(abs(value), float(terms)) if name == "loss" else max(abs(value), 1e-3)
