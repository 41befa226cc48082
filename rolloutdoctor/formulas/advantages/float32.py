"""Group statistics in the trainers' own float32 arithmetic, where rounding itself is the subject.

Everywhere else statistics are float64. Here the trainers' float32 reductions are repeated group by group, because
the mean of equal float32 values need not be that value, and a tiny standard deviation is not zero.

What is left after rounding depends on the order of the additions, and libraries choose theirs by the processor. So no
sum is a library's: every addition is written out (`row_sums`, `_sums_in_turn`), and the result is the same everywhere.
The trainer may have added in another order; `evaluation.radii` bounds what any order can give.
"""

from collections.abc import Iterator, Sequence
from functools import reduce

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


_LANES, _REGISTERS, _LEVELS = 8, 4, 4
"""How torch adds up on an x86 processor: values side by side, registers of them, and levels of partial sums."""


def row_sums(x: Tensor) -> Tensor:
    """Sum of each row, ``[k, n] -> [k]``, in the order of torch's `sum` over the last axis on an x86 processor.

    Every addition is one of its own, so that any other processor gets the same bits. Source: ATen ``SumKernel.cpp``,
    ``vectorized_inner_sum`` and, for fewer than eight values, ``scalar_inner_sum``.
    """
    aligned = x.shape[1] // _LANES * _LANES
    if not aligned:
        return _sum_of_registers(x)
    lanes = _sum_of_registers(x[:, :aligned].reshape(len(x), -1, _LANES))
    return _in_turn([x.new_zeros(len(x)), *x[:, aligned:].unbind(1), *lanes.unbind(1)])


def _sums(x: Tensor) -> Tensor:
    """The same over axis 1 of several values side by side, ``[k, n, K] -> [k, K]``, or of one, ``[k, n] -> [k]``.

    Source: ATen ``SumKernel.cpp``, ``vectorized_outer_sum`` and, below eight columns, ``scalar_outer_sum``.
    """
    columns = x.shape[2] if x.dim() > 2 else 1
    if columns == 1:
        return row_sums(x.flatten(1)).view(x[:, 0].shape)
    block = _REGISTERS * (_LANES if columns >= _LANES else 1)
    aligned = columns // block * block
    return torch.cat([_cascade(x[:, :, :aligned]), _sum_of_registers(x[:, :, aligned:])], 1)


def _sum_of_registers(x: Tensor) -> Tensor:
    """Add up over axis 1 in four registers, ``[k, n, ...] -> [k, ...]``."""
    aligned = x.shape[1] // _REGISTERS * _REGISTERS
    first, *others = _cascade(x[:, :aligned].reshape(len(x), aligned // _REGISTERS, _REGISTERS, *x.shape[2:])).unbind(1)
    return _in_turn([first, *x[:, aligned:].unbind(1), *others])


def _cascade(x: Tensor) -> Tensor:
    """Add up over axis 1, where a partial sum of many values goes to the next level, ``[k, n, ...] -> [k, ...]``."""
    nothing = x.new_zeros(x.shape[:1] + x.shape[2:])
    levels = [nothing] * _LEVELS
    power = max(4, (x.shape[1] - 1).bit_length() // _LEVELS)
    for count, values in enumerate(x.unbind(1), 1):
        levels[0] = levels[0] + values
        for level in range(1, _LEVELS):
            if count % (1 << level * power):
                break
            levels[level], levels[level - 1] = levels[level] + levels[level - 1], nothing
    return _in_turn(levels)


def _in_turn(terms: Sequence[Tensor]) -> Tensor:
    """Add one after another."""
    return reduce(torch.add, terms)


def _known_means(x: Tensor) -> Tensor:
    """Mean over axis 1, which stays, without NaN values; NaN of none."""
    return _sums(torch.where(x.isnan(), 0.0, x)).unsqueeze(1) / (~x.isnan()).sum(1, keepdim=True)


def residue(score_N: Tensor, groups: Groups, epsilon: float) -> Tensor:
    """Advantage that float32 GRPO gives each row, ``[N]`` float32: ``(s - mean) / (std + epsilon)``.

    Groups of one get 0. For equal scores the exact result is 0 and this one is the rounding residue; its sign and
    size depend on the order of summation, here that of torch on an x86 processor: a GPU gives another one.
    """
    sorted_N = torch.zeros(len(score_N), dtype=torch.float32, device=score_N.device)
    for chosen_k, values in by_size(score_N, groups):
        size = values.shape[1]
        if size == 1:
            continue
        mean = row_sums(values)[:, None] / size
        # torch takes the deviation of one group from its float32 mean, in float64; that of several rows at once it
        # computes otherwise, and gets 0 where this does not.
        squares = row_sums((values.double() - mean.double()).square())[:, None]
        std = (squares / (size - 1)).sqrt().float()
        advantage = (values - mean) / (std + epsilon)
        sorted_N[groups.offsets[chosen_k][:, None] + torch.arange(size, device=score_N.device)] = advantage
    unsorted_N = torch.empty_like(sorted_N)
    unsorted_N[groups.order_N] = sorted_N
    return unsorted_N


def centred(score_N: Tensor, groups: Groups) -> Tensor:
    """Scores less the mean of their group, ``[N]`` float32, bit for bit ``x - x.mean()``; NaN for a NaN score.

    NaN scores are taken out before the mean, which is that of the CPU. Source: prime-rl ``GRPOAlgorithm.score_group``.
    """
    return score_N.float() - means(score_N, groups)


def means(score_N: Tensor, groups: Groups) -> Tensor:
    """Mean of the scores of each row's group, ``[N]`` float32; NaN scores are taken out, and their rows have 0."""
    value_N = score_N.float()
    has = ~value_N.isnan()
    scored = Groups.of(torch.unique(groups.index_N[has], return_inverse=True)[1])
    mean_G = torch.zeros(len(scored), device=score_N.device)
    for chosen_k, values in by_size(value_N[has], scored):
        mean_G[chosen_k] = row_sums(values) / values.shape[1]
    mean_N = torch.zeros_like(value_N)
    mean_N[has] = mean_G[scored.index_N]
    return mean_N


def centred_by_weight(score_N: Tensor, weight_N: Tensor, groups: Groups) -> Tensor:
    """Scores less the weighted mean of their group, ``[N]`` float32: ``s - (w * s).sum() / w.sum()``; NaN for a NaN.

    Source: prime-rl ``default_advantage_fn`` with ``length_weighted_baseline``.
    """
    value_N = score_N.float()
    clean_N = value_N.nan_to_num(0.0)
    mean_G = torch.zeros(len(groups), device=score_N.device)
    parts = (by_size(x_N, groups) for x_N in (weight_N * clean_N, weight_N))
    for (chosen_k, products), (_, weights) in zip(*parts, strict=True):
        mean_G[chosen_k] = row_sums(products) / row_sums(weights)
    return value_N - mean_G[groups.index_N]


def standard_scores(
    score_N: Tensor, groups: Groups, scale: str, epsilon: float, batches: Groups | None = None
) -> Tensor:
    """Centred and scaled scores in float32, ``[N]``: ``(r - mean) / (std + epsilon)``, 0 for NaN.

    Bit for bit TRL's advantages on an x86 processor. For equal rewards they are the rounding of these sums: a GPU has
    another one.
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
        mean_G[chosen_k] = _known_means(values).squeeze(1)
    advantage_N = score_N.float() - mean_G[groups.index_N]
    if scale != "none":
        wider = groups if scale == "group" else _whole(groups) if batches is None else batches
        advantage_N = advantage_N / (_std_G(score_N, wider)[wider.index_N] + epsilon)
    return advantage_N.nan_to_num(nan=0.0)


def one_pass_scores(
    score_N: Tensor, groups: Groups, epsilon: float, *, others: bool, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Scores as `leave_one_out_score` (`others`) or `grpo` have them, the variance in one pass, ``[N]`` of `dtype`.

    ``(r - b) / (std + epsilon)``, undivided where the variance comes out as 0 or below. Upstream's sums are products of
    a matrix and a vector, whose order is the library's; here the rows of a group are added up one after another, as MKL
    does on processors of other makers than Intel. `evaluation.radii.advantages.one_pass_range` bounds other orders.
    Source: NeMo-RL ``calculate_baseline_and_std_per_prompt``, ``GRPOAdvantageEstimator``.

    Args:
        score_N: ``[N]`` rewards.
        groups: the rows that are compared.
        epsilon: added to the standard deviation.
        others: baseline and deviation of a row are those of its siblings, not of its whole group.
        dtype: that the trainer computes in.
    """
    sorted_N = score_N[groups.order_N].to(dtype)
    score_by_group_N = torch.zeros_like(sorted_N)
    for size in groups.sizes:
        if size < 2:
            continue
        _, places = _of_size(groups, size)
        value = sorted_N[places]
        count = torch.tensor(size - int(others), dtype=dtype, device=value.device)
        mean, square = (_sums_in_turn(x, others=others) / count for x in (value, value.square()))
        std = ((square - mean.square()) * (count / (count - 1))).sqrt().nan_to_num(0)
        centred = value - mean
        score_by_group_N[places] = torch.where(std > 0, centred / (std + epsilon), centred)
    unsorted_N = torch.empty_like(score_by_group_N)
    unsorted_N[groups.order_N] = score_by_group_N
    return unsorted_N


def _sums_in_turn(x: Tensor, *, others: bool) -> Tensor:
    """Sum of the values of each row of a matrix, or of the other values of it, one after another, ``[k, n]``."""
    votes = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype, device=x.device)
    if others:
        votes.fill_diagonal_(0)
    return _in_turn([vote * values[:, None] for vote, values in zip(votes.unbind(0), x.unbind(1), strict=True)])


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
        weighted = (values - _known_means(values)) / (std + epsilon) * weights_K
        sum_N[groups.order_N[places].flatten()] = row_sums(torch.where(weighted.isnan(), 0.0, weighted).flatten(0, 1))
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
    variance = _known_means((values - _known_means(values)).square())
    return torch.where(count > 1, (variance * (count / (count - 1))).sqrt(), torch.nan)
