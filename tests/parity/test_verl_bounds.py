"""What verl's rollout correction takes for statistics and bounds, and what it makes of them, over any values."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rolloutdoctor.formulas.corrections.importance import importance_weights
from rolloutdoctor.formulas.corrections.masked import LogRatios
from rolloutdoctor.formulas.corrections.rejection import STATISTICS, kept_tokens
from rolloutdoctor.objective.corrections import ImportanceWeights
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers.verl.correction import rejection_rules, weight_bounds

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")

DRIFT = torch.tensor([[0.0, 0.3, -0.4, 2.0], [-3.0, 0.01, -0.02, 0.0], [0.6, -25.0, 0.0, 0.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 0, 0]])

NUMBERS = ["0", "0.0", "-1", "0.5", "2", "1", "1.5", "30", "1e-3", "1e400", "1e-400", "inf", "-inf", "nan", "1_0"]
TEXTS = ["", " ", "_", "a", "true", "None", "0x1", "٣", "[2]", "1,5", "2;3", "1e", "--1"]
part = st.one_of(st.sampled_from(NUMBERS), st.floats(1e-3, 40).map(repr), st.sampled_from(TEXTS))
bound = st.one_of(
    part,
    st.tuples(part, part).map("_".join),
    st.tuples(part, part, part).map("_".join),
    st.tuples(st.sampled_from(["", " "]), part).map("".join),
    st.text("0123456789._,-+e nai", max_size=8),
)
value = st.one_of(
    bound,
    st.lists(bound, max_size=4).map(",".join),
    st.integers(-3, 40),
    st.floats(),
    st.booleans(),
    st.none(),
    st.just(10**400),
    st.lists(st.floats(0.1, 5), max_size=3),
    st.dictionaries(st.sampled_from(["upper", "lower"]), st.floats(0.1, 5), max_size=2),
)
name = st.one_of(
    st.sampled_from(STATISTICS), st.sampled_from(["seq_max_k1", "token", "", " ", "Token_k1", "k1", "geo"])
)
names = st.one_of(
    st.sampled_from(STATISTICS),
    st.lists(st.sampled_from(STATISTICS), min_size=1, max_size=3).map(" ,".join),
    st.lists(name, max_size=4).map(", ".join),
)


def packed() -> LogRatios:
    return LogRatios(DRIFT.reshape(-1), MASK.reshape(-1) == 1, torch.tensor([0, 4, 8, 12]))


@pytest.mark.slow
@given(names=names, value=value)
@settings(max_examples=600, deadline=None)
def test_rejection(names, value):
    try:
        mask, _ = helper.compute_rollout_rejection_mask(DRIFT, MASK, names, value)
    except (ValueError, TypeError, ZeroDivisionError):
        with pytest.raises(UsageError, match="rollout_rs"):
            rejection_rules(names, value, "rollout_rs")
        return
    rules = rejection_rules(names, value, "rollout_rs")
    chosen = [rule.statistic for rule in rules]
    specs = helper._parse_rollout_rs_thresholds(chosen, value)
    assert list(specs) == chosen
    for rule in rules:
        lower, upper = specs[rule.statistic]["lower"], specs[rule.statistic]["upper"]
        wanted = (lower, upper) if lower is None else (math.log(lower), math.log(upper))
        assert repr((rule.low, rule.high)) == repr(wanted)
    assert torch.equal(kept_tokens(packed(), rules), mask.reshape(-1) == 1)


@pytest.mark.slow
@given(value=value)
@example("1_nan")
@settings(max_examples=600, deadline=None)
def test_weights(value):
    try:
        upper, lower = helper._parse_rollout_is_threshold(value)
    except (ValueError, TypeError, OverflowError):
        with pytest.raises(UsageError, match="rollout_is_threshold"):
            weight_bounds(value, "rollout_is_threshold")
        return
    found = weight_bounds(value, "rollout_is_threshold")
    assert repr(found) == repr((lower, upper))
    try:
        weights, _ = helper.compute_rollout_correction_weights(DRIFT, MASK, "token", value)
    except ZeroDivisionError:
        return  # every weight is 0, which `corrections` refuses
    own = importance_weights(packed(), ImportanceWeights(level="token", low=found[0], high=found[1]))
    torch.testing.assert_close(own.value_T, weights.reshape(-1), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("names", "value"),
    [("token_k1", 2), ("token_k1,seq_max_k3", "0.5_2,0.1"), ("seq_mean_k2, seq_mean_k2", "3"), ("token_k1", "2_inf")],
)
def test_some_are_taken(names, value):
    """So that the property above is about more than refusals."""
    mask, _ = helper.compute_rollout_rejection_mask(DRIFT, MASK, names, value)
    assert torch.equal(kept_tokens(packed(), rejection_rules(names, value, "rollout_rs")), mask.reshape(-1) == 1)
