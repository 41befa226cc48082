"""Steps evaluated on a device, with every result on the CPU.

Of a GPU the first step of each kind is compared with the CPU (`device_agreement`). Where its memory is full, it is
tried once with half as many tokens at a time.
"""

from contextlib import suppress
from dataclasses import replace

import torch

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.blocks import DEVICE_BLOCK_TOKENS
from rolloutdoctor.evaluation.cpu_copies import cpu_copies
from rolloutdoctor.evaluation.device_agreement import compare
from rolloutdoctor.evaluation.device_faults import DeviceFault, device_fault
from rolloutdoctor.evaluation.evaluate import evaluate_all
from rolloutdoctor.evaluation.requests import EvaluatedBatch, EvaluationRequest
from rolloutdoctor.evaluation.token_measures import TokenMeasures
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.results.errors import CannotComputeError, DeviceError

MOST_COMPARED = 8
"""Kinds of steps of which one is compared with the CPU, at most: that evaluates the step four times there."""


class Evaluator:
    """Evaluates steps on a device.

    Attributes:
        device: where steps are evaluated.
        compared: kinds of steps (`kind_of`) of which one agrees with the CPU's to the largest difference, as a share of
            its rounding error bound.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.compared: dict[frozenset[str], float] = {}
        self._block_tokens = DEVICE_BLOCK_TOKENS
        self._is_halved = False

    def evaluate(self, batch: RolloutBatch, request: EvaluationRequest) -> EvaluatedBatch:
        """Evaluate a step, and compare it with the CPU's if it is the first of its kind.

        Args:
            batch: the step, on the CPU.
            request: what is wanted of it.

        Raises:
            CannotComputeError: where the trainer itself fails.
            DeviceError: if the GPU fails, or does not compute what the CPU computes.
        """
        if self.device.type == "cpu":
            return _evaluated(batch, request, None)
        try:
            result = self._on_device(batch, request)
        except CannotComputeError as error:
            _expect_failure(batch, request, error)
            raise
        kind = kind_of(batch)
        if request.objectives and batch.tokens and kind not in self.compared and len(self.compared) < MOST_COMPARED:
            self.compared[kind] = compare(batch, result.evaluations, request)
        return result

    def _on_device(self, batch: RolloutBatch, request: EvaluationRequest) -> EvaluatedBatch:
        """Evaluate a step on the device, once more in halves where its memory is full."""
        result = self._attempt(batch, request)
        if isinstance(result, DeviceFault) and result.out_of_memory and not self._is_halved:
            self._halve(batch)
            result = self._attempt(batch, request)
        if isinstance(result, DeviceFault):
            raise DeviceError(f"in step {batch.step} ({batch.split}) the GPU {result.sentence}")
        return result

    def _attempt(self, batch: RolloutBatch, request: EvaluationRequest) -> EvaluatedBatch | DeviceFault:
        """Evaluate a step on the device; return its results, or the fault that ended it."""
        try:
            there = _evaluated(batch.to(self.device), request, self._block_tokens)
            return _on_cpu(batch, there)
        except CannotComputeError:
            raise
        except Exception as error:
            fault = device_fault(error)
            if fault is None:
                raise
            # Not the exception itself, whose frames hold tensors of the device.
            return fault

    def _halve(self, batch: RolloutBatch) -> None:
        """Take half as many tokens at a time from now on."""
        self._is_halved = True
        self._block_tokens = max(1, min(self._block_tokens, batch.tokens) // 2)
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


def _evaluated(batch: RolloutBatch, request: EvaluationRequest, block_tokens: int | None) -> EvaluatedBatch:
    """Evaluate a step where it is."""
    measures = TokenMeasures(request.measures)
    evaluations = evaluate_all(
        batch,
        request.objectives,
        dtype=request.dtype,
        per_token=request.per_token,
        logged=request.logged,
        visit=measures.visit if measures else None,
        block_tokens=block_tokens,
    )
    return EvaluatedBatch(evaluations, measures.finish(batch, block_tokens))


def _on_cpu(batch: RolloutBatch, there: EvaluatedBatch) -> EvaluatedBatch:
    """The results of a step as those of the batch on the CPU."""
    labels = there.evaluations
    copies = cpu_copies(
        {
            "rows": {label: each.rows for label, each in labels.items()},
            "tokens": {label: each.tokens for label, each in labels.items()},
            "per_token": {label: each.per_token for label, each in labels.items()},
            "measures": there.measures,
        }
    )
    evaluations = {
        label: replace(each, batch=batch, **{part: copies[part][label] for part in ("rows", "tokens", "per_token")})
        for label, each in labels.items()
    }
    return EvaluatedBatch(evaluations, copies["measures"])


def kind_of(batch: RolloutBatch) -> frozenset[str]:
    """Return what sets a step apart for those who compute it: one of each kind is compared with the CPU.

    >>> from rolloutdoctor.testing import toy_batch
    >>> sorted(kind_of(toy_batch([[1, 0]])))
    ['train']
    """
    kind, length_N = {batch.split}, batch.rows.diff()
    if bool((length_N == 0).any()):
        kind.add("empty rows")
    if "response_mask" in batch.per_token and bool(((batch.trained.diff() == 0) & (length_N > 0)).any()):
        kind.add("rejected rows")
    optim_N = batch.per_row.get("optim_step_id")
    if optim_N is not None and bool((optim_N != optim_N[:1]).any()):
        kind.add("several optimizer steps")
    return frozenset(kind)


def _expect_failure(batch: RolloutBatch, request: EvaluationRequest, error: CannotComputeError) -> None:
    """Raise a `DeviceError` if the CPU can compute a step on which the trainer is said to fail."""
    try:
        evaluate_all(batch, request.objectives, dtype=torch.float64, logged=request.logged)
    except CannotComputeError:
        return
    raise DeviceError(f"step {batch.step} ({batch.split}) can be computed on the CPU, but not on the GPU: {error}")


def probe(device: torch.device) -> None:
    """Allocate, add up by segments and copy back on a device.

    Raises:
        DeviceError: if it fails, or the sums are not those of the CPU.
    """
    x_T, rows = torch.arange(4096, dtype=torch.float64), torch.tensor([0, 0, 1, 1000, 4096])
    expected = seg.total(x_T, rows)
    try:
        sums = seg.total(x_T.to(device), rows.to(device)).cpu()
    except Exception as error:
        fault = device_fault(error)
        if fault is None:
            raise
        raise DeviceError(f"the GPU {fault.sentence} before the first step") from None
    # Whole numbers: exact in any order.
    if not torch.equal(sums, expected):
        raise DeviceError(f"the GPU does not compute what the CPU computes: a sum is {sums.tolist()}")
