"""Numbers that stand for log-probs that nobody computed, in the rows of a block."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.measures.sampled_rows import Sample

SIDES = {"sampler": "rollout_log_probs", "trainer": "old_log_probs"}


PLACEHOLDERS = tuple(f"{side}:{kind}" for side in SIDES for kind in ("0.0", "1.0", "-1.0", "-1000 or less", "above 0"))


CERTAIN, TAILS = (tuple(f"{side}:{name}" for side in SIDES) for name in ("certain", "tail"))


LOWEST, HIGHEST = -1000.0, 0.05
"""A sentinel; and what a bfloat16 log-softmax may be above 0."""


TAIL = 3


def sums_of(sample: "Sample", rows: int) -> "dict[str, Tensor]":
    """Count the tokens of each sampled row, and those of log-prob 0, and add up the weights, ``[N]`` of `rows` rows."""
    sums = {"sampled": sample.length, "zeros": sample.by_row(sample.sampler == 0)}
    sums["weights"] = sample.by_row(sample.weight)
    return {name: sample.among_all(x, rows) for name, x in sums.items()}


def placeholders_of(block: "TokenBlock", places: "Tensor") -> "dict[str, Tensor]":
    """Count the placeholders in each row, ``[n]`` float64, on the CPU.

    Args:
        block: the rows.
        places: tokens whose log-probs are far apart; weights are those of sampled rows.
    """
    import torch

    from rolloutdoctor.rules.measures.sampled_rows import BOUND, is_sampled

    offsets, places = block.runs.offsets.cpu(), places.cpu()
    row = torch.searchsorted(offsets, places, right=True) - 1
    pair = [block.column(name).cpu()[places] for name in SIDES.values()]
    kinds = [which for x in pair for which in (x == 0, x == 1, x == -1, x <= LOWEST, (x > HIGHEST) & (x != 1))]
    certain = [(x < 0) & (x > -0.01) for x in pair]

    def by_row(which: "Tensor", weight: "Tensor | None" = None) -> "Tensor":
        weights = None if weight is None else weight[which]
        return torch.bincount(row[which], weights, minlength=len(block.runs)).double()

    is_held, is_sampled_n = torch.stack(kinds).any(0), torch.from_numpy(is_sampled(block.batch)[block.rows])
    weight = (pair[1].double() - pair[0].double()).clamp_(-BOUND, BOUND).exp_()
    held = is_held.nonzero().squeeze(1)
    first = held[row[held].diff(prepend=row.new_full((1,), -1)) > 0]
    where = {"first": places[first] - offsets[row[first]], "sampler": pair[0][first], "trainer": pair[1][first]}
    counts = {name: torch.zeros(len(block.runs), dtype=torch.float64) for name in where}
    for name, x in where.items():
        counts[name][row[first]] = x.double()
    tails = torch.zeros(len(block.runs), len(SIDES), dtype=torch.bool)
    _tails(block, row[places >= offsets[1:][row] - TAIL].to(block.runs.offsets.device), tails)
    return {
        **counts,
        **dict(zip((*PLACEHOLDERS, *CERTAIN), map(by_row, (*kinds, *certain)), strict=True)),
        **dict(zip(TAILS, tails.double().unbind(1), strict=True)),
        "placeholder_weights": by_row(is_held & is_sampled_n[row], weight),
    }


def _tails(block: "TokenBlock", rows: "Tensor", tails: "Tensor") -> None:
    """Mark rows that end with equal log-probs of each side where the other's differ, in ``[n, 2]`` bool.

    Args:
        block: the rows.
        rows: those that end with a token whose log-probs are far apart.
        tails: is written to.
    """
    import torch

    rows = torch.unique(rows)
    rows = rows[block.runs.lengths[rows] >= TAIL]
    at = block.runs.offsets[1:][rows, None] - torch.arange(1, TAIL + 1, device=rows.device)
    pair = [block.column(name)[at] for name in SIDES.values()]
    trained = block.trained_T[at].all(1)
    equal = [trained & (x == x[:, :1]).all(1) & (x[:, 0] != 0) for x in pair]
    tails[rows.cpu()] = torch.stack([equal[0] & ~equal[1], equal[1] & ~equal[0]], 1).cpu()
