"""The file that `verify --write` writes: it needs no import of ours, passes the right function and fails another."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from rolloutdoctor.commands.verify.cases import CASES
from rolloutdoctor.commands.verify.written import written_test
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers.options import Layer

FUNCTIONS = "verification.formulas"


def layers(**options):
    return [Layer("test", options)]


def ran(folder, text):
    path = folder / "test_exact.py"
    path.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(path)]
    environment = {"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": ""}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(
    ("function", "code", "words"), [("grpo", 0, f"{len(CASES)} passed"), ("rloo", 1, f"{len(CASES)} failed")]
)
def test_the_file_tests_a_function(tmp_path, function, code, words):
    text = written_test("verl@0.9.1", layers(adv_estimator="grpo"), f"{FUNCTIONS}:{function}")
    done = ran(tmp_path, text)
    assert (done.returncode, words in done.stdout) == (code, True), done.stdout


@pytest.mark.parametrize(
    ("estimator", "inputs"),
    [
        ("rloo", set()),
        ("gae", {"values"}),
        ("remax", {"reward_baselines"}),
        ("optimal_token_baseline", {"old_log_probs", "sum_pi_squared"}),
    ],
)
def test_the_file_has_the_inputs_of_the_estimator(estimator, inputs):
    scope = {}
    exec(written_test("verl@0.9.1", layers(adv_estimator=estimator)), scope)
    assert {"values", "old_log_probs", "sum_pi_squared", "reward_baselines"} & scope["CASES"][0].keys() == inputs


def test_a_file_has_no_rewards_by_function():
    with pytest.raises(UsageError, match="check it with the fixture rollout_cases"):
        written_test("verl@0.9.1", layers(adv_estimator="gdpo", gdpo_reward_keys="format,accuracy"))


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_the_file_imports_torch_and_pytest_alone(estimator):
    text = written_test("verl@0.9.1", layers(adv_estimator=estimator))
    tree = ast.parse(text)
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"inspect", "numpy", "pytest", "torch"}
    assert "rolloutdoctor" not in text.replace("Written by rolloutdoctor", "")
    assert max(map(len, text.splitlines())) <= 160
    runner = text[text.index("\ndef arguments") :]
    assert len(runner.splitlines()) <= 45


@pytest.mark.parametrize(
    ("trainer", "function", "words"),
    [("", "", "needs --trainer"), ("verl@0.9.1", "module", "expected MODULE:NAME"), ("nobody", "", "nobody")],
)
def test_a_mistake_is_one_sentence(trainer, function, words):
    with pytest.raises(UsageError, match=words):
        written_test(trainer, layers(adv_estimator="grpo") if trainer.startswith("verl") else [], function)
