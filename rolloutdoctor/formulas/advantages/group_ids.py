"""Group ids that verl's vectorised estimators read as whole numbers: "7" and "007" are then one group."""

from collections.abc import Sequence

import torch

from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.results.errors import TRAINER, CannotComputeError

LARGEST_ID = 2**40
"""verl makes float32 vectors as long as the largest id: from here on each takes 4 TiB and more."""


def by_number(groups: Groups, group_ids: Sequence[str]) -> Groups:
    """Gather the rows by the number that their group id spells, if every id of the step spells one.

    Without ids, with an id that is not a whole number of 64 bits, and with numbers that all differ, the groups are
    those given. Source: verl ``as_torch_index``, whose numbers are indices into the statistics of the groups.

    Raises:
        CannotComputeError: if a number cannot be an index, where verl fails.
    """
    numbers = _numbers(group_ids)
    if numbers is None:
        return groups
    lowest, highest = min(numbers), max(numbers)
    if lowest < 0:
        raise CannotComputeError(
            f"the vectorised estimators take group ids that are whole numbers as indices, and {lowest} is below 0; "
            f"{TRAINER} fails here (IndexError)"
        )
    if highest >= LARGEST_ID:
        raise CannotComputeError(
            f"the vectorised estimators take group ids that are whole numbers as indices, and {highest} asks for a "
            f"vector of as many groups; {TRAINER} fails here (out of memory)"
        )
    places = {number: place for place, number in enumerate(dict.fromkeys(numbers))}
    if len(places) == len(groups):
        return groups
    place_G = torch.tensor([places[number] for number in numbers], device=groups.index_N.device)
    return Groups.of(place_G[groups.index_N], len(places))


def _numbers(group_ids: Sequence[str]) -> list[int] | None:
    """The whole numbers that the ids spell, by Python's rules as verl's; None if one of them spells none."""
    numbers = []
    for each in group_ids:
        try:
            number = int(each)
        except ValueError:
            return None
        if not -(2**63) <= number < 2**63:
            return None
        numbers.append(number)
    return numbers or None
