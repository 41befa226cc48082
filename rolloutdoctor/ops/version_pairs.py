"""Pairs of policy versions at which one context was seen."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

MOST_VERSIONS = 32
"""Versions of one context that are paired: the first of them."""


class Pairs(NamedTuple):
    """Pairs of an earlier and a later version of one context.

    Attributes:
        context: number of the context, ``[P]``.
        first: the earlier version, ``[P]``.
        sampler: how far the mean log-prob of the sampler is from that of the earlier version, ``[P]``.
        trainer: the same of the trainer.
        noise: standard deviation of the trainer's log-prob among rows of one context and version; None: not known.
        spacing: of what the sampler's log-probs were rounded to, if that is bf16; else 0, ``[P]``.
    """

    context: "NDArray[np.int64]"
    first: "NDArray[np.int64]"
    sampler: "NDArray[np.float64]"
    trainer: "NDArray[np.float64]"
    noise: float | None
    spacing: "NDArray[np.float64]"

    @property
    def known_noise(self) -> bool:
        """True if some context was seen twice at one version."""
        return self.noise is not None


def pairs_of(texts: "Sequence[str]") -> Pairs | None:
    """Pair the versions of each context of some sketches (rows, sums of both log-probs, sums of their squares).

    None if no context was seen at two versions.
    """
    import numpy as np

    from rolloutdoctor.ops.sketch import Seen, records

    each = [records(text) for text in texts if text]
    if not each:
        return None
    seen = Seen(*map(np.concatenate, zip(*each, strict=True)))
    order = np.lexsort((seen.version, seen.context))
    seen = Seen(seen.context[order], seen.version[order], seen.sums[order])
    rows, sampler, trainer = seen.sums[:, 0], seen.sums[:, 1], seen.sums[:, 2]
    sampler, trainer = sampler / rows, trainer / rows
    number = np.unique(seen.context, return_inverse=True)[1]
    starts = np.flatnonzero(np.r_[True, number[1:] != number[:-1]])
    place = np.arange(len(number)) - starts[number]
    one, other = [], []
    for apart in range(1, MOST_VERSIONS):
        early = np.flatnonzero(
            (number[:-apart] == number[apart:]) & (place[apart:] < MOST_VERSIONS) if apart < len(number) else []
        )
        one.append(early)
        other.append(early + apart)
    first, last = np.concatenate(one).astype(np.int64), np.concatenate(other).astype(np.int64)
    spare = rows - 1
    inside = np.maximum(seen.sums[:, 4] - rows * trainer**2, 0.0)
    freedom = float(spare.sum())
    noise = float(np.sqrt(inside.sum() / freedom)) if freedom >= 10 else None
    return Pairs(
        number[first].astype(np.int64),
        seen.version[first],
        np.abs(sampler[last] - sampler[first]),
        np.abs(trainer[last] - trainer[first]),
        noise,
        _bf16_spacing(sampler)[first],
    )


def _bf16_spacing(x: "NDArray[np.float64]") -> "NDArray[np.float64]":
    """Distance of neighbouring bf16 numbers at some values, where all of these are such numbers; else 0."""
    import numpy as np

    # Below 2^-12 the unit of a sketch is coarser than bf16.
    bits = x[np.abs(x) >= 2.0**-12].astype(np.float32).view(np.uint32)
    return np.abs(x) * 2.0**-7 if not (bits & 0xFFFF).any() else np.zeros_like(x)


def frozen_from(
    pairs: Pairs,
    moves: "float | NDArray[np.float64]",
    share: float,
    least: int,
    contexts: int,
    stays_within: float | None = None,
) -> tuple[int, int, int, int | None, float | None, float | None]:
    """From which version on the sampler stays while the trainer moves.

    Args:
        pairs: of versions.
        moves: how far the trainer's log-prob is at least in a pair that counts.
        share: of the pairs in which the sampler stays.
        least: fewest pairs.
        contexts: fewest contexts.
        stays_within: how far the sampler moves at most; None: a tenth of the trainer, or four times the noise.

    Returns:
        Moved pairs, frozen ones among them, their contexts, the version, and the medians of what trainer and sampler
        move; of the pairs from that version on, or of all and no version if there is none.
    """
    import numpy as np

    moved = pairs.trainer >= moves
    within = np.maximum(0.1 * pairs.trainer, 4 * (pairs.noise or 0.0)) if stays_within is None else stays_within
    stays = moved & (pairs.sampler <= within)
    for start in [*np.unique(pairs.first).tolist(), None]:
        here = moved if start is None else moved & (pairs.first >= start)
        count, frozen = int(here.sum()), int((stays & here).sum())
        distinct = len(np.unique(pairs.context[here]))
        if start is None or (count >= least and distinct >= contexts and frozen >= share * count):
            moves_by = [float(np.median(each[here])) if count else None for each in (pairs.trainer, pairs.sampler)]
            return count, frozen, distinct, start, *moves_by
    raise AssertionError("the last start is none")
