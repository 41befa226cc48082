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


def kl(name, policy, ref):
    """One token."""
    u = policy - ref
    if name == "k1":
        return u
    if name == "abs":
        return abs(u)
    if name == "k2":
        return u * u / 2
    if name == "k3":
        return math.exp(-u) - 1 + u
    x = min(20.0, max(-20.0, -u))
    return min(10.0, max(-10.0, math.exp(x) - 1 - x))


def clipped(value, low, high):
    return min(high, max(low, value))


def dual_clip(log_ratio, advantage, low, high, cap=None, bound=None):
    """verl's and slime's policy term of one token."""
    if bound is not None:
        log_ratio = clipped(log_ratio, -bound, bound)
    ratio = math.exp(log_ratio)
    value = max(-advantage * ratio, -advantage * clipped(ratio, 1 - low, 1 + high))
    return min(value, -advantage * cap) if cap is not None and advantage < 0 else value


def delta_clip(log_ratio, advantage, low, high, cap=None):
    """TRL's policy term of one token."""
    ratio = math.exp(log_ratio)
    capped = ratio if cap is None else min(ratio, cap)
    return -min(capped * advantage, clipped(ratio, 1 - low, 1 + high) * advantage)


def aggregated(mode, terms, masks, *, length=None):
    """One micro-batch: the loss of a list of rows, each a list of terms with its mask."""
    sums = [sum(term for term, on in zip(row, mask, strict=True) if on) for row, mask in zip(terms, masks, strict=True)]
    counts = [sum(mask) for mask in masks]
    rows, tokens = len(terms), sum(counts)
    total = sum(sums)
    if mode == "seq-mean-token-mean":
        return sum(each / (count + 1e-8) for each, count in zip(sums, counts, strict=True)) / rows
    if mode in ("micro-batch-row-mean", "trajectory-mean-token-mean"):
        return sum(each / max(count, 1) for each, count in zip(sums, counts, strict=True)) / rows
    if mode in ("micro-batch-token-mean", "generation-token-mean", "generation-token-mean-unscaled", "token-mean"):
        return total / max(tokens, 1)
    if mode == "micro-batch-fixed-length" or mode == "seq-mean-token-sum-norm":
        return total / (rows * length)
    if mode == "token-sum":
        return total
    if mode == "micro-batch-padded-mean":
        return total / (rows * max(*counts, 1))
    if mode in ("seq-mean-token-sum", "micro-batch-row-mean-added", "micro-batch-row-sum"):
        return total / rows
    assert mode == "token-mean-empty-as-one"
    return total / sum(max(count, 1) for count in counts)


def whitened(values):
    """A list over tokens, as verl whitens it."""
    middle, spread = masked_moments(values)
    return [(value - middle) / math.sqrt(spread + 1e-8) for value in values]


def returns(rewards, masks, gamma=1.0):
    """One row: discounted sums backwards, masked tokens skipped; None at masked tokens."""
    found, carried = [], 0.0
    for reward, on in zip(reversed(rewards), reversed(masks), strict=True):
        carried = reward + gamma * carried if on else carried
        found.insert(0, carried if on else None)
    return found


def masked_gae(rewards, values, masks, gamma, lam):
    """One row, before whitening; None at masked tokens."""
    found, carried, next_value = [], 0.0, 0.0
    for reward, value, on in zip(reversed(rewards), reversed(values), reversed(masks), strict=True):
        if on:
            carried = reward + gamma * next_value - value + gamma * lam * carried
            next_value = value
        found.insert(0, carried if on else None)
    return found


def token_baselines(rows, groups, votes, *, compact, zero_tail):
    """Optimal token baselines of whole rows: each is a list of (reward, path variance, mask); None at masked tokens."""
    tables = []
    for row in rows:
        returned = returns([reward for reward, _, _ in row], [on for _, _, on in row])
        weight, rank, table = 0.0, 0, {}
        for position, ((_, variance, on), value) in enumerate(zip(row, returned, strict=True)):
            if on:
                weight += variance
                table[rank if compact else position] = (position, value, weight)
                rank += 1
        tables.append(table)
    found = []
    for own, row in enumerate(rows):
        members = [
            other
            for other in range(len(rows))
            if groups[other] == groups[own] and votes[other] and (tables[other] or not compact)
        ]
        lengths = {other: len(tables[other]) for other in members}
        tail = math.inf
        others = [length for other, length in lengths.items() if other != own]
        if zero_tail and own in members and others and lengths[own] > max(others):
            tail = max(others)
        result = [None] * len(row)
        for place, (position, value, _) in tables[own].items():
            at = [tables[other][place] for other in members if place in tables[other]]
            baseline = sum(v * w for _, v, w in at) / (sum(w for _, _, w in at) + 1e-8)
            used = len(members) > 1 and place < tail
            result[position] = value - baseline if used else value
        found.append(result)
    return found


def kept(statistic, low, high):
    return (low is None or statistic >= low) and statistic <= high


def divergence(name, log_ratio):
    u = clipped(log_ratio, -20.0, 20.0)
    return {"k1": -u, "k2": u * u / 2, "k3": math.exp(u) - 1 - u}[name]


def rejected(name, rows, low, high):
    """Masks after rejection; each row is a list of (log-ratio, mask)."""
    over, _, estimator = name.rpartition("_")
    found = []
    for row in rows:
        values = [divergence(estimator, u) for u, on in row if on]
        if over == "token":
            found.append([on and kept(divergence(estimator, u), low, high) for u, on in row])
            continue
        total = math.fsum(values)
        statistic = {"seq_sum": total, "seq_mean": total / (len(values) + 1e-8), "seq_max": max(values, default=0.0)}
        found.append([on and kept(statistic[over], low, high) for _, on in row])
    return found


def importance(rows, level, high, low=None):
    """Weights; each row is a list of (log-ratio, mask)."""
    found = []
    for row in rows:
        total = math.fsum(u for u, on in row if on)
        weights = []
        for u, on in row:
            weight = math.exp(clipped(u if level == "token" else total, -20.0, 20.0))
            if low is None:
                weight = min(weight, high)
            elif not low <= weight <= high:
                weight = 0.0
            weights.append(weight if on else 0.0)
        found.append(weights)
    return found
