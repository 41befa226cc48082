"""Counts of true values against slices added up one by one."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.counting import count


def one_by_one(values, cuts):
    return [int(values[start:stop].sum()) for start, stop in pairwise(cuts)]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 64, 1000, 2039, 2040, 2041, 4097, 30_000])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("runs", [1, 3, 200])
def test_counts_of_runs(size, share, runs):
    draw = np.random.default_rng(size + runs)
    values = draw.random(size) < share
    cuts = np.concatenate([[0], np.sort(draw.integers(0, size + 1, runs))])
    assert count(values, cuts).tolist() == one_by_one(values, cuts)


@pytest.mark.parametrize("first", range(8))
@pytest.mark.parametrize("last", range(8))
def test_cuts_at_every_place_of_a_word(first, last):
    values = np.random.default_rng(8 * first + last).random(40) < 0.5
    cuts = np.array([0, first, 8 + last, 16 + last, 16 + last, 40])
    assert count(values, cuts).tolist() == one_by_one(values, cuts)


def test_values_anywhere_in_memory_and_beyond_the_last_cut():
    values = np.random.default_rng(0).random(5000) < 0.5
    cuts = np.array([0, 77, 2500, 4321])
    wanted = one_by_one(values, cuts)
    for shift in range(1, 8):
        moved = np.concatenate([np.ones(shift, dtype=bool), values])[shift:]
        assert count(moved, cuts).tolist() == wanted
    apart = np.repeat(values, 2)[::2]
    assert not apart.flags.c_contiguous
    assert count(apart, cuts).tolist() == wanted


@pytest.mark.parametrize("rows", [1, 40, 512])
def test_many_long_runs_are_counted_by_the_words(rows, monkeypatch):
    mask_T = torch.rand(40_000, generator=torch.Generator().manual_seed(rows)) < 0.7
    offsets = torch.linspace(0, len(mask_T), rows + 1).long()
    by_words = seg.total(mask_T, offsets)
    monkeypatch.setattr(seg, "count", None)  # what would fail below: fewer values are added up one by one
    monkeypatch.setattr(seg, "_MANY", 10**9)
    assert torch.equal(by_words, seg.total(mask_T, offsets))
    monkeypatch.setattr(seg, "_MANY", 0)
    with pytest.raises(TypeError, match="not callable"):
        seg.total(mask_T, offsets)
