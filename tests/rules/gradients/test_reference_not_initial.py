"""RDG012 on a KL that is summed over a response, as TRL's PPO logs it."""

import json

import numpy as np
import pytest

import rolloutdoctor as rd

LATER = [12.0, 11.0, 13.0, 12.5, 11.5, 12.0]


def lines(kls, start=4, **more):
    """What TRL's PPO prints after each update: no step, but the episodes so far."""
    return [
        {
            "eps": 1,
            "objective/kl": kl,
            "objective/scores": 0.1 * (place % 3),
            "val/ratio": 1.0,
            "episode": start * place,
        }
        | more
        for place, kl in enumerate(kls, 1)
    ]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (lines([10.0, *LATER]), "the KL is 10 nats a response before the first update"),
        (lines([3.0] * 6, **{"response_length": 100.0}), "a response before the first"),
        # The policy starts as the reference; within the noise of another precision; it grows.
        (lines([0.0, *LATER]), None),
        (lines([4.9] * 6), None),
        (lines([6.0, *(2 * kl for kl in LATER)]), None),
        (lines([3.0] * 6, **{"response_length": 1000.0}), None),
        # The log begins in the middle of the training.
        (lines([10.0, *LATER])[2:], "skipped"),
        # A distillation, as its end says.
        (lines(np.linspace(20, 2, 20)), "skipped"),
    ],
)
def test_a_kl_of_responses_before_the_first_update(tmp_path, rows, words):
    path = tmp_path / "ppo.log"
    path.write_text("".join(f"{row}\n" for row in rows))
    report = rd.check(path)
    found = [one.headline for one in report.findings if one.code == "RDG012"]
    if words in (None, "skipped"):
        assert found == []
        assert ("RDG012" in {one.code for one in report.skipped}) == (words == "skipped")
    else:
        assert words in found[0]


def test_lines_that_count_their_episodes_are_numbered_from_the_first(tmp_path):
    path = tmp_path / "ppo.log"
    for rows, is_told in (
        (lines(LATER), False),
        (lines(LATER)[1:], True),
        ([{**LOSS, "kl": kl} for kl in LATER], True),
    ):
        path.write_text("".join(f"{row}\n" for row in rows))
        assert any("they are numbered from 1" in note for note in rd.check(path).notes) == is_told


LOSS = {"loss": 0.1, "reward": 0.5}


def test_a_kl_of_tokens_is_what_it_was(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"step": n + 1, **LOSS, "kl": 0.4}) + "\n" for n in range(8)))
    (found,) = (one for one in rd.check(path).findings if one.code == "RDG012")
    assert found.headline.startswith("the KL is 0.4 nats in the first step")
