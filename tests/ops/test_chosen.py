"""Chosen places against a mask, however they lie."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolloutdoctor.ops import chosen as module
from rolloutdoctor.ops.chosen import Chosen
from rolloutdoctor.ops.segments import Runs

MASKS = st.lists(st.tuples(st.booleans(), st.integers(0, 200)), max_size=8)


def masked(stretches):
    return torch.tensor([here for here, count in stretches for _ in range(count)], dtype=torch.bool)


@given(MASKS)
def test_by_mask(stretches):
    mask_T = masked(stretches)
    x_T = torch.arange(len(mask_T), dtype=torch.float32)
    chosen = Chosen(mask_T)
    assert chosen.pick(x_T).tolist() == x_T[mask_T].tolist()
    assert chosen.pick(mask_T).all()
    assert chosen.fill_(x_T.clone(), -1.0).tolist() == torch.where(mask_T, -1.0, x_T).tolist()


@given(MASKS)
def test_by_runs(stretches):
    lengths = [count for _, count in stretches]
    runs = Runs(torch.tensor([0, *lengths]).cumsum(0))
    here_R = torch.tensor([here for here, _ in stretches], dtype=torch.bool)
    mask_T = masked(stretches)
    x_T = torch.arange(len(mask_T), dtype=torch.float64)
    chosen = Chosen(here_R, runs)
    assert chosen.pick(x_T).tolist() == x_T[mask_T].tolist()
    assert chosen.fill_(x_T.clone(), -1.0).tolist() == torch.where(mask_T, -1.0, x_T).tolist()
    assert runs.some(here_R).offsets.tolist() == torch.tensor([0, *torch.tensor(lengths)[here_R]]).cumsum(0).tolist()


@pytest.mark.parametrize(("stretch", "spans"), [(module.LEAST_SPAN, True), (1, False)])
def test_only_long_stretches_are_copied_as_such(stretch, spans):
    chosen = Chosen(masked([(True, stretch), (False, stretch)] * 10))
    assert (chosen._spans is not None) is spans


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_places_are_counted_by_run(lengths, data):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    places = sorted(data.draw(st.sets(st.integers(0, max(0, sum(lengths) - 1))))) if sum(lengths) else []
    found = Runs(offsets).count(torch.tensor(places, dtype=torch.int64))
    cuts = offsets.tolist()
    assert found.tolist() == [sum(a <= place < b for place in places) for a, b in pairwise(cuts)]
    assert found.dtype == torch.float64


def test_one_stretch_is_not_copied():
    x_T = torch.arange(1000.0)
    found = Chosen(masked([(False, 100), (True, 900)])).pick(x_T)
    assert found.data_ptr() == x_T[100:].data_ptr()
