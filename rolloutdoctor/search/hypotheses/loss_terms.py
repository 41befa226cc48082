"""Hypotheses about the loss: how tokens become one number, which tokens are counted, and what the ratio compares."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.search.hypotheses.hypothesis import (
    STATE,
    UNCLAIMED,
    Hypothesis,
    MetricsEdit,
    ObjectiveEdit,
    changing,
)

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.data.batch import RolloutBatch
    from rolloutdoctor.evaluation.evaluate import Evaluation
    from rolloutdoctor.formulas.losses.aggregation import Layout
    from rolloutdoctor.trainers.spec import Trainer

_MODES = {
    "micro-batch-token-mean": "the token mean of each micro-batch, averaged over micro-batches",
    "micro-batch-row-mean": "the token mean of each row, averaged over a micro-batch, then over micro-batches",
    "micro-batch-row-mean-added": "the token mean of each row, averaged over a micro-batch, added over micro-batches",
    "micro-batch-padded-mean": "the mean over all positions of the padded rows, padding and masked tokens as zeros",
    "micro-batch-row-sum": "the token sum of each row, averaged over a micro-batch, then over micro-batches",
    "generation-token-mean": "the mean over all tokens of the generation batch",
    "token-mean": "the mean over all tokens of the optimizer step",
    "token-sum": "the sum over all tokens",
    "seq-mean-token-mean": "the token mean of each row, averaged over rows",
    "seq-mean-token-sum": "the token sum of each row, averaged over rows",
    "trajectory-mean-token-mean": "the token mean of each trajectory, averaged over trajectories",
}
_BY_MICRO_BATCH = tuple(name for name in _MODES if name.startswith("micro-batch"))
_REFERENCES = (
    "https://github.com/huggingface/trl/pull/3021",
    "https://github.com/volcengine/verl/issues/906",
    "https://unsloth.ai/blog/gradient",
)


def _changed(objective: Objective, **changes: object) -> Objective:
    """Return the objective with another aggregation of every term."""
    for part in ("aggregation", "policy_aggregation"):
        if getattr(objective, part) is not None:
            objective = changing(part, **changes)(objective)
    return objective


def _aggregated(mode: str) -> Hypothesis:
    by_micro_batch = mode in _BY_MICRO_BATCH
    return Hypothesis(
        name=f"loss-is-{mode}",
        code="RDG006" if by_micro_batch else "RDI014",
        stage="kl",
        words=f"the loss is {_MODES[mode]}",
        remedy=(
            "divide by the token count of the whole optimizer step: with a mean in each micro-batch, a token's weight "
            "depends on which rows it shares a micro-batch with"
            if by_micro_batch
            else "pass the aggregation that the run really had with --set, then check again"
        ),
        applies=lambda objective: objective.aggregation.mode != mode,
        objective=lambda objective: _changed(objective, mode=mode),
        columns=frozenset({"micro_batch_id", "optim_step_id", "rank"}),
        references=_REFERENCES if by_micro_batch else (),
    )


def _scaled(name: str, words: str, parts: "Callable[[Layout], Tensor]", *, inverse: bool) -> Hypothesis:
    """Return the logged loss, and its parts, times or divided by a count of parts of the step."""

    def edit(evaluation: "Evaluation", trainer: "Trainer", metrics: Mapping[str, float]) -> Mapping[str, float]:
        tokens = evaluation.tokens
        if tokens is None or not len(evaluation.batch):
            return {}
        count = float(parts(tokens.layout)[0])
        factor = 1 / count if inverse else count
        of_loss = ("loss", "policy_loss")
        scaled = [name for name in metrics if trainer.log.kind_of(name) in of_loss and not trainer.log.is_share(name)]
        return {name: metrics[name] * factor for name in scaled}

    return Hypothesis(
        name=name,
        code="RDG006",
        stage="loss",
        words=f"the loss is {words}",
        remedy="scale the loss once: by the number of its parts, or by the trainer's own accumulation",
        metrics=edit,
        columns=frozenset({"micro_batch_id", "optim_step_id", "rank"}),
        references=_REFERENCES,
    )


def _micros(layout: "Layout") -> "Tensor":
    return layout.micros_N / layout.ranks_N


def _ranks(layout: "Layout") -> "Tensor":
    return layout.ranks_N


def _with_entropy(factor: int) -> MetricsEdit:
    """Return the loss with another factor of its entropy bonus: the coefficient is logged as it is recorded."""

    def edit(evaluation: "Evaluation", trainer: "Trainer", metrics: Mapping[str, float]) -> Mapping[str, float]:
        more = (factor - 1) * evaluation.entropy_loss
        return {name: value + more for name, value in metrics.items() if name == trainer.log.loss}

    return edit


CLIPPED = UNCLAIMED | {"clip_share", "clip_extreme"}
"""A trainer counts what it clips beside the loss, by the recorded range."""

_NEVER = 1e6
"""A clip range that no ratio reaches."""


def _counts_otherwise(counted: bool, objective: Objective) -> bool:
    return objective.aggregation.counted_before_rejection != counted


def _aggregates_otherwise(mode: str, objective: Objective) -> bool:
    return objective.aggregation.mode != mode


def _is_of_another_level(level: str, objective: Objective) -> bool:
    return objective.surrogate.level not in (level, "sequence-sum")


def _of_level(level: str) -> ObjectiveEdit:
    def edit(objective: Objective) -> Objective:
        objective = changing("surrogate", level=level)(objective)
        term = objective.kl_loss
        return objective if term is None else changing("kl_loss", ratio_level=level)(objective)

    return edit


def _swapped(batch: "RolloutBatch", objective: Objective) -> "RolloutBatch | None":
    if not {"policy_log_probs", "old_log_probs"} <= batch.per_token.keys():
        return None
    policy_T, old_T = batch.per_token["policy_log_probs"], batch.per_token["old_log_probs"]
    return replace(batch, per_token={**batch.per_token, "policy_log_probs": old_T, "old_log_probs": policy_T})


def _kl_of_old(objective: Objective) -> Objective:
    """Compare the column that holds the policy's log-probs with the reference, once `_swapped` has moved them."""
    term = objective.kl_loss
    swapped = term is not None and term.log_probs == "policy_log_probs"
    return changing("kl_loss", log_probs="old_log_probs")(objective) if swapped else objective


def by_rank(batch: "RolloutBatch", objective: Objective) -> "RolloutBatch | None":
    """Return the rows as if every rank had optimizer steps of its own: their losses and metrics are averaged."""
    rank_N = batch.per_row.get("rank")
    if rank_N is None or not len(batch) or bool((rank_N == rank_N[0]).all()):
        return None
    optim_N = batch.per_row.get("optim_step_id", torch.zeros_like(rank_N))
    return replace(batch, per_row={**batch.per_row, "optim_step_id": optim_N * (rank_N.max() + 1) + rank_N})


LOSS_TERMS = (
    *(_aggregated(mode) for mode in _MODES),
    _scaled("loss-divided-by-micro-batches", "divided by the number of micro-batches once more", _micros, inverse=True),
    _scaled("loss-times-micro-batches", "added over micro-batches, not averaged", _micros, inverse=False),
    _scaled("loss-divided-by-ranks", "divided by the number of ranks once more", _ranks, inverse=True),
    _scaled("loss-times-ranks", "added over ranks, not averaged", _ranks, inverse=False),
    *(
        Hypothesis(
            name=f"denominator-counts-{tokens}-tokens",
            code="RDG010",
            stage="kl",
            words=f"the denominator of the loss counts {words}",
            remedy=f"decide which one you want: a denominator {remedy}",
            applies=partial(_counts_otherwise, counted),
            objective=partial(_changed, counted_before_rejection=counted),
            columns=frozenset({"response_mask_pre"} if counted else ()),
            references=("https://github.com/huggingface/trl/issues/6369",),
        )
        for counted, tokens, words, remedy in (
            (
                True,
                "rejected",
                "tokens that rejection had masked",
                "that keeps rejected tokens shrinks the update by their share",
            ),
            (
                False,
                "kept",
                "only tokens that rejection had kept",
                "without rejected tokens keeps the size of the update",
            ),
        )
    ),
    Hypothesis(
        name="ratio-is-one",
        code="RDO006",
        stage="kl",
        words="the loss has an importance ratio of 1 on every token: its old log-probs are the current policy's",
        remedy="compute the old log-probs once before the first update, and keep them for all inner steps",
        # The surrogate alone: a KL penalty in the reward is of the old log-probs as they are.
        objective=changing("surrogate", old="policy_log_probs"),
        references=("https://github.com/volcengine/verl/issues/6280",),
    ),
    Hypothesis(
        name="ratio-against-sampler",
        code="RDO006",
        stage="kl",
        words="the importance ratio compares the policy with the sampler's log-probs, not with the old ones",
        remedy="state with --set whether the sampler's log-probs replace the old ones, then check again",
        applies=lambda objective: objective.surrogate.old == "old_log_probs",
        objective=changing("surrogate", old="rollout_log_probs"),
        columns=frozenset({"rollout_log_probs"}),
    ),
    Hypothesis(
        name="ratio-inverted",
        code="RDO006",
        stage="kl",
        words="the importance ratio is that of the old policy to the current one, the inverse of what it should be",
        remedy="divide the policy's probability by the old one: exp(log_probs - old_log_probs)",
        rows=_swapped,
        objective=_kl_of_old,
        columns=frozenset({"old_log_probs", "policy_log_probs"}),
    ),
    Hypothesis(
        name="clip-high-ignored",
        code="RDI014",
        stage="loss",
        words="the ratio is clipped by the lower bound on both sides, although an upper one is recorded",
        remedy=STATE,
        applies=lambda objective: objective.surrogate.clip_high != objective.surrogate.clip_low,
        objective=lambda objective: changing("surrogate", clip_high=objective.surrogate.clip_low)(objective),
        unclaimed=CLIPPED,
    ),
    Hypothesis(
        name="not-clipped",
        code="RDG005",
        stage="loss",
        words="the importance ratio is not clipped, although a clip range is recorded",
        remedy="use min(ratio * advantage, clipped ratio * advantage)",
        applies=lambda objective: objective.surrogate.clip_high < _NEVER,
        objective=changing("surrogate", clip_low=_NEVER, clip_high=_NEVER),
        unclaimed=CLIPPED,
    ),
    Hypothesis(
        name="gates-ignored",
        code="RDI014",
        stage="loss",
        words="the policy term masks and weights no token, although an option says so",
        remedy=STATE,
        applies=lambda objective: bool(objective.gates),
        objective=lambda objective: replace(objective, gates=()),
        unclaimed=CLIPPED | {"sampler_gap"},
    ),
    *(
        Hypothesis(
            name=f"ratio-of-{level}s",
            code="RDI014",
            stage="loss",
            words=f"the importance ratio is that of a {level}, and not as recorded",
            remedy=STATE,
            applies=partial(_is_of_another_level, level),
            objective=_of_level(level),
            unclaimed=CLIPPED,
        )
        for level in ("token", "sequence")
    ),
    *(
        Hypothesis(
            name=f"entropy-bonus-{name}",
            code=code,
            stage="loss",
            words=f"{words}, although a coefficient is recorded",
            remedy=remedy,
            applies=lambda objective: objective.entropy_bonus is not None,
            metrics=_with_entropy(factor),
            columns=frozenset({"entropy"}),
        )
        for name, code, words, remedy, factor in (
            ("flipped", "RDG005", "the loss grows with the entropy", "subtract the bonus from the loss", -1),
            ("left-out", "RDI014", "the loss has no entropy bonus", STATE, 0),
        )
    ),
    *(
        Hypothesis(
            name="by-rank" + ("-token-mean" if mode else ""),
            code="RDG006",
            stage="kl",
            words=f"the loss and its metrics are {'token means' if mode else 'made'} rank by rank, and the mean over "
            "ranks is taken however many tokens each has",
            remedy="sum the tokens of all ranks before dividing by their number",
            applies=partial(_aggregates_otherwise, mode),
            rows=by_rank,
            objective=partial(_changed, mode=mode) if mode else None,
            columns=frozenset({"optim_step_id", "rank"}),
            references=("https://github.com/huggingface/trl/pull/6380",),
        )
        for mode in ("", "token-mean")
    ),
)
