"""The worst places of one step or several, as examples."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from rolloutdoctor.ops.by_step import ByStep
from rolloutdoctor.results.findings import Example


def worst_places(weight: Tensor, by_step: ByStep, keep: int) -> Iterator[tuple[int, float, int]]:
    """Step, weight and place of what can be among the largest positive weights.

    Of each step as many as are kept, the first of equals; none that is smaller than as many others. NaN is no weight.
    """
    places = (weight > 0).nonzero().squeeze(1)
    if not len(places):
        return
    values = weight[places]
    if len(values) > keep:
        least = torch.topk(values, keep).values[-1]
        places, values = places[values >= least], values[values >= least]
    order = torch.sort(values, descending=True, stable=True).indices
    taken: dict[int, int] = {}
    steps = by_step.step_N[places]
    for step, value, place in zip(*(x[order].tolist() for x in (steps, values, places)), strict=True):
        taken[step] = taken.get(step, 0) + 1
        if taken[step] <= keep:
            yield step, value, place


def worst_examples(
    found: Sequence[tuple[float, int, str | None, str, int]], note: Callable[[int], str], keep: int
) -> list[Example]:
    """Examples for some places, the worst of them if there are more than are kept.

    Args:
        found: weight, step, group, row and number of each place.
        note: what is to be seen at the place of a number.
        keep: how many are kept.
    """
    worst = found
    if len(found) > keep:
        # The order in which examples are kept: see `RuleState`.
        worst = sorted(found, key=lambda one: (-one[0], one[1], one[2] or "", one[3]))[:keep]
    return [Example(step, group, sample, value, note(place)) for value, step, group, sample, place in worst]
