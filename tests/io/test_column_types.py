"""Token columns as they are stored, and the tensors that they become."""

import gc
import subprocess
import sys
import time

import pyarrow as pa
import pytest
import torch
from run_files import FLOATS, MASK, read, write

from rolloutdoctor.io.parquet.columns import resolve
from rolloutdoctor.io.parquet.files import OpenFile


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_float_lists_of_matching_type_are_not_copied():
    values = [[0.5, 1.5], [2.5], []]
    write(step=[0, 0, 0], response_mask=pa.array([[1, 0], [1], []], MASK), kl=pa.array(values, FLOATS))
    gc.collect()
    before = pa.total_allocated_bytes()
    (batch,) = read("kl", "response_mask")
    # The values live in arrow's pool for as long as the tensor does.
    gc.collect()
    held = pa.total_allocated_bytes() - before
    assert held > 0
    del batch
    gc.collect()
    assert pa.total_allocated_bytes() <= before


def test_tensor_points_into_the_arrow_buffer(monkeypatch):
    write(
        step=[0, 0, 1],
        kl=pa.array([[0.5, 1.5], [2.5], [3.5]], FLOATS),
        response_mask=pa.array([[1, 0], [1], [0]], MASK),
    )
    tables = []
    original = OpenFile.slices

    def spy(self, *arguments, **options):
        for table in original(self, *arguments, **options):
            tables.append(table)
            yield table

    monkeypatch.setattr(OpenFile, "slices", spy)
    batches = read("kl", "response_mask")
    for name in ("kl", "response_mask"):
        buffer = tables[-1].column(name).chunk(0).values.buffers()[1]
        for batch in batches:
            values = batch.per_token[name]
            end = values.data_ptr() + values.numel() * values.element_size()
            assert buffer.address <= values.data_ptr() < end <= buffer.address + buffer.size
    assert batches[1].per_token["kl"].tolist() == [3.5]


@pytest.mark.parametrize("make", [pa.list_, pa.large_list, lambda element: pa.list_(element, 2)])
@pytest.mark.parametrize("element", [pa.float16(), pa.float32(), pa.float64(), pa.int64()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float_list_types(make, element, dtype):
    cells = [[1, 2], [3, None], [5, 6], [7, 8]]
    values = pa.array([[x if x is None else pa.scalar(float(x), pa.float64()).cast(element) for x in c] for c in cells])
    write(step=[0, 1, 1, 0], kl=values.cast(make(element)), row_group_size=3)
    batches = {batch.step: batch.per_token["kl"] for batch in read("kl", dtype=dtype)}
    expected = torch.tensor([3, torch.nan, 5, 6], dtype=dtype)
    torch.testing.assert_close(batches[1], expected, equal_nan=True)
    torch.testing.assert_close(batches[0], torch.tensor([1, 2, 7, 8], dtype=dtype))


@pytest.mark.parametrize("make", [pa.list_, pa.large_list, lambda element: pa.list_(element, 2)])
@pytest.mark.parametrize("element", [pa.bool_(), pa.uint8(), pa.int8(), pa.uint16(), pa.int64(), pa.uint64()])
def test_mask_types(make, element):
    write(step=[0, 0, 1], response_mask=pa.array([[1, 0], [0, 0], [0, 1]]).cast(make(element)))
    first, second = read("response_mask")
    assert first.per_token["response_mask"].dtype == torch.bool
    assert first.per_token["response_mask"].tolist() == [True, False, False, False]
    assert second.per_token["response_mask"].tolist() == [False, True]


def test_token_ids():
    for element, dtype in ((pa.int32(), torch.int32), (pa.int64(), torch.int64), (pa.uint32(), torch.int64)):
        write(step=[0], response_ids=pa.array([[7, 9]], pa.list_(element)), prompt_ids=[[1, 2, 3]])
        (batch,) = read("response_ids", "prompt_ids")
        assert batch.per_token["response_ids"].dtype == dtype
        assert batch.per_token["response_ids"].tolist() == [7, 9]
        assert set(batch.per_token) == {"response_ids"}


def test_lists_that_are_all_empty():
    write(step=[0, 0], response_mask=pa.array([[], []]), kl=pa.array([[], []]), response_ids=pa.array([[], []]))
    (batch,) = read("response_mask", "kl", "response_ids")
    assert batch.rows.tolist() == [0, 0, 0]
    assert batch.per_token["response_mask"].dtype == torch.bool
    assert batch.per_token["kl"].dtype == torch.float32


def test_column_that_is_null_in_all_rows_of_a_batch_is_absent_there():
    write(
        step=[0, 0, 0, 0],
        split=["train", "eval", "train", "eval"],
        response_mask=pa.array([[1, 1], [1], [0], []], MASK),
        ref_log_probs=pa.array([[0.5, 1], None, [2], None], FLOATS),
        row_group_size=1,
    )
    train, evaluation = read("response_mask", "ref_log_probs")
    assert train.per_token["ref_log_probs"].tolist() == [0.5, 1, 2]
    assert not evaluation.has("ref_log_probs")
    assert evaluation.rows.tolist() == [0, 1, 1]
    only = {batch.split: batch for batch in read("ref_log_probs")}
    assert only["eval"].rows.tolist() == [0, 0, 0]


def test_fixed_size_lists_with_null_cells():
    kl = pa.array([[1.0, 2.0], None, [3.0, 4.0]], pa.list_(pa.float32(), 2))
    write(step=[0, 1, 0], kl=kl, entropy=[[0.0, 0.0]] * 3)
    first, second = sorted(read("kl", "entropy"), key=lambda batch: batch.step)
    assert first.per_token["kl"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert not second.has("kl")


def test_many_columns_take_time_in_proportion():
    """What looks each name up among all others takes minutes here."""
    schema = pa.schema([("step", pa.int64()), *((f"extra {number}", pa.float64()) for number in range(40_000))])
    before = time.process_time()
    assert set(resolve(schema, "run.parquet")) == {"step"}
    assert time.process_time() - before < 5


@pytest.mark.slow
def test_reading_does_not_import_pandas():
    """It would take longer than a small run does."""
    rows = 6
    write(
        step=pa.array([1, 0] * 3, pa.uint64()),
        split=["train"] * 4 + ["eval"] * 2,
        response_mask=pa.array([[1, 0]] * rows, MASK),
        response_ids=pa.array([[7, 9]] * rows, pa.list_(pa.uint64())),
        kl=pa.array([[0.5, None]] * rows, pa.list_(pa.float16())),
        ref_log_probs=pa.array([[0.5, 1.5], None] * 3, FLOATS),
        prompt_ids=pa.array([[1, 2], None] * 3, pa.list_(pa.int32())),
        policy_version_min=pa.array([3, None] * 3, pa.int16()),
        reward=pa.array([1, None] * 3, pa.int32()),
        rewards=pa.array([[("format", 1.0)], [("answer", None)]] * 3, pa.map_(pa.string(), pa.float32())),
        status=["stop", None] * 3,
        group_id=["a"] * rows,
    )
    code = (
        "import sys\n"
        "from rolloutdoctor.io.run import open_run\n"
        "run = open_run(['run.parquet'])\n"
        "for batch in run.batches(run.columns):\n"
        "    print(len(batch))\n"
        "assert 'pandas' not in sys.modules\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=300)
    assert (sorted(found.stdout.split()), found.stderr) == (["1", "1", "2", "2"], "")
