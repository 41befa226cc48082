"""Every way that we know of in which a file can be no run at all or damaged, with the sentence that the user gets."""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from run_files import FLOATS, refusal, write

from rolloutdoctor.io.parquet.index import RowGroup
from rolloutdoctor.io.run import StepRange, open_run


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_empty_file():
    Path("run.parquet").touch()
    assert refusal() == "run.parquet: the file is empty (0 bytes): nothing was written to it"


@pytest.mark.parametrize("body", [b"x", b"PK\x03\x04 and so on", b'{"step": 0}\n'])
def test_not_parquet(body):
    Path("run.parquet").write_bytes(body)
    assert refusal() == (
        "run.parquet: not a Parquet file; give the run file, or a trainer's dump to 'rolloutdoctor export --what run'"
    )


@pytest.mark.parametrize("kept", [4, 8, 11, -1, -8, -100])
def test_truncated(kept):
    path = write(step=[0], kl=[[1.0] * 100])
    path.write_bytes(path.read_bytes()[:kept])
    assert refusal() == (
        "run.parquet: the Parquet file is truncated (it has no footer); its writer or copy did not finish, so repeat it"
    )


def test_absurd_footer_length():
    path = write(step=[0])
    body = path.read_bytes()
    path.write_bytes(body[:-8] + b"\xff\xff\xff\x7f" + b"PAR1")
    message = refusal()
    assert message.startswith("run.parquet: the footer cannot be read (Parquet file size is ")
    assert message.endswith("); the file is damaged, write or copy it again")


def test_encrypted():
    path = write(step=[0])
    path.write_bytes(path.read_bytes()[:-4] + b"PARE")
    assert refusal() == "run.parquet: the Parquet file is encrypted; write it without encryption"


def test_codec_that_pyarrow_does_not_have():
    path = write(step=[0])
    # The codec follows the column's path in the footer: snappy (1) becomes LZO (3).
    body = path.read_bytes()
    assert body.count(b"step\x15\x02") == 1
    path.write_bytes(body.replace(b"step\x15\x02", b"step\x15\x06"))
    assert refusal() == (
        "run.parquet: row group 0 uses a Parquet feature that this pyarrow does not have (While LZO compression is "
        "supported by the Parquet format in general, it is currently not supported by the C++ implementation.); "
        "write the file with plain columns and zstd or snappy"
    )


def test_damaged_row_group():
    path = write(step=[0, 1], kl=pa.array([[1.0] * 50] * 2, FLOATS), row_group_size=1)
    body = bytearray(path.read_bytes())
    column = pq.ParquetFile(path).metadata.row_group(1).column(1)
    start = column.dictionary_page_offset
    body[start : start + 6] = b"\xff" * 6
    path.write_bytes(body)
    message = refusal()
    assert message.startswith("run.parquet: row group 1 cannot be read (")
    assert message.endswith("); the file is damaged, write or copy it again")
    assert len(list(open_run(["run.parquet"]).batches(["reward"]))) == 2


def test_page_checksums_are_verified():
    path = Path("run.parquet")
    table = pa.table({"step": [0], "kl": pa.array([[float(x) for x in range(64)]], FLOATS)})
    pq.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    body = bytearray(path.read_bytes())
    # One value, 62, which nothing but the checksum protects.
    at = bytes(body).index(b"\x00\x00\x78\x42")
    body[at] ^= 1
    path.write_bytes(body)
    assert refusal().startswith("run.parquet: row group 0 cannot be read (")


@pytest.mark.parametrize(
    ("columns", "stated", "wrong"),
    [
        ({"step": [0, 0, 1]}, 0, 1),
        ({"step": [3] * 3, "split": ["train", "train", "eval"]}, 3, 3),
        ({"step": [0, 1, 1]}, 1, 0),
    ],
)
def test_a_row_of_another_step_than_the_footer_says(monkeypatch, columns, stated, wrong):
    write(**columns)
    index = (RowGroup(0, 0, 0, 3, stated, stated, frozenset({"train"})),)
    monkeypatch.setattr("rolloutdoctor.io.run.build_index", lambda files: index)
    assert refusal() == (
        f"run.parquet: the statistics in the footer contradict the rows of step {wrong}; write the file again, "
        "and leave it alone while it is read"
    )


def test_more_memory_than_there_is(monkeypatch):
    write(step=[0, 1])

    def read_row_group(*_, **__):
        raise pa.ArrowMemoryError("malloc of size 99999999999 failed")

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", read_row_group)
    assert refusal() == (
        "run.parquet: row group 0 asks for more memory than there is; "
        "write the file with smaller row groups, or again if it is damaged"
    )


def test_feature_that_pyarrow_lacks(monkeypatch):
    write(step=[0, 1])

    def read_row_group(*_, **__):
        raise pa.ArrowNotImplementedError("no such\nencoding")

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", read_row_group)
    assert refusal() == (
        "run.parquet: row group 0 uses a Parquet feature that this pyarrow does not have (no such encoding); "
        "write the file with plain columns and zstd or snappy"
    )


def test_no_rows():
    write(step=pa.array([], pa.int64()))
    assert refusal() == "run.parquet: the file has no rows; check the run that wrote it, or leave it out"


def test_permission(here):
    write(step=[0]).chmod(0)
    # Root may read anything, so become somebody else; the folders above are root's own then.
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        message = refusal()
    finally:
        if user == 0:
            os.seteuid(0)
    assert message == "run.parquet: permission denied; make the file and its directories readable"


def test_metadata_that_is_not_json():
    table = pa.table({"step": [0]}).replace_schema_metadata({b"rolloutdoctor": b"\xff{"})
    pq.write_table(table, "run.parquet")
    assert refusal().startswith("run.parquet: the metadata under 'rolloutdoctor' is not a JSON object")


@pytest.mark.parametrize("steps", [None, StepRange(0, 1)])
def test_fewer_rows_of_a_step_than_the_footer_says(monkeypatch, steps):
    write(step=[0, 1, 1], row_group_size=1)
    index = tuple(
        RowGroup(0, number, number, 1, step, step, frozenset({"train"})) for number, step in enumerate([0, 0, 1])
    )
    monkeypatch.setattr("rolloutdoctor.io.run.build_index", lambda files: index)
    wrong = 1 if steps is None else 0
    assert f"contradict the rows of step {wrong}; write the file again" in refusal(steps=steps)
