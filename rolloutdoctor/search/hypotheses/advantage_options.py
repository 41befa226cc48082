"""Hypotheses about how scores become advantages: the estimator, its scale, its epsilon, and who is compared."""

from collections.abc import Callable

from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.search.hypotheses.hypothesis import UPSTREAM, Hypothesis, changing

_STATE = "pass the option that the run really had with --set, or put it into the file's metadata, then check again"


def _is_standard_score(objective: Objective) -> bool:
    return objective.advantage.spec.is_standard_score


def _by_row(objective: Objective) -> bool:
    return objective.advantage.spec.has_groups and objective.advantage.spec.name in ("grpo", "rloo", "raw")


def _whitened(objective: Objective) -> bool:
    return objective.advantage.whitened


def _normalised(objective: Objective) -> bool:
    return objective.advantage.normalised


def _option(name: str, applies: Callable[[Objective], bool], words: str, **changes: object) -> Hypothesis:
    edit = changing("advantage", **changes)
    return Hypothesis(name, "RDI014", "advantages", words, _STATE, applies, edit)


_DIVIDED = "the advantages are divided by the"
ADVANTAGE_OPTIONS = (
    _option("scale-none", _is_standard_score, "the advantages are not divided by a standard deviation", scale="none"),
    _option("scale-group", _is_standard_score, f"{_DIVIDED} group's standard deviation", scale="group"),
    _option("scale-batch", _is_standard_score, f"{_DIVIDED} batch's standard deviation", scale="batch"),
    _option(
        "leave-one-out",
        _by_row,
        "the baseline of a row is the mean of the other rows of its group",
        estimator="rloo",
        scale="none",
    ),
    _option("no-baseline", _by_row, "the advantages are the raw rewards, without a baseline", estimator="raw"),
    _option(
        "group-mean-baseline",
        _by_row,
        "the baseline of a row is the mean of its group, and nothing is divided by a standard deviation",
        estimator="grpo",
        scale="none",
    ),
    _option(
        "group-standard-score",
        _by_row,
        "the advantages are centred and divided by the group's standard deviation",
        estimator="grpo",
        scale="group",
    ),
    _option(
        "whitened",
        lambda objective: not _whitened(objective),
        "the advantages are whitened over the trained tokens of the step",
        whitened=True,
    ),
    _option("not-whitened", _whitened, "the advantages are not whitened", whitened=False),
    _option(
        "normalised",
        lambda objective: objective.advantage.spec.name == "rloo" and not _normalised(objective),
        "the advantages are centred and divided by their standard deviation over the rows of the step",
        normalised=True,
    ),
    _option(
        "not-normalised", _normalised, "the advantages are not normalised over the rows of the step", normalised=False
    ),
    _option("singleton-raw", _by_row, "the only row of a group keeps its raw reward as advantage", singleton="raw"),
    _option("singleton-zero", _by_row, "the only row of a group has an advantage of 0", singleton="zero"),
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
        remedy=UPSTREAM,
        applies=lambda objective: objective.advantage.batch_if_unequal,
        objective=changing("advantage", batch_if_unequal=False),
    ),
)
