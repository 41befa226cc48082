"""slime: its flags with underscores, its objective, and its logged metrics.

Read and compared: slime 0.3.1, and the commits after that release that fixed `rollout/kl`, `eps_clip_c` and whitening
with context parallelism.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from rolloutdoctor.objective.corrections import TermWeight
from rolloutdoctor.objective.objective import (
    AdvantageRule,
    Aggregation,
    EntropyBonus,
    KlBuffer,
    KlTerm,
    Objective,
    Surrogate,
)
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers.options import Config, Option
from rolloutdoctor.trainers.releases import ReadCode
from rolloutdoctor.trainers.slime import mis as slime_mis
from rolloutdoctor.trainers.slime.mis import MIS
from rolloutdoctor.trainers.spec import Choices, Log, OptionRoles, PartOptions, StoredKl, Trace, Trainer, Updates, every

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.data.batch import RolloutBatch
    from rolloutdoctor.evaluation.evaluate import Evaluation

EPSILON = 1e-6
"""Constant that slime adds to the standard deviation of a group."""

ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"

MIS_FILE = "examples/train_infer_mismatch_helper/mis.py:compute_mis_weights_with_cp"
"""Path of slime's correction helper, as slime's own help spells it."""

KL_TYPES = ("k1", "k2", "k3", "low_var_kl")

OPTIONS = (
    Option(
        "advantage_estimator",
        "word",
        "grpo",
        "how rewards become advantages",
        choices=("grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"),
    ),
    Option(
        "kl_coef", "number", 0.0, "coefficient of the KL penalty in the rewards; grpo, gspo and cispo ignore it", low=0
    ),
    Option("use_kl_loss", "flag", False, "add a KL term to the loss"),
    Option("kl_loss_coef", "number", 0.0, "coefficient of the KL term", low=0),
    Option("kl_loss_type", "word", "k1", "the KL estimator, in the reward and in the loss", choices=KL_TYPES),
    Option("use_unbiased_kl", "flag", False, "multiply the KL of the loss by the importance ratio"),
    Option("eps_clip", "number", 0.2, "lower clip range of the importance ratio", low=0),
    Option("eps_clip_high", "number", None, "upper clip range of the importance ratio; null: eps_clip", low=0),
    Option(
        "eps_clip_c",
        "number",
        None,
        "dual clip for negative advantages, after release 0.3.1; null: none",
        low=1,
        works_after=("0.3.1", "slime reads it but does not pass it to the loss, so there is no dual clip"),
    ),
    Option("gamma", "number", 1.0, "discount per token", low=0, high=1),
    Option("lambd", "number", 1.0, "lambda of generalised advantage estimation", low=0, high=1),
    Option("normalize_advantages", "flag", False, "whiten the advantages over the tokens of the step"),
    Option("rewards_normalization", "flag", True, "centre the rewards by group"),
    Option("grpo_std_normalization", "flag", True, "divide by the group's standard deviation"),
    Option(
        "calculate_per_token_loss", "flag", False, "average the loss over tokens instead of over per-response means"
    ),
    Option(
        "use_rollout_logprobs", "flag", False, "use the sampler's log-probs as old log-probs, in the KL and the ratio"
    ),
    Option(
        "use_tis", "flag", False, "multiply the policy term by importance weights (trainer over sampler)", decides=False
    ),
    Option("tis_clip", "number", 2.0, "upper bound of the importance weights", low=0, only_with={"use_tis": (True,)}),
    Option(
        "tis_clip_low", "number", 0.0, "lower bound of the importance weights", low=0, only_with={"use_tis": (True,)}
    ),
    Option(
        "custom_tis_function_path",
        "word",
        None,
        "weights outside the bounds: null truncates them, icepop_function sets them to 0, mis is slime's helper for "
        "train-inference mismatch",
        computed=(ICEPOP, None, MIS),
        spellings={MIS_FILE: MIS},
        decides=False,
        why_not="a custom function is not part of the run file",
        loss_alone=True,
    ),
    Option(
        "get_mismatch_metrics",
        "flag",
        False,
        "log the mismatch with the sampler; this also applies the importance weights, as use_tis does",
        decides=False,
    ),
    *slime_mis.OPTIONS,
    Option("use_opsm", "flag", False, "mask tokens of negative advantage in off-policy rows", decides=False),
    Option(
        "opsm_delta",
        "number",
        1e-4,
        "mean drop of the log-probs above which a row counts as off-policy",
        only_with={"use_opsm": (True,)},
    ),
    Option(
        "use_opd",
        "flag",
        False,
        "on-policy distillation from a teacher",
        computed=(False,),
        decides=False,
        why_not="the teacher's log-probs are not in the rows",
    ),
    Option(
        "custom_advantage_function_path",
        "any",
        None,
        "a custom advantage function",
        computed=(None,),
        decides=False,
        why_not="a custom function is not part of the run file",
    ),
    Option(
        "custom_pg_loss_reducer_function_path",
        "any",
        None,
        "a custom loss aggregation",
        computed=(None,),
        decides=False,
        why_not="a custom function is not part of the run file",
        loss_alone=True,
    ),
    Option(
        "entropy_coef",
        "number",
        0.0,
        "coefficient of the entropy bonus; other than 0: all but the loss as a whole is computed",
        decides=False,
    ),
    Option("use_rollout_entropy", "flag", False, "compute and log rollout/entropy", decides=False),
    Option(
        "context_parallel_size",
        "integer",
        1,
        "ranks that every row is cut over; up to 0.3.1 normalize_advantages whitens the slices of each rank by "
        "themselves, which needs prompt_ids; above 1 rollout/kl and rollout/entropy are not recomputed",
        low=1,
        decides=False,
    ),
    Option("n_samples_per_prompt", "integer", 1, "responses per prompt", low=1, decides=False),
    *(
        Option(name, "integer", None, meaning, low=1, decides=False)
        for name, meaning in (
            ("rollout_batch_size", "prompts per rollout"),
            ("global_batch_size", "responses per optimizer step"),
            ("num_steps_per_rollout", "optimizer steps per rollout; null: global_batch_size says"),
        )
    ),
    Option("rollout_temperature", "number", 1.0, "of the sampler, and of the trainer's log-probs", decides=False),
    Option("rollout_top_p", "number", 1.0, "probability that the sampler keeps", decides=False),
    Option("rollout_top_k", "integer", -1, "tokens that the sampler keeps; -1: all", decides=False),
)


def objective(config: Config) -> Objective:
    """Build what slime's Megatron backend computes.

    Raises:
        UsageError: for combinations that slime itself refuses.
    """
    in_reward, in_loss = config.number("kl_coef"), config.number("kl_loss_coef")
    if in_reward != 0 and in_loss != 0:
        raise UsageError("kl_coef and kl_loss_coef are both above 0, and slime allows only one of them")
    estimator = config.word("advantage_estimator")
    kl_type = config.word("kl_loss_type")
    name = "k3" if kl_type == "low_var_kl" else kl_type
    clamp = 10.0 if kl_type == "low_var_kl" else None
    sampler = bool(config["use_rollout_logprobs"])
    high, entropy = config.optional_number("eps_clip_high"), config.number("entropy_coef")
    aggregation = Aggregation(
        mode="token-mean-empty-as-one" if config["calculate_per_token_loss"] else "trajectory-mean-token-mean"
    )
    return Objective(
        trainer="slime",
        version=".".join(map(str, config.version)),
        advantage=_advantage(config, estimator, in_reward),
        surrogate=Surrogate(
            kind="cispo_clipped" if estimator == "cispo" else "ppo_dual_clip",
            clip_low=config.number("eps_clip"),
            clip_high=config.number("eps_clip") if high is None else high,
            # Up to release 0.3.1 `policy_loss_function` does not pass it on.
            cap=config.optional_number("eps_clip_c") if config.version > (0, 3, 1) else None,
            old="rollout_log_probs" if sampler else "old_log_probs",
            level="sequence" if estimator == "gspo" else "token",
        ),
        aggregation=aggregation,
        # The entropies that the loss saw are in no row.
        entropy_bonus=EntropyBonus(coef=entropy, aggregation=aggregation, stored=False) if entropy else None,
        # The ratio of the KL is the token's, with gspo too.
        kl_loss=KlTerm(estimator=name, coef=in_loss, ratio_weighted=bool(config["use_unbiased_kl"]), clamp=clamp)
        if config["use_kl_loss"]
        else None,
        kl_reward=KlTerm(
            estimator=name,
            coef=in_reward,
            clamp=clamp,
            log_probs="rollout_log_probs" if sampler else "old_log_probs",
        ),
        sampler_correction=slime_mis.sampler_correction(config),
        gates=_gates(config),
        # Release 0.3.1 and before build the reward in the tensor that is logged as rollout/kl.
        kl_buffer=KlBuffer.REWARD if estimator == "ppo" and config.version <= (0, 3, 1) else KlBuffer.COPY,
        metric_columns=frozenset(
            {"entropy", "ref_log_probs", "response_mask_pre", "rollout_log_probs", "status", "values"}
        ),
        also_logs=frozenset({"rollout/entropy"} if config["use_rollout_entropy"] else ()),
        context_slices=int(config.number("context_parallel_size")),
    )


def _advantage(config: Config, estimator: str, kl_coef: float) -> AdvantageRule:
    """Build how rewards become advantages.

    Raises:
        UsageError: if an estimator that needs whitening is to go without, which slime itself refuses.
    """
    whitened = bool(config["normalize_advantages"])
    if estimator.startswith("reinforce_plus_plus") and not whitened:
        raise UsageError(f"advantage_estimator = {estimator} needs normalize_advantages = true; slime requires it too")
    baseline = estimator == "reinforce_plus_plus_baseline"
    centred = bool(config["rewards_normalization"])
    scale: Literal["group", "none"]
    scale = "group" if config["grpo_std_normalization"] and not baseline else "none"
    if estimator == "ppo":
        name = "gae"
    elif estimator == "reinforce_plus_plus":
        name = "discounted_token_returns"
    elif baseline and kl_coef != 0:
        # The penalty gives every token an advantage of its own.
        name = "penalised_group_scores" if centred else "penalised_scores"
    else:
        name = "grpo" if centred else "raw"
    rule = AdvantageRule(
        estimator=name,
        scale=scale,
        epsilon=EPSILON,
        singleton="zero",
        gamma=config.number("gamma"),
        lam=config.number("lambd"),
        batch_if_unequal=True,
        whitened=whitened,
        context_ranks=int(config.number("context_parallel_size")),
    )
    # Up to release 0.3.1 the moments are over the ranks that have the same slices, not over all.
    by_slice = rule.context_ranks > 1 and config.version <= (0, 3, 1)
    return (rule.whitened_by_slice(rule.context_ranks) if by_slice else None) or rule


def _gates(config: Config) -> tuple[TermWeight, ...]:
    """Build what multiplies the policy term.

    Raises:
        UsageError: for combinations that slime itself refuses.
    """
    gates = []
    sampler = bool(config["use_rollout_logprobs"])
    if config["use_opsm"]:
        against: Literal["rollout_log_probs", "old_log_probs"] = "rollout_log_probs" if sampler else "old_log_probs"
        gates.append(TermWeight(kind="off_policy", against=against, high=config.number("opsm_delta")))
    if config["use_tis"] and sampler:
        raise UsageError("use_tis and use_rollout_logprobs are both true, and slime allows only one of them")
    function = config["custom_tis_function_path"]
    if config["get_mismatch_metrics"] and function is None:
        raise UsageError("get_mismatch_metrics needs custom_tis_function_path; slime requires it too")
    if (config["use_tis"] or config["get_mismatch_metrics"]) and function != MIS:
        low, high = config.number("tis_clip_low"), config.number("tis_clip")
        gates.append(TermWeight(kind="importance", low=low, high=high, outside="cut" if function is None else "zero"))
    return tuple(gates)


def group_size(config: Config, split: str) -> int | None:
    """slime groups by position and falls back to the whole batch, so any size can occur."""
    return None


def metrics(evaluation: "Evaluation") -> Mapping[str, float]:
    """slime's logged metrics: `rollout/kl`, `rollout/raw_reward`, `rollout/log_probs` and its like, `train/*`."""
    from rolloutdoctor.trainers.slime import metrics as slime_metrics

    return slime_metrics.slime(evaluation)


def rollout_mean(batch: "RolloutBatch", x_T: "Tensor") -> float:
    """Reduce as slime reduces `rollout/kl`; see `rolloutdoctor.trainers.slime.metrics`."""
    from rolloutdoctor.trainers.slime import metrics as slime_metrics

    return slime_metrics.rollout_mean(batch, x_T)


_NOT_RECOMPUTED = {
    "train/grad_norm, train/lr*": "they need the parameters and the schedule",
    "train/value_loss, train/value_clipfrac": "the critic's values at the loss are not in the rows, only those before",
    "rollout/total_lengths": "the lengths of prompts are not recorded",
    "rollout/zero_std/count_*": "the name holds the reward as Python writes it, 1 or 1.0, and rows hold a number",
    "rollout/repetition_frac, rollout/error_cat/*": "they need the text, or fields of a custom reward",
    "rollout/spec_*, rollout/prefix_cache*, rollout/avg_cached*, rollout/top_p_kept*": "they come from the engine",
    "rollout/correct_*, multi_turn/*, passrate/*": "statistics of other flags, unrelated to the loss; those of "
    "--log-correct-samples are made after the log is written, and reach none",
    "rollout/teacher_log_probs, */opd_reverse_kl": "the teacher's log-probs are not in the rows",
    "perf/*": "they are timings",
    "eval/*": "their names contain dataset names, which are not recorded",
}

_WHITENED = {"normalize_advantages": True}

_SCORED = (
    *every(
        advantage_estimator=("grpo",),
        kl_coef=(0.0,),
        rewards_normalization=(True,),
        grpo_std_normalization=(True, False),
        normalize_advantages=(False, True),
    ),
    *every(
        advantage_estimator=("grpo",),
        kl_coef=(0.0,),
        rewards_normalization=(False,),
        normalize_advantages=(False, True),
    ),
    {"advantage_estimator": "reinforce_plus_plus_baseline", "kl_coef": 0.0, **_WHITENED},
)
"""One advantage for each row."""

_RETURNS = (
    *every(
        advantage_estimator=("ppo",),
        gamma=(1.0, 0.99, 0.95),
        lambd=(1.0, 0.99, 0.97, 0.95, 0.9, 0.0),
        normalize_advantages=(False, True),
    ),
    *every(advantage_estimator=("reinforce_plus_plus",), gamma=(1.0, 0.99, 0.95), normalize_advantages=(True,)),
)
"""One advantage for each token."""

_DUMP = "run slime with --dump-details DIR"


def updates_a_batch(config: Config) -> int | str:
    """Optimizer steps of a rollout."""
    if config["num_steps_per_rollout"] is not None:
        return int(config.number("num_steps_per_rollout"))
    names = ("rollout_batch_size", "n_samples_per_prompt", "global_batch_size")
    unstated = [name for name in names if config[name] is None or not config.settings[name].is_stated]
    if unstated:
        return ", ".join(unstated)
    prompts, size, of_update = (int(config.number(name)) for name in names)
    return -(-prompts * size // of_update)


TRAINER = Trainer(
    name="slime",
    title="slime",
    newest="0.3.1",
    oldest="0.2.2",
    read=(ReadCode("0.2.2", "0.3.1", commit="a6272da0d4f3"),),
    options=OPTIONS,
    objective=objective,
    metrics=metrics,
    group_size=group_size,
    log=Log(
        loss="train/loss",
        grad_norm="train/grad_norm",
        kl=("rollout/kl", "train/kl_loss"),
        ends=(
            "rollout/truncated_ratio",
            "rollout/response_len/min",
            "rollout/response_len/max",
            "rollout/response_len/mean",
        ),
        quantities={
            "rollout/kl": "stored_kl",
            "rollout/raw_reward": "rewards",
            "rollout/rewards": "advantages",
            "rollout/advantages": "advantages",
            "rollout/returns": "advantages",
            "rollout/values": "values",
            "train/loss": "loss",
            "train/pg_loss": "policy_loss",
            "train/kl_loss": "kl",
            "train/ppo_kl": "drift",
            "train/pg_clipfrac": "clip_share",
        },
        not_recomputed=_NOT_RECOMPUTED,
        traces=(Trace("train/kl_loss", "use_kl_loss", bool, "with use_kl_loss = true"),),
    ),
    recording={
        "ref_log_probs": f"{_DUMP}, once kl_coef > 0 or use_kl_loss loads a reference model",
        "values": f"{_DUMP} with advantage_estimator ppo",
        "*": _DUMP,
        "metrics": "slime logs to W&B (--use-wandb) or TensorBoard (--use-tensorboard): give an export of that as well",
    },
    agents={
        "turns": "slime keeps only loss_masks: turns are derived from them",
        "error": "slime has no text of an error: a Sample's status says that it was aborted or failed",
    },
    roles=OptionRoles(
        kl="kl_loss_coef",
        must_state={"advantage_estimator": "grpo"},
        group={"train": "n_samples_per_prompt"},
        advised={
            "gradient clipping": "clip_grad",
            "the learning rate": "lr",
            "the KL coefficient": "kl_loss_coef",
            "the upper clip range": "eps_clip_high",
            "the response length limit": "rollout_max_response_len",
        },
    ),
    updates=Updates(a_batch=updates_a_batch),
    parts={
        Part.KL_LOSS: PartOptions({"use_kl_loss": (False,), "kl_loss_coef": (0,)}),
        Part.KL_ESTIMATOR: PartOptions({"kl_loss_type": ()}),
        Part.GROUP_BASELINE: PartOptions(
            {"advantage_estimator": ("ppo", "reinforce_plus_plus"), "rewards_normalization": (False,)}
        ),
        Part.GROUP_STD: PartOptions(
            {
                "advantage_estimator": ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
                "rewards_normalization": (False,),
                "grpo_std_normalization": (False,),
            }
        ),
        Part.POLICY_LOSS: PartOptions({"advantage_estimator": (), "calculate_per_token_loss": ()}),
    },
    choices=Choices(
        advantage=(*_SCORED, *({**each, "kl_coef": 0.0} for each in _RETURNS)),
        penalty=tuple(
            {**each, "kl_loss_type": kl_type}
            for each in (*_RETURNS, {"advantage_estimator": "reinforce_plus_plus_baseline", **_WHITENED})
            for kl_type in KL_TYPES
        ),
        penalty_option="kl_coef",
        kl=every(
            use_kl_loss=(True,),
            kl_loss_type=KL_TYPES,
            use_unbiased_kl=(False, True),
            calculate_per_token_loss=(False, True),
        ),
        loss=every(calculate_per_token_loss=(False, True), eps_clip_high=(None, 0.28)),
    ),
    aliases={"log_probs": "old_log_probs"},
    stored_kl=StoredKl("rollout/kl", rollout_mean),
)
