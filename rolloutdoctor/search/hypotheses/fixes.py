"""The table of fixes: each is an edit of an objective, with its threads upstream."""

from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter

from rolloutdoctor.objective.corrections import TermWeight
from rolloutdoctor.objective.estimators import Axis
from rolloutdoctor.objective.objective import KlBuffer, Objective, RowSet
from rolloutdoctor.objective.required_columns import has_time_axis
from rolloutdoctor.results.errors import UsageError, nearest
from rolloutdoctor.search.hypotheses.fix import ChosenFix, Fix, Thread
from rolloutdoctor.search.hypotheses.hypothesis import always, changing, has_groups
from rolloutdoctor.search.hypotheses.reward_fixes import REWARD_FIXES

__all__ = ["FIXES", "ChosenFix", "Fix", "choose", "compared"]


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
    return changing("aggregation", mode="generation-token-mean-unscaled")(objective)


def _copied_kl(objective: Objective) -> Objective:
    return replace(objective, kl_buffer=KlBuffer.COPY)


def _exact_deviation(objective: Objective) -> Objective:
    return replace(objective, advantage=replace(objective.advantage, one_pass=False, single=False))


def _draws_rows(objective: Objective) -> bool:
    return objective.advantage.draws_advantages


def _own_advantages(objective: Objective) -> Objective:
    return changing("advantage", drawn="masks alone" if objective.advantage.draws_masks else None)(objective)


def _divides_by_siblings(objective: Objective) -> bool:
    return objective.advantage.spec.of_others and objective.advantage.scale == "group"


def _rejects_rows(gate: TermWeight) -> bool:
    """True if a multiplier takes whole rows out of the policy term, and leaves their KL term."""
    if gate.on_kl or gate.inside or gate.kind == "high_entropy" or gate.level == "pack":
        return False
    is_bounded = gate.low is not None or gate.high is not None
    return gate.kind != "importance" or (gate.level != "token" and gate.outside == "zero" and is_bounded)


def _rejects_rows_with_kl(objective: Objective) -> bool:
    return objective.kl_loss is not None and any(map(_rejects_rows, objective.gates))


def _no_kl_of_rejected(objective: Objective) -> Objective:
    gates = (replace(gate, rejects_kl=True) if _rejects_rows(gate) else gate for gate in objective.gates)
    return replace(objective, gates=tuple(gates))


def _knows_rounding(objective: Objective) -> bool:
    return objective.advantage.is_group_score and objective.advantage.knows_single


def _exact_zero(objective: Objective) -> Objective:
    return changing("advantage", exact_zero=True)(objective)


def _counts_masked(objective: Objective) -> bool:
    return objective.aggregation.counted_before_rejection


def _counted_after_masks(objective: Objective) -> Objective:
    return changing("aggregation", counted_before_rejection=False)(objective)


def _is_product(gate: TermWeight) -> bool:
    return gate.kind == "importance" and gate.level == "sequence"


def _weighs_by_products(objective: Objective) -> bool:
    return any(map(_is_product, objective.gates))


def _weighed_by_means(objective: Objective) -> Objective:
    gates = (replace(gate, level="geometric") if _is_product(gate) else gate for gate in objective.gates)
    return replace(objective, gates=tuple(gates))


def _without_truncated(objective: Objective) -> Objective:
    return replace(objective, baseline_rows=objective.baseline_rows.leaving_out(RowSet.TRUNCATED))


_MEANS_OF_MEANS = {"micro-batch-token-mean": "micro_batch_id", "rank-token-mean": "rank"}
"""Means over tokens that are averaged over parts of an optimizer step, and the column that says which."""


def _means_of_means(objective: Objective) -> dict[str, str]:
    """Name of an aggregation of the objective that is one to the column of its parts."""
    means = {"aggregation": objective.aggregation, "policy_aggregation": objective.policy_aggregation}
    return {name: _MEANS_OF_MEANS[mean.mode] for name, mean in means.items() if mean and mean.mode in _MEANS_OF_MEANS}


def _is_mean_of_means(objective: Objective) -> bool:
    return bool(_means_of_means(objective))


def _one_token_mean(objective: Objective) -> Objective:
    for name in _means_of_means(objective):
        objective = changing(name, mode="token-mean")(objective)
    return objective


def _parts_of_step(objective: Objective) -> frozenset[str]:
    return frozenset(_means_of_means(objective).values())


def _trained_tokens(objective: Objective) -> Objective:
    return changing("aggregation", mode="token-mean")(objective)


def _loses_masked_ends(objective: Objective) -> bool:
    rule = objective.advantage
    if rule.spec.axis is Axis.TRAINED_TOKENS:
        return rule.masked_end in ("counts", "lost") and rule.spec.rewards != "none"
    return rule.masked_end == "lost" and not has_time_axis(objective)


def _kept_reward(objective: Objective) -> Objective:
    is_by_token = objective.advantage.spec.axis is Axis.TRAINED_TOKENS
    return changing("advantage", masked_end="last" if is_by_token else "counts")(objective)


def _whitens_slices(objective: Objective) -> bool:
    return objective.advantage.whitened_over == "context-slice"


def _whole_step(objective: Objective) -> Objective:
    return changing("advantage", whitened_over="trained")(objective)


def _counts_empty_rows(objective: Objective) -> bool:
    return objective.aggregation.mode == "token-mean-empty-as-one"


# No lambdas: a fix goes to worker processes by pickle.
FIXES: dict[str, Fix] = {
    "zero-std": Fix(
        name="zero-std",
        code="RDG001",
        summary="removes the KL term of training groups of two or more whose rewards are all equal (max - min = 0)",
        fault="the KL term also trains groups whose rewards are all equal",
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
            "metrics still count those rows (as Unsloth does with UNSLOTH_GRPO_ZERO_VARIANCE_EXCLUDE=1)",
        },
        only_where={"pr5640": attrgetter("advantage.flags_zero_std")},
        upstream=(
            Thread("https://github.com/huggingface/trl/issues/5588", "closed"),
            Thread("https://github.com/huggingface/trl/pull/5640", "closed"),
            Thread("https://github.com/huggingface/trl/pull/7068", "closed"),
        ),
        sources=("https://arxiv.org/abs/2505.22257",),
    ),
    "rejected-rows": Fix(
        name="rejected-rows",
        code="RDA001",
        summary="leaves fully masked responses out of the group mean and std",
        fault="fully masked responses count in the baseline of their group",
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
        code="RDM001",
        summary="stores the KL metric in a copy, so that the reward does not overwrite it",
        fault="the stored KL is overwritten by the reward",
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
        code="RDA007",
        summary="takes the leave-one-out standard deviation in two passes, so that equal rewards have none",
        fault="scores are divided by a leave-one-out deviation that is rounding",
        story=(
            "NeMo-RL divides by the standard deviation of the other rows of a group where it is above 0, and takes it "
            "as the root of a difference of two float32 means. Where the other rewards are equal the difference is 0 "
            "or rounding, by the order in which the processor adds: of the rewards 1, 0.3, ... 0.3 the first gets an "
            "advantage of 0.7 or of up to 7428, which is what adding one after another gives and what is compared "
            "with. The merged change leaves such rows undivided; a floor of 1e-3 under the deviation was proposed "
            "and closed."
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
        code="RDG006",
        summary="divides the loss by the tokens of the generation alone, not by its micro-batches on top",
        fault="loss and gradient are divided by the micro-batches on top of the tokens",
        story=(
            "Before 4.6.0 each micro-batch of ms-swift's dapo, cispo and fipo divides by all tokens of the "
            "generation, and the engine then takes the mean over micro-batches: loss and gradient are "
            "1 / gradient_accumulation_steps of a token mean, while grpo, bnpo and dr_grpo are whole."
        ),
        stage="loss",
        contested=False,
        needs="a token mean that is divided by the micro-batches on top (loss_type = dapo, cispo or fipo)",
        applies=_divides_by_accumulation,
        variants={"rescaled": _divided_once},
        notes={"rescaled": "one division, by all tokens of the generation, as 4.6.0 does"},
        releases={"ms-swift": "before 4.6.0"},
        upstream=(
            Thread("https://github.com/modelscope/ms-swift/pull/10116", "merged", "4.6.0"),
            Thread("https://github.com/modelscope/ms-swift/issues/10117", "open"),
        ),
    ),
    "kl-of-rejected": Fix(
        name="kl-of-rejected",
        code="RDG016",
        summary="removes the KL term of responses that an importance weight or an off-policy mask takes out",
        fault="responses that a weight or a mask rejects keep their KL term",
        story=(
            "TRL multiplies the policy term by the importance weight against the sampler, which sequence_mask sets to "
            "0 outside of its bounds, and then adds the KL term: a rejected response has no policy gradient and is "
            "still pulled towards the reference. Token counts keep such responses. The off-policy mask of "
            "DeepSeek-V3.2, which TRL follows, is defined on the policy term alone, so that this is a choice there."
        ),
        stage="loss",
        contested=True,
        needs="a weight or a mask that takes whole responses out of the policy term, and a KL term in the loss",
        applies=_rejects_rows_with_kl,
        variants={"masked": _no_kl_of_rejected},
        notes={"masked": "the KL term is multiplied by 0 where the policy term is; denominators and metrics stay"},
        is_tried=False,
        releases={
            "trl": "0.26 on with use_vllm and a sequence mask, or an off-policy mask",
            "nemo-rl": "with truncated_importance_sampling_type = seq-mask-tis",
            "skyrl": "with sequence_mask_metric",
        },
        sources=("https://github.com/huggingface/trl/blob/v1.9.0/trl/trainer/grpo_trainer.py",),
    ),
    "exact-equality-std": Fix(
        name="exact-equality-std",
        code="RDA003",
        summary="gives training groups of two or more whose rewards are all equal an advantage of exactly 0",
        fault="float32 rounding gives groups of equal rewards an advantage",
        story=(
            "The float32 mean of equal rewards need not be their value, and their float32 standard deviation need not "
            "be 0: the quotient of the two residues is an advantage of up to 0.9 in size, of one sign for the whole "
            "group (RDA003). It is compared with the trainer's own float32 statistics."
        ),
        stage="advantages",
        contested=False,
        needs="scores divided by the standard deviation of their group, whose float32 sums are known",
        applies=_knows_rounding,
        variants={"zero": _exact_zero},
        notes={"zero": "equal means that the largest reward of the group is the smallest"},
        is_tried=False,
        of_rounding=True,
        sources=("https://github.com/huggingface/trl/blob/v1.9.0/trl/trainer/grpo_trainer.py",),
    ),
    "truncated-out-of-denominator": Fix(
        name="truncated-out-of-denominator",
        code="RDG010",
        summary="counts the tokens that the loss is divided by after responses were masked, not before",
        fault="the denominator counts tokens that were masked",
        story=(
            "TRL's dapo, cispo and vespo divided by all tokens of the generation, counted before "
            "mask_truncated_completions masked truncated responses: the loss shrank by their share, another one in "
            "each step. verl's V1 trainer counts the tokens that rejection masks likewise."
        ),
        stage="loss",
        contested=False,
        needs="a denominator that counts tokens before they are masked",
        applies=_counts_masked,
        variants={"after-masks": _counted_after_masks},
        notes={"after-masks": "every token count of the loss is of the mask that the loss has"},
        is_tried=False,
        releases={
            "trl": "0.22 to 1.8 with mask_truncated_completions",
            "unsloth": "with TRL up to 1.8 and loss_type = dapo",
            "verl": "with trainer.use_v1 and rejections",
        },
        upstream=(
            Thread("https://github.com/huggingface/trl/pull/6439", "merged", "1.9.0"),
            Thread("https://github.com/huggingface/trl/issues/6369", "closed"),
        ),
    ),
    "empty-rows-out-of-denominator": Fix(
        name="empty-rows-out-of-denominator",
        code="RDG010",
        summary="divides a token mean by the trained tokens alone, not by one more for each fully masked response",
        fault="the denominator counts 1 token for each of {masked}",
        story=(
            "With calculate_per_token_loss slime and miles count the tokens of each response and take 1 where there "
            "are none: with T trained tokens and M fully masked responses loss and gradient are T / (T + M) of the "
            "token mean, and how large a step is depends on how many responses were masked."
        ),
        stage="loss",
        contested=False,
        needs="a token mean that counts fully masked responses (calculate_per_token_loss)",
        applies=_counts_empty_rows,
        variants={"trained-tokens": _trained_tokens},
        notes={"trained-tokens": "the loss is divided by the number of trained tokens"},
        releases=dict.fromkeys(("slime", "miles"), "with calculate_per_token_loss"),
        upstream=(Thread("https://github.com/radixark/miles/pull/2796", "open"),),
    ),
    "is-mean-not-sum": Fix(
        name="is-mean-not-sum",
        code="RDO007",
        summary="takes the importance weight of a response from the mean of its log-ratios, not from their sum",
        fault="the importance weight of a response is the product of its ratios",
        story=(
            "The product of a response's ratios leaves its bounds the sooner the longer the response is, although "
            "sampler and trainer differ by the same at each token: the proposal measured a mean weight of 0.569 with "
            "the sum and 0.993 with the mean on one batch. It was closed; the product is the unbiased weight."
        ),
        stage="loss",
        contested=True,
        needs="an importance weight of whole responses that is the product of its tokens' ratios",
        applies=_weighs_by_products,
        variants={"geometric": _weighed_by_means},
        notes={"geometric": "the geometric mean of the ratios of the trained tokens, within the same bounds"},
        is_tried=False,
        releases={
            "trl": "0.26 on with use_vllm and a sequence-level weight",
            "nemo-rl": "with weights of whole responses",
            "skyrl": "with tis_ratio_type = sequence",
        },
        upstream=(
            Thread("https://github.com/huggingface/trl/pull/5815", "closed"),
            Thread("https://github.com/huggingface/trl/issues/5814", "closed"),
        ),
    ),
    "mask-truncated-vote": Fix(
        name="mask-truncated-vote",
        code="RDA001",
        summary="leaves truncated responses that are masked out of the group mean and std, and no others",
        fault="truncated responses without a trained token count in the baseline of their group",
        story=(
            "mask_truncated_completions, overlong filters and their like take a truncated response out of the loss; "
            "its reward, often that of a failure, still counts in the baseline of its group. rejected-rows leaves out "
            "whatever is fully masked, this one what was masked for its length. miles and open-instruct keep such "
            "responses in the baseline on purpose."
        ),
        stage="advantages",
        contested=True,
        needs="an estimator that compares the responses to a prompt",
        applies=has_groups,
        variants={"truncated": _without_truncated},
        notes={"truncated": "truncated by the column status, and without a trained token"},
        is_tried=False,
        upstream=(Thread("https://github.com/NVIDIA-NeMo/RL/pull/4160", "open"),),
        sources=(
            "https://github.com/radixark/miles/pull/3200",
            "https://github.com/allenai/open-instruct/pull/1794",
        ),
    ),
    "global-denominator": Fix(
        name="global-denominator",
        code="RDG006",
        summary="takes one mean over the tokens of all ranks and micro-batches of an optimizer step",
        fault="the loss is a mean of the token means of ranks or micro-batches",
        story=(
            "A mean over ranks or micro-batches of their token means gives a token the more weight the fewer tokens "
            "it shares its part with, so that the update depends on how the step was cut."
        ),
        stage="loss",
        contested=False,
        needs="a mean over ranks or micro-batches of their token means",
        applies=_is_mean_of_means,
        variants={"token-mean": _one_token_mean},
        notes={"token-mean": "the sum over all tokens of the optimizer step, divided by their number"},
        columns=_parts_of_step,
        is_tried=False,
        by_option=True,
        releases={
            "trl": "with loss_type = bnpo",
            "unsloth": "with loss_type = bnpo",
            "ms-swift": "with loss_type = bnpo",
            "prime-rl": "before 0.6.0",
            "skyrl": "with loss_reduction = token_mean_legacy",
        },
        upstream=(
            Thread("https://github.com/PrimeIntellect-ai/prime-rl/pull/2562", "merged", "0.6.0"),
            Thread("https://github.com/PrimeIntellect-ai/prime-rl/issues/2358", "open"),
            Thread("https://github.com/NovaSky-AI/SkyRL/pull/1296", "merged"),
        ),
    ),
    **{fix.name: fix for fix in REWARD_FIXES},
    "masked-end": Fix(
        name="masked-end",
        code="RDA029",
        summary="gives a response whose last token is masked its reward",
        fault="the reward of a response that ends in a masked token is lost",
        story=(
            "AReaL and verl (gae, reinforce_plus_plus, remax) put the reward on the last token of a row and skip "
            "masked tokens in their advantages, so that a row that ends in a masked one (the output of a tool, for "
            "example) is trained as if it had none. In AReaL's baselines it still counts. miles, which had the same, "
            "places it on the last trained token now."
        ),
        stage="advantages",
        contested=False,
        needs="rewards on the last token of a response, which are lost where it is masked",
        applies=_loses_masked_ends,
        variants={"last-trained": _kept_reward},
        notes={"last-trained": "the reward lies on the last trained token"},
        is_tried=False,
        releases={"verl": "with gae, reinforce_plus_plus or remax"},
        sources=("https://github.com/radixark/miles/pull/1827",),
    ),
    "cp-whitening": Fix(
        name="cp-whitening",
        code="RDA010",
        summary="whitens advantages over the tokens of the step, not over the slices of each context-parallel rank",
        fault="the slices of each context-parallel rank are whitened by themselves",
        story=(
            "With context parallelism of n ranks slime cuts a row into 2 n chunks, and rank r has the r-th from the "
            "start and the r-th from the end. Up to 0.3.1 the mean and variance of normalize_advantages were summed "
            "over the ranks of the data-parallel group alone, so that the halves of one row got different shifts and "
            "factors: advantages depended on how many ranks there were. miles has the same."
        ),
        stage="advantages",
        contested=False,
        needs="advantages that are whitened slice by slice",
        applies=_whitens_slices,
        variants={"whole": _whole_step},
        notes={"whole": "mean and variance are over the trained tokens of all ranks"},
        releases={
            "slime": "up to 0.3.1 with normalize_advantages and context_parallel_size above 1",
            "miles": "with normalize_advantages and context_parallel_size above 1",
        },
        upstream=(Thread("https://github.com/THUDM/slime/pull/2235", "merged"),),
    ),
    "own-advantages": Fix(
        name="own-advantages",
        code="RDA026",
        summary="gives every row its own advantages, not those of a row that was drawn",
        fault="rows are trained with the advantages of other rows, which were drawn",
        story=(
            "use_pf_ppo draws the rows of an update anew, by their scores. verl's V1 trainer draws them after the "
            "advantages are made and writes advantages and returns back, but leaves tokens and log-probs where they "
            "were: each trajectory is reinforced for what another one did, and behind the end of a shorter one for "
            "its padding."
        ),
        stage="advantages",
        contested=False,
        needs="advantages of rows that were drawn",
        applies=_draws_rows,
        variants={"own": _own_advantages},
        notes={"own": "every row has its own advantages, on the tokens that are trained as it is"},
        is_tried=False,
        releases={"verl": "0.9.0 to 0.9.1 with use_pf_ppo, gae and the V1 trainer"},
        upstream=(
            Thread("https://github.com/verl-project/verl/pull/7957", "open"),
            Thread("https://github.com/verl-project/verl/issues/7956", "open"),
        ),
    ),
}


def compared(objective: Objective, fixes: Iterable[ChosenFix]) -> Objective:
    """Return the objective that fixes are compared with.

    It has the trainer's own float32 group statistics where a fix is about their rounding: in float64 there is none.
    """
    return objective.in_single() if any(chosen.fix.of_rounding for chosen in fixes) else objective


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
