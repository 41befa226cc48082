"""The table of fixes: each is an edit of an objective, with its threads upstream."""

from dataclasses import replace
from operator import attrgetter

from rolloutdoctor.objective.objective import KlBuffer, Objective, RowSet
from rolloutdoctor.results.errors import UsageError, nearest
from rolloutdoctor.search.hypotheses.fix import ChosenFix, Fix, Thread
from rolloutdoctor.search.hypotheses.hypothesis import always, changing
from rolloutdoctor.search.hypotheses.reward_fixes import REWARD_FIXES

__all__ = ["FIXES", "ChosenFix", "Fix", "choose"]


def _mask_kl(objective: Objective) -> Objective:
    return replace(objective, kl=objective.kl.leaving_out(RowSet.ZERO_STD))


def _mask_completions(objective: Objective) -> Objective:
    masked = replace(
        objective,
        policy=objective.policy.leaving_out(RowSet.STD_FLAGGED),
        kl=objective.kl.leaving_out(RowSet.STD_FLAGGED),
        metric=objective.metric.leaving_out(RowSet.STD_FLAGGED),
    )
    if not objective.aggregation.counted_in_loss:
        return masked
    return replace(masked, denominator=objective.denominator.leaving_out(RowSet.STD_FLAGGED))


def _mask_and_renormalise(objective: Objective) -> Objective:
    return replace(
        objective,
        policy=objective.policy.leaving_out(RowSet.ZERO_STD),
        kl=objective.kl.leaving_out(RowSet.ZERO_STD),
        denominator=objective.denominator.leaving_out(RowSet.ZERO_STD),
    )


def _unmasked_baseline(objective: Objective) -> Objective:
    return replace(objective, baseline_rows=objective.baseline_rows.leaving_out(RowSet.REJECTED))


def _unmasked_baseline_zero(objective: Objective) -> Objective:
    return _unmasked_baseline(objective).with_singleton_rule("zero")


def _unmasked_baseline_by_number(objective: Objective) -> Objective:
    advantage = replace(objective.advantage, numeric_ids="always")
    return replace(_unmasked_baseline(objective), advantage=advantage)


def _reads_ids_as_proposed(objective: Objective) -> bool:
    return objective.advantage.numeric_ids == "proposed"


def _divides_by_accumulation(objective: Objective) -> bool:
    return objective.aggregation.mode == "generation-token-mean-over-micro-batches"


def _divided_once(objective: Objective) -> Objective:
    return changing("aggregation", mode="generation-token-mean")(objective)


def _copied_kl(objective: Objective) -> Objective:
    return replace(objective, kl_buffer=KlBuffer.COPY)


def _exact_deviation(objective: Objective) -> Objective:
    return replace(objective, advantage=replace(objective.advantage, one_pass=False, single=False))


def _divides_by_siblings(objective: Objective) -> bool:
    return objective.advantage.spec.of_others and objective.advantage.scale == "group"


# No lambdas: a fix goes to worker processes by pickle.
FIXES: dict[str, Fix] = {
    "zero-std": Fix(
        name="zero-std",
        summary="removes the KL term of training groups of two or more whose rewards are all equal (max - min = 0)",
        story=(
            "The advantages of such groups are zero, so their only gradient is the KL term. TRL's maintainers regard "
            "this as the published objective, which applies the KL to every token whatever the advantage; the "
            "proposals to change it were closed unmerged. verl and slime do the same if the KL is in the loss."
        ),
        stage="loss",
        contested=True,
        needs="a KL term in the loss",
        applies=attrgetter("has_kl_loss"),
        variants={"loss": _mask_kl, "pr5640": _mask_completions, "renormalised": _mask_and_renormalise},
        notes={
            "loss": "mask the KL term in the loss; denominators stay, and metrics still count those rows",
            "pr5640": "fully mask the rows that TRL itself flags as zero-std, as proposed (float32 std of at most 1e-8 "
            "of the group, or of the batch with scale_rewards = batch or normalize_then_sum; evaluation rows and "
            "groups of one too): token counts inside the loss (bnpo) shrink, and metrics leave those rows out",
            "renormalised": "mask the rows and recompute every token count in a denominator; row counts stay, and "
            "metrics still count those rows",
        },
        only_where={"pr5640": attrgetter("advantage.flags_zero_std")},
        upstream=(
            Thread("https://github.com/huggingface/trl/issues/5588", "open"),
            Thread("https://github.com/huggingface/trl/pull/5640", "closed"),
            Thread("https://github.com/huggingface/trl/pull/7068", "closed"),
        ),
        sources=("https://arxiv.org/abs/2505.22257",),
    ),
    "rejected-rows": Fix(
        name="rejected-rows",
        summary="leaves fully masked responses out of the group mean and std",
        story=(
            "A response that was fully masked (by rejection, truncation or removal) has no policy gradient, yet its "
            "reward still counts in the mean and standard deviation of its group. The change is proposed for verl, "
            "and for NeMo-RL's legacy loops; some projects keep such responses in the baseline on purpose, because "
            "their rewards are evidence about the prompt."
        ),
        stage="advantages",
        contested=True,
        needs="",
        applies=always,
        variants={
            "singleton-raw": _unmasked_baseline,
            "singleton-zero": _unmasked_baseline_zero,
            "pr6452": _unmasked_baseline_by_number,
        },
        notes={
            "singleton-raw": "a single unmasked response gets its raw score where verl does so (as proposed)",
            "singleton-zero": "a single unmasked response gets the advantage 0",
            "pr6452": "rloo_vectorized as in the pull request, which also reads group ids that are whole numbers as "
            "numbers, so that 7 and 007 are one group",
        },
        only_where={"pr6452": _reads_ids_as_proposed},
        upstream=(
            Thread("https://github.com/verl-project/verl/pull/6452", "open"),
            Thread("https://github.com/verl-project/verl/pull/6375", "closed"),
            Thread("https://github.com/NVIDIA-NeMo/RL/pull/4160", "open"),
        ),
    ),
    "kl-inplace": Fix(
        name="kl-inplace",
        summary="stores the KL metric in a copy, so that the reward does not overwrite it",
        story=(
            "slime's ppo estimator built its token rewards in place in the tensor of the stored KL, so rollout/kl "
            "logged the reward. The fix changes neither advantages nor loss."
        ),
        stage="kl",
        contested=False,
        needs="a stored KL of a penalty in the reward",
        applies=attrgetter("stores_kl"),
        variants={"copy": _copied_kl},
        notes={"copy": "copy the KL before the reward is built"},
        releases={"slime": "up to 0.3.1"},
        upstream=(
            Thread("https://github.com/THUDM/slime/pull/2114", "merged"),
            Thread("https://github.com/radixark/miles/pull/1493", "open"),
        ),
    ),
    "loo-std": Fix(
        name="loo-std",
        summary="takes the leave-one-out standard deviation in two passes, so that equal rewards have none",
        story=(
            "NeMo-RL divides by the standard deviation of the other rows of a group where it is above 0, and takes it "
            "as the root of a difference of two float32 means. Where the other rewards are equal the difference is "
            "rounding: of the rewards 1, 0.3, ... 0.3 the first gets an advantage of 7428 instead of 0.7. The merged "
            "change leaves such rows undivided; a floor of 1e-3 under the deviation was proposed and closed."
        ),
        stage="advantages",
        contested=False,
        needs="the standard deviation of a row's siblings",
        applies=_divides_by_siblings,
        variants={"exact": _exact_deviation},
        notes={"exact": "the exact deviation of the other rows; where it is 0 the centred reward is not divided"},
        releases={"nemo-rl": "up to 0.7.0"},
        upstream=(
            Thread("https://github.com/NVIDIA-NeMo/RL/pull/4158", "merged"),
            Thread("https://github.com/NVIDIA-NeMo/RL/pull/4161", "closed"),
            Thread("https://github.com/NVIDIA-NeMo/RL/issues/1518", "closed"),
        ),
    ),
    "one-over-accumulation": Fix(
        name="one-over-accumulation",
        summary="divides the loss by the tokens of the generation alone, not by its micro-batches on top",
        story=(
            "Each micro-batch of ms-swift's dapo, cispo and fipo divides by all tokens of the generation, and the "
            "engine then takes the mean over micro-batches: loss and gradient are 1 / gradient_accumulation_steps of "
            "a token mean, while grpo, bnpo and dr_grpo are whole. TRL scales these losses up for it."
        ),
        stage="loss",
        contested=False,
        needs="a token mean that is divided by the micro-batches on top (loss_type = dapo, cispo or fipo)",
        applies=_divides_by_accumulation,
        variants={"rescaled": _divided_once},
        notes={"rescaled": "one division, and optimizer steps of one generation share its tokens out"},
        releases={"ms-swift": "before 4.6.0"},
        upstream=(
            Thread("https://github.com/modelscope/ms-swift/pull/10116", "merged", "4.6.0"),
            Thread("https://github.com/modelscope/ms-swift/issues/10117", "open"),
        ),
    ),
    **{fix.name: fix for fix in REWARD_FIXES},
}


def choose(text: str) -> ChosenFix:
    """Read ``NAME`` or ``NAME:VARIANT``.

    Raises:
        UsageError: if there is no such fix or variant.

    >>> choose("zero-std").label
    'zero-std:loss'
    """
    name, _, variant = text.partition(":")
    if name not in FIXES:
        raise UsageError(f"no fix {name!r} (known: {', '.join(FIXES)}){nearest(name, list(FIXES))}")
    variants = list(FIXES[name].variants)
    variant = variant or variants[0]
    if variant not in variants:
        raise UsageError(
            f"fix {name} has no variant {variant!r} (known: {', '.join(variants)}){nearest(variant, variants)}"
        )
    return ChosenFix(FIXES[name], variant)
