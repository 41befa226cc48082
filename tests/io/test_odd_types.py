"""Every canonical column in every type that Arrow has and the contract has not: read, or refused in one sentence."""

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzz.values import odd_types

from rolloutdoctor.data.schema import COLUMNS
from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.errors import RolloutDoctorError

ROWS = 4
TYPES = len(odd_types(random.Random(0), ROWS))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(TYPES))
def test_a_column_of_an_odd_type(tmp_path, monkeypatch, number):
    monkeypatch.chdir(tmp_path)
    refused, read = [], 0
    for column in COLUMNS:
        cells = odd_types(random.Random(number), ROWS)[number]()
        others = {} if column.name == "step" else {"step": pa.array([0, 0, 1, 1])}
        try:
            pq.write_table(pa.table({**others, column.name: cells}), "run.parquet")
        except (pa.ArrowException, ValueError):
            pytest.skip(f"Parquet has no place for {cells.type}")
        try:
            run = open_run(["run.parquet"])
            assert sum(len(batch) for batch in run.batches(run.columns)) == ROWS
            read += 1
        except RolloutDoctorError as error:
            refused.append(str(error))
    assert read + len(refused) == len(COLUMNS)
    assert not [words for words in refused if "\n" in words or not words.startswith("run.parquet: ")]
