"""The coefficient of a KL penalty that follows a target."""


def next_coefficient(coef: float, current_kl: float, rows: int, *, target_kl: float, horizon: float) -> float:
    """The coefficient after a step: ``coef (1 + clip(KL / target - 1, -0.2, 0.2) rows / horizon)``.

    Args:
        coef: the coefficient of the step.
        current_kl: the step's KL, ``actor/reward_kl_penalty``.
        rows: rows of the step.
        target_kl: the KL that is aimed at.
        horizon: how many rows a full correction takes.

    Source: arXiv 1909.08593; verl ``AdaptiveKLController``.

    >>> next_coefficient(0.1, 0.2, 100, target_kl=0.1, horizon=1000)
    0.10200000000000001
    """
    error = min(0.2, max(-0.2, current_kl / target_kl - 1))
    return coef * (1 + error * rows / horizon)
