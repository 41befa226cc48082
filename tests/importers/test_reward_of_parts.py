"""Rewards that are an object: their total, or mean, and its parts."""

import json

import pytest

import rolloutdoctor as rd
from rolloutdoctor.results.errors import InputError


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("whole", ["total", "mean"])
def test_the_parts_of_a_logged_reward_are_functions(tmp_path, whole):
    rows = [{"step": n, "reward": {whole: 0.4 + n / 100, "format": 1.0, "std": 0.1}} for n in range(1, 21)]
    report = rd.check(lines(tmp_path / "log.jsonl", rows))
    (reward,) = (vital for vital in report.vitals if vital.name == "reward")
    assert (reward.first, reward.last) == pytest.approx((0.41, 0.6))
    assert [finding.code for finding in report.findings] == ["RDT002"]
    assert "reward function format is constant" in str(report.findings[0])
    assert not any(note.startswith("not recognised: reward/format") for note in report.notes)


@pytest.mark.parametrize("step", [{"step": 3}, {}])
def test_the_total_of_a_response_is_its_reward(tmp_path, step):
    rows = [
        {**step, "prompt": "1+1=", "response": "2", "reward": {"format": 1.0, "total": total}} for total in (0.5, 0.25)
    ]
    report = rd.check(lines(tmp_path / "rollouts.jsonl", rows))
    assert report.input.rows == 2


@pytest.mark.parametrize("reward", [{"format": 1.0, "answer": 0.5}, {"total": 1.0}])
def test_a_reward_without_a_total_beside_parts_is_not_guessed(tmp_path, reward):
    path = lines(tmp_path / "rollouts.jsonl", [{"step": 3, "prompt": "1+1=", "response": "2", "reward": reward}] * 2)
    if len(reward) > 1:
        with pytest.raises(InputError, match="no rollouts that are known"):
            rd.check(path)
