"""verl before 0.8: what its first actor computes otherwise, and what of it is not recomputed.

Read and compared: ``verl/workers/actor/dp_actor.py`` of verl 0.3.0.post1, 0.4.0, 0.4.1, 0.5.0, 0.6.0, 0.6.1, 0.7.0 and
0.7.1; and 0.8.0, whose engine is that of 0.9. The first actor takes the loss of every micro-batch by itself and weights
it by its rows, so that a token of a micro-batch of short responses counts for more; the logged `actor/*` are means over
the micro-batches of rank 0 (before 0.6), each divided once more by their number (0.6), or sums over mini-batches (0.7).
"""

from collections.abc import Iterator
from dataclasses import replace

from rolloutdoctor.objective.corrections import RolloutCorrection
from rolloutdoctor.objective.estimators import SPECS
from rolloutdoctor.objective.objective import Aggregation, KlTerm, Objective, Surrogate
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.trainers.options import Config, Option, unknown_loss
from rolloutdoctor.trainers.verl import advantages as verl_advantages
from rolloutdoctor.trainers.verl import correction as verl_correction
from rolloutdoctor.trainers.verl.policy import ACTOR

ENGINE = (0, 8, 0)
"""The first release whose engine normalises over the mini-batch."""

_MULTI_TURN = "actor_rollout_ref.rollout.multi_turn.enable"
_LEGACY = "trainer.use_legacy_worker_impl"
_MODES = ("vanilla", "gpg", "gspo", "sapo", "cispo", "dppo_tv", "dppo_kl")
"""Loss modes that were compared with the first actor."""

OPTIONS = (
    Option(
        _LEGACY,
        "word",
        "auto",
        "the first actor, or (disable) the engine that became the only one with 0.8",
        since="0.5.0",
        until="0.8.0",
        choices=("auto", "enable", "disable"),
        computed=("auto", "enable"),
        why_not="the engine of the releases before 0.8 was not compared",
        loss_alone=True,
        decides=False,
    ),
    Option(
        _MULTI_TURN,
        "flag",
        False,
        "responses of several turns, whose tool tokens are masked",
        decides=False,
        since="0.4.0",
    ),
    Option(
        "algorithm.rollout_is",
        "flag",
        False,
        "importance weights of the policy term, as 0.6.0 spells it",
        since="0.6.0",
        until="0.6.1",
        computed=(False,),
        decides=False,
        why_not="the rollout correction of the releases before 0.8 was not compared",
        loss_alone=True,
        yields=True,
    ),
)

ALWAYS_LISTED = frozenset(
    {"algorithm.kl_ctrl.kl_coef", f"{ACTOR}.clip_ratio", f"{ACTOR}.ppo_epochs", f"{ACTOR}.kl_loss_type"}
)
CAME_AFTER = {
    "trainer.use_v1": "0.8.0",
    "distillation.enabled": "0.7.1",
    f"{ACTOR}.tau_pos": "0.6.1",
    "algorithm.rollout_correction.bypass_mode": "0.6.0",
    "algorithm.rollout_is": "0.5.0",
    _LEGACY: "0.4.1",
    f"{ACTOR}.policy_loss.loss_mode": "0.4.0",
    "algorithm.use_kl_in_reward": "0.3.0",
}
"""What ``verl/trainer/config`` of each release lists."""


def is_first_actor(config: Config) -> bool:
    """Return True for releases whose losses are of micro-batches."""
    return config.version < ENGINE


def of_first_actor(config: Config, objective: Objective) -> Objective:
    """Return the objective as the first actor has it.

    Raises:
        UsageError: for advantages that were not compared with it.
    """
    _refuse(config)
    version, shown = config.version, ".".join(map(str, config.version))
    surrogate = objective.surrogate
    if version < (0, 4, 1):
        surrogate = replace(surrogate, log_ratio_bound=None)
    if version < (0, 4):
        width = config.number(f"{ACTOR}.clip_ratio")
        surrogate = replace(surrogate, cap=None, clip_low=width, clip_high=width)
    return replace(
        objective,
        surrogate=_on_policy(config, surrogate),
        aggregation=_of_micro_batches(objective.aggregation, version),
        policy_aggregation=None
        if objective.policy_aggregation is None
        else _of_micro_batches(objective.policy_aggregation, version),
        kl_reward=_penalty(config) if version < (0, 4) else objective.kl_reward,
        unknown_loss="; ".join(
            unknown_loss(option, f"of verl {shown} it was not compared (it is from 0.8.0 on)")
            for option in _losses_not_compared(config)
        ),
    )


def _on_policy(config: Config, surrogate: Surrogate) -> Surrogate:
    """From 0.6 on a batch of one mini-batch and one pass compares the log-probs with themselves."""
    names = ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size")
    prompts, of_update = (int(config.number(name)) for name in names)
    if config.version < (0, 6) or prompts > of_update or config.number(f"{ACTOR}.ppo_epochs") != 1:
        return surrogate
    return replace(surrogate, old="policy_log_probs")


def _of_micro_batches(rule: Aggregation, version: tuple[int, ...]) -> Aggregation:
    """The mean of each micro-batch, weighted by its rows; before 0.6.1 rows without a token count in means of rows."""
    if rule.mode == "seq-mean-token-sum" and version < (0, 6, 1):
        return rule
    return replace(rule, mode=f"micro-batch-{rule.mode}-by-rows", needs_micro_batches=True)


def _penalty(config: Config) -> KlTerm | None:
    """0.3 subtracts the penalty wherever the loss has no KL term, and logs its coefficient under another name."""
    if config[f"{ACTOR}.use_kl_loss"]:
        return None
    return KlTerm(
        estimator=verl_advantages.KL_TYPES[config.word("algorithm.kl_penalty")],
        coef=config.number("algorithm.kl_ctrl.kl_coef"),
        log_probs="old_log_probs",
        masked=True,
        coef_metric="critic/kl_coeff" if config["algorithm.kl_ctrl.type"] == "adaptive" else None,
    )


def correction(config: Config) -> RolloutCorrection:
    """Return what a correction before 0.8 does to the mask; its veto rejects without `rollout_rs` too."""
    wanted = config[f"{verl_correction.PREFIX}.rollout_is"] or config[f"{verl_correction.PREFIX}.rollout_rs"]
    return RolloutCorrection(rejects=bool(wanted) and not config[verl_correction.BYPASS])


def _refuse(config: Config) -> None:
    """Refuse advantages that were not compared with the driver of the release.

    Raises:
        UsageError: for the first of them.
    """
    for feature in _not_compared(config):
        shown = ".".join(map(str, config.version))
        raise UsageError(f"{feature} is not computed for verl {shown} (it is from 0.8.0 on)")


def _not_compared(config: Config) -> Iterator[str]:
    """Options whose advantages are computed for later releases alone."""
    before_0_5, estimator = config.version < (0, 5), config.word("algorithm.adv_estimator")
    if estimator == "grpo_vectorized":
        yield "algorithm.adv_estimator = grpo_vectorized, with its variance in one pass,"
    if estimator == "gae" and before_0_5:
        yield "algorithm.adv_estimator = gae, which reads the values of masked tokens,"
    if estimator != "grpo" and before_0_5 and config[_MULTI_TURN]:
        yield f"algorithm.adv_estimator = {estimator} with responses of several turns"
    if SPECS[verl_advantages.ESTIMATORS[estimator]].takes_weights and config[f"{verl_correction.PREFIX}.rollout_is"]:
        yield f"algorithm.adv_estimator = {estimator} with {verl_correction.PREFIX}.rollout_is"


def _losses_not_compared(config: Config) -> Iterator[str]:
    """Options whose losses are computed for later releases alone."""
    mode = config.word(f"{ACTOR}.policy_loss.loss_mode")
    if mode not in _MODES:
        yield f"{ACTOR}.policy_loss.loss_mode = {mode}"
    if config.word(f"{ACTOR}.loss_agg_mode") == "seq-mean-token-sum-norm":
        yield f"{ACTOR}.loss_agg_mode = seq-mean-token-sum-norm"
    for name in ("rollout_is", "rollout_rs", "bypass_mode"):
        if config[f"{verl_correction.PREFIX}.{name}"]:
            yield f"{verl_correction.PREFIX}.{name} = {config[f'{verl_correction.PREFIX}.{name}']}"
    prompts, of_update = config.number("data.train_batch_size"), config.number(f"{ACTOR}.ppo_mini_batch_size")
    if prompts > of_update and prompts % of_update:
        yield f"data.train_batch_size = {prompts:g}, which {ACTOR}.ppo_mini_batch_size = {of_update:g} does not divide,"
