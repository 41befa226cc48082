"""slime: its flags with underscores, its objective, and its logged metrics.

Read and compared: slime 0.3.1 and the commits around its fix of `rollout/kl`, which came after that release.
"""

from typing import TYPE_CHECKING, Literal

from rolloutdoctor.errors import UsageError
from rolloutdoctor.objective import AdvantageRule, Aggregation, KlBuffer, KlTerm, Objective, Surrogate
from rolloutdoctor.trainers.options import Config, Option
from rolloutdoctor.trainers.spec import Trainer

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.batch import RolloutBatch
    from rolloutdoctor.evaluate import Evaluation

EPSILON = 1e-6
"""What slime adds to the standard deviation of a group."""

KL_TYPES = ("k1", "k2", "k3", "low_var_kl")

OPTIONS = (
    Option(
        "advantage_estimator",
        "word",
        "grpo",
        "how rewards become advantages",
        choices=("grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"),
        computed=("grpo", "ppo"),
    ),
    Option("kl_coef", "number", 0.0, "coefficient of the KL penalty in the token rewards (ppo)", low=0),
    Option("use_kl_loss", "flag", False, "add a KL term to the loss"),
    Option("kl_loss_coef", "number", 0.0, "its coefficient", low=0),
    Option("kl_loss_type", "word", "k1", "the KL estimator, in the reward and in the loss", choices=KL_TYPES),
    Option("use_unbiased_kl", "flag", False, "multiply the KL of the loss by the importance ratio"),
    Option("eps_clip", "number", 0.2, "how far below one the ratio may fall", low=0),
    Option("eps_clip_high", "number", None, "how far above one it may rise; null: eps_clip", low=0, optional=True),
    Option("eps_clip_c", "number", None, "dual clip for negative advantages; null: none", low=1, optional=True),
    Option("gamma", "number", 1.0, "discount per token", low=0, high=1),
    Option("lambd", "number", 1.0, "lambda of generalised advantage estimation", low=0, high=1),
    Option("normalize_advantages", "flag", False, "whiten the advantages", computed=(False,)),
    Option("rewards_normalization", "flag", True, "centre the rewards by group", computed=(True,)),
    Option("grpo_std_normalization", "flag", True, "divide by the group's standard deviation"),
    Option("calculate_per_token_loss", "flag", False, "token mean instead of the mean of row means"),
    Option("use_rollout_logprobs", "flag", False, "take the sampler's log-probs for the KL and the ratio"),
    Option("use_tis", "flag", False, "truncated importance sampling", computed=(False,), decides=False),
    Option("use_opsm", "flag", False, "mask off-policy rows", computed=(False,), decides=False),
    Option("entropy_coef", "number", 0.0, "coefficient of the entropy bonus", computed=(0.0,), decides=False),
    Option("n_samples_per_prompt", "integer", 1, "rows of a group", low=1, decides=False),
)


def objective(config: Config) -> Objective:
    """Build what slime's Megatron backend computes.

    Raises:
        UsageError: if both KL coefficients are set, which slime itself refuses.
    """
    in_reward, in_loss = config.number("kl_coef"), config.number("kl_loss_coef")
    if in_reward != 0 and in_loss != 0:
        raise UsageError("kl_coef and kl_loss_coef are both above 0, and slime allows only one of them")
    estimator = config.word("advantage_estimator")
    kl_type = config.word("kl_loss_type")
    name = "k3" if kl_type == "low_var_kl" else kl_type
    clamp = 10.0 if kl_type == "low_var_kl" else None
    sampler = bool(config["use_rollout_logprobs"])
    scale: Literal["group", "none"] = "group" if config["grpo_std_normalization"] else "none"
    high = config.optional_number("eps_clip_high")
    return Objective(
        trainer="slime",
        version=".".join(map(str, config.version)),
        advantage=AdvantageRule(
            estimator="gae" if estimator == "ppo" else "grpo",
            scale=scale,
            epsilon=EPSILON,
            lone="zero",
            gamma=config.number("gamma"),
            lam=config.number("lambd"),
            batch_if_unequal=True,
        ),
        surrogate=Surrogate(
            kind="ppo_dual_clip",
            clip_low=config.number("eps_clip"),
            clip_high=config.number("eps_clip") if high is None else high,
            cap=config.optional_number("eps_clip_c"),
            old="rollout_log_probs" if sampler else "old_log_probs",
        ),
        aggregation=Aggregation(mode="slime/token-mean" if config["calculate_per_token_loss"] else "slime/sample-mean"),
        kl_loss=KlTerm(estimator=name, coef=in_loss, ratio_weighted=bool(config["use_unbiased_kl"]), clamp=clamp)
        if config["use_kl_loss"]
        else None,
        kl_reward=KlTerm(
            estimator=name,
            coef=in_reward,
            clamp=clamp,
            log_probs="rollout_log_probs" if sampler else "old_log_probs",
        ),
        # Release 0.3.1 and before build the reward in the tensor that is logged as rollout/kl.
        kl_buffer=KlBuffer.REWARD if estimator == "ppo" and config.version <= (0, 3, 1) else KlBuffer.COPY,
    )


def group_size(config: Config, split: str) -> int | None:
    """slime groups by position and falls back to the whole batch, so any size can occur."""
    return None


def metrics(evaluation: "Evaluation") -> dict[str, float]:
    """slime's logged metrics: `rollout/kl`, `rollout/rewards`, `train/*`."""
    from rolloutdoctor.evaluate import stored_kl

    found: dict[str, float] = {}
    batch, rows, tokens = evaluation.batch, evaluation.rows, evaluation.tokens
    kl_T = stored_kl(batch, evaluation.objective, evaluation.dtype)
    if kl_T is not None and batch.tokens:
        found["rollout/kl"] = rollout_mean(batch, kl_T)
    if rows is not None:
        found["rollout/raw_reward"] = float(rows.score_N.mean())
    if tokens is None or rows is None or rows.length_N is None:
        return found
    found["train/pg_loss"] = evaluation.policy_loss
    found["train/loss"] = evaluation.loss
    if evaluation.objective.kl_loss is not None:
        in_kl_N = evaluation.in_scope(evaluation.objective.kl)
        found["train/kl_loss"] = float((tokens.kl_N * tokens.weight_N * in_kl_N).sum())
    if tokens.drift_N is not None:
        found["train/ppo_kl"] = float((tokens.drift_N * tokens.weight_N).sum())
    return found


def rollout_mean(batch: "RolloutBatch", x_T: "Tensor") -> float:
    """Reduce as slime reduces `rollout/kl`: the plain mean over all response tokens of a rank, weighted by its rows.

    The loss mask does not enter. Source: slime ``log_rollout_data`` and ``gather_log_data``.
    """
    from rolloutdoctor.ops import segments as seg

    sums_N, lengths_N = seg.total(x_T, batch.rows), batch.rows.diff().double()
    rank_N = batch.per_row.get("rank")
    if rank_N is None:
        return float(sums_N.sum() / lengths_N.sum())
    value = weight = 0.0
    for rank in sorted(set(rank_N.tolist())):
        here_N = rank_N == rank
        rows = float(here_N.sum())
        value += rows * float(sums_N[here_N].sum() / lengths_N[here_N].sum())
        weight += rows
    return value / weight


_DUMP = "--dump-details DIR makes slime write it"

TRAINER = Trainer(
    name="slime",
    newest="0.3.1",
    oldest="0.2.2",
    options=OPTIONS,
    objective=objective,
    metrics=metrics,
    recording={
        "ref_log_probs": f"{_DUMP}, once kl_coef > 0 or use_kl_loss loads a reference model",
        "values": f"{_DUMP} with advantage_estimator ppo",
        "*": _DUMP,
    },
    kl_metrics=("rollout/kl", "train/kl_loss"),
    loss_metric="train/loss",
    grad_norm_metric="train/grad_norm",
    group_size=group_size,
)
