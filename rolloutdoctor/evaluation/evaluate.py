"""`evaluate(batch, objective)`: advantages, loss, KL and d loss / d log-prob of a step under an objective.

It makes two passes. The first is over rows: scores, baseline rows, advantages and the weight of each row's tokens in
the loss. The second is over tokens, in blocks of whole rows that fit the cache: policy term, KL, ratio and the exact
derivative of the loss with respect to every logged log-prob, reduced to one float64 sum per row. Nothing is padded,
and nothing is kept per token unless the caller asks.

The derivative lives in log-prob space: it is ``dLoss / d policy_log_probs``, not a gradient of parameters.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.entropy import bonus_tokens
from rolloutdoctor.evaluation.rows import RowResult, compared_groups, evaluate_rows, in_scope, row_parts, stored_kl
from rolloutdoctor.evaluation.scores import reward_kl_tokens
from rolloutdoctor.evaluation.token_measures import TokenBlock
from rolloutdoctor.evaluation.token_sums import PerToken, TokenSums
from rolloutdoctor.evaluation.tokens import token_pass
from rolloutdoctor.objective.objective import Objective, Scope
from rolloutdoctor.objective.required_columns import incomplete, loss_columns, optional_columns
from rolloutdoctor.ops import elementwise as el
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.evaluation_mode import one_thread
from rolloutdoctor.results.errors import CannotComputeError, naming

if TYPE_CHECKING:
    import polars as pl

__all__ = [
    "AS_CONFIGURED",
    "Evaluation",
    "Losses",
    "PerToken",
    "RowResult",
    "TokenSums",
    "compared_groups",
    "evaluate",
    "evaluate_all",
    "evaluate_rows",
    "reward_kl_tokens",
    "stored_kl",
]

AS_CONFIGURED = ""
"""Label of the evaluation that the others are compared with."""


class Losses(NamedTuple):
    """Loss and gradient of each of several steps, ``[S]`` float64; see the properties of `Evaluation`."""

    policy: NDArray[np.float64]
    kl: NDArray[np.float64]
    entropy: NDArray[np.float64]
    total: NDArray[np.float64]
    at_ratio_one: NDArray[np.float64]
    grad_l1: NDArray[np.float64]
    grad_l2: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A step under an objective.

    Attributes:
        batch: the step.
        objective: what was evaluated.
        rows: the first pass; None if a column that the advantages need is missing.
        tokens: the second pass; None if a column that the loss needs is missing.
        dtype: of the token values.
        per_token: the token values, if they were asked for.
        whole: the evaluation of several steps that this one was cut out of, and its rows there; else None.
    """

    batch: RolloutBatch
    objective: Objective
    rows: RowResult | None
    tokens: TokenSums | None
    dtype: torch.dtype = torch.float32
    per_token: PerToken | None = None
    whole: "tuple[Evaluation, slice] | None" = None

    @cached_property
    def losses(self) -> Losses:
        """Loss and gradient of each step; there is one but for steps that were joined."""
        part, by_step = self._part(), self.batch.by_step
        policy, kl = by_step.sum(part.policy_N * part.policy_weight_N), by_step.sum(part.kl_loss_N * part.weight_N)
        entropy = np.zeros_like(policy) if self.objective.entropy_bonus is None else by_step.sum(self.entropy_loss_N)
        at_ratio_one = by_step.sum(part.loss_at_ratio_one_N * part.policy_weight_N)
        # A loss that is infinite or undefined is one.
        with el.unwarned():
            return Losses(
                policy=policy,
                kl=kl,
                entropy=entropy,
                total=policy + kl + entropy,
                at_ratio_one=kl + entropy + at_ratio_one,
                grad_l1=by_step.sum(part.grad_l1_N),
                grad_l2=np.sqrt(by_step.sum(part.grad_sq_N)),
            )

    @cached_property
    def entropy_loss_N(self) -> Tensor:
        """Return what the entropy bonus adds to the loss of the step by row, ``[N]`` float64."""
        part = self._part()
        if self.objective.entropy_bonus is None:
            return torch.zeros_like(part.weight_N)
        return seg.total(bonus_tokens(self.batch, self.objective, part.layout), self.batch.rows)

    @property
    def entropy_loss(self) -> float:
        """Return what the entropy bonus adds to the step's loss; NaN where its coefficient is not known of the step."""
        return _only(self.losses.entropy)

    @property
    def policy_loss(self) -> float:
        """The policy part of the step's loss."""
        return _only(self.losses.policy)

    @property
    def kl_loss(self) -> float:
        """The KL part of the step's loss, coefficient included."""
        return _only(self.losses.kl)

    @property
    def loss(self) -> float:
        """The step's loss: the mean of the losses of its optimizer steps."""
        return _only(self.losses.total)

    @property
    def loss_at_ratio_one(self) -> float:
        """Return the loss with policy and old log-probs equal, the KL part as it is.

        At ratio one a clipped surrogate is minus the advantage, so this is where the aggregation mode shows: row
        means of centred advantages cancel, token means do not if length goes with reward. Terms that hold the
        log-prob itself are taken at the policy's log-probs.
        """
        return _only(self.losses.at_ratio_one)

    @property
    def grad_l1(self) -> float:
        """Sum of the absolute derivatives over the step's tokens."""
        return _only(self.losses.grad_l1)

    @property
    def grad_l2(self) -> float:
        """Euclidean norm of the derivatives over the step's tokens."""
        return _only(self.losses.grad_l2)

    def in_scope(self, scope: Scope) -> Tensor:
        """Rows of a scope, ``[N]`` bool."""
        assert self.rows is not None
        return in_scope(self.batch, self.rows, scope)

    def frame(self) -> "pl.DataFrame":
        """One row per response as a polars frame; the loss's columns are null if it was not evaluated."""
        import polars as pl

        batch, rows, tokens = self.batch, self.rows, self.tokens
        columns: dict[str, object] = {
            "step": [batch.step] * len(batch),
            "split": [batch.split] * len(batch),
            "sample_id": [batch.sample_name(row) for row in range(len(batch))],
        }
        if batch.groups is not None:
            columns["group_id"] = [batch.group_name(group) for group in batch.groups.index_N.tolist()]
        names = ("score", "advantage", "baseline", "tokens", "loss", "policy_loss", "kl_loss", "kl", "weight")
        by_name: dict[str, Tensor | None] = dict.fromkeys((*names, "grad_l1", "grad_l2"))
        if rows is not None:
            by_name |= {"score": rows.score_N, "advantage": rows.advantage_N, "baseline": rows.baseline_N}
            by_name["tokens"] = rows.length_N
        if tokens is not None:
            policy_N, kl_N = tokens.policy_N * tokens.policy_weight_N, tokens.kl_loss_N * tokens.weight_N
            loss_N = policy_N + kl_N + self.entropy_loss_N
            by_name |= {"loss": loss_N, "policy_loss": policy_N, "kl_loss": kl_N, "kl": tokens.kl_N}
            by_name |= {"weight": tokens.weight_N, "grad_l1": tokens.grad_l1_N, "grad_l2": tokens.grad_sq_N.sqrt()}
        for name, x_N in by_name.items():
            columns[name] = pl.Series([None] * len(batch) if x_N is None else x_N.tolist(), dtype=pl.Float64)
        return pl.DataFrame(columns)

    def _part(self) -> TokenSums:
        if self.tokens is None:
            raise ValueError(
                f"the loss was not evaluated: {self.objective.unknown_loss or 'a column it needs is missing'}"
            )
        return self.tokens


def _only(x_S: NDArray[np.float64]) -> float:
    """The value of one step; joined steps have no loss of their own."""
    (value,) = x_S.tolist()
    return float(value)


@one_thread()
def evaluate(
    batch: RolloutBatch,
    objective: Objective,
    *,
    dtype: torch.dtype = torch.float32,
    per_token: bool = False,
    logged: Mapping[str, float] | None = None,
    amend: Callable[[RowResult], RowResult] | None = None,
) -> Evaluation:
    """Evaluate one objective on one step.

    Args:
        batch: the step; the evaluation runs on its device.
        objective: what the trainer computes.
        dtype: of the token values; sums are float64.
        per_token: keep the token values too.
        logged: the step's metrics, for objectives that change from step to step.
        amend: edits the first pass before the second sees it.

    Raises:
        CannotComputeError: where the trainer itself fails, or what changes from step to step was not logged.
    """
    alone = {"": objective}
    return evaluate_all(batch, alone, dtype=dtype, per_token=per_token, logged=logged, amend=amend)[""]


@el.unwarned()
def evaluate_all(
    batch: RolloutBatch,
    objectives: Mapping[str, Objective],
    *,
    dtype: torch.dtype = torch.float32,
    per_token: bool | Collection[str] = False,
    logged: Mapping[str, float] | None = None,
    visit: Callable[[TokenBlock], None] | None = None,
    amend: Callable[[RowResult], RowResult] | None = None,
    block_tokens: int | None = None,
) -> dict[str, Evaluation]:
    """Evaluate several objectives in one pass over the tokens.

    The first is the reference: the others' `versus_*` sums compare their derivatives with its derivative.

    Args:
        batch: the step; the evaluation runs on its device.
        objectives: name to what the trainer computes.
        dtype: of the token values; sums are float64.
        per_token: keep the token values too: of all objectives, or of those named.
        logged: the step's metrics, for objectives that change from step to step.
        visit: is shown each block of tokens that the evaluation goes through; see `TokenMeasures`.
        amend: edits the first pass of each before the second sees it.
        block_tokens: of a block, about; None: as many as suit the device.

    Raises:
        CannotComputeError: where the trainer itself fails, or what changes from step to step was not logged.
    """
    objectives = {name: objective.at_step(logged or {}) for name, objective in objectives.items()}
    for objective in objectives.values():
        # Without such a column the numbers are others, not fewer.
        absent = batch.lacks(optional_columns(objective))
        if absent:
            raise CannotComputeError(incomplete(absent))
    parts = row_parts(batch, objectives, dtype)
    if amend is not None:
        parts = {name: None if part is None else amend(part) for name, part in parts.items()}
    able = {
        name: part for name, part in parts.items() if part is not None and batch.has(*loss_columns(objectives[name]))
    }
    wanted = (able if per_token else ()) if isinstance(per_token, bool) else per_token
    with naming(next((objective.trainer for objective in objectives.values()), CannotComputeError.trainer)):
        passes = token_pass(batch, able, dtype, frozenset(wanted), visit, block_tokens) if able else {}
    evaluations = {}
    for name, objective in objectives.items():
        tokens, token_values = passes.get(name, (None, None))
        evaluations[name] = Evaluation(batch, objective, parts[name], tokens, dtype, token_values)
    return evaluations
