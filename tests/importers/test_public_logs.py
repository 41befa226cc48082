"""Numbers of public trainings, without names and texts: what the first sentence says of each, and its exit code."""

import re

import pytest
from importers.importing import DATA

import rolloutdoctor as rd
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.verdict import exit_code
from rolloutdoctor.views.verdict import verdict

LOGS = DATA / "public"

SAYS: dict[str, tuple[int, str]] = {
    # A KL of 2.4 nats a token for a third of the spread of the rewards.
    # It rises over 20 of 93 lines, and its noise falls below nine tenths of the last level until the end.
    "kl_runs_off.log": (0, r"KL rose from step 4 on: from 0\.0023 to 2\.5 nats"),
    # Its fall from the hump leaves the reward above its start, and is within the noise of four responses a step.
    "rise_and_fall.log": (
        0,
        r"At least 40 % of the logged steps train nothing.*The mean response has 232 of 256 .*The reward probably rose",
    ),
    "length_runs_off.json": (0, r"20 % of the responses are truncated from step"),
    # Dicts of responses among lines of names and numbers, which end in a dict of the rewards.
    "entropy_explodes.log": (1, r"Entropy rose steadily from step 3 on: from 0\.732 to 3\.46 nats"),
    "diverges.log": (1, r"KL blew up at step 418"),
    "rewards_alike.log": (0, r"At least 80\.7 % of the 114 steps of 200 that log a reward std train nothing"),
    "negative_kl.ipynb": (0, r"objective/kl falls to -37\.9 nats: the responses were not sampled from the policy"),
    # Look-alikes, of which nothing is known to be wrong.
    "small_gain.log": (0, r"The reward has not moved|No fault"),
    "few_lines.log": (0, r"The policy hardly moved: the KL is at most 0\.00035 nats"),
    "nemo_rl.log": (
        0,
        r"The reward probably rose: 0\.283 in the first third, 0\.383 .* and found no fault",
    ),
    # Each padded token counts as a log-prob of 1.
    "ppo_padded_entropy.json": (0, r"The reward has not moved"),
    "behind_a_name.log": (0, r"The reward has not moved: 0\.22 .* 0\.307"),
    "tensors.log": (0, r"The reward has not moved: -0\.000939"),
    # An exponential of the log-ratio of one token, which the reward does not show.
    "huge_kl_spike.json": (
        0,
        r"The mean response has 193 of 200 tokens.* A KL spike of 3\.79e\+06.* and found no fault",
    ),
    "episodes.ipynb": (0, r"The reward has not moved: -0\.511"),
    "ppo_blocks.ipynb": (0, r"Run 2 of 2: The reward rose: -13\.9 in the first third, -5\.63 in the last"),
    "pairs.jsonl": (3, r"This is a log of preference or reward-model training, which is not checked"),
    "fine_tuning.jsonl": (3, r"This is a log of supervised fine-tuning, which is not checked"),
    "loss_total.ipynb": (0, r"The log has no known reward, only the loss \(-0\.788 to 5\.83"),
}
"""File to exit code and how its answer begins."""


def test_every_log_that_is_kept_is_read():
    assert {path.name for path in LOGS.iterdir()} == SAYS.keys()


@pytest.mark.parametrize("name", SAYS)
def test_what_a_public_log_says_first(name):
    report = rd.check(LOGS / name)
    code, words = SAYS[name]
    assert re.match(words, verdict(report)), verdict(report)
    assert exit_code(report, opt.FailOn.error) == code
