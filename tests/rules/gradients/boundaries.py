"""Numbers of the rules of this family: rows just below each, and just above."""

from collections.abc import Sequence
from math import exp, expm1, log, sqrt

from rules.row_boundaries import NEAR, Log, RowBoundary, count, near

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.testing import toy_batch

QUIET = "clean|skipped"
TRL = {"trainer": "trl"}
VERL = {"trainer": "verl"}
PLAIN = {"trainer": "trl@1.16.0", "scale_rewards": "none"}
WITH_KL = {**PLAIN, "beta": 0.1}
SLIME = {"trainer": "slime", "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl"}


def pulled(gap: float, dead: float | None = None, rest: float = 1.0) -> RolloutBatch:
    """A group of equal rewards with four tokens and one of others, all of them so far above the reference.

    By log-probs the squared gradients of the two are as 1 to 111 at a gap of 0.5.

    Args:
        gap: nats.
        dead: squared norm of the derivative of the log-prob by the logits of the first group's tokens; None: unknown.
        rest: of the other's.
    """
    squares = [] if dead is None else [one - 1 + 2 * exp(-0.1) for one in (dead, dead, rest, rest)]
    lengths = [2, 2, 1, 3]
    more = {"sum_pi_squared": [[one] * size for one, size in zip(squares, lengths, strict=True)]} if squares else {}
    return toy_batch([[1, 1], [1, 0]], lengths=lengths, policy=-0.1, ref=-0.1 - gap, per_token=more)


def overstated(factor: float) -> RolloutBatch:
    """The share by log-probs is such a multiple of that by logits."""
    share = 1 / (112 * factor**2)
    return pulled(0.5, dead=111 * share / (1 - share))


def understated(factor: float) -> RolloutBatch:
    """The share by logits is such a multiple of that by log-probs."""
    share = factor**2 / 112
    return pulled(0.5, dead=1.0, rest=(1 / share - 1) / 111)


def blurred(rounding: float) -> RolloutBatch:
    """The KL of a token is k3 of a gap at which `ops.rounding.k3` is such a share of it: 6 + 7 |gap| units."""
    unit = 2.0**-24
    return pulled((7 * unit + sqrt(49 * unit**2 + 12 * unit * rounding)) / rounding)


def loss_of(size: float, gap: float = 0.0) -> RolloutBatch:
    """Two and one token of opposite advantages: a policy loss of minus a sixth of the better reward."""
    return toy_batch([[6 * size, 0]], lengths=[2, 1], ref=-1 - gap)


def dead_steps(dead: int, steps: int) -> list[RolloutBatch]:
    """Steps whose loss is 0, so many of them without a gradient."""
    return [toy_batch([[1, 1 if step < dead else 0]], lengths=1, step=step) for step in range(steps)]


def some(of: float, others: float, many: int, steps: int) -> list[float]:
    """A series of two values."""
    return [of] * many + [others] * (steps - many)


def of_kl_alone(steps: int, of: int, **more: float) -> Log:
    """A log in which the policy loss is 0 in so many steps of some; digits that show that nothing was rounded."""
    series = {"policy_loss": some(0.0, 0.1234567891, steps, of), "kl": [0.01234567] * of, "kl_coefficient": [0.1] * of}
    return series | {name: [value] * of for name, value in more.items()}


def clamped(tokens: int, of: int) -> RolloutBatch:
    """So many tokens of some with a k3 above 10."""
    ref = [[-9.3] * tokens + [-12.01] * (of - tokens), [-12.01] * 100]
    return toy_batch([[1, 0]], lengths=[of, 100], policy=-12.0, ref=ref)


def gap_of(kl: float) -> float:
    """How far the reference is below a policy with such a k3."""
    low, high = 0.0, 10.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if expm1(-middle) + middle < kl else (low, middle)
    return low


def kl_of(levels: Sequence[float], policy: Sequence[float] = ()) -> list[RolloutBatch]:
    """Steps with such a mean k3; the policy moves a little, or is where it is said to be."""
    policy = policy or [-1 - 0.01 * (step % 3) for step in range(len(levels))]
    return [
        toy_batch([[1, 0]], policy=mean, ref=mean - gap_of(kl), step=step)
        for step, (kl, mean) in enumerate(zip(levels, policy, strict=True))
    ]


RISING = [0.01, 0.011, 0.012, 0.0125]


def fallen_to(share: float) -> list[RolloutBatch]:
    """Steps whose KL falls to such a share of that of the step before."""
    return kl_of([*RISING, *[share * RISING[-1]] * 4])


def fallen_by(high: float, low: float) -> list[RolloutBatch]:
    """A KL that falls by the largest factor to a share of what it was, and to another one in the next step."""
    return kl_of([*RISING, low * RISING[-1], *[high * RISING[-1]] * 3])


def another_fall(times: float, low: float) -> list[RolloutBatch]:
    """A KL that falls to such a share, so many times as far as at the start in its logarithm, and then rises again."""
    return kl_of([RISING[0] * low ** (-1 / times), *RISING, low * RISING[-1], *[0.48 * RISING[-1]] * 3])


def policy_moved(times: float) -> list[RolloutBatch]:
    """A KL that falls where the policy moves so many times as far as in other steps."""
    return kl_of(
        [*RISING, *[0.05 * RISING[-1]] * 4], [-1 - 0.01 * (step + (times - 1) * (step > 3)) for step in range(8)]
    )


def noisy_fall(times: float) -> list[RolloutBatch]:
    """A KL that goes up and down by 0.65 in its logarithm, and to a level that is so many times that lower."""
    low, high = 0.01, 0.01 * exp(0.65)
    return kl_of([low, high] * 4 + [one * exp(-(times + 1) * 0.65) for one in (low, high) * 4])


def equal_at_once(different: int) -> list[RolloutBatch]:
    """Steps of 100 tokens, so many with another reference; at step 4 it is the policy, and then it is not again."""
    return [
        toy_batch(
            [[1, 0]],
            lengths=50,
            policy=-1 - 0.01 * (step % 3),
            ref=[
                [-1 - 0.01 * (step % 3) - (0.1 if step != 4 and row * 50 + place < different else 0)
                 for place in range(50)]
                for row in range(2)
            ],
            step=step,
        )
        for step in range(8)
    ]  # fmt: skip


def weighed(step: int, ratios: Sequence[float], groups: Sequence[int] = (2,) * 8) -> RolloutBatch:
    """Groups of which the second responses of the first ones weigh so much; the others weigh 1."""
    first = [1 + sum(groups[:at]) for at in range(len(ratios))]
    old = [[-1 - log(dict(zip(first, ratios, strict=True)).get(row, 1.0))] for row in range(sum(groups))]
    return toy_batch([[1] + [0] * (size - 1) for size in groups], lengths=1, old=old, step=step)


def spiking(*ratios: float, groups: Sequence[int] = (2,) * 8, steps: int = 12) -> list[RolloutBatch]:
    """Steps the last of which has responses that weigh more."""
    return [*(weighed(step, (), groups) for step in range(steps - 1)), weighed(steps - 1, ratios, groups)]


def times_the_norm(times: float) -> list[RolloutBatch]:
    """The weight at which a response of 16 makes the norm of its step so many times that of the others."""
    return spiking(sqrt(16 * times**2 - 15))


EVERY_SPIKE = [weighed(step, (20.0,)) for step in range(12)]


def recurring(
    prompts: int, levels: Sequence[float], *, moving: int = 0, apart: int = 0, once: int = 0
) -> list[RolloutBatch]:
    """Pairs of responses of one token to prompts that recur.

    Args:
        prompts: how many.
        levels: log-prob of the tokens by step.
        moving: prompts whose log-probs move by themselves in every step.
        apart: prompts whose two responses are different tokens.
        once: prompts that recur in the last step alone.
    """
    found = []
    for step, level in enumerate(levels):
        here = prompts if step in (0, len(levels) - 1) else prompts - once
        own = [level - 0.1 * step * (prompt < moving) for prompt in range(here) for _ in range(2)]
        ids = [5 + one * (prompt < apart) for prompt in range(here) for one in range(2)]
        found.append(
            toy_batch(
                [[1, 0]] * here,
                lengths=1,
                old=[[one] for one in own],
                rollout=[[one - 0.001] for one in own],
                per_token={"response_ids": [[one] for one in ids]},
                per_row={"prompt_ids": [1 + prompt for prompt in range(here) for _ in range(2)]},
                step=step,
            )
        )
    return found


def one_lost(move: float, prompts: int = 20, once: int = 0) -> list[RolloutBatch]:
    """Six updates that move the policy so far, all but the third."""
    return recurring(prompts, [-1 - move * (step - (step > 2)) for step in range(7)], once=once)


# No number that bfloat16 has.
STILL = [-1.2345] * 5

BOUNDARIES: list[RowBoundary] = [
    near(
        "RDG001",
        "apart",
        2.0,
        overstated,
        "info: (?!.*nearly)",
        "info: .*log-probs overstate",
        looks_at="message",
        **WITH_KL,
    ),
    near(
        "RDG001",
        "apart",
        2.0,
        understated,
        "info: (?!.*nearly)",
        "info: .*log-probs under",
        looks_at="message",
        **WITH_KL,
    ),
    near("RDG001", "blurred", 0.01, blurred, "info: .*of the KL term", "info: (?!.*of the KL term)", **WITH_KL),
    near("RDG002", "near_zero", 1e-3, loss_of, "info", "clean", **PLAIN),
    RowBoundary(
        "RDG002",
        "near_zero",
        *({"loss": [loss] * 10, "grad_norm": [1.5] * 10} for loss in (0.0009, 0.001)),
        ("info", "clean"),
        TRL,
    ),
    near(
        "RDG002",
        "same",
        0.005,
        lambda x: loss_of(x * 0.1 * (expm1(-0.03125) + 0.03125), 0.03125),
        "info: .* by design",
        "info: the loss is about # .below",
        **WITH_KL,
    ),
    # 3 of 31 steps, and 3 of 29.
    RowBoundary("RDG002", "dead_warn_above", dead_steps(3, 31), dead_steps(3, 29), ("info", "warning"), PLAIN),
    RowBoundary(
        "RDG003",
        "warn_above",
        *({"zero_variance_share": some(1.0, 0.5, free, 64), "grad_norm": [1.5] * 64} for free in (31, 33)),
        ("info", "warning"),
    ),
    near(
        "RDG004",
        "negligible",
        1e-4,
        lambda x: {"policy_loss": [x / 10] * 9, "kl_term": [0.1] * 9},
        "info",
        "clean",
    ),
    near(
        "RDG004",
        "smallest_kl",
        1e-7,
        lambda x: {"policy_loss": [0.0] * 9, "kl_term": [x] * 9},
        "clean",
        "info",
    ),
    near(
        "RDG004",
        "moved",
        1e-3,
        lambda x: of_kl_alone(8, 9, ppo_kl=x),
        "info: .* is only the KL term",
        "warning: .* every advantage is",
        **VERL,
    ),
    # 3 of 31 steps, and 3 of 29.
    *(
        RowBoundary(
            "RDG004",
            "dead_warn_above",
            of_kl_alone(3, 31, **more),
            of_kl_alone(3, 29, **more),
            ("info: .* is only the KL term", says),
            VERL,
        )
        for more, says in (
            ({"grad_norm": 0.0}, "warning: .* is only the KL term"),
            ({"ppo_kl": 0.5}, "warning: .* every advantage is"),
        )
    ),
    RowBoundary("RDG008", "most", clamped(4, 4030), clamped(4, 3780), (QUIET, "warning"), SLIME),
    count("RDG008", "fewest", 3, lambda x: clamped(x, 500), "info", "warning", **SLIME),
    near("RDG011", "fall", 0.1, fallen_to, "warning", "skipped"),
    near("RDG011", "level", 0.5, lambda x: fallen_by(x * RISING[1] / RISING[-1], 0.096), "warning", "skipped"),
    near("RDG011", "others", 3.0, lambda x: another_fall(x, 0.04), "skipped", "warning"),
    near("RDG011", "policy_moves", 3.0, policy_moved, "warning", "clean"),
    near("RDG011", "unsure_level", 0.75, lambda x: fallen_by(x, 0.3), "skipped", "clean"),
    near("RDG011", "unsure_others", 2.0, lambda x: another_fall(x, 0.3), "clean", "skipped"),
    near("RDG011", "unsure_fall", 1 / 3, fallen_to, "skipped", "clean"),
    near("RDG011", "beyond_chance", 2.0, noisy_fall, QUIET, "warning"),
    # 38.7 and 40.6 bits.
    RowBoundary("RDG011", "bits", equal_at_once(23), equal_at_once(24), (QUIET, "warning")),
    count("RDG011", "window", 3, lambda x: kl_of([0.01] * (2 * x + (x < 3))), "skipped", "clean"),
    near("RDG011", "least_kl", 1e-8, lambda x: kl_of([x] * 4 + [1e-10] * 4), "clean", "warning"),
    count("RDG014", "fewest", 10, lambda x: spiking(20.0, steps=x), "skipped", "info", **TRL),
    RowBoundary(
        "RDG014",
        "fewest_rows",
        spiking(20.0, groups=(2, 2, 3)),
        spiking(20.0, groups=(2,) * 4),
        ("clean", "info"),
        TRL,
    ),
    near("RDG014", "times", 3.0, times_the_norm, "clean", "info", **TRL),
    RowBoundary(
        "RDG014",
        "logged_times",
        EVERY_SPIKE,
        EVERY_SPIKE,
        ("clean", "info"),
        TRL,
        logged=tuple([{"grad_norm": norm} for norm in some(1.0, 10 * x, 11, 12)] for x in (1 - NEAR, 1 + NEAR)),
    ),
    RowBoundary(
        "RDG014",
        "carried",
        *(spiking(sqrt(15 * part / (1 - part))) for part in (0.485, 0.515)),
        ("clean", "info"),
        TRL,
        logged=([{"grad_norm": norm} for norm in some(1.0, 50.0, 11, 12)],) * 2,
    ),
    # Two responses of 38, and of 42.
    RowBoundary(
        "RDG014",
        "share",
        *(spiking(20.0, 20.0, groups=(2,) * groups) for groups in (19, 21)),
        ("clean", "info"),
        TRL,
    ),
    RowBoundary("RDG015", "updates", recurring(20, STILL[1:]), recurring(20, STILL), ("skipped", "warning"), TRL),
    count("RDG015", "least_pairs", 20, lambda x: recurring(x, STILL), "skipped", "warning", **TRL),
    count("RDG015", "least_pairs", 20, lambda x: one_lost(0.1, 20, 20 - x), "clean", "warning", **TRL),
    count("RDG015", "least_shared", 4, lambda x: recurring(20, STILL, apart=20 - x), "skipped", "warning", **TRL),
    RowBoundary(
        "RDG015",
        "share",
        recurring(50, STILL, moving=6),
        recurring(50, STILL, moving=4),
        ("clean", "warning"),
        TRL,
    ),
    near("RDG015", "sure", -0.01, lambda x: recurring(20, [x] * 5), "skipped", "warning", **TRL),
    near("RDG015", "moves", 2.0**-10, one_lost, "clean", "warning", **TRL),
]
