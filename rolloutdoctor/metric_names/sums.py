"""Which logged metrics of a trainer add up to which."""

from collections.abc import Mapping

LOSS_PARTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "trl": ("loss", ("policy_loss", "entropy")),
    "slime": ("train/loss", ("train/pg_loss", "train/entropy_loss", "train/kl_loss")),
}
"""Trainer to its loss and the parts of it, each aggregated like the others."""

WEIGHTED_REWARDS = frozenset({"trl"})
"""Trainers whose logged reward is the weighted sum of their logged reward functions."""
