"""Medians of sizes, found through their bins, against those of numpy."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rolloutdoctor.ops.by_step import ByStep
from rolloutdoctor.ops.gap_bins import BINS, bins_of, medians

# Below the first bin, beyond the last one, at the edges of one and between them.
SIZES = st.one_of(
    st.sampled_from([0.0, 1e-9, 0.25, 0.3125, np.nextafter(0.3125, 0), 0.375, 1.0, 2.0**10, 1e5]),
    st.floats(0.25, 0.375),
    st.floats(0, 2.0**12),
)


@given(st.lists(st.lists(SIZES, max_size=9), min_size=1, max_size=4))
def test_a_median_is_exact(steps):
    rows, size_N = ByStep.of_sizes([len(each) for each in steps]), np.array([x for each in steps for x in each])
    bin_N = bins_of(size_N)
    found = medians(size_N, bin_N, rows.histogram(bin_N, BINS), rows)
    np.testing.assert_array_equal(found, [np.median(each) if each else np.nan for each in steps])
