"""The evaluation of a step on a GPU compared with the CPU's in float64.

An advantage may differ by its rounding radius (`radii.advantages`), which grows where scores are equal. A sum over the
n tokens of a row, of terms x, may differ by ``(64 u + 2 n 2^-53) sum |x|``: the terms are what some 64 operations in
the type of the tokens leave, u = 2^-24 in float32 and 2^-53 in float64, and both devices add them up in float64, each
in an order of its own, of which any loses n 2^-53 of the sum of magnitudes at most (Higham, Accuracy and Stability of
Numerical Algorithms, 4.2). What
conditioning, tokens at a bound (clip, cap, rejection) and ties of a ranking add is measured, as the response of the CPU
to the type of the tokens, and to log-probs moved by `MOVED` u: even rows up and odd rows down, and the other way round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import Evaluation, evaluate_all
from rolloutdoctor.evaluation.radii.advantages import advantage_radius, token_advantage_radius
from rolloutdoctor.evaluation.requests import EvaluationRequest
from rolloutdoctor.evaluation.rows import RowResult
from rolloutdoctor.evaluation.token_sums import TokenSums
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.results.errors import CannotComputeError, DeviceError

UNITS, MOVED = 64, 8.0
ROUNDING = 2.0**-40
"""A score is at its baseline if it is no further off than this share of the largest score."""
ROW_VALUES = ("score_N", "baseline_N", "advantage_N", "advantage_T", "weight_T")
WORDS = {
    "score_N": "score",
    "advantage_N": "advantage",
    "advantage_T": "advantage",
    "baseline_N": "baseline",
    "policy_N": "policy loss",
    "kl_N": "KL",
    "grad_l1_N": "absolute gradient",
    "grad_sq_N": "squared gradient",
}
"""Names for a reader; of other values their own names."""
LARGEST = 2.0**100
"""Of values larger than this float32 overflows on the way."""
UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}


def compare(batch: RolloutBatch, evaluations: Mapping[str, Evaluation], request: EvaluationRequest) -> float:
    """Compare the evaluation of a step on a device with the CPU's in float64, whose second pass is given its rows.

    Returns:
        The largest difference, as a share of its bound.

    Raises:
        DeviceError: if a value differs by more than rounding explains.
    """
    unit = UNIT[request.dtype]
    try:
        each = [_on_cpu(_moved(batch, way * MOVED * unit), evaluations, request) for way in (0.0, 1.0, -1.0)]
        each.append(_on_cpu(batch, evaluations, request, request.dtype))
    except CannotComputeError as error:
        raise DeviceError(
            f"step {batch.step} ({batch.split}) can be computed on the GPU, but not on the CPU: {error}"
        ) from None
    shares = [0.0]
    for name, there in evaluations.items():
        if there.rows is not None:
            # A trainer may take its statistics in float32 whatever the type of token values is.
            wanted = [rows[name] for rows, _ in each]
            size = _row_size(batch, wanted[0])
            radii = _advantage_radii(replace(there, rows=wanted[0]))
            shares += _shares(batch, wanted, there.rows, dict.fromkeys(ROW_VALUES, size), UNIT[torch.float32], radii)
        if there.tokens is not None:
            sums, exact = [of_tokens[name].tokens for _, of_tokens in each], each[0][1]
            sizes = _sizes(batch, exact[name], next(iter(exact.values())))
            shares += _shares(batch, sums, there.tokens, sizes, unit, terms_N=batch.rows.diff())
    return max(shares)


def _advantage_radii(exact: Evaluation) -> dict[str, Tensor]:
    """Return the rounding radius of the advantages in float32, which are 1 over epsilon where rewards are equal."""
    assert exact.rows is not None
    if exact.rows.advantage_N is not None:
        return {"advantage_N": advantage_radius(exact).largest}
    return {"advantage_T": token_advantage_radius(exact).largest}


def _moved(batch: RolloutBatch, by: float) -> RolloutBatch:
    """The step with log-probs moved by a share of their size: every ratio of two of them moves."""
    ways = {"policy_log_probs": by, "rollout_log_probs": -by, "values": by, "ref_log_probs": -by}
    sign_T = seg.expand(1.0 - 2.0 * (torch.arange(len(batch)) % 2), batch.rows).double()
    moved = {
        name: batch.column(name).double() + way * sign_T * (1 + batch.column(name).double().abs())
        for name, way in ways.items()
        if by and name in batch.per_token
    }
    return replace(batch, per_token={name: moved.get(name, batch.per_token[name]) for name in batch.per_token})


def _on_cpu(
    batch: RolloutBatch,
    evaluations: Mapping[str, Evaluation],
    request: EvaluationRequest,
    dtype: torch.dtype = torch.float64,
) -> tuple[dict[str, RowResult], dict[str, Evaluation]]:
    """The CPU's first pass, and its second pass, which is given the rows that were found."""
    row_results = {name: evaluation.rows for name, evaluation in evaluations.items() if evaluation.rows is not None}
    parts: list[RowResult] = []

    def amend(part: RowResult) -> RowResult:
        there = list(row_results.values())[len(parts)]
        parts.append(part)
        return there

    evaluated = evaluate_all(batch, request.objectives, dtype=dtype, logged=request.logged, amend=amend)
    return dict(zip(row_results, parts, strict=True)), evaluated


def _kl_sizes(batch: RolloutBatch) -> Tensor:
    """Sum the magnitudes of the terms of a token's KL, whatever its estimator, ``[T]`` float64."""
    if not batch.has("policy_log_probs", "ref_log_probs"):
        return torch.ones(batch.tokens, dtype=torch.float64)
    u_T = batch.column("policy_log_probs").double() - batch.column("ref_log_probs")
    return 1 + u_T.abs() + u_T.square() + (-u_T).exp()


def _row_size(batch: RolloutBatch, rows: RowResult) -> Tensor:
    """Return the largest magnitude among the terms of scores, baselines, advantages and weights."""
    penalty, score_N = rows.objective.kl_reward, rows.score_N.abs()
    if penalty is not None:
        score_N = score_N + abs(penalty.coef) * seg.total(_kl_sizes(batch), batch.rows)
    top = 1 + score_N.nan_to_num(0.0, 0.0).amax()
    if rows.advantage_T is not None:
        # Discounted sums of rewards and values.
        scale = rows.advantage_T.abs() * batch.rows.diff().amax()
    elif rows.advantage_N is not None and rows.baseline_N is not None:
        apart_N = (rows.score_N - rows.baseline_N).abs()
        scale = torch.where(apart_N > ROUNDING * top, rows.advantage_N.abs() / apart_N, 0.0)
    else:
        scale = torch.ones(1)
    return top * (1 + scale.nan_to_num(0.0, 0.0).amax())


def _sizes(batch: RolloutBatch, evaluation: Evaluation, reference: Evaluation) -> dict[str, Tensor]:
    """Sum the magnitudes of the terms in the second pass, ``[N]`` float64 by their names in `TokenSums`."""
    mask_T = batch.column("response_mask")
    policy_T, kl_T = batch.column("policy_log_probs").double(), _kl_sizes(batch)

    def total(x_T: Tensor) -> Tensor:
        return seg.total(torch.where(mask_T, x_T, 0.0), batch.rows)

    def sizes(evaluation: Evaluation) -> tuple[Tensor, Tensor, Tensor]:
        """Magnitudes of the policy term, of the KL, and of the derivative, ``[T]``."""
        rows, sums, term = evaluation.rows, evaluation.tokens, evaluation.objective.kl_loss
        assert rows is not None
        assert sums is not None
        advantage_T = rows.advantage_T if rows.advantage_N is None else seg.expand(rows.advantage_N, batch.rows)
        assert advantage_T is not None  # a first pass has one of the two
        log_T = policy_T - batch.column(evaluation.objective.surrogate.old)
        weight_T = 1.0 if rows.weight_T is None else 1 + rows.weight_T
        value_T = (1 + advantage_T.abs()) * weight_T * (1 + log_T.exp() + log_T.square())
        of_kl_T = kl_T * (1 + log_T.exp()) * (0.0 if term is None else abs(term.coef))
        weights = [seg.expand(x_N.abs(), batch.rows) for x_N in (sums.policy_weight_N, sums.weight_N)]
        return value_T, of_kl_T, weights[0] * value_T + weights[1] * of_kl_T

    value_T, of_kl_T, grad_T = sizes(evaluation)
    with_T = sizes(reference)[-1]
    by_name = {"kl_N": total(kl_T * (1 + value_T)), "kl_loss_N": total(of_kl_T), "grad_l1_N": total(grad_T)}
    by_name |= dict.fromkeys(("policy_N", "loss_at_ratio_one_N", "drift_N", "logged_N"), total(value_T))
    by_name |= dict.fromkeys(("grad_sq_N", "logits_low_sq_N", "logits_sq_N"), total(grad_T.square()))
    return by_name | {"versus_l1_N": total(grad_T + with_T), "versus_dot_N": total(grad_T * with_T)}


def _shares(
    batch: RolloutBatch,
    wanted: Sequence[RowResult | TokenSums | None],
    there: RowResult | TokenSums,
    sizes: Mapping[str, Tensor],
    unit: float,
    radii: Mapping[str, Tensor] | None = None,
    terms_N: Tensor | None = None,
) -> list[float]:
    """Return how far each value is from the first of those wanted, in bounds; the others are its responses.

    Args:
        batch: the step.
        wanted: of the CPU.
        there: of the device.
        sizes: sums of the magnitudes of the terms, by name.
        unit: of the type of the terms.
        radii: what is added to the bound, by name.
        terms_N: how many terms those named in `sizes` have, where they were added up in float64.

    Raises:
        DeviceError: that says which one is furthest off.
    """
    shares: list[float] = []
    worst = ""
    for name in (field.name for field in fields(there)):
        if not isinstance(getattr(there, name), Tensor):
            continue
        computed, exact, *moved = (getattr(side, name).double() for side in (there, *wanted))
        orders = 0.0 if terms_N is None or name not in sizes else 2 * UNIT[torch.float64] * terms_N
        radius = (UNITS * unit + orders) * (exact.abs() + sizes.get(name, torch.zeros(())))
        radius = radius + (radii or {}).get(name, torch.zeros(()))
        for shifted in moved:
            radius = radius + (shifted - exact).abs()
        same = (computed == exact) | (computed.isnan() & exact.isnan()) | ~(radius < LARGEST)
        times = torch.where(same, 0.0, ((computed - exact).abs() / radius).nan_to_num(torch.inf, torch.inf))
        if not len(times):
            continue
        share, at = float(times.max()), int(times.argmax())
        if share > max([1.0, *shares]):
            row = at if name.endswith("_N") else int(torch.searchsorted(batch.rows, at, right=True)) - 1
            values = f"is {float(computed[at])!r} on the GPU and {float(exact[at])!r} on the CPU"
            worst = f"row {row} (sample {batch.sample_name(row)}), {WORDS.get(name, name)} {values}"
        shares.append(share)
    if worst:
        raise DeviceError(
            f"the GPU does not compute what the CPU computes: in step {batch.step} ({batch.split}), {worst}, "
            f"{max(shares):.3g} times the rounding error bound"
        )
    return shares
