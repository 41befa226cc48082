"""Every hypothesis, in the order in which they are tried: of two that explain the same values the first is named."""

from functools import partial

from rolloutdoctor.search.hypotheses.advantage_bounds import ADVANTAGE_BOUNDS
from rolloutdoctor.search.hypotheses.advantage_fits import BLOCKS, ORDER
from rolloutdoctor.search.hypotheses.advantage_lines import DIVISOR, LINE, WEIGHTS
from rolloutdoctor.search.hypotheses.advantage_options import ADVANTAGE_OPTIONS
from rolloutdoctor.search.hypotheses.clip_range import CLIP_RANGE
from rolloutdoctor.search.hypotheses.drawn_rows import DRAWN_ROWS
from rolloutdoctor.search.hypotheses.fixes import FIXES
from rolloutdoctor.search.hypotheses.hypothesis import Family, Hypothesis
from rolloutdoctor.search.hypotheses.kl_terms import KL_COEFFICIENT, KL_TERMS
from rolloutdoctor.search.hypotheses.loss_terms import LOSS_TERMS
from rolloutdoctor.search.hypotheses.masks import MASKS
from rolloutdoctor.search.hypotheses.metric_definitions import METRIC_DEFINITIONS
from rolloutdoctor.search.hypotheses.partitions import PARTITIONS
from rolloutdoctor.search.hypotheses.reward_fits import BOUNDS, OTHER_ROWS
from rolloutdoctor.search.hypotheses.reward_flow import PADDING_COUNTED, REWARD_FLOW, ZERO_REPLACED
from rolloutdoctor.search.hypotheses.row_order import MISALIGNED_REWARDS, MISPLACED_LOG_PROBS, MISSING_REWARDS
from rolloutdoctor.search.hypotheses.whitening import WHITENINGS

FIX_CODE = "fix"
"""Stands for the code of a rule in hypotheses that are fixes: a run that agrees with one has it."""


def _as_hypotheses() -> tuple[Hypothesis, ...]:
    return tuple(
        Hypothesis(
            name=f"{fix.name}:{variant}",
            code=FIX_CODE,
            stage=fix.stage,
            words=f"the run was made with the fix {fix.name}: {fix.notes[variant]}",
            remedy="",
            applies=partial(fix.applies_to, variant=variant),
            objective=edit,
            columns=frozenset({"response_mask"}),
            references=fix.references,
        )
        for fix in FIXES.values()
        if fix.is_tried
        for variant, edit in fix.variants.items()
    )


HYPOTHESES: tuple[Hypothesis, ...] = (
    PADDING_COUNTED,
    *_as_hypotheses(),
    *MISSING_REWARDS,
    *PARTITIONS,
    *MISALIGNED_REWARDS,
    *REWARD_FLOW,
    *WHITENINGS,
    *ADVANTAGE_OPTIONS,
    *MISPLACED_LOG_PROBS,
    # Where the policy term is 0 a factor of the loss is one of its KL term, and more trainers have had the former.
    *LOSS_TERMS,
    *KL_TERMS,
    *MASKS,
    *METRIC_DEFINITIONS,
)

FAMILIES: tuple[Family, ...] = (
    ADVANTAGE_BOUNDS,
    DRAWN_ROWS,
    BOUNDS,
    ZERO_REPLACED,
    DIVISOR,
    WEIGHTS,
    BLOCKS,
    ORDER,
    LINE,
    OTHER_ROWS,
    KL_COEFFICIENT,
    CLIP_RANGE,
)
"""Families of hypotheses, tried where none of these explains a disagreement."""
