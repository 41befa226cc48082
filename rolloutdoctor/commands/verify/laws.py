"""Laws that hold of advantages and losses whatever their formula: they need no trainer to compare with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rolloutdoctor.commands.verify.arguments import call
from rolloutdoctor.commands.verify.cases import CASES, Case
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.results.errors import UsageError

_LOST = 64 * torch.finfo(torch.float32).eps
"""Relative difference that some float32 roundings make."""


@dataclass(frozen=True)
class Law:
    """A change of a case, and what it leaves as it is.

    Attributes:
        says: the law, in a sentence.
        edit: returns the changed case; None: it is not about this one.
        back: returns the values of the changed case that are compared, and those of the case as it was.
    """

    says: str
    edit: Callable[[Case], Case | None]
    back: Callable[[Case, Tensor, Tensor], tuple[Tensor, Tensor]]


def _rewards(case: Case, edit: Callable[[Tensor], Tensor]) -> Case:
    """A case with other rewards, those of each reward function and of the greedy responses too."""
    edited = {name: edit(case.batch.per_row[name]) for name in ("reward", "reward_baseline")}
    functions = {name: edit(reward_N) for name, reward_N in case.batch.rewards.items()}
    return replace(case, batch=replace(case.batch, per_row={**case.batch.per_row, **edited}, rewards=functions))


def _reversed(case: Case) -> Case:
    """The responses of a case from the last to the first."""
    batch = case.batch
    order = torch.arange(len(batch)).flip(0)
    tokens = torch.cat([torch.arange(int(batch.rows[row]), int(batch.rows[row + 1])) for row in order])
    assert batch.groups is not None
    changed = RolloutBatch(
        step=batch.step,
        rows=torch.cat([torch.zeros(1, dtype=torch.int64), batch.rows.diff()[order].cumsum(0)]),
        groups=Groups.of(batch.group_N[order], len(batch.groups)),
        group_ids=batch.group_ids,
        per_row={name: x_N[order] for name, x_N in batch.per_row.items()},
        per_token={name: x_T[tokens] for name, x_T in batch.per_token.items()},
        rewards={name: x_N[order] for name, x_N in batch.rewards.items()},
        sample_ids=[batch.sample_ids[row] for row in order],
    )
    return replace(case, batch=changed)


def _is_masked(case: Case) -> Tensor:
    """Responses without a trained token, ``[N]``."""
    return case.response_mask.sum(1) == 0


def _other_reward_of_masked(case: Case) -> Case | None:
    is_masked = _is_masked(case)
    if not is_masked.any():
        return None
    # From the best of its group to the worst, so that estimators of ranks see it too.
    return _rewards(case, lambda reward_N: torch.where(is_masked, reward_N - 8.0, reward_N))


def _as_they_are(case: Case, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    return after, before


LAWS: Mapping[str, Law] = {
    "permutation": Law(
        "the order of the responses changes no advantage",
        _reversed,
        lambda case, before, after: (after.flip(0), before),
    ),
    "shift": Law(
        "a constant added to all rewards changes no advantage",
        lambda case: _rewards(case, lambda reward_N: reward_N + 2.0),
        _as_they_are,
    ),
    "scale": Law(
        "rewards times a constant change no advantage, up to the epsilon of the standard deviation",
        lambda case: _rewards(case, lambda reward_N: reward_N * 1024.0),
        _as_they_are,
    ),
    "equal rewards": Law(
        "equal rewards give advantages of exactly 0",
        lambda case: _rewards(case, lambda reward_N: torch.full_like(reward_N, 0.5)),
        lambda case, before, after: (after, torch.zeros_like(after)),
    ),
    "masked response": Law(
        "the reward of a fully masked response changes the advantage of no other one",
        _other_reward_of_masked,
        lambda case, before, after: (after[~_is_masked(case)], before[~_is_masked(case)]),
    ),
}
"""Name of a law of advantages to what it says."""


def check_laws(function: Callable[..., Any], *names: str, cases: tuple[Case, ...] = CASES, **more: object) -> None:
    """Check laws of a function that computes advantages.

    Args:
        function: as for `RolloutCases.check`.
        names: of the laws (`LAWS`): a shift leaves the advantages of every baseline of the group as they are, a scale
            those that are divided by a standard deviation.
        cases: that it is called with.
        more: further arguments of the function.

    Raises:
        AssertionError: if one does not hold; the message has the case and the first response.
        UsageError: if a name is none.
    """
    for name in names:
        if name not in LAWS:
            raise UsageError(f"no law {name!r}; there are {', '.join(LAWS)}")
    for case in cases:
        before = _values(call(function, case, more))
        for name in names:
            changed = LAWS[name].edit(case)
            if changed is None:
                continue
            mine, expected = LAWS[name].back(case, before, _values(call(function, changed, more)))
            size = 1 + torch.maximum(mine.abs(), expected.abs())
            limit = (
                torch.zeros_like(size) if name == "equal rewards" else _LOST * size * (1024 if name == "scale" else 1)
            )
            off = (mine - expected).abs() > limit
            if off.any():
                row = int(off.reshape(len(off), -1).any(1).nonzero()[0])
                raise AssertionError(
                    f"{LAWS[name].says}: it does in the case {case.name!r}, response {row}: "
                    f"{mine[row].reshape(-1)[0]:.6g}, and {expected[row].reshape(-1)[0]:.6g} expected"
                )


def _values(output: Tensor) -> Tensor:
    return output.detach().double()
