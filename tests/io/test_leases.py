"""What may go before a step ends: learnt from the steps before, and never seen in what comes out."""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from run_files import in_memory, objective

from rolloutdoctor.commands.check import check
from rolloutdoctor.data.token_columns import TokenColumns
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.io import leases as io_leases
from rolloutdoctor.io.leases import Leases
from rolloutdoctor.io.parquet.step_chunks import Piece
from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.errors import InputError

SAMPLES = Path(__file__).parent.parent.parent / "sample_data"
COLUMNS = ("reward", "response_mask", "policy_log_probs", "ref_log_probs")
STEPS, ROWS, TOKENS = 6, 8, 40


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write("run.parquet")


def write(name, **changed):
    """A run of some steps, each of four row groups."""
    generator = torch.Generator().manual_seed(0)
    rows = STEPS * ROWS
    floats = pa.list_(pa.float32())
    log_probs = {
        column: (-torch.rand(rows, TOKENS, generator=generator)).tolist()
        for column in ("policy_log_probs", "ref_log_probs")
    }
    columns = {
        "step": [row // ROWS for row in range(rows)],
        "group_id": [str(row // 4) for row in range(rows)],
        "reward": [float(row % 3) for row in range(rows)],
        "response_mask": pa.array([[1] * TOKENS] * rows, pa.list_(pa.uint8())),
        **{column: pa.array(cells, floats) for column, cells in (log_probs | changed).items()},
    }
    pq.write_table(pa.table(columns), name, row_group_size=ROWS // 4)
    return name


def test_the_first_step_is_kept_and_the_others_go(run_file):
    left, widened = [], []
    for batch in open_run([run_file]).batches(COLUMNS):
        before = in_memory(batch)
        assert set(before.values()) == {ROWS * TOKENS}
        evaluate(batch, objective())
        left.append(in_memory(batch))
        widened.append(batch.token_columns.lease is not None)
    assert widened == [False] + [True] * (STEPS - 1)
    assert set(left[0].values()) == {ROWS * TOKENS}
    assert all(set(each.values()) == {0} for each in left[1:])


def test_what_is_asked_for_again_stays(run_file):
    left = []
    for batch in open_run([run_file]).batches(COLUMNS):
        evaluate(batch, objective())
        left.append(in_memory(batch)["ref_log_probs"])
        if batch.step != 3:
            assert batch.column("ref_log_probs").shape == (ROWS * TOKENS,)
    assert left == [ROWS * TOKENS] * STEPS


def test_who_asks_late_gets_what_was_there(run_file):
    wanted = [batch.column("ref_log_probs") for batch in open_run([run_file]).batches(COLUMNS)]
    left = []
    for batch in open_run([run_file]).batches(COLUMNS):
        evaluate(batch, objective())
        left.append(in_memory(batch)["ref_log_probs"])
        if batch.step >= 2:
            assert torch.equal(batch.column("ref_log_probs"), wanted[batch.step])
    # It was gone at step 2, and is kept from then on.
    assert left == [ROWS * TOKENS, 0, 0] + [ROWS * TOKENS] * (STEPS - 3)


def test_steps_that_nobody_goes_over_are_kept(run_file):
    for batch in open_run([run_file]).batches(COLUMNS):
        assert batch.token_columns.lease is None


def test_a_file_that_went_too_is_one_sentence(run_file):
    batches = open_run([run_file]).batches(COLUMNS)
    evaluate(next(batches), objective())
    batch = next(batches)
    evaluate(batch, objective())
    Path(run_file).unlink()
    with pytest.raises(InputError, match=r"^run\.parquet: "):
        batch.column("policy_log_probs")


def test_a_file_that_changed_is_one_sentence(run_file):
    batches = open_run([run_file]).batches(COLUMNS)
    for _ in range(STEPS - 1):
        batch = next(batches)
        evaluate(batch, objective())
    table = pq.read_table(run_file)
    pq.write_table(table.set_column(0, "step", pa.array([0] * len(table))), run_file, row_group_size=ROWS // 4)
    with pytest.raises(InputError, match=r"contradict the rows of step 4; write the file again, and leave it alone"):
        batch.column("policy_log_probs")


def test_a_step_that_is_no_longer_there_is_one_sentence(run_file):
    table = pq.read_table(run_file)
    # Every page stays in its place, and a row group holds all steps.
    options = {"row_group_size": len(table), "use_dictionary": False, "compression": "none"}
    pq.write_table(table, run_file, **options)
    batches = open_run([run_file]).batches(COLUMNS)
    for _ in range(STEPS - 1):
        batch = next(batches)
        evaluate(batch, objective())
    pq.write_table(table.set_column(0, "step", pa.array([0] * len(table))), run_file, **options)
    with pytest.raises(InputError, match=r"^run\.parquet: step 4 is no longer there; leave the files alone"):
        batch.column("policy_log_probs")


@pytest.mark.parametrize("place", [0, STEPS * ROWS - 1])
def test_a_late_nan_is_found(run_file, monkeypatch, place):
    cells = -torch.rand(STEPS * ROWS, TOKENS, generator=torch.Generator().manual_seed(1))
    cells[place, 3] = torch.nan
    write("nan.parquet", ref_log_probs=cells.tolist())
    report = check(open_run(["nan.parquet"]), CheckOptions(trainer="trl", device="cpu"))
    found = next(found for found in report.findings if found.code == "RDI001")
    assert found.measures["tokens"].value == 1
    assert report == without_leases(monkeypatch, "nan.parquet", trainer="trl")


def without_leases(monkeypatch, name, **options):
    monkeypatch.setattr(Leases, "grant", lambda *_: 2**30)
    monkeypatch.setattr(Leases, "unread", lambda *_: frozenset())
    return check(open_run([name]), CheckOptions(device="cpu", **options))


@pytest.mark.parametrize("sample", ["run", "verl_rejected", "slime_ppo", "healthy"])
def test_the_samples_give_the_same(sample, monkeypatch, tmp_path):
    for path in SAMPLES.glob(f"{sample}*.parquet"):
        shutil.copy(path, tmp_path)
    went = []
    before = TokenColumns._let_go
    monkeypatch.setattr(TokenColumns, "_let_go", lambda *args: went.append(args[1]) or before(*args))
    name = tmp_path / f"{sample}.parquet"
    report = check(open_run([name]), CheckOptions(device="cpu"))
    assert went
    assert report == without_leases(monkeypatch, name)


@pytest.fixture
def one_slice_ahead(monkeypatch):
    """Or a small run would be decoded before anything is learnt of it."""
    for module in ("ahead", "leases"):
        monkeypatch.setattr(f"rolloutdoctor.io.{module}.LEAST_ROOM", 0)


@pytest.fixture
def two_readers(run_file, one_slice_ahead):
    """A run with a column of which an evaluation asks for nothing."""
    cells = (-torch.rand(STEPS * ROWS, TOKENS, generator=torch.Generator().manual_seed(2))).tolist()
    return write("sampled.parquet", rollout_log_probs=cells), torch.tensor(cells)


def test_a_column_that_nobody_reads_goes_at_once(two_readers):
    name, cells = two_readers
    left = []
    for batch in open_run([name]).batches((*COLUMNS, "rollout_log_probs")):
        left.append(in_memory(batch))
        assert batch.token_columns.tokens("rollout_log_probs") == ROWS * TOKENS
        assert batch.token_columns.shape("rollout_log_probs") == (ROWS * TOKENS,)
        evaluate(batch, objective())
        here = cells[batch.step * ROWS : (batch.step + 1) * ROWS]
        assert batch.token_columns.extremes("rollout_log_probs") == (float(here.min()), float(here.max()))
    assert [each.pop("rollout_log_probs") for each in left] == [ROWS * TOKENS] + [0] * (STEPS - 1)
    assert all(set(each.values()) == {ROWS * TOKENS} for each in left)


def test_who_reads_it_after_all_gets_it(two_readers):
    name, cells = two_readers
    left = []
    for batch in open_run([name]).batches((*COLUMNS, "rollout_log_probs")):
        left.append(in_memory(batch)["rollout_log_probs"])
        evaluate(batch, objective())
        if batch.step >= 2:
            here = cells[batch.step * ROWS : (batch.step + 1) * ROWS].flatten()
            assert torch.equal(batch.token_columns.part("rollout_log_probs", slice(5, 9)), here[5:9])
            assert torch.equal(batch.column("rollout_log_probs"), here)
    # Of what is decoded meanwhile it may have gone already.
    assert left[:3] == [ROWS * TOKENS, 0, 0]


def test_what_was_read_once_is_kept_from_then_on():
    leases = Leases()
    for split, asked, unread in (
        ("train", ["kl"], {"values", "entropy"}),
        ("eval", ["values"], {"kl", "entropy"}),
        ("train", ["kl", "values"], {"entropy"}),
        ("train", ["kl"], {"entropy"}),
        ("eval", [], {"kl", "entropy"}),
    ):
        columns = TokenColumns({name: torch.zeros(2) for name in ("kl", "values", "entropy")})
        leases.grant(split, columns, lambda _: None)
        for name in asked:
            columns.part(name, slice(0, 2))
        columns.passed(2)
        leases.learn(split, columns)
        assert leases.unread(split) == unread
    assert leases.unread("train") == {"entropy"}


def test_where_nobody_goes_over_the_tokens_no_column_goes(two_readers):
    batches = list(open_run([two_readers[0]]).batches((*COLUMNS, "rollout_log_probs")))
    assert all(set(in_memory(batch).values()) == {ROWS * TOKENS} for batch in batches)


@pytest.mark.parametrize("place", [0, 2 * ROWS, STEPS * ROWS - 1])
def test_a_late_infinity_is_found_where_nobody_reads(run_file, one_slice_ahead, monkeypatch, place):
    went, before = [], Piece.glanced
    monkeypatch.setattr(Piece, "glanced", lambda piece, names: went.append(names) or before(piece, names))
    cells = -torch.rand(STEPS * ROWS, TOKENS, generator=torch.Generator().manual_seed(1))
    cells[place, 3] = torch.inf
    name = write("sampled.parquet", rollout_log_probs=cells.tolist())
    report = check(open_run([name]), CheckOptions(trainer="trl", device="cpu"))
    # In the first step it is seen by who reads it, so that it does not go.
    assert any("rollout_log_probs" in names for names in went) == (place > 0)
    found = next(found for found in report.findings if found.code == "RDI001")
    assert found.measures["tokens"].value == 1
    assert report == without_leases(monkeypatch, name, trainer="trl")


def test_rows_that_waited_in_the_temporary_file_are_looked_at_too(two_readers, monkeypatch):
    """The steps take turns, so that what waits is a mixture of what was stored and what was let go."""
    name, cells = two_readers
    table = pq.read_table(name)
    order = [row for _, row in sorted((row % ROWS, row) for row in range(ROWS, STEPS * ROWS))]
    pq.write_table(pa.concat_tables([table.slice(0, ROWS), table.take(order)]), name, row_group_size=4)
    monkeypatch.setattr("rolloutdoctor.io.pending_steps.WAITING_BYTES", 0)
    for batch in open_run([name]).batches((*COLUMNS, "rollout_log_probs")):
        here = cells[batch.step * ROWS : (batch.step + 1) * ROWS]
        assert batch.token_columns.extremes("rollout_log_probs") == (float(here.min()), float(here.max()))
        evaluate(batch, objective())
        assert bool(in_memory(batch)["rollout_log_probs"]) == (batch.step == 0)
        if batch.step == STEPS - 1:
            assert torch.equal(batch.column("rollout_log_probs"), here.flatten())


def test_room():
    columns = TokenColumns({"kl": torch.zeros(2**26), "response_mask": torch.zeros(2**26, dtype=torch.bool)})
    leases = Leases()
    least = 2**26 * 5 // 16
    assert leases.grant("train", columns, lambda _: None) == least
    columns.passed(2**26)
    columns.chunks("response_mask")
    leases.learn("train", columns)
    again = TokenColumns({name: columns[name] for name in columns})
    room = leases.grant("train", again, lambda _: None)
    assert room == max(least, io_leases.room_beside(2**26))
    assert set(again.lease.names) == {"kl"}
