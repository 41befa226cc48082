"""Whatever the layout of the files, the same rows give the same batches."""

import random
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.errors import InputError

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("split", pa.string()),
        ("group_id", pa.string()),
        ("sample_id", pa.string()),
        ("reward", pa.float64()),
        ("rewards", pa.map_(pa.string(), pa.float64())),
        ("response_mask", pa.list_(pa.uint8())),
        ("kl", pa.large_list(pa.float32())),
        ("entropy", pa.list_(pa.float64())),
    ]
)
COLUMNS = ("reward", "rewards", "response_mask", "kl", "entropy")
CASES = settings(max_examples=40, deadline=None)


@st.composite
def run_rows(draw):
    rows = []
    for number in range(draw(st.integers(1, 14))):
        length = draw(st.integers(0, 4))
        split = draw(st.sampled_from(["train", "train", "eval"]))
        floats = st.floats(width=32, allow_nan=False)
        rows.append(
            {
                "step": draw(st.integers(0, 3)),
                "split": split,
                "group_id": draw(st.sampled_from("abc")),
                "sample_id": f"s{number}",
                "reward": draw(st.none() | st.floats(-1, 1)),
                "rewards": draw(st.dictionaries(st.sampled_from("fg"), st.floats(-1, 1))),
                "response_mask": draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)),
                "kl": draw(st.lists(floats, min_size=length, max_size=length)),
                # As a trainer that does not compute it on evaluation rows.
                "entropy": None if split == "eval" else draw(st.lists(floats, min_size=length, max_size=length)),
            }
        )
    return rows


@st.composite
def layouts(draw, count):
    """Where to cut into files, the size of row groups, and whether to keep statistics."""
    cuts = sorted(draw(st.sets(st.integers(1, count - 1), max_size=3))) if count > 1 else []
    return list(zip([0, *cuts], [*cuts, count], strict=True)), draw(st.integers(1, count)), draw(st.booleans())


def table_of(rows):
    return pa.Table.from_pylist([row | {"rewards": list(row["rewards"].items())} for row in rows], SCHEMA)


def read(rows, layout, **options):
    spans, size, statistics = layout
    with tempfile.TemporaryDirectory() as folder:
        for number, (start, stop) in enumerate(spans):
            pq.write_table(
                table_of(rows[start:stop]),
                f"{folder}/part-{number}.parquet",
                row_group_size=size,
                write_statistics=statistics,
            )
        run = open_run([folder])
        assert run.rows == len(rows)
        return list(run.batches(COLUMNS, **options))


def unpacked(batch):
    """The batch as rows again; floats as text, in which NaN equals NaN."""

    def cells(name):
        if name not in batch.per_token:
            return [None] * len(batch)
        return [part.tolist() for part in torch.tensor_split(batch.per_token[name], batch.rows[1:-1])]

    return [
        {
            "step": batch.step,
            "split": batch.split,
            "group_id": batch.group_ids[batch.groups.index_N[row]],
            "sample_id": batch.sample_ids[row],
            "reward": str(float(batch.per_row["reward"][row])),
            "rewards": {name: str(float(found[row])) for name, found in batch.rewards.items()},
            "response_mask": cells("response_mask")[row],
            "kl": cells("kl")[row],
            "entropy": cells("entropy")[row],
        }
        for row in range(len(batch))
    ]


def expected(rows):
    """The obvious reader: gather by step and split, in the order of the last row of each."""
    gathered = {}
    for row in rows:
        key = (row["step"], row["split"])
        gathered[key] = [*gathered.pop(key, []), row]
    for batch in gathered.values():
        names = {name for row in batch for name in row["rewards"]}
        yield [
            row
            | {
                "reward": str(float("nan") if row["reward"] is None else float(row["reward"])),
                "rewards": {name: str(float(row["rewards"].get(name, float("nan")))) for name in names},
                "response_mask": [bool(value) for value in row["response_mask"]],
                "entropy": row["entropy"],
            }
            for row in batch
        ]


def key_of(batch):
    return batch[0]["step"], batch[0]["split"]


@CASES
@given(st.data())
def test_any_layout_gives_the_batches_of_the_obvious_reader(data):
    rows = data.draw(run_rows())
    layout = data.draw(layouts(len(rows)))
    found, wanted = [unpacked(batch) for batch in read(rows, layout)], list(expected(rows))
    if len(layout[0]) > 1:
        # Files over which steps are scattered are read in turn; what a batch holds does not depend on it.
        found, wanted = sorted(found, key=key_of), sorted(wanted, key=key_of)
    assert found == wanted


HOW = {
    "what waits goes through a file": {"rolloutdoctor.io.pending_steps.WAITING_BYTES": st.sampled_from([0, 1, 8, 32])},
    "slices of any size": {
        "rolloutdoctor.io.stream.SLICE_TOKENS": st.integers(1, 20),
        "rolloutdoctor.io.parquet.files._LEAST_ROWS": st.integers(1, 3),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@CASES
@given(st.data())
def test_how_it_is_read_changes_nothing(how, data):
    rows = data.draw(run_rows())
    layout = data.draw(layouts(len(rows)))
    usual = [unpacked(batch) for batch in read(rows, layout)]
    with pytest.MonkeyPatch.context() as patch:
        for name, values in HOW[how].items():
            patch.setattr(name, data.draw(values))
        assert [unpacked(batch) for batch in read(rows, layout)] == usual


@pytest.mark.slow
@CASES
@given(st.data())
def test_order_of_rows_changes_only_the_order(data):
    rows = data.draw(run_rows())
    mixed = data.draw(st.permutations(rows))

    def content(batches):
        return {batch.key: sorted(unpacked(batch), key=lambda row: row["sample_id"]) for batch in batches}

    whole = [(0, len(rows))], len(rows), True
    assert content(read(mixed, data.draw(layouts(len(rows))))) == content(read(rows, whole))


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_sorted_files_give_their_steps_in_order(data):
    rows = sorted(data.draw(run_rows()), key=lambda row: row["step"])
    spans, size, _ = data.draw(layouts(len(rows)))
    for row in rows:
        row["split"], row["entropy"] = "train", [0.0] * len(row["kl"])
    batches = read(rows, (spans, size, True))
    assert [unpacked(batch) for batch in batches] == list(expected(rows))


def outcome(path):
    try:
        list(open_run([path]).batches(COLUMNS))
    except InputError as error:
        return str(error)
    return "read"


def test_damaged_files_raise_input_errors_only():
    """Flip bytes anywhere: every outcome is batches or an `InputError`, never another exception."""
    rng = random.Random(0)
    rows = [
        {
            "step": number // 4,
            "split": "train",
            "group_id": f"g{number % 2}",
            "sample_id": f"s{number}",
            "reward": 0.5,
            "rewards": {"f": 1.0},
            "response_mask": [1, 0, 1],
            "kl": [0.5, 1.5, 2.5],
            "entropy": [1.0, 2.0, 3.0],
        }
        for number in range(8)
    ]
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.parquet")
        pq.write_table(table_of(rows), path, row_group_size=5, compression="zstd")
        intact = path.read_bytes()
        for _ in range(300):
            damaged = bytearray(intact)
            for _ in range(rng.choice([1, 1, 4])):
                damaged[rng.randrange(4, len(damaged))] = rng.randrange(256)
            path.write_bytes(damaged[: rng.choice([len(damaged), len(damaged), rng.randrange(len(damaged))])])
            outcomes.append(outcome(path))
    assert outcomes.count("read")
    assert all(found == "read" or found.startswith(f"{path}: ") for found in outcomes)
    assert not any("\n" in found for found in outcomes)
    assert len(set(outcomes)) > 5
