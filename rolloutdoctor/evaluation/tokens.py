"""The second pass of an evaluation: the terms of every token and their derivative, reduced to sums per row.

Blocks of whole rows go through in turn, part by part, so that temporaries stay in the cache. Of several objectives the
first is the reference: another one is evaluated on the rows where it can differ from it, and shares its sums elsewhere.
"""

from collections.abc import Callable, Collection, Mapping

import torch

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.blocks import cut, parts_of
from rolloutdoctor.evaluation.general import GeneralEvaluator
from rolloutdoctor.evaluation.layouts import layout_of
from rolloutdoctor.evaluation.rows import RowResult, in_separate_batches
from rolloutdoctor.evaluation.token_measures import TokenBlock
from rolloutdoctor.evaluation.token_sums import PerToken, TokenSums


def token_pass(
    batch: RolloutBatch,
    parts: Mapping[str, RowResult],
    dtype: torch.dtype,
    per_token: Collection[str],
    visit: Callable[[TokenBlock], None] | None = None,
    block_tokens: int | None = None,
) -> dict[str, tuple[TokenSums, PerToken | None]]:
    """Run the second pass for all objectives, block by block; token values are kept of those in `per_token`.

    Each block is shown to `visit` when its parts are done.
    """
    apart = {name: in_separate_batches(batch, part.objective) for name, part in parts.items()}
    layouts = {separate: layout_of(batch, separate=separate) for separate in set(apart.values())}
    passes = {
        name: GeneralEvaluator(part, batch, layouts[apart[name]], dtype, per_token=name in per_token)
        for name, part in parts.items()
    }
    reference, *others = passes.values()
    for other in others:
        other.compare_with(reference)
    for rows, tokens in cut(batch, block_tokens):
        for block in parts_of(batch, rows, tokens, dtype):
            grad_T = reference.add(block)
            for other in others:
                other.add_compared(block, grad_T)
        if visit is not None:
            visit(TokenBlock(batch, rows, tokens))
    return {name: each.result() for name, each in passes.items()}
