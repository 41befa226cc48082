"""Rollouts of a loop with several updates each."""

import pytest

import rolloutdoctor as rd
from rolloutdoctor.importers.logs.rounds import Rounds

UPDATE = "pg_loss=-0.0{n} approx_kl=0.00{n} pg_clipfrac=0.0{n} vf_loss=0.{n}"


def text(head, update, *, rounds=6, updates=4, above=False):
    lines = []
    for n in range(1, rounds + 1):
        of_round = [update.format(n=m, n_all=(n - 1) * updates + m) for m in range(1, updates + 1)]
        line = head.format(n=n)
        lines += [*of_round, line] if above else [line, *of_round]
    return lines


@pytest.mark.parametrize(
    ("head", "update", "above"),
    [
        ("[rollout] mean_reward=0.{n} mean_len=12{n}", "  " + UPDATE, False),
        ("rollout: reward 0.{n}", "update: " + UPDATE, False),
        ("iter {n}: reward=0.{n}", "update {n}: " + UPDATE, True),
        ("Rollout {n}/6: reward=0.{n}", "  epoch 0 mb {n} " + UPDATE, False),
        ("mean_reward=0.{n}", UPDATE, False),
    ],
)
def test_a_rollout_is_a_step_with_the_means_of_its_updates(tmp_path, head, update, above):
    path = tmp_path / "ppo.log"
    path.write_text("\n".join(text(head, update, above=above)))
    report = rd.check(path)
    assert report.input.steps == 6
    vitals = {vital.name: (vital.first, vital.last) for vital in report.vitals}
    assert vitals["reward"] == (0.1, 0.6)
    assert vitals["clip_fraction"] == pytest.approx((0.025, 0.025))


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        (text("reward=0.{n}", UPDATE, rounds=3), 3),
        (text("reward=0.{n}", UPDATE, rounds=2), 0),
        (text("reward=0.{n}", UPDATE, rounds=6, updates=2), 6),
        (text("reward=0.{n}", UPDATE, rounds=6, updates=1), 0),
        # The last rollout was cut before its updates.
        ([*text("reward=0.{n}", UPDATE), "reward=0.7"], 7),
        # Those of several responses.
        ([line for line in text("reward=0.{n}", UPDATE) for _ in range(1 + line.startswith("reward"))], 0),
        # What is counted through the run is a step, and a rollout that counts anew is of another run.
        (text("reward=0.{n}", "step {n_all}: " + UPDATE), 0),
        (text("step 1: reward=0.{n}", UPDATE), 0),
        (text("reward=0.{n}", UPDATE + " reward=0.5"), 0),
    ],
)
def test_what_is_counted_or_has_one_update_is_read_otherwise(lines, count):
    assert len([*Rounds().records(lines)]) == count
