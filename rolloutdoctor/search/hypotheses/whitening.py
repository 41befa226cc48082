"""Hypotheses about what the mean and the variance of a whitening were taken over."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.search.hypotheses.hypothesis import Hypothesis, changing

_REMEDY = "take the mean and the variance over the trained tokens of the whole step: pass the loss mask to both"
_REFERENCES = (
    "https://github.com/NovaSky-AI/SkyRL/issues/1305",
    "https://github.com/volcengine/verl/issues/1527",
)

_POPULATIONS = {
    "response": "all response tokens, masked ones included",
    "padded": "all positions of the padded rows, padding and masked tokens as zeros",
}

_MOMENTS = {
    "both": ("mean and variance", ""),
    "mean": ("the mean", ", and the variance about that mean over the trained tokens"),
    "variance": ("the variance about the mean of the trained tokens", ""),
    "mean-own-centre": ("the mean", ", and the variance of the trained tokens"),
    "variance-own-centre": ("the variance", ", and the mean of the trained tokens"),
}


def whitens(objective: Objective) -> bool:
    """Return True if advantages are whitened over the trained tokens."""
    rule = objective.advantage
    return (rule.whitened or rule.spec.normalised_over == "tokens") and rule.whitened_over == "trained"


_RANKS = (2, 4, 8, 16)
"""Context-parallel ranks that are tried where the options do not say how many there were."""


def _is_cut(objective: Objective, ranks: int) -> bool:
    rule = objective.advantage
    return whitens(objective) and rule.context_ranks in (1, ranks) and rule.whitened_by_slice(ranks) is not None


def _by_slice(objective: Objective, ranks: int) -> Objective:
    rule = objective.advantage.whitened_by_slice(ranks)
    assert rule is not None  # `_is_cut`
    return replace(objective, advantage=rule)


def _is_plain(objective: Objective) -> bool:
    rule = objective.advantage
    return rule.spec.is_standard_score and not (rule.whitened or rule.normalised)


def _hypothesis(
    name: str,
    words: str,
    columns: frozenset[str] = frozenset(),
    applies: Callable[[Objective], bool] = whitens,
    **changes: object,
) -> Hypothesis:
    return Hypothesis(
        name=name,
        code="RDA010",
        stage="advantages",
        words=words,
        remedy=_REMEDY,
        applies=applies,
        objective=changing("advantage", **changes),
        columns=columns,
        references=_REFERENCES,
    )


WHITENINGS = (
    *(
        _hypothesis(
            f"whitened-over-{population}" + ("" if moments == "both" else f"-{moments}"),
            f"the advantages are whitened with {which} over {tokens}{rest}",
            whitened_over=population,
            whitened_moments=moments,
        )
        for population, tokens in _POPULATIONS.items()
        for moments, (which, rest) in _MOMENTS.items()
    ),
    *(
        _hypothesis(
            "whitened-anyway-over-padded" + ("" if moments == "both" else f"-{moments}"),
            f"the advantages are whitened, which no option says, with {which} over {_POPULATIONS['padded']}{rest}",
            frozenset({"response_mask"}),
            _is_plain,
            whitened=True,
            whitened_over="padded",
            whitened_moments=moments,
        )
        for moments, (which, rest) in _MOMENTS.items()
    ),
    _hypothesis(
        "whitened-by-rank",
        "every rank whitens its advantages with the mean and the variance of its own tokens",
        frozenset({"rank"}),
        whitened_over="rank",
    ),
    *(
        Hypothesis(
            name=f"whitened-per-cp-slice-{ranks}",
            code="RDA010",
            stage="advantages",
            words=f"each of {ranks} context-parallel ranks whitens its slices with the mean and the variance of these",
            remedy="sum mean and variance over the data-parallel group with context parallelism; "
            "compare with `rolloutdoctor diff --fix cp-whitening`",
            applies=partial(_is_cut, ranks=ranks),
            objective=partial(_by_slice, ranks=ranks),
            columns=frozenset({"prompt_ids", "response_mask"}),
            references=("https://github.com/THUDM/slime/pull/2235",),
        )
        for ranks in _RANKS
    ),
)
