"""A GPU is trusted once it has shown that it computes what the CPU computes.

The first step that is evaluated on a GPU, of each split, is evaluated on the CPU too, which is the reference. The
second pass on the CPU is given the row values of the GPU, once the first pass has shown that they are right, so that
each pass answers for itself. Where a value differs by more than its rounding radius (`row_radii`, `step_radii`),
nothing goes on.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import Evaluation, evaluate_all
from rolloutdoctor.evaluation.gpu_check.least_radii import least_radii
from rolloutdoctor.evaluation.gpu_check.row_radii import least_row_radii, row_radii
from rolloutdoctor.evaluation.gpu_check.step_radii import StepRadii, step_radii
from rolloutdoctor.evaluation.rows import RowResult, row_parts
from rolloutdoctor.evaluation.token_measures import TokenBlock
from rolloutdoctor.evaluation.token_sums import PerToken, TokenSums
from rolloutdoctor.evaluation.tokens import token_pass
from rolloutdoctor.formulas.losses.aggregation import Layout
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.results.errors import CannotComputeError, DeviceError

WORDS = {
    "score_N": "score",
    "advantage_N": "advantage",
    "advantage_T": "advantage",
    "baseline_N": "baseline",
    "weight_T": "importance weight",
    "weight_N": "weight in the loss",
    "policy_weight_N": "weight in the policy loss",
    "policy_N": "policy term",
    "loss_at_ratio_one_N": "policy term at ratio one",
    "kl_N": "KL",
    "kl_T": "KL",
    "kl_loss_N": "KL term",
    "ratio_T": "importance ratio",
    "loss_T": "loss",
    "grad_T": "gradient",
    "grad_l1_N": "absolute gradient",
    "grad_sq_N": "squared gradient",
    "logits_low_sq_N": "lower bound of the squared gradient of the logits",
    "logits_sq_N": "squared gradient of the logits",
    "low_clipped_N": "number of tokens below the clip range",
    "high_clipped_N": "number of tokens above the clip range",
    "clipped_N": "number of clipped tokens",
    "capped_N": "number of capped tokens",
    "drift_N": "KL from the old policy",
    "versus_l1_N": "absolute change of the gradient",
    "versus_dot_N": "product with the gradient as configured",
}
"""Names for a reader; of other values, which are counts and flags, their own names."""


PARTS = (RowResult, TokenSums, PerToken, Layout)
"""What an evaluation is made of."""


class Difference(NamedTuple):
    """Where the two are furthest apart.

    Attributes:
        times: how many times the radius; infinite if there is none, or if one of the values is not a number.
        name: of the value.
        place: its row or token, counted from 0.
        here: the CPU's value.
        there: the GPU's value.
    """

    times: float
    name: str
    place: int
    here: float
    there: float


@dataclass(frozen=True)
class EvaluationRequest:
    """What a step is evaluated for, as `evaluate_all` takes it."""

    objectives: Mapping[str, Objective]
    dtype: torch.dtype
    per_token: Collection[str]
    logged: Mapping[str, float]
    visit: Callable[[TokenBlock], None] | None = None


class Evaluator:
    """Evaluates steps on a device; of a GPU's first step, of each split, the CPU is asked too.

    Attributes:
        device: where steps are evaluated.
        compared: splits whose first step was found to agree.
    """

    def __init__(self, device: torch.device, kernel: str = "torch") -> None:
        self.device, self._kernel = device, kernel
        self.compared: set[str] = set()
        self._here: RolloutBatch | None = None

    def moved(self, batch: RolloutBatch) -> RolloutBatch:
        """The step on the device; the one on the CPU is kept until it was compared."""
        there = batch.to(self.device)
        self._here = batch if there is not batch and batch.split not in self.compared else None
        return there

    def done(self) -> None:
        """Keep nothing of the step that was moved last."""
        self._here = None

    def evaluate(self, batch: RolloutBatch, request: EvaluationRequest) -> dict[str, Evaluation]:
        """Evaluate a step that was moved, and compare it with the CPU's if it is the first.

        Raises:
            CannotComputeError: where the trainer itself fails.
            DeviceError: if the GPU does not compute what the CPU computes.
        """
        here = self._here
        try:
            found = evaluate_all(
                batch,
                request.objectives,
                dtype=request.dtype,
                per_token=request.per_token,
                logged=request.logged,
                kernel=self._kernel,
                visit=request.visit,
            )
        except CannotComputeError as error:
            if here is not None:
                _compare_failure(here, request, error)
            raise
        if here is not None and request.objectives and batch.tokens:
            _compare(here, found, request, self._kernel)
            self.compared.add(batch.split)
        return found


def _compare_failure(here: RolloutBatch, request: EvaluationRequest, error: CannotComputeError) -> None:
    """Insist on the CPU failing too."""
    try:
        evaluate_all(here, request.objectives, dtype=request.dtype, logged=request.logged)
    except CannotComputeError:
        return
    raise DeviceError(f"step {here.step} ({here.split}) can be computed on the CPU, but not on the GPU: {error}")


def _compare(here: RolloutBatch, found: Mapping[str, Evaluation], request: EvaluationRequest, kernel: str) -> None:
    """Refuse the GPU's evaluation of a step if it is not the CPU's."""
    here = replace(here, per_token={name: here.per_token[name] for name in here.per_token})
    step = _Step(here, {name: one.at_step(request.logged) for name, one in request.objectives.items()}, request, kernel)
    try:
        there = {name: None if one.rows is None else _on_cpu(one.rows) for name, one in found.items()}
        step.compare_rows(there)
        able = {name: part for name, part in there.items() if part is not None and found[name].tokens is not None}
        if able:
            step.compare_tokens(able, found)
    except CannotComputeError as error:
        raise DeviceError(
            f"step {here.step} ({here.split}) can be computed on the GPU, but not on the CPU: {error}"
        ) from None


@dataclass(frozen=True)
class _Step:
    """A step on the CPU, and what was evaluated of it."""

    here: RolloutBatch
    objectives: Mapping[str, Objective]
    request: EvaluationRequest
    kernel: str

    def compare_rows(self, there: Mapping[str, RowResult | None]) -> None:
        """Compare the first pass."""
        parts = row_parts(self.here, self.objectives, self.request.dtype)
        radii = least_row_radii(self.here, parts, self.request.dtype)
        if any(_worst(parts[name], there[name], radii.get(name, {})) for name in parts):
            radii = row_radii(self.here, self.objectives, self.request.dtype)
        for name, part in parts.items():
            self._refuse(_worst(part, there[name], radii.get(name, {})))

    def compare_tokens(self, parts: Mapping[str, RowResult], found: Mapping[str, Evaluation]) -> None:
        """Compare the second pass, which is given the GPU's first."""
        dtype, wanted = self.request.dtype, frozenset(self.request.per_token) & parts.keys()
        passes = token_pass(self.here, parts, dtype, wanted)
        open_N = torch.zeros(len(self.here), dtype=torch.bool)
        least: dict[str, dict[str, Tensor]] = {}
        for name, (tokens, kept) in passes.items():
            least[name] = least_radii(tokens, kept, self.objectives[name], dtype)
            for field, one, other in _pairs((tokens, kept), (found[name].tokens, found[name].per_token)):
                open_N |= self._rows_of(field, _times(one, other, least[name].get(field)) > 1)
        radii = {name: StepRadii() for name in parts}
        if bool(open_N.any()):
            radii = step_radii(self.here, parts, dtype, wanted, open_N)
        for name, pair in passes.items():
            whole = {field: radius.clone() for field, radius in least[name].items()}
            for field, radius in self._unpacked(radii[name], open_N).items():
                whole[field] = torch.maximum(whole[field], radius) if field in whole else radius
            self._refuse(_worst(pair, (found[name].tokens, found[name].per_token), whole))

    def _rows_of(self, field: str, is_it: Tensor) -> Tensor:
        """The rows of some values, ``[N]`` bool."""
        if field.endswith("_T"):
            return seg.total(is_it, self.here.rows) > 0
        return is_it if len(is_it) == len(self.here) else torch.zeros(len(self.here), dtype=torch.bool)

    def _unpacked(self, radii: StepRadii, open_N: Tensor) -> dict[str, Tensor]:
        """Radii of rows, and those of trained tokens at their places, 0 elsewhere."""
        found = dict(radii.rows)
        for name, blocks in radii.tokens.items():
            found[name] = torch.zeros(self.here.tokens, dtype=torch.float64)
            found[name][self.here.column("response_mask") & seg.expand(open_N, self.here.rows)] = torch.cat(blocks)
        return found

    def _refuse(self, found: Difference | None) -> None:
        """Refuse to go on if there is a difference.

        Raises:
            DeviceError: that says it.
        """
        if found is None:
            return
        here, place = self.here, f"row {found.place}"
        if found.name.endswith("_T"):
            row = int(torch.searchsorted(here.rows, torch.tensor(found.place), right=True)) - 1
            place = f"row {row}, token {found.place - int(here.rows[row])}"
        elif found.place < len(here.sample_ids):
            place = f"{place} (sample {here.sample_name(found.place)})"
        times = "which rounding does not explain"
        if found.times < torch.inf:
            times = f"{found.times:.3g} times as far apart as rounding explains"
        other = "--kernel torch or " if self.kernel != "torch" else ""
        raise DeviceError(
            f"the GPU does not compute what the CPU computes: in step {here.step} ({here.split}), {place}, "
            f"{WORDS.get(found.name, found.name)} is {found.there!r} on the GPU and {found.here!r} on the CPU, "
            f"{times}; nothing more was evaluated, use {other}--device cpu"
        )


def _on_cpu(part: RowResult) -> RowResult:
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    moved: dict[str, Any] = {name: x.cpu() for name, x in values.items() if isinstance(x, Tensor)}
    return replace(part, **moved)


def _pairs(here: object, there: object) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name and both values of everything that two evaluations are made of."""
    # Whether there is a value follows from the objective and the columns.
    assert (here is None) == (there is None)
    if isinstance(here, tuple) and isinstance(there, tuple):
        for one, other in zip(here, there, strict=True):
            yield from _pairs(one, other)
    elif isinstance(here, PARTS):
        for field in fields(here):
            one, other = getattr(here, field.name), getattr(there, field.name)
            if isinstance(one, Tensor):
                yield field.name, one, other.cpu()
            else:
                yield from _pairs(one, other)


def _times(here: Tensor, there: Tensor, radius: Tensor | None) -> Tensor:
    """How many times its radius each value is off; infinite where one of the two is not a number.

    Without a radius values must be equal.
    """
    one, other = here.double(), there.double()
    radius = torch.zeros_like(one) if radius is None else radius.expand_as(one)
    # Where rounding explains everything, an infinity too.
    same = (one == other) | (one.isnan() & other.isnan()) | ((radius == torch.inf) & ~one.isnan() & ~other.isnan())
    return torch.where(same, 0.0, ((one - other).abs() / radius).nan_to_num(torch.inf, torch.inf))


def _worst(here: object, there: object, radii: Mapping[str, Tensor]) -> Difference | None:
    """The value that is furthest off, if one is by more than its radius."""
    worst: Difference | None = None
    for name, one, other in _pairs(here, there):
        times = _times(one, other, radii.get(name))
        if len(times) and float(times.max()) > max(1.0, 0.0 if worst is None else worst.times):
            place = int(times.argmax())
            worst = Difference(float(times[place]), name, place, float(one[place]), float(other[place]))
    return worst
