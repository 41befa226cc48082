"""Where the kernel can run, and the sums that it makes of a step."""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.objective.objective import KlTerm, Objective, Surrogate

CHUNK_TOKENS = 8192
"""Tokens of a row that one program of the kernel goes through; longer rows are cut."""

TOGETHER = {torch.float32: 8, torch.float64: 2}
"""Objectives beside the reference whose sums fit the registers: for more of them the columns are read again."""

_REFERENCE = (
    *("policy_N", "grad_l1_N", "grad_sq_N", "logits_low_sq_N", "low_clipped_N", "high_clipped_N"),
    *("kl_N", "drift_N", "clipped_N", "capped_N", "logits_sq_N"),
)
_OTHER = ("policy_N", "grad_l1_N", "grad_sq_N", "versus_l1_N", "versus_dot_N", "clipped_N", "capped_N")
_OF_TOKENS = ("low_clipped_N", "high_clipped_N", "kl_N", "drift_N")
"""Sums that no value of a row enters."""


class RowValues(NamedTuple):
    """What an objective gives to the tokens of a row, ``[N]`` each: scopes bool, the others in the dtype of tokens."""

    policy_N: Tensor
    kl_N: Tensor
    policy_weight_N: Tensor
    kl_weight_N: Tensor
    advantage_N: Tensor | None


KERNELS = ("torch", "triton")
"""What evaluates a step on a GPU: torch alone, or for objectives that it covers the kernel in Triton."""

OLDEST = (8, 0)
"""Compute capability of the oldest GPU that the kernel is compiled for."""


def why_not(device: torch.device) -> str | None:
    """Why the kernel cannot run on a device; None if it can."""
    if device.type != "cuda":
        return "the kernel runs on a GPU, and this run is evaluated on the CPU"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if torch.version.cuda is None:
        return "the kernel is compiled for CUDA, and this torch is built without it"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        found, needed = (".".join(map(str, each)) for each in (capability, OLDEST))
        return f"the kernel needs compute capability {needed}, and this GPU has {found}"
    return _launch_failure()


@cache
def _launch_failure() -> str | None:
    """Why Triton launches no kernel here: it builds a part of it with a C compiler and Python's headers."""
    try:
        from rolloutdoctor.evaluation.cuda import kernel

        found = torch.zeros(1, device="cuda")
        kernel.probe[(1,)](found)
        return None if found.item() == 1 else "Triton launches kernels here that write nothing"
    except Exception as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        return f"Triton launches no kernel here: {why}"


def is_taken(batch: RolloutBatch, kernel: str) -> bool:
    """True if a step goes to the kernel, should it cover the objectives: it is asked for, and never on the CPU."""
    return kernel == "triton" and batch.device.type == "cuda"


def token_sums(
    batch: RolloutBatch,
    objective: Objective,
    values: Sequence[RowValues],
    dtype: torch.dtype,
    *,
    chunk: int = CHUNK_TOKENS,
) -> list[Mapping[str, Tensor]]:
    """Sums per row of objectives that differ in values per row alone, by their names in `TokenSums`, float64 ``[N]``.

    Args:
        batch: the step, on the device where the kernel runs.
        objective: `covered.is_covered`; it says what becomes of a token.
        values: of each objective, advantages included; the first is the reference: the others are compared with its
            derivative.
        dtype: of the values per token.
        chunk: tokens of a row that are summed up at a time.
    """
    reference, *others = values
    most = TOGETHER[dtype]
    groups = [others[first : first + most] for first in range(0, len(others), most)] or [[]]
    found: list[Mapping[str, Tensor]] = []
    for group in groups:
        of_reference, *of_others = _read(batch, objective, [reference, *group], dtype, chunk)
        found += of_others if found else [of_reference, *of_others]
    return found


def _read(
    batch: RolloutBatch, objective: Objective, values: Sequence[RowValues], dtype: torch.dtype, chunk: int
) -> list[Mapping[str, Tensor]]:
    """One launch of the kernel, and the sums of its chunks in their order."""
    from rolloutdoctor.evaluation.cuda import kernel

    chunks = (batch.rows.diff() + chunk - 1) // chunk
    offsets = torch.cat([chunks.new_zeros(1), chunks.cumsum(0)])
    count, others = int(offsets[-1]), len(values) - 1
    row_of = torch.repeat_interleave(torch.arange(len(batch), device=batch.device), chunks, output_size=count)
    width = len(_REFERENCE) + len(_OTHER) * others
    parts = torch.zeros(count, width, dtype=torch.float64, device=batch.device)
    if count:
        stacked = torch.stack([x_N.to(dtype) for each in values for x_N in each if x_N is not None])
        columns, flags = _columns(batch, objective)
        padded = 0 if not others else 1 << (others - 1).bit_length()
        kernel.token_sums[(count,)](
            *columns,
            batch.column("response_mask").contiguous().view(torch.uint8),
            batch.rows,
            offsets,
            row_of,
            stacked,
            parts,
            len(batch),
            len(values),
            width,
            **constants(objective.surrogate, objective.kl_loss, dtype),
            **flags,
            OTHERS=padded,
            CHUNK=chunk,
            BLOCK=tile(padded),
            **kernel.OPTIONS,
        )
    # A thread adds up the chunks of a row in their order.
    sums = torch.segment_reduce(parts, "sum", offsets=offsets, unsafe=True).t().contiguous()
    return _named(sums, objective, others, "sum_pi_squared" in batch.per_token)


def _columns(batch: RolloutBatch, objective: Objective) -> tuple[list[Tensor], dict[str, object]]:
    """The columns as the kernel takes them, and what it is told of them."""
    policy_T, old_T = batch.column("policy_log_probs"), batch.column(objective.surrogate.old)
    flags: dict[str, object] = {"ON_POLICY": old_T is policy_T, "HAS_PI": "sum_pi_squared" in batch.per_token}
    pi_T = batch.column("sum_pi_squared") if flags["HAS_PI"] else policy_T
    ref_T = kl_T = policy_T
    flags["KL_COLUMN"] = "policy"
    if objective.kl_loss is not None:
        ref_T, kl_T = batch.column("ref_log_probs"), batch.column(objective.kl_loss.log_probs)
        flags["KL_COLUMN"] = "policy" if kl_T is policy_T else "old" if kl_T is old_T else "own"
    return [x_T.contiguous() for x_T in (policy_T, old_T, ref_T, kl_T, pi_T)], flags


def constants(rule: Surrogate, term: KlTerm | None, dtype: torch.dtype) -> dict[str, object]:
    """What the kernel is compiled for, as far as the objective says it."""
    import triton.language as tl

    return {
        "DTYPE": tl.float64 if dtype == torch.float64 else tl.float32,
        "DUAL": rule.kind == "ppo_dual_clip",
        "LOW": 1 - rule.clip_low,
        "HIGH": 1 + rule.clip_high,
        "CAP": None if rule.cap is None else float(rule.cap),
        "BOUND": None if rule.log_ratio_bound is None else float(rule.log_ratio_bound),
        "KL": None if term is None else term.estimator,
        "STRAIGHT": term is not None and term.straight_through,
        "WEIGHTED": term is not None and term.ratio_weighted,
        "CLAMP": None if term is None or term.clamp is None else float(term.clamp),
    }


def tile(others: int) -> int:
    """Tokens of a tile: few enough that the sums of so many objectives stay in registers."""
    return 256 if others <= 2 else 128


def _named(sums: Tensor, objective: Objective, others: int, has_logits: bool) -> list[Mapping[str, Tensor]]:
    """The kernel's sums, ``[width, N]``, by their names."""
    rule = objective.surrogate
    made = {
        "kl_N": objective.kl_loss is not None,
        "drift_N": rule.kind == "ppo_dual_clip",
        "clipped_N": rule.kind == "ppo_dual_clip",
        "capped_N": rule.kind == "ppo_dual_clip" and rule.cap is not None,
        "logits_sq_N": has_logits,
    }

    def of(names: Sequence[str], start: int) -> dict[str, Tensor]:
        return {name: sums[start + place] for place, name in enumerate(names) if made.get(name, True)}

    reference = of(_REFERENCE, 0)
    shared = {name: reference[name] for name in _OF_TOKENS if name in reference}
    starts = range(len(_REFERENCE), len(_REFERENCE) + len(_OTHER) * others, len(_OTHER))
    return [reference, *({**shared, **of(_OTHER, start)} for start in starts)]
