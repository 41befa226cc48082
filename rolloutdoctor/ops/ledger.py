"""The change of a weighted mean between two windows, split exactly: mix first, then within.

Values are of units (responses, or parts of them) of two windows, W = 0 before and 1 after. Axis letters: n units, P
prompts, K components that add up to the value, C classes of a factor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LOST, NEW, GONE, DRAWN, REST, CHANGE = "lost", "new", "gone", "drawn", "rest", "change"

FEWEST_COMMON = 0.1
"""Prompts of both windows are compared where they have this share of the weight of each."""

SEED, REPLICATES, LEAST_REPLICATES, WORK = 0, 200, 40, 4_000_000
"""Of the bootstrap: replicates fall with the number of units, so that they go through so many in all."""


def _sums(place_n: Ints, x_nK: Floats, count: int) -> Floats:
    """Add up values by place, ``[count, K]``."""
    return np.stack([np.bincount(place_n, x_n, count) for x_n in x_nK.T], axis=1)


def _weighted(weight: NDArray[Any], value: NDArray[Any]) -> Floats:
    """Add up values with their weights over the first axis, in its order: that of a matrix product is the library's."""
    wider = weight.reshape(weight.shape + (1,) * (value.ndim - weight.ndim))
    total: Floats = (wider * value).sum(axis=0)
    return total


def _change(x_PW: NDArray[Any]) -> Floats:
    """Return the second window less the first."""
    change_P: Floats = x_PW[:, 1] - x_PW[:, 0]
    return change_P


@dataclass(frozen=True, eq=False)
class Units:
    """Units of two windows.

    Attributes:
        window_n: 0 or 1.
        prompt_n: number of its prompt, from 0 to P - 1.
        weight_n: weight in the mean of its window; they add up to 1 there.
        value_nK: its value, in components.
        lost_n: True for a unit that measures nothing; what it takes away is a line of its own.
        factors: name to the class of each unit, ``[n]`` from 0; the order is that of the splits.
    """

    window_n: Ints
    prompt_n: Ints
    weight_n: Floats
    value_nK: Floats
    lost_n: NDArray[np.bool_]
    factors: Mapping[str, Ints] = field(default_factory=dict)

    @property
    def prompts(self) -> int:
        """Number of prompts."""
        return int(self.prompt_n.max()) + 1 if len(self.prompt_n) else 0


@dataclass(frozen=True, eq=False)
class Split:
    """An exact split: the lines add up to the change.

    Attributes:
        lines: name to what it accounts for, ``[K]`` in components.
        comparable: prompts of both windows were compared with themselves.
        by_prompt: what each prompt adds to the rest, ``[P]``.
        unidentified: factors that change with the prompts or the window alone, so that nothing tells their effect.
        weight_n: weights of the units in the rest, of equal prompts in both windows.
        residual_nK: values less what lines before the rest account for.
        classes: factor to the change of the share of each class, ``[C]``.
    """

    lines: Mapping[str, Floats]
    comparable: bool
    by_prompt: Floats
    unidentified: tuple[str, ...]
    weight_n: Floats
    residual_nK: Floats
    classes: Mapping[str, Floats]


def split(units: Units, times_P: Floats | None = None) -> Split:
    """Split the change of the mean.

    The order: what lost units take away, against other units of their prompts; prompts of one window alone; how often
    prompts of both were drawn; by each factor, the change of the shares of its classes times the contrast between
    units of the classes, within a prompt and a window (Kitagawa's rate and composition effects, 1955; the contrasts
    are those of a regression with fixed effects); the rest.

    Args:
        units: of both windows; each has some.
        times_P: how often each prompt counts; None: once.

    >>> import numpy as np
    >>> ones, half = np.ones(4, bool), np.full(4, 0.5)
    >>> units = Units(np.array([0, 0, 1, 1]), np.array([0, 1, 0, 2]), half, np.array([[1.0], [0], [0.5], [0]]), ~ones)
    >>> {name: float(share.sum()) for name, share in split(units).lines.items()}
    {'lost': 0.0, 'new': -0.25, 'gone': 0.5, 'drawn': 0.0, 'rest': -0.5}
    """
    w_n = units.weight_n if times_P is None else units.weight_n * times_P[units.prompt_n]
    count, kinds = units.prompts, units.value_nK.shape[1]
    cell_n = units.prompt_n * 2 + units.window_n
    w_n = w_n / np.maximum(np.bincount(units.window_n, w_n, 2), 1e-300)[units.window_n]
    kept_n = np.where(units.lost_n, 0.0, w_n)

    def by_cell(x_n: Floats) -> Floats:
        return _sums(cell_n, x_n[:, None], 2 * count).reshape(count, 2)

    all_PW, kept_PW = by_cell(w_n), by_cell(kept_n)
    sums = _sums(cell_n, kept_n[:, None] * units.value_nK, 2 * count).reshape(count, 2, kinds)
    mean_PWK = sums / np.where(kept_PW > 0, kept_PW, 1)[:, :, None]
    means_WK = level_WK = _sums(units.window_n, w_n[:, None] * units.value_nK, 2)
    lines: dict[str, Floats] = {name: np.zeros(kinds) for name in (LOST, NEW, GONE, DRAWN)}
    if units.lost_n.any():
        mean_PWK = _with_missing(mean_PWK, all_PW, kept_PW)
        level_WK = _weighted(all_PW, mean_PWK)
        lines[LOST] = (means_WK - level_WK)[1] - (means_WK - level_WK)[0]
    of_prompts, v_PW, level_WK, comparable = _by_prompts(all_PW, mean_PWK, level_WK)
    lines |= of_prompts
    rest_K = level_WK[1] - level_WK[0]
    has_P = np.all(kept_PW > 0, axis=1) if comparable else np.ones(count, dtype=bool)
    u_n = kept_n * (np.where(has_P[:, None], v_PW, 0.0) / np.where(kept_PW > 0, kept_PW, 1)).reshape(-1)[cell_n]
    left_nK, unidentified, classes = units.value_nK.astype(np.float64), [], {}
    for name, code_n in units.factors.items():
        change_C, contrast_CK, is_known = _contrasts(code_n, left_nK, u_n, cell_n, units.window_n, 2 * count)
        lines[name], classes[name] = _weighted(change_C, contrast_CK), change_C
        left_nK = left_nK - contrast_CK[code_n]
        rest_K = rest_K - lines[name]
        unidentified += [] if is_known else [name]
    lines[REST] = rest_K
    by_prompt = _change(by_cell(u_n * left_nK.sum(axis=1)))
    # Prompts of which nothing is left in a window have no units here.
    spread_P = np.where(has_P, 0.0, _change((v_PW[:, :, None] * mean_PWK).sum(axis=2)))
    return Split(lines, comparable, by_prompt + spread_P, tuple(unidentified), u_n, left_nK, classes)


def _by_prompts(all_PW: Floats, mean_PWK: Floats, level_WK: Floats) -> tuple[dict[str, Floats], Floats, Floats, bool]:
    """Split what the prompts of one window alone and the draws of the others change.

    Returns:
        Their lines, the weights ``[P, W]`` and the means ``[W, K]`` that are left, and whether the windows have prompts
        in common; without them there are no lines.
    """
    common_P = np.all(all_PW > 0, axis=1)
    shares_W = all_PW[common_P].sum(axis=0)
    if not (shares_W >= FEWEST_COMMON).all():
        return {}, all_PW, level_WK, False
    own_PW = np.where(common_P[:, None], all_PW, 0.0) / shares_W
    v_PW = np.repeat(own_PW[:, 1:], 2, axis=1)
    alone_WK = _weighted(own_PW, mean_PWK)
    alike_WK = _weighted(v_PW, mean_PWK)
    lines = {
        NEW: level_WK[1] - alone_WK[1],
        GONE: alone_WK[0] - level_WK[0],
        DRAWN: alike_WK[0] - alone_WK[0],
    }
    return lines, v_PW, alike_WK, True


def _with_missing(mean_PWK: Floats, all_PW: Floats, kept_PW: Floats) -> Floats:
    """Fill in the mean of a prompt of which a window lost all units: its mean in the other window, and their shift.

    Where the other window has none either, or no prompt is in both, it is the mean of the window.
    """
    is_there_PW = kept_PW > 0
    both_P = is_there_PW.all(axis=1)
    overall_WK = _weighted(kept_PW, mean_PWK) / np.maximum(kept_PW.sum(axis=0), 1e-300)[:, None]
    filled_PWK = np.where(is_there_PW[:, :, None], mean_PWK, overall_WK[None])
    if both_P.any():
        weight_P = np.where(both_P, all_PW.sum(axis=1), 0.0)
        shift_K = _weighted(weight_P / weight_P.sum(), mean_PWK[:, 1] - mean_PWK[:, 0])
        for window, sign in ((0, -1.0), (1, 1.0)):
            only_P = is_there_PW[:, 1 - window] & ~is_there_PW[:, window]
            filled_PWK[only_P, window] = mean_PWK[only_P, 1 - window] + sign * shift_K
    return filled_PWK


def _contrasts(
    code_n: Ints, x_nK: Floats, u_n: Floats, cell_n: Ints, window_n: Ints, cells: int
) -> tuple[Floats, Floats, bool]:
    """Return the change of the classes' shares, ``[C]``, the contrasts between them, ``[C, K]``, and whether all count.

    Contrasts are between units of one cell (prompt and window): least squares on classes and cells.
    """
    kinds = int(code_n.max()) + 1 if len(code_n) else 1
    size_B = np.maximum(np.bincount(cell_n, u_n, cells), 1e-300)
    share_CW = _sums(code_n * 2 + window_n, u_n[:, None], 2 * kinds).reshape(kinds, 2)
    change_C = _change(share_CW)
    # Classes of a cell: sums over units, then the normal equations without a matrix of dummies.
    in_cell_BC = np.bincount(cell_n * kinds + code_n, u_n, cells * kinds).reshape(cells, kinds)
    share_BC = in_cell_BC / size_B[:, None]
    gram = np.diag(in_cell_BC.sum(axis=0)) - np.stack([_weighted(share_B, in_cell_BC) for share_B in share_BC.T])
    right = np.empty((kinds, x_nK.shape[1]))
    for k, x_n in enumerate((u_n[:, None] * x_nK).T):
        right[:, k] = np.bincount(code_n, x_n, kinds) - _weighted(np.bincount(cell_n, x_n, cells), share_BC)
    inverse = np.linalg.pinv(gram, rcond=1e-9, hermitian=True)
    contrast_CK = _weighted(inverse[:, :, None], right[:, None])
    # A change between classes that no cell holds together tells nothing: it has to lie in what the contrasts span.
    spanned = _weighted(gram, _weighted(inverse, change_C[:, None])[:, None])
    return change_C, contrast_CK, bool(np.abs(change_C - spanned).max(initial=0.0) < 0.02)


def breakdown(code_n: Ints, split: Split, window_n: Ints) -> tuple[float, Floats]:
    """Split the rest by the classes of an attribute: the mix of classes, and each class within itself, ``[C]``.

    Symmetric in the windows: a change of shares counts at the mean of the class's values, and the other way round. A
    class of one window alone is mix.
    """
    kinds = int(code_n.max()) + 1 if len(code_n) else 1
    place_n, u_n, x_n = code_n * 2 + window_n, split.weight_n, split.residual_nK.sum(axis=1)
    share_CW = np.bincount(place_n, u_n, 2 * kinds).reshape(kinds, 2)
    sum_CW = np.bincount(place_n, u_n * x_n, 2 * kinds).reshape(kinds, 2)
    mean_CW = sum_CW / np.where(share_CW > 0, share_CW, 1)
    mean_CW = np.where(share_CW > 0, mean_CW, mean_CW[:, ::-1])
    within_C = share_CW.mean(axis=1) * (mean_CW[:, 1] - mean_CW[:, 0])
    mix = float(_weighted(_change(share_CW), mean_CW.mean(axis=1)))
    return mix, within_C


def intervals(units: Units) -> dict[str, tuple[float, float]]:
    """Return the 95 % interval of each line, of the components of the rest (``rest/0``) and of the change.

    It is a bootstrap over prompts of a fixed seed, so that the same units give the same intervals.
    """
    draw, count = np.random.default_rng(SEED), units.prompts
    replicates = max(LEAST_REPLICATES, min(REPLICATES, WORK // max(1, len(units.weight_n))))
    by_name: dict[str, list[float]] = {}
    for _ in range(replicates):
        times_P = draw.multinomial(count, np.full(count, 1 / count)).astype(np.float64)
        # A draw that leaves a window empty is none.
        if (np.bincount(units.window_n, units.weight_n * times_P[units.prompt_n], 2) > 0).all():
            lines = split(units, times_P).lines
            totals = {name: float(share.sum()) for name, share in lines.items()}
            parts = {f"{REST}/{k}": float(share) for k, share in enumerate(lines[REST])}
            for name, total in (totals | parts | {CHANGE: sum(totals.values())}).items():
                by_name.setdefault(name, []).append(total)
    ends = {name: np.quantile(np.array(shares), (0.025, 0.975)) for name, shares in by_name.items()}
    return {name: (float(low), float(high)) for name, (low, high) in ends.items()}


def jumps(values: Floats, width: int, noise: float, *, times: float = 5.0, most: int = 5) -> list[int]:
    """Return where a series changes its level: the first index of the new level, the largest changes first.

    The mean of up to `width` values after an index is compared with that of as many before it; a change is above
    `times` standard errors, the largest within `width`.

    >>> jumps(np.r_[np.zeros(10), np.ones(10)], 5, 0.1)
    [10]
    """
    values = np.asarray(values, dtype=np.float64)
    count = len(values)
    if not count:
        return []
    sums = np.concatenate([[0.0], values.cumsum()])
    score = np.zeros(count)
    least = min(3, width)
    # Where neighbours are equal, a jump is still the larger the further it goes.
    noise = max(noise, 1e-9 * float(np.ptp(values)), 1e-300)
    for at in range(least, count - least + 1):
        low, high = max(0, at - width), min(count, at + width)
        gap = (sums[high] - sums[at]) / (high - at) - (sums[at] - sums[low]) / (at - low)
        error = noise * np.sqrt(1 / (high - at) + 1 / (at - low))
        score[at] = abs(gap) / error
    places: list[int] = []
    for at in np.argsort(-score, kind="stable"):
        if score[at] <= times or len(places) == most:
            break
        if all(abs(int(at) - other) >= width for other in places):
            places.append(int(at))
    return places
