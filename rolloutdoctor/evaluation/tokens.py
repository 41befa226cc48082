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


class NeedsPassOfItsOwn(Exception):  # noqa: N818 - nothing went wrong
    """Some steps cannot share a pass: a block of theirs goes the general way, where rounding depends on its rows."""


def token_pass(
    batch: RolloutBatch,
    parts: Mapping[str, RowResult],
    dtype: torch.dtype,
    per_token: Collection[str],
    visit: Callable[[TokenBlock], None] | None = None,
) -> dict[str, tuple[TokenSums, PerToken | None]]:
    """Run the second pass for all objectives, block by block; token values are kept of those in `per_token`.

    Each block is shown to `visit` when its parts are done.

    Raises:
        NeedsPassOfItsOwn: if the batch holds several steps, and not all of it can be summed up in the short way.
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
    sharing = [other for other in others if other.shares]
    host = reference.host([reference, *sharing])
    alone = [] if host is None else [(other, other.host([other])) for other in others if not other.shares]
    for rows, tokens in cut(batch):
        for block in parts_of(batch, rows, tokens, dtype):
            added: list[GeneralEvaluator] = []
            if host is not None and host.add(block):
                added = [reference, *sharing]
                for other, own in alone:
                    if own is not None and own.add(block):
                        host.compare(own)
                        added.append(other)
            left = [other for other in others if other not in added]
            if (left or not added) and batch.place_N is not None:
                raise NeedsPassOfItsOwn
            if left or not added:
                grad_T = reference.values(block)[-1] if added else reference.add(block)
                for other in left:
                    other.add_compared(block, grad_T)
            for each in dict.fromkeys([*sharing, *added]):
                each.keep(block)
        if visit is not None:
            visit(TokenBlock(batch, rows, tokens))
    return {name: each.result() for name, each in passes.items()}
