"""A trainer is known by name in its own folder, the table of packs, readers of logs, its recorder and its callback."""

import ast
import re
from pathlib import Path

import pytest

import rolloutdoctor
from rolloutdoctor.trainers.table import TRAINERS

ROOT = Path(rolloutdoctor.__file__).parent
OWN_ROOMS = ("trainers", "packs.py", "importers", "opening", "recorders", "callbacks", "metric_names")
MODULES = {str(path.relative_to(ROOT)): path for path in sorted(ROOT.rglob("*.py"))}
OTHERS = [name for name in MODULES if Path(name).parts[0] not in OWN_ROOMS]

PROSE = {
    "commands/check/cli.py": "an example of a command line",
    "commands/demo/cli.py": "the words about runs that come with the package, and how to record one",
    "commands/explain/cli.py": "an example of a command line",
    "commands/new_rule/template.py": "the example of a skeleton",
    "commands/verify/cli.py": "an example of a command line",
    "search/hypotheses/fixes.py": "where a fix comes from, how it stands upstream, and in which releases",
    "search/hypotheses/reward_fixes.py": "where a fix comes from, how it stands upstream, and in which releases",
}
"""Modules whose sentences for people name a trainer, with what these sentences are."""

SAMPLES = {path.name for path in (ROOT.parent / "sample_data").iterdir()}
"""Files of runs that come with the package."""

NAMES = "|".join(sorted({"trl" if name.startswith("trl") else name.replace("-", "[-_]") for name in TRAINERS}))
NAMED = re.compile(rf"(?<![a-z])({NAMES})(?![a-z])", re.IGNORECASE)
WORD_BREAK = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
ADDRESS = re.compile(r"https?://\S+")


def is_named(text):
    """Whether a text names a trainer; an address of a thread upstream does not count."""
    return bool(NAMED.search(WORD_BREAK.sub("_", ADDRESS.sub("", text))))


def texts(tree):
    """Every identifier and every string of a module that is not a docstring, with its line."""
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if id(node) not in docstrings:
            for _, value in ast.iter_fields(node):
                yield from ((text, getattr(node, "lineno", 0)) for text in _as_list(value) if isinstance(text, str))


def _as_list(value):
    return value if isinstance(value, list) else [value]


def found_in(source, *, prose=False):
    """Texts that name a trainer; with `prose` sentences, names of samples and the trainers of a fix are left out."""
    return [
        (text, line)
        for text, line in texts(ast.parse(source))
        if is_named(text) and not (prose and (" " in text.strip() or text in SAMPLES or text in TRAINERS))
    ]


@pytest.mark.slow
def test_no_name_of_a_trainer():
    assert not [name for name in OTHERS if is_named(name.removesuffix(".py"))]
    found = {name: found_in(MODULES[name].read_text(encoding="utf-8"), prose=name in PROSE) for name in OTHERS}
    assert {name: named for name, named in found.items() if named} == {}


@pytest.mark.parametrize("name", PROSE)
def test_prose_is_needed(name):
    assert found_in(MODULES[name].read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "source",
    [
        "from rolloutdoctor.trainers.slime import trainer",
        "def verl_sapo(): ...",
        "class TrlPass: ...",
        "f(is_trl=True)",
        "x.slime",
        "if name == 'trl-rloo': ...",
        "x = f'{count} rows; verl fails here'",
        "MODES = {'verl/token-mean': 1}",
    ],
)
def test_names_are_noticed(source):
    assert found_in(source)


@pytest.mark.parametrize(
    "source",
    ['"""As verl has it."""', "x = 'https://github.com/huggingface/trl/issues/1'", "overlap = 'the intervals overlap'"],
)
def test_what_is_no_name(source):
    assert not found_in(source)


def test_rooms_of_trainers_are_there():
    rooms = {path.stem for path in (ROOT / "trainers").iterdir()}
    assert {"trl" if name.startswith("trl") else name.replace("-", "_") for name in TRAINERS} <= rooms
    assert len(OTHERS) > 100
