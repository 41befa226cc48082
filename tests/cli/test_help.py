"""Pages of help, and what a shell completes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rolloutdoctor.cli import complete
from rolloutdoctor.cli.app import SENTENCE


@pytest.mark.parametrize("width", ["80", "120"])
def test_help_is_in_groups_without_variables_and_types(rolloutdoctor, width):
    done = rolloutdoctor("check", "--help", env={"COLUMNS": width})
    assert done.returncode == 0
    for title in ("Arguments:", "The run:", "Rules:", "Result:", "Exit code:", "Computing:"):
        assert title in done.stdout.splitlines()
    assert "env var" not in done.stdout
    assert "list[str]" not in done.stdout
    assert "TEXT" not in done.stdout
    assert "ROLLOUTDOCTOR_FORMAT for --format" in " ".join(done.stdout.split())


def test_the_first_page_has_some_twenty_options_and_the_other_all(rolloutdoctor):
    first, every = (rolloutdoctor("check", flag).stdout for flag in ("--help", "--help-all"))
    options = {page: re.findall(r"^  (?:-\w, )?(--[a-z-]+)", page, re.MULTILINE) for page in (first, every)}
    assert len(options[first]) <= 23
    assert set(options[first]) < set(options[every])
    for rare in (
        "--state",
        "--on-finding",
        "--engine",
        "--state-dir",
        "--save-state",
        "--memory",
        "--dtype",
        "--color",
    ):
        assert (rare in options[first], rare in options[every]) == (False, True)
    for alias in ("--exit-zero", "--quiet", "--map-file"):
        assert alias not in options[every]
    titles = re.findall(r"^([A-Z][a-z ]+):$", every, re.MULTILINE)
    assert titles[-3:] == ["Following a run", "Scale", "Examples"]
    # Of commands without the second page the first has every option.
    assert "--dtype" in rolloutdoctor("plot", "--help").stdout


def test_the_help_begins_as_the_readme_does(rolloutdoctor):
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert " ".join(SENTENCE.split()) in " ".join(readme.split())
    assert readme.split("\n\n")[1].startswith(SENTENCE.partition("(")[0])
    assert " ".join(SENTENCE.split()) in " ".join(rolloutdoctor("--help", env={"COLUMNS": "80"}).stdout.split())


def test_words_are_completed():
    assert complete.codes("RDG001") == [("RDG001", "zero-std-kl")]
    assert ("zero-std-kl", "RDG001") in complete.codes("zero")
    assert [word for word, _ in complete.fixes("zero-")] == ["zero-std", "zero-length-reward"]
    assert "zero-std:pr5640" in [word for word, _ in complete.fixes("zero-std:")]
    assert "trl" in [word for word, _ in complete.trainers("t")]
    assert "beta=" in [word for word, _ in complete.options("be")]
    assert [word for word, _ in complete.kinds("adv")] == ["advantages"]


@pytest.mark.slow
def test_completion_imports_no_torch():
    code = (
        "import sys; from rolloutdoctor.cli import complete as c; "
        "[f('r') for f in (c.codes, c.fixes, c.trainers, c.options, c.kinds)]; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0


@pytest.mark.slow
def test_a_shell_gets_the_words():
    words = {
        "_ROLLOUTDOCTOR_COMPLETE": "complete_bash",
        "COMP_WORDS": "rolloutdoctor check --select RDG00",
        "COMP_CWORD": "3",
    }
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv = ['rolloutdoctor']; from rolloutdoctor.cli import main; main()"],
        env=os.environ | words,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert "RDG001" in done.stdout.split(), done.stderr


def test_no_sentence_of_the_list_of_commands_is_cut(rolloutdoctor):
    done = rolloutdoctor("--help", env={"COLUMNS": "80"})
    assert "..." not in done.stdout.partition("Look at a run:")[2]
    assert "whatever it states." in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("command", ["check", "merge", "plot"])
def test_each_example_is_a_command_to_copy(rolloutdoctor, command):
    done = rolloutdoctor(command, "--help", env={"COLUMNS": "80"})
    examples = done.stdout.partition("Examples:\n")[2]
    assert all(line.startswith("  ") for line in examples.splitlines())
    assert max(map(len, examples.splitlines())) <= 80
    commands = examples.replace(" \\\n", " ").strip().splitlines()
    assert len(commands) > 1
    assert all(line.strip().startswith("rolloutdoctor ") and ";" not in line for line in commands)


@pytest.mark.parametrize("page", [[], ["rules"], ["fixes"], ["trl"], ["trl", "-v"], ["metrics", "verl"], ["entropy"]])
def test_pages_of_the_book_fit_the_terminal(rolloutdoctor, page):
    done = rolloutdoctor("explain", *page, env={"COLUMNS": "80"})
    assert done.returncode == 0
    # Addresses are not cut.
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if "://" not in line)
