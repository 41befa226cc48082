"""What a maker of stored results passes to the real function is what is passed here: no maker drops rows by itself."""

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MAKERS = sorted([*HERE.glob("make_*.py"), *(HERE / "real" / "make").glob("*_results.py")])
OF_ROWS = {
    *("mask", "token", "kept", "response_mask", "truncated"),
    *("reward", "rewards", "error", "advantage", "advantages"),
}
"""Names and keys of what a row is dropped by."""

ALLOWED = {
    ("make_prime_rl.py", "not (is_filtered and value == 0.0)"): "the orchestrator ships no row of an advantage of 0",
}
"""Conditions that stand for a step of the trainer between two of its functions, with that step."""


def names_of(node: ast.expr) -> set[str]:
    """Names, attributes and keys that an expression reads."""
    parts = list(ast.walk(node))
    keys = {each.value for each in parts if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    names = {each.id for each in parts if isinstance(each, ast.Name)}
    return keys | names | {each.attr for each in parts if isinstance(each, ast.Attribute)}


def conditions(tree: ast.AST) -> list[ast.expr]:
    """Conditions under which a value is left out of a sequence: of comprehensions, and of what is appended."""

    def appends(branch: ast.If) -> bool:
        return any("append" in names_of(part.value) for part in branch.body if isinstance(part, ast.Expr))

    nodes = list(ast.walk(tree))
    inside = [test for node in nodes if isinstance(node, ast.comprehension) for test in node.ifs]
    return inside + [node.test for node in nodes if isinstance(node, ast.If) and appends(node)]


def dropped_by(source: str) -> set[str]:
    """Conditions of a maker that read what a row is dropped by."""
    return {
        ast.unparse(test)
        for test in conditions(ast.parse(source))
        # Some choose statements of a source by what they say.
        if (names_of(test) & OF_ROWS or "value == 0.0" in ast.unparse(test)) and "unparse" not in names_of(test)
    }


def test_there_are_makers():
    assert len(MAKERS) > 8


@pytest.mark.parametrize("path", MAKERS, ids=lambda path: path.name)
def test_no_maker_drops_rows(path):
    found = {(path.name, each) for each in dropped_by(path.read_text(encoding="utf-8"))}
    assert found <= ALLOWED.keys()


def test_a_maker_that_drops_rows_is_seen():
    appended = 'for row in rows:\n    if any(row["mask"]):\n        groups.append(row)'
    assert dropped_by(appended) == {"any(row['mask'])"}
    assert dropped_by("kept = [row for row in rows if row.mask]") == {"row.mask"}
    assert dropped_by("kept = [row for row in rows if row.rank == rank]") == set()
