"""Run files of which a few bytes of the footer were changed; reading one may end in an error, never in an abort."""

import random
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.errors import RolloutDoctorError

_ROWS = 24
_TELLING = (0, 1, 0x7F, 0x80, 0xFF, 0x15, 0x16, 0x19, 0x1C, 0x2C)
"""Heads of Thrift's fields, and ends of ranges."""


def _intact(path, draw):
    lengths = [1 + row % 4 for row in range(_ROWS)]
    columns = {
        "step": np.repeat(np.arange(4), 6),
        "group_id": [f"g{row // 3}" for row in range(_ROWS)],
        "sample_id": [str(row) for row in range(_ROWS)],
        "split": ["train"] * _ROWS,
        "reward": np.arange(_ROWS) * 0.5,
        "rewards": [{"a": 1.0, "b": None}] * _ROWS,
        "response_mask": pa.array([[1] * length for length in lengths], pa.list_(pa.uint8())),
        "response_ids": pa.array([[1] * length for length in lengths], pa.list_(pa.int32())),
        "policy_log_probs": pa.array([[-0.5] * length for length in lengths], pa.list_(pa.float32())),
        "ref_log_probs": pa.array([[-0.5] * length for length in lengths], pa.list_(pa.float32())),
        "status": ["stop"] * _ROWS,
        "response": ["abc"] * _ROWS,
    }
    pq.write_table(
        pa.table(columns),
        path,
        row_group_size=12,
        write_page_index=draw.random() < 0.3,
        compression=draw.choice(["zstd", "snappy", "none"]),
        write_page_checksum=draw.random() < 0.3,
    )
    return path.read_bytes()


def _damaged(intact, draw):
    body = bytearray(intact)
    length = int.from_bytes(intact[-8:-4], "little")
    for _ in range(draw.choice([1, 1, 2, 3])):
        place = len(body) - 9 - draw.randrange(length)
        how = draw.random()
        if how < 0.5:
            body[place] = draw.randrange(256)
        elif how < 0.8:
            body[place] ^= 1 << draw.randrange(8)
        else:
            body[place] = draw.choice(_TELLING)
    return bytes(body)


def main(seed, count):
    """Read damaged files; print how many were refused and how many were read."""
    draw = random.Random(seed)
    refused = []
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "run.parquet"
        for number in range(count):
            if number % 500 == 0:
                intact = _intact(path, draw)
            path.write_bytes(_damaged(intact, draw))
            try:
                run = open_run([str(path)])
                for batch in run.batches(run.columns):
                    run.texts({batch.key: [0]})
            except RolloutDoctorError as error:
                refused.append(str(error))
    long = [words for words in refused if len(words.splitlines()) != 1]
    if long:
        raise AssertionError(long[0])
    print(len(refused), count - len(refused))
