"""Shares of clipped tokens: what rounding decides may be counted or not, and nothing else."""

import math

import pytest
import torch

from rolloutdoctor.engine.configure import configure
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.evaluation.radii.clipping import undecided
from rolloutdoctor.evaluation.radii.metrics import metric_radius
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.testing import diagnose, random_batch, toy_batch
from rolloutdoctor.trainers.options import Layer

AT = math.log(1.2)


def evaluated(trainer, batch, dtype=torch.float32, **options):
    made = configure(RunMetadata(), trainer, [Layer("test", options)])
    return evaluate(batch, made.objective, dtype=dtype), made.trainer


def clipping_batch(drift=0.5, **options):
    """Two rows of four tokens, with the ratio of the first token at a clip bound, and of the second beyond it."""
    old = [[-1.0 - AT, -1.0 - drift, -1.0, -1.0], [-1.0, -1.0, -1.0, -1.0]]
    return toy_batch([[1, 0]], lengths=4, old=old, ref=-1.2, **options)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("trainer", "name"),
    [("trl", "clip_ratio/high_mean"), ("verl", "actor/pg_clipfrac"), ("slime", "train/pg_clipfrac")],
)
def test_a_ratio_at_the_bound_is_clipped_or_not(trainer, name, dtype):
    options = {"adv_estimator": "grpo"} if trainer == "verl" else {}
    found, own = evaluated(trainer, clipping_batch(), dtype, **options)
    assert undecided(found).tolist() == [1, 0]
    radius = float(metric_radius(found, own.log.kind_of(name), own.metrics(found)[name]))
    assert 1 / 8 <= radius < 1.01 / 8
    # One token more or less is rounding, and more are not.
    for counted, agrees in ((1, True), (2, True), (4, False)):
        report = diagnose([clipping_batch()], trainer=trainer, options=options, logged={name: counted / 8})
        assert all(entry.agrees for entry in report.audit) == agrees, counted


def test_the_largest_share_of_a_row():
    found, own = evaluated("trl", clipping_batch())
    assert float(metric_radius(found, own.log.kind_of("clip_ratio/high_max"), 0.5)) == pytest.approx(0.25, rel=1e-5)


def test_an_advantage_of_0_has_either_sign():
    """0.2 is the mean of 0.1, 0.2 and 0.3, in floating point but for an ulp."""
    batch = toy_batch([[0.1, 0.2, 0.3, 0.2]], lengths=2, old=-1.5, ref=-1.0)
    found, own = evaluated("trl-rloo", batch, beta=0.0)
    assert undecided(found).tolist() == [0, 2, 0, 2]
    name = "clip_ratio/high_mean"
    # Of the two rows with a positive advantage or none, one or three may be counted.
    assert float(metric_radius(found, own.log.kind_of(name), own.metrics(found)[name])) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_nothing_is_undecided_elsewhere(level):
    batch = random_batch(1, sizes=(4,) * 20, longest=40, spread=0.3 if level == "token" else 1.0)
    found, own = evaluated("trl", batch, importance_sampling_level=level)
    assert not undecided(found).any()
    for name in ("clip_ratio/region_mean", "clip_ratio/high_max"):
        value = own.metrics(found)[name]
        assert value > 0
        assert float(metric_radius(found, own.log.kind_of(name), value)) < 1e-4


def test_on_policy_nothing_is_undecided():
    found, _ = evaluated("trl", toy_batch([[1, 0]]), epsilon=0.0)
    assert not undecided(found).any()


def test_a_probability_at_the_bound_is_dropped_or_not():
    """It rose by 0.2 to rounding, from 0.3 to 0.5; another by 0.1."""
    policy = [[math.log(0.5), math.log(0.4)], [math.log(0.5), math.log(0.4)]]
    sampler = [[math.log(0.3), math.log(0.3)], [math.log(0.3), math.log(0.3)]]
    batch = toy_batch([[1, 0]], lengths=[2, 2], policy=policy, rollout=sampler)
    found, own = evaluated("prime-rl", batch, torch.float64)
    assert undecided(found).tolist() == [1, 1]
    name = "is_masked/mean"
    radius = float(metric_radius(found, own.log.kind_of(name), own.metrics(found)[name]))
    assert radius == pytest.approx(0.5, rel=1e-5)
    # One of two terms of the same size, of advantage 0.5 and ratio 5/3.
    assert float(metric_radius(found, "loss", found.loss)) >= 0.5 * 5 / 3 / 4
