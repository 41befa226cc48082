"""How likely independent draws are to repeat a response, and from how many nats on copies are beyond chance."""

from math import exp, log

import polars as pl


def pairs_of(size: pl.Expr) -> pl.Expr:
    """Pairs of so many rows."""
    return size * (size - 1.0) / 2


def binned(nats: pl.Expr) -> pl.Expr:
    """Nats to the lower end of their bin of two; all from 400 on are one."""
    return (nats.clip(upper_bound=400.0) / 2).floor() * 2


def copy_chance(prob: pl.Expr, size: pl.Expr) -> pl.Expr:
    """Chance that a row repeats an earlier row of its group, from the probability of its response.

    Of a response with probability p, n draws hold n p on average and one or more with 1 - (1 - p)^n; what is beyond
    the first is copies. Each of the n p rows stands for its share of them.
    """
    # expm1(2 x) = 2 sinh(x) exp(x)
    half = ((size * (-prob).log1p()) / 2).clip(lower_bound=-300.0)
    exact = 1 + 2 * half.sinh() * half.exp() / (size * prob)
    return pl.when(prob < 1e-6).then((size - 1) * prob / 2).otherwise(exact)


def nats_beyond_chance(copies: pl.Series, pairs: float, least: float) -> float:
    """Return the nats from which on copies are beyond chance: each of them, or as many as there are of so many nats.

    A row repeats an earlier one with a chance of at most exp(-nats), so that copies of such responses are bounded by a
    sum of independent draws with mean pairs x exp(-nats), and its upper tail by Chernoff.

    Args:
        copies: nats of each.
        pairs: that were compared.
        least: nats beyond which not one copy is chance.
    """
    # A sampler that is sharper than the recorded log-probs say has copies of fewer nats.
    for nats in copies.filter((copies >= least / 2) & (copies < least)).unique().sort():
        count, mean = int((copies >= nats).sum()), max(pairs, 1.0) * exp(-nats)
        if count * log(count / mean) - count + mean > least:
            return float(nats)
    return least
