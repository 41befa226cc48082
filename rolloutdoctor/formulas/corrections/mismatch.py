"""Mismatch of trainer and sampler: perplexities, KL and chi-squared of their log-probs."""

from torch import Tensor

from rolloutdoctor.formulas.corrections.masked import SAFETY_BOUND, LogRatios


def mismatch_metrics(ratios: LogRatios, trainer_T: Tensor, sampler_T: Tensor) -> dict[str, Tensor]:
    """verl's off-policy metrics on the mask before rejection, ``[M]`` each, without the prefix ``rollout_corr/``.

    Rows without a token count as perplexity one. KL is from the sampler to the trainer.

    Args:
        ratios: the two log-probs' differences.
        trainer_T: ``[T]`` log-probs of the trainer: before the update, or at the loss.
        sampler_T: ``[T]`` log-probs of the sampler.

    Source: verl ``compute_offpolicy_metrics``.
    """
    trainer_N, sampler_N = ratios.row_mean(trainer_T), ratios.row_mean(sampler_T)
    difference_N = sampler_N - trainer_N
    u_T = ratios.value_T
    sum_N = ratios.row_sum(u_T).clamp(-SAFETY_BOUND, SAFETY_BOUND)
    return {
        "training_ppl": ratios.rows_mean((-trainer_N).exp()),
        "training_log_ppl": ratios.rows_mean(-trainer_N),
        "kl": ratios.mean(-u_T),
        "k3_kl": ratios.mean(u_T.exp() - u_T - 1),
        "rollout_ppl": ratios.rows_mean((-sampler_N).exp()),
        "rollout_log_ppl": ratios.rows_mean(-sampler_N),
        "log_ppl_diff": ratios.rows_mean(difference_N),
        "log_ppl_abs_diff": ratios.rows_mean(difference_N.abs()),
        "log_ppl_diff_max": ratios.rows_high(difference_N),
        "log_ppl_diff_min": ratios.rows_low(difference_N),
        "ppl_ratio": ratios.rows_mean(difference_N.exp()),
        "chi2_token": ratios.mean(ratios.safe_T.exp().square()) - 1.0,
        "chi2_seq": ratios.rows_mean((2.0 * sum_N).exp()) - 1.0,
    }


def probability_metrics(ratios: LogRatios, trainer_T: Tensor, sampler_T: Tensor) -> dict[str, float]:
    """Compare the two probabilities of a token, over all tokens, without the prefix ``training/``.

    Of a single token there is neither a spread nor a correlation; verl logs NaN, and here the names are left out.

    Args:
        ratios: whose mask says which tokens.
        trainer_T: ``[T]`` log-probs of the trainer before the update.
        sampler_T: ``[T]`` log-probs of the sampler.

    Source: verl ``calculate_debug_metrics``.
    """
    trainer, sampler = (x_T[ratios.mask_T].double().exp() for x_T in (trainer_T, sampler_T))
    apart = (trainer - sampler).abs()
    metrics = {
        "rollout_probs_diff_valid": 1.0,
        "rollout_probs_diff_max": float(apart.max()),
        "rollout_probs_diff_mean": float(apart.mean()),
    }
    if len(apart) > 1:
        metrics["rollout_probs_diff_std"] = float(apart.std())
        metrics["rollout_actor_probs_pearson_corr"] = _correlation(trainer, sampler)
    return metrics


def _correlation(x: Tensor, y: Tensor) -> float:
    """Return Pearson's correlation, NaN where one does not vary."""
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / (x.square().sum() * y.square().sum()).sqrt())
