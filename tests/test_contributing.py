"""The recipes are true: their diffs apply to the repository as it is, and what they add works."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rolloutdoctor.rules.table_rule import Rule

ROOT = Path(__file__).parent.parent
PAGES = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "contribute").glob("*.md"))]
RECIPES = [diff for page in PAGES for diff in re.findall(r"^```diff\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)]
RULE_PAGE = (ROOT / "docs" / "contribute" / "rule.md").read_text(encoding="utf-8")

USE = """
import json
from pathlib import Path
import rolloutdoctor
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.testing import diagnose_one, toy_batch
from rolloutdoctor.trainers.options import (Layer, resolve)
from rolloutdoctor.trainers.releases import parse_version
from rolloutdoctor.trainers.table import find

def evaluated(name, **options):
    trainer = find(name)
    config = resolve(trainer.options, parse_version(trainer.newest), [Layer("test", options)], trainer=name)
    return evaluate(toy_batch(rewards=[[1, 0, 0.25]]), trainer.objective(config))

print(diagnose_one("RDO099", toy_batch([[1, 0]], rollout=0.0), trainer="trl"))
print(diagnose_one("RDO099", toy_batch([[1, 0]], rollout=-0.5), trainer="trl"))
print(evaluated("verl", **{"algorithm.adv_estimator": "midrange"}).rows.advantage_N.tolist())
found = [evaluated("trl", loss_type=name).tokens.grad_l1_N for name in ("topr", "grpo")]
print(bool(found[0].allclose(found[1])))
plain = {"algo.advantage.estimator": "rloo", "algo.kl.init_coef": 0.0}
half = evaluated("openrlhf", **plain, **{"actor.negative_coef": 0.5}).tokens
print((half.grad_l1_N / evaluated("openrlhf", **plain).tokens.grad_l1_N).tolist())
skyrl = find("skyrl")
for version in ("0.3.0", "0.3.1"):
    config = resolve(skyrl.options, parse_version(version), [], trainer="skyrl")
    print(skyrl.release(version).state, config["trainer.algorithm.grpo_norm_by_std"])
row = {"step": 1, "prompt": "a", "log_probs": [-0.5, -0.25]}
Path("pebble_1.jsonl").write_text("".join(json.dumps({**row, "score": score}) + "\\n" for score in (1, 0)))
print(rolloutdoctor.check("pebble_1.jsonl").trainer)
rolloutdoctor.plot("scores", "pebble_1.jsonl").savefig("scores.png")
"""


OF_THE_ENGINE = frozenset(
    {
        "measured",
        "queried",
        "reads_turns",
        "series",
        "measures",
        "worst",
        "listed",
        "title",
        "why",
        "questions",
        "watched",
        "compared_fixes",
    }
)
"""Methods of a rule that the engine calls and no recipe overrides."""


@pytest.fixture(scope="module")
def applied(tmp_path_factory):
    """A copy of the sources with every example in it, what did not apply, and `packs.py` after the new rule."""
    copy = tmp_path_factory.mktemp("copy")
    for folder in ("rolloutdoctor", "tests/rules"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (
        "pyproject.toml",
        *(f"tests/{name}.py" for name in ("every_objective", "new_rule", "objectives", "test_one_place")),
        "tests/importers/importing.py",
    ):
        (copy / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, copy / file)
    make = [sys.executable, "tests/new_rule.py", "certain-tokens", "RDO099"]
    subprocess.run(make, cwd=copy, check=True, capture_output=True)
    entered = (copy / "rolloutdoctor" / "packs.py").read_text(encoding="utf-8").splitlines()
    apply = ["git", "apply", "-C1", "-"]
    done = [subprocess.run(apply, cwd=copy, input=each.encode(), capture_output=True, check=False) for each in RECIPES]
    return copy, [one.stderr.decode() for one in done if one.returncode], entered


def test_a_new_rule_is_one_more_line_of_the_table(applied):
    before = (ROOT / "rolloutdoctor" / "packs.py").read_text(encoding="utf-8").splitlines()
    line = '    "rules.off_policy.certain_tokens:CertainTokens",'
    assert [one for one in applied[2] if one != line] == before
    assert applied[2].count(line) == 1


def test_every_diff_applies(applied):
    assert len(RECIPES) == 8
    assert applied[1] == []


@pytest.mark.slow
def test_what_they_add_works(applied):
    copy = applied[0]
    done = subprocess.run([sys.executable, "-c", USE], cwd=copy, capture_output=True, encoding="utf-8", check=False)
    assert done.stdout.splitlines() == [
        "RDO099 info confirmed: tokens_share 1",
        "RDO099 clean",
        "[0.5, -0.5, -0.25]",
        "True",
        "[1.0, 0.5, 0.5]",
        "read True",
        "read False",
        "pebble",
    ], done.stderr
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "testpaths=tests/trainers"]
    done = subprocess.run(tests, cwd=copy, capture_output=True, encoding="utf-8", check=False)
    assert (done.returncode, done.stdout.count("3 passed")) == (0, 1), done.stdout
    ruff = [sys.executable, "-m", "ruff", "check", "--quiet", "rolloutdoctor", "tests/trainers"]
    assert subprocess.run(ruff, cwd=copy, capture_output=True, check=False).stdout == b""


def test_the_whole_rule_is_the_one_of_the_tested_package():
    (shown,) = re.findall(r"^```python\n(.*?)^```$", RULE_PAGE, re.DOTALL | re.MULTILINE)
    assert shown == (ROOT / "tests" / "plugins" / "acme_rl" / "long_responses.py").read_text(encoding="utf-8")


def test_the_methods_of_a_rule_are_those_there_are_and_each_example_has_its_own():
    rows = re.findall(r"^\| `(\w+)` \| .* \| `([\w/]+\.py)` \|$", RULE_PAGE, re.MULTILINE)
    hooks = {name for name, one in vars(Rule).items() if callable(one) and not name.startswith("_")} - OF_THE_ENGINE
    assert {name for name, _ in rows} == hooks
    folder = ROOT / "rolloutdoctor" / "rules"
    for name, example in rows:
        assert f"    def {name}(" in (folder / example.removeprefix("rules/")).read_text(encoding="utf-8"), (
            name,
            example,
        )
