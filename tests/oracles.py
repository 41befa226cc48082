"""Slow and obvious versions of the maths: loops over lists, one number at a time, sharing no code with the package."""

import math
from itertools import pairwise

NAN = math.nan


def cut(values, offsets):
    """The runs of a packed list."""
    return [values[start:stop] for start, stop in pairwise(offsets)]


def run_sums(values, offsets):
    return [math.fsum(run) for run in cut(values, offsets)]


def run_highs(values, offsets):
    return [max(run, default=-math.inf) for run in cut(values, offsets)]


def run_lows(values, offsets):
    return [min(run, default=math.inf) for run in cut(values, offsets)]


def expanded(values, offsets):
    return [value for value, run in zip(values, cut(range(offsets[-1]), offsets), strict=True) for _ in run]


def reverse_scan(values, decay, offsets):
    found = []
    for run in cut(values, offsets):
        carried, backwards = 0.0, []
        for value in reversed(run):
            carried = value + decay * carried
            backwards.append(carried)
        found += reversed(backwards)
    return found


def mean(values):
    return math.fsum(values) / len(values) if values else NAN


def std(values):
    if len(values) < 2:
        return NAN
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1))


def voters_of(row, groups, votes):
    return [other for other in range(len(groups)) if groups[other] == groups[row] and votes[other]]


def advantages(name, scores, groups, votes, lengths, *, scale="group", epsilon=1e-6, singleton="raw"):
    """The advantage of every row; 0 for rows without a vote, except where the rule says otherwise."""
    if name == "gdpo":
        found = advantages("grpo", scores, groups, votes, lengths, scale=scale, epsilon=epsilon, singleton=singleton)
        return whitened_rows(found, lengths)
    found = []
    voting = [score for score, vote in zip(scores, votes, strict=True) if vote]
    if name == "normalize_then_sum":
        return normalized_then_summed([scores], [1.0], groups, votes, epsilon)
    for row, score in enumerate(scores):
        peers = voters_of(row, groups, votes)
        if not votes[row]:
            found.append(0.0)
            continue
        others = [scores[other] for other in peers]
        alone = len(peers) == 1
        value = score - mean(others)
        if alone:
            value = score if singleton == "raw" else 0.0
        if name == "raw":
            value = score
        if name == "grpo":
            if scale == "group":
                value /= (1.0 if alone else std(others)) + epsilon
            if scale == "batch":
                value /= (std(voting) if len(voting) > 1 else 0.0) + epsilon
        elif name == "gpg":
            value *= len(voting) / max(1, sum(each != 0 for each in voting))
        elif name == "rloo" and not alone:
            siblings = [scores[other] for other in peers if other != row]
            value = score - mean(siblings)
        elif name == "opo" and not alone:
            weight = sum(lengths[other] for other in peers)
            weighted = sum(lengths[other] * scores[other] for other in peers)
            value = score - (weighted / weight if weight else NAN)
        elif name == "grpo_passk":
            ordered = sorted(others, reverse=True)
            best = not alone and score == ordered[0]
            value = score - ordered[1] if best else 0.0
            if best and scale == "group":
                value /= std(others) + epsilon
        found.append(value)
    return whitened_rows(found, lengths) if name == "reinforce_plus_plus_baseline" else found


def whitened_rows(found, lengths):
    """Each row counts once for each of its tokens."""
    tokens = [value for value, length in zip(found, lengths, strict=True) for _ in range(length)]
    middle, spread = masked_moments(tokens)
    whitened = [(value - middle) / math.sqrt(spread + 1e-8) for value in found]
    return [value if length else 0.0 for value, length in zip(whitened, lengths, strict=True)]


def masked_moments(values):
    """Mean and unbiased variance as verl takes them, with 1e-8 added to the count of a mean."""
    count = len(values)
    if count < 2:
        return NAN, NAN
    middle = math.fsum(values) / (count + 1e-8)
    return middle, math.fsum((value - middle) ** 2 for value in values) / (count + 1e-8) * count / (count - 1)


def normalized_then_summed(rewards, weights, groups, votes, epsilon):
    """TRL's normalize_then_sum; NaN is a reward that the row does not have."""
    sums = [0.0] * len(groups)
    for values, weight in zip(rewards, weights, strict=True):
        for row, value in enumerate(values):
            peers = [values[other] for other in voters_of(row, groups, votes) if not math.isnan(values[other])]
            if votes[row] and not math.isnan(value) and len(peers) > 1:
                sums[row] += weight * (value - mean(peers)) / (std(peers) + epsilon)
    voting = [each for each, vote in zip(sums, votes, strict=True) if vote]
    if len(voting) < 2:
        return [0.0] * len(groups)
    middle, spread = mean(voting), std(voting)
    return [(each - middle) / (spread + epsilon) if vote else 0.0 for each, vote in zip(sums, votes, strict=True)]


def gae(rewards, values, gamma, lam):
    """One row; no mask."""
    found, carried, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        carried = reward + gamma * next_value - value + gamma * lam * carried
        found.insert(0, carried)
        next_value = value
    return found


def kl(name, u):
    """An estimate of the KL from a log-ratio."""
    return {"k1": u, "k2": u * u / 2}.get(name, math.exp(-u) - 1 + u)


def clipped(value, low, high):
    return min(high, max(low, value))


def aggregated(mode, terms, masks, *, length=None, groups=None):
    """One micro-batch: the loss of a list of rows, each a list of terms with its mask, and its group."""
    sums = [sum(term for term, on in zip(row, mask, strict=True) if on) for row, mask in zip(terms, masks, strict=True)]
    counts = [sum(mask) for mask in masks]
    rows, tokens = len(terms), sum(counts)
    total = sum(sums)
    if mode == "seq-mean-token-mean":
        return sum(each / (count + 1e-8) for each, count in zip(sums, counts, strict=True)) / rows
    if mode == "filled-row-mean-token-mean":
        filled = [each / (count + 1e-8) for each, count in zip(sums, counts, strict=True) if count]
        return sum(filled) / max(len(filled), 1)
    if mode == "prompt-mean-token-mean":
        places = [[row for row, group in enumerate(groups) if group == one] for one in dict.fromkeys(groups)]
        means = [sum(sums[row] for row in own) / max(sum(counts[row] for row in own), 1) for own in places]
        return sum(means) / len(means)
    if mode in ("micro-batch-row-mean", "trajectory-mean-token-mean", "row-mean-token-mean"):
        return sum(each / max(count, 1) for each, count in zip(sums, counts, strict=True)) / rows
    if mode in (
        "micro-batch-token-mean",
        "micro-batch-token-mean-by-rows",
        "generation-token-mean",
        "generation-token-mean-unscaled",
        "generation-token-mean-over-micro-batches",
        "token-mean",
        "rank-token-mean",
    ):
        return total / max(tokens, 1)
    if mode == "generation-token-mean-of-rows":
        return total / max(tokens, 1) / rows
    if mode == "micro-batch-fixed-length" or mode == "seq-mean-token-sum-norm":
        return total / (rows * length)
    if mode == "micro-batches-row-mean":
        return sum(each / max(count, 1) for each, count in zip(sums, counts, strict=True))
    filled = max(sum(count > 0 for count in counts), 1)
    if mode == "micro-batch-seq-mean-token-mean-by-rows":
        return sum(each / (count + 1e-8) for each, count in zip(sums, counts, strict=True)) / filled
    if mode == "micro-batch-seq-mean-token-sum-by-rows":
        return total / filled
    if mode in ("token-sum", "token-sum-norm"):
        return total / (1 if mode == "token-sum" else length)
    if mode == "micro-batch-padded-mean":
        return total / (rows * max(*counts, 1))
    if mode in ("seq-mean-token-sum", "micro-batch-row-mean-added", "micro-batch-row-sum"):
        return total / rows
    assert mode == "token-mean-empty-as-one"
    return total / sum(max(count, 1) for count in counts)


def kept(statistic, low, high):
    return (low is None or statistic >= low) and statistic <= high
