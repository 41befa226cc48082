"""Aggregation of token terms to one loss: the weight that each mode gives to a token of a row.

The loss of an optimizer step is ``sum_it weight_i * mask_it * term_it``. Every mode of the trainers has
this form, so a mode is a function that gives one weight per row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rolloutdoctor.objective.objective import Aggregation
from rolloutdoctor.ops import segments as seg


@dataclass(frozen=True, eq=False)
class Layout:
    """Layout of a step in optimizer steps and micro-batches, by row.

    Attributes:
        micro_N: ``[N]`` int64, the row's micro-batch, numbered over ranks and optimizer steps.
        micro_rows_N: ``[N]`` float64, rows in the row's micro-batch.
        forward_N: ``[N]`` int64, the row's micro-batch with those that other ranks ran at the same time.
        forward_rows_N: ``[N]`` float64, rows in these.
        micros_N: ``[N]`` float64, micro-batches in the row's optimizer step, over all ranks.
        optim_N: ``[N]`` int64, the row's optimizer step.
        optim_rows_N: ``[N]`` float64, rows in the row's optimizer step.
        generation_N: ``[N]`` int64, the batch over which rewards were normalised and tokens counted.
        steps_N: ``[N]`` float64, optimizer steps in the row's logged step.
        generations_N: ``[N]`` float64, generation batches in the row's optimizer step.
        share_N: ``[N]`` float64, weight of the row's optimizer step in the loss of the step.
        rank_N: ``[N]`` int64, the row's rank, numbered over optimizer steps.
        ranks_N: ``[N]`` float64, data-parallel ranks in the row's optimizer step.
        trajectory_N: ``[N]`` int64, the trajectory that the row is a part of: its own, unless several rows share one.
        trajectories_N: ``[N]`` float64, trajectories in the row's optimizer step.
        group_N: ``[N]`` int64, the row's group; without groups that of the row alone.
    """

    micro_N: Tensor
    micro_rows_N: Tensor
    forward_N: Tensor
    forward_rows_N: Tensor
    micros_N: Tensor
    optim_N: Tensor
    optim_rows_N: Tensor
    generation_N: Tensor
    steps_N: Tensor
    generations_N: Tensor
    share_N: Tensor
    rank_N: Tensor
    ranks_N: Tensor
    trajectory_N: Tensor
    trajectories_N: Tensor
    group_N: Tensor

    @classmethod
    def of(
        cls,
        rows: Tensor,
        optim_N: Tensor | None = None,
        micro_N: Tensor | None = None,
        rank_N: Tensor | None = None,
        trajectory_N: Tensor | None = None,
        generation_N: Tensor | None = None,
        *,
        separate: bool = False,
        prompts: int | None = None,
        place_N: Tensor | None = None,
        group_N: Tensor | None = None,
    ) -> "Layout":
        """Number the parts from the columns that are there; none of them: one micro-batch, one optimizer step.

        Args:
            rows: ``[N+1]`` row offsets, for the number of rows and the device.
            optim_N: column `optim_step_id`.
            micro_N: column `micro_batch_id`.
            rank_N: column `rank`.
            trajectory_N: column `trajectory_id`; below 0 the row is a trajectory of its own.
            generation_N: column `generation_id`; None: the rows of a step were generated together.
            separate: every micro-batch is a loss of its own, and they are averaged (evaluation).
            prompts: how many prompts were evaluated; with None, and on several ranks, the average is by rows.
            place_N: ``[N]`` int64, which of several steps the row is of; None: all are of one.
            group_N: ``[N]`` int64, the row's group.
        """
        zero_N = torch.zeros(len(rows) - 1, dtype=torch.int64, device=rows.device)
        one_N = zero_N.double() + 1
        step_N = zero_N if place_N is None else place_N
        optim_N, rank_N, micro_N = (zero_N if part is None else part for part in (optim_N, rank_N, micro_N))
        optim_value_N = _numbered(step_N, optim_N)
        micro_index_N, rank_index_N = _numbered(optim_value_N, rank_N, micro_N), _numbered(optim_value_N, rank_N)
        forward_index_N = _numbered(optim_value_N, micro_N)
        optim_index_N = micro_index_N if separate else _numbered(optim_value_N)
        steps_N = one_N if separate else _distinct(optim_index_N, step_N)
        # Ranks pad an evaluation with rows that it had before, and the rows do not show how many.
        one_rank = len(rank_N) > 0 and not bool((rank_N != rank_N[:1]).any())
        trajectory_index_N, trajectories_N = _trajectories(trajectory_N, optim_index_N)
        generations = (micro_index_N, one_N) if separate else _generations(generation_N, step_N, optim_index_N)
        return cls(
            micro_N=micro_index_N,
            micro_rows_N=_summed(micro_index_N, one_N),
            forward_N=forward_index_N,
            forward_rows_N=_summed(forward_index_N, one_N),
            micros_N=_distinct(micro_index_N, optim_index_N),
            optim_N=optim_index_N,
            optim_rows_N=_summed(optim_index_N, one_N),
            generation_N=generations[0],
            steps_N=steps_N,
            generations_N=generations[1],
            share_N=_evaluation_shares(micro_index_N, prompts if one_rank else None) if separate else 1 / steps_N,
            rank_N=rank_index_N,
            ranks_N=one_N if separate else _distinct(rank_index_N, optim_index_N),
            trajectory_N=trajectory_index_N,
            trajectories_N=trajectories_N,
            group_N=torch.arange(len(zero_N), device=rows.device) if group_N is None else group_N,
        )

    def of_steps(self, rows: Sequence[slice]) -> list["Layout"]:
        """Return the layout of each of several steps, which have these rows, one at least."""
        offsets = torch.tensor([rows[0].start, *(span.stop for span in rows)])
        values = []
        for field in fields(self):
            x_N: Tensor = getattr(self, field.name)
            if x_N.dtype == torch.int64:
                # The parts of a step are numbered after those of the steps before it.
                x_N = x_N - seg.expand(seg.low(x_N.double(), offsets).long(), offsets)
            values.append(x_N)
        return [Layout(*(x_N[span] for x_N in values)) for span in rows]

    def micro_total(self, x_N: Tensor) -> Tensor:
        """Sum of `x_N` over the row's micro-batch, ``[N]`` float64."""
        return _summed(self.micro_N, x_N)

    def forward_total(self, x_N: Tensor) -> Tensor:
        """Sum of `x_N` over the row's micro-batch on all ranks, ``[N]`` float64."""
        return _summed(self.forward_N, x_N)

    def rank_total(self, x_N: Tensor) -> Tensor:
        """Sum of `x_N` over the row's rank, ``[N]`` float64."""
        return _summed(self.rank_N, x_N)

    def optim_total(self, x_N: Tensor) -> Tensor:
        """Sum of `x_N` over the row's optimizer step, ``[N]`` float64."""
        return _summed(self.optim_N, x_N)

    def trajectory_total(self, x_N: Tensor) -> Tensor:
        """Sum of `x_N` over the row's trajectory, ``[N]`` float64."""
        return _summed(self.trajectory_N, x_N)

    def generation_total(self, x_N: Tensor) -> Tensor:
        """Sum of `x_N` over the row's generation batch, ``[N]`` float64."""
        return _summed(self.generation_N, x_N)


def _summed(index_N: Tensor, x_N: Tensor) -> Tensor:
    """Sum of `x_N` over rows of equal index, expanded to rows."""
    return seg.pick(seg.total_by(index_N, x_N), index_N)


def _numbered(*parts_N: Tensor) -> Tensor:
    """Number the distinct combinations of some columns in their order, ``[N]`` int64."""
    index_N = torch.zeros(len(parts_N[0]), dtype=torch.int64, device=parts_N[0].device)
    for part_N in parts_N:
        # Most steps are one micro-batch on one rank.
        if bool((part_N != part_N[:1]).any()):
            other_N = torch.unique(part_N, return_inverse=True)[1]
            index_N = torch.unique(index_N * (other_N.max() + 1) + other_N, return_inverse=True)[1]
    return index_N


def _distinct(part_N: Tensor, whole_N: Tensor) -> Tensor:
    """Count the parts of the row's whole, ``[N]`` float64; every part lies in one whole."""
    whole_P = torch.zeros(int(part_N.max()) + 1 if len(part_N) else 0, dtype=torch.int64, device=part_N.device)
    whole_P[part_N] = whole_N
    return torch.bincount(whole_P)[whole_N].double()


def _evaluation_shares(batch_N: Tensor, prompts: int | None) -> Tensor:
    """Weight of the loss of each row's batch in the mean over an evaluation, ``[N]`` float64.

    A full batch counts for its rows, and so does the last one however few it has, unless the number of prompts (not
    of their responses) divided by the rows of a full batch leaves a remainder: then it counts for that.

    Source: transformers ``Trainer.evaluation_loop``, accelerate ``gather_for_metrics``.
    """
    rows_M = torch.bincount(batch_N).double()
    if prompts is not None and len(rows_M):
        full = int(rows_M.max())
        rows_M = torch.full_like(rows_M, full)
        rows_M[-1] = prompts % full or full
    return (rows_M / rows_M.sum())[batch_N]


def _generations(generation_N: Tensor | None, step_N: Tensor, optim_index_N: Tensor) -> tuple[Tensor, Tensor]:
    """Number the generations of steps, and count those of each row's optimizer step, ``[N]`` float64."""
    if generation_N is None:
        return step_N, torch.ones(len(step_N), dtype=torch.float64, device=step_N.device)
    index_N = _numbered(step_N, generation_N)
    return index_N, _distinct(_numbered(optim_index_N, index_N), optim_index_N)


def _trajectories(trajectory_N: Tensor | None, optim_N: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the row's trajectory ``[N]`` int64, and how many its optimizer step has ``[N]`` float64."""
    row_N = torch.arange(len(optim_N), device=optim_N.device)
    if trajectory_N is None:
        return row_N, _summed(optim_N, torch.ones_like(row_N))
    alone_N = trajectory_N < 0
    index_N = _numbered(optim_N, alone_N.long(), torch.where(alone_N, row_N, trajectory_N))
    return index_N, _distinct(index_N, optim_N)


def _row_means(length_N: Tensor, layout: Layout, _: Aggregation) -> Tensor:
    """TRL ``grpo``: token means of rows, mean over the rows of each micro-batch, then over these."""
    return 1 / (length_N.clamp(min=1) * layout.micro_rows_N * layout.micros_N)


def _micro_token_means(length_N: Tensor, layout: Layout, _: Aggregation) -> Tensor:
    """TRL ``bnpo``: mean over the tokens of each micro-batch, then over micro-batches."""
    return 1 / (layout.micro_total(length_N).clamp(min=1) * layout.micros_N)


def _fixed_length(length_N: Tensor, layout: Layout, rule: Aggregation) -> Tensor:
    """TRL ``dr_grpo``: sums divided by rows times a fixed length."""
    return 1 / (layout.micro_rows_N * _length(rule) * layout.micros_N)


def _padded_mean(length_N: Tensor, layout: Layout, _: Aggregation) -> Tensor:
    """No trainer's: a plain mean over the positions of each micro-batch, padded to the longest row of the batch."""
    return 1 / (layout.micro_rows_N * _longest(layout.generation_N, length_N).clamp(min=1) * layout.micros_N)


def _longest(index_N: Tensor, x_N: Tensor) -> Tensor:
    """Largest `x_N` among rows of equal index, expanded to rows."""
    high_P = torch.zeros(int(index_N.max()) + 1 if len(index_N) else 0, dtype=x_N.dtype, device=x_N.device)
    return high_P.scatter_reduce(0, index_N, x_N, "amax")[index_N]


def _row_sums(length_N: Tensor, layout: Layout, _: Aggregation) -> Tensor:
    """TRL ``luspo`` and its RLOOTrainer: row sums, mean over the rows of each micro-batch, then over micro-batches."""
    return 1 / (layout.micro_rows_N * layout.micros_N)


def _generation_token_mean(length_N: Tensor, layout: Layout, rule: Aggregation) -> Tensor:
    """TRL ``dapo``: tokens of the generation batch, rescaled to one optimizer step."""
    return _unscaled_token_mean(length_N, layout, rule) * layout.steps_N / layout.generations_N


def _unscaled_token_mean(length_N: Tensor, layout: Layout, _: Aggregation) -> Tensor:
    """The same before 1.9.1: divided by the tokens of the generation batch, whatever its optimizer steps."""
    return 1 / layout.generation_total(length_N).clamp(min=1)


def _token_mean_over_micro_batches(length_N: Tensor, layout: Layout, rule: Aggregation) -> Tensor:
    """ms-swift ``dapo``, ``cispo``: the same, divided by the micro-batches of an optimizer step on top of it.

    Each micro-batch divides by all tokens of the generation, and the engine takes the mean over micro-batches.
    """
    return _unscaled_token_mean(length_N, layout, rule) * layout.ranks_N / layout.micros_N


def _unscaled_of_rows(length_N: Tensor, layout: Layout, rule: Aggregation) -> Tensor:
    """Unsloth before 2026.1.4: that of each row by itself, and the mean of these over the rows of a micro-batch."""
    return _unscaled_token_mean(length_N, layout, rule) / layout.micro_rows_N


def _token_mean(length_N: Tensor, layout: Layout, _: Aggregation) -> Tensor:
    """verl ``token-mean``: mean over the tokens of the mini-batch; a mini-batch without tokens has no weight."""
    tokens_N = layout.optim_total(length_N)
    return torch.where(tokens_N > 0, 1 / tokens_N, 0.0)


def _micro_token_means_by_rows(length_N: Tensor, layout: Layout, _: Aggregation) -> Tensor:
    """verl ``token-mean`` before 0.8: the token mean of each micro-batch, weighted by the rows of the micro-batch."""
    return layout.micro_rows_N / (layout.optim_rows_N * layout.micro_total(length_N).clamp(min=1))


def _micro_row_means_by_rows(length_N: Tensor, layout: Layout, rule: Aggregation) -> Tensor:
    """verl ``seq-mean-token-mean`` before 0.8: the same of the mean over the micro-batch's rows with a token."""
    return _micro_row_sums_by_rows(length_N, layout, rule) / (length_N + 1e-8)


def _micro_row_sums_by_rows(length_N: Tensor, layout: Layout, _: Aggregation) -> Tensor:
    """verl ``seq-mean-token-sum`` from 0.6.1 to 0.7.1: the same of row sums."""
    filled_N = layout.micro_total((length_N > 0).double())
    return layout.micro_rows_N / (layout.optim_rows_N * filled_N.clamp(min=1))


def _rank_token_mean(length_N: Tensor, layout: Layout, _: Aggregation) -> Tensor:
    """prime-rl before 0.6: mean over the tokens of each rank, then over ranks, so that tokens weigh differently."""
    return 1 / (layout.rank_total(length_N).clamp(min=1) * layout.ranks_N)


def _micro_row_means_added(length_N: Tensor, layout: Layout, _: Aggregation) -> Tensor:
    """prime-rl's ratio of a sequence, before 0.5: token means of rows over the micro-batches, not over the rows."""
    return 1 / (length_N.clamp(min=1) * layout.micros_N)


def _token_sum(length_N: Tensor, layout: Layout, _: Aggregation) -> Tensor:
    """verl ``token-sum``."""
    return torch.ones_like(length_N)


def _token_sum_norm(length_N: Tensor, layout: Layout, rule: Aggregation) -> Tensor:
    """open-instruct with a number as ``loss_denominator``: the sum over all tokens, divided by it."""
    return torch.ones_like(length_N) / _length(rule)


def _row_sum_mean(length_N: Tensor, layout: Layout, _: Aggregation) -> Tensor:
    """verl ``seq-mean-token-sum``: row sums over the rows of the mini-batch, rows without tokens counted."""
    return 1 / layout.optim_rows_N


def _row_sum_mean_norm(length_N: Tensor, layout: Layout, rule: Aggregation) -> Tensor:
    """verl ``seq-mean-token-sum-norm``: the same divided by a fixed length."""
    return 1 / (layout.optim_rows_N * _length(rule))


def _whole_row_means(length_N: Tensor, layout: Layout, _: Aggregation) -> Tensor:
    """SkyRL ``sequence_mean`` and its KL: row means over the rows of the mini-batch, rows without tokens counted."""
    return 1 / (length_N.clamp(min=1) * layout.optim_rows_N)


def _prompt_means(length_N: Tensor, layout: Layout, _: Aggregation) -> Tensor:
    """SkyRL ``prompt_mean``: token means of the responses to a prompt, mean over the prompts of the optimizer step."""
    prompt_N = _numbered(layout.optim_N, layout.group_N)
    return 1 / (_summed(prompt_N, length_N).clamp(min=1) * _distinct(prompt_N, layout.optim_N))


def _row_mean_mean(length_N: Tensor, layout: Layout, _: Aggregation) -> Tensor:
    """verl ``seq-mean-token-mean``: row means over the rows of the mini-batch, rows without tokens counted."""
    return 1 / ((length_N + 1e-8) * layout.optim_rows_N)


def _filled_row_means(length_N: Tensor, layout: Layout, _: Aggregation) -> Tensor:
    """OpenRLHF's gspo: the same over the rows of the optimizer step that have tokens."""
    filled_N = layout.optim_total((length_N > 0).double()).clamp(min=1)
    return 1 / ((length_N + 1e-8) * filled_N)


def _micro_row_mean(length_N: Tensor, layout: Layout, _: Aggregation) -> Tensor:
    """verl ``geo_mean``: the mean over all rows of each micro-batch; micro-batches are added, ranks averaged.

    So the gradient grows with the number of micro-batches, which is what upstream does: it knows no sizes of the
    mini-batch there, and the engine adds up what micro-batches give.
    """
    return 1 / (layout.micro_rows_N * layout.ranks_N)


def _sample_mean(length_N: Tensor, layout: Layout, _: Aggregation) -> Tensor:
    """slime's default: token means of trajectories over those of the step, ones without tokens counted."""
    return 1 / (layout.trajectory_total(length_N).clamp(min=1) * layout.trajectories_N)


def _phantom_token_mean(length_N: Tensor, layout: Layout, _: Aggregation) -> Tensor:
    """slime's ``calculate_per_token_loss``: every row without tokens adds one token to the count."""
    return 1 / layout.optim_total(length_N.clamp(min=1))


def _length(rule: Aggregation) -> float:
    """Return the fixed length of a mode that divides by one."""
    if rule.length is None:
        raise ValueError(f"{rule.mode} needs a fixed length")
    return rule.length


AGGREGATIONS: dict[str, Callable[[Tensor, Layout, Aggregation], Tensor]] = {
    "filled-row-mean-token-mean": _filled_row_means,
    "generation-token-mean": _generation_token_mean,
    "generation-token-mean-over-micro-batches": _token_mean_over_micro_batches,
    "generation-token-mean-unscaled": _unscaled_token_mean,
    "generation-token-mean-of-rows": _unscaled_of_rows,
    "micro-batch-fixed-length": _fixed_length,
    "micro-batch-padded-mean": _padded_mean,
    "micro-batch-row-mean": _row_means,
    "micro-batch-row-mean-added": _micro_row_mean,
    "micro-batch-row-sum": _row_sums,
    "micro-batches-row-mean": _micro_row_means_added,
    "micro-batch-seq-mean-token-mean-by-rows": _micro_row_means_by_rows,
    "micro-batch-seq-mean-token-sum-by-rows": _micro_row_sums_by_rows,
    "micro-batch-token-mean": _micro_token_means,
    "micro-batch-token-mean-by-rows": _micro_token_means_by_rows,
    "rank-token-mean": _rank_token_mean,
    "prompt-mean-token-mean": _prompt_means,
    "row-mean-token-mean": _whole_row_means,
    "seq-mean-token-mean": _row_mean_mean,
    "seq-mean-token-sum": _row_sum_mean,
    "seq-mean-token-sum-norm": _row_sum_mean_norm,
    "token-mean": _token_mean,
    "token-mean-empty-as-one": _phantom_token_mean,
    "token-sum": _token_sum,
    "token-sum-norm": _token_sum_norm,
    "trajectory-mean-token-mean": _sample_mean,
}
"""Mode to the weight of a token of every row, ``[N]`` float64, within the row's optimizer step."""


def row_weights(length_N: Tensor, layout: Layout, rule: Aggregation) -> Tensor:
    """Weight of a token of every row in the loss of the step, ``[N]`` float64.

    The loss of a step is the mean of the losses of its optimizer steps, `layout.share_N` being their weights.

    Args:
        length_N: ``[N]`` float64, tokens of each row that are counted in denominators.
        layout: how the step was cut up.
        rule: the mode.
    """
    return AGGREGATIONS[rule.mode](length_N, layout, rule) * layout.share_N
