"""The id that stands for an image in a prompt: a run of 64 or more of it between other ids."""

import pyarrow as pa
import pytest

from rolloutdoctor.io.parquet.hashes import PLACEHOLDERS, placeholders

RUN = [9] * PLACEHOLDERS


@pytest.mark.parametrize(
    ("prompts", "found"),
    [
        ([], []),
        ([[], []], [-1, -1]),
        ([[], [1, *RUN, 2], []], [-1, 9, -1]),
        ([[1, *RUN[1:], 2]], [-1]),
        # Padding, and a run that two prompts share.
        ([RUN, [*RUN, 1], [1, *RUN]], [-1, -1, -1]),
        ([[1, *RUN, *([7] * PLACEHOLDERS), 2]], [9]),
    ],
)
def test_runs_between_other_ids(prompts, found):
    column = pa.chunked_array([pa.array(prompts, type=pa.list_(pa.int64()))])
    assert placeholders(column, None).tolist() == found
