"""How far the trainer's log-probs are from the sampler's: perplexities, KL and chi-squared."""

from torch import Tensor

from rolloutdoctor.corrections.masked import SAFETY_BOUND, LogRatios


def mismatch_metrics(ratios: LogRatios, trainer_T: Tensor, sampler_T: Tensor) -> dict[str, float]:
    """verl's off-policy metrics on the mask before rejection, without the prefix ``rollout_corr/``.

    Rows without a token count as perplexity one. KL is from the sampler to the trainer.

    Args:
        ratios: the two log-probs' differences.
        trainer_T: ``[T]`` log-probs of the trainer before the update.
        sampler_T: ``[T]`` log-probs of the sampler.

    Source: verl ``compute_offpolicy_metrics``.
    """
    trainer_N, sampler_N = ratios.row_mean(trainer_T), ratios.row_mean(sampler_T)
    difference_N = sampler_N - trainer_N
    u_T = ratios.value_T
    sum_N = ratios.row_sum(u_T).clamp(-SAFETY_BOUND, SAFETY_BOUND)
    return {
        "training_ppl": float((-trainer_N).exp().mean()),
        "training_log_ppl": float((-trainer_N).mean()),
        "kl": ratios.mean(-u_T),
        "k3_kl": ratios.mean(u_T.exp() - u_T - 1),
        "rollout_ppl": float((-sampler_N).exp().mean()),
        "rollout_log_ppl": float((-sampler_N).mean()),
        "log_ppl_diff": float(difference_N.mean()),
        "log_ppl_abs_diff": float(difference_N.abs().mean()),
        "log_ppl_diff_max": float(difference_N.max()),
        "log_ppl_diff_min": float(difference_N.min()),
        "ppl_ratio": float(difference_N.exp().mean()),
        "chi2_token": ratios.mean(ratios.safe_T.exp().square()) - 1.0,
        "chi2_seq": float((2.0 * sum_N).exp().mean()) - 1.0,
    }
