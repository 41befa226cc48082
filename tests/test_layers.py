"""The formulas stay pure, only the command line prints, and what prints the rule book loads nothing heavy.

That imports go down the layers is held by import-linter (`make lint`).
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from log_files import FORMS

import rolloutdoctor

ROOT = Path(rolloutdoctor.__file__).parent
MODULES = {
    ".".join(["rolloutdoctor", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}

MATHS = ["ops", "formulas"]
MATHS_IMPORTS = {"collections", "dataclasses", "enum", "functools", "itertools", "math", "operator", "torch", "typing"}
OPS_IMPORTS = MATHS_IMPORTS | {"contextlib", "numpy", "statistics"}
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


@pytest.mark.parametrize("room", MATHS)
def test_maths_is_pure(room):
    allowed = {"rolloutdoctor", *(OPS_IMPORTS if room == "ops" else MATHS_IMPORTS)}
    imports = [
        (module, line, imported)
        for module in MODULES
        if room_of(module) == room
        for imported, line in imports_of(MODULES[module])
    ]
    assert imports
    assert not [each for each in imports if each[2].partition(".")[0] not in allowed]


def calls_print(module):
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        for node in ast.walk(tree)
    )


@pytest.mark.slow
def test_only_the_command_line_prints():
    rooms = {room_of(module) for module in MODULES if calls_print(module)}
    assert rooms == {"cli"}


def test_these_tests_see_something():
    assert len(MODULES) > 60
    of_the_spec = {name for name, _ in imports_of(MODULES["rolloutdoctor.trainers.spec"])}
    assert of_the_spec
    assert "rolloutdoctor.evaluation.evaluate" not in of_the_spec  # for types alone


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
        "import rolloutdoctor.search.hypotheses.fixes",
        "import rolloutdoctor.trainers.table",
        "import rolloutdoctor.results.findings",
        "import rolloutdoctor.data.schema",
    ],
)
def test_the_book_loads_nothing_heavy(code):
    assert loaded_after(code) == []


@pytest.mark.slow
def test_the_rules_load_polars_alone():
    """Their measures are expressions."""
    assert loaded_after("import rolloutdoctor.rules.table") == ["polars"]


@pytest.mark.slow
def test_heavy_packages_are_noticed():
    assert loaded_after("import torch") == ["torch"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["explain"], ["explain", "RDG001"], ["explain", "fixes"], ["explain", "metrics"]],
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
    # Rules are queries, so their book loads polars.
    assert loaded_after(code) == (["polars"] if arguments in (["explain"], ["explain", "RDG001"]) else [])


def test_a_command_is_imported_without_the_others():
    code = """
sys.argv = ["rolloutdoctor", "check", "--help"]
from rolloutdoctor.cli import main
try:
    main()
except SystemExit:
    pass
assert "rolloutdoctor.commands.check.cli" in sys.modules
assert not {f"rolloutdoctor.commands.{name}.cli" for name in ("view", "diff", "plot")} & {*sys.modules}
assert "http.server" not in sys.modules
"""
    assert loaded_after(code) == []


@pytest.mark.slow
def test_a_log_is_judged_without_what_other_inputs_and_formats_need():
    log = ROOT.parent / "sample_data" / "verifier_dies.log"
    others = ["pyarrow.compute", "http.client", "xml.sax"]
    code = f"""
sys.argv = ["rolloutdoctor", "check", {str(log)!r}]
from rolloutdoctor.cli import main
try:
    main()
except SystemExit as end:
    assert end.code == 1, end.code
assert not [name for name in {others!r} if name in sys.modules]
"""
    assert "polars" in loaded_after(code)


@pytest.mark.slow
def test_no_query_runs_while_modules_are_imported():
    """A query starts polars' threads, and a process that is forked after that waits for them for ever."""
    code = (
        "import importlib, os, sys, polars, pyarrow.parquet, torch\n"
        "count = lambda: len(os.listdir('/proc/self/task'))\n"
        "before = count()\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "assert count() == before, (before, count())\n"
    )
    names = [name for name in MODULES if not name.endswith("__main__") and name != "rolloutdoctor.callbacks.trl"]
    subprocess.run([sys.executable, "-c", code, *names], check=True)


@pytest.mark.slow
def test_a_log_of_any_form_is_judged_without_torch(tmp_path):
    """Most of a second goes by while torch is imported; a log of numbers has no tensor in it."""
    same = {"loss": 0.1, "grad_norm": 0.5, "completions/mean_length": 9.0, "epoch": 0.1}
    rows = [{"step": n, "reward": 0.1 * n, **same} for n in range(1, 13)]
    given = []
    for form in FORMS:
        folder = tmp_path / form.__name__
        folder.mkdir()
        form(folder, rows)
        given.append(str(folder))
    data = Path(__file__).parent / "importers" / "data"
    given += [str(data / "trl" / "output" / "checkpoint-12"), str(data / "beside" / "verl.log")]
    code = f"""
from rolloutdoctor.cli import main
others = [["check", "-v"], ["check", "--format", "json"], ["info"]]
for words in [*(["check", path] for path in {given!r}), *([*words, {given[0]!r}] for words in others)]:
    sys.argv = ["rolloutdoctor", *words]
    try:
        main()
    except SystemExit as end:
        assert end.code in (None, 0, 1), (sys.argv, end.code)
    assert "torch" not in sys.modules, sys.argv
"""
    assert "torch" not in loaded_after(code)
