"""Trainers whose releases are in git alone are named by the commit that was read: `--trainer NAME@COMMIT`."""

import pytest

from rolloutdoctor.engine.configure import configure
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.trainers.options import Layer
from rolloutdoctor.trainers.table import TRAINERS

IN_GIT = {
    "areal": ("cbff54d645d2cd8ee1f1c358a82f3f473588433d",),
    "miles": ("31f1ca961a94cb860cec3b2dea34ec332bfa8f76",),
    "nemo-rl": ("81aa43dda4765b0429cf31dab44441e4e4383911",),
    "open-instruct": ("e6c3044aa620",),
    "prime-rl": ("559b44772e471d1538537b8805cc77f3824a5e64", "60bc29547a8824ad1de7b9af8d265e2b27b2a72d"),
    "slime": ("a6272da0d4f3d0a08520c99a2f3b4f6c887960dc",),
}
STATED = {"miles": {"advantage_estimator": "grpo"}, "slime": {"advantage_estimator": "grpo"}}


def release(name, text):
    return configure(RunMetadata(), f"{name}@{text}", [Layer("test", STATED.get(name, {}))], lenient=True).release


@pytest.mark.parametrize(("name", "commit"), [(name, each) for name, found in IN_GIT.items() for each in found])
def test_a_commit_that_was_read(name, commit):
    for text in (commit, commit[:7], commit[:10].upper(), f"9.9.9.dev3+g{commit[:9]}"):
        assert release(name, text).state == "read", text
    # One other letter is another commit; nothing is said of it by numbers.
    other = ("0" if commit[0] != "0" else "1") + commit[1:7]
    found = release(name, other)
    assert (found.state, other in found.words) == ("not read", True)


@pytest.mark.parametrize("name", IN_GIT)
def test_every_trainer_in_git_names_the_commit_of_its_newest_code(name):
    newest = TRAINERS[name].read_code[-1]
    assert newest.commit
    assert release(name, newest.commit).numbers == release(name, newest.name).numbers


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("0.8.1.dev67", "read"),
        ("v0.8.1.dev67", "read"),
        ("0.8.1.dev67+d20260901", "read"),
        ("0.8.1.dev66", "not read"),
        ("0.8.1.dev68", "not read"),
        ("0.8.1.dev670", "not read"),
        ("0.8.1", "not read"),
        ("0.8.0", "read"),
    ],
)
def test_the_tag_of_a_commit_is_that_commit_and_its_neighbours_are_not(text, state):
    assert release("prime-rl", text).state == state
