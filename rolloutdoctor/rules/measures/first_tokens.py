"""The first response tokens of each row."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from rolloutdoctor.evaluation.token_measures import TokenBlock
from rolloutdoctor.ops.prefix_hash import scramble

COLUMNS = {"sampler": "rollout_log_probs", "trainer": "old_log_probs"}


def first_tokens(block: TokenBlock, count: int, names: Collection[str] = tuple(COLUMNS)) -> Mapping[str, Tensor]:
    """Return a hash of the first one, two and so on tokens of each row, and the log-probs of the last of these.

    ``[n, count]`` int64 and float64. NaN where a row is shorter, or a token is not trained, so that what comes from
    elsewhere is left out. Nothing without a column.

    Args:
        block: the rows.
        count: so many tokens of each.
        names: whose log-probs: the sampler's, the trainer's or both.
    """
    pair = {name: COLUMNS[name] for name in names}
    if not block.has("response_ids", *pair.values()):
        return {}
    device = block.runs.offsets.device
    ahead = torch.arange(count, device=device)
    is_known_nK = ahead < block.runs.lengths[:, None]
    if not len(block):
        unknown_nK = torch.full(is_known_nK.shape, torch.nan, dtype=torch.float64, device=device)
        return {"through": is_known_nK.long()} | dict.fromkeys(pair, unknown_nK)
    places_nK = (block.runs.offsets[:-1, None] + ahead).clamp(max=len(block) - 1)
    hash_nK = scramble(block.column("response_ids")[places_nK].long() + ((ahead + 1) << 32))
    through_nK = hash_nK.where(is_known_nK, 0).cumsum(1)
    is_known_nK = is_known_nK & block.trained_T[places_nK]
    first_N = block.batch.first_update_N
    if first_N is not None:
        is_known_nK = is_known_nK & first_N[block.rows, None]
    columns = {key: block.column(name)[places_nK].double() for key, name in pair.items()}
    return {"through": through_nK, **{key: x_nK.where(is_known_nK, torch.nan) for key, x_nK in columns.items()}}


def contexts_of(rows: Mapping[str, Tensor], prompt_N: Tensor | None) -> dict[str, Tensor | None]:
    """Return a hash of prompt and first tokens, and the log-probs there to 2^-20, ``NAME_PLACE`` to ``[N]``.

    Args:
        rows: what `first_tokens` returned.
        prompt_N: hash of each row's prompt, 0 where unknown; None: no column says.
    """
    contexts: dict[str, Tensor | None] = {}
    for place, through_N in enumerate(rows["through"].unbind(1) if rows else ()):
        contexts[f"context_{place}"] = scramble((0 if prompt_N is None else prompt_N) ^ scramble(through_N + place))
        for name in COLUMNS.keys() & rows.keys():
            contexts[f"{name}_{place}"] = (rows[name][:, place] * 2**20).round() / 2**20
    return contexts
