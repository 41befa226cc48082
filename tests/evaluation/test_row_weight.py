"""vespo's mean weight of a row: rounding decides the sign of an advantage of 0, and moves the weight by its slope."""

import math

import pytest
import torch

from rolloutdoctor.engine.configure import configure
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.evaluation.radii import row_weight
from rolloutdoctor.evaluation.radii.metrics import metric_radius
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.testing import toy_batch
from rolloutdoctor.trainers.options import Layer

NAME = "vespo/phi_seq_mean"


def radius(rewards, **options):
    made = configure(RunMetadata(), "trl", [Layer("test", {"loss_type": "vespo", "beta": 0.0, **options})])
    found = evaluate(toy_batch(rewards, lengths=2, old=-1.5, policy=-1.4, ref=-1.0), made.objective)
    return float(metric_radius(found, made.trainer.log.kind_of(NAME), made.trainer.metrics(found)[NAME]))


def weight(power, decay, log_w):
    return math.exp(decay + power * log_w - decay * math.exp(log_w))


@pytest.mark.slow
@pytest.mark.parametrize(("power", "decay"), [(2.0, 3.0), (3.0, 2.0), (0.5, 0.1), (1.0, 7.0), (0.0, 1.0)])
def test_height_and_slope_are_the_largest(power, decay):
    places = torch.linspace(-18.4, 20, 400_001, dtype=torch.float64).tolist()
    values = [weight(power, decay, place) for place in places]
    slopes = [value * abs(power - decay * math.exp(place)) for value, place in zip(values, places, strict=True)]
    # Without a power the weight is largest at w = 0.
    assert row_weight._highest(power, decay) == pytest.approx(max(values), rel=1e-6)
    assert row_weight._steepest(power, decay) == pytest.approx(max(slopes), rel=1e-6)


def test_an_advantage_of_0_has_the_weight_of_either_sign():
    """0.2 is the mean of 0.1, 0.2 and 0.3, in floating point but for an ulp."""
    # Of four rows, the weights of two differ by so much.
    either = abs(weight(2, 3, 0.2) - weight(3, 2, 0.2)) / 2
    assert either < radius([[0.1, 0.2, 0.3, 0.2]]) < 1
    assert radius([[0.1, 0.4, 0.5, 0.2]]) < 1e-5


def test_of_a_weight_without_a_largest_value_nothing_is_said():
    assert radius([[0.1, 0.4, 0.5, 0.2]], vespo_k_neg=-1.0) == math.inf
