"""Files of options and states: read within bounds, from regular files alone, whatever is nested in them."""

import os
import threading
from pathlib import Path

import pytest

from rolloutdoctor.cli.groups import _read_map
from rolloutdoctor.cli.settings import find_settings
from rolloutdoctor.engine.configure import read_trainer_config
from rolloutdoctor.engine.state_file import load_state
from rolloutdoctor.io.locations.small_files import MOST_BYTES, flat, read_small
from rolloutdoctor.results.errors import RolloutDoctorError, UsageError

READERS = {
    "trainer.json": read_trainer_config,
    "trainer.yaml": read_trainer_config,
    "map.toml": _read_map,
    "state.json": load_state,
    "rolloutdoctor.toml": lambda path: find_settings(Path(path).parent),
    "pyproject.toml": lambda path: find_settings(Path(path).parent),
}
CONFIGS = [name for name in READERS if not name.endswith("rolloutdoctor.toml") and name != "pyproject.toml"]
DEEP = {
    ".json": [
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"a":' * 500 + "1" + "}" * 500,
        '{"a": ' + "[" * 500 + "]" * 500 + "}",
    ],
    ".yaml": ["[" * 5_000, "{a: " * 500 + "1" + "}" * 500, "a: &x {b: *x}", "a: &x [*x]"],
    ".toml": ["a = " + "[" * 100_000, "a = " + "{b = " * 5_000, "set." + ".".join("a" * 500) + " = 1"],
}


def refusal(name, path):
    with pytest.raises(RolloutDoctorError) as caught:
        READERS[name](str(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    return str(caught.value)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_never_ends_is_not_read(tmp_path, name):
    link = tmp_path / name
    link.symlink_to("/dev/zero")
    assert "a device where a regular file was expected" in refusal(name, link)
    link.unlink()
    os.mkfifo(link)
    found = []
    thread = threading.Thread(target=lambda: found.append(refusal(name, link)), daemon=True)
    thread.start()
    thread.join(20)
    assert "a pipe where a regular file was expected" in found[0]
    link.unlink()
    link.mkdir()
    assert "a folder where a regular file was expected" in refusal(name, link)


@pytest.mark.parametrize("name", ["rolloutdoctor.toml", "pyproject.toml"])
def test_settings_that_are_no_file_are_passed_over(tmp_path, name):
    os.mkfifo(tmp_path / name)
    (tmp_path / "below").mkdir()
    find_settings(tmp_path / "below")


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_too_large(tmp_path, name):
    with (tmp_path / name).open("wb") as file:
        file.truncate(2**30 + 1 if name == "state.json" else MOST_BYTES + 1)
    if name == "state.json":
        with pytest.raises(UsageError, match=r"state.json: larger than the 16 MiB .*; give a state"):
            read_small(tmp_path / name, expected="give a state")
    else:
        most = 1 if name.endswith(".yaml") else 16
        assert f"larger than the {most} MiB that are read of such a file" in refusal(name, tmp_path / name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name in READERS for text in DEEP[name[name.rindex(".") :]]]
)
def test_whatever_is_nested_too_deeply(tmp_path, name, text):
    if name.endswith(".yaml"):
        pytest.importorskip("yaml")
    if name == "pyproject.toml":
        text = f"[tool.rolloutdoctor]\n{text}"
    (tmp_path / name).write_text(text)
    said = refusal(name, tmp_path / name)
    assert name in said


@pytest.mark.slow
def test_aliases_that_multiply(tmp_path):
    """A few lines of YAML stand for billions of options."""
    pytest.importorskip("yaml")
    for leaf in ("{a: 1}", "{}", "[1]"):
        lines = [f"x0: &x0 {leaf}"]
        for level in range(1, 30):
            inner = ", ".join(f"{'' if leaf == '[1]' else f'k{k}: '}*x{level - 1}" for k in range(9))
            lines.append(f"x{level}: &x{level} {'[' if leaf == '[1]' else '{'}{inner}{']' if leaf == '[1]' else '}'}")
        (tmp_path / "trainer.yaml").write_text("\n".join(lines))
        assert "more than 100,000" in refusal("trainer.yaml", tmp_path / "trainer.yaml")


def test_flat_keeps_what_it_should():
    assert flat({"a": {"b": {"c": [1, {"d": 2}]}}, "e": None}, "x") == {"a.b.c": [1, {"d": 2}], "e": None}


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 5000])
def test_what_is_no_path(path):
    with pytest.raises(UsageError) as caught:
        read_trainer_config(path)
    assert len(str(caught.value)) < 300
