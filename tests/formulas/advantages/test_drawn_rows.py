"""Values of other rows, against a loop over padded rows."""

import pytest
import torch

from rolloutdoctor.formulas.advantages import drawn_rows
from rolloutdoctor.formulas.advantages.drawn_rows import of_sources, on_every_token, sources

BEYOND = -0.25


def drawn(seed, longest=12, count=9):
    """Values of all tokens, offsets, masks with holes, and a row without a trained token."""
    draw = torch.Generator().manual_seed(seed)
    lengths_N = torch.randint(1, longest, (count,), generator=draw)
    rows = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_N.cumsum(0)])
    mask_T = torch.rand(int(rows[-1]), generator=draw) < 0.8
    mask_T[rows[3] : rows[4]] = False
    value_T = torch.randn(int(rows[-1]), generator=draw, dtype=torch.float64)
    return value_T, mask_T, rows, torch.randint(0, count, (count,), generator=draw)


def padded(value_T, rows, width):
    return [[*value_T[rows[row] : rows[row + 1]].tolist(), *[BEYOND] * width][:width] for row in range(len(rows) - 1)]


@pytest.mark.parametrize("seed", range(5))
def test_values_of_the_rows_that_were_drawn(seed):
    value_T, _, rows, source_N = drawn(seed)
    width = int(rows.diff().max())
    table = padded(value_T, rows, width)
    wanted = [x for row, source in enumerate(source_N.tolist()) for x in table[source][: int(rows.diff()[row])]]
    assert of_sources(value_T, BEYOND, source_N, rows).tolist() == wanted


@pytest.mark.parametrize("seed", range(5))
def test_masked_tokens_have_the_next_value(seed):
    value_T, mask_T, rows, _ = drawn(seed)
    wanted = []
    for row in range(len(rows) - 1):
        here, carried = [], BEYOND
        for token in reversed(range(int(rows[row]), int(rows[row + 1]))):
            carried = float(value_T[token]) if mask_T[token] else carried
            here.append(carried)
        wanted += reversed(here)
    assert on_every_token(value_T[mask_T], mask_T, rows, BEYOND).tolist() == wanted


@pytest.mark.parametrize("cells", [1, 2**8, 2**22])
@pytest.mark.parametrize("seed", range(5))
def test_rows_are_found_by_their_values(seed, cells, monkeypatch):
    monkeypatch.setattr(drawn_rows, "CELLS", cells)
    value_T, mask_T, rows, source_N = drawn(seed, longest=40)
    given_T = of_sources(value_T, BEYOND, source_N, rows)
    found_N = sources(value_T, BEYOND, given_T, mask_T, rows)
    # What no trained token tells is left as it is.
    assert of_sources(value_T, BEYOND, found_N, rows)[mask_T].tolist() == given_T[mask_T].tolist()
    assert int(found_N[3]) == 3
    long_N = (torch.tensor([int(mask_T[rows[i] : rows[i + 1]].sum()) for i in range(len(rows) - 1)]) > 2).nonzero()
    assert (found_N[long_N] == source_N[long_N]).all()


@pytest.mark.parametrize(("share", "source"), [(0.9, 0), (1.1, 1)])
def test_a_row_keeps_its_own_values_where_they_are_as_near(share, source):
    """Rounding of float32 is no draw: up to a share of 2^-20 of the largest value."""
    value_T = torch.tensor([1.0, 1.0 + share * drawn_rows.SAME, 0.0], dtype=torch.float64)
    given_T = torch.tensor([1.0 + share * drawn_rows.SAME, 1.0, 0.0], dtype=torch.float64)
    rows, mask_T = torch.arange(4), torch.ones(3, dtype=torch.bool)
    assert int(sources(value_T, 0.0, given_T, mask_T, rows)[0]) == source


def test_numbers_that_are_none_are_of_no_row():
    value_T, mask_T, rows, source_N = drawn(1)
    given_T = of_sources(value_T, BEYOND, source_N, rows)
    given_T[int(mask_T.nonzero()[0])] = torch.nan
    found_N = sources(value_T, BEYOND, given_T, mask_T, rows)
    assert int(found_N[0]) == 0


def test_nothing_trained():
    mask_T = torch.zeros(4, dtype=torch.bool)
    assert sources(torch.zeros(4), 0.0, torch.ones(4), mask_T, torch.tensor([0, 2, 4])).tolist() == [0, 1]
