"""Numbers of the rules of this family: rows just below each, and just above."""

from math import expm1, log

from rules.row_boundaries import NEAR, RowBoundary, count, near

from rolloutdoctor.testing import toy_batch

TRL = {"trainer": "trl", "beta": 0.1}
APART = toy_batch([[1, 0]], ref=-1.5)
KL = expm1(-0.5) + 0.5

BOUNDARIES: list[RowBoundary] = [
    RowBoundary(
        "RDM001",
        "warn_above",
        APART,
        APART,
        ("skipped", "warning"),
        TRL,
        logged=tuple({"kl": KL * (1 + 0.05 * x)} for x in (1 - NEAR, 1 + NEAR)),
    ),
    near("RDM003", "below", 0.01, lambda x: {"kl": [0.1] * 9 + [-x]}, "skipped", "info: .*negative"),
    near("RDM003", "below", 0.01, lambda x: {"kl": [0.1] * 9 + [-x]}, "clean", "warning: .*negative", **TRL),
    near("RDM003", "below_of_k1", 1e-3, lambda x: {"kl": [0.1] * 9 + [-x] * 2}, "clean", "info: .*negative"),
    count(
        "RDM003",
        "fewest_negative",
        2,
        lambda x: {"kl": [0.1] * 9 + [-0.005] * x},
        "skipped",
        "info: .*negative",
    ),
    near("RDM003", "peak_above", 10.0, lambda x: {"kl": [0.1] * 20 + [0.1 * x]}, "clean", "warning: .*spike"),
    RowBoundary(
        "RDM003",
        "fewest",
        *({"kl": [0.1] * (lines - 1) + [5.0]} for lines in (10, 11)),
        ("clean", "warning: .*spike"),
    ),
    near("RDM003", "small_kl", 0.5, lambda x: {"kl": [0.01] * 20 + [x]}, "info: .*spike", "warning: .*spike"),
    near("RDM003", "chance", 0.01, lambda x: {"objective/kl": [log(x)]}, "info: .*one update in", "clean"),
    near("RDM003", "norm_above", 1e7, lambda x: {"grad_norm": [1.5] * 9 + [x]}, "clean", "warning: .*gradient norm"),
]
