"""Rows of a run, and numbers of every step, which `compare` puts side by side with another run's."""

import math

import polars as pl
from torch import Tensor

from rolloutdoctor.engine.breakdown import parts_of_rows
from rolloutdoctor.engine.gatherer import Gatherer
from rolloutdoctor.engine.measured_frames import rows_of
from rolloutdoctor.engine.prepare import PreparedRun
from rolloutdoctor.engine.requirements import evaluation_columns
from rolloutdoctor.engine.run_steps import EvaluatedStep
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED
from rolloutdoctor.evaluation.row_columns import ROW_COLUMNS
from rolloutdoctor.ops import elementwise as el
from rolloutdoctor.rules.base import Context
from rolloutdoctor.rules.step import StepView


def _total(name: str) -> pl.Expr:
    """Sum of a column; null where the step was not evaluated."""
    return pl.when(pl.col(name).count() > 0).then(pl.sum(name))


_SCORES = pl.col("reward").filter(pl.col("reward").is_finite())

MEASURES: dict[str, tuple[pl.Expr, str]] = {
    "reward": (_SCORES.mean(), "reward"),
    "reward_std": (_SCORES.std(ddof=0), "reward"),
    "response_length": (pl.when(pl.sum("tokens") > 0).then(pl.mean("tokens")), "tokens"),
    "trained_tokens": (pl.mean("trained_tokens"), "tokens"),
    "masked_rows": ((pl.col("trained_tokens") == 0).mean(), "share"),
    "truncated_rows": (pl.when(pl.count("status") > 0).then(pl.col("status").eq_missing("length").mean()), "share"),
    "zero_variance_groups": (pl.first("zero_variance_groups"), "share"),
    "entropy": (pl.first("entropy"), "nats"),
    "mean_abs_delta": (pl.first("mean_abs_delta"), "nats"),
    "loss": (_total("loss"), "1"),
    "policy_loss": (_total("policy_loss"), "1"),
    "kl_loss": (_total("kl_loss"), "1"),
    "grad_l1": (_total("grad_l1"), "1"),
    "grad_l2": (_total("grad_sq").sqrt(), "1"),
}
"""Quantities of a step over its rows, with their units: of the rows first, then the recomputed ones."""

RECOMPUTED = ("loss", "policy_loss", "kl_loss", "grad_l1", "grad_l2")

ROW_PARTS = ("reward", "length", "status")
"""Keys by which rows can be broken down."""

_READ = ("reward", "response_mask", "entropy", "rollout_log_probs", "old_log_probs", "policy_log_probs", "status")
_COLUMNS = ("reward", "tokens", "trained_tokens", "loss", "policy_loss", "kl_loss", "grad_l1", "grad_sq")
_OF_STEPS = ("zero_variance_groups", "entropy", "mean_abs_delta")


class RunProfile(Gatherer):
    """Gathers the rows of every step."""

    def __init__(self, context: Context, by: str | None = None) -> None:
        super().__init__()
        objective = context.objective
        wanted = frozenset((*_READ, "response_ids"))
        wanted |= frozenset() if objective is None else evaluation_columns(objective)
        self.columns = wanted & context.columns
        self.objectives = {} if objective is None else {AS_CONFIGURED: objective}
        self._by = by
        kinds = {name: ROW_COLUMNS[name].dtype for name in _COLUMNS} | dict.fromkeys(_OF_STEPS, pl.Float64)
        part = {"part": pl.String() if by == "status" else pl.Float64()}
        self._schema = {"step": pl.Int64(), "split": pl.String(), "status": pl.String(), **kinds, **part}

    def add(self, step: EvaluatedStep) -> None:
        """Take in one step."""
        batch = step.batch
        view = StepView(batch, step.logged, evaluations=step.evaluations, dtype=step.dtype)
        part: pl.Series | pl.Expr = pl.lit(None)
        if self._by == "status" and batch.statuses:
            part = pl.Series(list(map(str, batch.statuses)))
        elif self._by == "length" or (self._by == "reward" and "reward" in batch.per_row):
            part = pl.Series(parts_of_rows(self._by, batch).cpu().numpy())
        of_step = {name: pl.lit(value, pl.Float64) for name, value in zip(_OF_STEPS, _of_step(view), strict=True)}
        frame = rows_of(view, _COLUMNS, {}).with_columns(**of_step, part=part)
        self.keep("rows", frame.select(pl.col(name).cast(kind) for name, kind in self._schema.items()))

    def rows(self) -> pl.DataFrame:
        """Return one line a row: its step, its columns, and the `part` that it is in."""
        return pl.concat([pl.DataFrame(schema=self._schema), self.table("rows")], how="diagonal")

    def numbers(self) -> pl.DataFrame:
        """Return one line a quantity and step: ``step, split, name, value``; null where the step has none."""
        measures = {name: value for name, (value, _) in MEASURES.items()}
        steps = self.rows().group_by("step", "split", maintain_order=True).agg(**measures)
        return steps.unpivot(index=["step", "split"], variable_name="name")


def profile_of(ready: PreparedRun, by: str | None) -> tuple[RunProfile]:
    """Return what gathers the rows of a run; see `gather`."""
    return (RunProfile(ready.context, by),)


def _of_step(view: StepView) -> tuple[float | None, float | None, float | None]:
    """Share of zero-variance groups, mean entropy, and mean absolute gap to the sampler."""
    batch, zero_variance, entropy, delta = view.batch, None, None, None
    if batch.groups is not None and "reward" in batch.per_row:
        several = int((view.compared.size_G > 1).sum())
        zero_variance = int(view.equal_reward_groups().sum()) / several if several else None
    if "response_mask" in batch.per_token:
        mask_T = batch.column("response_mask")
        if "entropy" in batch.per_token:
            entropy = _mean(batch.column("entropy")[mask_T])
        if "rollout_log_probs" in batch.per_token and batch.has("old_log_probs"):
            delta_T = batch.column("old_log_probs").double() - batch.column("rollout_log_probs").double()
            delta = _mean(delta_T[mask_T].abs())
    return zero_variance, entropy, delta


def _mean(value_T: Tensor) -> float:
    known_T = el.finite(value_T).double()
    return float(known_T.mean()) if len(known_T) else math.nan
