"""The hypothesis that a row has the advantages of another, which was drawn: solved, since nothing logs the draw."""

from collections.abc import Iterator, Sequence
from math import log2
from typing import TYPE_CHECKING

from rolloutdoctor.objective.estimators import Axis
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.search.hypotheses.hypothesis import Family, Hypothesis, Seen, changing

if TYPE_CHECKING:
    from rolloutdoctor.evaluation.evaluate import Evaluation

CODE = "RDA026"
ENOUGH_BITS = 12.0
"""Bits of evidence needed that values of other rows are not those by chance."""

BITS_OF_FLOAT = 24.0
"""Bits of a float32, the most that one value can be worth."""

_REFERENCES = ("https://github.com/verl-project/verl/issues/7956",)


def _resampled(name: str, column: str, drawn: str) -> Hypothesis:
    return Hypothesis(
        name=name,
        code=CODE,
        stage="advantages",
        words=f"rows have the {column} of other rows of the step, as if these had been drawn in their place",
        remedy="resample whole rows, tokens and log-probs with their advantages, or none: turn use_pf_ppo off",
        objective=changing("advantage", drawn=drawn),
        columns=frozenset({"advantages", "response_mask_pre"}),
        references=_REFERENCES,
    )


RESAMPLED = (
    _resampled("advantages-of-resampled-rows", "advantages", "advantages"),
    _resampled("advantages-and-masks-of-resampled-rows", "advantages and masks", "masks"),
)


def evidence(evaluation: "Evaluation", hypothesis: Hypothesis) -> float:
    """Bits by which the logged advantages of a step are those of other rows; 0 where some are of none.

    The row that a row has the advantages of is one of N, which costs log2 N bits; its first value may have chosen it,
    and every further one that differs from those before is worth the bits by which its radius is below their range.
    """
    import torch

    from rolloutdoctor.evaluation.evaluate import Evaluation, evaluate_rows
    from rolloutdoctor.evaluation.radii.advantages import token_advantage_radius
    from rolloutdoctor.ops import rounding

    batch, dtype = evaluation.batch, evaluation.dtype
    assert hypothesis.objective is not None
    objective = hypothesis.objective(evaluation.objective)
    row_result, drawn_rows = evaluation.rows, evaluate_rows(batch, objective, dtype)
    if drawn_rows is None or drawn_rows.advantage_T is None or row_result is None or row_result.advantage_T is None:
        return 0.0
    mask_T, logged_T = batch.column("response_mask"), batch.column("advantages").double()
    token_radius = token_advantage_radius(Evaluation(batch, objective, drawn_rows, None, dtype)).likely
    radius_T = token_radius + rounding.stored(logged_T).likely
    is_off_T = ~((drawn_rows.advantage_T - logged_T).abs() <= 2 * radius_T)
    if bool((mask_T & is_off_T).any()) or not bool(mask_T.any()):
        return 0.0
    span, radius = float(logged_T[mask_T].max() - logged_T[mask_T].min()), float(radius_T[mask_T].max())
    worth = min(log2(max(span / (2 * radius), 1.0)), BITS_OF_FLOAT) if radius else BITS_OF_FLOAT
    moved_T = mask_T & ~((row_result.advantage_T - logged_T).abs() <= 2 * radius_T)
    row_T = torch.repeat_interleave(torch.arange(len(batch), device=batch.device), batch.rows.diff())
    bits = 0.0
    for row in torch.unique(row_T[moved_T]).tolist():
        tokens = slice(int(batch.rows[row]), int(batch.rows[row + 1]))
        value_t = logged_T[tokens][mask_T[tokens]].sort().values
        further = int((value_t.diff() > 4 * radius).sum())
        bits += max(further * worth - log2(len(batch)), 0.0)
    return bits


def _solve(trials: Sequence[Sequence[Seen]]) -> Iterator[Hypothesis]:
    evaluations = [
        step.evaluation for trial in trials for step in trial if "advantages" in step.evaluation.batch.per_token
    ]
    yield from (edit for edit in RESAMPLED if sum(evidence(each, edit) for each in evaluations) >= ENOUGH_BITS)


def _can_be_drawn(objective: Objective) -> bool:
    """True of generalised advantages over the trained tokens: of the others a row has one value, or few."""
    rule = objective.advantage
    of_critic = rule.spec.axis is Axis.TRAINED_TOKENS and "values" in rule.spec.columns
    is_plain = rule.drawn is None and rule.whitened_over == "trained"
    return of_critic and rule.spec.normalised_over == "tokens" and is_plain


DRAWN_ROWS = Family(
    name="drawn-rows",
    code=CODE,
    stage="advantages",
    words="rows have the advantages of other rows, which were drawn",
    solve=_solve,
    applies=_can_be_drawn,
    columns=frozenset({"advantages", "response_mask_pre"}),
    references=_REFERENCES,
)
