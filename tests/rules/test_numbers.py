"""Rules over the trainer's log alone: what they find, from which step on, and what only looks like it."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rules.checking import outcomes

import rolloutdoctor as rd
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.verdict import exit_code
from rolloutdoctor.rules.series import crossing, ends, memory, noise
from rolloutdoctor.testing import check_log, diagnose_log
from rolloutdoctor.views.verdict import verdict

STEPS = 60


def noisy(level, size, seed=0):
    return list(np.asarray(level, dtype=float) + size * np.random.default_rng(seed).standard_normal(len(level)))


FLAT = noisy([0.5] * STEPS, 0.05)
RISES = noisy(np.linspace(0.1, 0.9, STEPS), 0.05)
FALLS = noisy([0.7] * 30 + [0.1] * 30, 0.05)
COLLAPSES = [2.0] * 30 + [2.0 * 0.6**step for step in range(30)]

FALL = [400] * 30 + [6] * 30
LENGTHS = noisy([300] * STEPS, 40, seed=3)

CASES = {
    "entropy collapses": ("RDT003", {"entropy": COLLAPSES, "reward": FLAT}, "warning"),
    "entropy collapses and the reward falls": ("RDT003", {"entropy": COLLAPSES, "reward": FALLS}, "error"),
    "entropy is spent on a reward that rises": ("RDT003", {"entropy": COLLAPSES, "reward": RISES}, "info"),
    "entropy is spent, and no group has a spread any more": (
        "RDT003",
        {"entropy": COLLAPSES, "reward": RISES, "zero_variance_share": [0.0] * 40 + [1.0] * 20},
        "warning",
    ),
    "entropy explodes": ("RDT003", {"entropy": [0.5] * 30 + [4.0] * 30}, "warning"),
    "entropy falls as in healthy runs": ("RDT003", {"entropy": np.linspace(0.6, 0.2, STEPS)}, "clean"),
    "the KL blows up": ("RDT004", {"kl": [0.001 * 1.2**step for step in range(STEPS)], "reward": FLAT}, "warning"),
    "the KL buys a reward": ("RDT004", {"kl": [0.001 * 1.2**step for step in range(STEPS)], "reward": RISES}, "info"),
    "a clip fraction in percent": ("RDT007", {"clip_fraction": [12.5] * STEPS}, "clean"),
    "the KL buys a proxy": (
        "RDT004",
        {"kl": [0.001 * 1.2**step for step in range(STEPS)], "reward": RISES, "gold_reward": FLAT},
        "warning",
    ),
    "the KL buys a gold reward": (
        "RDT004",
        {"kl": [0.001 * 1.2**step for step in range(STEPS)], "reward": RISES, "gold_reward": RISES},
        "info",
    ),
    "a KL that always was high": ("RDT004", {"kl": [2.0] * STEPS, "reward": FLAT}, "clean"),
    "the reward collapses": ("RDT005", {"reward": FALLS}, "error"),
    "the reward dips": ("RDT005", {"reward": noisy([0.7] * 30 + [0.6] * 3 + [0.7] * 27, 0.05)}, "clean"),
    "a noisy reward": ("RDT005", {"reward": noisy([0.5] * STEPS, 0.3)}, "clean"),
    "the held-out accuracy collapses, and the reward is noise": (
        "RDT005",
        {"reward": FLAT, "accuracy": [0.42, 0.44, 0.41, 0.45, 0.2, 0.06, 0.05] + [math.nan] * (STEPS - 7)},
        "error",
    ),
    "the last accuracy is lost": ("RDT005", {"accuracy": [0.9, 0.88, 0.95, 0.93, 0.96, 0.94, 0.95, 0.0]}, "warning"),
    "an accuracy dips": ("RDT005", {"accuracy": [0.9, 0.88, 0.95, 0.3, 0.1, 0.94, 0.95, 0.9]}, "clean"),
    "an accuracy of ten answers": ("RDT005", {"accuracy": [0.3, 0.1, 0.4, 0.2, 0.2, 0.1, 0.0, 0.0]}, "clean"),
    "an accuracy that falls by a fifth": (
        "RDT005",
        {"accuracy": noisy([0.9] * 10 + [0.72] * 10, 0.01)},
        "clean",
    ),
    "an accuracy that falls by a third": ("RDT005", {"accuracy": noisy([0.9] * 10 + [0.6] * 10, 0.01)}, "info"),
    "every group dies": ("RDT001", {"zero_variance_share": [0.1] * 50 + [1.0] * 10}, "error"),
    "groups die now and then": ("RDT001", {"zero_variance_share": [0.1, 1.0, 0.2] * 20}, "info"),
    "a constant reward": ("RDT002", {"reward": [0.25] * STEPS, "reward_std": [0.0] * STEPS}, "error"),
    "a reward with a constant mean": ("RDT002", {"reward": [0.0] * STEPS, "reward_std": [1.0] * STEPS}, "warning"),
    "responses grow into the limit": (
        "RDT006",
        {"truncated_share": np.linspace(0, 0.9, STEPS), "response_length": np.linspace(100, 500, STEPS)},
        "warning",
    ),
    "responses that were always cut off": ("RDT006", {"truncated_share": [0.9] * STEPS}, "clean"),
    "truncation of shorter responses": (
        "RDT006",
        {"truncated_share": np.linspace(0, 0.9, STEPS), "response_length": np.linspace(500, 100, STEPS)},
        "clean",
    ),
    "most tokens are clipped": ("RDT007", {"clip_fraction": [0.6] * STEPS}, "warning"),
    "a few are": ("RDT007", {"clip_fraction": [0.05] * STEPS}, "clean"),
    "a gradient spike that left no trace": ("RDT008", {"grad_norm": [1.0, 1.1] * 15 + [50.0] + [1.0] * 29}, "info"),
    "gradient spikes": (
        "RDT008",
        {"grad_norm": [1.0, 1.1] * 15 + [50.0] + [1.0] * 18 + [40.0] + [1.0] * 10},
        "warning",
    ),
    "a gradient spike at the end": ("RDT008", {"grad_norm": [1.0, 1.1] * 29 + [50.0, 1.0]}, "warning"),
    "a gradient that grows": ("RDT008", {"grad_norm": np.linspace(1, 9, STEPS)}, "clean"),
    "a gradient of 0 in most steps": ("RDT008", {"grad_norm": [0.0] * 50 + [1.0] * 10}, "clean"),
    "no learning rate": ("RDT009", {"learning_rate": [0.0] * STEPS}, "error"),
    "a warmup without an end": ("RDT009", {"learning_rate": np.linspace(0, 1e-6, STEPS)}, "warning"),
    "a rate that decays to 0": ("RDT009", {"learning_rate": np.linspace(1e-6, 0, STEPS)}, "clean"),
    "a stalled step": ("RDT010", {"step_time": [30.0] * 40 + [900.0] + [30.0] * 19}, "info"),
    "a slow first step": ("RDT010", {"step_time": [900.0] + [30.0] * 59}, "clean"),
    "another sampler": ("RDO012", {"sampler_pearson": [0.05] * STEPS}, "error"),
    "an asynchronous sampler": ("RDO012", {"sampler_pearson": [0.8] * 9, "version_lag": [2.0] * 9}, "info"),
    "a sampler in bf16": ("RDO012", {"sampler_pearson": [0.999] * STEPS, "sampler_gap": [0.003] * STEPS}, "clean"),
    "perplexities apart": ("RDO012", {"sampler_ppl": [1.4] * 9, "trainer_ppl": [16.0] * 9}, "error"),
}


@pytest.mark.parametrize(("code", "series", "expected"), CASES.values(), ids=CASES)
def test_what_a_log_shows(code, series, expected):
    assert diagnose_log(code, **series).split()[1] == expected


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        ({"kl": [0.31] * 8, "beta": 0.1}, "warning"),
        ({"kl": [0.29] * 8, "beta": 0.1}, "info"),
        # As of a distillation whose names do not say so.
        ({"kl": [0.9, 0.8, 0.8, 0.7, 0.6, 0.6, 0.5, 0.4, 0.3, 0.2], "beta": 0.1}, "skipped:"),
        ({"kl": [0.9, 0.8, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.4], "beta": 0.1}, "warning"),
        ({"kl": [0.0, 0.1, 0.2, 0.3, 0.3, 0.3], "beta": 0.1}, "clean"),
        # Half of the median of the next five: what grew as a policy that moves does.
        ({"kl": [0.024, *[0.05] * 5], "beta": 0.1}, "clean"),
        ({"kl": [0.026, *[0.05] * 5], "beta": 0.1}, "info"),
        # Of fewer lines none tells that, so the first is to be larger.
        ({"kl": [0.06, *[0.5] * 3], "beta": 0.1}, "info"),
    ],
)
def test_a_reference_of_another_checkpoint(series, expected):
    assert diagnose_log("RDG012", "trl", **series).split()[1] == expected


def test_a_kl_that_reaches_no_parameter():
    silent = {"zero_variance_share": [1.0] * 4, "kl": [0.1] * 4, "beta": 0.1}
    assert "warning" in diagnose_log("RDG013", "trl", grad_norm=[0.0] * 4, **silent)
    assert diagnose_log("RDG013", "trl", grad_norm=[0.0, 0.0, 0.0, 0.2], **silent) == "RDG013 clean"
    assert "not applicable" in diagnose_log("RDG013", "trl", grad_norm=[0.0] * 4, **silent | {"beta": 0.0})


ONCE = {"num_iterations": 1, "steps_per_generation": 2, "gradient_accumulation_steps": 2}
VERL_ONCE = {
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 64,
    "actor.ppo_mini_batch_size": 64,
    "actor.ppo_epochs": 1,
}
SLIME_ONCE = {"rollout_batch_size": 8, "n_samples_per_prompt": 4, "global_batch_size": 32}


@pytest.mark.parametrize(
    ("trainer", "options", "series", "expected"),
    [
        ("trl", ONCE, {"clip_fraction": [0.0] * 8 + [1e-4]}, "warning confirmed"),
        ("trl", ONCE, {"clip_fraction": [0.0] * 9}, "clean"),
        ("trl", ONCE | {"use_vllm": True}, {"clip_fraction": [0.02] * 9}, "info exposed"),
        ("trl", ONCE | {"use_vllm": True}, {"clip_fraction": [2e-4] * 9}, "clean"),
        ("trl", ONCE | {"use_vllm": True}, {"clip_fraction": [0.3] * 9}, "warning exposed"),
        ("trl", ONCE | {"use_vllm": True, "epsilon": 3e-4}, {"clip_fraction": [0.3] * 9}, "info exposed"),
        (
            "trl",
            ONCE | {"num_iterations": 2},
            {"clip_fraction": [0.3] * 9},
            "not applicable: the options state 2 updates",
        ),
        (
            "trl",
            ONCE | {"steps_per_generation": 3},
            {"clip_fraction": [0.3] * 9},
            "not applicable: the options state 2",
        ),
        ("trl", {"num_iterations": 1}, {"clip_fraction": [0.3] * 9}, "info exposed: clip_fraction 0.3"),
        ("trl", ONCE, {"clip_fraction": [0.3] * 2}, "skipped: needs 3 steps"),
        ("verl", VERL_ONCE, {"clip_fraction": [1e-4] * 9, "ppo_kl": [3e-4, -3e-4, 1e-5] * 3}, "clean"),
        ("verl", VERL_ONCE, {"clip_fraction": [1e-4] * 9, "ppo_kl": [0.05, 0.04, 0.06] * 3}, "warning exposed"),
        ("verl", VERL_ONCE, {"clip_fraction": [0.004] * 9}, "info exposed"),
        (
            "verl",
            VERL_ONCE | {"data.train_batch_size": 65},
            {"clip_fraction": [0.3] * 9},
            "not applicable: the options state 2",
        ),
        (
            "verl",
            VERL_ONCE | {"rollout_correction.bypass_mode": True},
            {"clip_fraction": [0.3] * 9},
            "not applicable: the ratio",
        ),
        ("slime", SLIME_ONCE, {"clip_fraction": [0.2] * 9}, "warning exposed"),
        (
            "slime",
            SLIME_ONCE | {"global_batch_size": 8},
            {"clip_fraction": [0.2] * 9},
            "not applicable: the options state 4",
        ),
        ("slime", {"num_steps_per_rollout": 1}, {"ppo_kl": [0.0] * 9}, "clean"),
        ("slime", {}, {"ppo_kl": [0.0] * 9}, "skipped: nothing states rollout_batch_size"),
    ],
)
def test_a_ratio_that_is_not_1_in_the_only_update_of_a_batch(trainer, options, series, expected):
    assert diagnose_log("RDO015", trainer, **series, **options).removeprefix("RDO015 ").startswith(expected)


@pytest.mark.parametrize(("noise", "outcome"), [(0.03, "found"), (0.6, "clean")])
def test_truncation_that_grows_by_no_more_than_its_noise(noise, outcome, tmp_path):
    """Steps of few responses: the medians of three differ by a third by chance."""
    shares = np.clip(noisy([0.3] * 20 + [0.7] * 20, noise, seed=3), 0, 1)
    path = tmp_path / "log.jsonl"
    lines = [{"step": step, "loss": 0.1, "completions/clipped_ratio": share} for step, share in enumerate(shares, 1)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert outcomes(rd.check(path))["RDT006"] == outcome


@pytest.mark.parametrize(
    ("rewards", "outcome"), [([0.5, 0.5, 0.5], "clean"), ([0.5, 0.5, 0.4], "found"), ([], "found")]
)
def test_a_kl_beside_a_reward_that_is_logged_too_rarely(rewards, outcome, tmp_path):
    """Several updates for one generation: the reward may have risen."""
    lines = [{"step": step, "loss": 0.1, "kl": 0.1 * step} for step in range(1, 31)]
    for place, reward in enumerate(rewards):
        lines[10 * place] |= {"reward": reward}
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert outcomes(rd.check(path))["RDT004"] == outcome


def test_a_kl_beside_a_reward_of_every_fifth_line_that_rose(tmp_path):
    lines = [{"step": step, "loss": 0.1, "kl": 0.1 * step} for step in range(1, 61)]
    for place in range(0, 60, 5):
        lines[place] |= {"reward": 0.1 + 0.01 * place + 0.001 * (place % 2)}
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert outcomes(rd.check(path))["RDT004"] == "found"


@pytest.mark.parametrize(
    ("change", "noise", "outcome"),
    [(0.7, 0.12, "warning"), (0.7, 0.3, "clean"), (0.35, 0.05, "clean")],
)
def test_a_noisy_entropy_that_changes_level_in_one_step(change, noise, outcome):
    """The changes from line to line are too large for one of them to stand out by itself."""
    steady = [2.3 + noise * (1, -1, 0.4, -0.7, 0.9)[step % 5] for step in range(25)]
    values = steady + [value - change for value in steady]
    said = diagnose_log("RDT014", entropy=values)
    assert (outcome in said) if outcome == "warning" else said.endswith("clean"), said


def test_an_entropy_that_falls_over_three_steps_jumps_not():
    values = noisy([2.3] * 25 + [2.0, 1.8, 1.6] + [1.5] * 25, 0.05)
    assert diagnose_log("RDT014", entropy=values).endswith("clean")


@pytest.mark.parametrize(
    ("clipped", "first", "outcome"),
    [
        ([0.101, 0.0, 0.3], 1, "found"),
        ([0.1, 0.3, 0.3], 1, "clean"),
        # The updates after the first of a batch may clip as many as they like.
        ([0.0, 0.4, 0.4, 0.4], 1, "clean"),
        ([0.3, 0.3, 0.3], 2, "skipped"),
        ([0.3], 1, "found"),
    ],
)
def test_clipping_before_the_first_update_needs_no_options(clipped, first, outcome, tmp_path):
    path = tmp_path / "log.jsonl"
    lines = [
        {"step": step, "loss": 0.1, "reward": 0.5, "reward_std": 0.2, "clip_ratio/region_mean": share}
        for step, share in enumerate(clipped, start=first)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = rd.check(path)
    assert outcomes(report)["RDO015"] == outcome
    if outcome == "found":
        (finding,) = [one for one in report.findings if one.code == "RDO015"]
        assert (finding.severity.label, finding.onset) == ("info", 1)


@pytest.mark.parametrize("seed", [16, 111])
def test_the_mean_reward_of_eight_responses_does_not_collapse_by_chance(seed):
    """It takes nine values, so that medians jump by an eighth: these two runs do by the medians alone."""
    assert diagnose_log("RDT005", reward=list(np.random.default_rng(seed).binomial(8, 0.4, 200) / 8)) == "RDT005 clean"


HUMP = [0.33, 0.34, 0.18, 0.35, 0.54, 0.41, 0.61, 0.84, 0.64, 0.63, 0.53, 0.3, 0.29, 0.46, 0.5, 0.58, 0.41, 0.45, 0.44]


@pytest.mark.parametrize("seed", [2, 8, 23, 24, 26, 30])
def test_a_hump_of_eight_answers_a_step_is_within_their_noise(seed):
    """Their differences are multiples of an eighth, whose median makes their noise a quarter too small."""
    level = np.repeat([*HUMP, 0.4], 10)
    smooth = np.convolve(level, np.ones(21), "same") / np.convolve(np.ones(200), np.ones(21), "same")
    rewards = np.random.default_rng(seed).binomial(8, smooth) / 8
    assert diagnose_log("RDT005", reward=list(rewards)) == "RDT005 clean"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("answers", [4, 8])
def test_a_reward_of_few_answers_that_falls_to_nothing_collapses(answers, seed):
    level = np.r_[np.linspace(0.2, 0.8, 60), np.full(40, 0.02)]
    rewards = np.random.default_rng(seed).binomial(answers, level) / answers
    assert diagnose_log("RDT005", reward=list(rewards)).startswith("RDT005 error")


@pytest.mark.parametrize("seed", [3, 8, 9])
def test_a_reward_that_comes_back_from_a_hump_to_above_its_start_does_not_collapse(seed):
    """More than half of the gain is lost, but not beyond noise: of 0.36 that are gained 0.26, with an error of 0.05."""
    rewards = np.random.default_rng(seed).binomial(8, np.repeat([*HUMP, 0.4], 10)) / 8
    assert diagnose_log("RDT005", reward=list(rewards)) == "RDT005 clean"


def _grows(level, noise, steps=160):
    """Draw a reward whose level and noise go straight from one of the given ones to the next."""
    at = np.linspace(0, 1, steps)
    means, spreads = (np.interp(at, np.linspace(0, 1, len(each)), each) for each in (level, noise))
    return lambda draw: draw.normal(means, spreads)


def _spike(steps, lines, height):
    def drawn(draw):
        values, at = draw.normal(0.3, 0.02, steps), draw.integers(steps // 4, steps // 2)
        values[at : at + lines] += height
        return values

    return drawn


NO_LEVELS = {
    "a rise to a noisier level": _grows([0.1, 0.1, 0.1, 0.15, 0.18, 0.14], [0.01, 0.01, 0.01, 0.04, 0.04, 0.04]),
    "a few right answers late": lambda draw: np.r_[
        0.1 + 0.9 * draw.binomial(64, 0.01, 100) / 64, 0.1 + 0.9 * draw.binomial(16, 0.08, 50) / 16
    ],
    "four easier batches": _spike(60, 4, 0.4),
    "a spike of 12 steps": _spike(160, 12, 0.1),
}


@pytest.mark.parametrize("case", NO_LEVELS)
def test_a_few_high_steps_are_no_level_from_which_a_reward_collapses(case):
    """Some runs of each collapsed while the noise was that of the quiet start."""
    told = [diagnose_log("RDT005", reward=list(NO_LEVELS[case](np.random.default_rng(seed)))) for seed in range(12)]
    assert told == ["RDT005 clean"] * 12


LEVELS = {
    "a level of a sixth of the steps": _spike(60, 10, 0.4),
    "what the run started with": lambda draw: np.r_[draw.normal(0.6, 0.05, 8), draw.normal(0.1, 0.05, 92)],
    "from a noisy level": lambda draw: np.r_[draw.normal(0.1, 0.006, 100), draw.normal(0.4, 0.05, 35), [0.1] * 25],
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", LEVELS)
def test_a_level_that_lasted_collapses_however_noisy(case, seed):
    assert "confirmed" in diagnose_log("RDT005", reward=list(LEVELS[case](np.random.default_rng(seed))))


@pytest.mark.parametrize("seed", range(5))
def test_a_fall_in_much_noise_begins_where_it_does(seed):
    """Single values cross the middle of both levels long after it."""
    rewards = np.repeat([0.75, 0.5], 200) + np.random.default_rng(seed).normal(0, 0.125, 400)
    (found,) = check_log("RDT005", reward=list(rewards)).findings
    assert abs(found.measures["onset"].value - 201) <= 10


SUDDEN = np.r_[np.full(200, 0.75), np.full(200, 0.3)]
SLOW = np.r_[np.full(50, 0.75), np.linspace(0.75, 0.25, 300), np.full(50, 0.25)]
FALLEN = {
    "four answers": lambda draw, level: draw.binomial(4, level) / 4,
    "eight answers": lambda draw, level: draw.binomial(8, level) / 8,
    "heavy tails": lambda draw, level: level + 0.1 * draw.standard_t(3, len(level)),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("noise", FALLEN)
@pytest.mark.parametrize(
    ("code", "quantity", "of"),
    [
        ("RDT005", "reward", lambda draw, level, noise: FALLEN[noise](draw, level)),
        # It rises as much as the other falls, by factors that are far apart.
        ("RDT004", "kl", lambda draw, level, noise: (2.3 - 3 * level) * np.exp(draw.normal(0, 0.5, len(level)))),
    ],
)
def test_a_change_is_steady_only_where_a_slow_one_fits_better(code, quantity, of, noise, seed):
    said = {}
    for name, level in (("sudden", SUDDEN), ("slow", SLOW)):
        values = np.maximum(of(np.random.default_rng(seed), level, noise), 0)
        (found,) = check_log(code, **{quantity: list(values)}).findings
        said[name] = found.headline
    assert "steadily" not in said["sudden"]
    assert " steadily from step " in said["slow"]


def steps_of_one(*places, of):
    """Rewards of 1 in a few steps, and 0 in the others."""
    return [float(step in places) for step in range(of)]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        # By medians and their errors alone, these two collapse.
        (steps_of_one(21, 22, of=30), "clean"),
        (steps_of_one(0, 1, 2, 12, 22, 39, 48, 55, of=60), "clean"),
        # More steps end with nothing than did before.
        ([1.0, 0.0, 1.0] * 8 + [0.0] * 40, "error"),
        # A rise that stays for a while is none of chance.
        ([0.0] * 12 + [1.0] * 8 + [0.0] * 20, "error"),
    ],
)
def test_a_reward_that_is_0_but_in_a_few_steps_does_not_collapse(rewards, expected):
    assert diagnose_log("RDT005", reward=rewards, reward_min=[0.0] * len(rewards)).split()[1] == expected


@pytest.mark.parametrize("seed", range(20))
def test_sparse_rewards_that_are_drawn_alike_do_not_collapse(seed):
    drawn = np.random.default_rng(seed).random(40) < 0.1
    assert diagnose_log("RDT005", reward=list(map(float, drawn)), reward_min=[0.0] * 40) == "RDT005 clean"


def test_a_kl_that_fell_back_is_told_by_its_own_lines(tmp_path):
    """A line below the limit between two above it: the medians of three say where, and not how high."""
    kls = [0.05] * 7 + [4.4, 0.5, 1.2, 0.2, 1.1] + [0.05] * 8
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"step": n, "kl": kl, "reward": 0.5}) + "\n" for n, kl in enumerate(kls)))
    found = next(one for one in rd.check(path).findings if one.code == "RDT004")
    assert found.headline == (
        "the KL was above 1 nat in 3 lines of 20, between steps 7 and 11, 4.4 at most, and fell back to 0.05"
    )


@pytest.mark.parametrize("code", ["RDT001", "RDT002", "RDT003", "RDT004", "RDT005", "RDT006", "RDT007"])
def test_a_few_steps_say_nothing(code):
    from rolloutdoctor.rules.table import find

    rule = find(code)
    few = {name: [0.0] * (rule.fewest - 1) for name in rule.about}
    assert f"{code} skipped: needs {rule.fewest} steps" in diagnose_log(code, **few)


@pytest.mark.parametrize("code", ["RDT003", "RDO012"])
def test_what_is_not_logged_is_not_measured(code):
    assert f"{code} skipped: the log has no metric for" in diagnose_log(code, reward=FLAT)


def test_what_began_first_is_said_first(tmp_path):
    """A verifier that dies: no group has a spread since then, and the reward fell because of it."""
    reward = [FLAT[at] if at < 30 else 0.0 for at in range(STEPS)]
    dead = [float(at >= 30) for at in range(STEPS)]
    path = log_file(tmp_path / "trainer_state.json", reward=reward, frac_reward_zero_std=dead)
    report = rd.check(path)
    assert [(one.code, one.follows_from) for one in report.findings[:2]] == [("RDT001", None), ("RDT005", "RDT001")]
    assert {one.onset for one in report.findings[:2]} == {31}
    reward = next(one for one in report.vitals if one.name == "reward")
    assert (len(reward.series), reward.last, reward.marks) == (STEPS, 0.0, ((31, "RDT005"),))


def test_a_single_change_of_the_length_counts_as_four_and_a_half_of_the_others():
    # The reward follows the length up and down but where that jumps: of 200 + 4.5^2 squares 200 are of both.
    turns = np.tile([1.0, -1.0], 100)
    lengths, rewards = np.insert(turns, 100, 300.0), np.insert(turns, 100, 0.0)
    log = {"response_length": 500 + np.cumsum(lengths), "reward": 0.5 + 0.01 * np.cumsum(rewards)}
    (found,) = check_log("RDT019", **log).findings
    assert found.measures["length_share"].value == pytest.approx(200 / (200 + 4.5**2), rel=2e-3)


def test_an_entropy_that_falls_back_in_the_last_lines_has_not_risen_before():
    levels = [1.0] * 20 + [1.6] * 18 + [1.0] * 2
    (found,) = check_log("RDT003", entropy=[level + 0.01 * (at % 2) for at, level in enumerate(levels)]).findings
    assert (found.severity.label, found.measures["onset"].value) == ("info", 40)


def test_the_lines_without_a_tool_call_are_counted():
    (found,) = check_log("RDT017", tool_calls=[1.2] * 40 + [0.0] * 20).findings
    assert found.message == "In 20 logged steps, from step 41 on, no response called a tool."


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("sampler_pearson", (0.995, 0.9, 0.5)),
        ("sampler_gap", (0.005, 0.1, 0.3)),
        ("sampler_logp_gap", (0.02, 0.3, 1.0)),
        ("sampler_k3", (0.01, 0.1, 0.5)),
        ("sampler_ppl", (0.05, 0.3, 1.0)),
    ],
)
def test_gates_of_sampler_and_trainer(name, bounds):
    said = []
    for bound in bounds:
        for value in sorted([0.999 * bound, 1.001 * bound], reverse=name == "sampler_pearson"):
            ppl = {"sampler_ppl": [math.exp(value)] * 9, "trainer_ppl": [1.0] * 9}
            report = check_log("RDO012", **(ppl if name == "sampler_ppl" else {name: [value] * 9}))
            said.append(report.findings[0].severity.label if report.findings else "clean")
    assert said == ["clean", "info", "info", "warning", "warning", "error"]


@pytest.mark.parametrize(("apart_from", "first"), [(2, "RDO012"), (25, "RDT004")])
def test_a_sampler_that_was_apart_first_is_why_the_kl_blew_up(apart_from, first, tmp_path):
    """A frozen engine: the policy is trained on responses of another one. The other way round it is another finding."""
    apart = [0.8 * (at + 1 >= apart_from) for at in range(STEPS)]
    kl = [0.0, 0.1, 0.5, *noisy([2.0] * (STEPS - 3), 0.2)]
    log = {"kl": kl, "reward": FLAT, "sampling/sampling_logp_difference/mean": apart}
    report = rd.check(log_file(tmp_path / "trainer_state.json", **log))
    found = {one.code: one.follows_from for one in report.findings}
    gap = next(one for one in report.vitals if one.name == "sampler_logp_gap")
    assert gap.marks == ((apart_from, "RDO012"),)
    assert report.findings[0].code == first
    assert found["RDT004"] == (first if first == "RDO012" else None)


def log_file(path, **series):
    """Write a log of TRL's, without the steps at which a series is None."""
    lines = [
        {"step": at + 1, "learning_rate": 1e-6, "epoch": 0.1, "loss": 0.0}
        | {name: values[at] for name, values in series.items() if values[at] is not None}
        for at in range(STEPS)
    ]
    path.write_text(json.dumps({"log_history": lines}))
    return path


def test_the_sentences_of_every_finding_are_sentences(tmp_path):
    path = log_file(
        tmp_path / "trainer_state.json",
        entropy=COLLAPSES,
        reward=FALLS,
        kl=[0.001 * 1.2**step for step in range(STEPS)],
        grad_norm=[1.0] * 40 + [50.0] + [1.0] * 19,
        frac_reward_zero_std=[0.1] * 50 + [1.0] * 10,
        step_time=[30.0] * 40 + [900.0] + [30.0] * 19,
    )
    report = rd.check(path)
    assert {"RDT001", "RDT003", "RDT004", "RDT005", "RDT008", "RDT010"} <= {one.code for one in report.findings}
    for one in report.findings:
        assert not {*"{}"} & {*f"{one.headline}{one.message}{one.evidence}{one.advice}"}, one.code
        assert "nan" not in one.message


def test_a_reward_that_is_logged_now_and_then(tmp_path):
    """Steps without a value are no fall of the reward."""
    some = [value if at % 2 else None for at, value in enumerate(FLAT)]
    report = rd.check(log_file(tmp_path / "trainer_state.json", entropy=COLLAPSES, reward=some))
    (found,) = [one for one in report.findings if one.code == "RDT003"]
    assert (found.severity.label, "did not rise" in found.message) == ("warning", True)


# Numbers of which shift and scale lose no digit: a value that the shift absorbs is another series.
@given(
    st.lists(st.integers(-(2**20), 2**20), min_size=3, max_size=40), st.integers(-(2**10), 2**10), st.integers(-6, 6)
)
def test_levels_move_and_scale_with_the_series(values, shift, power):
    scale = 2.0**power
    moved = [scale * value + shift for value in values]
    one, other = ends(values), ends(moved)
    largest = max(map(abs, (*values, *moved, 1.0)))
    assert other.first == pytest.approx(scale * one.first + shift, abs=1e-9 * largest)
    assert other.noise == pytest.approx(scale * one.noise, abs=1e-6 * largest)


def test_noise_is_that_of_independent_values_and_sees_no_jump():
    draw = np.random.default_rng(0)
    values = draw.standard_normal(4000)
    assert noise(values) == pytest.approx(1.0, rel=0.1)
    assert noise(values + 50.0 * (np.arange(4000) > 2000)) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize(("last", "onset"), [([0.001, 0.001], 31), ([1.0, 1.0], 60)])
def test_a_gradient_norm_that_is_back_in_the_last_lines_has_not_vanished_before_them(last, onset):
    norms = [1.0] * 30 + [0.001] * 28 + last
    [found] = check_log("RDT015", kl=[0.02 * step for step in range(STEPS)], grad_norm=norms).findings
    assert found.measures["onset"].value == onset


def test_where_a_series_goes_below_for_good():
    assert crossing([3, 3, 3, 1, 3, 3, 1, 1, 1], 2, below=True) == 6
    assert crossing([3, 3, 3], 2, below=True) is None
    assert crossing([1, 1, 1], 2, below=True) == 0


def of_functions(tmp_path, means, stds=None, **options):
    """Check a log of TRL whose reward changes, with these means of the function `own`."""
    own = {"rewards/own/mean": means} | ({} if stds is None else {"rewards/own/std": stds})
    others = {"rewards/exact/mean": FLAT, "rewards/exact/std": [0.5] * STEPS, "num_tokens": list(range(STEPS))}
    path = log_file(tmp_path / "trainer_state.json", reward=FLAT, reward_std=[0.5] * STEPS, **own, **others)
    return next((one for one in rd.check(path, select=["RDT002"], **options).findings), None)


FUNCTIONS = {
    "never rewards": ([0.0] * STEPS, [0.0] * STEPS, "warning", "own is constant at 0 in all 60 logged steps"),
    "died": (
        [0.7] * 10 + FLAT[10:25] + [0.0] * 35,
        [0.4] * 25 + [0.0] * 35,
        "warning",
        "own is constant at 0 from step 26 on",
    ),
    "falls back": (
        FLAT[:20] + [0.25] * 40,
        [0.4] * 20 + [0.0] * 40,
        "warning",
        "own is constant at 0.25 from step 21 on",
    ),
    "is solved from the first step": (
        [1.0] * STEPS,
        [0.0] * STEPS,
        "info",
        "own is constant at 1 in all 60 logged steps",
    ),
    "was learned": (FLAT[:20] + [2.0] * 40, [0.4] * 20 + [0.0] * 40, "info", "own is constant at 2 from step 21 on"),
    "falls to a success": (
        [1.5, 1.8] * 10 + [1.0] * 40,
        [0.4] * 20 + [0.0] * 40,
        "info",
        "own is constant at 1 from step 21 on",
    ),
    "falls, and to no success": (
        [1.5, 1.8] * 10 + [1.1] * 40,
        [0.4] * 20 + [0.0] * 40,
        "warning",
        "own is constant at 1.1 from step 21 on",
    ),
    "gives all the same": ([0.2] * STEPS, None, "info", "own is constant at 0.2 in all 60 logged steps"),
}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_a_function_that_never_changes_is_named_with_value_and_step(case, tmp_path):
    means, stds, severity, words = FUNCTIONS[case]
    found = of_functions(tmp_path, means, stds)
    assert (found.severity.label, found.headline) == (severity, f"reward function {words}")
    assert (found.verdict == "confirmed") == (stds is not None)
    assert found.onset == int(words.split()[-2] if " from " in words else 1)


@pytest.mark.parametrize(
    ("means", "stds"),
    [
        (FLAT, [0.5] * STEPS),
        ([0.5] * STEPS, [0.5] * STEPS),  # batches of equal mean
        ([0.0] * 5 + [0.01] + [0.0] * 54, [0.0] * 5 + [0.1] + [0.0] * 54),  # a success that is rare
        ([0.0] * 9 + FLAT[9:51] + [0.0] * 9, None),  # too short at the end
    ],
)
def test_a_function_that_changes_now_and_then_is_none(means, stds, tmp_path):
    assert of_functions(tmp_path, means, stds) is None


@pytest.mark.parametrize(
    ("before", "same", "is_found"),
    [
        # (19 / 30)^31 is 7.1e-7.
        (29, 18, True),
        # (16 / 23)^38 is 1.02e-6.
        (22, 15, False),
    ],
)
def test_a_value_that_steps_had_before_may_hold_by_chance(before, same, is_found, tmp_path):
    means = [0.25] * same + FLAT[same:before] + [0.25] * (STEPS - before)
    assert (of_functions(tmp_path, means, [0.0] * STEPS) is not None) == is_found


def test_a_deviation_of_0_with_six_digits_proves_a_constant_reward(tmp_path):
    """As a notebook's table prints it."""
    zero, lengths = ["0.000000"] * 12, [f"{200 + step:.6f}" for step in range(12)]
    lines = [
        f"{{'reward': {a}, 'reward_std': {a}, 'rewards/o/mean': {a}, 'rewards/o/std': {a}, 'completion_length': {b}}}"
        for a, b in zip(zero, lengths, strict=True)
    ]
    (tmp_path / "train.log").write_text("\n".join(lines))
    (found,) = rd.check(tmp_path / "train.log", select=["RDT002"]).findings
    assert (found.severity.label, found.verdict) == ("error", "confirmed")


def test_a_zero_may_be_what_the_options_say(tmp_path):
    """A function without weight, or a penalty that nothing incurred."""
    zero = [0.0] * STEPS
    found = of_functions(tmp_path, zero, zero, trainer="trl", options={"reward_weights": [1.0, 0.0]})
    assert found.severity.label == "info"
    path = log_file(
        tmp_path / "trainer_state.json", reward=FLAT, **{"rewards/length_penalty/mean": zero, "num_tokens": FLAT}
    )
    (found,) = rd.check(path, select=["RDT002"]).findings
    assert found.severity.label == "info"


@pytest.mark.parametrize(
    ("entropy", "length", "gain", "found"),
    [
        (0.02, 5, 0.0, True),
        # Fourteen nats of a response are those of a million.
        (0.02, 700, 0.0, False),
        # What was learned needs no other response.
        (0.02, 5, 0.3, False),
    ],
)
def test_an_entropy_that_leaves_one_response_from_the_first_line_on_is_told(entropy, length, gain, found):
    reward = [value + gain * step / STEPS for step, value in enumerate(FLAT)]
    log = {"entropy": [entropy] * STEPS, "response_length": [length] * STEPS, "reward": reward}
    report = check_log("RDT003", "trl", **log)
    words = "the policy hardly samples: the entropy of a response is 0.1 nats from the first line on, as of 1.1 equally"
    assert [one.headline for one in report.findings] == [f"{words} likely responses to a prompt"] * found


@pytest.mark.parametrize(("name", "found"), [("completions/mean_length", True), ("mean_response_length", False)])
def test_an_entropy_of_a_loop_of_ones_own_may_be_a_share_of_the_largest(tmp_path, name, found):
    rows = [{"step": at, "entropy": 0.02, "avg_reward": value, name: 5.0} for at, value in enumerate(FLAT, 1)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert bool(rd.check(tmp_path / "log.jsonl", select=["RDT003"]).findings) is found


@pytest.mark.parametrize("kept", [0.0, 0.3])
def test_memory_of_noise_is_measured_on_a_trend(kept):
    fresh = np.random.default_rng(1).standard_normal(4000)
    values = np.zeros(4000)
    for at in range(1, 4000):
        values[at] = kept * values[at - 1] + fresh[at]
    assert memory(values + 0.05 * np.arange(4000)) == pytest.approx(kept, abs=0.1)


ONE_REWARD = {
    "fell to its lowest": (FLAT[:20] + [-1.0] * 40, "run the reward function on responses from step 21 on"),
    "rose to its highest": (FLAT[:20] + [2.0] * 40, "the prompts are solved"),
    "was one from the start": ([0.5] * STEPS, "check by hand whether 0.5 is the right reward"),
}


@pytest.mark.parametrize("case", ONE_REWARD)
def test_what_to_do_about_equal_rewards_goes_by_the_reward(case, tmp_path):
    rewards, advice = ONE_REWARD[case]
    since = 0 if case == "was one from the start" else 20
    shares = [0.1] * since + [1.0] * (STEPS - since)
    path = log_file(tmp_path / "trainer_state.json", reward=rewards, frac_reward_zero_std=shares)
    (found,) = rd.check(path, select=["RDT001"]).findings
    is_solved = case == "rose to its highest"
    assert found.headline == f"every reward is {rewards[-1]:g} from step {since + 1} on, " + (
        "the largest of the run: nothing is left to learn from these prompts"
        if is_solved
        else "so every group is zero-variance and every advantage is 0"
    )
    assert (found.advice.startswith(advice), found.severity.label) == (True, "warning" if is_solved else "error")


def test_a_reward_below_the_largest_of_a_response_is_not_solved():
    rewards = {"reward": FLAT[:20] + [2.0] * 40, "reward_max": [3.0] * 20 + [2.0] * 40}
    shares = [0.1] * 20 + [1.0] * 40
    assert "error" in diagnose_log("RDT001", "verl", **rewards, zero_variance_share=shares)
    assert "warning" in diagnose_log(
        "RDT001", "verl", **{**rewards, "reward_max": [2.0] * 60}, zero_variance_share=shares
    )


@pytest.mark.parametrize(("rate", "every", "is_said"), [(9e-7, 2, True), (9e-7, 3, True), (1.1e-6, 2, False)])
def test_a_kl_that_no_update_can_have_made_is_said_first(rate, every, is_said):
    report = check_log("RDG012", "trl", kl=[0.48, 0.53, 0.43], learning_rate=[rate] * 3, every=every)
    (found,) = report.findings
    assert (found.severity.label, "at a learning rate of" in found.remark) == ("info", is_said)


def test_the_rate_of_a_single_update_is_not_said():
    (found,) = check_log("RDG012", "verl", kl=[0.48, 0.53, 0.43], learning_rate=[9e-7] * 3).findings
    assert found.headline.startswith("the KL is 0.48 nats in the first step: ")


def test_a_fall_begins_where_it_leaves_the_noise():
    """A slow drift within the noise of the level is no onset."""
    values = noisy([-0.6] * 28 + list(np.linspace(-0.6, -0.9, 20)) + [-0.9] * 12, 0.05)
    (found,) = check_log("RDT005", reward=values).findings
    assert 26 <= found.measures["onset"].value <= 40


def test_a_kl_penalty_within_the_reward_hides_no_missing_baseline():
    """One response a prompt: the advantages are the rewards less their KL penalty."""
    scores = {"reward_min": [0.0] * 3, "reward_max": [1.0] * 3}
    less = {"penalised_reward_min": [-0.02, -0.01, -0.03], "penalised_reward_max": [0.98, 0.97, 0.99]}
    same = {"advantage_min": less["penalised_reward_min"], "advantage_max": less["penalised_reward_max"]}
    assert diagnose_log("RDA024", "verl", **scores, **less, **same).startswith("RDA024 warning confirmed")
    other = {"advantage_min": [-0.7] * 3, "advantage_max": [0.7] * 3, "advantage": [0.0] * 3, "reward": [0.5] * 3}
    assert diagnose_log("RDA024", "verl", **scores, **less, **other) == "RDA024 clean"


NEW = {
    "a rate that stops": ("RDT012", {"learning_rate": [1e-6] * 30 + [0.0] * 30}, "error"),
    "a rate that stops late": ("RDT012", {"learning_rate": [1e-6] * 56 + [0.0] * 4}, "warning"),
    "a rate that is printed with eight decimals": (
        "RDT012",
        {"learning_rate": [round(4e-8 * (1 - at / STEPS) ** 3, 8) for at in range(STEPS)]},
        "skipped:",
    ),
    "a schedule that ends at 0": ("RDT012", {"learning_rate": [*np.linspace(1e-6, 0, STEPS)]}, "clean"),
    "two zeros": ("RDT012", {"learning_rate": [1e-6] * 58 + [0.0] * 2}, "clean"),
    "a warmup from 0": ("RDT012", {"learning_rate": [0.0] * 10 + [1e-6] * 50}, "clean"),
    "one step of zero-variance groups": ("RDT001", {"zero_variance_share": [0.96]}, "warning"),
    "few steps without a spread": ("RDT001", {"reward_std": [0.0] * 3}, "warning"),
    "one step of which most groups are equal": ("RDT001", {"zero_variance_share": [0.85]}, "info"),
    "one step of which most groups differ": ("RDT001", {"zero_variance_share": [0.45]}, "skipped:"),
    "two steps that differ": ("RDT001", {"zero_variance_share": [0.96, 0.3]}, "skipped:"),
    "tools that nobody calls any more": ("RDT017", {"tool_calls": [1.2] * 40 + [0.0] * 20}, "warning"),
    "tools that nobody ever called": ("RDT017", {"tool_calls": [0.0] * STEPS}, "warning"),
    "tools that are called now and then": ("RDT017", {"tool_calls": [0.0, 0.0, 0.1] * 20}, "clean"),
    "fewer calls": ("RDT017", {"tool_calls": [*np.linspace(3, 0.1, STEPS)]}, "clean"),
    "an outage of a tool": (
        "RDT017",
        {"tool_calls": [2.0] * STEPS, "tool_failures": [0.1] * 50 + [1.0] * 10},
        "warning",
    ),
    "an outage that ended": (
        "RDT017",
        {"tool_calls": [2.0] * STEPS, "tool_failures": [0.1] * 30 + [1.0] * 20 + [0.1] * 10},
        "clean",
    ),
    "a share of failures without a call": (
        "RDT017",
        {"tool_calls": [0.5, 0.0] * 30, "tool_failures": [0.2, 0.0] * 30},
        "clean",
    ),
    "every trajectory at the cap": (
        "RDT018",
        {"turns_min": [2] * 40 + [10] * 20, "turns_max": [10] * STEPS},
        "warning",
    ),
    "an environment of so many turns": ("RDT018", {"turns_min": [10] * STEPS, "turns_max": [10] * STEPS}, "info"),
    "a question, a call and its answer": (
        "RDT018",
        {"turns_min": [2] * 40 + [3] * 20, "turns_max": [3] * STEPS},
        "warning",
    ),
    "the length is rewarded": (
        "RDT019",
        {"response_length": LENGTHS, "reward": [each / 500 for each in LENGTHS], "truncated_share": FLAT},
        "warning",
    ),
    # The correlation is 1, of which Fisher's z is infinite.
    "the reward is the length": ("RDT019", {"response_length": LENGTHS, "reward": LENGTHS}, "warning"),
    "brevity is rewarded": (
        "RDT019",
        {"response_length": LENGTHS, "reward": noisy([-each / 500 for each in LENGTHS], 0.01)},
        "warning",
    ),
    "a reward for length, and a collapse that is no part of it": (
        "RDT019",
        {
            "response_length": [*LENGTHS, *[20] * 5],
            "reward": [*noisy([each / 500 for each in LENGTHS], 0.01), *[-9] * 5],
        },
        "warning",
    ),
    "they fall once, together": (
        "RDT019",
        {"response_length": noisy(FALL, 20), "reward": noisy(FALL, 20, seed=2)},
        "clean",
    ),
    "of each there are two values": ("RDT019", {"response_length": FALL, "reward": FALL}, "clean"),
    "length and reward rise together": (
        "RDT019",
        {"response_length": noisy(np.linspace(100, 500, STEPS), 20, seed=1), "reward": RISES},
        "clean",
    ),
    "two straight lines": (
        "RDT019",
        {"response_length": np.linspace(100, 500, STEPS), "reward": np.linspace(0.1, 0.9, STEPS)},
        "clean",
    ),
    "truncated responses are long, and earn nothing": (
        "RDT019",
        {
            "response_length": noisy([200 + 300 * each for each in FLAT], 3, seed=1),
            "reward": noisy([1 - each for each in FLAT], 0.01, seed=2),
            "truncated_share": FLAT,
        },
        "clean",
    ),
    "the KL rises slowly, and so does the reward": (
        "RDT004",
        {"kl": np.linspace(0, 2, STEPS), "reward": noisy(np.linspace(0.4, 0.55, STEPS), 0.1)},
        "info",
    ),
    "the reward is logged once for two updates": (
        "RDT004",
        {
            "kl": np.linspace(0, 2, 2 * STEPS),
            "reward": [x for each in noisy(np.linspace(0.4, 0.6, STEPS), 0.1, seed=4) for x in (each, np.nan)],
        },
        "info",
    ),
    "the KL rises slowly, and the reward comes back from where it fell": (
        "RDT004",
        {"kl": [0.001] * 20 + [2.0] * 40, "reward": noisy([0.9] * 20 + [*np.linspace(0.2, 0.5, 40)], 0.1)},
        "error",
    ),
    "a share of truncated responses that wanders": (
        "RDT006",
        {"truncated_share": noisy([0.3] * 53 + [0.65] * 7, 0.05)},
        "clean",
    ),
    "longer responses earn more": (
        "RDT006",
        {"truncated_share": noisy(np.linspace(0.1, 0.7, STEPS), 0.03), "reward": RISES},
        "info",
    ),
    "a question and its answer": ("RDT018", {"turns_min": [2] * STEPS, "turns_max": [2] * STEPS}, "clean"),
    "as many turns, and no cap": (
        "RDT018",
        {"turns_min": [2] * 40 + [6] * 20, "turns_max": [10] * 40 + [6] * 20},
        "clean",
    ),
    "a curriculum of longer tasks": (
        "RDT018",
        {"turns_min": [*range(2, 62)], "turns_max": [*range(2, 62)]},
        "clean",
    ),
    "a rate that jumps": ("RDT009", {"learning_rate": [1e-6] * 30 + [1.1e-5] * 30}, "warning"),
    "a rate that jumps less": ("RDT009", {"learning_rate": [1e-6] * 30 + [9e-6] * 30}, "clean"),
    "a restart of a cosine": ("RDT009", {"learning_rate": [1e-6, 5e-7, 1e-8] * 20}, "clean"),
    "a short warmup without an end": ("RDT009", {"learning_rate": [*np.linspace(0, 1e-6, 40)]}, "info"),
    "a length that shrinks": ("RDT013", {"response_length": noisy([300] * 30 + [95] * 30, 3)}, "warning"),
    "a length that shrinks less": ("RDT013", {"response_length": noisy([300] * 30 + [105] * 30, 3)}, "clean"),
    "a length that shrinks for a reward": (
        "RDT013",
        {"response_length": noisy([300] * 30 + [95] * 30, 3), "reward": RISES},
        "info",
    ),
    "a gradient at another level": ("RDT013", {"grad_norm": noisy([1] * 30 + [11] * 30, 0.05)}, "warning"),
    "a gradient at a lower level": ("RDT013", {"grad_norm": noisy([1] * 30 + [9.5] * 30, 0.05)}, "clean"),
    "a gradient of noise": ("RDT013", {"grad_norm": [0.1, 5.0, 0.2, 3.0] * 15}, "clean"),
    "an entropy that jumps": ("RDT014", {"entropy": noisy([1.0] * 30 + [1.5] * 30, 0.02)}, "warning"),
    "an entropy that jumps less": ("RDT014", {"entropy": noisy([1.0] * 30 + [1.08] * 30, 0.005)}, "clean"),
    "an outlier of the entropy": ("RDT014", {"entropy": noisy([1.0] * 30 + [3.0] + [1.0] * 29, 0.02)}, "clean"),
    "an entropy of noise": ("RDT014", {"entropy": noisy([1.0] * STEPS, 0.3)}, "clean"),
    "an entropy that falls": ("RDT014", {"entropy": [2 * 0.9**step for step in range(STEPS)]}, "clean"),
    "a KL that nothing holds": (
        "RDT015",
        {"kl": [0.02 * step for step in range(STEPS)], "grad_norm": [1.0] * 20 + [0.01] * 40},
        "warning",
    ),
    "a KL with a gradient": (
        "RDT015",
        {"kl": [0.02 * step for step in range(STEPS)], "grad_norm": [1.0] * 20 + [0.03] * 40},
        "clean",
    ),
    "a KL and groups of which half are dead": (
        "RDT015",
        {
            "kl": [0.02 * step for step in range(STEPS)],
            "grad_norm": [1.0] * 20 + [0.01] * 40,
            "zero_variance_share": [0.2] * 20 + [0.5] * 40,
        },
        "skipped:",
    ),
    "a KL and groups of which fewer are dead": (
        "RDT015",
        {
            "kl": [0.02 * step for step in range(STEPS)],
            "grad_norm": [1.0] * 20 + [0.01] * 40,
            "zero_variance_share": [0.2] * 20 + [0.49] * 40,
        },
        "warning",
    ),
    "a policy without entropy": (
        "RDT015",
        {
            "kl": [0.02 * step for step in range(STEPS)],
            "grad_norm": [1.0] * 20 + [0.01] * 40,
            "entropy": [2.0] * 20 + [0.01] * 40,
        },
        "clean",
    ),
    "a reward that has not moved": ("RDT016", {"reward": FLAT}, "info"),
    "a reward that has": ("RDT016", {"reward": RISES}, "clean"),
    "an entropy that rises for no reward": ("RDT003", {"entropy": np.linspace(1, 1.3, STEPS), "reward": FLAT}, "info"),
    "an entropy that rises while the reward falls": (
        "RDT003",
        {"entropy": np.linspace(1, 1.3, STEPS), "reward": FALLS},
        "warning",
    ),
    "an entropy that rises with the reward": (
        "RDT003",
        {"entropy": np.linspace(1, 1.3, STEPS), "reward": RISES},
        "clean",
    ),
    "a KL of nats for next to no reward": (
        "RDT004",
        {"kl": np.linspace(0.001, 3, STEPS), "reward": RISES, "reward_std": [9.0] * STEPS},
        "warning",
    ),
    "a KL of nats for a reward of more than its spread": (
        "RDT004",
        {"kl": np.linspace(0.001, 3, STEPS), "reward": RISES, "reward_std": [0.2] * STEPS},
        "info",
    ),
    "much longer responses of which a fifth is truncated": (
        "RDT006",
        {
            "truncated_share": np.linspace(0, 0.25, STEPS),
            "response_length": np.linspace(100, 1500, STEPS),
            "reward": FLAT,
        },
        "warning",
    ),
    "much longer responses that earn more": (
        "RDT006",
        {
            "truncated_share": np.linspace(0, 0.25, STEPS),
            "response_length": np.linspace(100, 1500, STEPS),
            "reward": RISES,
        },
        "info",
    ),
    "longer responses of which a fifth is truncated": (
        "RDT006",
        {
            "truncated_share": np.linspace(0, 0.25, STEPS),
            "response_length": np.linspace(100, 300, STEPS),
            "reward": FLAT,
        },
        "info",
    ),
    "longer responses without a reward": (
        "RDT006",
        {"truncated_share": [0.0] * STEPS, "response_length": np.linspace(100, 300, STEPS)},
        "clean",
    ),
    "longer responses that earn more": (
        "RDT006",
        {"truncated_share": [0.0] * STEPS, "response_length": np.linspace(100, 300, STEPS), "reward": RISES},
        "clean",
    ),
    "lengths of much noise": (
        "RDT006",
        {"truncated_share": [0.0] * STEPS, "response_length": noisy([300.0] * STEPS, 200.0), "reward": FLAT},
        "clean",
    ),
    "a reward that rises and slowly falls in much noise": (
        "RDT005",
        {"reward": noisy([0.3] * 60 + [0.7] * 60 + [0.4] * 180, 0.25)},
        "warning",
    ),
    "a reward that rises in much noise": ("RDT005", {"reward": noisy([0.3] * 60 + [0.7] * 140, 0.25)}, "clean"),
    "a third more truncated": ("RDT006", {"truncated_share": np.linspace(0, 0.36, STEPS)}, "info"),
    "half truncated": ("RDT006", {"truncated_share": np.linspace(0, 0.5, STEPS)}, "warning"),
    "a deviation of 0 in most lines": ("RDT001", {"reward_std": [0.0, 0.0, 0.3] * 20, "reward": FLAT}, "info"),
    "a deviation above 0": ("RDT001", {"reward_std": [0.3] * STEPS, "reward": FLAT}, "clean"),
    "weights of sequences": ("RDO012", {"is_weight": [0.06], "sampler_k3": [0.003]}, "warning"),
    "weights of tokens": ("RDO012", {"is_weight": [0.8], "sampler_k3": [0.003]}, "skipped:"),
    "all 0 in one line": ("RDT002", {"reward": [0.0], "advantage": [0.0], "return": [0.0]}, "warning"),
    "a reward of 0 in one line": ("RDT002", {"reward": [0.0], "advantage": [0.1]}, "skipped:"),
    "a collapse to the floor": (
        "RDT005",
        {"reward": noisy([-0.55] * 30 + [-0.93] * 30, 0.04), "reward_min": [-1.0] * STEPS},
        "error",
    ),
    "a KL before any update": ("RDG012", {"kl": [0.63], "ppo_kl": [-0.2]}, "warning"),
    "a KL of one step": ("RDG012", {"kl": [0.2], "ppo_kl": [0.01]}, "clean"),
}


@pytest.mark.parametrize(("times", "expected"), [(0.97, "clean"), (1.03, "warning")])
def test_changes_of_a_length_below_a_billionth_of_it_are_rounding(times, expected):
    lengths = [500 + 500e-9 * times * (step % 2) for step in range(STEPS + 1)]
    assert diagnose_log("RDT019", response_length=lengths, reward=[0, 1] * 30 + [0]).split()[1] == expected


@pytest.mark.parametrize(("every", "expected"), [(1, ["RDG012"]), (5, [])])
def test_a_log_that_begins_after_some_updates_says_less_of_the_reference(every, expected):
    report = check_log("RDG012", "trl", kl=[0.1] * 8, beta=0.1, every=every)
    assert [one.code for one in report.findings] == expected


@pytest.mark.parametrize(("code", "series", "expected"), NEW.values(), ids=NEW)
def test_what_few_lines_and_changes_of_level_show(code, series, expected):
    assert diagnose_log(code, **series).split()[1] == expected


def test_a_warmup_of_a_longer_run_is_not_over(tmp_path):
    """The length of the run lies in the file."""
    rising = {"learning_rate": list(np.linspace(1e-8, 1e-6, STEPS)), "reward": FLAT}
    path = log_file(tmp_path / "trainer_state.json", **rising)
    for total, expected in ((600, "skipped"), (STEPS, "warning")):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"max_steps": total}))
        report = rd.check(path, select=["RDT009"])
        found = [one.severity.label for one in report.findings] + ["skipped" for _ in report.skipped]
        assert found == [expected]


@pytest.mark.parametrize(
    ("name", "values", "found"),
    [
        # The KL in the reward is of the policy before the update; that in the loss may be of one after several.
        ("actor/reward_kl_penalty", [0.2] * 8, ["RDG012"]),
        ("actor/reward_kl_penalty", [0.0, *[0.2] * 7], []),
        ("actor/reward_kl_penalty", [0.005] * 8, []),
        ("actor/kl_loss", [0.2] * 8, []),
    ],
)
def test_the_kl_in_verls_reward_is_of_the_old_policy(name, values, found, tmp_path):
    path = tmp_path / "log.jsonl"
    rows = [{"step": n, name: kl, "critic/score/mean": 0.5} for n, kl in enumerate(values, start=1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [one.code for one in rd.check(path, select=["RDG012"]).findings] == found


@pytest.mark.parametrize(
    ("name", "severity"),
    [
        ("log_stage3.json", "info"),
        ("phase-2/log.json", "info"),
        ("stage10/log.json", "info"),
        ("resumed/log.json", "info"),
        ("log_stage1.json", "warning"),
        ("backstage2.json", "warning"),
        ("unresumed.json", "warning"),
        ("stage2/out/log.json", "warning"),
    ],
)
def test_a_later_stage_starts_from_a_policy_that_was_trained(tmp_path, name, severity):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    rows = [{"step": n, "kl": 0.4, "reward": 0.5 + n % 2 / 10, "frac_reward_zero_std": 0.0} for n in range(1, 31)]
    (tmp_path / name).write_text(json.dumps(rows))
    (found,) = rd.check(tmp_path / name, trainer="trl", select=["RDG012"]).findings
    assert found.severity.label == severity
    assert bool(found.remark) == (severity == "info")


def test_a_second_training_in_one_log_starts_from_a_policy_that_was_trained(tmp_path):
    runs = [[0.0, 0.2, 0.4, 0.5], [0.6, 0.6, 0.7, 0.7]]
    entries = [{"step": at, "kl": kl, "reward": 0.1 * at} for run in runs for at, kl in enumerate(run, start=1)]
    path = tmp_path / "train.log"
    path.write_text("".join(f"{entry}\n" for entry in entries))
    report = rd.check(path, select=["RDG012"])
    assert report.part == "run 2 of 2"
    assert [one.reason for one in report.skipped] == ["an earlier run of the log may have trained the policy"]


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({"train/pg_clipfrac": 0.5}, ["RDM008"]),
        ({"train/pg_clipfrac": 0.5, "kl-penalty": 0.5}, []),
        ({"train/pg_clipfrac": 0.5, "epoch": 0.5}, ["RDM008"]),
        # Names that any loop has tell no trainer, and so no sum.
        ({}, []),
    ],
)
def test_the_loss_of_a_loop_may_have_terms_of_its_own(more, found, tmp_path):
    noise = np.random.default_rng(0).standard_normal((30, 3))
    path = tmp_path / "log.jsonl"
    rows = [
        {"step": n, "loss": loss, "policy_loss": policy, "entropy": 1 + abs(entropy)} | more
        for n, (loss, policy, entropy) in enumerate(noise, start=1)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [one.code for one in rd.check(path, select=["RDM008"]).findings] == found


@pytest.mark.parametrize(("more", "expected"), [({}, 3), ({"reward": FLAT}, 0), ({"loss": [math.nan] * STEPS}, 1)])
def test_losses_alone_are_not_checked_but_for_what_is_no_number(more, expected, tmp_path):
    path = log_file(tmp_path / "log.jsonl", **({"loss": FLAT, "grad_norm": FLAT} | more))
    report = rd.check(path)
    assert exit_code(report, opt.FailOn.warning) == expected
    if expected == 3:
        assert (
            verdict(report)
            == "This is a log of losses alone, as supervised fine-tuning writes it, which is not checked."
        )


@pytest.mark.parametrize(("least", "is_policy"), [(0.0, False), (-1e-6, True)])
def test_a_loss_below_0_is_that_of_a_policy(least, is_policy, tmp_path):
    report = rd.check(log_file(tmp_path / "log.jsonl", loss=[0.5] * (STEPS - 1) + [least], grad_norm=FLAT))
    start = "The log has no known reward, only loss and gradient norm" if is_policy else "This is a log of losses alone"
    assert verdict(report).startswith(start)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (("loss", "token_acc", "grad_norm"), "supervised fine-tuning"),
        (("loss", "accuracy", "lr", "percentage"), "preference or reward-model training"),
        (("rollout/ep_rew_mean", "train/loss"), "reinforcement learning of no language model"),
        (("loss", "accuracy", "lr"), None),
        (("loss", "token_acc", "reward"), None),
        (("loss", "accuracy", "percentage", "reward"), None),
    ],
)
def test_a_training_that_is_not_checked_is_named_by_what_it_logs(names, kind, tmp_path):
    report = rd.check(log_file(tmp_path / "log.jsonl", **dict.fromkeys(names, FLAT)))
    assert (exit_code(report, opt.FailOn.warning) == 3) is (kind is not None)
    assert verdict(report).startswith("This is a log of") is (kind is not None)
    if kind is not None:
        assert verdict(report) == f"This is a log of {kind}, which is not checked."


@pytest.mark.parametrize(("second", "expected"), [(2.2e-6, []), (2.8e-6, ["RDT009"])])
def test_a_warmup_of_which_few_lines_are_logged_is_no_jump(tmp_path, second, expected):
    """Steps 1, 10, 20, ...: the rate after step 1 is a tenth of that after step 10."""
    rates = [2e-7, second, 4.2e-6, 6.2e-6, 8.2e-6, 1e-5, *np.linspace(1e-5, 0, STEPS - 6)]
    path = log_file(tmp_path / "trainer_state.json", learning_rate=rates, reward=FLAT)
    body = json.loads(path.read_text())
    for row in body["log_history"]:
        row["step"] = max(1, 10 * (row["step"] - body["log_history"][0]["step"]))
    path.write_text(json.dumps(body))
    assert [finding.code for finding in rd.check(path, select=["RDT009"]).findings] == expected


@pytest.mark.parametrize(("largest", "expected"), [(99.0, []), (101.0, ["RDM003"])])
def test_no_tail_explains_a_kl_of_a_hundred_nats(tmp_path, largest, expected):
    kl = [1e-3] * (STEPS - 10) + [3.0] * 5 + [30.0] + [1e-3] * 4
    kl[30] = largest
    path = log_file(tmp_path / "trainer_state.json", kl=kl)
    assert [finding.code for finding in rd.check(path, select=["RDM003"]).findings] == expected


def test_the_sign_of_an_entropy_in_a_loop_of_ones_own_is_not_known(tmp_path):
    path = tmp_path / "progress.csv"
    rows = "".join(f"{step},{0.1 * step},-1.5\n" for step in range(1, 30))
    path.write_text(f"step,rollout/ep_rew_mean,train/entropy_loss\n{rows}")
    assert not rd.check(path, select=["RDM003"]).findings


def test_the_onset_of_a_change_of_level_is_its_step():
    from rolloutdoctor.rules.level_jump import isolated_jump

    assert isolated_jump(np.asarray([1.0, 1.01] * 10 + [2.0, 2.01] * 10), times=4, share=0.2, around=5)[0] == 20


def test_a_distillation_needs_no_reward(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": at, "teacher_kl": 2.0, "env/all/reward/total": 0.0, "optim/entropy": 1.0} for at in range(STEPS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = rd.check(path)
    assert {"RDT001", "RDT002"} <= {one.code for one in report.not_applicable}
    assert not report.findings


@pytest.mark.parametrize(
    ("name", "is_distilled"),
    [
        ("kl_to_teacher", True),
        ("distill_reverse_kl", True),
        ("kd_loss", True),
        ("gkd/jsd", True),
        ("teacher/logprob", True),
        ("teacher_forcing", False),
    ],
)
def test_a_divergence_from_a_teacher_names_a_distillation(tmp_path, name, is_distilled):
    lines = [{"step": at, name: 0.4, "reward": 0.0, "reward_std": 0.0, "entropy": 1.0} for at in range(STEPS)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = rd.check(tmp_path / "metrics.jsonl")
    assert ("RDT002" in {one.code for one in report.not_applicable}) is is_distilled
    assert verdict(report).startswith("By its names this is an on-policy distillation, ") is is_distilled


@pytest.mark.parametrize(
    ("project", "is_distilled"), [("math-opd", True), ("On_Policy_Distillation_7B", True), ("R1-Distill-Qwen", False)]
)
def test_the_name_of_a_project_may_say_that_it_is_a_distillation(tmp_path, project, is_distilled):
    options = {"actor_rollout_ref": {"rollout": {"n": 8}}, "trainer": {"project_name": project, "total_epochs": 1}}
    metrics = "critic/score/mean:0.0 - critic/score/max:0.0 - critic/score/min:0.0 - actor/grad_norm:0.3125"
    lines = [f"{options}", *(f"step:{at} - actor/pg_loss:0.0123 - {metrics}" for at in range(1, 13))]
    (tmp_path / "train.log").write_text("\n".join(lines))
    report = rd.check(tmp_path / "train.log")
    assert ("RDT002" in {one.code for one in report.findings}) is not is_distilled


@pytest.mark.parametrize(("lines", "varied", "severity"), [(12, 5, "error"), (12, 6, "warning"), (3, 2, "warning")])
def test_a_reward_of_0_beside_advantages_trains_something_else(tmp_path, lines, varied, severity):
    """A KL penalty in the reward, a value model, or a teacher."""
    line = {"critic/score/mean": 0.0, "critic/score/max": 0.0, "critic/score/min": 0.0, "actor/grad_norm": 0.5}
    sizes = [1.0] * varied + [0.0] * (lines - varied)
    rows = [
        {"step": at} | line | {"critic/advantages/max": size, "critic/advantages/min": -size}
        for at, size in enumerate(sizes, 1)
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = rd.check(path, select=["RDT002"]).findings
    assert (found.severity.label, "although advantages are not 0" in found.headline) == (
        severity,
        severity == "warning",
    )


@pytest.mark.parametrize(("other", "found"), [({"teacher_kl": 2.0}, []), ({}, ["RDG012"])])
def test_the_reference_of_a_distillation_is_its_teacher(tmp_path, other, found):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": at, "actor/ppo_kl": 0.0, "actor/kl_loss": 0.6} | other for at in range(1, STEPS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [one.code for one in rd.check(path, select=["RDG012"]).findings] == found


def test_words_about_distillation_beside_a_reward_are_none(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": at, "reward_mean": 0, "grad_norm": 0.1 + at, "distill_strength": 0.5} for at in range(STEPS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "RDT002" in {one.code for one in rd.check(path).findings}


def test_a_loss_of_pairs_names_the_training(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("".join(f"Epoch:[1/1]({at}/60), loss: 0.6, dpo_loss: 0.6, aux_loss: 0.0\n" for at in range(1, 61)))
    assert rd.check(path).nothing_checked


def test_preference_training_is_named_and_not_checked(tmp_path):

    path = tmp_path / "log.jsonl"
    pair = {"rewards/chosen": 0.1, "rewards/rejected": -0.1, "rewards/margins": 0.2, "loss": 0.6}
    path.write_text("".join(json.dumps({"step": at} | pair) + "\n" for at in range(3)))
    report = rd.check(path)
    assert report.nothing_checked
    assert verdict(report) == "This is a log of preference training (DPO), which is not checked."


def test_weights_that_nobody_states_are_fitted(tmp_path):
    """With any weights the reward is no sum of its functions, or it is."""
    one, other = FLAT, noisy([0.3] * STEPS, 0.1, seed=3)
    means = {"rewards/a/mean": one, "rewards/b/mean": other, "num_tokens": list(range(STEPS))}
    total = [0.7 * a + 0.2 * b for a, b in zip(one, other, strict=True)]
    for reward, expected in ((total, []), ([x + 0.05 * (at % 3) for at, x in enumerate(total)], ["warning"])):
        path = log_file(tmp_path / "trainer_state.json", reward=reward, **means)
        assert [found.severity.label for found in rd.check(path, select=["RDM008"]).findings] == expected


KL_OF_A_COLLAPSE = [0.828, 0.848, 1.317, 2.004, 2.523, 4.376, 7.835, 12.971, 15.679, 16.560, 16.627, 16.899]
REWARD_OF_A_COLLAPSE = [-0.676, -0.717, -0.844, -0.911, -0.918, -0.944, -0.966, -0.973, -0.997, -1.0, -1.0, -1.0]


@pytest.mark.parametrize("after", [20, 100, 250])
def test_a_collapse_within_the_first_tenth_is_no_rise_of_the_reward(after):
    """A public run: the score falls to its floor while the KL rises, and stays there for most of the log."""
    kl, reward = [*KL_OF_A_COLLAPSE, *[16.9, 16.7] * (after // 2)], [*REWARD_OF_A_COLLAPSE, *[-1.0] * after]
    assert diagnose_log("RDT004", kl=kl, reward=reward).split()[1] in ("warning", "error")


@pytest.mark.parametrize("after", [20, 100, 250])
def test_a_reward_that_rises_within_the_first_tenth_bought_its_kl(after):
    kl = [*KL_OF_A_COLLAPSE, *[16.9, 16.7] * (after // 2)]
    reward = [*(-each for each in REWARD_OF_A_COLLAPSE), *[1.0] * after]
    assert diagnose_log("RDT004", kl=kl, reward=reward).startswith("RDT004 info")
