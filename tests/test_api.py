"""`import rolloutdoctor as rd`: the example of its page runs, and the functions are those of the commands."""

import gc
import json
import logging.handlers
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

import rolloutdoctor as rd
from rolloutdoctor.results.errors import InputError, UsageError
from rolloutdoctor.views.verdict import verdict

ROOT = Path(__file__).parent.parent
SAMPLE = ROOT / "sample_data" / "verl_rejected.parquet"


@pytest.mark.slow
def test_the_example_of_the_page_runs(tmp_path):
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    assert len(code.splitlines()) <= 12
    (tmp_path / "sample_data").symlink_to(ROOT / "sample_data")
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        encoding="utf-8",
        cwd=tmp_path,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert "Fully masked responses shift 296 advantages, by 0.163 on average and 1.33 at most" in done.stdout
    assert "changed_rows" in done.stdout
    assert (tmp_path / "advantages.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_figures_are_those_of_the_command(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    from rolloutdoctor.cli import main

    run = rd.open(SAMPLE)
    figure = rd.plot("advantages", run, fixes=["rejected-rows"], steps="0:20", by="step")
    assert isinstance(figure, Figure)
    target = tmp_path / "command.png"
    words = ["plot", "advantages", str(SAMPLE), "--fix", "rejected-rows", "--steps", "0:20", "--by", "step"]
    monkeypatch.setattr(sys, "argv", ["rolloutdoctor", *words, "-o", str(target), "--quiet"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    figure.savefig(tmp_path / "own.png", metadata={"Software": None})
    assert (tmp_path / "own.png").read_bytes() == target.read_bytes()


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda run: rd.plot("advantges", run), "did you mean 'advantages'?"),
        (lambda run: rd.plot("kl", run, by="step"), "--by step is for advantages"),
        (lambda run: rd.plot("kl", run, fixes=["zero"]), "did you mean 'zero-std'?"),
        (lambda run: rd.plot("kl", run, split="test"), r"no split 'test' \(known: train, eval\)"),
        (lambda run: rd.check(run, dtype="float16"), "no dtype 'float16'"),
        (lambda run: rd.check(run, device="gpu"), "no device 'gpu'"),
        (lambda run: rd.check(run, split="both"), "no split 'both'"),
        (lambda run: rd.diff(run, fixes=["zero-std"], by="row"), "no parts by 'row'"),
        (lambda run: rd.recompute(run, dtype="double"), "no dtype 'double'"),
    ],
)
def test_bad_arguments_are_one_sentence(call, part):
    with pytest.raises(UsageError, match=part):
        call(rd.open(SAMPLE))


@pytest.mark.slow
def test_evaluate_can_be_called_whoever_imported_it_first():
    """Each in a fork of a process that has imported what takes long, and nothing of this package."""
    code = f"""
import os, torch
for first in ("", "import rolloutdoctor.evaluation.evaluate"):
    if os.fork():
        assert os.wait()[1] == 0, first
        continue
    exec(first)
    import rolloutdoctor as rd
    run = rd.open({str(SAMPLE)!r})
    objective = rd.objective_of(run)
    batch = next(rd.batches(run, objective))
    found = rd.evaluate(batch, objective)
    from rolloutdoctor.evaluation.evaluate import Evaluation, evaluate
    assert isinstance(found, Evaluation)
    assert found.loss == evaluate(batch, objective).loss
    os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr


def test_import_loads_nothing_heavy():
    code = """
import sys, rolloutdoctor
assert set(rolloutdoctor.__all__) <= set(dir(rolloutdoctor))
assert not hasattr(rolloutdoctor, "nothing")
heavy = {"torch", "polars", "pyarrow", "matplotlib", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_every_result_is_a_frame(tmp_path):
    run = rd.open(SAMPLE)
    report = rd.check(run, select=["RDA"], steps="0:20")
    measures = report.frame()
    assert measures.columns == ["code", "name", "severity", "verdict", "measure", "value", "unit"]
    assert len(measures) == sum(len(found.measures) for found in report.findings) > 0
    comparison = rd.diff(run, fixes=["rejected-rows", "zero-std"], steps="0:20")
    steps = comparison.frame()
    assert len(steps) == 3 * comparison.input.steps
    assert steps["changed_rows"].sum() == sum(effect.total["changed_rows"].value for effect in comparison.effects)
    recomputed = rd.recompute(run, tmp_path / "out.parquet", fixes=["zero-std"], steps="0:20")
    numbers = recomputed.frame()
    assert len(numbers) == len(recomputed.steps)
    assert (numbers["actor/kl_loss"] - numbers["actor/kl_loss_logged"]).abs().max() < 1e-6
    assert {"loss", "loss_fixed", "actor/kl_loss_fixed"} <= set(numbers.columns)
    objective = rd.objective_of(run)
    evaluation = rd.evaluate(next(rd.batches(run, objective)), objective, dtype=torch.float64)
    rows = evaluation.frame()
    assert rows["loss"].sum() == pytest.approx(evaluation.loss)
    assert rows["grad_l1"].sum() == pytest.approx(evaluation.grad_l1)
    assert rows["advantage"].null_count() == 0


def test_no_findings_are_an_empty_frame():
    report = rd.check(rd.open(SAMPLE), select=["RDI001"])
    assert report.frame().shape == (0, 7)


def test_options_go_over_the_file():
    run = rd.open(str(SAMPLE))
    assert rd.objective_of(run, options={"adv_estimator": "rloo"}).advantage.estimator == "rloo"
    assert rd.diff(run, against={"actor.use_kl_loss": False}, steps="0:3").differs
    assert not rd.diff(run, against={"actor.use_kl_loss": True}, steps="0:3").differs
    with pytest.raises(UsageError, match="nothing to compare"):
        rd.diff(run)


def test_a_log_of_numbers_alone_is_opened_as_check_opens_it(tmp_path):
    log = tmp_path / "log.csv"
    log.write_text("step,reward,grad_norm\n1,0.5,0.1\n2,0.4,nan\n3,0.3,0.3\n", encoding="utf-8")
    report = rd.check(rd.open(log))
    assert [found.code for found in report.findings] == ["RDM003"]
    assert "RDG001" in [each.code for each in report.skipped]
    with pytest.raises(InputError, match=r"log\.csv: nothing can be compared without the columns"):
        rd.diff(rd.open(log), fixes=["zero-std"], trainer="trl")


@pytest.mark.slow
def test_a_dump_is_opened_through_a_run_file_that_goes_with_the_run(tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    dump = tmp_path / "mine.jsonl"
    rows = [{"s": 1, "g": row // 4, "score": row % 3} for row in range(8)]
    dump.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    said = logging.handlers.BufferingHandler(10)
    with monkeypatch.context() as patch:
        patch.setattr(logging.getLogger("rolloutdoctor"), "handlers", [said])
        run = rd.open(dump, map={"step": "s", "group_id": "g", "reward": "score"})
    assert any("read with the importer mapped" in record.getMessage() for record in said.buffer)
    assert (run.rows, run.files) == (8, (str(dump),))
    assert rd.check(run, trainer="trl").input.groups == 2
    (batch,) = run.batches({"reward"})
    assert batch.column("reward").tolist() == [row % 3 for row in range(8)]
    assert len(list(folder.iterdir())) == 1
    del run
    gc.collect()
    assert not list(folder.iterdir())
    with pytest.raises(UsageError, match="did you mean 'verl'"):
        rd.open(dump, from_="verll")
    assert not list(folder.iterdir())


def test_what_needs_pickle_is_refused_until_it_is_allowed(tmp_path):
    torch.save({"samples": [Path("x")]}, tmp_path / "rollout_0.pt")
    with pytest.raises(InputError, match="allow-pickle"):
        rd.open(tmp_path / "rollout_0.pt", from_="slime")
    with pytest.raises(InputError) as refused:
        rd.open(tmp_path / "rollout_0.pt", from_="slime", allow_pickle=True)
    assert "allow-pickle" not in str(refused.value)


@pytest.mark.slow
def test_a_path_is_accepted_wherever_a_run_is():
    assert rd.check(SAMPLE, select=["RDI"]) == rd.check(rd.open(SAMPLE), select=["RDI"])
    assert rd.identify(str(SAMPLE), steps="0:4").stages[0].compared > 0
    assert rd.recompute(SAMPLE, steps="0:2").steps
    assert rd.diff(SAMPLE, fixes=["rejected-rows"], steps="40:50").effects


def of_first_steps(kind):
    """The first steps of the sample: as a file of their own, and as they are in memory."""
    table = pq.read_table(SAMPLE).filter(pc.field("step") < 12).replace_schema_metadata()
    return {"table": table, "frame": pl.from_arrow(table), "records": table.to_pylist()}[kind]


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("kind", ["frame", "table", "records"])
def test_rows_in_memory_are_read_like_a_file(tmp_path, monkeypatch, kind):
    folder = tmp_path / "temporary"
    folder.mkdir()
    rows = of_first_steps(kind)
    pq.write_table(of_first_steps("table"), tmp_path / "run.parquet")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    found = rd.check(rows, trainer="verl@0.9.1", select=["RDA", "RDI"])
    assert found == rd.check(tmp_path / "run.parquet", trainer="verl@0.9.1", select=["RDA", "RDI"])
    assert (found.trainer, found.input.steps) == ("verl", 11)
    known = rd.info(rows, trainer="verl@0.9.1")
    assert (known.input.rows, known.files) == (len(of_first_steps("table")), ("rows in memory",))
    measured = rd.measure(rows, trainer="verl@0.9.1")
    assert len(measured.rows) == known.input.rows
    del measured
    gc.collect()
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_a_frame_without_a_trainer_says_what_to_pass():
    frame = pl.read_parquet(SAMPLE).filter(pl.col("step") < 3)
    wanted = "the frame has no trainer: pass trainer='trl@1.16.0'"
    for rows in (frame, frame.to_arrow(), frame.to_dicts()):
        found = rd.check(rows)
        assert wanted in verdict(found)
        assert wanted in {one.remedy for one in found.skipped if one.code == "RDA001"}
    for function in (rd.recompute, rd.objective_of, lambda rows: rd.diff(rows, fixes=["zero-std"])):
        with pytest.raises(UsageError, match=re.escape(wanted)):
            function(frame)
    assert wanted not in verdict(rd.check(frame, trainer="verl@0.9.1"))


def test_a_table_says_who_made_it_and_a_frame_of_numbers_is_a_log():
    assert rd.check(pq.read_table(SAMPLE), select=["RDA001"], steps="0:3").trainer == "verl"
    log = pl.DataFrame({"step": range(12), "loss": [0.1] * 11 + [None], "grad_norm": [1.0] * 11 + [float("nan")]})
    assert [one.code for one in rd.check(log, select=["RDM003"]).findings] == ["RDM003"]


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        ([], "rows in memory: there are none"),
        ([1], "neither a frame nor a table nor a list of records"),
        (
            [{"step": 1, "reward": "x"}, {"step": 1, "reward": [1.0]}],
            r"column 'reward', row 1: \[1.0\] \(list\) where row 0 has",
        ),
        ([{"step": 2**70}], r"column 'step', row 0: 1180591620717411303424 \(int\) where a number"),
        (None, "but one NoneType; give a frame, a list of dicts"),
        (np.zeros((3, 4)), "but one ndarray of shape"),
        (pl.Series([1.0]), "but one Series of shape"),
        (["a.parquet", "b.parquet"], r"these are paths; open several files as one run with rd.open\(\*paths\)"),
        ({"step": 1, "reward": [1.0]}, "column 'step' is one int; give one cell for each row"),
        ({"step": [1, 1], "reward": [1.0]}, "the columns differ in length: step 2, reward 1"),
        ({"step": [1], "entropy": torch.zeros(1, 6)}, r"is one Tensor of shape \[1, 6\]; give one list for each row"),
        (pl.DataFrame({"a": [1]}), "rows in memory: no column step"),
    ],
)
def test_rows_that_are_none_are_refused(rows, part):
    with pytest.raises(InputError, match=part):
        rd.check(rows)


def test_columns_of_pandas_that_are_none_are_refused():
    pd = pytest.importorskip("pandas")
    with pytest.raises(InputError, match="two columns are called reward"):
        rd.check(pd.DataFrame([[1, 0.0, 1.0]], columns=["step", "reward", "reward"]))
    with pytest.raises(InputError, match=r"column 'uid', row 1: 'x' \(str\) where row 0 has 3"):
        rd.check(pd.DataFrame({"step": [1, 1], "uid": [3, "x"]}))


def as_columns(rows):
    return {name: [row[name] for row in rows] for name in rows[0]}


WITH_TENSORS = {
    "polars, lazy": lambda rows: pl.DataFrame(rows).lazy(),
    "a dict of lists": as_columns,
    "a table of W&B": lambda rows: {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]},
    "a generator": iter,
    "tensors that need a gradient": lambda rows: changed(rows, lambda cell: torch.tensor(cell, requires_grad=True)),
    "float16": lambda rows: changed(rows, lambda cell: np.array(cell, np.float16)),
    "bfloat16": lambda rows: changed(rows, lambda cell: torch.tensor(cell, dtype=torch.bfloat16)),
    "numbers that are tensors": lambda rows: [{**row, "reward": torch.tensor(row["reward"])} for row in rows],
    "pandas with tensors": lambda rows: pytest.importorskip("pandas").DataFrame(changed(rows, torch.tensor)),
    "polars with objects": lambda rows: pl.DataFrame(
        {**as_columns(rows), "entropy": pl.Series([torch.tensor(row["entropy"]) for row in rows], dtype=pl.Object)}
    ),
}


def changed(rows, change):
    return [{**row, "entropy": change(row["entropy"])} for row in rows]


@pytest.mark.parametrize("form", WITH_TENSORS)
def test_rows_of_a_training_loop_are_read_as_they_are(form):
    rows = [
        {"step": 1 + row // 2, "group_id": "a", "reward": float(row), "entropy": [0.5, 0.25 * row][: 1 + row % 2]}
        for row in range(4)
    ]
    run = rd.open(WITH_TENSORS[form](rows))
    found = {column: [] for column in ("reward", "entropy")}
    for batch in run.batches(frozenset(found)):
        for column, cells in found.items():
            cells += batch.column(column).tolist()
    assert found == {"reward": [0, 1, 2, 3], "entropy": [0.5, 0.5, 0.25, 0.5, 0.5, 0.75]}


def test_a_column_of_ones_own_that_no_file_can_hold_is_left_out_and_said(monkeypatch):
    said = []
    monkeypatch.setattr(logging.getLogger("rolloutdoctor"), "warning", said.append)
    rows = [{"step": 1, "reward": 1.0, "model": object(), "info": 1}, {"step": 1, "reward": 0.0, "info": "x"}]
    assert rd.open(rows).columns == {"step", "reward"}
    assert [line.partition(" is left out: ")[0] for line in said] == [
        "rows in memory: column 'model'",
        "rows in memory: column 'info'",
    ]


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: rd.check(SAMPLE, steps=range(3)), "steps: expected a text such as '100:200', got a range"),
        (
            lambda: rd.check(SAMPLE, options=["beta=0.04"]),
            "options: expected a mapping such as {'beta': 0.04}, got a list",
        ),
        (lambda: rd.plot(rd.open(SAMPLE), "rewards"), "the picture is the first argument"),
        (lambda: rd.check(SAMPLE, trainer="TRL"), "did you mean 'trl'"),
        (lambda: rd.diff(SAMPLE, fixes="zero_std"), "no fix 'zero_std'"),
        (lambda: rd.check(SAMPLE, select="RDX"), "no rule 'RDX'"),
    ],
)
def test_options_of_another_kind_are_refused_with_a_sentence(call, part):
    with pytest.raises(UsageError) as refused:
        call()
    assert part in str(refused.value)


def test_a_log_alone_has_an_overview_of_what_it_holds(tmp_path):
    lines = [{"step": step, "reward": 0.5 + 0.01 * step, "kl": 0.01 * step} for step in range(1, 13)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    titles = [panel.get_title(loc="left") for panel in rd.plot("overview", tmp_path / "log.jsonl").axes]
    assert [title.partition(":")[0] for title in titles] == ["reward", "KL, nats"]


def test_rows_without_a_log_have_no_overview(tmp_path):
    rows = [{"step": 1, "group_id": "a", "reward": float(row)} for row in range(4)]
    with pytest.raises(InputError, match="no picture of overview: nothing was logged: give the trainer's log as well"):
        rd.plot("overview", rows, trainer="trl")
    with pytest.raises(UsageError, match="written as Parquet; name it tokens"):
        rd.recompute(rows, tmp_path / "tokens.csv", trainer="trl")


def test_a_misspelt_column_is_named_with_what_it_seems_to_be():
    rows = [{"step": 1, "group_id": "a", "rewrd": float(row), "learning_rate": 0.1} for row in range(4)]
    found = rd.check(rows, trainer="trl", select=["RDA011"])
    assert found.notes[1] == ("the column rewrd is not read: if it is reward, rename it, or give --map reward=rewrd")
    assert found.skipped[0].remedy.startswith("rename the column rewrd to reward, or --map reward=rewrd")
    known = rd.info(rows, trainer="trl")
    assert known.unread == ("rewrd", "learning_rate")
    assert "not read  rewrd, learning_rate: no column of a run file\n" in str(known)


def test_batches_and_objective_take_rows_as_everything_else_does():
    rows = [{"step": 1, "group_id": "a", "reward": float(row), "policy_log_probs": [-0.5]} for row in range(4)]
    objective = rd.objective_of(rows, trainer="trl")
    assert [len(batch) for batch in rd.batches(rows, objective)] == [4]


@pytest.mark.slow
def test_print_shows_what_the_command_says(capsys):
    found = rd.check(SAMPLE, select=["RDA001"])
    print(found)
    assert capsys.readouterr().out == f"{verdict(found)}\n"
    assert str(found.findings[0]) == f"RDA001 rejected-in-baseline (warning): {found.findings[0].headline}"
    known = rd.info(SAMPLE, steps="0:3")
    assert str(known).startswith("1 file: ")
    assert "\ntestable  " in str(known)
    assert known._repr_html_().startswith("<pre>1 file: ")
    assert len(repr(known)) < 200
    assert str(rd.recompute(SAMPLE, steps="0:3")).count("\n") > 3
    assert repr(rd.measure(SAMPLE, steps="0:3")).startswith("<MeasuredRun ")


@pytest.mark.slow
def test_results_are_a_line_as_text_and_a_table_in_a_notebook():
    found = rd.check(SAMPLE)
    assert repr(found).startswith("<Report verl 0.9.1: RDA001, ")
    assert len(repr(found)) < 200
    assert repr(rd.open(SAMPLE)).endswith("verl_rejected.parquet: verl, 1,600 rows, 19 columns>")
    page = found._repr_html_()
    assert page.count("<tr>") == 1 + len(found.findings)
    assert found.findings[0].headline in page
    assert found.findings[0]._repr_html_().count("<tr>") == 1 + len(found.findings[0].measures)
    comparison = rd.diff(SAMPLE, all_fixes=True)
    assert "rejected-rows" in repr(comparison)
    for result in (comparison, rd.identify(SAMPLE, steps="0:10"), rd.recompute(SAMPLE, steps="0:3")):
        assert len(repr(result)) < 300
        assert result._repr_html_().startswith("<pre>")


def test_a_run_is_a_line_as_text_and_a_table_in_a_notebook(tmp_path):
    run = rd.open(SAMPLE)
    assert len(repr(run)) < 200
    page = run._repr_html_()
    assert page.count("<tr>") == 4
    assert f"{run.rows:,}" in page
    assert "old_log_probs" in page
    hostile = tmp_path / "<script>.parquet"
    hostile.write_bytes(SAMPLE.read_bytes())
    assert "<script>" not in rd.open(hostile)._repr_html_()


def test_what_a_file_says_is_no_markup_in_a_notebook():
    found = rd.check(SAMPLE, select=["RDI001", "RDA001"])
    hostile = replace(found, findings=(replace(found.findings[0], headline="<script>alert(1)</script>"),))
    assert "<script>" not in hostile._repr_html_()


def test_figures_show_themselves():
    assert rd.plot("ratio", SAMPLE, steps="0:5")._repr_png_().startswith(b"\x89PNG")


def test_the_names_are_those_of_the_documentation():
    assert dir(rd) == sorted(rd.__all__)
    assert issubclass(rd.InputError, rd.RolloutDoctorError)
    for name in rd.__all__:
        assert getattr(rd, name) is not None


@pytest.mark.slow
def test_the_page_is_that_of_the_command(tmp_path, monkeypatch):
    import rolloutdoctor.views.html  # noqa: F401  # no room of this name hides the function
    from rolloutdoctor.cli import main

    own, page = tmp_path / "own.html", tmp_path / "page.html"
    words = ["report", str(SAMPLE), "--fix", "rejected-rows", "--steps", "40:60", "-o", str(page), "--quiet"]
    monkeypatch.setattr(sys, "argv", ["rolloutdoctor", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    text = rd.report(SAMPLE, own, fixes=["rejected-rows"], steps="40:60")
    assert own.read_text(encoding="utf-8") == text == page.read_text(encoding="utf-8")
    with pytest.raises(UsageError, match="is a file of the run itself"):
        rd.report(SAMPLE, SAMPLE)


def test_torch_has_the_threads_of_the_caller_again(tmp_path, monkeypatch):
    """Inside it has one, as in the commands: threads that wait for each other take many times as long."""
    from rolloutdoctor.evaluation import evaluate as module

    inside = []
    seen = module.evaluate_all
    monkeypatch.setattr(module, "evaluate_all", lambda *a, **k: inside.append(torch.get_num_threads()) or seen(*a, **k))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        run = rd.open(str(SAMPLE))
        reads = run.batches
        monkeypatch.setattr(
            run, "batches", lambda *a, **k: (inside.append(torch.get_num_threads()) or b for b in reads(*a, **k))
        )
        objective = rd.objective_of(run)
        for batch in rd.batches(run, objective, steps="0:3"):
            assert torch.get_num_threads() == 3
            rd.evaluate(batch, objective)
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert set(inside) == {1}
    assert len(inside) > 3
