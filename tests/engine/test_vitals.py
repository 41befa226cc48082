"""What the first screen of a log says of its quantities."""

import json

import numpy as np
import pytest

import rolloutdoctor as rd
from rolloutdoctor.engine.vitals import _trend
from rolloutdoctor.results.findings import InputSummary, Report
from rolloutdoctor.results.vitals import Vital
from rolloutdoctor.views.log_outcome import (
    FEWEST,
    FEWEST_OF_THIRDS,
    LIKELY,
    LIKELY_FALL,
    SURE,
    SURE_ENDS,
    before_the_rules,
)
from rolloutdoctor.views.verdict import verdict


def log_of(path, rewards, **others):
    rows = [{"step": n, "loss": 0.01 * n, "reward": float(x)} for n, x in enumerate(rewards, start=1)]
    path.write_text("".join(json.dumps(row | others) + "\n" for row in rows))
    return path


def thirds(errors: float, size: int) -> list[float]:
    """A reward that changes by so many standard errors from the first to the last third, of so many lines each."""
    noise = np.tile([-1.0, 1.0], size // 2) * ((size - 1) / size) ** 0.5
    return [*noise, *(noise + errors * (2 / size) ** 0.5 / 2), *(noise + errors * (2 / size) ** 0.5)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        (
            thirds(SURE - 0.1, 4),
            "The reward probably rose: 0 in the first third, 2.76 in the last (change of +1.3 to +4.2). ",
        ),
        (thirds(SURE + 0.1, 4), "The reward rose: 0 in the first third, 2.9 in the last. "),
        (thirds(-SURE - 0.1, 4), "The reward fell: 0 in the first third, -2.9 in the last. "),
        (thirds(-SURE + 0.1, 4), "The reward probably fell: "),
        (thirds(-LIKELY_FALL - 0.1, 4), "The reward probably fell: "),
        (thirds(-LIKELY_FALL + 0.1, 4), "The reward did not rise: 0 in the first third, -2.05 in the last "),
        (thirds(LIKELY + 0.1, 4), "The reward probably rose: "),
        (thirds(LIKELY - 0.1, 4), "12 lines are too few to tell whether the reward rises: 0 in the first third, "),
        (thirds(LIKELY - 0.1, 6), "18 lines are too few to tell whether the reward rises: 0 in the first third, "),
        (thirds(LIKELY - 0.1, 8), "The reward has not moved: "),
        (thirds(-LIKELY + 0.1, 4), "12 lines are too few to tell whether the reward rises: 0 in the first third, "),
        (
            thirds(SURE + 0.1, 4)[1:],
            "11 lines are too few to tell whether the reward rises: 0.866 in the first, 3.77 in the last (range -0.866 "
            "to 3.77). ",
        ),
        (range(7), "The reward rose: 0.5 in the first third, 5.5 in the last of 7 lines. "),
        (range(7, 0, -1), "The reward fell: 6.5 in the first third, 1.5 in the last of 7 lines. "),
        (range(6), "The reward probably rose: 0.5 in the first third, 4.5 in the last of 6 lines. "),
        (range(6, 0, -1), "6 lines are too few to tell whether the reward rises: 6 in the first, 1 in the last. "),
        (range(5), "The reward probably rose: 0 in the first third, 4 in the last of 5 lines. "),
        (
            [0.2056, 0.2058, 0.2064],
            "3 lines are too few to tell whether the reward rises: 0.2056 in the first, 0.2064 ",
        ),
        (range(4), "4 lines are too few to tell whether the reward rises: 0 in the first, 3 in the last. "),
        ([0.5], "1 line is too few to tell whether the reward rises: it is 0.5. "),
        ([0.5] * 3, "3 lines are too few to tell whether the reward rises: it is 0.5 in all of them. "),
    ],
)
def test_how_the_reward_went_is_said_first(tmp_path, rewards, said):
    assert len(thirds(1, 4)) == FEWEST < FEWEST_OF_THIRDS
    assert verdict(rd.check(log_of(tmp_path / "log.jsonl", rewards))).startswith(said)


@pytest.mark.parametrize(("noise", "said"), [(0.8, "The reward rose: "), (1.0, "The reward has not moved: ")])
def test_a_rise_within_the_first_third_is_a_rise(tmp_path, noise, said):
    rewards = np.concatenate([np.linspace(0, 10, 8), np.full(67, 10.0)])
    rewards += np.random.default_rng(0).normal(size=75) * noise
    report = rd.check(log_of(tmp_path / "log.jsonl", rewards))
    trend = next(one.trend for one in report.vitals if one.name == "reward")
    assert 0 < trend.change / trend.error < LIKELY
    assert (trend.of_ends > SURE_ENDS) == said.startswith("The reward rose")
    assert verdict(report).startswith(said)


@pytest.mark.parametrize(
    ("reward", "accuracy", "said"),
    [
        (
            [0.5, 0.6] * 15,
            [0.3, *range(1, 30)],
            "The accuracy rose: 4.53 in the first third, 24.5 in the last. The reward",
        ),
        ([0.5, 0.6] * 15, thirds(SURE + 0.1, 10), "The accuracy rose: "),
        (
            [0.5, 0.6] * 15,
            thirds(SURE - 0.1, 10),
            "The reward has not moved: 0.55 in the first third, 0.55 in the last (change of -0.047 to +0.047). The "
            "accuracy probably rose: ",
        ),
        (range(30), range(30), "The reward rose: 4.5 in the first third, 24.5 in the last. Too little"),
        (
            range(30),
            [0.9 - 0.005 * step for step in range(30)],
            "The reward rose: 4.5 in the first third, 24.5 in the "
            "last. The accuracy fell: 0.878 in the first third, 0.778 in the last. Too little",
        ),
        (
            [0.31, 0.48, 0.66, 0.83, 0.91],
            [0.42, 0.4, 0.43, 0.41, 0.42],
            "The reward probably rose: 0.31 in the first third, 0.91 in the last of 5 lines. Too little",
        ),
    ],
)
def test_an_accuracy_that_goes_another_way_is_said(tmp_path, reward, accuracy, said):
    path = tmp_path / "log.jsonl"
    both = enumerate(zip(reward, accuracy, strict=True))
    rows = [{"step": n, "loss": 0.01 * n, "reward": r, "accuracy": a} for n, (r, a) in both]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert verdict(rd.check(path)).startswith(said), verdict(rd.check(path))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("kl", 0.0999, "The reward rose: 4.5 in the first third, 24.5 in the last. "),
        (
            "kl",
            0.1001,
            "The reward rose: 4.5 in the first third, 24.5 in the last, at a KL of 0.1 nats a token at the end. ",
        ),
        ("objective/kl", 9.99, "The reward rose: 4.5 in the first third, 24.5 in the last. "),
        (
            "objective/kl",
            10.01,
            "The reward rose: 4.5 in the first third, 24.5 in the last, at a KL of 10 nats a response",
        ),
    ],
)
def test_a_gain_says_how_far_the_policy_is_from_the_reference(tmp_path, name, value, said):
    path = tmp_path / "log.jsonl"
    rows = [{"step": n, "loss": 0.01 * n, "reward": n, name: 0.0 if n < 20 else value} for n in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert verdict(rd.check(path)).startswith(said), verdict(rd.check(path))


@pytest.mark.parametrize(
    ("value", "said"), [(9.99, ". "), (10.01, "; the policy is at a KL of 10 nats a response at the end. ")]
)
def test_a_reward_that_has_not_moved_says_how_far_the_policy_is_from_the_reference(tmp_path, value, said):
    path = tmp_path / "log.jsonl"
    rows = [{"step": n, "loss": 0.01 * n, "reward": n % 2, "objective/kl": 0.0 if n < 20 else value} for n in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = "The reward has not moved: 0.5 in the first third, 0.5 in the last (change of -0.47 to +0.47)"
    assert verdict(rd.check(path)).startswith(words + said), verdict(rd.check(path))


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([401, 399, 350, 300, 250, 201, 199], "; the response length fell from 401 to 199."),
        ([401, 399, 350, 300, 250, 202, 200], " (range 0.5 to 0.6)."),
        ([400, 300, 350, 200, 250, 150, 160], " (range 0.5 to 0.6)."),
        ([100, 110, 120, 150, 170, 210, 230], "; the response length rose from 100 to 230."),
    ],
)
def test_what_changes_steadily_in_few_lines_is_told_beside_them(tmp_path, lengths, said):
    path = tmp_path / "log.jsonl"
    rows = [{"step": n, "reward": 0.5 + n % 2 / 10, "response_length": each} for n, each in enumerate(lengths)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = verdict(rd.check(path)).partition(" Too little")[0]
    assert first.startswith("7 lines are too few to tell whether the reward rises: 0.5 in the first, 0.5 in the last")
    assert first.endswith(said), first


@pytest.mark.slow
@pytest.mark.parametrize("lines", [5, 9, 12, 20, 60])
def test_noise_seldom_rises_or_falls(lines):
    draws = np.random.default_rng(0).binomial(8, 0.3, (1000, lines)) / 8
    said = []
    for draw in draws:
        vital = Vital("reward", "reward", "reward", "1", tuple(range(lines)), tuple(map(float, draw)), (), _trend(draw))
        found = Report("0", "cpu", "float32", InputSummary(steps=lines), vitals=(vital,))
        said.append(" ".join(before_the_rules(found)).partition(":")[0])
    assert sum(words in ("The reward rose", "The reward fell") for words in said) <= 15
    assert said.count("The reward probably fell") <= 15
    assert said.count("The reward probably rose") <= 60


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            {"loss": 0.5},
            "The log has no known reward, only the loss (0.5 in all 12 lines), which does not",
        ),
        ({"loss": 0.5, "kl": 0.1, "entropy": 2.0}, "The log has no known reward, only loss, entropy and KL: whether"),
        ({"loss": 0.5, "kl": 0.1, "accuracy": 0.5}, "12 lines are too few to tell whether the accuracy rises"),
    ],
)
def test_a_log_without_a_reward_says_what_it_has(tmp_path, line, said):
    if line.keys() == {"loss"}:
        (tmp_path / "one.jsonl").write_text(json.dumps({"step": 1, "learning_rate": 1e-6, **line}) + "\n")
        assert "only the loss (0.5 in 1 line), which" in verdict(rd.check(tmp_path / "one.jsonl", trainer="trl"))
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"step": step, "learning_rate": 1e-6, **line}) + "\n" for step in range(12)))
    report = rd.check(path, trainer=None if "kl" in line else "trl")
    assert verdict(report).startswith(said), verdict(report)


RISES = [step + 0.2 * (step % 2) for step in range(24)]
FALLS = [-value for value in RISES]
FLAT = [0.2 * (step % 2) for step in range(24)]


def of_two(path, rewards, name, others):
    rows = [
        {"step": n, "loss": 0.01, "reward": x, name: y} for n, (x, y) in enumerate(zip(rewards, others, strict=True))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("rewards", "gold", "said"),
    [
        (RISES, FALLS, "in the last, while the gold reward fell: -3.6 in the first third, -19.6 in the last."),
        (RISES, FLAT, "in the last, while the gold reward did not: 0.1 in the first third, 0.1 in the last."),
        (RISES, RISES, "in the last, and the gold reward rose: 3.6 in the first third, 19.6 in the last."),
        (FLAT, FALLS, "The gold reward fell: -3.6 in the first third, -19.6 in the last."),
    ],
)
def test_what_the_reward_stands_for_is_told_with_a_gain(tmp_path, rewards, gold, said):
    report = rd.check(of_two(tmp_path / "log.jsonl", rewards, "gold_reward", gold))
    assert said in verdict(report)


@pytest.mark.parametrize("name", ["val_reward", "eval/mean_reward"])
@pytest.mark.parametrize(("evaluations", "is_told"), [(7, True), (2, False)])
def test_a_gain_says_what_became_of_a_held_out_reward(tmp_path, name, evaluations, is_told):
    """Two evaluations say nothing of it."""
    rows = [{"step": n, "reward": x, "kl": 0.001 * n} for n, x in enumerate(RISES)]
    for row in rows[:: len(rows) // evaluations][:evaluations]:
        row[name] = 1.0 - 0.01 * row["step"]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = verdict(rd.check(log))
    assert said.startswith("The reward rose: 3.6 in the first third, 19.6 in the last")
    assert ("in the last, while the held-out reward fell: " in said) == is_told


def test_a_log_of_evaluations_alone_says_how_their_reward_went(tmp_path):
    rows = [{"episode": 100 * n, "eval_mean_reward": x, "elapsed_s": 0.1} for n, x in enumerate(RISES)]
    log = tmp_path / "curves.json"
    log.write_text(json.dumps({"curve": rows}))
    assert verdict(rd.check(log)).startswith("The held-out reward rose: 3.6 in the first third, 19.6 in the last. ")


def test_a_gain_without_right_answers_says_so(tmp_path):
    report = rd.check(of_two(tmp_path / "log.jsonl", RISES, "reward/correctness_fn", FLAT))
    assert "in the last, while the correctness did not: 0.1 in the first third, 0.1 in the last." in verdict(report)


def test_a_proxy_is_the_reward_beside_what_it_stands_for(tmp_path):
    rows = [{"step": n, "proxy": x, "gold": -x} for n, x in enumerate(RISES)]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = verdict(rd.check(log))
    assert said.startswith("The reward rose: 3.6 in the first third, 19.6 in the last, while the gold reward fell: ")


@pytest.mark.parametrize(
    ("rewards", "penalised", "is_told"), [(RISES, FALLS, True), (RISES, RISES, False), (RISES, FLAT, False)]
)
def test_a_score_that_rises_while_what_is_optimised_falls(tmp_path, rewards, penalised, is_told):
    rows = [
        {"step": n, "objective/scores": x, "objective/rlhf_reward": y, "objective/kl": 1.0, "loss/policy_avg": 0.1}
        for n, (x, y) in enumerate(zip(rewards, penalised, strict=True))
    ]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = rd.check(log)
    assert ("while the reward less its KL penalty fell: -3.6 in" in verdict(report)) is is_told
    assert any(vital.name == "penalised_reward" for vital in report.vitals) is is_told


@pytest.mark.parametrize(("kl", "is_told"), [(9.9, False), (10.1, True)])
@pytest.mark.parametrize("name", ["objective/scores", "ppo/std_scores"])
def test_few_lines_say_how_far_the_policy_is_from_the_reference(tmp_path, kl, name, is_told):
    rows = [{"step": n, name: 0.5, "objective/kl": kl, "ppo/policy/entropy": 1.0} for n in range(1, 5)]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert ("at a KL of 10.1 nats a response at the end." in verdict(rd.check(log))) is is_told


def test_a_log_of_returns_and_a_kl_names_both(tmp_path):
    rows = [{"step": n, "ppo/returns/mean": 0.1 * n, "objective/kl": 1.0} for n in range(1, 13)]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert verdict(rd.check(log)).startswith("The log has no known reward, only return and KL of a response: whether")


def test_a_gradient_norm_is_marked_where_it_is_drawn(tmp_path):
    """Beside a length, which its rule reads, too."""
    norms = [0.5 + 0.01 * (n % 3) for n in range(20)] + [40.0 + n % 3 for n in range(20)]
    rows = [{"step": n, "reward": n, "grad_norm": norm, "response_length": 90.0} for n, norm in enumerate(norms)]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert {vital.name: vital.marks for vital in rd.check(log).vitals if vital.marks} == {
        "grad_norm": ((20, "RDT013"),)
    }


def test_a_log_of_the_loss_alone_says_how_many_lines_it_has(tmp_path):
    """More than are drawn."""
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"step": n, "loss": 0.1 * (n % 7)}) + "\n" for n in range(1100)))
    assert "only the loss (0 to 0.6 in 1,100 lines), which" in verdict(rd.check(log, trainer="trl"))


@pytest.mark.parametrize(
    ("correctness", "words"),
    [
        (0.048, "while the correctness stayed near 0: "),
        (0.052, "and the correctness rose: "),
    ],
)
def test_a_correctness_of_hardly_any_response_is_no_gain(tmp_path, correctness, words):
    """However surely it rose beside a reward that is a proxy."""
    values = [correctness * (0.6 + 0.4 * n / 19.5) for n in range(24)]
    report = rd.check(of_two(tmp_path / "log.jsonl", RISES, "reward/correctness", values))
    assert f"in the last, {words}" in verdict(report)


def test_a_correctness_is_near_none_beside_the_reward_alone(tmp_path):
    """Of a reward as small it may be all there is."""
    values = [0.001 * n for n in range(24)]
    report = rd.check(of_two(tmp_path / "log.jsonl", values, "reward/correctness", values))
    assert "in the last, and the correctness rose: " in verdict(report)
