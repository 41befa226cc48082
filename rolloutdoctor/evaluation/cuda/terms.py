"""What becomes of a token, in Triton: `losses.clipped` and `formulas.kl` again, branch by branch.

Arithmetic is in the dtype of the evaluation and in the order of these, so that ties and bounds fall as they do there.
"""

import triton
import triton.language as tl


@triton.jit
def exponential(x):
    """``exp(x)`` and ``exp(x) - 1`` to about one unit in the last place, below the normal numbers 0.

    By hand: what the hardware has is approximate, and what CUDA's library has cannot be run without a GPU.
    """
    # exp(x) = 2^k exp(r), |r| < 0.35: adding `magic` rounds to the integer k and leaves it in the lowest bits.
    if x.dtype == tl.float64:
        top = tl.full((), 710.0, tl.float64)
        bottom = tl.full((), -708.0, tl.float64)
        magic = tl.full((), 6755399441055744.0, tl.float64)
        log2_e = tl.full((), 1.4426950408889634, tl.float64)
        ln2_high = tl.full((), -6.93147180369123816490e-01, tl.float64)
        ln2_low = tl.full((), -1.90821492927058770002e-10, tl.float64)
    else:
        top = tl.full((), 89.0, tl.float32)
        bottom = tl.full((), -86.5, tl.float32)
        magic = tl.full((), 12582912.0, tl.float32)
        log2_e = tl.full((), 1.4426950408889634, tl.float32)
        ln2_high = tl.full((), -0.693359375, tl.float32)
        ln2_low = tl.full((), 2.12194440e-4, tl.float32)
    inside = tl.where(x > top, top, x)
    inside = tl.where(x < bottom, bottom, inside)
    shifted = tl.fma(inside, log2_e, magic)
    k = shifted - magic
    r = tl.fma(k, ln2_low, tl.fma(k, ln2_high, inside))
    series = tl.full((), 1.0, x.dtype)
    # (exp(r) - 1) / r is 1 + r / 2 (1 + r / 3 (1 + ...)), as far as the dtype sees it.
    for n in tl.static_range(14 if x.dtype == tl.float64 else 8, 1, -1):
        series = tl.fma(r * tl.full((), 1.0 / n, x.dtype), series, tl.full((), 1.0, x.dtype))
    small = r * series
    # 2^(k - 1), then twice that: 2^k alone would overflow before exp(x) does.
    if x.dtype == tl.float64:
        half = ((shifted.to(tl.int64, bitcast=True) + 1022) << 52).to(tl.float64, bitcast=True)
    else:
        half = ((shifted.to(tl.int32, bitcast=True) + 126) << 23).to(tl.float32, bitcast=True)
    grown = tl.fma(small, half, half) * 2.0
    grown = tl.where(x < bottom, 0.0, grown)
    return grown, tl.where(k == 0.0, small, grown - 1.0)


@triton.jit
def bounded(x, BOUND: tl.constexpr):
    """`x` clamped to ``+-BOUND``; NaN stays."""
    bound = tl.full((), BOUND, x.dtype)
    x = tl.where(x < -bound, -bound, x)
    return tl.where(x > bound, bound, x)


@triton.jit
def larger(x, y):
    """The larger of two values; NaN if one of them is."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _share(first, second):
    """What a maximum's derivative gives to the first: at a tie one half."""
    return tl.where(first > second, 1.0, tl.where(first < second, 0.0, 0.5)).to(first.dtype)


@triton.jit
def clipped_term(ratio, slope, advantage, DUAL: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, CAP: tl.constexpr):
    """The clipped term, its derivative by the log-ratio, and what the trainer counts as clipped and as capped."""
    low = tl.full((), LOW, ratio.dtype)
    high = tl.full((), HIGH, ratio.dtype)
    against = -advantage
    clipped = tl.where(ratio < low, low, ratio)
    clipped = tl.where(clipped > high, high, clipped)
    free = ratio * against
    bound = clipped * against
    is_clipped = bound > free
    is_capped = is_clipped
    if DUAL:
        value = larger(free, bound)
        flows = tl.where(ratio == clipped, 1.0, _share(free, bound))
        if CAP is not None:
            negative = advantage < 0
            limit = against * tl.full((), CAP, ratio.dtype)
            is_capped = negative & (value > limit)
            flows = tl.where(negative, flows * _share(limit, value), flows)
            least = tl.minimum(value, limit, propagate_nan=tl.PropagateNan.ALL)
            value = tl.where(negative, least, value)
    elif CAP is not None:
        cap = tl.full((), CAP, ratio.dtype)
        capped = tl.where(ratio > cap, cap, ratio)
        first = capped * against
        share = _share(first, bound)
        flows = tl.where(ratio == capped, share, 0.0) + tl.where(ratio == clipped, 1.0 - share, 0.0)
        value = larger(first, bound)
    else:
        value = larger(free, bound)
        flows = tl.where(ratio == clipped, 1.0, _share(free, bound))
    return value, against * slope * flows, is_clipped, is_capped


@triton.jit
def kl_term(u, ratio, ESTIMATOR: tl.constexpr, STRAIGHT: tl.constexpr, WEIGHTED: tl.constexpr, CLAMP: tl.constexpr):
    """The KL estimate and its derivative; `ratio` is looked at where it is weighted."""
    one = tl.full((), 1.0, u.dtype)
    if ESTIMATOR == "k1":
        value = u
        derivative = tl.zeros_like(u) + one
    elif ESTIMATOR == "k2":
        value = u * u * 0.5
        derivative = u
    elif ESTIMATOR == "abs":
        value = tl.abs(u)
        derivative = tl.where(u > 0, one, tl.where(u < 0, -one, u))
    elif ESTIMATOR == "k3_clamped":
        kept = bounded(u, 20.0)
        grown, _ = exponential(-kept)
        value = (grown + kept) - one
        derivative = tl.where((tl.abs(u) <= 20.0) & (value <= 10.0), one - grown, 0.0)
        value = bounded(value, 10.0)
    else:
        tl.static_assert(ESTIMATOR == "k3")
        grown, _ = exponential(-u)
        value = (grown + u) - one
        derivative = one - grown
    if STRAIGHT:
        derivative = u
    if WEIGHTED:
        derivative = ratio * (derivative + value)
        value = ratio * value
    if CLAMP is not None:
        derivative = tl.where(tl.abs(value) <= tl.full((), CLAMP, u.dtype), derivative, 0.0)
        value = bounded(value, CLAMP)
    return value, derivative
