"""Exact splits: lines add up, and each is what a slow loop by hand says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutdoctor.ops import ledger

NONE = np.zeros(0)


def drawn(seed, *, common=6, alone=3, kinds=2, lost=0.2, factors=True):
    """Units of some prompts of both windows and some of one."""
    draw = np.random.default_rng(seed)
    count = 120
    window = draw.integers(0, 2, count)
    prompt = np.where(
        draw.random(count) < 0.3,
        common + alone * window + draw.integers(0, alone, count),
        draw.integers(0, common, count),
    )
    window[:2], prompt[:2] = (0, 1), 0
    weight = draw.random(count)
    weight /= np.bincount(window, weight)[window]
    is_lost = (draw.random(count) < lost) & (np.arange(count) > 1)
    codes = {"one": draw.integers(0, 3, count), "other": draw.integers(0, 2, count)} if factors else {}
    return ledger.Units(window, prompt, weight, draw.normal(size=(count, kinds)), is_lost, codes)


def means(units):
    return [
        (units.weight_n[units.window_n == window][:, None] * units.value_nK[units.window_n == window]).sum(axis=0)
        for window in (0, 1)
    ]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 8), st.integers(1, 3), st.floats(0, 0.9))
def test_lines_add_up_to_the_change(seed, common, kinds, lost):
    units = drawn(seed, common=common + 1, kinds=kinds, lost=lost)
    found = ledger.split(units)
    before, after = means(units)
    assert np.abs(sum(found.lines.values()) - (after - before)).max() < 1e-9
    assert found.by_prompt.sum() == pytest.approx(found.lines[ledger.REST].sum(), abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_a_breakdown_adds_up_to_the_rest(seed):
    units = drawn(seed, lost=0.0)
    found = ledger.split(units)
    mix, within = ledger.breakdown(np.random.default_rng(seed).integers(0, 4, 120), found, units.window_n)
    assert mix + within.sum() == pytest.approx(found.lines[ledger.REST].sum(), abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_prompts_by_a_slow_loop(seed):
    units = drawn(seed, kinds=1, lost=0.0, factors=False)
    value = units.value_nK[:, 0]
    cells = {}
    for window, prompt, weight, x in zip(units.window_n, units.prompt_n, units.weight_n, value, strict=True):
        total, products = cells.get((window, prompt), (0.0, 0.0))
        cells[window, prompt] = total + weight, products + weight * x
    both = [prompt for window, prompt in cells if window == 0 and (1, prompt) in cells]
    shares = [sum(cells[window, prompt][0] for prompt in both) for window in (0, 1)]
    own = [{prompt: cells[window, prompt][0] / shares[window] for prompt in both} for window in (0, 1)]
    mean = [{prompt: cells[window, prompt][1] / cells[window, prompt][0] for prompt in both} for window in (0, 1)]
    level = [sum(own[window][prompt] * mean[window][prompt] for prompt in both) for window in (0, 1)]
    whole = [float((units.weight_n * value)[units.window_n == window].sum()) for window in (0, 1)]
    drawn_alike = sum(own[1][prompt] * mean[0][prompt] for prompt in both)
    lines = {name: float(share[0]) for name, share in ledger.split(units).lines.items()}
    assert lines[ledger.NEW] == pytest.approx(whole[1] - level[1])
    assert lines[ledger.GONE] == pytest.approx(level[0] - whole[0])
    assert lines[ledger.DRAWN] == pytest.approx(drawn_alike - level[0])
    assert lines[ledger.REST] == pytest.approx(level[1] - drawn_alike)


def test_a_factor_by_least_squares():
    """The contrast is that of a regression on classes and on dummies of prompt and window."""
    units = drawn(3, kinds=1, lost=0.0)
    units = ledger.Units(
        units.window_n, units.prompt_n, units.weight_n, units.value_nK, units.lost_n, {"one": units.factors["one"]}
    )
    found = ledger.split(units)
    w, code = found.weight_n, units.factors["one"]
    cell = units.prompt_n * 2 + units.window_n
    dummies = np.concatenate([np.eye(3)[code], np.eye(cell.max() + 1)[cell]], axis=1)
    root = np.sqrt(w)
    fitted = np.linalg.lstsq(dummies * root[:, None], units.value_nK[:, 0] * root, rcond=None)[0][:3]
    change = [
        w[(code == k) & (units.window_n == 1)].sum() - w[(code == k) & (units.window_n == 0)].sum() for k in range(3)
    ]
    assert found.lines["one"][0] == pytest.approx(float(np.dot(change, fitted)))
    assert not found.unidentified


def test_a_factor_that_no_prompt_has_in_two_classes_tells_nothing():
    window = np.repeat([0, 1], 8)
    prompt = np.tile(np.repeat([0, 1], 4), 2)
    value = np.r_[np.ones(8), np.zeros(8)][:, None]
    units = ledger.Units(window, prompt, np.full(16, 1 / 8), value, np.zeros(16, bool), {"lag": window})
    found = ledger.split(units)
    assert found.unidentified == ("lag",)
    assert found.lines["lag"][0] == pytest.approx(0)
    assert found.lines[ledger.REST][0] == pytest.approx(-1)


def test_a_lost_prompt_is_worth_what_it_was_in_the_other_window():
    window, prompt = np.repeat([0, 1], 4), np.tile([0, 0, 1, 1], 2)
    value = np.array([1.0, 1, 0, 0, 0, 0, 0, 0])[:, None]
    lost = (window == 1) & (prompt == 0)
    units = ledger.Units(window, prompt, np.full(8, 0.25), value, lost)
    lines = {name: float(share[0]) for name, share in ledger.split(units).lines.items()}
    assert lines == pytest.approx({"lost": -0.5, "new": 0, "gone": 0, "drawn": 0, "rest": 0})


def test_prompts_of_one_window_alone_are_not_compared():
    window = np.repeat([0, 1], 4)
    units = ledger.Units(window, window, np.full(8, 0.25), np.arange(8.0)[:, None], np.zeros(8, bool))
    found = ledger.split(units)
    assert not found.comparable
    assert found.lines[ledger.REST][0] == pytest.approx(4)


def test_intervals_are_the_same_each_time_and_hold_the_line():
    units = drawn(1)
    one, other = ledger.intervals(units), ledger.intervals(units)
    assert one == other
    assert all(low <= high for low, high in one.values())
    low, high = one[ledger.REST]
    assert low < ledger.split(units).lines[ledger.REST].sum() < high


def test_levels_that_jump():
    values = np.r_[np.zeros(30), np.full(30, 0.5), np.full(30, 0.2)] + np.random.default_rng(0).normal(0, 0.05, 90)
    assert sorted(ledger.jumps(values, 20, 0.05)) == pytest.approx([30, 60], abs=2)
    assert not ledger.jumps(np.random.default_rng(1).normal(0, 1, 90), 20, 1.0)
    assert not ledger.jumps(np.zeros(4), 20, 0.0)
    assert ledger.jumps(np.r_[np.zeros(5), np.ones(5)], 5, 0.0) == [5]
