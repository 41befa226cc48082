"""Hypotheses about the KL term: its estimator, its clamp, what it compares, and how often it counts."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import fsum, isfinite

from rolloutdoctor.objective.objective import KlTerm, Objective
from rolloutdoctor.search.hypotheses.hypothesis import STATE, UNCLAIMED, Family, Hypothesis, Seen, changing, has_kl_loss

_WORDS = {
    "k1": "k1, the plain log-ratio",
    "k2": "k2, half of the squared log-ratio",
    "k3": "k3, without a clamp",
    "abs": "the absolute log-ratio",
    "k3_clamped": "k3 of a clamped log-ratio, clamped to 10",
}
_REFERENCES = ("https://github.com/huggingface/trl/issues/4637", "https://github.com/volcengine/verl/pull/2953")


def _estimator(name: str, part: str, words: str) -> Hypothesis:
    def applies(objective: Objective) -> bool:
        term: KlTerm | None = getattr(objective, part)
        return term is not None and not (term.estimator == name and not term.clamp)

    return Hypothesis(
        name=f"{part.replace('_', '-')}-is-{name.replace('_', '-')}",
        code="RDG007" if name != "k3_clamped" else "RDG008",
        stage="kl" if part == "kl_loss" else "advantages",
        words=f"{words} is {_WORDS[name]}, and not the recorded estimator",
        remedy=(
            "choose the KL estimator on purpose: as a loss, k1 has a gradient of zero in expectation, k2 that of the "
            "reverse KL and k3 that of the forward KL"
        ),
        applies=applies,
        objective=changing(part, estimator=name, clamp=None),
        references=_REFERENCES,
    )


def _twice_in_reward(objective: Objective) -> Objective:
    term = objective.kl_loss
    assert term is not None
    penalty = KlTerm(estimator="k1", coef=term.coef, log_probs="old_log_probs", masked=True, of_trained=True)
    return replace(objective, kl_reward=penalty, advantage=replace(objective.advantage, sums_tokens=True))


def _factor(name: str, code: str, words: str, factor: float, part: str = "kl_loss") -> Hypothesis:
    def edit(objective: Objective) -> Objective:
        return changing(part, coef=factor * getattr(objective, part).coef)(objective)

    return Hypothesis(
        name=name,
        code=code,
        stage="loss" if part == "kl_loss" else "advantages",
        words=words,
        remedy="fix the code that adds the KL term; if its coefficient is intended, pass it with --set",
        applies=lambda objective: getattr(objective, part) is not None,
        objective=edit,
        unclaimed=UNCLAIMED | {"reward_kl"},
        references=("https://github.com/OpenRLHF/OpenRLHF/issues/768",),
    )


def _solve_coefficient(trials: Sequence[Sequence[Seen]]) -> Iterator[Hypothesis]:
    """The coefficient that one logged loss gives, taken from the policy term and the KL term of its step."""
    ratios: list[tuple[float, float]] = []
    for trial in trials:
        parts = [(step.evaluation.policy_loss, step.evaluation.kl_loss) for step in trial if step.evaluation.tokens]
        logged = trial[0].logged.get(trial[0].trainer.log.loss)
        if len(parts) < len(trial) or logged is None or not trial[0].trainer.log.loss_is_whole:
            continue
        policy, kl = (fsum(part) / len(parts) for part in zip(*parts, strict=True))
        if kl and isfinite(kl) and isfinite(policy):
            ratios.append((abs(kl), (logged - policy) / kl))
    if len(ratios) >= 3:
        # The largest KL term says most; a coefficient is a number of few digits, and the others say which.
        factor = max(ratios)[1]
        for digits in (2, 3, 4, 6):
            near = float(f"{factor:.{digits}g}")
            words = f"the KL term of the loss has {near:g} times the recorded coefficient"
            yield _factor(f"kl-loss-times-{near:g}", "RDG005", words, near)


def _is_weighted_otherwise(weighted: bool, objective: Objective) -> bool:
    return objective.kl_loss is not None and objective.kl_loss.ratio_weighted != weighted


KL_COEFFICIENT = Family(
    name="kl-loss-coefficient",
    code="RDG005",
    stage="loss",
    words="the KL term of the loss has another coefficient, one number for the run, which is solved",
    solve=_solve_coefficient,
    applies=has_kl_loss,
)


KL_TERMS = (
    *(_estimator(name, "kl_loss", "the KL in the loss") for name in _WORDS),
    *(_estimator(name, "kl_reward", "the KL penalty in the reward") for name in _WORDS),
    Hypothesis(
        name="kl-loss-clamped",
        code="RDG008",
        stage="kl",
        words="each token's KL is clamped to 10, so that tokens beyond it have no KL gradient",
        remedy="inspect the tokens that reach the clamp: find out why their log-ratio is so large",
        applies=lambda objective: objective.kl_loss is not None and objective.kl_loss.clamp != 10,
        objective=changing("kl_loss", clamp=10.0),
        references=("https://github.com/volcengine/verl/issues/2928",),
    ),
    *(
        Hypothesis(
            name=f"kl-loss-{name}",
            code="RDG007",
            stage="kl",
            words=f"each token's KL is {'' if weighted else 'not '}multiplied by its importance ratio",
            remedy=STATE,
            applies=partial(_is_weighted_otherwise, weighted),
            objective=changing("kl_loss", ratio_weighted=weighted, ratio_to=None),
        )
        for name, weighted in (("weighted-by-ratio", True), ("not-weighted", False))
    ),
    *(
        Hypothesis(
            name=f"kl-loss-of-{column.split('_', maxsplit=1)[0]}-log-probs",
            code="RDG007",
            stage="kl",
            words=f"the KL in the loss compares {column} with the reference, so that it has no gradient",
            remedy="compute the KL term from the log-probs of the current policy",
            applies=has_kl_loss,
            objective=changing("kl_loss", log_probs=column),
            columns=frozenset({column}),
        )
        for column in ("old_log_probs", "rollout_log_probs")
    ),
    Hypothesis(
        name="kl-in-reward-and-loss",
        code="RDG009",
        stage="advantages",
        words="the KL counts twice: as a penalty in the reward, and as a term of the loss",
        remedy="keep one of the two: the KL in the reward or the KL in the loss",
        applies=lambda objective: objective.kl_loss is not None and objective.kl_reward is None,
        objective=_twice_in_reward,
        columns=frozenset({"old_log_probs", "ref_log_probs", "response_mask"}),
        references=("https://github.com/OpenRLHF/OpenRLHF/issues/768", "https://github.com/volcengine/verl/issues/509"),
    ),
    _factor("kl-loss-doubled", "RDG009", "the KL term is in the loss twice", 2),
    _factor("kl-not-in-loss", "RDI014", "the loss has no KL term, although a coefficient is recorded", 0),
    _factor(
        "kl-loss-flipped",
        "RDG005",
        "the KL term enters the loss with the opposite sign and pushes the policy away from the reference",
        -1,
    ),
    _factor("kl-reward-doubled", "RDA004", "the KL penalty is in the reward twice", 2, "kl_reward"),
    _factor(
        "kl-not-in-reward", "RDI014", "the reward has no KL penalty, although a coefficient is recorded", 0, "kl_reward"
    ),
    _factor(
        "kl-reward-flipped",
        "RDA004",
        "the KL penalty enters the reward with the opposite sign and rewards distance from the reference",
        -1,
        "kl_reward",
    ),
)
