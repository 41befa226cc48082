"""The table of fixes: each is an edit of an objective, with its story upstream."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rolloutdoctor.objective.objective import KlBuffer, Objective, RowSet
from rolloutdoctor.results.errors import UsageError, nearest

Edit = Callable[[Objective], Objective]


@dataclass(frozen=True)
class Fix:
    """A named edit of what a trainer computes.

    Attributes:
        name: what `--fix` takes.
        summary: what it changes, in one line.
        story: where it comes from and how it stands upstream.
        contested: True if upstream holds the present behaviour to be a choice.
        trainers: names of the trainers it applies to.
        variants: name to edit; the first is the default.
        notes: one line for each variant.
        only_for: variant to the trainers it was proposed for, where these are fewer.
        references: threads and papers.
    """

    name: str
    summary: str
    story: str
    contested: bool
    trainers: tuple[str, ...]
    variants: Mapping[str, Edit]
    notes: Mapping[str, str]
    only_for: Mapping[str, tuple[str, ...]]
    references: tuple[str, ...]


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


def _live_voters(objective: Objective) -> Objective:
    return replace(objective, vote=objective.vote.leaving_out(RowSet.REJECTED))


def _live_voters_zero(objective: Objective) -> Objective:
    return _live_voters(objective).with_lone("zero")


def _copied_kl(objective: Objective) -> Objective:
    return replace(objective, kl_buffer=KlBuffer.COPY)


FIXES: dict[str, Fix] = {
    "zero-std": Fix(
        name="zero-std",
        summary="no KL term on train groups of two or more whose rewards are all equal (max - min = 0)",
        story=(
            "Such groups have zero advantage, so their whole gradient is the KL term. TRL's maintainers hold this to "
            "be the published objective, which applies the KL to every token whatever the advantage; the proposals to "
            "change it were closed unmerged. verl and slime behave the same with the KL in the loss."
        ),
        contested=True,
        trainers=("trl", "verl", "slime"),
        variants={"loss": _mask_kl, "pr5640": _mask_completions, "renormalised": _mask_and_renormalise},
        notes={
            "loss": "mask the KL term at loss level; denominators are kept, and metrics count those rows as before",
            "pr5640": "mask the completions of the rows that TRL itself flags as zero-std, as proposed (a float32 std "
            "of at most 1e-8, of the group, or of the batch with scale_rewards = batch or normalize_then_sum; eval "
            "rows and groups of one too): token counts made inside the loss (bnpo) shrink, and metrics leave those "
            "rows out",
            "renormalised": "mask the rows and recompute every token count in a denominator; row counts stay, and "
            "metrics count those rows as before",
        },
        only_for={"pr5640": ("trl",)},
        references=(
            "https://github.com/huggingface/trl/issues/5588",
            "https://github.com/huggingface/trl/pull/5640",
            "https://arxiv.org/abs/2505.22257",
        ),
    ),
    "rejected-rows": Fix(
        name="rejected-rows",
        summary="only rows with at least one trained token left vote in the group's baseline",
        story=(
            "A row whose tokens were all masked (rejection, truncation, removal) trains nothing, yet its reward still "
            "enters the mean and standard deviation of its siblings. Proposed for verl and open there; some projects "
            "keep such rows in the baseline on purpose, because their rewards are evidence about the prompt."
        ),
        contested=True,
        trainers=("trl", "trl-rloo", "verl", "slime"),
        variants={"singleton-raw": _live_voters, "singleton-zero": _live_voters_zero},
        notes={
            "singleton-raw": "the only survivor of a group gets its raw score where verl gives one (as proposed)",
            "singleton-zero": "the only survivor of a group gets 0",
        },
        only_for={},
        references=(
            "https://github.com/verl-project/verl/pull/6452",
            "https://github.com/verl-project/verl/pull/6375",
        ),
    ),
    "kl-inplace": Fix(
        name="kl-inplace",
        summary="the stored KL metric is a copy, not the reward buffer",
        story=(
            "slime's ppo estimator built its reward in the tensor that holds the stored KL, so rollout/kl logged the "
            "reward. Advantages and loss are the same with the fix. Merged after release 0.3.1."
        ),
        contested=False,
        trainers=("slime",),
        variants={"copy": _copied_kl},
        notes={"copy": "store the KL before the reward is built"},
        only_for={},
        references=("https://github.com/THUDM/slime/pull/2114",),
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
        """True if the fix, in this variant, is about the objective's trainer."""
        return objective.trainer in self.fix.only_for.get(self.variant, self.fix.trainers)

    def apply(self, objective: Objective) -> Objective:
        """Return the edited objective.

        Raises:
            UsageError: if the fix is not about the objective's trainer.
        """
        if not self.applies_to(objective):
            trainers = ", ".join(self.fix.only_for.get(self.variant, self.fix.trainers))
            raise UsageError(f"fix {self.label} is about {trainers}, and the run was made by {objective.trainer}")
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
