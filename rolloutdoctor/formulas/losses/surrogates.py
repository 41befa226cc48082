"""Policy terms: the value per token and its derivative with respect to the policy's log-prob."""

from collections.abc import Callable

from rolloutdoctor.formulas.losses import trl, verl_covariance, verl_dppo, verl_log_prob, verl_sequence, verl_soft
from rolloutdoctor.formulas.losses.clipped import ppo_delta_clip, ppo_dual_clip
from rolloutdoctor.formulas.losses.terms import PolicyTerm, TokenInputs
from rolloutdoctor.objective.objective import Surrogate

SURROGATES: dict[str, Callable[[TokenInputs, Surrogate], PolicyTerm]] = {
    "ppo_delta_clip": ppo_delta_clip,
    "ppo_dual_clip": ppo_dual_clip,
    "trl_cispo": trl.cispo,
    "trl_rloo": trl.rloo,
    "trl_sapo": trl.sapo,
    "trl_vespo": trl.vespo,
    "verl_cispo": verl_log_prob.cispo,
    "verl_clip_cov": verl_covariance.clip_cov,
    "verl_dppo_kl": verl_dppo.dppo_kl,
    "verl_dppo_tv": verl_dppo.dppo_tv,
    "verl_dro": verl_log_prob.dro,
    "verl_geo_mean": verl_sequence.geo_mean,
    "verl_gpg": verl_log_prob.gpg,
    "verl_gspo": verl_sequence.gspo,
    "verl_kl_cov": verl_covariance.kl_cov,
    "verl_reinforce": verl_log_prob.reinforce,
    "verl_sapo": verl_soft.sapo,
}
