"""Hypotheses about how scores become advantages: the estimator, its scale, its epsilon, and who is compared."""

from collections.abc import Callable

from rolloutdoctor.hypotheses.hypothesis import Hypothesis, ObjectiveEdit, changing
from rolloutdoctor.objective.objective import Objective

_STATE = "state the option that the run really had, with --set or in the file's metadata, and check again"
_UPSTREAM = "compare the advantage computation of the trainer that ran with that of the recorded version"


def _is_standard_score(objective: Objective) -> bool:
    return objective.advantage.spec.is_standard_score


def _by_row(objective: Objective) -> bool:
    return objective.advantage.spec.has_groups and objective.advantage.spec.name in ("grpo", "rloo", "raw")


def _option(
    name: str, words: str, edit: ObjectiveEdit, applies: Callable[[Objective], bool] = _is_standard_score
) -> Hypothesis:
    return Hypothesis(
        name=name,
        code="RDI014",
        stage="advantages",
        words=words,
        remedy=_STATE,
        applies=applies,
        objective=edit,
    )


ADVANTAGE_OPTIONS = (
    _option(
        "scale-none", "the advantages are not divided by a standard deviation", changing("advantage", scale="none")
    ),
    _option(
        "scale-group",
        "the advantages are divided by the group's standard deviation",
        changing("advantage", scale="group"),
    ),
    _option(
        "scale-batch",
        "the advantages are divided by the batch's standard deviation",
        changing("advantage", scale="batch"),
    ),
    _option(
        "leave-one-out",
        "the baseline of a row is the mean of the other rows of its group",
        changing("advantage", estimator="rloo", scale="none"),
        _by_row,
    ),
    _option(
        "no-baseline",
        "the advantages are the rewards, without a baseline",
        changing("advantage", estimator="raw"),
        _by_row,
    ),
    _option(
        "group-mean-baseline",
        "the baseline of a row is the mean of its group, and nothing is divided by a standard deviation",
        changing("advantage", estimator="grpo", scale="none"),
        _by_row,
    ),
    _option(
        "group-standard-score",
        "the advantages are centred and divided by the group's standard deviation",
        changing("advantage", estimator="grpo", scale="group"),
        _by_row,
    ),
    _option(
        "whitened",
        "the advantages are whitened over the trained tokens of the step",
        changing("advantage", whitened=True),
        lambda objective: not objective.advantage.whitened,
    ),
    _option(
        "not-whitened",
        "the advantages are not whitened",
        changing("advantage", whitened=False),
        lambda objective: objective.advantage.whitened,
    ),
    _option(
        "normalised",
        "the advantages are centred and divided by their standard deviation over the rows of the step",
        changing("advantage", normalised=True),
        lambda objective: objective.advantage.spec.name == "rloo" and not objective.advantage.normalised,
    ),
    _option(
        "not-normalised",
        "the advantages are not normalised over the rows of the step",
        changing("advantage", normalised=False),
        lambda objective: objective.advantage.normalised,
    ),
    _option(
        "singleton-raw",
        "the only row of a group keeps its raw reward as advantage",
        changing("advantage", singleton="raw"),
        _by_row,
    ),
    _option(
        "singleton-zero",
        "the only row of a group has an advantage of 0",
        changing("advantage", singleton="zero"),
        _by_row,
    ),
    Hypothesis(
        name="batch-if-groups-are-uneven",
        code="RDI003",
        stage="advantages",
        words="where groups differ in size, the advantages compare all rows of the step, not those of a group_id",
        remedy="keep groups of one size, or compare by group id",
        applies=lambda objective: _by_row(objective) and not objective.advantage.batch_if_unequal,
        objective=changing("advantage", batch_if_unequal=True),
        references=("https://github.com/THUDM/slime/issues/2230",),
    ),
    Hypothesis(
        name="groups-if-uneven",
        code="RDI014",
        stage="advantages",
        words="the advantages compare the rows of a group_id, also where groups differ in size",
        remedy=_UPSTREAM,
        applies=lambda objective: objective.advantage.batch_if_unequal,
        objective=changing("advantage", batch_if_unequal=False),
    ),
)
