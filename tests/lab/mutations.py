"""Change a number or a sign of a rule, and see whether the rule's own fast tests notice: a laboratory, no test.

    python tests/lab/mutations.py --draw 60 --seed 0
    python tests/lab/mutations.py --draw 30 --seed 0 --measures

Thresholds of classes and numbers of modules become 0.7 or 1.4 times what they are, counts at least one more or one
less; comparisons are turned around, and sums become differences. What survives needs a run just below the number and
one just above, or one of each sign: `boundaries.py` of its family. `--measures` changes what rules share
(`rules/measures/`), and asks the tests of the rules that import it.
"""

import argparse
import ast
import inspect
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

HERE = Path(__file__).resolve().parents[1]
SHARED = (
    *("test_thresholds", "test_row_thresholds", "test_row_constants", "test_numbers", "test_log_rules"),
    *("test_few_lines", "test_logged_gaps", "test_log_alone"),
)
"""Files of tests of all rules, by code."""

LONGEST = 900
"""Seconds of the processor for the tests of a rule: a change that does not end is noticed, a busy machine is not."""

BROKEN = 99
"""Exit code of a process that could not run the tests at all."""

TURNED = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE, ast.Add: ast.Sub, ast.Sub: ast.Add}


@dataclass(frozen=True)
class Mutation:
    """One change of a rule.

    Attributes:
        path: of the rule, from the root of the package.
        line: of the change.
        place: which node it is, in the order of `ast.walk`.
        factor: by which a number is multiplied; None: a sign is turned.
    """

    path: str
    line: int
    place: int
    factor: float | None

    def applied(self, source: str) -> str:
        """Return the source with the change."""
        tree = ast.parse(source)
        node = list(ast.walk(tree))[self.place]
        if isinstance(node, ast.Compare):
            node.ops = [TURNED[type(node.ops[0])]()]
        elif isinstance(node, ast.BinOp):
            node.op = TURNED[type(node.op)]()
        else:
            assert isinstance(node, ast.Constant)
            assert self.factor is not None
            assert isinstance(node.value, int | float)
            node.value = changed(node.value, self.factor)
        return ast.unparse(tree)

    def told(self, source: str) -> str:
        """Say what is changed."""
        line = source.splitlines()[self.line - 1].strip()
        return f"{self.path}:{self.line}: {'turned' if self.factor is None else f'times {self.factor}'}: {line}"


def changed(number: float, factor: float) -> float:
    """Multiply a number; a count by at least one more or one less."""
    if isinstance(number, int):
        return number + (1 if factor > 1 else -1) * max(1, round(abs(number * (factor - 1))))
    return number * factor


def thresholds(path: str, source: str, factor: float) -> Iterator[Mutation]:
    """Yield the changes of numbers of the rule's class, and of its module."""
    tree = ast.parse(source)
    places = {id(node): place for place, node in enumerate(ast.walk(tree))}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for node in (*tree.body, *(inner for one in classes for inner in one.body)):
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        # A share of 0.0 has no multiple.
        if isinstance(value, ast.Constant) and type(value.value) in (int, float) and value.value != 0.0:
            yield Mutation(path, value.lineno, places[id(value)], factor)


def signs(path: str, source: str) -> Iterator[Mutation]:
    """Yield the comparisons and sums of the functions of a rule that can be turned around."""
    for place, node in enumerate(ast.walk(ast.parse(source))):
        operators = node.ops if isinstance(node, ast.Compare) else [node.op] if isinstance(node, ast.BinOp) else []
        text = isinstance(node, ast.BinOp) and any(isinstance(one, ast.JoinedStr) for one in (node.left, node.right))
        if len(operators) == 1 and type(operators[0]) in TURNED and not text:
            assert isinstance(node, ast.Compare | ast.BinOp)
            yield Mutation(path, node.lineno, place, None)


def rule_files(root: Path, *, measures: bool = False) -> list[Path]:
    """Return the files of all rules, or of what they share."""
    files = sorted(root.glob("rules/*/*.py"))
    return [path for path in files if (path.parent.name == "measures") == measures and path.stem[0] != "_"]


def drawn(root: Path, count: int, seed: int, *, measures: bool = False) -> list[Mutation]:
    """Draw so many changes from all rules at random: half of them are numbers, half signs."""
    draw = random.Random(seed)
    files = rule_files(root, measures=measures)
    sources = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in files}
    numbers = [one for path, text in sources.items() for one in thresholds(path, text, draw.choice([0.7, 1.4]))]
    turned = [one for path, text in sources.items() for one in signs(path, text)]
    chosen = [*draw.sample(numbers, min(count // 2, len(numbers))), *draw.sample(turned, count - count // 2)]
    draw.shuffle(chosen)
    return chosen


def code_of(source: str) -> str:
    """Return the code of the rule of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "code":
            assert isinstance(node.value, ast.Constant)
            return str(node.value.value)
    return ""


def rules_of(root: Path, path: str) -> dict[str, str]:
    """Return the rules whose tests may notice a change of a file, by code: itself, or those that import it."""
    if "/measures/" not in path:
        return {code_of((root / path).read_text(encoding="utf-8")): path}
    imported, found = f"rules.measures.{Path(path).stem} ", dict[str, str]()
    for rule in rule_files(root):
        source = rule.read_text(encoding="utf-8")
        if imported in source:
            found[code_of(source)] = rule.relative_to(root).as_posix()
    return found


def is_noticed(root: Path, one: Mutation, rules: dict[str, str]) -> bool:
    """Run the rules' own fast tests in a process of their own, which fail if the change is noticed."""
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        # 1: a test failed, 2: a file could not be imported, a signal: it did not end. Nothing else says anything.
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) in (0, 1, 2), (one, status)
        return status != 0
    try:
        os._exit(tested(root, one, rules))
    finally:
        os._exit(BROKEN)


@dataclass(frozen=True)
class OfRule:
    """Plugin of pytest that keeps tests of rules: with a code or name in their own names, parameters or source.

    Attributes:
        codes: of the rules.
        stems: names of their files.
    """

    codes: tuple[str, ...]
    stems: tuple[str, ...]

    def pytest_collection_modifyitems(self, items: "list[pytest.Item]") -> None:
        """Drop the tests of other rules."""
        items[:] = [one for one in items if self._is_of(one.nodeid, self._told(one))]

    def _is_of(self, name: str, told: str) -> bool:
        return any(stem in name for stem in self.stems) or any(code in told for code in self.codes)

    def _told(self, item: "pytest.Item") -> str:
        """All that says which rule a test is of."""
        function, call = getattr(item, "function", None), getattr(item, "callspec", None)
        source = inspect.getsource(function) if function else ""
        return " ".join((item.nodeid, source, *(str(one) for one in (call.params.values() if call else ()))))


def tested(root: Path, one: Mutation, rules: dict[str, str]) -> int:
    """Run the fast tests that name the rules, in this process, and return what pytest returns."""
    import pytest

    signal.setitimer(signal.ITIMER_PROF, LONGEST)
    os.chdir(root)
    sys.path[:0] = [str(root), str(root / "tests")]
    files = dict.fromkeys(f"rolloutdoctor/{path}" for path in (one.path, *rules.values()))
    for code, path in rules.items():
        rule = Path(path)
        own, boundaries = (
            Path("tests") / rule.parent / f"test_{rule.name}",
            Path("tests") / rule.parent / "boundaries.py",
        )
        shared = [Path(f"tests/rules/{name}.py") for name in SHARED]
        told = {file: (boundaries if "row_thresholds" in file.name else file) for file in shared}
        files |= dict.fromkeys([str(own)] if own.exists() else [])
        files |= {str(file): None for file, where in told.items() if code in where.read_text(encoding="utf-8")}
    quiet = ["-qq", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", "--no-header", "--tb=no", "-m", "not slow"]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    plugin = OfRule((*rules,), tuple(Path(path).stem for path in (one.path, *rules.values())))
    return int(pytest.main([*quiet, *files], plugins=[plugin]))


def copied(root: Path) -> Path:
    """Copy the package to a folder in which it can be changed, beside links to the tests and their samples."""
    shutil.copytree(HERE.parent / "rolloutdoctor", root / "rolloutdoctor", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(HERE / "rules", root / "tests/rules", ignore=shutil.ignore_patterns("__pycache__"))
    for name in sorted(path.name for path in HERE.iterdir() if path.name not in ("rules", "__pycache__")):
        (root / "tests" / name).symlink_to(HERE / name)
    for name in ("pyproject.toml", "sample_data", "docs"):
        (root / name).symlink_to(HERE.parent / name)
    return root


def main() -> None:
    """Draw changes, try each, and print those that no test noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=int, default=60, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measures", action="store_true")
    asked = parser.parse_args()
    # Imported once; each try forks. Pytest rewrites hypothesis as it imports it.
    import polars
    import pyarrow
    import pytest
    import torch

    assert all((polars, pyarrow, pytest, torch))
    with tempfile.TemporaryDirectory() as folder:
        root = copied(Path(folder))
        package, killed = root / "rolloutdoctor", 0
        mutations = drawn(package, asked.draw, asked.seed, measures=asked.measures)
        for one in mutations:
            path = package / one.path
            source = path.read_text(encoding="utf-8")
            path.write_text(one.applied(source), encoding="utf-8")
            noticed = is_noticed(root, one, rules_of(package, one.path))
            path.write_text(source, encoding="utf-8")
            killed += noticed
            print("noticed " if noticed else "SURVIVED", one.told(source), flush=True)
    print(f"{killed} of {len(mutations)} noticed")


if __name__ == "__main__":
    main()
