"""The commands on a trainer's own dump: what is said, what is left behind, and the exit codes."""

import json
import sys
import tempfile
from types import SimpleNamespace

import pytest
from importers.importing import DATA
from pyarrow.parquet import read_table

from rolloutdoctor.cli import main

MIXED = DATA / "trl" / "mixed"


@pytest.fixture
def rolloutdoctor(capsys, monkeypatch, tmp_path):
    """Run the command line here, with its temporary files in a folder of the test."""
    monkeypatch.setenv("COLUMNS", "100")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    def invoke(*words):
        monkeypatch.setattr(sys, "argv", ["rolloutdoctor", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        printed = capsys.readouterr()
        assert list(scratch.iterdir()) == []
        return SimpleNamespace(code=stop.value.code or 0, out=printed.out, err=printed.err)

    return invoke


@pytest.mark.slow
def test_check_says_which_importer_and_why(rolloutdoctor):
    found = rolloutdoctor("check", MIXED, "--select", "RDI", "--format", "concise")
    assert found.code == 0
    assert found.err.startswith("rolloutdoctor: read with the importer trl: the directory holds completions_*.parquet")
    assert "RDI002 overwritten-completions confirmed" in found.out
    assert rolloutdoctor("check", MIXED, "--select", "RDI", "--format", "concise", "--quiet").err == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("importer", "path", "why"),
    [
        ("nemo-rl", "nemo_rl/grpo", "train_data_step1.jsonl is a train_data_step*.jsonl with rewards and idx"),
        ("prime-rl-tokens", "prime_rl/token_exports", "step_1/rank_0.jsonl has the keys schema_version"),
        ("prime-rl-traces", "prime_rl/rollouts", "the first traces.jsonl has episodes with a task and traces"),
        ("open-instruct", "open_instruct", "run_rollouts_000000.jsonl has the keys step, sample_idx"),
        ("slime", "slime", "the directory holds numbered *.pt of torch.save (rollout_data, train_data)"),
    ],
)
def test_every_dump_is_detected_and_can_be_named(rolloutdoctor, importer, path, why):
    words = ("check", DATA / path, "--select", "RDI001", "--format", "concise")
    found = rolloutdoctor(*words)
    assert found.code == 0
    assert found.err.startswith(f"rolloutdoctor: read with the importer {importer}: {why}")
    named = rolloutdoctor(*words, "--from", importer)
    assert named.err.startswith(f"rolloutdoctor: read with the importer {importer}: as asked for")
    assert named.out == found.out


def test_findings_in_a_dump_exit_with_1_and_leave_nothing(rolloutdoctor):
    assert rolloutdoctor("check", MIXED, "--fail-on", "warning").code == 1


def test_info_names_the_dump(rolloutdoctor):
    found = rolloutdoctor("info", MIXED, "--format", "json")
    body = json.loads(found.out)
    assert body["files"] == [str(MIXED)]
    assert body["tier"] == 1
    assert body["config"]["num_generations"] == {"value": 4, "origin": "file metadata", "assumed": False}


@pytest.mark.slow
def test_convert_then_check(rolloutdoctor, tmp_path):
    target = tmp_path / "run.parquet"
    found = rolloutdoctor("export", "--what", "run", MIXED, "-o", target)
    assert found.code == 0
    assert found.out == ""
    assert found.err.endswith(f"96 rows written to {target}\n")
    direct = rolloutdoctor("check", MIXED, "--format", "json").out
    assert rolloutdoctor("check", target, "--format", "json").out == direct


@pytest.mark.parametrize("given", [("--map", "@{}"), ("--map-file", "{}")])
def test_a_mapping_from_a_file(rolloutdoctor, tmp_path, given):
    (tmp_path / "mine.jsonl").write_text('{"it": 1, "r": 0.5, "group_id": "a"}\n')
    (tmp_path / "map.toml").write_text('step = "it"\nreward = "r"\n')
    words = (
        "export",
        "--what",
        "run",
        tmp_path / "mine.jsonl",
        "-o",
        tmp_path / "run.parquet",
        *(word.format(tmp_path / "map.toml") for word in given),
    )
    assert rolloutdoctor(*words).code == 0
    # What is on the command line goes over the file.
    again = rolloutdoctor(*words, "--map", "reward=it")
    assert (again.code, read_table(tmp_path / "run.parquet")["reward"].to_pylist()) == (0, [1.0])
    (tmp_path / "map.toml").write_text("step = 1\n")
    found = rolloutdoctor(*words)
    assert found.code == 2
    assert "step has to be a name in quotes" in found.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check", MIXED, "--from", "tlr"], "--from tlr: no such importer; did you mean 'trl'? (known: "),
        (["check", MIXED, "--from", "verl"], "no rollouts (*.jsonl with input, output, score and step) there"),
        (["check", MIXED, "--map", "reward"], "--map reward: expected COLUMN=WHERE"),
        (["check", MIXED, "--map", "kl=x"], "the importer trl knows its columns; only reward can be mapped there"),
        (["check", "nowhere", "--from", "trl"], "nowhere: no such file or directory"),
        (["export", "--what", "run", MIXED, "-o", "run.json"], "a run file is called NAME.parquet"),
        (["export", "--what", "run", DATA, "-o", "run.parquet"], "no importer knows this; name one with --from"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_2(rolloutdoctor, words, message):
    found = rolloutdoctor(*words)
    assert found.code == 2
    assert message in found.err.splitlines()[-1]
    assert found.out == ""


FULL = {
    "it": 1,
    "r": 0.5,
    "gid": "a",
    "m": [1, 1],
    "pol": [-0.5, -0.25],
    "old": [-0.5, -0.25],
    "ref": [-0.75, -0.5],
}
FULL_MAP = {"step": "it", "reward": "r", "group_id": "gid", "response_mask": "m", "policy_log_probs": "pol"}
FULL_MAP |= {"old_log_probs": "old", "ref_log_probs": "ref"}


@pytest.fixture
def full_dump(tmp_path):
    """Four rows of two groups under names of their own, and the words that say what they are."""
    rows = [FULL | {"gid": group, "r": reward} for group, reward in [("a", 1.0), ("a", 0.0), ("b", 1.0), ("b", 1.0)]]
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    mapping = [word for column, name in FULL_MAP.items() for word in ("--map", f"{column}={name}")]
    return path, mapping


TRL = ("--trainer", "trl", "--set", "beta=0.1", "--set", "num_generations=2")
COMMANDS = {
    "check": ("check", "--format", "json"),
    "info": ("info", "--format", "json"),
    "diff": ("diff", "--fix", "zero-std", "--format", "json"),
    "recompute": ("export", "--what", "tokens", "--format", "json"),
    "plot": ("plot", "gradient", "-o", "OUT.svg"),
    "report": ("report", "-o", "OUT.html"),
}


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_a_mapped_dump(rolloutdoctor, tmp_path, full_dump, command):
    path, mapping = full_dump
    run = tmp_path / "run.parquet"
    assert rolloutdoctor("export", "--what", "run", path, *mapping, "-o", run).code == 0

    def outcome(name, *words):
        target = tmp_path / name
        found = rolloutdoctor(*(word.replace("OUT", str(target)) for word in COMMANDS[command]), *words, *TRL)
        assert found.code in (0, 1), found.err
        drawn = [each.read_bytes() for each in tmp_path.glob(f"{name}.*")]
        return found.out.replace(str(path), "RUN").replace(str(run), "RUN"), drawn

    direct, converted = outcome("direct", path, *mapping), outcome("converted", run)
    assert direct[0] == converted[0]
    assert len(direct[1]) == len(converted[1]) == (command in ("plot", "report"))
    if command == "plot":
        assert direct == converted


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_knows_the_options_of_dumps(rolloutdoctor, tmp_path, full_dump, command):
    path, _ = full_dump
    words = [word.replace("OUT", str(tmp_path / "x")) for word in COMMANDS[command]]
    found = rolloutdoctor(*words, path, "--from", "tlr", "--allow-pickle")
    assert (found.code, "--from tlr: no such importer; did you mean 'trl'?" in found.err) == (2, True)
    (tmp_path / "map.toml").write_text("nothing = 'x'\n")
    found = rolloutdoctor(*words, path, "--map-file", tmp_path / "map.toml")
    assert (found.code, "no column is called 'nothing'" in found.err) == (2, True)


def test_a_dump_is_never_written_over(rolloutdoctor, full_dump):
    path, mapping = full_dump
    before = path.read_bytes()
    folder = path.parent / "rows"
    folder.mkdir()
    inside = folder / "rows.jsonl"
    inside.write_bytes(before)
    target = folder / "x.svg"
    target.write_text("kept")
    found = rolloutdoctor("plot", "gradient", folder, *mapping, *TRL, "-o", target)
    assert found.code == 2
    assert "is a file of the run itself" in found.err
    assert target.read_text() == "kept"


def test_diff_shows_the_texts_of_a_dump_unless_told_not_to(rolloutdoctor, tmp_path, full_dump):
    path, mapping = full_dump
    rows = [json.loads(line) | {"prompt": "what is it"} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("diff", path, *mapping, *TRL, "--fix", "zero-std")
    assert "what is it" in rolloutdoctor(*words).out
    assert "what is it" not in rolloutdoctor(*words, "--no-text").out


def test_a_log_alone(rolloutdoctor, tmp_path):
    log = tmp_path / "log.jsonl"
    data = {"critic/advantages/max": 0.0, "critic/advantages/min": 0.0, "actor/grad_norm": 0.5, "actor/pg_loss": 0.0}
    log.write_text(json.dumps({"step": 1, "data": data}) + "\n")
    found = rolloutdoctor("check", log, "--fail-on", "warning", "--format", "concise")
    assert found.code == 1
    assert found.err == "rolloutdoctor: logged metrics without rollouts (verl's file logger)\n"
    assert "RDG003 reward-free-step confirmed" in found.out
    assert "0: metrics only" in rolloutdoctor("info", log).out
    beyond = rolloutdoctor("check", log, "--steps", "7:")
    assert beyond.code == 3
    assert beyond.out.startswith("Nothing could be checked: nothing was read: the run has steps 1 to 1; widen --steps")
    for kind, why in (("kl", "there are logged metrics and no rollouts"), ("rewards", "missing column reward")):
        refused = rolloutdoctor("plot", kind, log, "-o", tmp_path / "x.png")
        assert (refused.code, why in refused.err) == (2, True)
    for command in ("diff", "recompute"):
        words = [word.replace("OUT", str(tmp_path / "x")) for word in COMMANDS[command]]
        refused = rolloutdoctor(*words, log)
        assert (refused.code, "logged metrics, not rollouts" in refused.err) == (2, True)
