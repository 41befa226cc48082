"""Imports go one way, the maths stays pure, and what only prints the book loads nothing heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rolloutdoctor

ROOT = Path(rolloutdoctor.__file__).parent
MODULES = {
    ".".join(["rolloutdoctor", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}

# A room is a module or a folder. Each may import what is above it, and its own folder.
# `objective` is plain data below the maths: it says what a trainer computes in names and numbers, and estimators and
# aggregations take their part of it as their argument. `fixes` edits it, and knows nothing of tensors either.
LAYERS = [
    [
        "ops",
        "errors",
        "escapes",
        "exact",
        "schema",
        "findings",
        "pictures",
        "comparison",
        "objective",
        "needs",
        "token_columns",
        "batch",
    ],
    ["stats", "kl", "advantages", "corrections", "losses"],
    ["fixes", "reward_pass", "row_pass", "token_part", "token_blocks", "fused"],
    ["objective_pass", "token_pass", "evaluation", "radii"],
    ["trainers"],
    ["rules"],
    ["io", "importers", "recorders"],
    ["settings", "engine"],
    ["testing", "api", "cli", "__main__"],
]
# Beside the layers: these know plain data only, and are known only by the command line and the Python interface.
VIEWS = {
    "report": {"findings", "pictures", "comparison", "errors", "escapes", "exact"},
    "plots": {"findings", "pictures", "errors", "escapes", "exact"},
}
RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}

MATHS = ["ops", "stats", "kl", "advantages", "corrections", "losses"]
MATHS_IMPORTS = {"collections", "dataclasses", "enum", "functools", "itertools", "math", "operator", "torch", "typing"}
OPS_IMPORTS = MATHS_IMPORTS | {"contextlib", "numpy"}
HEAVY = ["torch", "polars", "pyarrow", "matplotlib"]


def room_of(module):
    return module.removeprefix("rolloutdoctor").removeprefix(".").partition(".")[0]


def imports_of(path):
    """Every module that is imported at run time, at the top or inside functions, with its line."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            if node.module == "rolloutdoctor":
                yield from ((f"rolloutdoctor.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield node.module, node.lineno


def inside(module):
    """Rooms of this package that a module imports."""
    rooms = {room_of(each) for each in MODULES}
    for imported, line in imports_of(MODULES[module]):
        # `from rolloutdoctor import __version__` is a name, not a room
        if imported.startswith("rolloutdoctor.") and room_of(imported) in rooms:
            yield room_of(imported), line


def test_every_room_has_its_place():
    rooms = {room_of(module) for module in MODULES if module != "rolloutdoctor"}
    assert rooms <= RANK.keys() | VIEWS.keys()


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module):
    room = room_of(module)
    for imported, line in inside(module):
        where = f"{module}, line {line}: {imported}"
        if imported == room:
            continue
        if room in VIEWS:
            assert imported in VIEWS[room], where
        elif imported in VIEWS:
            assert room in ("cli", "__main__", "api"), where
        elif room:
            assert RANK[imported] <= RANK[room], where


def edges():
    return {(room_of(module), imported) for module in MODULES for imported, _ in inside(module)}


def test_no_rooms_import_each_other():
    """Within a layer, too, imports go one way."""
    found = {(one, other) for one, other in edges() if one != other}
    assert not {pair for pair in found if pair[::-1] in found}


@pytest.mark.parametrize("module", [module for module in MODULES if room_of(module) in MATHS])
def test_maths_is_pure(module):
    for imported, line in imports_of(MODULES[module]):
        top = imported.partition(".")[0]
        allowed = OPS_IMPORTS if room_of(module) == "ops" else MATHS_IMPORTS
        assert top in allowed | {"rolloutdoctor"}, f"{module}, line {line}: {imported}"


def calls_print(module):
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        for node in ast.walk(tree)
    )


@pytest.mark.parametrize("module", [module for module in MODULES if room_of(module) not in ("cli", "__main__")])
def test_only_the_command_line_prints(module):
    assert not calls_print(module)


def test_these_tests_see_something():
    assert len(MODULES) > 60
    assert ("rules", "trainers") in edges()  # at the top of a file
    assert ("trainers", "advantages") in edges()  # inside a function
    assert ("batch", "errors") in edges()
    assert "rolloutdoctor.evaluation" not in {name for name, _ in imports_of(MODULES["rolloutdoctor.trainers.spec"])}


def loaded_after(code):
    """Heavy packages that are loaded after running `code` in a fresh interpreter."""
    script = f"import sys\n{code}\nsys.stderr.write(' '.join(n for n in {HEAVY!r} if n in sys.modules) + ' loaded')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr.endswith(" loaded"), done.stderr
    return done.stderr.splitlines()[-1].removesuffix("loaded").split()


@pytest.mark.parametrize(
    "code",
    [
        "import rolloutdoctor",
        "import rolloutdoctor.rules.table",
        "import rolloutdoctor.fixes",
        "import rolloutdoctor.trainers.table",
        "import rolloutdoctor.findings",
        "import rolloutdoctor.schema",
    ],
)
def test_the_book_loads_nothing_heavy(code):
    assert loaded_after(code) == []


def test_heavy_packages_are_noticed():
    assert loaded_after("import torch") == ["torch"]


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["rule"], ["rule", "RDG001"], ["fixes"], ["trainers"]]
)
def test_the_command_line_opens_at_once(arguments):
    try:
        from rolloutdoctor.cli import main  # noqa: F401
    except ImportError:
        pytest.skip("the command line is not there yet")
    code = f"""
sys.argv = ["rolloutdoctor", *{arguments!r}]
from rolloutdoctor.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""
    assert loaded_after(code) == []
