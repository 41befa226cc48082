"""Every number that decides what a rule over logs says: one log just below it, and one just above."""

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from rules.row_boundaries import NEAR, is_decided_by, numbers_of, outcome

from rolloutdoctor.rules.numbers_rule import NumbersRule
from rolloutdoctor.rules.table import RULES
from rolloutdoctor.testing import check_log

Log = dict[str, Any]


def turns(before: float, after: float, *, at: int = 15, steps: int = 30) -> list[float]:
    """A series of two levels."""
    return [before] * at + [after] * (steps - at)


def waves(levels: list[float], size: float) -> list[float]:
    """Levels with a noise that alternates: medians of an even number of steps do not see it."""
    return [level + size * (-1) ** step for step, level in enumerate(levels)]


def noise_of(change: float, errors: float) -> float:
    """Noise of which a change between medians of four values is so many standard errors."""
    return change * 0.6745 / (errors * np.sqrt(2 / 4) * np.sqrt(2))


def fall_of(size: float) -> list[float]:
    """A fall of 1.0 in 40 steps, with such a noise."""
    return waves(turns(1.0, 0.0, at=20, steps=40), size)


LONGER = {"response_length": turns(100.0, 600.0)}
"""Responses of six times the length."""


def extremes(low: list[float], high: list[float]) -> Log:
    """The extremes of advantages beside rewards from 0 to 1."""
    rewards = {"reward_min": [0.0] * len(low), "reward_max": [1.0] * len(low)}
    return {**rewards, "advantage_min": low, "advantage_max": high}


def slow_fall(steps: int, errors: float = 5.5, end: float = 0.4) -> Log:
    """A reward that rises and falls, by so many standard errors of the means of a fifth of the steps if to 0.4."""
    part = steps // 5
    levels = [0.3] * part + [0.8] * part + [*np.linspace(0.8, end, steps - 3 * part)] + [end] * part
    size = 0.4 / errors * (part / 2) ** 0.5 * (1 - 1 / part) ** 0.5
    return {"reward": waves(levels, size)}


@dataclass(frozen=True)
class Boundary:
    """Two logs between which a number lies.

    Attributes:
        code: of the rule.
        name: of the number.
        below, above: the logs.
        says: what becomes of either: the severity of the finding, ``clean`` or ``skipped``, and a word of the headline.
        trainer: whose logs they are.
        factor: by which the number is changed to see that it decides.
    """

    code: str
    name: str
    below: Log
    above: Log
    says: tuple[str, str]
    trainer: str | None = None
    factor: float = 1.1

    def outcomes(self) -> tuple[str, str]:
        """What becomes of the two logs; of a finding also the headline without its numbers."""
        below, above = (check_log(self.code, self.trainer, **log) for log in (self.below, self.above))
        return outcome(below), outcome(above)


def steps_of(code: str, fewest: int, says: str, **values: float) -> Boundary:
    """A rule that takes so many steps: logs of constant values with a step less, and with so many."""
    below, above = ({name: [value] * count for name, value in values.items()} for count in (fewest - 1, fewest))
    return Boundary(code, "fewest", below, above, ("skipped", says))


def near(code: str, name: str, number: float, log: Any, says: tuple[str, str], trainer: str | None = None) -> Boundary:
    """Logs a little below and above a number, which `log` takes."""
    return Boundary(code, name, log(number * (1 - NEAR)), log(number * (1 + NEAR)), says, trainer)


def swinging(first: float, last: float, errors: float, steps: int = 30) -> list[float]:
    """A share that changes by so many standard errors of the medians of three: it goes up and down in every step."""
    size = (last - first) / (2 + errors * 2 / (0.6745 * 2**0.5) * (2 / 3) ** 0.5)
    return [(first if step < steps / 2 else last) + size * (-1) ** step for step in range(steps)]


def late(errors: float) -> list[float]:
    """A share that is high in the last six lines, with a spread of the first ten that puts thirds so far apart."""
    share = np.array(waves([0.2] * 24 + [0.8] * 6, 1e-4))
    change = share[-10:].mean() - share[:10].mean()
    spread = ((change / errors) ** 2 - share[-10:].var(ddof=1) / 10) * 10 * 9 / 6
    share[3:9] = 0.2 + spread**0.5 * np.array([1, -1] * 3)
    return list(share)


def climbing(steps: int) -> Log:
    """A reward that climbs too slowly for its noise while the KL is high, for so many steps."""
    return {"kl": turns(0.001, 3.0, at=6, steps=6 + steps), "reward": waves([0.0] * 6 + [*np.linspace(0, 5, steps)], 1)}


def following(least: float, errors: float = 3.0, steps: int = 30) -> Log:
    """Rewards whose changes follow those of the length, so that so many errors below is such a share."""
    error = (1.5 / (steps - 1 - 4.5)) ** 0.5
    near_one = np.tanh(np.arctanh(least**0.5) + errors * error)
    changes = np.random.default_rng(0).standard_normal((steps - 1, 2))
    changes, _ = np.linalg.qr(changes - changes.mean(0))
    mixed = changes @ [near_one, (1 - near_one**2) ** 0.5]
    return {"response_length": [500.0, *500 + 100 * changes[:, 0].cumsum()], "reward": [0.5, *0.5 + mixed.cumsum()]}


def penalised(times: float, steps: int = 3) -> Log:
    """Rewards of half a spread in each step, less a penalty of so many times that."""
    rewards = {"reward": [0.5] * steps, "reward_min": [0.0] * steps, "reward_max": [1.0] * steps}
    return rewards | {"penalised_reward": [0.5 - times * 0.5] * steps, "ppo_kl": [0.01] * steps}


def uneven(first: float, last: float, noise: float, after: int = 25) -> list[float]:
    """Two levels in which changes from line to line are large."""
    return [(first if step < 25 else last) + noise * (1, -1, 0.4, -0.7, 0.9)[step % 5] for step in range(25 + after)]


ONCE = {"num_iterations": 1, "steps_per_generation": 1, "gradient_accumulation_steps": 1, "use_vllm": True}
VERL_ONCE = {
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 64,
    "actor.ppo_mini_batch_size": 64,
    "actor.ppo_epochs": 1,
}
RATE = 1e-6
RISING = [RATE * step for step in range(1, 100)]


def of_batches(updates: int) -> Log:
    """Entropies that differ from generated batch to batch, and not between the updates on one."""
    entropy = [level for batch in range(14) for level in [1.0 + 0.2 * (batch % 2)] * updates]
    reward = [value for _ in range(14) for value in [0.5, *[float("nan")] * (updates - 1)]]
    return {"entropy": entropy, "reward": reward}


BOUNDARIES = [
    near("RDG012", "floor", 0.01, lambda x: {"kl": [x] * 6, "beta": 0.1}, ("clean", "info"), "trl"),
    near("RDG012", "floor_of_few", 0.05, lambda x: {"kl": [x] * 3, "beta": 0.1}, ("clean", "info"), "trl"),
    near("RDG012", "far", 0.3, lambda x: {"kl": [x] * 6}, ("clean", "warning"), "verl"),
    near("RDG012", "far", 0.3, lambda x: {"kl": [x] * 6}, ("info", "warning"), "trl"),
    near("RDG012", "tokens", 500.0, lambda x: {"response_kl": [0.3 * x] * 6}, ("clean", "warning")),
    near("RDG012", "falls", 0.5, lambda x: {"kl": turns(1.0, x, at=6)}, ("skipped", "warning"), "trl"),
    Boundary(
        "RDG012",
        "long",
        *({"kl": turns(1.0, 0.1, at=6, steps=steps)} for steps in (9, 10)),
        ("warning", "skipped"),
        "trl",
    ),
    near(
        "RDG012",
        "drift",
        0.05,
        lambda x: {"kl": [0.5] * 6, "ppo_kl": [x] * 6},
        ("warning: .* the reference is", "warning: .* and the update moves"),
        "verl",
    ),
    Boundary(
        "RDG012",
        "widest",
        *({"kl": [0.5] * 6, "every": every} for every in (6, 5)),
        says=("skipped", "info"),
        trainer="trl",
    ),
    near(
        "RDG012",
        "still",
        1e-6,
        lambda x: {"kl": [0.5] * 6, "learning_rate": [x] * 6, "every": 2},
        ("info: .* steps, at a learning rate", "info: .* steps: the reference"),
        "trl",
    ),
    near(
        "RDT001",
        "distinct",
        0.01,
        lambda x: {"reward_std": [round((x + step % 7 * 0.0137) * (step % 2), 4) for step in range(60)]},
        ("clean|skipped", "info"),
    ),
    Boundary("RDG012", "few", {"kl": [0.03] * 5}, {"kl": [0.03] * 6}, ("clean", "info"), "trl"),
    Boundary(
        "RDG013",
        "least",
        *(
            {
                "zero_variance_share": turns(0.5, 1.0, at=12 - silent, steps=12),
                "kl": [0.1] * 12,
                "grad_norm": turns(1.02345678, 0.0, at=12 - silent, steps=12),
                "beta": 0.1,
            }
            for silent in (2, 3)
        ),
        ("clean", "warning"),
        "trl",
    ),
    replace(steps_of("RDO012", 3, "error", sampler_pearson=0.05), says=("warning", "error")),
    near(
        "RDO012",
        "small_k3",
        0.02,
        lambda x: {"is_weight": [3.0] * 3, "sampler_k3": [x] * 3},
        ("warning: the mean", "info: sampler and"),
    ),
    near(
        "RDO012",
        "least_apart",
        0.3,
        lambda x: {"is_weight": [1 + x] * 3, "sampler_k3": [1e-4] * 3},
        ("clean", "warning"),
    ),
    replace(
        steps_of("RDO015", 3, "info", clip_fraction=0.02),
        below={"clip_fraction": [0.02] * 2, **ONCE},
        above={"clip_fraction": [0.02] * 3, **ONCE},
        trainer="trl",
    ),
    Boundary(
        "RDO015",
        "fewest_pinned",
        *({"ppo_kl": [0.0] * steps, **VERL_ONCE, "actor.ppo_mini_batch_size": 16} for steps in (9, 10)),
        says=("not applicable", "warning: the log-probs move by exactly"),
        trainer="verl",
    ),
    near("RDO015", "some", 0.001, lambda x: {"clip_fraction": [x] * 9, **ONCE}, ("clean", "info"), "trl"),
    near("RDO015", "many_clipped", 0.1, lambda x: {"clip_fraction": [x] * 9, **ONCE}, ("info", "warning"), "trl"),
    near("RDO015", "far", 0.01, lambda x: {"ppo_kl": [x] * 9, **VERL_ONCE}, ("info", "warning"), "verl"),
    steps_of("RDT001", 10, "info", zero_variance_share=0.45),
    near("RDT001", "late", 0.5, lambda x: {"zero_variance_share": [x] * 2}, ("skipped", "info")),
    near("RDT001", "many", 0.4, lambda x: {"zero_variance_share": [x] * 20}, ("clean", "info")),
    near("RDT001", "most", 0.9, lambda x: {"zero_variance_share": [x] * 20}, ("info", "warning")),
    # Too few lines to have grown beyond their noise, of a small mean: exactly so much in the last third, and more.
    Boundary(
        "RDT001",
        "most",
        *({"zero_variance_share": [0.0, 0.0, 0.8, *[0.0] * 5, *[last] * 3]} for last in (0.9, 0.92)),
        ("clean", "warning"),
    ),
    near(
        "RDT001", "late", 0.5, lambda x: {"zero_variance_share": turns(0.1, x, at=20)}, ("clean", "info: .*last third")
    ),
    near(
        "RDT001",
        "errors",
        3.0,
        lambda x: {"zero_variance_share": waves(turns(0.35, 0.35 + 0.25 * x * np.sqrt(2 / 19), at=40, steps=60), 0.25)},
        ("info: .*responses are", "info: .*last third"),
    ),
    Boundary(
        "RDT001",
        "lasting",
        {"zero_variance_share": turns(0.5, 1.0, at=15, steps=19)},
        {"zero_variance_share": turns(0.5, 1.0, at=15, steps=20)},
        ("info", "error"),
    ),
    # Five steps by chance, where 25 % or 25.8 % of the earlier ones are like them: 0.98 and 1.14 in a thousand.
    Boundary(
        "RDT001",
        "chance",
        {"zero_variance_share": [1.0, 0.5, 0.5, 0.5] * 31 + [1.0] * 5},
        {"zero_variance_share": [1.0, 0.5, 0.5, 0.5] * 30 + [1.0, 0.5, 1.0, 0.5] + [1.0] * 5},
        ("error", "info"),
    ),
    steps_of("RDT002", 10, "warning", reward=0.25),
    Boundary(
        "RDT009",
        "lasting",
        *({"learning_rate": [0.0] * steps} for steps in (2, 3)),
        ("skipped", "warning: the learning rate is #"),
    ),
    Boundary(
        "RDT002",
        "lasting",
        *({"reward": [0.0] * steps, "reward_std": [0.0] * steps} for steps in (2, 3)),
        ("warning", "error"),
    ),
    Boundary(
        "RDT002",
        "mostly",
        *({"reward": [0.0] * zeros + [0.123] * (30 - zeros)} for zeros in (26, 27)),
        ("clean", "info: the reward is"),
    ),
    # Nothing is learned from one reward throughout if no step has a gradient, printed with three decimals or more.
    Boundary(
        "RDT002",
        "coarse",
        *(
            {
                "reward": [0.0] * 10,
                "entropy": [round(0.4321 + 0.01337 * step, decimals) for step in range(10)],
                "kl": [round(0.1234 + 0.01271 * step, decimals) for step in range(10)],
                "grad_norm": [0.0] * 10,
            }
            for decimals in (2, 4)
        ),
        ("warning", "error"),
        "trl",
        factor=10.0,
    ),
    # A deviation that is printed as 0.0000 may be half of a tenth of a thousandth, as of 0.000000 it may not.
    Boundary(
        "RDT002",
        "coarse_spread",
        *(
            {
                "reward": [round(0.4321 + 0.0133713 * step, decimals) for step in range(5)],
                "rewards/format/mean": [0.0] * 5,
                "rewards/format/std": [0.0] * 5,
            }
            for decimals in (4, 6)
        ),
        ("info", "warning"),
        "trl",
        factor=10.0,
    ),
    # Of a log with two decimals a deviation of 0 may be half a hundredth.
    Boundary(
        "RDT002",
        "coarse",
        *(
            {"reward": rewards, "rewards/format/mean": [0.0] * 5, "rewards/format/std": [0.0] * 5}
            for rewards in ([0.123, 0.456, 0.789, 0.321, 0.654], [0.12, 0.45, 0.78, 0.32, 0.65])
        ),
        ("info", "skipped"),
        "trl",
        factor=10.0,
    ),
    # Responses of five tokens: ln 2 nats of two equally likely ones.
    Boundary(
        "RDT003",
        "choices",
        *({"entropy": [np.log(2) / 5 * part] * 30, "response_length": [5.0] * 30} for part in (0.97, 1.03)),
        ("info: the policy hardly samples", "clean"),
        "trl",
    ),
    Boundary(
        "RDT003",
        "fewest",
        *({"entropy": turns(2.0, 0.01, at=5, steps=steps)} for steps in (9, 10)),
        ("skipped", "warning"),
    ),
    near("RDT003", "collapsed", 0.05, lambda x: {"entropy": turns(2.0, 2 * x)}, ("warning", "clean")),
    near(
        "RDT003",
        "exploded",
        2.0,
        lambda x: {"entropy": turns(1.5, 1.5 * x)},
        ("info: the entropy rose", "warning: entropy exploded"),
    ),
    near(
        "RDT003",
        "least_growth",
        1.0,
        lambda x: {"entropy": turns(0.5, 0.5 + x)},
        ("info: the entropy rose", "warning: entropy exploded"),
    ),
    near("RDT003", "rises", 0.15, lambda x: {"entropy": turns(2.0, 2 + 2 * x)}, ("clean", "info")),
    near("RDT003", "least_rise", 0.15, lambda x: {"entropy": turns(0.5, 0.5 + x)}, ("clean", "info")),
    near(
        "RDT003",
        "errors",
        6.0,
        lambda x: {"entropy": waves(turns(2.0, 3.0, at=20, steps=40), noise_of(1.0, x))},
        ("clean", "info"),
    ),
    Boundary(
        "RDT004",
        "fewest",
        *({"kl": turns(0.001, 3.0, at=5, steps=steps)} for steps in (9, 10)),
        ("skipped", "warning"),
    ),
    near("RDT004", "high", 1.0, lambda x: {"kl": turns(0.001, x)}, ("clean", "warning")),
    near("RDT004", "times", 10.0, lambda x: {"kl": turns(0.2, 0.2 * x)}, ("clean", "warning")),
    near("RDT004", "still", 0.01, lambda x: {"kl": [x, 0.5, 0.5]}, ("warning", "skipped")),
    near("RDT004", "jump", 0.3, lambda x: {"kl": [0.001, x, x]}, ("skipped", "warning")),
    near(
        "RDT004",
        "moves",
        2.0,
        lambda x: {
            "kl": turns(0.001, 3.0, at=6, steps=36),
            "reward": waves(turns(0.0, x * np.sqrt(2 / 9), at=20, steps=36), 1.0),
        },
        ("warning", "info"),
    ),
    # A sure rise of 1, of which the spread of the rewards is 0.5 times or not.
    near(
        "RDT004",
        "worth",
        0.5,
        lambda x: {"kl": turns(0.001, 3.0), "reward": turns(0.0, 1.0), "reward_std": [1 / x] * 30},
        ("warning", "info"),
    ),
    Boundary(
        "RDT004",
        "long",
        *({"kl": [0.001] * 20 + [2.0] * lines + [0.01] * (80 - lines)} for lines in (9, 10)),
        says=("clean", "info: the KL was above"),
    ),
    Boundary("RDT004", "third", climbing(17), climbing(18), ("warning", "info")),
    Boundary(
        "RDT005",
        "fewest",
        *({"reward": turns(0.7, 0.1, at=9, steps=steps)} for steps in (19, 20)),
        ("skipped", "error"),
    ),
    Boundary(
        "RDT005",
        "fewest_evaluations",
        *({"accuracy": [0.6, 0.61, 0.6, 0.05, 0.04, 0.05][-lines:]} for lines in (5, 6)),
        ("skipped", "error"),
    ),
    # With this noise a fall of 1.0 is 6 standard errors at a size of 0.1266, and 4 at 0.2028.
    near("RDT005", "errors", 6.0, lambda x: {"reward": fall_of(0.1266 * 6 / x)}, ("clean", "error")),
    near(
        "RDT005",
        "errors_of_most",
        4.0,
        lambda x: {"reward": fall_of(0.2028 * 4 / x), "reward_min": [-0.2] * 40},
        ("clean", "error"),
    ),
    # From a best of 1.15, a wave above 1, to 0: this part of what was to lose above the least reward.
    near(
        "RDT005",
        "most",
        0.75,
        lambda x: {"reward": fall_of(0.15), "reward_min": [1.15 - 1.15 / x] * 40},
        ("clean", "error"),
    ),
    # From a best of 52 of 64, an upper wave, to exactly a quarter of it, and to a little less.
    Boundary(
        "RDT005",
        "most",
        *({"accuracy": waves(turns(51 / 64, last / 64, at=20, steps=40), 1 / 64)} for last in (13, 12.5)),
        ("info: the accuracy fell", "error: accuracy collapsed"),
    ),
    near(
        "RDT005",
        "fraction",
        0.5,
        lambda x: {"reward": [*[0.0] * 10, *np.linspace(0, 1, 30), *turns(1.0, 1 - x, at=30, steps=59)]},
        ("clean", "warning"),
    ),
    Boundary(
        "RDT005", "errors_of_fifths", slow_fall(100, 4.95), slow_fall(100, 5.05), ("clean", "warning"), factor=1.3
    ),
    # Half of the gain is lost at an end of 0.55.
    Boundary(
        "RDT005",
        "errors_of_loss",
        slow_fall(100, 5.5, 0.43),
        slow_fall(100, 5.5, 0.415),
        ("clean", "warning"),
        factor=1.3,
    ),
    Boundary("RDT005", "long", slow_fall(99), slow_fall(100), ("clean", "warning")),
    near(
        "RDT005",
        "quarter",
        0.25,
        lambda x: {"accuracy": [0.8, *[0.8 * (1 - x) - 0.001, 0.8 * (1 - x)] * 6]},
        ("clean", "info: the accuracy fell"),
    ),
    # Seven values that only fall, and seven of which two are the other way round.
    Boundary(
        "RDT005",
        "steady",
        {"accuracy": [0.8, 0.7, 0.6, 0.4, 0.5, 0.35, 0.3]},
        {"accuracy": [0.8, 0.7, 0.6, 0.5, 0.4, 0.35, 0.3]},
        ("clean", "info: the accuracy fell"),
    ),
    Boundary(
        "RDT006",
        "fewest",
        *({"truncated_share": turns(0.0, 0.5, at=5, steps=steps)} for steps in (9, 10)),
        ("skipped", "warning"),
    ),
    near("RDT006", "growth", 0.3, lambda x: {"truncated_share": turns(0.0, x)}, ("clean", "info")),
    near("RDT006", "some", 0.15, lambda x: {"truncated_share": turns(0.0, x), **LONGER}, ("clean", "warning")),
    near(
        "RDT006",
        "longer",
        5.0,
        lambda x: {"truncated_share": turns(0.0, 0.2), "response_length": turns(100, 100 * x)},
        ("clean", "warning"),
    ),
    near(
        "RDT006",
        "half_again",
        1.5,
        lambda x: {"truncated_share": [0.0] * 30, "response_length": turns(100, 100 * x), "reward": [0.5, 0.6] * 15},
        ("clean", "info"),
    ),
    near("RDT006", "many", 0.4, lambda x: {"truncated_share": turns(0.0, x)}, ("info", "warning")),
    near("RDT006", "errors", 3.0, lambda x: {"truncated_share": swinging(0.2, 0.8, 1.2533 * x)}, ("clean", "warning")),
    near("RDT006", "errors", 3.0, lambda x: {"truncated_share": late(x)}, ("clean", "warning")),
    near(
        "RDT006",
        "bought",
        2.0,
        lambda x: {
            "truncated_share": turns(0.0, 0.6),
            "reward": waves(turns(0.5, 0.5 + x * np.sqrt(2 / 9)), 1.0),
        },
        ("warning", "info"),
    ),
    near("RDT006", "nearly_all", 0.95, lambda x: {"truncated_share": turns(0.0, x)}, ("warning", "error")),
    steps_of("RDT007", 10, "info", clip_fraction=0.3),
    near("RDT007", "some", 0.25, lambda x: {"clip_fraction": [x] * 30}, ("clean", "info")),
    near("RDT007", "many", 0.4, lambda x: {"clip_fraction": [x] * 30}, ("info", "warning")),
    Boundary("RDT007", "lasting", {"clip_fraction": [0.5] * 29}, {"clip_fraction": [0.5] * 30}, ("info", "warning")),
    Boundary(
        "RDT008",
        "fewest",
        *({"grad_norm": [1.0] * (steps - 1) + [50.0]} for steps in (9, 10)),
        ("skipped", "warning"),
    ),
    Boundary(
        "RDT008",
        "fewest",
        *({"grad_norm": [0.0] * 20 + [1.0] * (moving - 1) + [50.0]} for moving in (9, 10)),
        ("skipped", "warning"),
    ),
    near("RDT008", "times", 10.0, lambda x: {"grad_norm": [1.0] * 29 + [x]}, ("clean", "warning")),
    Boundary(
        "RDT008",
        "frequent",
        {"grad_norm": [1.0] * 27 + [50.0] * 3},
        {"grad_norm": [1.0] * 26 + [50.0] * 4},
        ("warning", "info"),
    ),
    Boundary("RDT009", "fewest", *({"learning_rate": [0.0] * steps} for steps in (9, 10)), ("warning", "error")),
    Boundary("RDT009", "enough", {"learning_rate": RISING[:49]}, {"learning_rate": RISING[:50]}, ("info", "warning")),
    Boundary(
        "RDT009",
        "end",
        {"learning_rate": RISING[:94], "total_steps": 100},
        {"learning_rate": RISING[:95], "total_steps": 100},
        ("skipped", "warning"),
    ),
    near("RDT009", "jump", 10.0, lambda x: {"learning_rate": turns(RATE, RATE * x)}, ("clean", "warning")),
    near(
        "RDT009",
        "above",
        5.0,
        lambda x: {"learning_rate": [RATE] * 10 + [RATE / 10] * 5 + [RATE * x] * 10},
        ("clean", "warning"),
    ),
    near(
        "RDT009",
        "bend",
        0.25,
        lambda x: {"learning_rate": [RATE, 20 * RATE, (20 + 19 * (1 + x)) * RATE, *[(20 + 19 * (1 + x)) * RATE] * 10]},
        ("clean", "warning"),
    ),
    Boundary(
        "RDT010",
        "fewest",
        *({"step_time": [30.0] * (steps - 1) + [900.0]} for steps in (9, 10)),
        ("skipped", "info"),
    ),
    near("RDT010", "times", 5.0, lambda x: {"step_time": [30.0] * 20 + [30.0 * x]}, ("clean", "info")),
    Boundary(
        "RDT012",
        "fewest",
        *({"learning_rate": turns(RATE, 0.0, at=5, steps=steps)} for steps in (9, 10)),
        ("skipped", "error"),
    ),
    Boundary(
        "RDT012",
        "least_steps",
        {"learning_rate": turns(RATE, 0.0, at=18, steps=20)},
        {"learning_rate": turns(RATE, 0.0, at=17, steps=20)},
        ("clean", "warning"),
    ),
    Boundary(
        "RDT012",
        "least_share",
        {"learning_rate": turns(RATE, 0.0, at=96, steps=100)},
        {"learning_rate": turns(RATE, 0.0, at=95, steps=100)},
        ("clean", "warning"),
    ),
    Boundary(
        "RDT012",
        "much",
        {"learning_rate": turns(RATE, 0.0, at=16, steps=20)},
        {"learning_rate": turns(RATE, 0.0, at=15, steps=20)},
        ("warning", "error"),
    ),
    Boundary(
        "RDT012",
        "fewest_rates",
        # Eight decimals, as a console prints them: two rates may be so by chance.
        {"learning_rate": [3e-8, 2e-8] * 5 + [0.0] * 10},
        {"learning_rate": [3e-8, 2e-8, 1e-8] * 5 + [0.0] * 10},
        ("error", "skipped"),
    ),
    Boundary("RDT014", "updates", of_batches(16), of_batches(17), ("clean", "warning")),
    steps_of("RDT017", 10, "warning", tool_calls=0.0),
    Boundary(
        "RDT017",
        "lasting",
        *({"tool_calls": turns(1.2, 0.0, at=20 - count, steps=20)} for count in (4, 5)),
        ("clean", "warning"),
    ),
    Boundary(
        # To the power of five: 0.0012 and 0.00098.
        "RDT017",
        "chance",
        *({"tool_calls": [0.0] * zeros + [1.2] * (steps - zeros) + [0.0] * 5} for zeros, steps in ((6, 23), (5, 20))),
        ("clean", "warning"),
    ),
    near(
        "RDT017",
        "failing",
        0.9,
        lambda x: {"tool_calls": [1.0] * 20, "tool_failures": turns(0.1, x, steps=20)},
        ("clean", "warning"),
    ),
    Boundary(
        "RDT018",
        "fewest",
        *({"turn_cap_share": [1.0] * steps} for steps in (9, 10)),
        ("skipped", "warning"),
        "nemo-rl",
    ),
    Boundary(
        "RDT018",
        "lasting",
        *({"turn_cap_share": turns(0.2, 1.0, at=20 - count, steps=20)} for count in (4, 5)),
        ("clean", "warning"),
        "nemo-rl",
    ),
    Boundary(
        "RDT018",
        "chance",
        *({"turn_cap_share": [1.0] * caps + [0.2] * (steps - caps) + [1.0] * 5} for caps, steps in ((6, 23), (5, 20))),
        ("clean", "warning"),
        "nemo-rl",
    ),
    near("RDT018", "most", 0.9, lambda x: {"turn_cap_share": [x] * 20}, ("clean", "warning"), "nemo-rl"),
    Boundary(
        "RDT013",
        "fewest",
        *({"response_length": turns(300.0, 10.0, at=9, steps=steps)} for steps in (19, 20)),
        ("skipped", "warning"),
    ),
    near("RDT013", "shrinks", 3.0, lambda x: {"response_length": turns(300.0, 300 / x)}, ("clean", "warning")),
    near("RDT013", "grows", 10.0, lambda x: {"grad_norm": turns(1.0, x)}, ("clean", "warning")),
    near(
        "RDT013",
        "explodes",
        50.0,
        lambda x: {"grad_norm": turns(1.0, x), "reward": turns(0.2, 0.8)},
        ("info", "warning"),
    ),
    near(
        "RDT013",
        "errors",
        6.0,
        lambda x: {"response_length": waves(turns(300.0, 60.0, at=20, steps=40), noise_of(240.0, x))},
        ("clean", "warning"),
    ),
    near(
        "RDT013",
        "half_again",
        1.5,
        lambda x: {"response_length": turns(100, 100 * x), "reward": [0.5, 0.6] * 15},
        ("clean", "info: responses grew"),
    ),
    # Of 12 values that alternate the mean has a variance of 1/11; the ends of an odd number are on one side.
    near(
        "RDT013",
        "errors_of_growth",
        3.0,
        lambda x: {
            "response_length": waves(turns(100.0, 100 + 80 * x * np.sqrt(2 / 11), at=18, steps=37), 80.0),
            "reward": [*[0.5, 0.6] * 18, 0.5],
        },
        ("clean", "info: responses grew"),
    ),
    near(
        "RDT013",
        "bought",
        2.0,
        lambda x: {
            "response_length": turns(100.0, 200.0, at=18, steps=37),
            "reward": waves(turns(0.5, 0.5 + x * np.sqrt(2 / 11), at=18, steps=37), 1.0),
        },
        ("info: responses grew", "clean"),
    ),
    Boundary(
        "RDT014",
        "fewest",
        *({"entropy": turns(1.0, 2.0, at=5, steps=steps)} for steps in (11, 12)),
        ("skipped", "warning"),
    ),
    near(
        "RDT014",
        "times",
        4.0,
        lambda x: {"entropy": list(np.cumsum([0.1] + [0.01] * 14 + [0.01 * x] + [0.01] * 14))},
        ("clean", "warning"),
    ),
    near(
        "RDT014",
        "times",
        4.0,
        # Ten quiet lines in a log whose changes are 1 and -1.
        lambda x: {
            "entropy": [
                *waves([40.0] * 20, 0.5),
                *turns(40.0, 40 + x / 0.6745, at=5, steps=10),
                *waves([40 + x / 0.6745] * 20, 0.5),
            ]
        },
        ("clean", "warning"),
    ),
    near("RDT014", "share", 0.1, lambda x: {"entropy": turns(1.0, 1 + x)}, ("clean", "warning")),
    Boundary(
        "RDT014",
        "lines",
        *({"entropy": uneven(2.3, 1.6, 0.12, after=count)} for count in (9, 10)),
        (
            "clean",
            "warning",
        ),
    ),
    near("RDT014", "large", 0.2, lambda x: {"entropy": uneven(2.3, 2.3 - 2.332 * x, 0.08)}, ("clean", "warning")),
    near(
        "RDT014", "deviations", 5.0, lambda x: {"entropy": uneven(2.3, 1.6, 0.7 / (0.8896 * x))}, ("clean", "warning")
    ),
    Boundary(
        "RDT014", "around", {"entropy": turns(1.0, 2.0, at=4)}, {"entropy": turns(1.0, 2.0, at=5)}, ("clean", "warning")
    ),
    Boundary(
        "RDT015",
        "fewest",
        *(
            {"kl": turns(0.01, 1.0, at=5, steps=steps), "grad_norm": turns(1.0, 0.001, at=5, steps=steps)}
            for steps in (9, 10)
        ),
        ("skipped", "warning"),
    ),
    near(
        "RDT015",
        "large",
        0.1,
        lambda x: {"kl": turns(0.001, x), "grad_norm": turns(1.0, 0.001)},
        ("clean", "warning"),
    ),
    near(
        "RDT015",
        "times",
        5.0,
        lambda x: {"kl": turns(0.1, 0.1 * x), "grad_norm": turns(1.0, 0.001)},
        ("clean", "warning"),
    ),
    near(
        "RDT015",
        "vanishes",
        0.02,
        lambda x: {"kl": turns(0.01, 1.0), "grad_norm": turns(1.0, x)},
        ("warning", "clean"),
    ),
    near(
        "RDT015",
        "spent",
        0.2,
        lambda x: {"kl": turns(0.01, 1.0), "grad_norm": turns(1.0, 0.001), "entropy": turns(1.0, x)},
        ("clean", "warning"),
    ),
    near(
        "RDT015",
        "dead",
        0.5,
        lambda x: {"kl": turns(0.01, 1.0), "grad_norm": turns(1.0, 0.001), "zero_variance_share": turns(0.1, x)},
        ("warning", "skipped"),
    ),
    Boundary(
        "RDT016",
        "fewest",
        *({"reward": waves([0.5] * steps, 0.1)} for steps in (19, 20)),
        ("skipped", "info"),
    ),
    # Of 20 values that alternate the mean has a variance of 1/19; two of them lie 2 standard errors apart.
    near(
        "RDT016",
        "errors",
        2.0,
        lambda x: {"reward": waves(turns(0.5, 0.5 + x * np.sqrt(2 / 19), at=20, steps=60), 1.0)},
        ("info", "clean"),
    ),
    near(
        "RDT016",
        "errors_of_fall",
        1.5,
        lambda x: {"reward": waves(turns(5.0, 5.0 - x * np.sqrt(2 / 19), at=20, steps=60), 1.0)},
        ("info: the reward has not moved", "info: the reward did not rise"),
    ),
    # Of the first four values three are low: with noise of size s their median is s, and that of the last four 1.
    near(
        "RDT016",
        "errors_of_ends",
        6.0,
        lambda x: {
            "reward": waves(
                turns(0.0, 1.0, at=3, steps=44), 1 / (1 + x * 1.2533 * np.sqrt(2) / 0.6745 * np.sqrt(2 / 4))
            )
        },
        ("info", "clean"),
    ),
    near(
        "RDT016",
        "still",
        0.1,
        lambda x: {"reward": waves([0.5] * 30, 0.1), "entropy": turns(1.0, 1 - x)},
        ("info: .*the entropy hardly changed", "info"),
    ),
    near(
        "RDT016",
        "small_kl",
        0.001,
        lambda x: {"reward": waves([0.5] * 30, 0.1), "kl": [x] * 30},
        ("info: the policy hardly moved: the KL", "info: the reward has not moved"),
    ),
    near(
        "RDT016",
        "small_sum",
        1e-6,
        lambda x: {"reward": waves([0.5] * 30, 0.1), "learning_rate": [x / 30] * 30},
        ("info: the policy hardly moved: the learning rates", "info: the reward has not moved"),
    ),
    Boundary(
        "RDT016",
        "fewest_still",
        *({"reward": waves([0.5] * steps, 0.1), "kl": [5e-4] * steps} for steps in (9, 10)),
        ("skipped", "info: the policy hardly moved"),
    ),
    near(
        "RDT016",
        "errors_of_still",
        3.0,
        lambda x: {"reward": waves(turns(0.5, 0.5 + x * np.sqrt(2 / 19), at=20, steps=60), 1.0), "kl": [5e-4] * 60},
        ("info: the policy hardly moved", "clean"),
    ),
    Boundary("RDT022", "fewest", *(penalised(3.0, steps) for steps in (2, 3)), ("skipped", "warning"), "verl"),
    near("RDT022", "least", 1.0, penalised, ("clean", "info"), "verl"),
    near("RDT022", "far", 3.0, penalised, ("info", "warning"), "verl"),
    Boundary("RDT019", "fewest", following(0.9, steps=19), following(0.9, steps=20), ("skipped", "warning")),
    near("RDT019", "least", 2 / 3, following, ("clean", "warning")),
    near("RDT019", "errors", 3.0, lambda x: following(2 / 3, errors=x), ("clean", "warning")),
    Boundary(
        "RDA024",
        "fewest",
        *(extremes([0.0] * steps, [1.0] * steps) for steps in (2, 3)),
        ("skipped", "warning"),
    ),
    near("RDA024", "within", 1e-5, lambda x: extremes([0.0] * 3, [1.0 + x] * 3), ("warning", "skipped")),
    near(
        "RDA024",
        "centred",
        0.5,
        lambda x: {**extremes([-0.7] * 3, [0.7] * 3), "advantage": [x] * 3, "reward": [1.0] * 3},
        ("clean", "skipped"),
    ),
]


@pytest.mark.parametrize("boundary", BOUNDARIES, ids=lambda one: f"{one.code} {one.name}")
def test_a_number_is_where_it_is_said_to_be(boundary):
    for found, says in zip(boundary.outcomes(), boundary.says, strict=True):
        assert re.match(says, found), (found, says)


@pytest.mark.slow
@pytest.mark.parametrize("boundary", BOUNDARIES, ids=lambda one: f"{one.code} {one.name}")
def test_a_number_decides_between_the_two(boundary, monkeypatch):
    assert is_decided_by(boundary, boundary.name, monkeypatch)


def test_every_number_has_its_logs():
    numbers = {(rule.code, name) for rule in RULES if isinstance(rule, NumbersRule) for name in numbers_of(rule)}
    # They take a line of a log, and there is no log of none.
    of_one_line = {("RDG012", "fewest"), ("RDG013", "fewest")}
    absent = numbers - {(one.code, one.name) for one in BOUNDARIES}
    how = "a line each in BOUNDARIES of this file; `near` and `steps_of` make one"
    assert absent == of_one_line, f"{absent - of_one_line}: {how}"
