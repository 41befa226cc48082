"""The table of fixes: each is an edit of an objective, with its story upstream."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

from rolloutdoctor.objective.objective import KlBuffer, Objective, RowSet
from rolloutdoctor.objective.required_columns import has_time_axis
from rolloutdoctor.results.errors import UsageError, nearest
from rolloutdoctor.search.hypotheses.hypothesis import ObjectiveEdit, always, changing

Condition = Callable[[Objective], bool]


@dataclass(frozen=True)
class Fix:
    """A named edit of what a trainer computes.

    Attributes:
        name: what `--fix` takes.
        summary: what it changes, in one line.
        story: where it comes from and how it stands upstream.
        stage: the first stage of the audit that it reaches (`audit.tally.STAGES`).
        contested: True if upstream holds the present behaviour to be a choice.
        applies: tells whether it is about what an objective computes.
        variants: name to edit; the first is the default.
        notes: one line for each variant.
        only_where: variant to what it needs beyond that, where it needs more.
        references: threads and papers.
    """

    name: str
    summary: str
    story: str
    stage: str
    contested: bool
    applies: Condition
    variants: Mapping[str, ObjectiveEdit]
    notes: Mapping[str, str]
    only_where: Mapping[str, Condition]
    references: tuple[str, ...]

    def applies_to(self, objective: Objective, variant: str) -> bool:
        """True if a variant is about what an objective computes."""
        return self.applies(objective) and self.only_where.get(variant, always)(objective)

    def trainers(self, variant: str | None = None) -> tuple[str, ...]:
        """Names of the trainers that it applies to: with a variant, or with any."""
        # The pages of rules name fixes, and load no trainer.
        from rolloutdoctor.trainers.table import TRAINERS

        chosen = self.variants if variant is None else (variant,)
        examples = {trainer.name: trainer.example() for trainer in TRAINERS.values()}
        return tuple(name for name, each in examples.items() if any(self.applies_to(each, one) for one in chosen))


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


def _loses_masked_ends(objective: Objective) -> bool:
    return objective.advantage.masked_end == "lost" and not has_time_axis(objective)


def _kept_reward(objective: Objective) -> Objective:
    return changing("advantage", masked_end="counts")(objective)


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
        references=(
            "https://github.com/huggingface/trl/issues/5588",
            "https://github.com/huggingface/trl/pull/5640",
            "https://arxiv.org/abs/2505.22257",
        ),
    ),
    "rejected-rows": Fix(
        name="rejected-rows",
        summary="leaves fully masked responses out of the group mean and std",
        story=(
            "A response that was fully masked (by rejection, truncation or removal) has no policy gradient, yet its "
            "reward still counts in the mean and standard deviation of its group. The change is proposed for verl, "
            "where the pull request is open; some projects keep such responses in the baseline on purpose, because "
            "their rewards are evidence about the prompt."
        ),
        stage="advantages",
        contested=True,
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
        references=(
            "https://github.com/verl-project/verl/pull/6452",
            "https://github.com/verl-project/verl/pull/6375",
        ),
    ),
    "kl-inplace": Fix(
        name="kl-inplace",
        summary="stores the KL metric in a copy, so that the reward does not overwrite it",
        story=(
            "slime's ppo estimator built its token rewards in place in the tensor of the stored KL, so rollout/kl "
            "logged the reward. The fix changes neither advantages nor loss. It was merged after release 0.3.1."
        ),
        stage="kl",
        contested=False,
        applies=attrgetter("stores_kl"),
        variants={"copy": _copied_kl},
        notes={"copy": "copy the KL before the reward is built"},
        only_where={},
        references=("https://github.com/THUDM/slime/pull/2114",),
    ),
    "loo-std": Fix(
        name="loo-std",
        summary="takes the leave-one-out standard deviation in two passes, so that equal rewards have none",
        story=(
            "NeMo-RL divides by the standard deviation of the other rows of a group where it is above 0, and takes it "
            "as the root of a difference of two float32 means. Where the other rewards are equal the difference is "
            "rounding: of the rewards 1, 0.3, ... 0.3 the first gets an advantage of 7428 instead of 0.7. The change "
            "that leaves such rows undivided was merged after release 0.7.0; a floor of 1e-3 under the deviation was "
            "proposed and closed."
        ),
        stage="advantages",
        contested=False,
        applies=_divides_by_siblings,
        variants={"exact": _exact_deviation},
        notes={"exact": "the exact deviation of the other rows; where it is 0 the centred reward is not divided"},
        only_where={},
        references=(
            "https://github.com/NVIDIA-NeMo/RL/pull/4158",
            "https://github.com/NVIDIA-NeMo/RL/pull/4161",
            "https://github.com/NVIDIA-NeMo/RL/issues/1518",
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
        applies=_divides_by_accumulation,
        variants={"rescaled": _divided_once},
        notes={"rescaled": "one division, and optimizer steps of one generation share its tokens out"},
        only_where={},
        references=("https://github.com/modelscope/ms-swift/blob/3602360a5623/swift/rlhf_trainers/grpo_trainer.py",),
    ),
    "masked-end": Fix(
        name="masked-end",
        summary="gives a response whose last token is masked its reward",
        story=(
            "AReaL puts the reward on the last token of a row and skips masked tokens in its advantages, so that a row "
            "that ends in a masked one (the output of a tool, for example) trains on an advantage of 0. Its reward "
            "still counts in the baseline. miles, which had the same, places it on the last trained token now."
        ),
        stage="advantages",
        contested=False,
        applies=_loses_masked_ends,
        variants={"last-trained": _kept_reward},
        notes={"last-trained": "the reward lies on the last trained token"},
        only_where={},
        references=("https://github.com/radixark/miles/pull/1827",),
    ),
}


@dataclass(frozen=True)
class ChosenFix:
    """A fix with its variant, as in ``zero-std:pr5640``."""

    fix: Fix
    variant: str

    @property
    def label(self) -> str:
        """``NAME:VARIANT``."""
        return f"{self.fix.name}:{self.variant}"

    def applies_to(self, objective: Objective) -> bool:
        """True if the fix, in this variant, is about what the objective computes."""
        return self.fix.applies_to(objective, self.variant)

    def apply(self, objective: Objective) -> Objective:
        """Return the edited objective.

        Raises:
            UsageError: if the fix is not about what the objective computes.
        """
        if not self.applies_to(objective):
            trainers = ", ".join(self.fix.trainers(self.variant)) or "other options"
            raise UsageError(f"fix {self.label} applies to {trainers}, not to this run of {objective.trainer}")
        return self.fix.variants[self.variant](objective)


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
