"""Sums over the gap of sampler and trainer in a step: its distribution, and what importance weights keep."""

from math import log
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.measures.sampled_rows import LoggedGap, Sample
    from rolloutdoctor.rules.step import StepView

LAGS = range(8)
"""Version lags that are counted separately."""

SURE, APART = log(0.5), 2.0
"""A token that the sampler gave one half or more, and the trainer two nats less."""

POSITIONS = (0, 1, 4, 16, 64, 256, 1024, 4096, 16384)
"""Positions in a response at which a bin of positions begins."""

OFTEN_KEPT = 64
"""Places of a confident disagreement that are counted separately."""

TOKEN_CAP, TOKEN_BAND, ROW_CAP, ROW_BAND = 2.0, (0.5, 5.0), 3.0, (0.999, 1.001)
"""The usual bounds: truncated weights of tokens (verl), IcePop's mask, TRL's cap of sequences, verl's geometric
mean."""

FAR = 0.1
"""Nats between two log-probs beyond what kernels were reported to make of the same weights and inputs."""


def confident_places(block: "TokenBlock", gap: "LoggedGap") -> "Tensor":
    """Positions of the first tokens of each row that the sampler alone is sure of, ``[n, 4]`` int64; -1: no more."""
    import torch

    found_N = torch.full((len(block.runs), 4), -1, dtype=torch.int64, device=block.runs.offsets.device)
    if gap.low > -APART:
        return found_N
    sampler_T = block.column("rollout_log_probs")
    places = ((gap.apart_T <= -APART) & (sampler_T >= SURE) & (sampler_T < 0)).nonzero().squeeze(1)
    row = torch.searchsorted(block.runs.offsets, places, right=True) - 1
    number_of = torch.arange(len(places), device=places.device) - torch.searchsorted(row, row)
    few = number_of < found_N.shape[1]
    found_N[row[few], number_of[few]] = places[few] - block.runs.offsets[row[few]]
    return found_N


def place_keys(steps: "StepView", place_N: "Tensor") -> list[dict[str, float]]:
    """Numbers of the prompts and positions of some tokens, of each step, as values under ``place``."""
    from rolloutdoctor.ops.prefix_hash import scramble

    kept_keys: list[set[int]] = steps.nothing(set)
    batch, (row, column) = steps.batch, (place_N >= 0).nonzero(as_tuple=True)
    # Without the prompts themselves, those of two steps count as two.
    prompt_N = scramble((batch.row_N if batch.groups is None else batch.group_N) + (batch.number_N << 32))
    if batch.prompts is not None:
        prompt_N = prompt_N.where(batch.prompts == 0, batch.prompts)
    keys = scramble(prompt_N[row] + place_N[row, column]).tolist()
    for step, key in zip(steps.by_step.step_N[row].tolist(), keys, strict=True):
        # A number that float64 holds.
        kept_keys[step].add(key & (2**52 - 1))
    return [{f"place:{key}": 1.0 for key in sorted(keys)[:OFTEN_KEPT]} for keys in kept_keys]


def sums_of(sample: "Sample", lag_N: "NDArray[np.int64] | None") -> dict[str, Any]:
    """Distribution and weights of the sampled rows of each step."""
    import numpy as np

    from rolloutdoctor.ops.gap_bins import BINS, CENTRES, bins_of
    from rolloutdoctor.rules.measures.sampler_gap import UNSURE

    gap, weight, tokens = sample.apart, sample.weight, sample.tokens_by_step
    size, cut = sample.size, np.minimum(weight, TOKEN_CAP)
    is_within = (weight >= TOKEN_BAND[0]) & (weight <= TOKEN_BAND[1])
    within, inside = (weight, tokens) if is_within.all() else (weight[is_within], tokens.only(is_within))
    is_filled = sample.length > 0
    rows, total = sample.by_step.only(is_filled), sample.by_row(gap)[is_filled]
    mean, row_weight = np.exp(total / sample.length[is_filled]), np.exp(np.minimum(total, log(ROW_CAP)))
    of_lag: dict[str, Any] = {}
    if lag_N is not None:
        lag = lag_N[sample.row]
        each = {"lag": sample.length, "lag_size": sample.by_row(size)}
        of_lag = {name: (sample.by_step.histogram(lag, len(LAGS), x), LAGS) for name, x in each.items()}
    is_unsure = (sample.sampler + sample.trainer < 2 * UNSURE) & (sample.sampler != 0)
    unsure, far = sample.by_row(is_unsure), sample.by_row(is_unsure & (size > FAR))
    is_known = unsure >= 4 if lag_N is None else (unsure >= 4) & (lag_N[sample.row] == 0)
    is_apart = 2 * far >= unsure
    apart, near = sample.by_step.only(is_known & is_apart), sample.by_step.only(is_known & ~is_apart)
    return {
        "apart": apart.size,
        "apart_tokens": apart.count(unsure[is_known & is_apart]),
        "beside": near.size,
        "beside_tokens": near.count(unsure[is_known & ~is_apart]),
        "beside_far": near.count(far[is_known & ~is_apart]),
        "rows": rows.size,
        "row_weight": rows.sum(row_weight),
        "row_square": rows.sum(np.square(row_weight)),
        "rows_over": rows.count(total > log(ROW_CAP)),
        "rows_near": rows.count((mean >= ROW_BAND[0]) & (mean <= ROW_BAND[1])),
        "seen": tokens.size,
        "size": (tokens.histogram(bins_of(size), BINS), CENTRES),
        "gap": tokens.sum(gap),
        "off": tokens.count(abs(weight - 1) > 0.1),
        "weight": tokens.sum(weight),
        "square": tokens.sum(np.square(weight)),
        "cut_weight": tokens.sum(cut),
        "cut_square": tokens.sum(np.square(cut)),
        "inside": inside.size,
        "inside_weight": inside.sum(within),
        "inside_square": inside.sum(np.square(within)),
        "at": (sample.by_place(None, POSITIONS), POSITIONS),
        "at_size": (sample.by_place(size, POSITIONS), POSITIONS),
        **of_lag,
    }
