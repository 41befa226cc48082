"""The kernel: a program goes through some adjacent tokens of one row and leaves their sums.

Sums are float64, in an order that the step alone decides. Values per token are ``[1, B]``, those of the objectives
beside the reference ``[K, B]``.
"""

import triton
import triton.language as tl

from rolloutdoctor.evaluation.cuda.terms import bounded, clipped_term, exponential, kl_term, larger

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""How it is compiled: a product is rounded before it is compared or added."""


@triton.jit
def probe(out_ptr):
    """Store 1."""
    tl.store(out_ptr, 1.0)


@triton.jit
def _column(ptr, places, inside, on, DTYPE: tl.constexpr):
    """A column's values of a tile; 0 where the mask is."""
    return tl.where(on, tl.load(ptr + places, mask=inside, other=0.0).to(DTYPE), 0.0)


@triton.jit
def _derivative(turned, kl_slope, in_policy, in_kl, policy_weight, kl_weight, KL: tl.constexpr):
    grad = tl.where(in_policy, policy_weight * turned, 0.0)
    if KL is not None:
        grad = grad + tl.where(in_kl, kl_weight * kl_slope, 0.0)
    return grad


@triton.jit
def _leave(out_ptr, sums, there):
    """Store the sum over the tokens of each of some objectives."""
    tl.store(out_ptr, tl.sum(sums, axis=1)[:, None].to(tl.float64), mask=there)


@triton.jit
def token_sums(
    policy_ptr,
    old_ptr,
    ref_ptr,
    kl_ptr,
    pi_ptr,
    mask_ptr,
    rows_ptr,
    chunks_ptr,
    row_of_ptr,
    values_ptr,
    out_ptr,
    rows,
    objectives,
    width,
    DTYPE: tl.constexpr,
    DUAL: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    CAP: tl.constexpr,
    BOUND: tl.constexpr,
    KL: tl.constexpr,
    KL_COLUMN: tl.constexpr,
    STRAIGHT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    CLAMP: tl.constexpr,
    ON_POLICY: tl.constexpr,
    HAS_PI: tl.constexpr,
    OTHERS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sums of one chunk: at most `CHUNK` adjacent tokens of one row.

    Args:
        policy_ptr: ``[T]`` log-probs at the loss.
        old_ptr: ``[T]`` those that they are compared with; not read if `ON_POLICY`.
        ref_ptr: ``[T]`` those of the reference model; read for a KL term.
        kl_ptr: ``[T]`` what these are compared with; read if `KL_COLUMN` is "own".
        pi_ptr: ``[T]`` `sum_pi_squared`; read if `HAS_PI`.
        mask_ptr: ``[T]`` uint8.
        rows_ptr: ``[N+1]`` offsets of the rows into the tokens.
        chunks_ptr: ``[N+1]`` offsets of the rows into the chunks.
        row_of_ptr: ``[C]`` the row of each chunk.
        values_ptr: ``[objectives, 5, N]`` in `DTYPE`, `fused.RowValues`; the reference is first.
        out_ptr: ``[C, width]`` float64.
        rows: N.
        objectives: how many there are.
        width: sums per chunk: eleven of the reference, then seven of each other objective.
        DTYPE: of the values per token.
        DUAL: `ppo_dual_clip`, else `ppo_delta_clip`.
        LOW: the clip range's lower end.
        HIGH: its upper end.
        CAP: as in `Surrogate`, or None.
        BOUND: of the log-ratio, or None.
        KL: the estimator, or None.
        KL_COLUMN: "policy" or "old" where the KL's column is one of these, else "own".
        STRAIGHT: as `KlTerm` has it.
        WEIGHTED: as `KlTerm` has it.
        CLAMP: as `KlTerm` has it.
        ON_POLICY: the old log-probs are the policy's.
        HAS_PI: there is such a column.
        OTHERS: objectives beside the reference, rounded up to a power of two, or 0.
        CHUNK: tokens of a chunk.
        BLOCK: tokens of a tile.
    """
    chunk = tl.program_id(0).to(tl.int64)
    row = tl.load(row_of_ptr + chunk)
    start = tl.load(rows_ptr + row) + (chunk - tl.load(chunks_ptr + row)) * CHUNK
    count = tl.minimum(tl.load(rows_ptr + row + 1) - start, CHUNK).to(tl.int32)
    policy_ptr += start
    old_ptr += start
    ref_ptr += start
    kl_ptr += start
    pi_ptr += start
    mask_ptr += start
    out_ptr += chunk * width

    first = tl.arange(0, 1)[:, None]
    mine_ptr = values_ptr + row + first
    in_policy = tl.load(mine_ptr) != 0
    in_kl = tl.load(mine_ptr + rows) != 0
    policy_weight = tl.load(mine_ptr + 2 * rows)
    kl_weight = tl.load(mine_ptr + 3 * rows)
    advantage = tl.load(mine_ptr + 4 * rows)
    value_sum = tl.zeros([1, BLOCK], tl.float64)
    l1_sum = tl.zeros([1, BLOCK], tl.float64)
    square_sum = tl.zeros([1, BLOCK], tl.float64)
    logits_low_sum = tl.zeros([1, BLOCK], tl.float64)
    logits_sum = tl.zeros([1, BLOCK], tl.float64)
    kl_sum = tl.zeros([1, BLOCK], tl.float64)
    drift_sum = tl.zeros([1, BLOCK], tl.float64)
    low_sum = tl.zeros([1, BLOCK], tl.int32)
    high_sum = tl.zeros([1, BLOCK], tl.int32)
    clipped_sum = tl.zeros([1, BLOCK], tl.int32)
    capped_sum = tl.zeros([1, BLOCK], tl.int32)
    if OTHERS > 0:
        other = tl.arange(0, OTHERS)[:, None]
        there = other < objectives - 1
        theirs_ptr = values_ptr + row + (other + 1).to(tl.int64) * (5 * rows)
        in_policy_K = tl.load(theirs_ptr, mask=there, other=0.0) != 0
        in_kl_K = tl.load(theirs_ptr + rows, mask=there, other=0.0) != 0
        policy_weight_K = tl.load(theirs_ptr + 2 * rows, mask=there, other=0.0)
        kl_weight_K = tl.load(theirs_ptr + 3 * rows, mask=there, other=0.0)
        advantage_K = tl.load(theirs_ptr + 4 * rows, mask=there, other=0.0)
        value_sum_K = tl.zeros([OTHERS, BLOCK], tl.float64)
        l1_sum_K = tl.zeros([OTHERS, BLOCK], tl.float64)
        square_sum_K = tl.zeros([OTHERS, BLOCK], tl.float64)
        versus_l1_sum_K = tl.zeros([OTHERS, BLOCK], tl.float64)
        versus_dot_sum_K = tl.zeros([OTHERS, BLOCK], tl.float64)
        clipped_sum_K = tl.zeros([OTHERS, BLOCK], tl.int32)
        capped_sum_K = tl.zeros([OTHERS, BLOCK], tl.int32)

    for begin in range(0, count, BLOCK):
        places = begin + tl.arange(0, BLOCK)[None, :]
        inside = places < count
        on = tl.load(mask_ptr + places, mask=inside, other=0) != 0
        policy = _column(policy_ptr, places, inside, on, DTYPE)
        old = policy if ON_POLICY else _column(old_ptr, places, inside, on, DTYPE)
        log = policy - old
        kept = log if BOUND is None else bounded(log, BOUND)
        ratio, _ = exponential(kept)
        slope = ratio
        if BOUND is not None:
            slope = tl.where(tl.abs(log) <= tl.full((), BOUND, DTYPE), ratio, 0.0)
        value, turned, is_clipped, is_capped = clipped_term(ratio, slope, advantage, DUAL, LOW, HIGH, CAP)
        value_sum += tl.where(on, value, 0.0).to(tl.float64)
        kl_slope = log
        if KL is not None:
            if KL_COLUMN == "policy":
                compared = policy
            elif KL_COLUMN == "old":
                compared = old
            else:
                compared = _column(kl_ptr, places, inside, on, DTYPE)
            u = compared - _column(ref_ptr, places, inside, on, DTYPE)
            weight = ratio
            if WEIGHTED and BOUND is not None:
                weight, _ = exponential(log)
            kl, kl_slope = kl_term(u, weight, KL, STRAIGHT, WEIGHTED, CLAMP)
            kl_sum += tl.where(on, kl, 0.0).to(tl.float64)
        grad = _derivative(turned, kl_slope, in_policy, in_kl, policy_weight, kl_weight, KL)
        grad = tl.where(on, grad, 0.0)
        wide = grad.to(tl.float64)
        square = wide * wide
        l1_sum += tl.abs(wide)
        square_sum += square
        if HAS_PI:
            # Where p is about one, what is left of 1 - 2 p needs float64.
            grown, miss = exponential(policy.to(tl.float64))
        else:
            _, miss = exponential(policy)
        miss = miss.to(tl.float64)
        low_square = square * (miss * miss)
        logits_low_sum += low_square
        if HAS_PI:
            spread = (1.0 - 2.0 * grown) + _column(pi_ptr, places, inside, on, DTYPE).to(tl.float64)
            logits_sum += larger(square * spread, low_square)
        seen = ratio
        if DUAL:
            drift_sum += tl.where(on, -kept, 0.0).to(tl.float64)
            clipped_sum += (on & is_clipped).to(tl.int32)
            if CAP is not None:
                capped_sum += (on & is_capped).to(tl.int32)
        elif CAP is not None:
            cap = tl.full((), CAP, DTYPE)
            seen = tl.where(ratio > cap, cap, ratio)
        low_sum += (on & (seen < tl.full((), LOW, DTYPE))).to(tl.int32)
        high_sum += (on & (seen > tl.full((), HIGH, DTYPE))).to(tl.int32)
        if OTHERS > 0:
            value_K, turned_K, is_clipped_K, is_capped_K = clipped_term(ratio, slope, advantage_K, DUAL, LOW, HIGH, CAP)
            value_sum_K += tl.where(on, value_K, 0.0).to(tl.float64)
            grad_K = _derivative(turned_K, kl_slope, in_policy_K, in_kl_K, policy_weight_K, kl_weight_K, KL)
            grad_K = tl.where(on, grad_K, 0.0)
            wide_K = grad_K.to(tl.float64)
            l1_sum_K += tl.abs(wide_K)
            square_sum_K += wide_K * wide_K
            versus_l1_sum_K += tl.abs(grad_K - grad).to(tl.float64)
            versus_dot_sum_K += wide_K * wide
            if DUAL:
                clipped_sum_K += (on & is_clipped_K).to(tl.int32)
                if CAP is not None:
                    capped_sum_K += (on & is_capped_K).to(tl.int32)

    always = first < 1
    at = out_ptr + first
    _leave(at, value_sum, always)
    _leave(at + 1, l1_sum, always)
    _leave(at + 2, square_sum, always)
    _leave(at + 3, logits_low_sum, always)
    _leave(at + 4, low_sum, always)
    _leave(at + 5, high_sum, always)
    if KL is not None:
        _leave(at + 6, kl_sum, always)
    if DUAL:
        _leave(at + 7, drift_sum, always)
        _leave(at + 8, clipped_sum, always)
        if CAP is not None:
            _leave(at + 9, capped_sum, always)
    if HAS_PI:
        _leave(at + 10, logits_sum, always)
    if OTHERS > 0:
        at_K = out_ptr + 11 + other * 7
        _leave(at_K, value_sum_K, there)
        _leave(at_K + 1, l1_sum_K, there)
        _leave(at_K + 2, square_sum_K, there)
        _leave(at_K + 3, versus_l1_sum_K, there)
        _leave(at_K + 4, versus_dot_sum_K, there)
        if DUAL:
            _leave(at_K + 5, clipped_sum_K, there)
            if CAP is not None:
                _leave(at_K + 6, capped_sum_K, there)
