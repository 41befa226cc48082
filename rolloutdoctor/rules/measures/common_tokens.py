"""Unlikely tokens that every response of a group has at one place: nobody sampled them."""

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.token_measures import TokenBlock
from rolloutdoctor.ops.elementwise import outside
from rolloutdoctor.ops.segments import pick

LEAST = 4.0
"""Nats of a token that counts: a model samples few with a probability below 0.018."""

BEYOND = 40.0
"""Nats from which on a group's common tokens are beyond chance: 4e-18, and 4e-12 in a run of a million groups."""

SEED = 30.0
"""Nats of a common prefix that siblings do not share by chance: they share a seed, which is another matter."""

COLUMNS = ("rollout_log_probs", "old_log_probs")
"""Log-probs that say how likely a token was, best first."""


def unlikely_tokens(block: TokenBlock) -> Mapping[str, Tensor]:
    """Return the trained tokens of a block below minus `LEAST` nats: place in its row, id and nats of each.

    `rare` says how many each row has, ``[n]``.
    """
    name = next((name for name in COLUMNS if block.is_logged(name)), None)
    if name is None or not block.is_logged("response_ids"):
        return {}
    value_T = block.column(name)
    places = outside(value_T, -LEAST, math.inf)
    places = block.runs.offsets[:0] if places is None else places
    places = places[pick(block.trained_T, places) & pick(value_T, places).isfinite()]
    row = torch.searchsorted(block.runs.offsets, places, right=True) - 1
    return {
        "rare": torch.bincount(row, minlength=len(block.runs)),
        "rare_place": places - block.runs.offsets[row],
        "rare_id": pick(block.column("response_ids"), places).long(),
        "rare_nats": -pick(value_T, places).double(),
    }


def can_agree(batch: RolloutBatch) -> Tensor:
    """Groups with two or more rows that have tokens, ``[G]`` bool."""
    assert batch.groups is not None
    return batch.groups.total(batch.rows.diff() > 0) > 1


def common_tokens(batch: RolloutBatch, measured: Mapping[str, Tensor]) -> Tensor | None:
    """Count the trained tokens of each row that its group shares more often than chance, ``[N]`` float64.

    Of a token that all rows of a group have at one place, let n be the nats of all rows but the least likely one. That
    the others drew what this one drew has the probability exp(-n). With L places the product over the places of
    1 - 1/L + exp(n) / L where the rows agree, and 1 - 1/L elsewhere, has the mean 1 or less if the rows are independent
    draws, and exceeds exp(`BEYOND`) with a probability below exp(-`BEYOND`) (Markov).

    Places count after the rows have parted: before, they share a context and perhaps a seed. Groups that share a prefix
    beyond chance are left out. Tokens next to such a one, trained and the same in all rows, belong to it.

    Args:
        batch: a step, or several.
        measured: what `unlikely_tokens` gave, joined over the blocks.

    Returns:
        None where there are no groups, or no log-probs are known.
    """
    if "rare" not in measured or batch.groups is None:
        return None
    leaked_N = torch.zeros(len(batch), dtype=torch.float64)
    lengths = batch.rows.diff().cpu().numpy()
    group = batch.groups.index_N.cpu().numpy()
    rows_of = np.bincount(group, weights=lengths > 0, minlength=len(batch.groups)).astype(np.int64)
    row = np.arange(len(batch)).repeat(measured["rare"].cpu().numpy())
    place, ids, nats = (measured[f"rare_{name}"].cpu().numpy() for name in ("place", "id", "nats"))
    # Only places at which every row of a group has an unlikely token can be common to it: mostly there is none.
    key = group[row] * np.int64(lengths.max(initial=0) + 1) + place
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(key[order]) != 0]) if len(order) else order
    if not len(starts):
        return leaked_N
    its_group = group[row[order[starts]]]
    counts = np.diff(np.r_[starts, len(order)])
    low, high = (each.reduceat(ids[order], starts) for each in (np.minimum, np.maximum))
    beyond = np.add.reduceat(nats[order], starts) - np.maximum.reduceat(nats[order], starts)
    is_common = (counts == rows_of[its_group]) & (counts > 1) & (low == high)
    total = np.bincount(its_group[is_common], beyond[is_common], minlength=len(rows_of))
    for number in np.flatnonzero(total >= BEYOND):
        is_part = is_common & (its_group == number)
        rows = np.flatnonzero((group == number) & (lengths > 0))
        spans = _leaked(batch, rows, place[order[starts[is_part]]], beyond[is_part])
        leaked_N[torch.from_numpy(rows)] = float(spans)
    return leaked_N


def _leaked(batch: RolloutBatch, rows: NDArray[np.int64], places: NDArray[np.int64], nats: NDArray[np.float64]) -> int:
    """Common trained tokens of each row of a group, if chance is out.

    Args:
        batch: the step.
        rows: of the group.
        places: at which all have the same unlikely token, ascending.
        nats: of these in all rows but the least likely one.
    """
    starts = batch.rows.cpu().numpy()[rows]
    size = int(batch.rows.diff().cpu().numpy()[rows].min())

    def columns(name: str) -> NDArray[np.float64]:
        return np.stack([batch.tokens_of(name, slice(at, at + size)).cpu().numpy() for at in starts.tolist()])

    ids = columns("response_ids")
    same = (ids == ids[0]).all(0)
    parted = int(same.argmin()) if not same.all() else size
    after = places > parted
    gains = np.logaddexp(math.log1p(-1 / size), nats[after] - math.log(size)) if size > 1 else nats[after]
    if float(gains.sum()) + (size - len(gains)) * (math.log1p(-1 / size) if size > 1 else 0.0) < BEYOND:
        return 0
    value = columns(next(name for name in COLUMNS if name in batch.per_token))[:, :parted]
    if batch.has("response_mask"):
        trained = columns("response_mask").astype(bool)
        same &= trained.all(0)
        value = np.where(trained[:, :parted], value, 0.0)
    if float(-np.nan_to_num(value).sum(1).max(initial=-math.inf)) >= SEED:
        return 0
    # Runs of tokens that are the same, after the parting, with one of the places in them.
    run = np.cumsum(np.diff(np.r_[False, same]) == 1) * same
    held = np.zeros(int(run.max(initial=0)) + 1, dtype=bool)
    held[run[places[after]]] = True
    held[0] = False
    return int(held[run[parted:]].sum())
