# ruff: noqa
"""What the batches of several trainers share: log-probs, masks and rewards, drawn in one order."""

import numpy as np


def drawn(draw, case, count, spread, *, gap=0.1, far=12.0, trained=0.85):
    """Token columns of `count` responses: old and sampler log-probs `spread` off, the sampler `gap` further."""
    length = draw.integers(1, 8, count)
    policy = [(-draw.exponential(1.0, n)).tolist() for n in length]

    def near(scale):
        return [(np.array(p) + scale * draw.standard_normal(len(p))).clip(max=-1e-4).tolist() for p in policy]

    rows = {
        "policy": policy,
        "old": near(spread),
        "ref": near(0.4 if case != "extreme" else far),
        "rollout": near(spread + gap),
    }
    rows["entropy"] = [draw.exponential(0.7, n).astype(np.float32).astype(float).tolist() for n in length]
    rows["mask"] = [(draw.random(n) < trained).astype(int).tolist() for n in length]
    for r, m in enumerate(rows["mask"]):
        m[0] = 1
        if case == "rejected" and r in (0, 1, 5, 8, 9, 10, 11):
            rows["mask"][r] = [0] * len(m)
    return rows


def rewarded(draw, case, rewards, K):
    """Rewards, but where a case has its own: prompts of one reward, or a spread of 1e-7."""
    N = len(rewards)
    if case == "ties":
        return np.where(np.arange(N) < K, 0.3, draw.integers(0, 3, N) / 2)[:, None].astype(float)
    return 0.5 + 1e-7 * draw.integers(0, 5, (N, 1)) if case == "tiny_spread" else rewards
