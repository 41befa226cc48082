"""Group statistics in the trainers' own float32 arithmetic, where rounding itself is the subject.

Everywhere else statistics are float64. Here the trainers' float32 reductions are repeated group by group, because
the mean of equal float32 values need not be that value, and a tiny standard deviation is not zero.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rolloutdoctor.batch import Groups


def by_size(x_N: Tensor, groups: Groups) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for each group size, the group indices ``[k]`` and their rows' values ``[k, size]`` in float32."""
    sorted_N = x_N[groups.order_N].float()
    for size in groups.sizes:
        chosen_k = (groups.size_G == size).nonzero().squeeze(1)
        starts_k = groups.offsets[chosen_k]
        yield chosen_k, sorted_N[starts_k[:, None] + torch.arange(size, device=x_N.device)]


def residue(score_N: Tensor, groups: Groups, epsilon: float) -> Tensor:
    """Advantage that float32 GRPO gives each row, ``[N]`` float32: ``(s - mean) / (std + epsilon)``.

    Groups of one get 0. For equal scores the exact result is 0 and this one is the rounding residue; its sign and
    size depend on the order of summation, so another device or another group size gives another one.
    """
    sorted_N = torch.zeros(len(score_N), dtype=torch.float32, device=score_N.device)
    for chosen_k, values in by_size(score_N, groups):
        size = values.shape[1]
        if size == 1:
            continue
        mean = values.mean(1, keepdim=True)
        # torch takes the deviation of one group from its float32 mean, in float64; that of several rows at once it
        # computes otherwise, and gets 0 where this does not.
        std = ((values.double() - mean.double()).square().sum(1, keepdim=True) / (size - 1)).sqrt().float()
        advantage = (values - mean) / (std + epsilon)
        sorted_N[groups.offsets[chosen_k][:, None] + torch.arange(size, device=score_N.device)] = advantage
    unsorted_N = torch.empty_like(sorted_N)
    unsorted_N[groups.order_N] = sorted_N
    return unsorted_N


def trl_flags(score_N: Tensor, groups: Groups, scale: str, batches: Groups | None = None) -> Tensor:
    """Rows that TRL flags as zero-std, ``[N]`` bool: ``isclose(std, 0)`` with the std of the scale in force.

    With scale ``batch`` the flag is about the batch, so it holds for all of its rows or for none. Groups, and batches,
    of one row have std 0. NaN scores are left out, as TRL's `nanstd` does.
    Source: TRL ``GRPOTrainer._generate_and_score_completions``.

    Args:
        score_N: ``[N]`` rewards.
        groups: the rows by prompt.
        scale: what TRL divides by: the standard deviation of the ``group``, of the ``batch``, or ``none``.
        batches: the rows by the batch over which that scale is taken; None: all of them are one.
    """
    if scale == "batch":
        groups = Groups.of(torch.zeros_like(groups.index_N)) if batches is None else batches
    flag_G = torch.zeros(len(groups), dtype=torch.bool, device=score_N.device)
    for chosen_k, values in by_size(score_N, groups):
        std_k = _nanstd(values) if values.shape[1] > 1 else torch.zeros_like(values[:, 0])
        flag_G[chosen_k] = torch.isclose(std_k, torch.zeros_like(std_k))
    return flag_G[groups.index_N]


def trl_sums(parts: Sequence[Tensor], weights: Sequence[float], groups: Groups, epsilon: float) -> Tensor:
    """Weighted sums of rewards that TRL normalises one by one, ``[N]`` float32; NaN for a row without any of them.

    Source: TRL ``GRPOTrainer._generate_and_score_completions``, `normalize_then_sum`.
    """
    sum_N = torch.zeros(len(groups.index_N), dtype=torch.float32, device=groups.index_N.device)
    for part_N, weight in zip(parts, weights, strict=True):
        for chosen_k, values in by_size(part_N, groups):
            size = values.shape[1]
            std_k = _nanstd(values) if size > 1 else torch.zeros_like(values[:, 0])
            found = weight * (values - values.nanmean(1, keepdim=True)) / (std_k[:, None] + epsilon)
            places = groups.offsets[chosen_k][:, None] + torch.arange(size, device=values.device)
            sum_N[groups.order_N[places]] += found.nan_to_num(nan=0.0)
    without_N = torch.stack([part_N.isnan() for part_N in parts]).all(0)
    return sum_N.masked_fill(without_N, torch.nan)


def _nanstd(values: Tensor) -> Tensor:
    """Unbiased standard deviation of each row without its NaN values; NaN below two values."""
    count = (~values.isnan()).sum(1)
    variance = (values - values.nanmean(1, keepdim=True)).square().nanmean(1)
    return torch.where(count > 1, (variance * count / (count - 1)).sqrt(), torch.nan)
