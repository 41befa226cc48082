"""`recompute` as a user runs it."""

import json
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from engine.runs import small, write

from rolloutdoctor.evaluation import device

SAMPLES = Path(__file__).parent.parent.parent / "sample_data"


@pytest.fixture
def run(tmp_path):
    return write(tmp_path / "run.parquet", small(), logged=[(0, "kl", 0.25), (0, "loss", 0.0)])


def test_writes_the_file_and_says_so(rolloutdoctor, run, tmp_path):
    out = tmp_path / "out.parquet"
    found = rolloutdoctor("export", "--what", "tokens", run, "-o", out, "--fix", "zero-std")
    assert found.returncode == 0
    assert found.stderr == f"rolloutdoctor: wrote 4 rows to {out}\n"
    assert pq.read_schema(out).names == [
        "step", "split", "group_id", "sample_id",
        "advantages_re", "kl_re", "ratio_re", "loss_re", "grad_re",
        "advantages_re_fixed", "kl_re_fixed", "ratio_re_fixed", "loss_re_fixed", "grad_re_fixed",
    ]  # fmt: skip
    assert "not to parameters" in found.stdout
    assert "zero-std:loss" in found.stdout
    assert str(tmp_path) not in found.stdout
    assert rolloutdoctor("export", "--what", "tokens", run, "-o", out, "--quiet").stderr == ""


def test_json_holds_the_numbers_of_every_step(rolloutdoctor, run):
    found = rolloutdoctor("export", "--what", "tokens", run, "--format", "json", "--fix", "zero-std")
    body = json.loads(found.stdout)
    assert found.stderr == ""
    assert (body["dtype"], body["fixes"]) == ("float64", ["zero-std:loss"])
    assert body["input"] == {"rows": 4, "steps": 1, "groups": 2, "tokens": 5}
    (step,) = body["per_step"]
    assert list(step)[:9] == [
        "step", "split", "rows", "tokens", "loss", "policy_loss", "kl_loss", "grad_l1", "grad_l2",
    ]  # fmt: skip
    assert {"kl", "reward", "frac_reward_zero_std"} <= set(step)
    assert step["logged"] == {"kl": 0.25, "loss": 0.0}
    assert step["difference"] == {"kl": step["kl"] - 0.25, "loss": step["loss"]}
    assert step["fixed"]["kl_loss"] < step["kl_loss"]
    assert (
        rolloutdoctor("export", "--what", "tokens", run, "--format", "json", "--fix", "zero-std").stdout == found.stdout
    )
    lines = rolloutdoctor(
        "export", "--what", "tokens", run, "--format", "jsonl", "--fix", "zero-std"
    ).stdout.splitlines()
    assert [json.loads(line)["type"] for line in lines] == ["run", "step"]
    assert {"type": "step", **step} == json.loads(lines[1])


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("sample", ["run", "verl_rejected", "slime_ppo", "healthy"])
def test_samples_reproduce_what_was_logged(rolloutdoctor, sample):
    path = SAMPLES / f"{sample}.parquet"
    body = json.loads(rolloutdoctor("export", "--what", "tokens", path, "--format", "json").stdout)
    # Some metrics are in the thousands, and were logged in float32.
    gaps = [
        abs(gap) / max(1, abs(step["logged"][name]))
        for step in body["per_step"]
        for name, gap in step["difference"].items()
    ]
    assert len(gaps) > 50
    assert max(gaps) < 1e-6


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--logits", "--format", "json"], "--logits adds a column to the file"),
        (["-o", "nowhere/out.parquet"], "there is no folder"),
        (["-o", "out.parquet", "--fix", "zero-sdt"], "did you mean 'zero-std'?"),
        (["-o", "out.parquet", "--fix", "kl-inplace"], "applies to slime"),
        (["-o", "out.parquet", "--set", "betta=1"], "did you mean 'beta'?"),
        (["-o", "out.parquet", "--logits"], "needs the column sum_pi_squared"),
        (["-o", "run.parquet"], "is a file of the run itself"),
        (["-o", "out.parquet", "--format", "yaml"], "yaml"),
    ],
)
def test_a_bad_option_is_one_sentence_and_2(rolloutdoctor, run, tmp_path, words, part):
    before = sorted(path.name for path in tmp_path.iterdir())
    found = rolloutdoctor("export", "--what", "tokens", "run.parquet", *words, cwd=tmp_path)
    assert found.returncode == 2
    assert found.stdout == ""
    assert part in " ".join(found.stderr.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_without_a_trainer_nothing_is_guessed(rolloutdoctor, tmp_path):
    nameless = write(tmp_path / "run.parquet", small(), metadata=None)
    found = rolloutdoctor("export", "--what", "tokens", nameless, "-o", tmp_path / "out.parquet")
    assert found.returncode == 2
    assert "name it with --trainer NAME" in found.stderr
    assert rolloutdoctor("export", "--what", "tokens", nameless, "--format", "json", "--trainer", "trl").returncode == 0


def test_a_row_that_breaks_the_contract_leaves_nothing_half_written(rolloutdoctor, tmp_path):
    columns = small(step=[0, 0, 1, 1], response_mask=[[1, 1], [1, 0], [1, 1], []])
    path = write(tmp_path / "run.parquet", columns, row_group_size=2)
    out = tmp_path / "out.parquet"
    out.write_text("before")
    found = rolloutdoctor("export", "--what", "tokens", path, "-o", out)
    assert found.returncode == 2
    assert found.stderr.count("\n") == 1
    assert "row 2" in found.stderr
    assert out.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet", "run.parquet"]


def test_ctrl_c_leaves_nothing_half_written(rolloutdoctor, run, tmp_path, monkeypatch):
    monkeypatch.setattr(device, "evaluate_all", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    found = rolloutdoctor("export", "--what", "tokens", run, "-o", tmp_path / "out.parquet")
    assert found.returncode == 130
    assert found.stderr == "rolloutdoctor: interrupted; nothing was written\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.metrics.jsonl", "run.parquet"]
