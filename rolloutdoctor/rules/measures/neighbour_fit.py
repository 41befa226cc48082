"""Which of two log-probs fit better one token away, by rows and by steps."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from rolloutdoctor.ops.by_step import ByStep
    from rolloutdoctor.rules.measures.sampled_rows import Sample


class Limits(NamedTuple):
    """Limits from which on a shift is visible.

    Attributes:
        pairs: adjacent tokens of a row.
        spread: standard deviation of its log-probs.
        better: how many times smaller its squared error is one token away, in a row that is counted as moved.
        rows: fewest rows.
        share: share of them that are moved.
        deviations: by how many standard deviations these are more than half of the rows.
        pooled: how many times smaller the errors of all rows are.
    """

    pairs: int
    spread: float
    better: float
    rows: int
    share: float
    deviations: float
    pooled: float


UPDATES = Limits(3, 1e-3, better=1.0, rows=36, share=0.5, deviations=6.0, pooled=1.5)
"""Of log-probs of one engine before and after updates, which may be as far apart as tokens are."""


LEAST_PAIRS = 30
"""Pairs of adjacent tokens of a step below which its correlations are not looked at: z takes these as normal."""


COLUMNS = ("aligned", "late", "early", "z")
"""Quantities that are measured of each pair of log-probs: see `errors_of`."""


def errors_of(sample: "Sample", limits: Limits, by_step: "ByStep") -> "list[Tensor]":
    """Compare the sampled rows whose log-probs vary, in place and moved by one token.

    Args:
        sample: of the rows.
        limits: which of them vary.
        by_step: all rows by step.

    Returns:
        Squared differences of each row over adjacent tokens, in place, with its own log-probs late and early, and by
        how many standard deviations those of its step fit better late, or early if negative, ``[N]`` each: `COLUMNS`.
    """
    import numpy as np
    import torch

    errors = torch.full((len(COLUMNS), int(by_step.size.sum())), torch.nan, dtype=torch.float64)
    if not len(sample.place):
        return list(errors)
    sampler, trainer, place = sample.sampler, sample.trainer, sample.place
    # Tokens that the next one of their row does not follow at once.
    is_last = np.append(place[1:] != place[:-1] + 1, True)
    is_last[sample.runs.cuts[1:] - 1] = True
    last, buffer = np.flatnonzero(is_last), np.zeros(len(place))

    def total(before: "NDArray[np.float64]", after: "NDArray[np.float64]") -> "NDArray[np.float64]":
        """Sum of squared differences over the pairs of adjacent tokens of each row, ``[r]``."""
        np.subtract(before, after, out=buffer[:-1])
        buffer[last] = 0
        return sample.by_row(np.square(buffer, out=buffer))

    count = np.maximum(sample.by_row(~is_last), 1)
    buffer[:-1] = trainer[:-1]
    buffer[last] = 0
    mean = sample.by_row(buffer) / count
    spread = total(trainer[:-1], sample.runs.spread(mean)[:-1]) / count
    varies = (count >= limits.pairs) & (spread > limits.spread**2)
    aligned = (total(trainer[:-1], sampler[:-1]) + total(trainer[1:], sampler[1:])) / 2
    late, early = total(trainer[:-1], sampler[1:]), total(trainer[1:], sampler[:-1])
    errors[:3, sample.row[varies]] = torch.from_numpy(np.stack([aligned, late, early])[:, varies])
    z_S = fit_of_steps(sample, np.append(~is_last[:-1], False), np.stack([count, aligned, late, early], 1))
    errors[3] = by_step.cpu.expand(z_S)
    return list(errors)


def fit_of_steps(
    sample: "Sample", is_pair: "NDArray[np.bool_]", of_row: "NDArray[np.float64]"
) -> "NDArray[np.float64]":
    """Correlate the ranks of the two log-probs of each step in place and moved, over pairs of adjacent tokens.

    They are those of a neighbouring token if they correlate better than in place, by Williams's test of correlations
    that share a variable (Steiger 1980), better than with those of the other neighbour, by Fisher's, and leave a third
    less variance. A pattern of sure and unsure tokens that repeats fits on both sides.

    Args:
        sample: rows.
        is_pair: ``[V]`` tokens that the next one of their row follows at once.
        of_row: ``[r, 4]`` pairs and squared differences in place, late and early; rows that are alike count once, and
            steps that fit best in place are not ranked.

    Returns:
        Standard deviations by which those of each step fit better late, or early if negative, ``[S]``; NaN where there
        are too few pairs.
    """
    import numpy as np

    from rolloutdoctor.ops.ranks import StepRanks

    step_r = sample.by_step.cpu.step_N.numpy()
    first = np.zeros(len(step_r), bool)
    first[np.unique(np.column_stack([step_r, of_row[:, :3].round(4)]), axis=0, return_index=True)[1]] = True
    count = sample.tokens_by_step.at(np.flatnonzero(is_pair & sample.runs.spread(first))).size.astype(np.float64)
    aligned, late, early = (sample.by_step.cpu.sum(of_row[:, place]) for place in (1, 2, 3))
    first &= (np.minimum(late, early) < aligned)[step_r]
    place = np.flatnonzero(is_pair & sample.runs.spread(first))
    tokens = sample.tokens_by_step.at(place)
    ranks = StepRanks(tokens)
    sampler, trainer, sampler_next, trainer_next = (
        ranks.centred(x[place + later]) for later in (0, 1) for x in (sample.sampler, sample.trainer)
    )

    def correlation(x: "NDArray[np.float64]", y: "NDArray[np.float64]") -> "NDArray[np.float64]":
        return ranks.correlation(x, y).clip(1e-9 - 1, 1 - 1e-9)

    late, early, between = (
        correlation(trainer, sampler_next),
        correlation(trainer_next, sampler),
        correlation(sampler, sampler_next),
    )
    sides = []
    for side, far, fit in (
        (late, early, correlation(trainer, sampler)),
        (early, late, correlation(trainer_next, sampler_next)),
    ):
        rest = 1 - fit**2 - side**2 - between**2 + 2 * fit * side * between
        with np.errstate(all="ignore"):
            spread = 2 * (count - 1) / (count - 3) * rest + (fit + side) ** 2 / 4 * (1 - between) ** 3
            z = (side - fit) * np.sqrt((count - 1) * (1 + between) / np.maximum(spread, 1e-9))
            z = np.minimum(z, (np.arctanh(side) - np.arctanh(far)) * np.sqrt((count - 3) / 2))
        sides.append(np.where(UPDATES.pooled * (1 - side**2) <= 1 - fit**2, np.nan_to_num(z), 0.0))
    # At most one of them is above 0.
    return np.where(count >= LEAST_PAIRS, sides[0].clip(0) - sides[1].clip(0), np.nan)
