"""What a fix tells a user to do: which release of the trainer has it, if any."""

import re

import pytest

from rolloutdoctor.search.hypotheses.fixes import FIXES
from rolloutdoctor.trainers.table import TRAINERS


@pytest.mark.parametrize(
    ("name", "trainer", "words"),
    [
        ("kl-inplace", "slime", "use slime after 0.3.1 (#2114)"),
        ("kl-inplace", "miles", "not released (miles #1493 was open in September 2026): patch the trainer"),
        ("one-over-accumulation", "ms-swift", "use ms-swift 4.6.0 or newer (#10116)"),
        ("loo-std", "nemo-rl", "use NeMo-RL after 0.7.0 (#4158)"),
        ("padding-rows", "verl", "use a release of verl that has #5969"),
        ("zero-std", "slime", "no release of slime with this change is known: patch the trainer"),
    ],
)
def test_a_remedy_names_what_exists(name, trainer, words):
    assert FIXES[name].remedy(trainer, TRAINERS[trainer].title) == words


def test_every_thread_is_of_one_trainer_that_the_fix_is_about():
    """A thread of another repository says nothing of a trainer's releases: a few are of projects that started it."""
    for fix in FIXES.values():
        for thread in fix.upstream:
            owners = [trainer for trainer in TRAINERS if thread.is_of(trainer)]
            assert len(owners) <= 2, thread.url
            assert re.fullmatch(r"#[0-9]+", thread.number)
        for trainer in fix.trainers():
            assert fix.remedy(trainer, TRAINERS[trainer].title)
