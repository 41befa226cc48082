"""The commands as a user runs them: exit codes, streams, formats, settings, and nothing half-written."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rolloutdoctor import __version__
from rolloutdoctor.engine import check
from rolloutdoctor.rules.table import RULES
from rolloutdoctor.trainers.table import TRAINERS

SAMPLES = Path(__file__).parent.parent.parent / "sample_data"
RUN = str(SAMPLES / "run.parquet")


def write_run(path, *, metadata=None, **columns):
    body = {
        "step": [0, 0, 0, 0],
        "group_id": ["a", "a", "b", "b"],
        "sample_id": ["1", "2", "3", "4"],
        "reward": [100.0, 1.0, 1.0, 0.0],
        "response_mask": [[0, 0], [1, 1], [1], [1, 1, 1]],
        "policy_log_probs": [[-1.0, -1.0], [-1.0, -2.0], [-0.5], [-1.0, -1.0, -1.0]],
    }
    table = pa.table(body | columns)
    if metadata is not None:
        table = table.replace_schema_metadata({"rolloutdoctor": json.dumps(metadata)})
    pq.write_table(table, path)
    return path


VERL = {
    "schema_version": 1,
    "trainer": "verl",
    "trainer_version": "0.9.1",
    "config": {"algorithm.adv_estimator": "rloo"},
}


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run.parquet", metadata=VERL)


def test_findings_below_fail_on_exit_with_0(rolloutdoctor, run):
    found = rolloutdoctor("check", run)
    assert found.returncode == 0
    assert "▲ warning  RDA001" in found.stdout
    assert found.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--fail-on", "warning"], 1),
        (["--fail-on", "info"], 1),
        (["--fail-on", "never"], 0),
        (["--fail-on", "warning", "--exit-zero"], 0),
        (["--fail-on", "warning", "--ignore", "RDA"], 0),
        (["--fail-on", "warning", "--select", "RDI001,RDM"], 0),
    ],
)
def test_fail_on_decides_the_exit_code(rolloutdoctor, run, words, code):
    assert rolloutdoctor("check", run, *words).returncode == code


@pytest.mark.slow
def test_an_alias_is_what_it_stands_for(rolloutdoctor, run):
    for alias, words in (
        (["--exit-zero"], ["--fail-on", "never"]),
        (["--exit-zero", "--format", "junit"], ["--fail-on", "never", "--format", "junit"]),
        (["-q"], ["--format", "brief"]),
        (["--quiet", "--fail-on", "info"], ["--format", "brief", "--fail-on", "info"]),
    ):
        found, same = (rolloutdoctor("check", run, "--select", "RDA", *more) for more in (alias, words))
        assert (found.returncode, found.stdout, found.stderr) == (same.returncode, same.stdout, same.stderr)
    brief, full = (rolloutdoctor("check", run, "--format", form).stdout for form in ("brief", "full"))
    assert len(brief) < len(full) / 3


def test_nothing_checked_is_3(rolloutdoctor, tmp_path):
    nameless = write_run(tmp_path / "nameless.parquet")
    found = rolloutdoctor("check", nameless, "--select", "RDA001")
    assert found.returncode == 3
    assert "nothing says which trainer made the run" in found.stdout
    assert "--trainer NAME" in found.stdout
    # Exit 3 is not hidden: a green run that checked nothing would be a lie.
    assert rolloutdoctor("check", nameless, "--select", "RDA001", "--exit-zero").returncode == 3


def test_rules_that_are_not_applicable_are_not_tested(rolloutdoctor, tmp_path):
    found = rolloutdoctor("check", write_run(tmp_path / "nameless.parquet"), "--select", "RDI002,RDA001,RDA002")
    assert "0 of 3 rules tested: no findings, 0 clean; 1 not applicable, 2 skipped." in found.stdout
    assert found.returncode == 3


@pytest.mark.parametrize(
    ("logged", "code"),
    [
        ({"of_nobody": 0.5}, 3),
        # A number that is finite is an answer, and too little to judge by.
        ({"reward": 0.5}, 0),
        ({"frac_reward_zero_std": 0.5, "grad_norm": 1.0, "loss": 0.5}, 0),
    ],
)
def test_a_log_alone_in_which_nothing_can_be_tested_is_3(rolloutdoctor, tmp_path, logged, code):
    log = tmp_path / "trainer_state.json"
    log.write_text(json.dumps({"log_history": [{"step": 1, **logged}], "logging_steps": 1}))
    found = rolloutdoctor("check", log)
    assert found.returncode == code
    assert "Healthy" not in found.stdout


@pytest.mark.slow
def test_a_required_rule_that_was_skipped_is_3(rolloutdoctor, tmp_path):
    path = write_run(tmp_path / "nameless.parquet")
    for words in (["--require", "RDA001"], ["--require", "RDI001,RDA", "--exit-zero"]):
        found = rolloutdoctor("check", path, *words)
        assert found.returncode == 3
        assert "RDA001 rejected-in-baseline is required and was skipped: nothing says which trainer" in found.stderr
    # Not applicable is an answer.
    assert rolloutdoctor("check", path, "--require", "RDI001,RDI002").returncode == 0
    for words in (["--require", "RDA0099"], ["--require", "RDA001", "--ignore", "RDA"]):
        found = rolloutdoctor("check", path, *words)
        assert (found.returncode, found.stdout) == (2, "")
    state = tmp_path / "state.json"
    rolloutdoctor("check", path, "--save-state", state)
    found = rolloutdoctor("merge", state, "--require", "RDA001")
    assert found.returncode == 3
    assert "RDA001 rejected-in-baseline is required and was skipped" in found.stderr
    assert rolloutdoctor("merge", state, "--require", "RDI001").returncode == 0
    assert rolloutdoctor("merge", state, "--select", "RDI", "--require", "RDA").returncode == 2


def test_rules_that_need_no_trainer_run_without_one(rolloutdoctor, tmp_path):
    found = rolloutdoctor("check", write_run(tmp_path / "nameless.parquet"), "--format", "json")
    body = json.loads(found.stdout)
    assert found.returncode == 0
    assert "RDI001" in body["clean"]
    assert {one["code"] for one in body["skipped"]} >= {"RDA001", "RDG001"}


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--set", "beta=1"], ["verl has no option 'beta'"]),
        (["--set", "clip_ratio_lo=0.1"], ["did you mean 'clip_ratio_low'?"]),
        (["--set", "adv_estimator=grop"], ["did you mean 'grpo'?"]),
        (["--set", "kl_penalty=full", "--set", "use_kl_in_reward=true"], ["kl_penalty = full", "(computed:"]),
        (["--set", "clip_ratio_low=-1"], ["out of range", ">= 0"]),
        (["--set", "clip_ratio_low=nan"], ["out of range"]),
        (["--set", "clip_ratio_low"], ["expected KEY=VALUE"]),
        (["--set", "clip_ratio_low=1", "--set", "clip_ratio_low=2"], ["keep one of them"]),
        (["--trainer", "vrel"], ["no trainer 'vrel'", "did you mean 'verl'?"]),
        (["--trainer", "verl@x"], ["'x' is not a version"]),
        (["--select", "RDX"], ["no rule 'RDX'"]),
        (["--select", "zero-std-lk"], ["did you mean 'zero-std-kl'?"]),
        (["--steps", "5:1"], ["steps '5:1'"]),
        (["--fix", "zero-sdt"], ["did you mean 'zero-std'?"]),
        (["--fix", "zero-std:pr"], ["no variant 'pr'"]),
        (["--fix", "kl-inplace"], ["applies to slime"]),
        (["--format", "yaml"], ["yaml"]),
        (["--trainer-config", "nowhere.json"], ["nowhere.json", "No such file"]),
        (["--output-file", "nowhere/report.txt"], ["--output-file nowhere/report.txt"]),
    ],
)
def test_a_bad_option_is_one_sentence_and_2(rolloutdoctor, run, words, parts):
    found = rolloutdoctor("check", run, *words)
    assert found.returncode == 2
    assert found.stdout == ""
    assert "Traceback" not in found.stderr
    for part in parts:
        assert part in " ".join(found.stderr.split()), found.stderr


@pytest.mark.slow
def test_an_older_release_than_was_read_confirms_nothing_and_gives_no_numbers(rolloutdoctor, run, tmp_path):
    found = rolloutdoctor("check", run, "--trainer", "verl@0.1")
    assert (found.returncode, found.stderr) == (0, "")
    words = " ".join(found.stdout.split())
    assert "verl 0.1 is older than 0.3.0, the first that was read: differences of numbers prove nothing" in words
    body = json.loads(rolloutdoctor("check", run, "--trainer", "verl@0.1", "--format", "json").stdout)
    assert "RDA001" not in {one["code"] for one in body["findings"]} | set(body["clean"])
    refused = rolloutdoctor(
        "export", "--what", "tokens", run, "--trainer", "verl@0.1", "-o", tmp_path / "numbers.parquet"
    )
    assert refused.returncode == 2
    assert "older than 0.3.0" in refused.stderr


def test_cuda_without_one_is_one_sentence(rolloutdoctor, run):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    found = rolloutdoctor("check", run, "--device", "cuda")
    assert found.returncode == 2
    assert found.stderr == "rolloutdoctor: --device cuda: torch finds no CUDA device here; use --device cpu, or auto\n"


@pytest.mark.parametrize("make", ["missing", "empty", "text", "folder"])
def test_an_unreadable_input_is_one_sentence_and_2(rolloutdoctor, tmp_path, make):
    path = tmp_path / "run.parquet"
    if make == "empty":
        path.write_bytes(b"")
    elif make == "text":
        path.write_text("neither rows nor numbers\n")
    elif make == "folder":
        path.mkdir()
    found = rolloutdoctor("check", path)
    assert found.returncode == 2
    assert found.stdout == ""
    assert found.stderr.startswith(f"rolloutdoctor: {path}")
    assert found.stderr.count("\n") == 1


@pytest.mark.slow
def test_json_is_the_same_bytes_each_time_and_on_each_device_setting(rolloutdoctor, run):
    first = rolloutdoctor("check", run, "--format", "json", "--device", "cpu")
    again = rolloutdoctor("check", run, "--format", "json", "--device", "cpu")
    assert first.stdout == again.stdout
    assert str(run.parent) not in first.stdout
    body = json.loads(first.stdout)
    (found,) = [one for one in body["findings"] if one["code"] == "RDA001"]
    # Leave-one-out of 100 and 1: the survivor gets 1 - 100 with all voting, and its raw score alone.
    assert found["measures"]["advantage_shift_max"]["value"] == 100.0
    assert found["measures"]["sign_flips"]["value"] == 1


def test_dtype_is_said_and_used(rolloutdoctor, run):
    body = json.loads(rolloutdoctor("check", run, "--format", "json", "--dtype", "float64").stdout)
    assert body["dtype"] == "float64"


def test_output_file_is_written_whole(rolloutdoctor, run, tmp_path):
    target = tmp_path / "out" / "report.json"
    target.parent.mkdir()
    target.write_text("before")
    found = rolloutdoctor("check", run, "--format", "json", "--output-file", target)
    assert found.stdout == ""
    assert json.loads(target.read_text())["schema_version"] == 1
    assert [path.name for path in target.parent.iterdir()] == ["report.json"]
    broken = rolloutdoctor("check", tmp_path / "none.parquet", "--output-file", target)
    assert broken.returncode == 2
    assert json.loads(target.read_text())["schema_version"] == 1


@pytest.mark.slow
def test_settings_file_environment_and_command_line_in_this_order(rolloutdoctor, run, tmp_path):
    (tmp_path / "rolloutdoctor.toml").write_text(
        'fail-on = "warning"\nformat = "json"\n[set]\n"algorithm.adv_estimator" = "opo"\n'
    )

    def estimator(*words, **env):
        found = rolloutdoctor("check", run, *words, cwd=tmp_path, env=env)
        return json.loads(found.stdout)["trainer"]["config"]["algorithm.adv_estimator"], found.returncode

    setting = {"value": "opo", "origin": "rolloutdoctor.toml", "assumed": False}
    assert estimator() == (setting, 1)
    setting = {"value": "gpg", "origin": "environment", "assumed": False}
    assert estimator(ROLLOUTDOCTOR_SET="adv_estimator=gpg", ROLLOUTDOCTOR_FAIL_ON="error") == (setting, 0)
    setting = {"value": "rloo", "origin": "command line", "assumed": False}
    words = ["--set", "adv_estimator=rloo", "--fail-on", "warning"]
    assert estimator(*words, ROLLOUTDOCTOR_SET="adv_estimator=gpg", ROLLOUTDOCTOR_FAIL_ON="error") == (setting, 1)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("formt = 'json'", "no setting 'formt'; did you mean 'format'?"),
        ("format = ", "rolloutdoctor.toml"),
        ("set = 3", "set is a table"),
    ],
)
def test_a_bad_settings_file_is_one_sentence(rolloutdoctor, run, tmp_path, text, part):
    (tmp_path / "rolloutdoctor.toml").write_text(text)
    found = rolloutdoctor("check", run, cwd=tmp_path)
    assert found.returncode == 2
    assert part in found.stderr
    assert "Traceback" not in found.stderr


def test_trainer_config_file_is_read_under_the_command_line(rolloutdoctor, run, tmp_path):
    config = tmp_path / "verl.json"
    config.write_text(json.dumps({"algorithm": {"adv_estimator": "opo", "unrelated": 1}, "data": {"x": [1]}}))
    body = json.loads(rolloutdoctor("check", run, "--trainer-config", config, "--format", "json").stdout)
    assert body["trainer"]["config"]["algorithm.adv_estimator"]["value"] == "opo"
    assert body["trainer"]["config"]["algorithm.adv_estimator"]["origin"] == str(config)


def test_ctrl_c_is_one_sentence_and_130(rolloutdoctor, monkeypatch):
    monkeypatch.setattr(check, "measure", lambda *_: signal.raise_signal(signal.SIGINT))
    found = rolloutdoctor("check", RUN)
    assert (found.returncode, found.stdout) == (130, "")
    assert found.stderr == "rolloutdoctor: interrupted; nothing was written\n"


def test_an_internal_error_is_told_apart_and_2(rolloutdoctor, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(check, "measure", broken)
    found = rolloutdoctor("check", RUN)
    assert found.returncode == 2
    assert found.stderr.startswith("rolloutdoctor: internal error: ZeroDivisionError: oops; set ROLLOUTDOCTOR_DEBUG=1")


TENSORS = ("torch", "polars", "pyarrow", "matplotlib", "numpy")
BOOK = tuple(name for name in TENSORS if name != "polars")
"""Rules are queries of polars."""
PARSER = ("typer", "click", "pydantic", "rich")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "unwanted"),
    [
        (["--help"], TENSORS),
        (["check", "--help"], TENSORS),
        (["--version"], TENSORS + PARSER),
        (["explain", "RDG001", "--format", "json"], BOOK),
        (["explain"], BOOK + PARSER),
        (["explain", "rules"], BOOK + PARSER),
        (["explain", "RDG001"], BOOK + PARSER),
        (["explain", "zero-std-kl"], BOOK + PARSER),
        (["explain", "fixes"], TENSORS + PARSER),
        (["explain", "trainers", "-v"], TENSORS + PARSER),
        (["explain", "trainers", "trl@1.10", "-v"], TENSORS + PARSER),
        (["explain", "metrics"], TENSORS + PARSER),
        (["explain", "metrics", "trl"], TENSORS + PARSER),
        (["rule", "RDG001"], BOOK + PARSER),
    ],
)
def test_the_book_imports_nothing_heavy(words, unwanted):
    code = (
        "import sys\n"
        f"sys.argv = ['rolloutdoctor', *{words!r}]\n"
        "from rolloutdoctor.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as stop:\n    assert not stop.code, stop.code\n"
        f"heavy = set({unwanted!r}) & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=300)
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
def test_one_rule_of_the_book_needs_no_trainer():
    code = (
        "import sys, rolloutdoctor.rules.table\n"
        "unwanted = 'rolloutdoctor.trainers.table', 'rolloutdoctor.trainers.spec', 'rolloutdoctor.engine'\n"
        "heavy = [name for name in sys.modules if name.startswith(unwanted)]\n"
        "assert not heavy, heavy\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=300)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    "words", [[], ["rules"], ["RDG001"], ["fixes"], ["trl", "-v"], ["metrics"], ["metrics", "verl"], ["zero-variance"]]
)
def test_pages_are_the_same_with_and_without_options(rolloutdoctor, words):
    at_once, parsed = rolloutdoctor("explain", *words), rolloutdoctor("explain", *words, "--format", "full")
    assert (at_once.returncode, at_once.stdout, at_once.stderr) == (0, parsed.stdout, "")
    assert len(at_once.stdout) > 500


def test_the_version_is_the_same_with_other_words(rolloutdoctor):
    at_once, parsed = rolloutdoctor("--version"), rolloutdoctor("--version", "check")
    assert at_once.stdout == parsed.stdout == f"rolloutdoctor {__version__}\n"


@pytest.mark.parametrize("words", [["RDG091"], ["trainers", "tlr"], ["trl@x"], ["metrics", "tlr"], ["reward-"]])
def test_pages_that_are_not_there_fail_the_same_with_and_without_options(rolloutdoctor, words):
    at_once, parsed = rolloutdoctor("explain", *words), rolloutdoctor("explain", *words, "--format", "full")
    assert (at_once.returncode, at_once.stdout, at_once.stderr) == (2, "", parsed.stderr)
    assert at_once.stderr.startswith("rolloutdoctor: ")
    assert at_once.stderr.count("\n") == 1


def test_help_names_every_command_and_every_option_has_words(rolloutdoctor):
    text = rolloutdoctor("--help").stdout
    for command in ("check", "info", "explain", "demo"):
        assert f"  {command} " in text
    help_text = rolloutdoctor("check", "--help-all").stdout
    options = (
        "--trainer --set --trainer-config --fix --select --ignore --steps --split --device --dtype --format "
        "--output-file --fail-on --workers --engine --state-dir --save-state --color --verbose --state --on-finding"
    )
    for option in options.split():
        assert option in help_text
    assert "Exit codes" in help_text


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_every_rule_has_a_page(rolloutdoctor, rule):
    found = rolloutdoctor("explain", rule.code)
    assert found.returncode == 0
    assert found.stdout.startswith(f"{rule.code} {rule.name}")
    assert rolloutdoctor("explain", "rule", rule.name).stdout == found.stdout


def test_the_books_have_a_json_form(rolloutdoctor):
    assert [page["code"] for page in json.loads(rolloutdoctor("explain", "rules", "--format", "json").stdout)] == [
        rule.code for rule in RULES
    ]
    assert json.loads(rolloutdoctor("explain", "fixes", "--format", "json").stdout)[0]["name"] == "zero-std"
    trainers = json.loads(rolloutdoctor("explain", "trainers", "--format", "json").stdout)
    assert [trainer["name"] for trainer in trainers] == list(TRAINERS)
    options = {option["name"]: option for option in trainers[0]["options"]}
    assert options["use_bias_correction_kl"]["default"] is True
    old = json.loads(rolloutdoctor("explain", "trl@1.9.0", "--format", "json").stdout)["options"]
    assert {option["name"]: option["default"] for option in old}["use_bias_correction_kl"] is False


def test_info_says_what_is_missing_and_how_to_record_it(rolloutdoctor, run):
    found = rolloutdoctor("info", run, "--set", "use_kl_loss=true")
    assert found.returncode == 0
    assert "tier      2" in found.stdout
    assert "RDG001" in found.stdout
    assert "makes verl compute `ref_log_prob`" in " ".join(found.stdout.split())
    assert max(map(len, found.stdout.splitlines())) <= 100
    body = json.loads(rolloutdoctor("info", run, "--format", "json").stdout)
    assert body["input"] == {"rows": 4, "steps": 1, "groups": 2, "tokens": 8}
    assert "RDA001" in body["runnable"]


@pytest.mark.slow
def test_steps_and_split_select(rolloutdoctor, tmp_path):
    path = write_run(
        tmp_path / "run.parquet", metadata=VERL, step=[0, 0, 1, 1], split=["train", "train", "eval", "eval"]
    )

    def rows(*words):
        return json.loads(rolloutdoctor("check", path, "--format", "json", *words).stdout)["input"]["rows"]

    assert rows() == 4
    assert rows("--steps", "0") == 2
    assert rows("--steps", "1:") == 2
    assert rows("--split", "eval") == 2
    assert rows("--steps", "5:") == 0


@pytest.mark.slow
def test_color_is_asked_for_or_not_there(rolloutdoctor, run):
    assert "\x1b[" not in rolloutdoctor("check", run).stdout
    assert "\x1b[" in rolloutdoctor("check", run, "--color", "always").stdout
    assert "\x1b[" in rolloutdoctor("check", run, env={"FORCE_COLOR": "1"}).stdout
    assert "\x1b[" not in rolloutdoctor("check", run, env={"FORCE_COLOR": "1", "NO_COLOR": "1"}).stdout
    assert "\x1b[" not in rolloutdoctor("check", run, "--color", "never", env={"FORCE_COLOR": "1"}).stdout


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("sample", ["run", "verl_rejected", "slime_ppo", "healthy"])
def test_what_a_rule_finds_does_not_depend_on_what_else_is_selected(rolloutdoctor, sample):
    words = ["check", SAMPLES / f"{sample}.parquet", "--steps", ":15", "--format", "json"]
    together = json.loads(rolloutdoctor(*words).stdout)["findings"]
    assert len(together) > 2
    for finding in together:
        alone = rolloutdoctor(*words, "--select", finding["code"])
        assert json.loads(alone.stdout)["findings"] == [finding]


def test_causes_are_listed_by_rule(rolloutdoctor):
    text = rolloutdoctor("explain", "causes").stdout
    assert "RDI003 group-partition\n  groups-by-position" in text
    assert "rejected-rows" not in text  # fixes have a page of their own
    (one,) = json.loads(rolloutdoctor("explain", "causes", "RDA005", "--format", "json").stdout)
    assert (one["name"], one["rule"]) == ("missing-reward-as-zero", "reward-missing-as-zero")
    assert one["trainers"] == list(TRAINERS)
    assert rolloutdoctor("explain", "causes", "RDM002").stdout.startswith("RDM002 has no causes")
    assert rolloutdoctor("explain", "causes", "RDX").returncode == 2
