"""Metrics of verl's actor from its micro-batches, and those of the correction inside the loss."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.evaluate import Evaluation
    from rolloutdoctor.formulas.losses.aggregation import Layout


def over_micro_batches(name: str, value_N: "Tensor", layout: "Layout") -> float:
    """Return what verl logs of a metric of micro-batches, given the value of a row's micro-batch, ``[N]``.

    The mean over the micro-batches and ranks of a mini-batch; of these the largest where the name holds ``max``, the
    smallest where it holds ``min``, else the mean. Source: verl ``Metric.aggregate_dp`` and ``reduce_metrics``.
    """
    from rolloutdoctor.ops import segments as seg

    share_N = 1 / (layout.micro_rows_N * layout.micros_N)
    mean_S = seg.total_by(layout.optim_N, value_N.double() * share_N)
    if "max" in name:
        return float(mean_S.max())
    return float(mean_S.min() if "min" in name else mean_S.mean())


def token_mean(name: str, sum_N: "Tensor", counted_N: "Tensor", layout: "Layout") -> float:
    """Reduce token means of micro-batches as `over_micro_batches` does, given sums and counts of rows, ``[N]`` each."""
    return over_micro_batches(name, layout.micro_total(sum_N) / (layout.micro_total(counted_N) + 1e-8), layout)


def inside_metrics(evaluation: "Evaluation") -> dict[str, float]:
    """``actor/rollout_corr/*``, which the bypass loss logs of every micro-batch; nothing if these were not logged."""
    from rolloutdoctor.evaluation.scores import ratios_at_loss
    from rolloutdoctor.formulas.corrections import inside

    batch, objective, tokens = evaluation.batch, evaluation.objective, evaluation.tokens
    rule = objective.policy_correction
    if rule is None or tokens is None or "micro_batch_id" not in batch.per_row:
        return {}
    layout, dtype = tokens.layout, evaluation.dtype
    ratios = ratios_at_loss(batch, objective, layout.micro_N, dtype)
    trainer_T, sampler_T = (batch.column(name).to(dtype) for name in ("policy_log_probs", objective.surrogate.old))
    found_M = inside.inside_metrics(ratios, rule, layout.forward_N, trainer_T, sampler_T)
    # The worker puts its own prefix before every name that does not have it.
    named_M = {f"actor/rollout_corr/{name}": x_M for name, x_M in found_M.items()}
    return {name: over_micro_batches(name, x_M[layout.micro_N], layout) for name, x_M in named_M.items()}
