"""verl: its dotted options, its objective, and its logged metrics.

Read and compared: verl 0.9.1; of older releases what `verl_releases` says.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rolloutdoctor.objective.corrections import RolloutCorrection
from rolloutdoctor.objective.objective import AdvantageRule, Aggregation, EntropyBonus, KlTerm, Objective
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.results.errors import UnstatedError, UsageError
from rolloutdoctor.trainers.lazy import LazyMetrics
from rolloutdoctor.trainers.options import Config, Option, unknown_loss
from rolloutdoctor.trainers.releases import parse_version
from rolloutdoctor.trainers.spec import (
    Choices,
    Log,
    LossParts,
    OptionRoles,
    PartOptions,
    Redefined,
    Trace,
    Trainer,
    Updates,
)
from rolloutdoctor.trainers.verl import (
    advantages as verl_advantages,
)
from rolloutdoctor.trainers.verl import (
    correction as verl_correction,
)
from rolloutdoctor.trainers.verl import (
    data as verl_data,
)
from rolloutdoctor.trainers.verl import (
    micro as verl_micro,
)
from rolloutdoctor.trainers.verl import (
    policy as verl_policy,
)
from rolloutdoctor.trainers.verl import (
    releases as verl_releases,
)

if TYPE_CHECKING:
    from rolloutdoctor.evaluation.evaluate import Evaluation

_ACTOR = verl_policy.ACTOR

KL_TYPES = verl_advantages.KL_TYPES

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")

OPTIONS = (
    *verl_advantages.OPTIONS,
    *verl_policy.OPTIONS,
    Option(
        f"{_ACTOR}.loss_agg_mode",
        "word",
        "token-mean",
        "how token terms become one loss",
        choices=AGGREGATIONS,
        since="0.4.0",
        values_since={"token-sum": "0.9.0"},
    ),
    Option(
        f"{_ACTOR}.loss_scale_factor", "integer", None, "what seq-mean-token-sum-norm divides by", low=1, since="0.7.0"
    ),
    Option(f"{_ACTOR}.use_kl_loss", "flag", False, "add a KL term to the loss"),
    Option(f"{_ACTOR}.kl_loss_coef", "number", 0.001, "coefficient of the KL term", low=0),
    Option(
        f"{_ACTOR}.kl_loss_type",
        "word",
        "low_var_kl",
        "the KL estimator; with + its gradient is that of k2",
        choices=tuple(name + plus for name in KL_TYPES for plus in ("", "+")),
        values_since=verl_advantages.KL_SINCE,
    ),
    Option(
        f"{_ACTOR}.entropy_coeff",
        "number",
        0.0,
        "coefficient of the entropy bonus, whose gradient needs the logits and is not recomputed",
        changes=(("0.4.0", 0.001),),
    ),
    Option(
        "algorithm.use_pf_ppo",
        "flag",
        False,
        "resample the rows of the update, weighted by their scores (gae); with the V1 trainer the rows stay and their "
        "advantages are resampled, which needs advantages",
        decides=False,
        since="0.4.0",
    ),
    Option(
        "distillation.enabled",
        "flag",
        False,
        "on-policy distillation from a teacher",
        computed=(False,),
        decides=False,
        why_not="the teacher's log-probs are not in the rows",
        loss_alone=True,
        since="0.8.0",
    ),
    Option(
        f"{_ACTOR}.ppo_epochs",
        "integer",
        1,
        "optimisation passes over each batch; numbers are those of the pass whose log-probs were recorded",
        low=1,
        decides=False,
    ),
    Option(f"{_ACTOR}.ppo_mini_batch_size", "integer", 256, "prompts per mini-batch", low=1, decides=False),
    Option("data.train_batch_size", "integer", 1024, "prompts per generated batch", low=1, decides=False),
    Option("actor_rollout_ref.rollout.n", "integer", None, "responses per prompt", low=1, decides=False),
    Option(
        "actor_rollout_ref.rollout.temperature",
        "number",
        1.0,
        "of the sampler; the actor divides its logits by it",
        decides=False,
    ),
    Option("actor_rollout_ref.rollout.top_p", "number", 1.0, "probability that the sampler keeps", decides=False),
    Option("actor_rollout_ref.rollout.top_k", "integer", -1, "tokens that the sampler keeps; -1: all", decides=False),
    Option(
        "critic.cliprange_value",
        "number",
        0.5,
        "clip range of the value loss, which is not recomputed: no column holds the predictions at the update",
        low=0,
        decides=False,
    ),
    Option(
        "critic.loss_agg_mode",
        "word",
        "token-mean",
        "how the token terms of the value loss are aggregated",
        choices=AGGREGATIONS,
        decides=False,
        yields=True,
    ),
    *verl_correction.OPTIONS,
    Option(
        "trainer.use_v1",
        "flag",
        True,
        "the V1 trainer, whose token-mean divides by all generated tokens, rejected ones included",
        changes=(("0.9.0", False),),
        since="0.9.0",
    ),
    *verl_releases.OPTIONS,
)


def objective(config: Config) -> Objective:
    """Build what verl's actor update computes.

    Raises:
        UsageError: if options contradict each other, or nothing says which estimator was used.
    """
    if config.settings["algorithm.adv_estimator"].assumed:
        # Every verdict about advantages hangs on it, and few runs keep verl's default.
        raise UnstatedError(
            "nothing says which advantage estimator the run used, and verl's default (gae) is too much to assume: add "
            "--set algorithm.adv_estimator=NAME"
        )
    mode = config.word(f"{_ACTOR}.loss_agg_mode")
    factor = config.optional_number(f"{_ACTOR}.loss_scale_factor")
    first_actor = verl_releases.is_first_actor(config)
    unknown = ""
    if mode == "seq-mean-token-sum-norm" and factor is None and not first_actor:
        unknown = unknown_loss(
            f"loss_agg_mode = {mode} without {_ACTOR}.loss_scale_factor",
            "it divides by the padded width of the batch, which is not in the rows (set loss_scale_factor to that)",
        )
    kl_type = config.word(f"{_ACTOR}.kl_loss_type")
    correction = verl_releases.correction(config) if first_actor else verl_correction.correction(config)
    configured = Aggregation(
        mode=mode,
        length=None if factor is None else int(factor),
        counted_before_rejection=bool(config["trainer.use_v1"]) and correction.rejects and mode == "token-mean",
    )
    aggregation, policy_aggregation = verl_policy.aggregations(config, configured)
    entropy = config.number(f"{_ACTOR}.entropy_coeff")
    objective = Objective(
        trainer="verl",
        version=".".join(map(str, config.version)),
        advantage=_advantage(config, correction),
        surrogate=verl_policy.surrogate(config),
        aggregation=aggregation,
        policy_aggregation=policy_aggregation,
        kl_loss=KlTerm(
            estimator=KL_TYPES[kl_type.rstrip("+")],
            coef=config.number(f"{_ACTOR}.kl_loss_coef"),
            straight_through=kl_type.endswith("+"),
        )
        if config[f"{_ACTOR}.use_kl_loss"]
        else None,
        kl_reward=verl_policy.against_sampler(config, verl_advantages.kl_reward(config)),
        entropy_bonus=EntropyBonus(coef=entropy, aggregation=aggregation, stored=False) if entropy else None,
        correction=correction,
        policy_correction=None if first_actor else verl_policy.correction(config),
        unknown_loss=unknown,
    )
    return verl_releases.of_first_actor(config, objective) if first_actor else objective


def _advantage(config: Config, correction: RolloutCorrection) -> AdvantageRule:
    """Build how scores become advantages, and with `use_pf_ppo` those of rows that were drawn.

    Raises:
        UsageError: where what verl resamples is not in the rows.
    """
    rule = verl_advantages.advantage_rule(config)
    if not config["algorithm.use_pf_ppo"] or config.word("algorithm.adv_estimator") != "gae":
        return rule
    if not config["trainer.use_v1"]:
        raise UsageError(
            "use_pf_ppo is computed for the V1 trainer alone (trainer.use_v1): the other one draws the rows of the "
            "update after it has whitened over rows that this may leave out"
        )
    if correction != RolloutCorrection():
        raise UsageError("use_pf_ppo with a rollout correction is not computed: its weights are those of other rows")
    return replace(rule, drawn="advantages" if config[verl_correction.BYPASS] else "masks")


def updates_a_batch(config: Config) -> int | str:
    """Mini-batches of a generated batch, times passes over it."""
    names = ("data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size", f"{_ACTOR}.ppo_epochs")
    unstated = [name for name in names if not config.settings[name].is_stated]
    prompts, of_update, passes = (int(config.number(name)) for name in names)
    return ", ".join(unstated) or -(-prompts // of_update) * passes


def group_size(config: Config, split: str) -> int | None:
    """verl groups by uid, whatever the size."""
    return None


def metrics(evaluation: "Evaluation") -> Mapping[str, float]:
    """verl's logged metrics: of the batch (`critic/*`, `response*/*`), its correction, and the `actor/*`."""
    of_batch = {
        verl_data.names_of_penalty(evaluation)[0]: partial(verl_data.penalty, evaluation),
        "critic/": partial(verl_data.critic, evaluation),
        "response": partial(verl_data.lengths, evaluation),
    }
    if parse_version(evaluation.objective.version) < verl_releases.ENGINE:
        return LazyMetrics(of_batch)
    return LazyMetrics(
        {
            **of_batch,
            "actor/": partial(_actor, evaluation),
            "actor/rollout_corr/": partial(verl_micro.inside_metrics, evaluation),
            "rollout_corr/": partial(verl_correction.metrics, evaluation),
            "training/rollout_": partial(verl_correction.probabilities, evaluation),
            verl_data.OF_REWARDS: partial(verl_data.named_rewards, evaluation),
        }
    )


NOT_RECOMPUTED = {
    "critic/vf_loss, critic/vf_clipfrac, critic/vpred_mean": "they need the critic's predictions at its update, "
    "which no column holds; losses.value has the loss",
    "critic/grad_norm, actor/grad_norm": "a norm of the parameters' gradient needs the model",
    "actor/entropy, actor/entropy_loss": "an entropy needs the probability of every token of the vocabulary",
    "response_length/clip_ratio, response_length_non_aborted/clip_ratio": "no column holds the padded width",
    "prompt_length/*, num_turns/*, tool_call_counts/*": "they do not concern trained tokens",
}
"""Logged metrics that are not recomputed, and why."""


def _actor(evaluation: "Evaluation") -> dict[str, float]:
    """Recompute what the actor logs of its loss."""
    metrics: dict[str, float] = {}
    rows, tokens = evaluation.rows, evaluation.tokens
    if tokens is None or rows is None or rows.length_N is None:
        return metrics
    metrics["actor/pg_loss"] = evaluation.policy_loss
    if evaluation.objective.kl_loss is not None:
        in_kl_N = evaluation.in_scope(evaluation.objective.kl)
        metrics["actor/kl_loss"] = float((tokens.kl_N * tokens.weight_N * in_kl_N).sum())
        metrics["actor/kl_coef"] = evaluation.objective.kl_loss.coef
    if evaluation.objective.entropy_bonus is None:
        metrics["actor/loss"] = evaluation.loss
    logged = {
        "actor/ppo_kl": tokens.drift_N,
        "actor/pg_clipfrac": tokens.clipped_N,
        "actor/pg_clipfrac_lower": tokens.capped_N,
    }
    for name, sum_N in logged.items():
        if sum_N is not None:
            metrics[name] = verl_micro.token_mean(name, sum_N, tokens.counted_N, tokens.layout)
    return metrics


def loss_parts(logged: Mapping[str, float], config: Config | None) -> LossParts | None:
    """The two parts as the actor logs them."""
    names = ("actor/pg_loss", "actor/kl_loss", "actor/kl_coef")
    if any(name not in logged for name in names):
        return None
    policy, kl, coef = (logged[name] for name in names)
    return LossParts(policy, coef * kl)


_DRIVER = (
    "record with rolloutdoctor.recorders.verl: record_estimator (rewards, masks, advantages) or columns_of (a whole "
    "batch); verl's own rollout dump has text and scores only"
)

_CLIPS: tuple[dict[str, object], ...] = ({}, {f"{_ACTOR}.clip_ratio_high": 0.28})
_COUNTED: tuple[dict[str, object], ...] = ({}, {"trainer.use_v1": False})

_FILE_LOGGER = 'give the file of trainer.logger=["console","file"] as well (VERL_FILE_LOGGER_PATH says where)'

TRAINER = Trainer(
    name="verl",
    title="verl",
    newest="0.9.1",
    oldest="0.3.0",
    options=OPTIONS,
    objective=objective,
    metrics=metrics,
    group_size=group_size,
    log=Log(
        redefined=(
            Redefined(
                "val-core/*/acc/*",
                "val-aux/*/acc_success_only/*",
                "{new} counts a session that failed as 0 in val-core/*/acc/* (verl 0.9.1 and newer), and {old} leaves "
                "it out: compare val-aux/*/acc_success_only/* of {new} with it.",
            ),
        ),
        loss="actor/pg_loss",
        grad_norm="actor/grad_norm",
        kl=("actor/kl_loss", "actor/reward_kl_penalty"),
        critic=("critic/vf_loss", "critic/grad_norm"),
        ends=(
            "response_length/clip_ratio",
            "response_length/min",
            "response_length/max",
            "response_length/mean",
        ),
        quantities={
            "actor/loss": "loss",
            "actor/pg_loss": "policy_loss",
            "actor/kl_loss": "kl",
            "actor/ppo_kl": "drift",
            "actor/pg_clipfrac*": "clip_share",
            "actor/reward_kl_penalty": "reward_kl",
            "critic/score/*": "rewards",
            "critic/rewards/*": "rewards",
            "critic/advantages/*": "advantages",
            "critic/returns/*": "advantages",
            "critic/values/*": "values",
            "rollout_corr/*": "sampler_gap",
            "actor/rollout_corr/*": "sampler_gap",
            "training/rollout_*": "sampler_gap",
        },
        not_recomputed=NOT_RECOMPUTED,
        traces=(
            Trace("actor/kl_loss", f"{_ACTOR}.use_kl_loss", bool, "with use_kl_loss = true"),
            Trace("actor/reward_kl_penalty", "algorithm.use_kl_in_reward", bool, "with use_kl_in_reward = true"),
        ),
        loss_parts=loss_parts,
        file="verl's file logger",
    ),
    recording={
        "ref_log_probs": "actor_rollout_ref.actor.use_kl_loss=true or algorithm.use_kl_in_reward=true makes verl "
        "compute `ref_log_prob`; save that field",
        "values": "save `values`, which the critic predicts before its update",
        "reward_baseline": "save `reward_baselines`, which remax computes",
        "rewards": "save the rewards that algorithm.gdpo_reward_keys names as a struct",
        "response_mask_pre": "save `response_mask` before the rollout correction replaces it",
        "rollout_log_probs": "actor_rollout_ref.rollout.calculate_log_probs=true; save `rollout_log_probs`",
        "sum_pi_squared": "actor_rollout_ref.actor.calculate_sum_pi_squared=true; save `sum_pi_squared`",
        "micro_batch_id": f"number the actor's micro-batches: {', '.join(verl_policy.BY_MICRO_BATCH)} and the weights "
        "that bypass_mode normalises work on each one",
        "kl": "verl does not store a per-token KL; its `actor/kl_loss` metric is compared instead",
        "ground_truth": "trainer.rollout_data_dir=DIR writes it as `gts`, beside the text of the responses",
        "*": _DRIVER,
        "metrics": _FILE_LOGGER,
    },
    agents={
        "trajectory_id": "a V1 dump has the keys {uid}_{session}_{i}; give them to columns_of(data, keys=batch.keys)",
        "task_id": "columns_of(data) takes it from `index` of the data's extra_info, where that has one",
        "turns": "an agent loop keeps only its response_mask: turns are derived from it",
        "error": "in V1 a session that fails gives no row",
    },
    roles=OptionRoles(
        kl=f"{_ACTOR}.kl_loss_coef",
        group={"train": "actor_rollout_ref.rollout.n"},
        must_state={"algorithm.adv_estimator": "grpo"},
        advised={
            "gradient clipping": f"{_ACTOR}.grad_clip",
            "the learning rate": f"{_ACTOR}.optim.lr",
            "the KL coefficient": f"{_ACTOR}.kl_loss_coef",
            "the upper clip range": f"{_ACTOR}.clip_ratio_high",
            "the response length limit": "data.max_response_length",
            "the group size": "actor_rollout_ref.rollout.n",
        },
        always_listed=verl_releases.ALWAYS_LISTED,
        came_after=verl_releases.CAME_AFTER,
        total_steps=("trainer.total_training_steps",),
    ),
    updates=Updates(a_batch=updates_a_batch),
    parts={
        Part.KL_LOSS: PartOptions({f"{_ACTOR}.use_kl_loss": (False,), f"{_ACTOR}.kl_loss_coef": (0,)}),
        Part.KL_REWARD: PartOptions({"algorithm.use_kl_in_reward": (False,)}),
        Part.KL_ESTIMATOR: PartOptions({f"{_ACTOR}.kl_loss_type": ()}),
        Part.GROUP_BASELINE: PartOptions({"algorithm.adv_estimator": verl_advantages.UNGROUPED}),
        Part.GROUP_STD: PartOptions(
            {
                "algorithm.adv_estimator": verl_advantages.UNDIVIDED,
                "algorithm.norm_adv_by_std_in_grpo": (False,),
            }
        ),
        Part.POLICY_LOSS: PartOptions({f"{_ACTOR}.policy_loss.loss_mode": (), f"{_ACTOR}.loss_agg_mode": ()}),
    },
    choices=Choices(
        advantage=tuple({**each, "algorithm.use_kl_in_reward": False} for each in verl_advantages.CHOICES),
        penalty=tuple(
            {**each, "algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": kl_type}
            for each in verl_advantages.CHOICES
            for kl_type in ("k1", "k2", "k3", "abs")
        ),
        penalty_option="algorithm.kl_ctrl.kl_coef",
        kl=tuple(
            {f"{_ACTOR}.use_kl_loss": True, f"{_ACTOR}.kl_loss_type": kl_type, f"{_ACTOR}.loss_agg_mode": mode}
            for kl_type in ("low_var_kl", "k1", "k2", "abs")
            for mode in AGGREGATIONS
        ),
        loss=tuple(
            {f"{_ACTOR}.loss_agg_mode": mode, f"{_ACTOR}.policy_loss.loss_mode": kind, **clip, **counted}
            for mode in AGGREGATIONS
            for kind in verl_policy.TRIED
            for clip in _CLIPS
            for counted in _COUNTED
        ),
    ),
    aliases={"log_probs": "policy_log_probs", "rollout_is_weights": "is_weights"},
)
