"""Policy terms: the value per token and its derivative with respect to the policy's log-prob."""

from collections.abc import Callable

from rolloutdoctor.formulas.losses.clipped import ppo_delta_clip, ppo_dual_clip
from rolloutdoctor.formulas.losses.covariance import clip_cov, kl_cov
from rolloutdoctor.formulas.losses.dppo import dppo_kl, dppo_tv, probability_band
from rolloutdoctor.formulas.losses.log_prob import cispo_capped, cispo_clipped, dro, gpg, reinforce, windowed
from rolloutdoctor.formulas.losses.ratio_masks import ratio_masked
from rolloutdoctor.formulas.losses.sequence import clipped_row, geo_mean, gspo
from rolloutdoctor.formulas.losses.soft import sapo, sapo_of_tokens
from rolloutdoctor.formulas.losses.terms import PolicyTerm, TokenInputs
from rolloutdoctor.formulas.losses.vespo import vespo
from rolloutdoctor.objective.objective import Surrogate

SURROGATES: dict[str, Callable[[TokenInputs, Surrogate], PolicyTerm]] = {
    "cispo_capped": cispo_capped,
    "cispo_clipped": cispo_clipped,
    "clip_cov": clip_cov,
    "clipped_row": clipped_row,
    "dppo_kl": dppo_kl,
    "dppo_tv": dppo_tv,
    "dro": dro,
    "geo_mean": geo_mean,
    "gpg": gpg,
    "gspo": gspo,
    "kl_cov": kl_cov,
    "ppo_delta_clip": ppo_delta_clip,
    "ppo_dual_clip": ppo_dual_clip,
    "probability_band": probability_band,
    "ratio_masked": ratio_masked,
    "reinforce": reinforce,
    "sapo": sapo,
    "sapo_of_tokens": sapo_of_tokens,
    "vespo": vespo,
    "windowed": windowed,
}
