"""The side of `diff` that leaves out the rows or tokens that carry a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import torch
from torch import Tensor

from rolloutdoctor.commands.diff.rows import side_rows
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.some_rows import heaviest, scattered, without
from rolloutdoctor.evaluation.evaluate import Evaluation, evaluate
from rolloutdoctor.evaluation.token_sums import TokenSums
from rolloutdoctor.io.locations.small_files import read_small
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.rules.base import counted

CLIP_FRACTION = "clip_fraction"
"""Share of the trained tokens beyond the clip range on the side of their advantage."""


@dataclass(frozen=True)
class LeftOut:
    """What a step is computed without.

    Attributes:
        names: of rows, ``SAMPLE`` or ``STEP/GROUP/SAMPLE``.
        rows: further rows of each step, those with the largest squared log-prob gradient.
        tokens: tokens of each step, likewise.
        afresh: the advantages and denominators of what is left are computed without them; False: they are kept.
    """

    names: tuple[str, ...] = ()
    rows: int = 0
    tokens: int = 0
    afresh: bool = False

    @property
    def label(self) -> str:
        """What the side is called."""
        parts = [counted(len(self.names), "named row")] if self.names else []
        parts += (
            [f"the {counted(self.rows, 'heaviest row')} of each step".replace("the 1 ", "the ")] if self.rows else []
        )
        parts += [f"the {counted(self.tokens, 'heaviest token')} of each step"] if self.tokens else []
        return f"without {' and '.join(parts)}"

    def __bool__(self) -> bool:
        return bool(self.names or self.rows or self.tokens)

    def chosen(self, batch: RolloutBatch, evaluation: Evaluation) -> tuple[Tensor, Tensor]:
        """Return the rows and the further tokens of a step that are left out, ``[N]`` and ``[T]`` bool."""
        assert evaluation.tokens is not None
        assert evaluation.per_token is not None
        rows_N = heaviest(evaluation.tokens.grad_sq_N, self.rows)
        if self.names:
            names = set(self.names)
            named = [not names.isdisjoint(names_of(batch, row)) for row in range(len(batch))]
            rows_N |= torch.tensor(named, dtype=torch.bool, device=batch.device)
        return rows_N, heaviest(evaluation.per_token.grad_T.double().square(), self.tokens)


def names_of(batch: RolloutBatch, row: int) -> tuple[str, str]:
    """Return the two names of a row."""
    sample = batch.sample_name(row)
    group = "" if batch.groups is None else batch.group_name(int(batch.groups.index_N[row]))
    return sample, f"{batch.step}/{group}/{sample}"


def read_names(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return names of rows: a word, several of them separated by commas, or a file with one on each line.

    Raises:
        UsageError: if a file cannot be read.
    """
    names: set[str] = set()
    for word in words:
        if Path(word).is_file():
            text = read_small(
                word, name=f"--without {word}", expected="give a file with the name of a row on each line"
            )
            names |= {line.strip() for line in text.splitlines()}
        else:
            names |= {name.strip() for name in word.split(",")}
    return tuple(sorted(names - {""}))


def rows_without(
    side: str, before: Evaluation, left: LeftOut, logged: Mapping[str, float], *, by: str | None, named: bool
) -> tuple[pl.DataFrame, Evaluation | None, dict[str, tuple[float, float]], list[str]]:
    """Return the rows of a step as `side_rows` does, the evaluation afresh, metrics before and after, and names.

    The names are those of rows that are left out, or tokens of which are.

    Of rows that are left out the loss, the KL, the gradient and the weights are 0 afterwards; so they are of tokens.
    With `afresh` the step is evaluated as if the rows had never been sampled and the tokens were masked; without it
    every row that stays keeps its advantage and the weight of its tokens, so that the gradient loses what was left
    out and nothing else.

    Args:
        side: its label.
        before: as configured, with the values of its tokens.
        left: what is left out.
        logged: the step's metrics.
        by: see `side_rows`.
        named: see `side_rows`.
    """
    frame = side_rows(side, before, before, by=by, named=named)
    if before.tokens is None or before.per_token is None or before.rows is None:
        return frame, None, {}, []
    batch, terms, tokens = before.batch, before.per_token, before.tokens
    rows_N, tokens_T = left.chosen(batch, before)
    out_T = seg.expand(rows_N, batch.rows) | tokens_T
    after: Evaluation | None = None
    grad_T, kl_T, loss_T = (torch.where(out_T, 0.0, x_T.double()) for x_T in (terms.grad_T, terms.kl_T, terms.loss_T))
    if left.afresh:
        reduced = without(batch, rows_N, tokens_T)
        after = evaluate(reduced, before.objective, dtype=before.dtype, per_token=True, logged=logged)
        grad_T, values = _afresh(before, after, rows_N)
    else:
        values = _kept(tokens, rows_N, *(seg.total(x_T, batch.rows) for x_T in (out_T, kl_T, loss_T)))
    before_T = terms.grad_T.double()
    values |= {
        "grad_l1_after": seg.total(grad_T.abs(), batch.rows),
        "grad_sq_after": seg.total(grad_T.square(), batch.rows),
        "versus_l1": seg.total((grad_T - before_T).abs(), batch.rows),
        "versus_dot": seg.total(grad_T * before_T, batch.rows),
    }
    frame = frame.with_columns(pl.Series(name, x_N.cpu().numpy()) for name, x_N in values.items())
    shares = {CLIP_FRACTION: (_clipped(before), _clipped(after) if after is not None else _clipped(before, out_T))}
    touched_N = rows_N | (seg.total(tokens_T, batch.rows) > 0)
    return frame, after, shares, [names_of(batch, row)[1] for row in touched_N.nonzero().squeeze(1).tolist()]


def _afresh(before: Evaluation, after: Evaluation, left_out_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the gradient of each token, ``[T]``, and values of each row where a step is evaluated without some."""
    assert after.tokens is not None
    assert after.per_token is not None
    assert before.tokens is not None
    assert before.rows is not None
    kept_N, part = ~left_out_N, after.tokens
    kept_T = ~seg.expand(left_out_N, before.batch.rows)
    none_T = torch.zeros(len(kept_T), dtype=torch.float64, device=kept_T.device)
    grad_T, none_N = (
        scattered(after.per_token.grad_T.double(), kept_T, none_T),
        torch.zeros_like(before.tokens.weight_N),
    )
    values: dict[str, Tensor] = {}
    for name, x_K in {
        "policy_loss_after": part.policy_N * part.policy_weight_N,
        "kl_loss_after": part.kl_loss_N * part.weight_N,
        "kl_after": part.kl_N,
        "weight_after": part.weight_N,
        "policy_weight_after": part.policy_weight_N,
        "tokens_after": after.batch.trained.diff(),
    }.items():
        values[name] = scattered(x_K, kept_N, none_N)
    if after.rows is not None and after.rows.advantage_N is not None and before.rows.advantage_N is not None:
        values["advantage_after"] = scattered(after.rows.advantage_N, kept_N, before.rows.advantage_N)
        values["advantage_gap"] = (values["advantage_after"] - before.rows.advantage_N).abs()
        if after.rows.baseline_N is not None and before.rows.baseline_N is not None:
            values["baseline_after"] = scattered(after.rows.baseline_N, kept_N, before.rows.baseline_N)
    return grad_T, values


def _kept(tokens: TokenSums, left_out_N: Tensor, out_N: Tensor, kl_N: Tensor, loss_N: Tensor) -> dict[str, Tensor]:
    """Return the values of each row that keeps its advantage and its weight.

    Args:
        tokens: as configured.
        left_out_N: ``[N]`` bool, rows that are left out.
        out_N: how many tokens of each row are left out, ``[N]``.
        kl_N: sum of the KL over those that are left, ``[N]``.
        loss_N: that of the loss.
    """
    touched_N, kl_loss_N = out_N > 0, tokens.kl_loss_N * tokens.weight_N
    share_N = torch.where(tokens.kl_N != 0, kl_N / tokens.kl_N, 0.0)
    kl_after_N = torch.where(touched_N, kl_loss_N * share_N, kl_loss_N)
    policy_N = tokens.policy_N * tokens.policy_weight_N
    return {
        "kl_loss_after": kl_after_N,
        "policy_loss_after": torch.where(touched_N, loss_N - kl_after_N, policy_N),
        "kl_after": torch.where(touched_N, kl_N, tokens.kl_N),
        "weight_after": torch.where(left_out_N, 0.0, tokens.weight_N),
        "policy_weight_after": torch.where(left_out_N, 0.0, tokens.policy_weight_N),
    }


def _clipped(before: Evaluation, out_T: Tensor | None = None) -> float:
    """Share of the trained tokens, but for those left out, whose ratio is clipped."""
    terms, rule, mask_T = before.per_token, before.objective.surrogate, before.batch.column("response_mask")
    assert terms is not None
    if out_T is not None:
        mask_T = mask_T & ~out_T
    high_T = (terms.advantage_T > 0) & (terms.ratio_T > 1 + rule.clip_high)
    low_T = (terms.advantage_T < 0) & (terms.ratio_T < 1 - rule.clip_low)
    return float(((high_T | low_T) & mask_T).sum() / mask_T.sum().clamp(min=1))
