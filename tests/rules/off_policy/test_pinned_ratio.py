"""RDO015: a ratio that stays at 1 through several updates of a batch."""

import pytest

import rolloutdoctor as rd
from rolloutdoctor.testing import check_log

OPTIONS = {
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 64,
    "actor.ppo_mini_batch_size": 16,
    "actor.ppo_epochs": 1,
}


def test_updates_that_do_not_move_the_log_probs():
    (found,) = check_log("RDO015", "verl", ppo_kl=[0.0] * 12, clip_fraction=[0.0] * 12, **OPTIONS).findings
    assert (found.severity.label, found.verdict) == ("warning", "exposed")
    assert found.headline == (
        "the log-probs move by exactly 0 nats in all 12 logged steps although the options state 4 updates per batch: "
        "the ratio is 1 throughout, and clips nothing"
    )


@pytest.mark.parametrize(
    "log",
    [
        {"ppo_kl": [0.0] * 11 + [1e-6]},
        {"ppo_kl": [0.0] * 12, "actor.ppo_mini_batch_size": 64},
        {"clip_fraction": [0.0] * 12},
    ],
    ids=["one moves", "one update", "nothing clipped"],
)
def test_what_is_no_pinned_ratio(log):
    assert not check_log("RDO015", "verl", **{**OPTIONS, **log}).findings


@pytest.mark.parametrize(("digits", "is_found"), [(3, False), (9, True)])
def test_a_log_that_rounds_shows_no_exact_0(tmp_path, digits, is_found):
    path = tmp_path / "train.log"
    numbers = {"actor/ppo_kl": 0.0, "actor/grad_norm": 0.123456789, "critic/score/mean": 0.3, "actor/pg_loss": 0.01}
    lines = (
        " - ".join([f"step:{step}", *(f"{name}:{value:.{digits}f}" for name, value in numbers.items())])
        for step in range(1, 13)
    )
    path.write_text("\n".join(lines) + "\n")
    stated = {f"actor_rollout_ref.{name}" if name.startswith("actor.") else name: x for name, x in OPTIONS.items()}
    report = rd.check(path, trainer="verl", options=stated, select=["RDO015"])
    assert bool(report.findings) == is_found
