"""The first pruning, free of scale: logged advantages are a factor of each group times the centred scores, or not."""

from dataclasses import replace

import torch
from torch import Tensor

from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.objective.stages import unscaled_essence
from rolloutdoctor.search.candidates import Candidate
from rolloutdoctor.search.step import Step

_LOOSE = 1e-3
"""Share of a group's largest advantage that the scores may leave: rounding takes far less."""


class CentredScores:
    """Filter of the configurations that could have made a step's advantages, whatever they divide by."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._known: dict[tuple[object, ...], bool] = {}

    def fits(self, candidate: Candidate) -> bool:
        """Return False if no scale makes a configuration give the logged advantages of the step.

        Args:
            candidate: a configuration with one advantage for each row.
        """
        objective = candidate.objective
        rule = objective.advantage
        is_affine = rule.whitened or rule.normalised or rule.spec.normalised_over is not None
        key = (unscaled_essence(objective), is_affine, candidate.edits)
        if key not in self._known:
            bare = replace(
                rule, scale="none", whitened=False, normalised=False, epsilon=1e-6, biased_std=False,
                epsilon_in_root=False,
            )  # fmt: skip
            self._known[key] = self._is_factor(
                replace(candidate, objective=replace(objective, advantage=bare)), affine=is_affine
            )
        return self._known[key]

    def _is_factor(self, bare: Candidate, *, affine: bool) -> bool:
        logged_N = self._logged(bare.objective)
        evaluation = self._step.rows(bare)
        if logged_N is None or evaluation is None or evaluation.rows is None or evaluation.batch.groups is None:
            return True
        groups, centred_N = evaluation.batch.groups, evaluation.rows.advantage_N
        assert centred_N is not None
        able_N = ~(logged_N.isnan() | centred_N.isnan())
        own_N, its_N = torch.where(able_N, centred_N, 0.0), torch.where(able_N, logged_N, 0.0)
        if affine:
            count_G = groups.total(able_N).clamp(min=1)
            own_N, its_N = (
                torch.where(able_N, x_N - (groups.total(x_N) / count_G)[groups.index_N], 0.0) for x_N in (own_N, its_N)
            )
        factor_G = groups.total(own_N * its_N) / groups.total(own_N.square()).clamp(min=1e-12)
        left_N = (its_N - factor_G[groups.index_N] * own_N).abs()
        size_N = groups.total(its_N.abs())[groups.index_N]
        # Where all scores are equal the advantages are what rounding left, over epsilon.
        spread_N = groups.total(own_N.abs())[groups.index_N] > 1e-6
        return not bool((left_N[able_N & spread_N] > _LOOSE * size_N[able_N & spread_N]).any())

    def _logged(self, objective: Objective) -> Tensor | None:
        logged = self._step.logged(objective)
        if "advantage" in logged.batch.per_row:
            return logged.batch.column("advantage").double()
        if logged.advantage_range is None:
            return None
        low_N, high_N = logged.advantage_range
        return torch.where(low_N > high_N, torch.nan, (low_N + high_N) / 2)


def has_row_values(step: Step, objective: Objective) -> bool:
    """Return False if the tokens of a row have different logged advantages.

    Args:
        step: a step.
        objective: one with one advantage for each row.
    """
    span = step.logged(objective).advantage_range
    if span is None:
        return True
    low_N, high_N = span
    filled_N = low_N <= high_N
    size = torch.maximum(low_N.abs(), high_N.abs())[filled_N]
    return not bool((high_N - low_N)[filled_N].gt(_LOOSE * size).any())
