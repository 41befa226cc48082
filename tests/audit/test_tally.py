import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolloutdoctor.audit.factors import factor_of
from rolloutdoctor.audit.row_tally import Rows, tally_rows
from rolloutdoctor.audit.tally import QuantityTally, add_tallies, tally_value
from rolloutdoctor.testing import toy_batch


def rows(logged, recomputed, radius=1e-6, step=3, doubted=None, lengths=4):
    values = [torch.as_tensor(x, dtype=torch.float64) for x in (logged, recomputed)]
    radius_N = torch.full_like(values[0], radius)
    doubted_N = torch.zeros(len(values[0]), dtype=torch.bool) if doubted is None else torch.tensor(doubted)
    return tally_rows(
        "advantages",
        step,
        (*values, radius_N),
        ~values[0].isnan(),
        doubted_N,
        "rows are missing",
        Rows(
            toy_batch([[0.0] * len(values[0])] if lengths == 4 else [[0.0, 0.0]] * 2, lengths=lengths), lambda row: row
        ),
    )


def test_a_value_agrees_up_to_its_radius():
    assert tally_value("loss", 1, 1.0, 1.0 + 1e-6, 2e-6, "").agree == 1
    off = tally_value("loss", 1, 1.0, 1.0 + 3e-6, 2e-6, "")
    assert (off.compared, off.agree) == (1, 0)
    assert off.worst == pytest.approx(1.5)
    assert off.first == (1, "", 1.0, 1.0 + 3e-6)


@pytest.mark.parametrize(
    ("logged", "recomputed", "agrees"),
    [
        (math.nan, math.nan, True),
        (math.inf, math.inf, True),
        (math.nan, 0.0, False),
        (0.0, math.nan, False),
        (math.inf, 1.0, False),
        (0.0, 0.0, True),
    ],
)
def test_what_is_not_finite_agrees_with_itself(logged, recomputed, agrees):
    assert tally_value("loss", 0, logged, recomputed, 0.0, "").agree == agrees
    if not math.isnan(logged):  # a null is not a logged value
        assert rows([logged], [recomputed], 0.0).agree == agrees


def test_rows_are_counted_and_the_first_that_is_off_is_named():
    found = rows([1.0, 2.0, math.nan, 5.0], [1.0, 2.5, 1.0, 4.0])
    assert (found.compared, found.agree, found.first) == (3, 1, (3, "r1", 2.0, 2.5))


def test_a_doubted_row_counts_only_where_it_agrees():
    found = rows([1.0, 2.0], [1.0, 2.5], doubted=[True, True])
    assert (found.compared, found.agree, found.not_compared, found.reason) == (1, 1, 1, "rows are missing")


@pytest.mark.parametrize(
    ("logged", "shape"),
    [
        ([2.0, 6.0], "2 times the recomputed value"),
        ([-1.0, -3.0], "-1 times the recomputed value"),
        ([0.0, 0.0], "0, and not the recomputed value"),
        ([1.5, 3.5], "the recomputed value +0.5"),
        ([2.0, 7.0], "no constant factor or offset"),
    ],
)
def test_the_shape_of_a_residual(logged, shape):
    assert rows(logged, [1.0, 3.0]).shape == shape
    one, other = rows(logged[:1], [1.0], step=1), rows(logged[1:], [3.0], step=2)
    assert (one + other).shape == shape


def test_where_a_disagreement_is_by_group_and_by_length():
    given = [1.0, 2.0, 5.0, 7.0]
    long = rows([1.0, 2.0, 15.0, 17.0], given, lengths=[2, 3, 8, 9])
    assert long.shape == "the recomputed value +10, in 1 of 2 groups, only in rows of 8 tokens or more"
    short = rows([3.0, 2.0, 5.0, 9.0], given, lengths=[2, 8, 9, 3])
    assert short.shape == "the recomputed value +2, only in rows of up to 3 tokens"
    # A longer row elsewhere agrees.
    assert (long + rows(given, given, step=4, lengths=[20, 3, 4, 5])).shape == (
        "the recomputed value +10 at step 3, in 1 of 2 groups"
    )


def test_only_some_steps_are_said_to_differ():
    total = rows([1.0], [1.0], step=1) + rows([4.0, 8.0], [1.0, 2.0], step=2)
    assert total.shape == "4 times the recomputed value at step 2"


numbers = st.floats(-100, 100)


@given(st.lists(st.tuples(numbers, numbers), min_size=3, max_size=3))
def test_tallies_add_up_in_any_order(pairs):
    parts = [rows([logged], [recomputed], step=step) for step, (logged, recomputed) in enumerate(pairs)]
    total = parts[0] + parts[1] + parts[2]
    assert parts[2] + (parts[1] + parts[0]) == total
    assert add_tallies({"a": parts[0]}, {"a": parts[1], "b": parts[2]}) == {"a": parts[0] + parts[1], "b": parts[2]}


def off_by(factor, base=(0.3, 0.7, 1.1)):
    return sum(
        (tally_value("loss", step, factor * x, x, 1e-9, "") for step, x in enumerate(base)), QuantityTally("loss")
    )


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (4, "4 times what the rows give"),
        (1 / 8, "what the rows give, divided by 8"),
        (1 / 2, "what the rows give, divided by 2"),
        (1 / math.log(2), "in bits, and not in nats"),
        (-1, "the negative of what the rows give"),
        (0, ""),
        (-2, ""),
        (1.37, ""),
        (2.5, ""),
    ],
)
def test_factors_that_have_a_name(factor, words):
    assert factor_of(off_by(factor)) == words


def in_one_step(logged, recomputed, stage="metrics", radius=1e-8):
    agreeing = tally_value(stage, 1, recomputed, recomputed, radius, "") + tally_value(stage, 2, 0.7, 0.7, radius, "")
    return agreeing + tally_value(stage, 0, logged, recomputed, radius, "")


@pytest.mark.parametrize("stage", ["kl", "metrics"])
@pytest.mark.parametrize(("factor", "words"), [(3, "3 times what the rows give"), (1.37, "")])
def test_a_factor_in_one_step(stage, factor, words):
    assert factor_of(in_one_step(factor * 0.431234567, 0.431234567, stage)) == words


def test_a_share_that_is_twice_another_is_no_factor():
    # 4 instead of 2 of 24 rows, and 21 instead of 7 of 240 tokens.
    assert factor_of(in_one_step(4 / 24, 2 / 24)) == factor_of(in_one_step(21 / 240, 7 / 240)) == ""
    # In every step it is one.
    every = tally_value("metrics", 0, 4 / 24, 2 / 24, 1e-8, "") + tally_value("metrics", 1, 6 / 24, 3 / 24, 1e-8, "")
    assert factor_of(every) == "2 times what the rows give"
    # Seen in several steps, numerators of 31, 37 and 41 are enough.
    assert factor_of(
        in_one_step(62 / 240, 31 / 240) + in_one_step(74 / 240, 37 / 240) + in_one_step(82 / 240, 41 / 240)
    )


@pytest.mark.parametrize("factor", [8, 1 / 8])
def test_a_factor_scales_what_arithmetic_lost_and_not_the_digits_of_the_log(factor):
    """A radius of 3e-4 of a value puts 8 times it 2.4e-3 off."""
    exact = [tally_value("loss", step, factor * x * 1.0002, x, 3e-4 * x, "") for step, x in enumerate((0.31, 0.74))]
    assert "8" in factor_of(exact[0] + exact[1])
    coarse = [tally_value("loss", step, factor * x * 1.002, x, 3e-3 * x, "") for step, x in enumerate((0.31, 0.74))]
    assert not factor_of(coarse[0] + coarse[1])
    digits = tally_value("loss", 0, 8.04, 1.0, 0.05 + 1e-7, "", 0.05)
    assert digits.factor_low < 8 < digits.factor_high


@pytest.mark.parametrize(("share", "is_named"), [(2**-8, True), (2**-6, False)])
def test_a_sign_is_told_by_an_interval_of_one_part_in_64(share, is_named):
    apart = (tally_value("loss", step, -x, x, share * x, "") for step, x in enumerate((0.31, 0.74)))
    assert bool(factor_of(sum(apart, QuantityTally("loss")))) is is_named


def test_a_value_that_agrees_leaves_a_sign_unproved():
    assert factor_of(in_one_step(-0.4, 0.4) + in_one_step(-0.9, 0.9)) == ""


def test_a_wide_interval_has_no_factor():
    # 0.0001 is rounded to four digits: anything between 0.5 and 1.5 of it fits.
    assert factor_of(tally_value("loss", 0, 0.0002, 0.0001, 0.00005, "")) == ""


@pytest.mark.parametrize("low", [5e-324, 1e-310, 1e300])
def test_a_factor_beyond_every_count_is_no_count(low):
    tally = QuantityTally("loss", compared=4, factor_low=low, factor_high=low)
    assert factor_of(tally) == ""
