"""`plot` and `report` as a user runs them: files written whole, bad input in one sentence."""

import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rolloutdoctor.commands.view.cli import EMBEDDED
from rolloutdoctor.results.figures import ASKED, KINDS

SAMPLES = Path(__file__).parent.parent.parent / "sample_data"
RUN = SAMPLES / "verl_rejected.parquet"

STARTS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("form", STARTS)
def test_plot_writes_the_format_that_the_name_asks_for(rolloutdoctor, tmp_path, form):
    target = tmp_path / f"picture.{form}"
    target.write_bytes(b"before")
    found = rolloutdoctor("plot", "baseline", RUN, "-o", target)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
    assert target.read_bytes().startswith(STARTS[form])
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    first = target.read_bytes()
    rolloutdoctor("plot", "baseline", RUN, "-o", target)
    assert target.read_bytes() == first


@pytest.mark.slow
def test_plot_by_step_with_a_fix(rolloutdoctor, tmp_path):
    target = tmp_path / "ridge.svg"
    found = rolloutdoctor("plot", "advantages", RUN, "--fix", "rejected-rows", "--by", "step", "-o", target)
    assert found.returncode == 0
    assert target.stat().st_size < 300_000


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["plot", "advantges", RUN, "-o", "x.png"], "did you mean 'advantages'?"),
        (
            ["plot", "zzz", RUN, "-o", "x.png"],
            "known: overview, audit, rewards, advantages, kl, baseline, loss, gradient, ratio",
        ),
        (["plot", "kl", RUN, "-o", "x.gif"], "pictures are written as .png, .svg, .pdf"),
        (["plot", "kl", RUN, "-o", "x"], "pictures are written as .png, .svg, .pdf"),
        (["plot", "kl", RUN, "-o", "nowhere/x.png"], "there is no folder nowhere"),
        (["plot", "kl", RUN, "--by", "step", "-o", "x.png"], "--by step is for advantages"),
        (["plot", "kl", RUN, "--by", "row", "-o", "x.png"], "--by"),
        (["plot", "kl", RUN, "--fix", "kl-inplace", "-o", "x.png"], "applies to slime"),
        (["plot", "kl", RUN, "--set", "use_kl_loss=false", "-o", "x.png"], "the configuration has no KL term"),
        (["plot", "kl", RUN, "--steps", "9000:", "-o", "x.png"], "no train rows that could be evaluated"),
        (["plot", "baseline", SAMPLES / "slime_ppo.parquet", "-o", "x.png"], "the estimator has no group baseline"),
        (["plot", "kl", "none.parquet", "-o", "x.png"], "none.parquet"),
        (["plot", "kl", RUN], "--output"),
        (["report", RUN, "-o", "x.pdf"], "name it FILE.html"),
        (["report", RUN, "-o", "nowhere/x.html"], "there is no folder nowhere"),
        (["report", "none.parquet", "-o", "x.html"], "none.parquet"),
        (["report", RUN], "--output"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_written(rolloutdoctor, tmp_path, words, part):
    found = rolloutdoctor(*words, cwd=tmp_path)
    assert found.returncode == 2
    assert found.stdout == ""
    assert part in " ".join(found.stderr.split())
    assert "Traceback" not in found.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_missing_column_is_named_with_what_records_it(rolloutdoctor, tmp_path):
    table = pq.read_table(RUN).drop_columns(["ref_log_probs"])
    pq.write_table(table, tmp_path / "poor.parquet")
    found = rolloutdoctor("plot", "kl", tmp_path / "poor.parquet", "-o", tmp_path / "x.png")
    assert found.returncode == 2
    assert "no picture of kl: missing column ref_log_probs: " in found.stderr
    assert found.stderr.count("\n") == 1
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize("words", [["plot", "kl"], ["report"]])
def test_a_file_of_the_run_is_never_replaced(rolloutdoctor, tmp_path, words):
    name = "run.png" if words[0] == "plot" else "run.html"
    linked = tmp_path / name
    linked.symlink_to(RUN)
    before = RUN.read_bytes()
    found = rolloutdoctor(*words, RUN, "-o", linked)
    assert found.returncode == 2
    assert "is a file of the run itself" in found.stderr
    assert RUN.read_bytes() == before


def test_a_folder_is_no_file(rolloutdoctor, tmp_path):
    (tmp_path / "x.html").mkdir()
    assert "is a folder" in rolloutdoctor("report", RUN, "-o", tmp_path / "x.html").stderr


@pytest.mark.slow
def test_report_writes_one_page_and_the_same_each_time(rolloutdoctor, tmp_path):
    target = tmp_path / "report.html"
    target.write_text("before")
    found = rolloutdoctor("report", RUN, "-o", target)
    assert (found.returncode, found.stdout) == (0, "")
    # A slow machine is told what takes so long.
    assert all("picture" in line or "worst rows" in line for line in found.stderr.splitlines())
    page = target.read_text(encoding="utf-8")
    assert page.count("<svg ") == 11
    assert str(SAMPLES) not in page
    # A page of a megabyte opens at once, and goes through by mail.
    assert len(page) < 1_000_000
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    rolloutdoctor("report", RUN, "-o", target)
    assert target.read_text(encoding="utf-8") == page


@pytest.mark.slow
@pytest.mark.slow
def test_view_writes_the_page_with_groups_to_look_at(rolloutdoctor, tmp_path):
    words = (SAMPLES / "verl_rejected.parquet", "-o", tmp_path / "page.html")
    assert rolloutdoctor("report", *words, "--groups", str(EMBEDDED)).returncode == 0
    whole = (tmp_path / "page.html").read_bytes()
    found = rolloutdoctor("view", *words)
    assert (found.returncode, found.stdout) == (0, "")
    assert (tmp_path / "page.html").read_bytes() == whole
    for more, said in ((("--against", RUN), "--against needs the page that is served"), (("-o", "x.pdf"), "FILE.html")):
        refused = rolloutdoctor("view", *words, *more)
        assert (refused.returncode, said in refused.stderr) == (2, True)


@pytest.mark.slow
def test_report_has_words_in_place_of_a_picture_of_nothing(rolloutdoctor, tmp_path):
    target = tmp_path / "report.html"
    found = rolloutdoctor("report", SAMPLES / "healthy.parquet", "--steps", "0:6", "-o", target)
    assert (found.returncode, found.stderr) == (0, "")
    page = target.read_text(encoding="utf-8")
    assert page.count("<svg ") == page.count("<figure ") == 9
    assert '<p id="picture-baseline">No group has both fully masked and unmasked' in page
    assert "There is no picture of baseline to draw." in page


@pytest.mark.slow
def test_check_shows_distributions_when_asked_for_everything(rolloutdoctor):
    found = rolloutdoctor("check", RUN, "-v", "--exit-zero")
    assert "advantages of trained rows: 1,486" in found.stdout
    assert "█" in found.stdout
    assert "log of the importance ratio of trained tokens: 4,443" in found.stdout
    assert "█" not in rolloutdoctor("check", RUN, "--exit-zero").stdout
    assert rolloutdoctor("check", RUN, "-v", "--format", "json", "--exit-zero").stdout.startswith("{")


def test_help_says_what_each_picture_is(rolloutdoctor):
    text = " ".join(rolloutdoctor("plot", "--help").stdout.split())
    untold = [kind for kind in (*KINDS, *ASKED) if f"{kind} (" not in text]
    assert not untold, f"{untold}: say in commands/plot/cli.py what they are"
    assert "no network, and no script but for --groups" in " ".join(rolloutdoctor("report", "--help").stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize("error", [ValueError("drawing failed"), MemoryError(), KeyboardInterrupt()])
@pytest.mark.parametrize("words", [["plot", "kl"], ["report"]])
def test_what_goes_wrong_while_drawing_leaves_the_file_as_it_was(rolloutdoctor, tmp_path, monkeypatch, words, error):
    from rolloutdoctor.pictures import kl

    def fails(*_):
        raise error

    target = tmp_path / ("x.svg" if words[0] == "plot" else "x.html")
    target.write_text("before")
    monkeypatch.setattr(kl, "_series", fails)
    found = rolloutdoctor(*words, RUN, "--steps", "0:5", "-o", target)
    assert found.returncode not in (0, 1)
    assert "Traceback" not in found.stderr
    assert target.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


@pytest.mark.slow
@pytest.mark.parametrize("words", [["plot", "kl"], ["report"], ["diff", "--fix", "zero-std"]])
def test_a_disk_that_is_full_leaves_the_file_as_it_was(rolloutdoctor, tmp_path, monkeypatch, words):
    def full(number):
        raise OSError(28, "No space left on device")

    target = tmp_path / {"plot": "x.svg", "report": "x.html", "diff": "x.txt"}[words[0]]
    target.write_text("before")
    monkeypatch.setattr(os, "fsync", full)
    option = "--output-file" if words[0] == "diff" else "-o"
    found = rolloutdoctor(*words, RUN, "--steps", "0:5", option, target)
    assert found.returncode == 2
    assert "cannot be written (No space left on device); free space" in " ".join(found.stderr.split())
    assert found.stdout == ""
    assert target.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_a_picture_that_a_fix_cannot_change_is_refused(rolloutdoctor, tmp_path):
    found = rolloutdoctor("plot", "ratio", RUN, "--fix", "rejected-rows", "-o", tmp_path / "x.png")
    assert found.returncode == 2
    assert "changes no importance ratio and no trained token" in " ".join(found.stderr.split())
    assert list(tmp_path.iterdir()) == []
