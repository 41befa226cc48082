"""`diff` as a user runs it."""

import json
from pathlib import Path

import pytest
from engine.runs import random_columns, small, write

from rolloutdoctor.search.hypotheses.fixes import FIXES

LAST_TRAINED = {
    "policy_log_probs": [[-1.0, -1.0], [-1.0, float("nan")], [-1.0], [-1.0]],
    "ref_log_probs": [[-1.5, -1.5], [-1.5, float("nan")], [-1.5], [-1.5]],
}

SAMPLES = Path(__file__).parent.parent.parent / "sample_data"


@pytest.fixture
def run(tmp_path):
    return write(tmp_path / "run.parquet", small(prompt=["1+1="] * 4, response=["2", "3", "4\x1b[2J\u202e", ""]))


def test_both_sides_and_what_moved(rolloutdoctor, run):
    found = rolloutdoctor("diff", run, "--fix", "zero-std")
    assert (found.returncode, found.stderr) == (0, "")
    for words in (
        "With zero-std:loss, ",
        "none of 3 unmasked rows changes",
        "KL loss",
        "-25 %",
        "step 0, group b:",
        "prompt 1+1=",
        "not to parameters",
    ):
        assert words in found.stdout, words
    assert "\x1b" not in found.stdout
    assert "\u202e" not in found.stdout
    assert "1+1=" not in rolloutdoctor("diff", run, "--fix", "zero-std", "--no-text").stdout
    assert "group b:" not in rolloutdoctor("diff", run, "--fix", "zero-std", "--top", "0").stdout


def test_exit_code_only_where_asked(rolloutdoctor, run, tmp_path):
    # Without its row that is masked as a whole, whose group it would leave with a single row in the metrics.
    kept = write(tmp_path / "kept.parquet", small(response_mask=[[1, 1], [1, 0], [1], [1]], **LAST_TRAINED))
    assert rolloutdoctor("diff", run, "--fix", "zero-std", "--exit-code").returncode == 1
    assert rolloutdoctor("diff", kept, "--fix", "rejected-rows", "--exit-code").returncode == 0
    assert rolloutdoctor("diff", run, "--against", "beta=0.5", "--exit-code").returncode == 0
    assert rolloutdoctor("diff", run, "--against", "beta=0.25", "--exit-code").returncode == 1


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("format_", ["full", "concise", "json", "jsonl", "markdown"])
def test_the_same_bytes_each_time(rolloutdoctor, run, tmp_path, format_):
    words = ["diff", run, "--fix", "zero-std", "--fix", "rejected-rows", "--by", "reward", "--format", format_]
    first = rolloutdoctor(*words)
    assert first.stdout == rolloutdoctor(*words).stdout
    assert str(tmp_path) not in first.stdout
    target = tmp_path / "out.txt"
    assert rolloutdoctor(*words, "--output-file", target).stdout == ""
    assert target.read_text() == first.stdout


@pytest.mark.slow
def test_json_has_every_step_and_part(rolloutdoctor, tmp_path):
    path = write(tmp_path / "run.parquet", random_columns(0))
    words = ["diff", path, "--fix", "zero-std", "--fix", "rejected-rows", "--by", "group"]
    body = json.loads(rolloutdoctor(*words, "--format", "json").stdout)
    assert [effect["label"] for effect in body["effects"]] == [
        "zero-std:loss + rejected-rows:singleton-raw",
        "zero-std:loss",
        "rejected-rows:singleton-raw",
    ]
    assert (body["by"], body["differs"], body["dtype"]) == ("group", True, "float32")
    joint = body["effects"][0]
    assert [step["step"] for step in joint["per_step"]] == [0, 1, 2]
    assert len(joint["parts"]) == 18
    assert len(joint["groups"]) == 3
    assert {"kappa", "cosine", "spurious_share_l1", "other_rows_scale", "sign_flips"} <= set(joint["total"])
    lines = [json.loads(line) for line in rolloutdoctor(*words, "--format", "jsonl").stdout.splitlines()]
    assert [line["type"] for line in lines].count("step") == 9
    assert [line for line in lines if line["type"] == "part" and line["effect"] == joint["label"]] == [
        {"type": "part", "effect": joint["label"], **part} for part in joint["parts"]
    ]


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(
    ("sample", "width", "by"),
    [
        ("run", "60", "step"),
        ("run", "80", "group"),
        ("verl_rejected", "60", "reward"),
        ("verl_rejected", "60", "step"),
        ("slime_ppo", "60", "step"),
        ("slime_ppo", "120", "length"),
        ("healthy", "80", "group"),
    ],
)
def test_samples_fit_the_width(rolloutdoctor, sample, width, by):
    fixes = ["--fix", "zero-std", "--fix", "rejected-rows"] if sample != "slime_ppo" else ["--fix", "kl-inplace"]
    found = rolloutdoctor(
        "diff", SAMPLES / f"{sample}.parquet", *fixes, "--by", by, "--steps", ":40", env={"COLUMNS": width}
    )
    assert found.returncode == 0
    assert max(map(len, found.stdout.splitlines())) <= int(width)


@pytest.mark.slow
def test_what_check_measures_is_what_diff_measures(rolloutdoctor):
    path = SAMPLES / "verl_rejected.parquet"
    words = ["--format", "json"]
    checked = json.loads(rolloutdoctor("check", path, *words, "--select", "RDA001,RDG001").stdout)["findings"]
    measures = {finding["code"]: finding["measures"] for finding in checked}
    steps = {step["step"]: step for step in next(one for one in checked if one["code"] == "RDA001")["per_step"]}
    diffed = json.loads(rolloutdoctor("diff", path, *words, "--fix", "rejected-rows").stdout)["effects"][0]
    hit = [step for step in diffed["per_step"] if steps[step["step"]]["affected_groups"]]
    assert len(hit) > 20
    for step in hit:
        for name in ("sign_flips", "relative_change_l1", "kappa", "cosine", "advantage_shift_max"):
            assert step[name] == pytest.approx(steps[step["step"]][name], rel=1e-9), name
    assert diffed["total"]["sign_flips"]["value"] == measures["RDA001"]["sign_flips"]["value"]
    dead = json.loads(rolloutdoctor("diff", path, *words, "--fix", "zero-std").stdout)["effects"][0]["total"]
    assert dead["spurious_share_l1"]["value"] == pytest.approx(measures["RDG001"]["grad_share_l1"]["value"], rel=1e-5)


@pytest.mark.slow
def test_every_fix_in_one_table(rolloutdoctor, run):
    found = rolloutdoctor("diff", run, "--all-fixes")
    assert (found.returncode, found.stderr) == (0, "")
    table = found.stdout.split("largest first")[1].split("metrics  ")[0]
    assert table.index("zero-std:loss") < table.index("rejected-rows")
    for words in (
        "zero-std:loss: loss -0.0",
        "n/a         loo-std:exact: needs the standard deviation of a row's siblings",
    ):
        assert words in found.stdout
    body = json.loads(rolloutdoctor("diff", run, "--all-fixes", "--format", "json").stdout)
    alone = json.loads(rolloutdoctor("diff", run, "--fix", "zero-std", "--top", "0", "--format", "json").stdout)
    assert alone["effects"][0] in body["effects"]
    labels = [effect["label"] for effect in body["effects"]] + [one["fix"] for one in body["untried"]]
    assert {label.partition(":")[0] for label in labels} == {*FIXES}
    assert len(set(labels)) == len(labels)
    assert all(one["applies"] is False for one in body["untried"] if one["why"].startswith("needs"))
    assert "untried" not in alone
    concise = rolloutdoctor("diff", run, "--all-fixes", "--format", "concise").stdout
    assert [line.split(": ")[0] for line in concise.splitlines()] == labels
    assert "| zero-std:loss |" in rolloutdoctor("diff", run, "--all-fixes", "--format", "markdown").stdout


def test_a_fix_whose_column_is_missing_is_named(rolloutdoctor, tmp_path):
    columns = small()
    columns.pop("response_mask")
    found = rolloutdoctor("diff", write(tmp_path / "run.parquet", columns), "--all-fixes")
    assert found.returncode == 0
    said = " ".join(found.stdout.split())
    # Without a mask there is no loss, in which the KL of a group could show.
    assert "no column zero-std:loss, rejected-rows:singleton-raw: without response_mask; record the run" in said
    assert "no column mask-truncated-vote:truncated: without response_mask, status; record the run" in said
    assert "no change exact-equality-std:zero" in said or "n/a exact-equality-std:zero" in said


def test_every_variant_of_every_fix_is_the_default(rolloutdoctor, run):
    alone, every = (rolloutdoctor("diff", run, *words) for words in ([], ["--all-fixes"]))
    assert (alone.returncode, alone.stdout) == (0, every.stdout)
    table = alone.stdout.partition("what each fix would have changed")[2]
    rows = [line.split() for line in table.splitlines() if line.strip().startswith("zero-std:")]
    assert {row[0] for row in rows} == {"zero-std:loss", "zero-std:pr5640", "zero-std:renormalised"}


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--all-fixes", "--fix", "zero-std"], "--all-fixes is one table of every fix"),
        (["--all-fixes", "--top", "3"], "leave out --fix, --against, --without, --by, --top and --top-tokens"),
        (["--all-fixes", "--by", "step"], "--all-fixes is one table of every fix"),
        (["--fix", "zero-sdt"], "did you mean 'zero-std'?"),
        (["--fix", "kl-inplace"], "applies to slime"),
        (["--against", "beta"], "expected KEY=VALUE"),
        (["--against", "betta=1"], "did you mean 'beta'?"),
        (["--against", "beta=-1"], "out of range"),
        (["--fix", "zero-std", "--steps", "9:"], "no train rows to compare"),
        (["--fix", "zero-std", "--by", "day"], "day"),
        (["--fix", "zero-std", "--format", "yaml"], "yaml"),
        (["--fix", "zero-std", "--top", "-1"], "--top"),
        (["--fix", "zero-std", "--output-file", "nowhere/x.txt"], "--output-file nowhere/x.txt"),
    ],
)
def test_a_bad_option_is_one_sentence_and_2(rolloutdoctor, run, words, part):
    found = rolloutdoctor("diff", run, *words)
    assert found.returncode == 2
    assert found.stdout == ""
    assert part in " ".join(found.stderr.split())


@pytest.mark.parametrize("make", ["missing", "empty", "text", "folder"])
def test_an_unreadable_input_is_one_sentence_and_2(rolloutdoctor, tmp_path, make):
    path = tmp_path / "run.parquet"
    if make == "empty":
        path.write_bytes(b"")
    elif make == "text":
        path.write_text("step,reward\n1,2\n")
    elif make == "folder":
        path.mkdir()
    found = rolloutdoctor("diff", path, "--fix", "zero-std")
    assert (found.returncode, found.stdout, found.stderr.count("\n")) == (2, "", 1)


def test_the_settings_file_gives_defaults(rolloutdoctor, run, tmp_path):
    (tmp_path / "rolloutdoctor.toml").write_text('format = "json"\nfail-on = "warning"\n[set]\nbeta = 0.25\n')
    found = rolloutdoctor("diff", run, "--fix", "zero-std", cwd=tmp_path)
    assert json.loads(found.stdout)["trainer"]["config"]["beta"]["value"] == 0.25
    (tmp_path / "rolloutdoctor.toml").write_text('format = "junit"\n')
    assert "With zero-std:loss, " in rolloutdoctor("diff", run, "--fix", "zero-std", cwd=tmp_path).stdout


@pytest.mark.slow
def test_the_distribution_of_advantages_is_in_the_full_comparison_alone(rolloutdoctor):
    words = ["diff", SAMPLES / "verl_rejected.parquet", "--fix", "rejected-rows", "--steps", "30:60", "-q"]
    found = rolloutdoctor(*words).stdout
    assert "advantages of trained rows" in found
    before, after = (next(line for line in found.splitlines() if line.strip().startswith(side + "  ")) for side in
                     ("before", "after"))  # fmt: skip
    assert before != after
    assert "█" in before + after
    assert "advantages of trained rows" not in rolloutdoctor(*words, "--format", "markdown").stdout
    assert (
        "advantages of trained rows"
        not in rolloutdoctor("diff", SAMPLES / "verl_rejected.parquet", "--fix", "zero-std", "-q").stdout
    )


def test_workers_print_what_one_process_prints(rolloutdoctor):
    path = SAMPLES / "verl_rejected.parquet"
    words = ["diff", path, "--fix", "rejected-rows", "--steps", ":24", "--by", "length", "--format", "json"]
    one, several = (rolloutdoctor(*words, *more) for more in ([], ["--workers", "2"]))
    assert (several.stdout, several.stderr, several.returncode) == (one.stdout, one.stderr, one.returncode)
    assert one.stdout
    refused = rolloutdoctor(*words, "--state-dir", "states")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--state-dir keeps the states of parts on a cluster" in refused.stderr
