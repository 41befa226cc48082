"""What Unsloth logs: TRL's names for what is generated, its own for the loss. Read: unsloth and unsloth-zoo of 2026.8.

It adds `completion_length` to every line, beside TRL's `completions/mean_length`, and has no entropy. Which names of
TRL there are depends on the TRL that is installed, whose release is the version of this trainer. Clip ratios, from
Unsloth 2026.2 on, are means of the ranks' means; what is logged of the sampler is there from 2025.10.12 on.
"""

from dataclasses import replace

from rolloutdoctor.metric_names.name import MetricName
from rolloutdoctor.trainers.trl import names as trl

_LOSS = "unsloth/models/rl_replacements.py, grpo_trainer_compute_loss"
_ZOO = "unsloth_zoo/rl_replacements.py, grpo_compute_loss"

# fmt: off
NAMES: tuple[MetricName, ...] = (
    *(replace(metric, since="") for metric in (*trl.GENERATION, *trl.FUNCTIONS)),
    MetricName("reward_std", "reward_std",
        "mean over groups of their std (n - 1) up to TRL 0.26, std over all completions above",
        "trl/trainer/grpo_trainer.py, _generate_and_score_completions"),
    MetricName("completion_length", "response_length", "mean over the rows of rank 0 of the tokens of the loss mask",
        _ZOO),
    MetricName("kl", "kl",
        "mean over the rows of rank 0 of the mean k3 over their tokens, then over chunks; NaN where a row has no "
        "token, 0 with beta 0", _ZOO, zero_when_off=True, before_update=True),
    *(replace(metric, source=_LOSS, since="") for metric in trl.CLIPS),
    MetricName("sampling/sampling_logp_difference/mean", "sampler_logp_gap",
        "mean of the absolute difference over all cells of a rank, padding as 0, then over ranks: diluted by padding",
        _LOSS),
    MetricName("sampling/sampling_logp_difference/max", "sampler_logp_gap_max", "the largest of all ranks", _LOSS),
    MetricName("sampling/importance_sampling_ratio/mean", "is_weight",
        "mean of the weight over all cells of a rank, padding as 0, then over ranks: diluted by padding", _LOSS),
)
# fmt: on
