"""The least and the largest value that a logged quantity can have."""

from collections.abc import Mapping
from math import inf

_SHARES = ("zero_variance_share", "truncated_share", "clip_fraction", "clip_fraction_low", "clip_fraction_high")
_NOT_NEGATIVE = (
    *("grad_norm", "critic_grad_norm", "reward_std", "learning_rate", "response_length", "response_length_min"),
    *(
        "response_length_max",
        "sampler_gap",
        "sampler_gap_max",
        "sampler_logp_gap",
        "sampler_logp_gap_max",
        "sampler_ppl",
    ),
    *("trainer_ppl", "step_time"),
)
MEAN_RATIOS = ("ratio", "is_weight")
"""Mean ratios of probabilities, of tokens that the one in the denominator sampled."""
BOUNDS: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(_SHARES, (0.0, 1.0)),
    **dict.fromkeys(_NOT_NEGATIVE, (0.0, inf)),
    # Of samples of p the mean of q/p is 1 at most: that of any number of them is above x in one of x logs at most.
    **dict.fromkeys(MEAN_RATIOS, (0.0, 1e6)),
    "entropy": (0.0, inf),
    # Of samples of a policy p the mean of q/p is 1 at most: a sum of log(p/q) below -x has a probability of exp(-x).
    "response_kl": (-30.0, inf),
    "sampler_pearson": (-1.0, 1.0),
}
"""Quantity to the least and the largest value that it can have."""

SLACK = 1e-4
"""How far rounding in float32 may move a value beyond its bound."""
