"""Parts of a recomputed run: the numbers and rows of one process, a manifest at the end, and nothing half-written."""

import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine.runs import random_columns, write

from rolloutdoctor.commands.export.token_parts import MANIFEST, RecomputeWork
from rolloutdoctor.commands.export.token_steps import PartFile
from rolloutdoctor.commands.export.tokens import RecomputeOptions, recompute
from rolloutdoctor.engine.part_states import state_bytes, state_from
from rolloutdoctor.engine.parts import plan_parts
from rolloutdoctor.engine.processes import Processes
from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.errors import DataError, InputError, UsageError
from rolloutdoctor.search.hypotheses.fixes import choose

OPTIONS = RecomputeOptions(device="cpu", fixes=(choose("zero-std"),))


class Several:
    """Measures several parts in this process; may stop before one of them, as if it had been killed."""

    def __init__(self, count=3, stop=None):
        self._count, self._stop, self.work = count, stop, None

    def measure(self, work, run, steps=None, split=None, progress=None):
        self.work = work
        found = []
        for part in plan_parts(run, steps, split, self._count):
            if part.number == self._stop:
                raise KeyboardInterrupt
            found.append(work.measure(part, progress))
        return found


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(
        tmp_path_factory.mktemp("run") / "run.parquet",
        random_columns(3, steps=7),
        row_group_size=17,
        logged=[(step, "kl", 0.1) for step in range(7)],
    )


def rows_in(folder):
    names = [part["file"] for part in json.loads((folder / MANIFEST).read_text())["parts"]]
    return pa.concat_tables([pq.read_table(folder / name) for name in names])


@pytest.mark.parametrize("executor", [Processes(1), Several(3), Processes(2)], ids=["one", "three", "processes"])
def test_numbers_and_rows_are_those_of_one_file(path, tmp_path, executor):
    run = open_run([path])
    one = recompute(run, OPTIONS, tmp_path / "one.parquet")
    several = recompute(run, OPTIONS, f"{tmp_path}/parts/", None, executor)
    assert several == one
    folder = tmp_path / "parts"
    assert rows_in(folder).equals(pq.read_table(tmp_path / "one.parquet"))
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["rows"] == one.input.rows == sum(part["rows"] for part in manifest["parts"])
    assert all((folder / part["file"]).stat().st_size == part["bytes"] for part in manifest["parts"])
    assert sorted(each.name for each in folder.iterdir()) == sorted(
        [MANIFEST, *(part["file"] for part in manifest["parts"])]
    )
    again = open_run([folder])
    assert (again.rows, again.columns >= {"step", "group_id", "sample_id"}) == (one.input.rows, True)


def test_numbers_alone_need_no_folder(path):
    run = open_run([path])
    assert recompute(run, OPTIONS, None, None, Processes(2)) == recompute(run, OPTIONS)


def test_an_output_that_is_written_again_holds_nothing_of_the_one_before(path, tmp_path):
    run, folder = open_run([path]), tmp_path / "parts"
    recompute(run, OPTIONS, f"{folder}/", None, Several(5))
    recompute(run, replace(OPTIONS, fixes=()), folder, None, Several(2))
    assert "grad_re_fixed" not in rows_in(folder).column_names
    assert len(list(folder.iterdir())) == 3


def test_without_the_last_part_there_is_no_manifest(path, tmp_path):
    run, folder = open_run([path]), tmp_path / "parts"
    recompute(run, OPTIONS, f"{folder}/", None, Several(3))
    with pytest.raises(KeyboardInterrupt):
        recompute(run, OPTIONS, folder, None, Several(3, stop=2))
    assert MANIFEST not in {each.name for each in folder.iterdir()}


def test_a_part_that_fails_leaves_no_file_of_its_own(tmp_path):
    columns = random_columns(3, steps=4)
    columns["policy_log_probs"][-1] = columns["policy_log_probs"][-1][:-1]
    run, folder = open_run([write(tmp_path / "run.parquet", columns, row_group_size=17)]), tmp_path / "parts"
    with pytest.raises(DataError):
        recompute(run, OPTIONS, f"{folder}/", None, Several(2))
    assert [each.name[:10] for each in folder.iterdir()] == ["part-00000"]


def test_what_cannot_take_parts_is_refused(path, tmp_path):
    run = open_run([path])
    with pytest.raises(UsageError, match="name a folder for them"):
        recompute(run, OPTIONS, tmp_path / "out.parquet", None, Processes(2))
    with pytest.raises(UsageError, match="holds files of the run itself"):
        recompute(run, OPTIONS, path.parent, None, Processes(2))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds notes\.txt, which is no part"):
        recompute(run, OPTIONS, tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(UsageError, match="name a folder that can be written"):
        recompute(run, OPTIONS, f"{tmp_path}/notes.txt/")


def test_a_state_is_taken_again_only_with_its_file(path, tmp_path):
    executor, folder = Several(2), tmp_path / "parts"
    recompute(open_run([path]), OPTIONS, f"{folder}/", None, executor)
    work = executor.work
    assert isinstance(work, RecomputeWork)
    part = plan_parts(open_run([path]), None, None, 2)[1]
    state = work.measure(part, None)
    kept = state_bytes("a", state)
    assert state_from(work, "a", kept) == state
    (file,) = state.files
    assert isinstance(file, PartFile)
    with (folder / file.name).open("ab") as opened:
        opened.write(b"more")
    with pytest.raises(InputError, match="not the file that was written"):
        state_from(work, "a", kept)
    (folder / file.name).unlink()
    with pytest.raises(InputError, match="not the file that was written"):
        state_from(work, "a", kept)
    # Other options, or another folder, have files and states of their own.
    others = [
        replace(work, options=replace(work.options, dtype="float32")),
        replace(work, options=replace(work.options, fixes=())),
        replace(work, output=f"{tmp_path}/elsewhere/"),
    ]
    assert len({each.identity() for each in (work, *others)}) == 4
