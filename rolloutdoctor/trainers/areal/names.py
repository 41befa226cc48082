"""What AReaL logs. Read: 0.3.3 to 2.0 and main of 2026-08.

A mean (`/avg`) is the sum over the cells of a mask over their number, of all micro-batches and ranks; scalars are means
over mini-batches and ranks. `no_eos_ratios`, the share of rows as long as the longest one, ended or not, is left out.
"""

from rolloutdoctor.metric_names.name import MetricName

_LOSS = "areal/trainer/ppo/actor.py, grpo_loss_fn"
_UPDATE = "areal/trainer/ppo/actor.py, _ppo_update"
_ENGINE = "areal/engine/fsdp_engine.py, optimizer_step"

# fmt: off
BEFORE: tuple[MetricName, ...] = tuple(
    MetricName(f"grpo_actor/{name}", quantity, definition, f"areal/engine/ppo/actor.py, {where}", until="0.4.1",
        factor=factor)
    for name, quantity, definition, where, factor in (
        ("task_reward/avg", "reward", "mean over rows of the reward as it is trained", "ppo_update", 1),
        ("task_reward/min", "reward_min", "the smallest reward of a row", "ppo_update", 1),
        ("task_reward/max", "reward_max", "the largest reward of a row", "ppo_update", 1),
        ("advantages/avg", "advantage", "mean over trained tokens", "ppo_update", 1),
        ("advantages/min", "advantage_min", "the smallest of them", "ppo_update", 1),
        ("advantages/max", "advantage_max", "the largest of them", "ppo_update", 1),
        ("entropy/avg", "entropy", "mean over trained tokens", "grpo_loss_fn", 1),
        ("actor_loss/avg", "policy_loss", "mean over trained tokens", "grpo_loss_fn", 1),
        ("grad_norm", "grad_norm", "before clipping", "ppo_update", 1),
        ("clip_ratio/avg", "clip_fraction", "mean over trained tokens of whether it is clipped", "grpo_loss_fn", 1),
        ("approx_kl/avg", "ppo_kl", "mean over trained tokens of new minus proximal log-prob", "grpo_loss_fn", -1),
        ("lr", "learning_rate", "of the optimizer", "ppo_update", 1),
    )
)
"""Of the examples up to 0.3, which choose the first word."""

NAMES: tuple[MetricName, ...] = (
    *BEFORE,
    MetricName("ppo_actor/task_reward/avg", "reward", "mean over rows of the reward before scale, clip and norm",
        _UPDATE, "0.4.1"),
    MetricName("rollout/reward", "reward", "mean over the episodes that ended since the last line",
        "areal/workflow/rlvr.py"),
    MetricName("ppo_actor/task_reward/min", "reward_min", "the smallest reward of a row", _UPDATE, "0.4.1"),
    MetricName("ppo_actor/task_reward/max", "reward_max", "the largest reward of a row", _UPDATE, "0.4.1"),
    MetricName("ppo_actor/advantages/avg", "advantage", "mean over trained tokens", _UPDATE, "0.4.1"),
    MetricName("ppo_actor/advantages/min", "advantage_min", "the smallest of them", _UPDATE, "0.4.1"),
    MetricName("ppo_actor/advantages/max", "advantage_max", "the largest of them", _UPDATE, "0.4.1"),
    MetricName("ppo_actor/update/entropy/avg", "entropy", "mean over trained tokens", _LOSS, "0.4.1"),
    MetricName("ppo_actor/update/actor_loss/avg", "policy_loss", "mean over trained tokens", _LOSS, "0.4.1"),
    MetricName("ppo_actor/update/grad_norm", "grad_norm", "before clipping", _ENGINE, "0.4.1"),
    MetricName("ppo_actor/update/clip_ratio/avg", "clip_fraction", "mean over trained tokens of whether it is clipped",
        _LOSS, "0.4.1"),
    MetricName("ppo_actor/update/approx_kl/avg", "ppo_kl", "mean over trained tokens of new minus proximal log-prob",
        _LOSS, "0.4.1", factor=-1),
    MetricName("ppo_actor/update/importance_weight/max", "ratio_max", "new over proximal policy, of all trained tokens",
        _LOSS, "0.4.1"),
    MetricName("ppo_actor/update/importance_weight/min", "ratio_min",
        "new over proximal policy, of all trained tokens; 0 where M2PO drops one", _LOSS, "0.4.1"),
    MetricName("ppo_actor/update/lr", "learning_rate", "mean over mini-batches", _ENGINE, "0.4.1"),
    MetricName("ppo_actor/update/compute_logp/kl_div_direct/avg", "sampler_kl",
        "mean over kept tokens of sampler minus new log-prob",
        "areal/trainer/ppo/actor.py, _log_proximal_approximation_stats", "1.0.4"),
    MetricName("ppo_actor/update/compute_logp/kl_div_dual/avg", "sampler_k3",
        "mean over kept tokens of r - log r - 1, r new over sampler",
        "areal/trainer/ppo/actor.py, _log_proximal_approximation_stats", "1.0.4"),
    MetricName("ppo_actor/update/behave_imp_weight/avg", "is_weight", "mean over the tokens that are not filtered",
        _LOSS, "0.4.1"),
    MetricName("ppo_actor/update/version_stats/sample_staleness_theta_avg", "version_lag",
        "mean over generated tokens of the current less the sampling version",
        "areal/trainer/ppo/actor.py, _log_version_staleness_stats", "0.5"),
)
# fmt: on
