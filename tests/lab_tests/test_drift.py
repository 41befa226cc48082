"""A release in which a watched function changed is noticed; one that is only written differently is not."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from drift import report, source, watched

ROOT = Path(__file__).parents[2]

LOSS = '''
def grpo_compute_loss(new, old, **kwargs):
    """The loss."""
    beta = kwargs.get("beta", 0.0)
    ratio = (new - old).exp()
    return ratio * beta  # of each token

if True:
    def create_completion_attention_mask(ids):
        return ids != 0
'''

FILE = "unsloth_zoo/rl_replacements.py"


def wheel(folder: Path, text: str, release: str = "2030.1.1", file: str = FILE, name: str = "unsloth_zoo") -> Path:
    path = folder / f"{name}-{release}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(file, text)
    return path


def moved(tmp_path: Path, text: str, **words: str) -> report.Move:
    """What is said of a release with another text."""
    before = source.fingerprint(wheel(tmp_path, LOSS, "2029.12.1"))
    return report.compare("unsloth_zoo", wheel(tmp_path, text, **words), {"release": "2029.12.1", **before._asdict()})


CHANGES = {
    "an operator": (("ratio * beta", "ratio + beta"), ["grpo_compute_loss"]),
    "a number": (("!= 0", "!= 1"), ["create_completion_attention_mask"]),
    "an order": (("new - old", "old - new"), ["grpo_compute_loss"]),
    "a decorator": (("def grpo", "@torch.no_grad()\ndef grpo"), ["grpo_compute_loss"]),
    "a default": (("new, old,", "new, old=None,"), ["grpo_compute_loss"]),
    "a second definition": (("if True", "def grpo_compute_loss():\n    return 0\n\nif True"), ["grpo_compute_loss"]),
}


@pytest.mark.parametrize(("change", "functions"), CHANGES.values(), ids=CHANGES)
def test_a_change_of_a_watched_function_is_noticed(tmp_path, change, functions):
    assert change[0] in LOSS
    move = moved(tmp_path, LOSS.replace(*change))
    assert [name.split(":")[1] for name in move.functions] == functions
    assert move.state == "not read: functions changed"


@pytest.mark.parametrize(
    "change",
    [
        ("# of each token", "# of each trained token"),
        ('"""The loss."""', '"""The loss,\n    of a micro-batch."""'),
        ('    """The loss."""\n', ""),
        ("new, old, **kwargs", "\n    new,\n    old,\n    **kwargs\n"),
        ('"beta"', "'beta'"),
        ("if True:", "def unwatched():\n    pass\n\nif True:"),
    ],
)
def test_what_is_only_written_differently_is_not(tmp_path, change):
    assert change[0] in LOSS
    move = moved(tmp_path, LOSS.replace(*change))
    assert move.functions == []
    assert move.state == "not read: no watched function changed"


def test_a_function_that_is_gone_is_noticed(tmp_path):
    text = LOSS.replace("create_completion_attention_mask", "completion_mask")
    assert moved(tmp_path, text).functions == [f"{FILE}:create_completion_attention_mask (gone)"]
    assert len(moved(tmp_path, LOSS, file="unsloth_zoo/moved.py").gone) == 2


def test_options_come_go_and_change(tmp_path):
    text = LOSS.replace('kwargs.get("beta", 0.0)', 'kwargs.get("beta", 0.1), kwargs.get("delta", None)')
    move = moved(tmp_path, text)
    assert move.came == ["grpo_compute_loss.delta = None"]
    assert move.defaults == ["grpo_compute_loss.beta: 0.0 -> 0.1"]
    assert moved(tmp_path, LOSS.replace('kwargs.get("beta", 0.0)', "1")).went == ["grpo_compute_loss.beta"]


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("class C:\n    a: int = 1\n    b: list = field(default_factory=list)", "C", {"a": "1", "b": "list"}),
        ("def f():\n    x = {'a': 1, 'b': None}", "x", {"a": "1", "b": "None"}),
        ("p.add_argument('--a', type=int, default=3)", "add_argument", {"--a": "3"}),
        ("p.add_argument('-b', '--bb', action='store_true')", "add_argument", {"--bb": "'store_true'"}),
    ],
)
def test_options_are_read_from_classes_dictionaries_and_calls(text, name, expected):
    assert source.options(source.ast.parse(text), name) == expected


def test_a_wheel_of_several_folders_is_read(tmp_path):
    inside = f"unsloth_zoo-2030.1.1.data/purelib/{FILE}"
    assert moved(tmp_path, LOSS, file=inside).functions == []


@pytest.mark.slow
def test_the_command_needs_no_network(tmp_path):
    folder, page = tmp_path / "wheels", tmp_path / "drift.md"
    folder.mkdir()
    command = [sys.executable, "tests/lab/drift", "--wheels", str(folder), "--page", str(page)]

    def run() -> subprocess.CompletedProcess:
        return subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=False)

    assert (run().returncode, page.exists()) == (2, False)
    wheel(folder, LOSS)
    done = run()
    assert (done.returncode, done.stderr) == (1, "")
    text = page.read_text(encoding="utf-8")
    assert f"| unsloth_zoo | {watched.PACKAGES['unsloth_zoo'].read} | 2030.1.1 | not read: functions changed |" in text
    assert "grpo_accumulated_loss (gone)" in text


def test_a_release_is_read_only_with_stored_results(tmp_path):
    command = [
        sys.executable,
        "tests/lab/drift",
        "--read",
        str(wheel(tmp_path, LOSS)),
        "--goldens",
        "tests/goldens/none.npz",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 2
    assert "results of its own functions are stored" in done.stderr


@pytest.mark.parametrize("package", report.known())
def test_what_is_known_is_what_the_trainer_says_was_read(package):
    """Who raises the newest release of a trainer stores results of it, and its functions."""
    of_package = report.known()[package]
    assert of_package["release"] == watched.PACKAGES[package].read
    assert (ROOT / of_package["goldens"]).exists()
    names = [f"{file}:{name}" for file, name in watched.watched(watched.FUNCTIONS, package)]
    assert list(of_package["functions"]) == sorted(names)
    assert of_package["options"]


def test_the_page_is_of_what_was_read():
    rows = [line.split(" | ") for line in report.PAGE.read_text(encoding="utf-8").splitlines() if line.count("|") == 6]
    stated = {row[0].removeprefix("| "): row[1] for row in rows[1:]}
    assert {package: stated[package] for package in report.known()} == {
        package: known["release"] for package, known in report.known().items()
    }
