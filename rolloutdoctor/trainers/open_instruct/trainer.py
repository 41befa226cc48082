"""open-instruct: options of its GRPO, its objective, and its logged metrics.

Read and compared: main of 2026-08 (e6c3044aa620), whose options count as those of 0.3.0, 0.1.0 and 0.2.0. What it packs
into one sequence is a micro-batch here.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from rolloutdoctor.objective.corrections import TermWeight
from rolloutdoctor.objective.objective import AdvantageRule, Aggregation, KlTerm, Objective, Surrogate
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers.open_instruct.logged import (
    BY_PACK,
    ESTIMATORS,
    KL_BOUND,
    REFERENCE_METRICS,
    RHO_BY_RANK,
    RHO_DROPS,
)
from rolloutdoctor.trainers.options import Config, Option, unknown_loss
from rolloutdoctor.trainers.releases import ReadCode
from rolloutdoctor.trainers.spec import Choices, Log, LossParts, OptionRoles, PartOptions, Trainer, Updates, every

if TYPE_CHECKING:
    from rolloutdoctor.evaluation.evaluate import Evaluation

_NORM, _DENOMINATOR, _SAMPLES = "advantage_normalization_type", "loss_denominator", "num_samples_per_prompt_rollout"
INVALID = 1.0
"""The log-prob that stands in for NaN: that of a token which the sampler gave none for."""
BOUND = 10.0
"""Largest absolute log-ratio of trainer and sampler."""
_OF_RHO = {"use_rho_correction": (True,)}


def _rho(name: str, default: float, meaning: str) -> Option:
    return Option(
        f"rho_{name}_bound", "number", default, f"{meaning} (0: none)", since="0.3.0", low=0, only_with=_OF_RHO
    )


def _of_pack(name: str, meaning: str) -> Option:
    return Option(
        name,
        "flag",
        False,
        meaning,
        since="0.3.0",
        only_with=_OF_RHO,
    )


OPTIONS = (
    Option(
        _NORM,
        "word",
        "centered",
        "what the centred scores are divided by: nothing, or the standard deviation of the group",
        changes=(("0.3.0", "standard"),),
        choices=("standard", "centered"),
    ),
    Option("beta", "number", 0.05, "coefficient of the KL term", low=0),
    Option("kl_estimator", "integer", 2, "estimator of the KL: k1, k2, k3, or k1 times the ratio", low=0, high=3),
    Option("load_ref_policy", "flag", True, "there is a reference model"),
    Option("loss_fn", "word", "dapo", "the policy term", choices=("dapo", "cispo")),
    Option("clip_lower", "number", 0.2, "lower clip range of the ratio", low=0, only_with={"loss_fn": ("dapo",)}),
    Option("clip_higher", "number", 0.272, "upper clip range of the ratio", changes=(("0.3.0", 0.2),), low=0),
    Option(_DENOMINATOR, "any", "token", "what sums are divided by: token (their number), or a number"),
    Option(
        "use_rho_correction",
        "flag",
        True,
        "multiply the policy term by trainer over sampler",
        changes=(("0.3.0", False),),
        since="0.3.0",
    ),
    _rho("clamp_lower", 0.0, "smallest weight"),
    _rho("clamp_upper", 2.0, "largest weight"),
    _rho("mask_lower", 0.0, "tokens of a smaller ratio are dropped"),
    _rho("mask_upper", 0.0, "tokens of a larger ratio are dropped"),
    _of_pack("rho_mask_sequence_level", "weigh by the geometric mean of the ratios of the packed sequence"),
    _of_pack("rho_mask_tv_divergence", "drop tokens by the mean divergence of the packed sequence"),
    Option(
        "truncated_importance_sampling_ratio_cap",
        "number",
        0.0,
        "largest weight of trainer over sampler (0: no weights)",
        until="0.3.0",
        low=0,
    ),
    Option("use_vllm_logprobs", "flag", False, "compare the policy with the sampler's log-probs"),
    Option("num_mini_batches", "integer", 1, "optimizer steps of a pass over the batch", low=1),
    Option("num_epochs", "integer", 1, "passes over the batch", low=1),
    Option(_SAMPLES, "integer", 4, "responses per prompt", low=1, decides=False),
    Option(
        "filter_zero_std_samples",
        "flag",
        True,
        "drop groups without a spread of rewards before they are trained on or saved",
        decides=False,
    ),
    Option(
        "mask_truncated_completions",
        "flag",
        False,
        "drop responses that did not stop before groups are made, by position, of what is left",
        decides=False,
    ),
    Option("response_length", "integer", 256, "largest length of a response", low=1, decides=False),
    Option("sequence_parallel_size", "integer", 1, "ranks that share a sequence", low=1, decides=False),
    Option("record_entropy", "flag", False, "log the entropy", decides=False),
)


def objective(config: Config) -> Objective:
    """Build what the policy update computes.

    Raises:
        UsageError: for combinations that open-instruct itself refuses.
    """
    beta, has_reference = config.number("beta"), bool(config["load_ref_policy"])
    if beta and not has_reference:
        raise UsageError("load_ref_policy = false needs beta = 0, and so does open-instruct")
    sampler = bool(config["use_vllm_logprobs"])
    single = single_update(config)
    estimator, weighted = ESTIMATORS[int(config.number("kl_estimator"))]
    gates = _gates(config, of="policy_log_probs" if single else "old_log_probs")
    if sampler and gates:
        raise UsageError(
            "use_vllm_logprobs = true leaves no ratio to the sampler to weigh by; open-instruct refuses it"
        )
    old: Literal["old_log_probs", "rollout_log_probs", "policy_log_probs"]
    old = "rollout_log_probs" if sampler else "policy_log_probs" if single else "old_log_probs"
    return Objective(
        trainer="open-instruct",
        version=".".join(map(str, config.version)),
        advantage=AdvantageRule(
            estimator="grpo",
            scale="group" if config[_NORM] == "standard" else "none",
            epsilon=1e-8,
            biased_std=True,
            singleton="zero",
        ),
        surrogate=_surrogate(config, old),
        aggregation=_aggregation(config),
        kl_loss=KlTerm(
            estimator=estimator, coef=beta, ratio_weighted=weighted, input_bound=KL_BOUND, bounds_ratio=False
        )
        if beta
        else None,
        gates=gates,
        metric_columns=frozenset({"entropy", "ref_log_probs", "micro_batch_id", "rank"}),
        also_logs=_also_logs(config),
        unknown_loss=unknown_loss(
            f"sequence_parallel_size = {config['sequence_parallel_size']}",
            "a weight or a bound is a mean over a packed sequence that ranks share",
        )
        if config["sequence_parallel_size"] != 1 and any(gate.level == "pack" for gate in gates)
        else "",
    )


def _also_logs(config: Config) -> frozenset[str]:
    """Return the metrics that options switch on; where ranks share a sequence, those of its parts are not known."""
    newer, is_unsplit = config.version >= (0, 3, 0), config["sequence_parallel_size"] == 1
    named = {
        REFERENCE_METRICS: config["load_ref_policy"],
        ("policy/entropy_avg",): config["record_entropy"],
        BY_PACK: is_unsplit,
        RHO_BY_RANK: newer and is_unsplit,
        RHO_DROPS: newer,
    }
    return frozenset(metric for metrics, is_on in named.items() if is_on for metric in metrics)


def _surrogate(config: Config, old: Literal["old_log_probs", "rollout_log_probs", "policy_log_probs"]) -> Surrogate:
    high = config.number("clip_higher")
    missing = INVALID if old == "rollout_log_probs" else None
    if config.word("loss_fn") == "cispo":
        return Surrogate(kind="cispo_capped", clip_low=1.0, clip_high=1 + high, old=old, nan_log_prob=missing)
    low = config.number("clip_lower")
    return Surrogate(kind="ppo_dual_clip", clip_low=low, clip_high=high, old=old, nan_log_prob=missing)


def _aggregation(config: Config) -> Aggregation:
    """Build what sums are divided by.

    Raises:
        UsageError: if it is no word or number that open-instruct takes.
    """
    denominator = config[_DENOMINATOR]
    if denominator == "token":
        return Aggregation(mode="token-mean")
    try:
        number = float(denominator)  # type: ignore[arg-type]  # anything that is not a number raises
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < float("inf"):
        raise UsageError(f"{_DENOMINATOR} = {denominator}: expected token, or a number above 0")
    return Aggregation(mode="token-sum-norm", length=number)


def _gates(config: Config, of: Literal["old_log_probs", "policy_log_probs"]) -> tuple[TermWeight, ...]:
    """Build what multiplies the policy term: a weight within bounds, and what is dropped."""
    weight = TermWeight(kind="importance", of=of, log_ratio_bound=BOUND, nan_log_prob=INVALID)
    if config.version < (0, 3, 0):
        cap = config.number("truncated_importance_sampling_ratio_cap")
        return (replace(weight, high=cap),) if cap else ()
    if not config["use_rho_correction"]:
        return ()
    low, high, least, most = (
        config.number(f"rho_{name}_bound") or None
        for name in ("clamp_lower", "clamp_upper", "mask_lower", "mask_upper")
    )
    divergence, by_pack = config["rho_mask_tv_divergence"], config["rho_mask_sequence_level"]
    if by_pack:
        weight = replace(weight, level="pack")
    bounded = replace(weight, low=low, high=high)
    if least is None and most is None:
        return (bounded,)
    mask = replace(weight, low=least, high=most, outside="zero", indicator=True)
    return bounded, replace(mask, kind="divergence", level="pack") if divergence else mask


def single_update(config: Config) -> bool:
    """Tell whether a batch is trained on once: its old log-probs are those at the loss then."""
    return config["num_mini_batches"] == 1 and config["num_epochs"] == 1 and not config["use_vllm_logprobs"]


def updates_a_batch(config: Config) -> int | str:
    """Mini-batches of a generated batch, times passes over it."""
    names = ("num_mini_batches", "num_epochs")
    unstated = [name for name in names if not config.settings[name].is_stated]
    batches, passes = (int(config.number(name)) for name in names)
    return ", ".join(unstated) or batches * passes


def group_size(config: Config, split: str) -> int | None:
    """Return how many responses a prompt gets: groups are made by position."""
    return int(config.number(_SAMPLES)) if split == "train" else None


def metrics(evaluation: "Evaluation") -> Mapping[str, float]:
    """open-instruct's logged metrics; see `rolloutdoctor.trainers.open_instruct.metrics`."""
    from rolloutdoctor.trainers.open_instruct import metrics as own

    return own.open_instruct(evaluation)


def loss_share(evaluation: "Evaluation") -> float | None:
    """Return the share of the step's loss that is logged; None where the packs are not known."""
    from rolloutdoctor.trainers.open_instruct import metrics as own

    total = own.total_of(evaluation)
    return None if total is None or not evaluation.loss else total / evaluation.loss


def loss_parts(logged: Mapping[str, float], config: Config | None) -> LossParts | None:
    """The policy term and the KL term, which add up to the loss."""
    names = ("loss/policy_avg", "loss/kl_avg")
    return None if any(name not in logged for name in names) else LossParts(*(logged[name] for name in names))


_RECORD = (
    "open-instruct saves no value of the trainer: record them in its training step with "
    "rolloutdoctor.recorders.own_loop"
)
_TRACES = "run open-instruct with --save_traces, and give --rollouts_save_path"

TRAINER = Trainer(
    name="open-instruct",
    title="open-instruct",
    newest="0.3.0",
    oldest="0.1.0",
    read=(ReadCode("0.1.0", "0.2.0"), ReadCode("0.3.0", commit="e6c3044aa620", main_of="2026-08")),
    options=OPTIONS,
    objective=objective,
    metrics=metrics,
    group_size=group_size,
    log=Log(
        loss="loss/total_avg",
        grad_norm="optim/grad_norm",
        kl=("objective/kl2_avg", *(name for name in REFERENCE_METRICS if name != "objective/kl2_avg")),
        loss_is_whole=True,
        quantities={
            "loss/total_avg": "loss",
            "loss/policy_avg": "policy_mean",
            "loss/kl_avg": "kl_mean",
            **{
                name: f"reference_{label}"
                for name, label in zip(REFERENCE_METRICS, ("k1", "k2", "k3", "k1_ratio"), strict=True)
            },
            "policy/entropy_avg": "entropy",
            "policy/clipfrac_avg": "clip_share",
            "val/ratio": "ratio",
            "val/ratio_var": "ratio_spread",
            "val/rho_weight": "sampler_gap",
            "val/rho_*frac": "mean",
            "val/advantages_*": "advantages",
            "scores": "rewards",
        },
        not_recomputed={
            "optim/grad_norm, lr": "they need the parameters and the schedule",
            "debug/*": "they are of the last packed sequence of each rank",
            "val/*_hist": "they are histograms",
            "val/sequence_lengths_*solved, unsolved_*": "the largest possible reward is that of the verifiers",
            "real_batch_size_ratio, packed_ratio, val/total_*, batch/*": "they count packs and dropped groups",
            "objective/*_reward, objective/*_correct_rate, eval/*": "they are of verifiers, and of evaluations",
            "model_step_*, num_steps_off_policy, stale_results_dropped": "they are of the versions that sampled",
            "tools/*, env/*, time/*, val/num_*, learner_*, actor_*": "they are timings and counts",
        },
        loss_share=loss_share,
        loss_parts=loss_parts,
    ),
    recording={
        "reward": _TRACES,
        "advantage": _TRACES,
        "group_id": _TRACES,
        "rollout_log_probs": _TRACES,
        "*": _RECORD,
        "metrics": "give an export of its W&B run (--with_tracking) as well",
    },
    roles=OptionRoles(
        kl="beta",
        group={"train": _SAMPLES},
        length="response_length",
        truncation="mask_truncated_completions",
        must_state={_NORM: "centered"},
    ),
    updates=Updates(single=single_update, a_batch=updates_a_batch),
    parts={
        Part.KL_LOSS: PartOptions({"beta": (0,), "load_ref_policy": (False,)}),
        Part.KL_REWARD: PartOptions(never="open-instruct has no KL penalty in the reward"),
        Part.KL_ESTIMATOR: PartOptions({"kl_estimator": ()}),
        Part.GROUP_BASELINE: PartOptions({_NORM: ()}),
        Part.GROUP_STD: PartOptions({_NORM: ("centered",)}),
        Part.POLICY_LOSS: PartOptions({"loss_fn": (), _DENOMINATOR: ()}),
    },
    choices=Choices(
        advantage=every(advantage_normalization_type=("centered", "standard")),
        kl=every(kl_estimator=tuple(range(len(ESTIMATORS)))),
        loss=every(loss_fn=("dapo", "cispo"), use_rho_correction=(True, False), clip_higher=(0.272, 0.2)),
    ),
)
