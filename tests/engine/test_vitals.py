"""What the first screen of a log says of its quantities."""

import json

import numpy as np
import pytest

import rolloutdoctor as rd
from rolloutdoctor.engine.vitals import ERRORS
from rolloutdoctor.views.verdict import verdict


def log_of(path, rewards):
    rows = [{"step": n, "loss": 0.01 * n, "reward": float(x)} for n, x in enumerate(rewards, start=1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def thirds(errors: float, size: int) -> list[float]:
    """A reward that changes by so many standard errors from the first to the last third, of so many lines each."""
    noise = np.tile([-1.0, 1.0], size // 2) * ((size - 1) / size) ** 0.5
    return [*noise, *(noise + errors * (2 / size) ** 0.5 / 2), *(noise + errors * (2 / size) ** 0.5)]


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        (thirds(ERRORS - 0.1, 4), None),
        (thirds(ERRORS + 0.1, 4), "The reward rose: 0 in the first third, 2.9 in the last. "),
        (thirds(-ERRORS - 0.1, 4), "The reward fell: 0 in the first third, -2.9 in the last. "),
        (thirds(ERRORS + 0.1, 4)[1:], None),
    ],
)
def test_a_reward_that_moved_by_more_than_its_noise_is_said_first(tmp_path, rewards, said):
    report = rd.check(log_of(tmp_path / "log.jsonl", rewards))
    assert not [one for one in report.findings if "reward" in one.headline]
    assert verdict(report).startswith(said or "Too little to judge")
