"""Files of a few kilobytes that declare more than any machine holds: one sentence, and nothing is decoded."""

import resource
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.metrics import read_metrics
from rolloutdoctor.io.parquet import size_guard
from rolloutdoctor.io.parquet.files import check_size, read_footer
from rolloutdoctor.io.parquet.footer import read_chunks
from rolloutdoctor.io.parquet.pages import check_chunk
from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.errors import InputError

ROWS = 800_000


def one_text_for_all(rows=ROWS, size=2**20):
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array(["x" * size]))


def written(path, columns, **options):
    table = pa.table(columns)
    pq.write_table(
        table, path, compression="zstd", row_group_size=len(table), dictionary_pagesize_limit=2**24, **options
    )
    assert path.stat().st_size < 50_000
    return path


def numbers(rows=ROWS):
    return {"step": np.ones(rows, np.int64), "reward": np.zeros(rows)}


@pytest.mark.parametrize("column", ["group_id", "sample_id", "status"])
def test_one_long_text_in_every_row(tmp_path, column):
    path = written(tmp_path / "run.parquet", numbers() | {column: one_text_for_all()}, store_schema=False)
    with pytest.raises(
        InputError, match=r"run\.parquet: the file declares up to 8\d\d GB of data in \d+\.?\d* KB \(limit 1000x\)"
    ):
        open_run([str(path)])


def test_a_text_that_nobody_reads_does_not_matter(tmp_path):
    path = written(tmp_path / "run.parquet", numbers() | {"prompt": one_text_for_all()}, store_schema=False)
    assert open_run([str(path)]).rows == ROWS
    source = Source.of(str(path))
    with pytest.raises(InputError, match="the file declares up to"):
        check_size(source, read_footer(source, None).footer, ["prompt"], [0])
    with read_footer(source, None).opened() as opened, pytest.raises(InputError, match="the file declares up to"):
        opened.read(0, ["prompt"])


@pytest.mark.slow
def test_a_list_that_repeats_one_number(tmp_path, monkeypatch):
    monkeypatch.setattr(size_guard, "LARGEST_FREE", 2**20)
    lists = pa.LargeListArray.from_arrays(pa.array([0, 5_000_000]), pa.array(np.zeros(5_000_000, np.float32)))
    columns = {"step": [1], "group_id": ["a"], "reward": [0.0], "policy_log_probs": lists}
    path = written(tmp_path / "run.parquet", columns)
    with pytest.raises(InputError, match="the file declares up to 20 MB of data in 1"):
        open_run([str(path)])


def said_otherwise(path, number, other):
    """Write another number where the file says this one, as a varint of as many bytes."""
    old, new = (bytes(_varint(2 * each)) for each in (number, other))
    new = bytes([*(byte | 0x80 for byte in new), *[0x80] * (len(old) - len(new) - 1), 0])
    new = new if len(new) == len(old) else bytes(_varint(2 * other))
    raw = path.read_bytes()
    length = int.from_bytes(raw[-8:-4], "little")
    footer = raw[-8 - length :]
    assert old in footer
    path.write_bytes(raw[: -8 - length] + footer.replace(old, new))


def _varint(number):
    while number > 0x7F:
        yield number & 0x7F | 0x80
        number >>= 7
    yield number


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [False, True])
def test_pages_with_more_values_than_the_footer_says(tmp_path, version, dictionary):
    count = 5_000_000
    lists = pa.LargeListArray.from_arrays(pa.array([0, 1, count]), pa.array(np.zeros(count, np.float32)))
    columns = {"step": [1, 1], "group_id": ["a", "a"], "reward": [0.0, 1.0], "policy_log_probs": lists}
    one_page = {"data_page_size": 2**30, "write_batch_size": 2**25, "data_page_version": version}
    path = written(tmp_path / "run.parquet", columns, use_dictionary=dictionary, **one_page)
    assert open_run([str(path)]).rows == 2
    said_otherwise(path, count, 2)
    with pytest.raises(
        InputError, match=r"row group 0 cannot be read \(column policy_log_probs.*: a page declares more values than"
    ):
        list(open_run([str(path)]).batches(["policy_log_probs"]))


def test_a_page_with_more_bytes_than_its_column(tmp_path):
    path = tmp_path / "run.parquet"
    pq.write_table(pa.table(numbers(500)), path, use_dictionary=False)
    raw = path.read_bytes()
    assert raw.startswith(b"PAR1\x15\x00\x15\xce\x3e\x15")
    path.write_bytes(raw[:7] + b"\xfe\xff\xff\xff\x0f" + raw[9:])
    with pytest.raises(
        InputError, match=r"row group 0 cannot be read \(column step: a page declares more bytes than its column"
    ):
        list(open_run([str(path)]).batches(["policy_log_probs"]))


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("dictionary", [False, True])
def test_every_page_of_sound_files_is_found(tmp_path, version, checksum, dictionary):
    draw = np.random.default_rng(0)
    table = pa.table(
        {
            "text": [f"text {number}" for number in draw.integers(0, 900, 3000)],
            "long": ["x" * 5000 + str(number) for number in draw.integers(0, 9, 3000)],
            "lists": pa.array([list(range(number)) for number in draw.integers(0, 9, 3000)], pa.list_(pa.int32())),
            "nulls": pa.array([None if number % 3 else 1.5 for number in range(3000)]),
        }
    )
    path = tmp_path / "t.parquet"
    small = {"data_page_size": 2000, "write_batch_size": 50, "dictionary_pagesize_limit": 4000, "row_group_size": 1100}
    more = {"data_page_version": version, "write_page_checksum": checksum, "use_dictionary": dictionary}
    pq.write_table(table, path, **small, **more)
    with pa.memory_map(str(path)) as file:
        for chunk in (chunk for group in read_chunks(str(path)) for chunk in group):
            check_chunk(file, chunk)
            with pytest.raises(ValueError, match="more values"):
                check_chunk(file, chunk._replace(values=chunk.values - 1))
            with pytest.raises(ValueError, match="more bytes"):
                check_chunk(file, chunk._replace(uncompressed=9))


def test_metrics(tmp_path):
    columns = {"step": np.ones(ROWS, np.int64), "name": one_text_for_all(), "value": np.zeros(ROWS)}
    path = written(tmp_path / "run.metrics.parquet", columns, store_schema=False)
    with pytest.raises(InputError, match=r"run\.metrics\.parquet: the file declares up to"):
        read_metrics([Source.of(str(path))])


def test_many_short_texts_are_counted_and_read(tmp_path, monkeypatch):
    """What could be too much by the footer alone is added up, and it is not."""
    monkeypatch.setattr(size_guard, "LARGEST_FREE", 2**22)
    monkeypatch.setattr(size_guard, "LARGEST_RATIO", 10)
    opened = []
    reading = pq.ParquetFile.iter_batches
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *a, **k: opened.append(k["columns"]) or reading(*a, **k))
    ids = np.array([f"{group:08}" for group in range(500)])[np.arange(50_000) // 100]
    columns = numbers(50_000) | {"group_id": ids}
    path = written(tmp_path / "run.parquet", columns)
    assert open_run([str(path)]).rows == 50_000
    assert ["group_id"] in opened


@pytest.mark.parametrize("nested", [False, True])
def test_text_in_structs_is_counted_as_it_is_stored(tmp_path, monkeypatch, nested):
    monkeypatch.setattr(size_guard, "LARGEST_FREE", 5_000)
    monkeypatch.setattr(size_guard, "LARGEST_RATIO", 1)
    texts = ["y" * 100] * 40
    cells = [[{"role": "user", "content": text}] for text in texts] if nested else texts
    path = tmp_path / "some.parquet"
    pq.write_table(pa.table({"step": [1] * 40, "prompt": cells}), path)
    source = Source.of(str(path))
    footer = pq.read_metadata(path)
    check_size(source, footer, ["prompt"])
    monkeypatch.setattr(size_guard, "LARGEST_FREE", 3_000)
    with pytest.raises(InputError, match="the file declares up to"):
        check_size(source, footer, ["prompt"])


def test_an_encoding_of_which_nothing_can_be_counted(tmp_path):
    ids = pa.array(["x" * 2**16] * 2**10)
    columns = numbers(2**10) | {"group_id": ids}
    encodings = {"use_dictionary": ["step"], "column_encoding": {"group_id": "DELTA_BYTE_ARRAY"}}
    path = tmp_path / "run.parquet"
    pq.write_table(pa.table(columns), path, compression="zstd", **encodings)
    footer = pq.read_metadata(path)
    assert footer.row_group(0).column(2).total_uncompressed_size < 2**18
    open_run([str(path)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(size_guard, "LARGEST_FREE", 2**20)
        patch.setattr(size_guard, "LARGEST_RATIO", 1)
        with pytest.raises(InputError, match="the file declares up to"):
            open_run([str(path)])


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("importer", ["trl", "mapped"])
def test_the_command_ends_in_one_sentence_and_little_memory(tmp_path, importer):
    rows = numbers() | {"prompt": one_text_for_all(), "completion": one_text_for_all(), "advantage": np.zeros(ROWS)}
    columns = {name: rows[name] for name in ("step", "prompt", "completion", "reward", "advantage")}
    written(tmp_path / "completions_00001.parquet", columns, store_schema=False)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "rolloutdoctor",
            "export",
            "completions_00001.parquet",
            "--what",
            "run",
            "--from",
            importer,
            "-o",
            "r.parquet",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (2 * 2**30, 2 * 2**30)),
    )
    assert done.returncode == 2
    assert "completions_00001.parquet: the file declares up to 8" in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["completions_00001.parquet"]
