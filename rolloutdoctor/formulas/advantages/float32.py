"""Group statistics in the trainers' own float32 arithmetic, where rounding itself is the subject.

Everywhere else statistics are float64. Here the trainers' float32 reductions are repeated group by group, because
the mean of equal float32 values need not be that value, and a tiny standard deviation is not zero.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rolloutdoctor.ops.groups import Groups


def by_size(x_N: Tensor, groups: Groups) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for each group size, the group indices ``[k]`` and their rows' values ``[k, size]`` in float32."""
    sorted_N = x_N[groups.order_N].float()
    for chosen_k, places in _places(groups):
        yield chosen_k, sorted_N[places]


def _places(groups: Groups) -> Iterator[tuple[Tensor, Tensor]]:
    """The same with the places of their rows in `order_N`, ``[k, size]``."""
    for size in groups.sizes:
        yield _of_size(groups, size)


def _of_size(groups: Groups, size: int) -> tuple[Tensor, Tensor]:
    """Groups of a size ``[k]``, and the places of their rows in `order_N`, ``[k, size]``."""
    chosen_k = (groups.size_G == size).nonzero().squeeze(1)
    return chosen_k, groups.offsets[chosen_k][:, None] + torch.arange(size, device=groups.offsets.device)


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


def centred(score_N: Tensor, groups: Groups) -> Tensor:
    """Scores less the mean of their group, ``[N]`` float32, bit for bit ``x - x.mean()``; NaN for a NaN score.

    NaN scores are taken out before the mean, which is that of the CPU. Source: prime-rl ``GRPOAlgorithm.score_group``.
    """
    centred_N, index_N = score_N.cpu().float(), groups.index_N.cpu()
    has = ~centred_N.isnan()
    scored = Groups.of(torch.unique(index_N[has], return_inverse=True)[1])
    mean_G = torch.zeros(len(scored))
    for chosen_k, values in by_size(centred_N[has], scored):
        mean_G[chosen_k] = values.mean(1)
    centred_N[has] -= mean_G[scored.index_N]
    return centred_N.to(score_N.device)


def standard_scores(
    score_N: Tensor, groups: Groups, scale: str, epsilon: float, batches: Groups | None = None
) -> Tensor:
    """Centred and scaled scores in float32, ``[N]``: ``(r - mean) / (std + epsilon)``, 0 for NaN.

    Bit for bit TRL's advantages where the sums are of the same order, that is on the same kind of device. For equal
    rewards they are the rounding of these sums: another device has other ones.
    Source: TRL ``GRPOTrainer._generate_and_score_completions``.

    Args:
        score_N: ``[N]`` rewards, NaN for rows that have no say.
        groups: the rows that have a mean in common.
        scale: what is divided by: the standard deviation of the ``group``, of the ``batch``, or ``none``.
        epsilon: added to that standard deviation.
        batches: the rows by the batch over which that scale is taken; None: all of them are one.
    """
    mean_G = torch.zeros(len(groups), device=score_N.device)
    for chosen_k, values in by_size(score_N, groups):
        mean_G[chosen_k] = values.nanmean(1)
    advantage_N = score_N.float() - mean_G[groups.index_N]
    if scale != "none":
        wider = groups if scale == "group" else _whole(groups) if batches is None else batches
        advantage_N = advantage_N / (_std_G(score_N, wider)[wider.index_N] + epsilon)
    return advantage_N.nan_to_num(nan=0.0)


def one_pass_scores(
    score_N: Tensor, groups: Groups, epsilon: float, *, others: bool, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Scores as `leave_one_out_score` (`others`) or `grpo` have them, the variance in one pass, ``[N]`` of `dtype`.

    ``(r - b) / (std + epsilon)``, undivided where the variance comes out as 0 or below. Bit for bit NeMo-RL's
    advantages where products of a matrix and a vector add up in the same order, that is on the same kind of device.
    Source: NeMo-RL ``calculate_baseline_and_std_per_prompt``, ``GRPOAdvantageEstimator``.

    Args:
        score_N: ``[N]`` rewards.
        groups: the rows that are compared.
        epsilon: added to the standard deviation.
        others: baseline and deviation of a row are those of its siblings, not of its whole group.
        dtype: that the trainer computes in.
    """
    sorted_N = score_N[groups.order_N].to(dtype)
    found_N = torch.zeros_like(sorted_N)
    for size in groups.sizes:
        if size < 2:
            continue
        _, places = _of_size(groups, size)
        value = sorted_N[places]
        votes = torch.ones(size, size, dtype=dtype, device=value.device)
        if others:
            votes.fill_diagonal_(0)
        count = torch.tensor(size - int(others), dtype=dtype, device=value.device)
        # Several vectors at once are added up in another order.
        mean, square = (torch.stack([torch.mv(votes, row.clone()) for row in x]) / count for x in (value, value.pow(2)))
        std = ((square - mean.square()) * (count / (count - 1))).sqrt().nan_to_num(0)
        centred = value - mean
        found_N[places] = torch.where(std > 0, centred / (std + epsilon), centred)
    unsorted_N = torch.empty_like(found_N)
    unsorted_N[groups.order_N] = found_N
    return unsorted_N


def zero_std_flags(score_N: Tensor, groups: Groups, scale: str, batches: Groups | None = None) -> Tensor:
    """Rows that are flagged as zero-std, ``[N]`` bool: ``isclose(std, 0)`` with the std of the scale in force.

    With scale ``batch`` the flag is about the batch, so it holds for all of its rows or for none. Groups, and batches,
    of one row have std 0. NaN scores are left out, as TRL's `nanstd` does.
    Source: TRL ``GRPOTrainer._generate_and_score_completions``.

    Args:
        score_N: ``[N]`` rewards.
        groups: the rows by prompt.
        scale: what is divided by: the standard deviation of the ``group``, of the ``batch``, or ``none``.
        batches: the rows by the batch over which that scale is taken; None: all of them are one.
    """
    if scale == "batch":
        groups = _whole(groups) if batches is None else batches
    std_G = _std_G(score_N, groups)
    return torch.isclose(std_G, torch.zeros_like(std_G))[groups.index_N]


def normalised_sums(parts: Sequence[Tensor], weights: Sequence[float], groups: Groups, epsilon: float) -> Tensor:
    """Weighted sums of rewards that are normalised one by one, ``[N]`` float32; NaN for a row without any of them.

    Source: TRL ``GRPOTrainer._generate_and_score_completions``, `normalize_then_sum`.
    """
    parts_NK = torch.stack([part_N.float() for part_N in parts], 1)
    weights_K = torch.tensor(weights, dtype=torch.float32, device=parts_NK.device)
    sum_N = torch.zeros(len(parts_NK), dtype=torch.float32, device=parts_NK.device)
    for _, places in _places(groups):
        # The rewards of a row side by side, as TRL has them: the sums are then of the same order.
        values = parts_NK[groups.order_N[places]]
        std = _nanstd(values) if values.shape[1] > 1 else torch.zeros_like(values[:, :1])
        found = (values - values.nanmean(1, keepdim=True)) / (std + epsilon)
        sum_N[groups.order_N[places]] = (found * weights_K).nansum(2)
    return sum_N.masked_fill(parts_NK.isnan().all(1), torch.nan)


def _whole(groups: Groups) -> Groups:
    """All rows as one group."""
    return Groups.of(torch.zeros_like(groups.index_N))


def _std_G(score_N: Tensor, groups: Groups) -> Tensor:
    """Standard deviation of each group without its NaN values, ``[G]`` float32; 0 for a group of one row."""
    std_G = torch.zeros(len(groups), device=score_N.device)
    for chosen_k, values in by_size(score_N, groups):
        if values.shape[1] > 1:
            std_G[chosen_k] = _nanstd(values).squeeze(1)
    return std_G


def _nanstd(values: Tensor) -> Tensor:
    """Unbiased standard deviation over axis 1, which stays, without NaN values; NaN below two."""
    count = (~values.isnan()).sum(1, keepdim=True)
    variance = (values - values.nanmean(1, keepdim=True)).square().nanmean(1, keepdim=True)
    return torch.where(count > 1, (variance * (count / (count - 1))).sqrt(), torch.nan)
