"""The few numbers of a footer that are read without pyarrow are pyarrow's own, on whole files."""

import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rolloutdoctor.io.parquet.footer import DELTA_BYTE_ARRAY, read_chunks


@pytest.fixture
def path(tmp_path):
    rows = 100
    table = pa.table(
        {
            "step": np.arange(rows),
            "group_id": [f"group {row}" for row in range(rows)],
            "messages": [[{"role": "user", "content": "x" * row}] for row in range(rows)],
            "kl": [[0.5] * (row % 7) for row in range(rows)],
            "rewards": [{"a": 1.0, "b": None}] * rows,
        },
        metadata={"rolloutdoctor": "{}", "more": "y" * 300},
    )
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=7, compression="zstd", write_page_index=True)
    return tmp_path / "t.parquet"


def test_every_chunk(path):
    metadata = pq.read_metadata(path)
    groups = read_chunks(str(path))
    assert len(groups) == metadata.num_row_groups == 15
    for number, group in enumerate(groups):
        assert len(group) == metadata.num_columns
        for column, chunk in enumerate(group):
            said = metadata.row_group(number).column(column)
            assert (chunk.values, chunk.uncompressed) == (said.num_values, said.total_uncompressed_size)
            assert DELTA_BYTE_ARRAY not in chunk.encodings
        assert group[0].ends == tuple(int(step).to_bytes(8, "little") for step in (7 * number, min(7 * number + 6, 99)))
        names = sorted(f"group {row}" for row in range(7 * number, min(7 * number + 7, 100)))
        assert group[1].ends == (names[0].encode(), names[-1].encode())


def test_encodings(tmp_path):
    table = pa.table({"group_id": ["a", "ab"]})
    pq.write_table(
        table, tmp_path / "t.parquet", use_dictionary=False, column_encoding={"group_id": "DELTA_BYTE_ARRAY"}
    )
    assert DELTA_BYTE_ARRAY in read_chunks(str(tmp_path / "t.parquet"))[0][0].encodings


@pytest.mark.slow
def test_damaged_footers_are_value_errors(path, tmp_path):
    intact = path.read_bytes()
    length = int.from_bytes(intact[-8:-4], "little")
    draw = random.Random(0)
    target = tmp_path / "damaged.parquet"
    refused = 0
    for _ in range(500):
        body = bytearray(intact)
        for _ in range(draw.choice([1, 3])):
            body[len(body) - 1 - draw.randrange(length + 8)] = draw.randrange(256)
        target.write_bytes(body)
        try:
            read_chunks(str(target))
        except ValueError:
            refused += 1
    assert refused > 50
