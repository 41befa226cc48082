"""Measures of tokens for rules, block by block: no rule needs a whole column, and terms of a block are made once."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from math import nan
from typing import TypeVar, cast

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.evaluation.blocks import cut
from rolloutdoctor.evaluation.on_demand import OnDemand
from rolloutdoctor.ops import elementwise as el
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.chosen import Chosen
from rolloutdoctor.ops.prefix_hash import PrefixHashes, scramble

T = TypeVar("T")

TokenMeasure = Callable[["TokenBlock"], Mapping[str, Tensor]]
"""Maps a block to named values of its rows, ``[n, ...]`` each, or to values of some of its tokens, ``[t]``, with their
number in each row.

The names are the same for every block of a step, and for steps with the same columns. Who takes steps one by one, as
pictures do, may have counts of the block as well, ``[1, ...]``.
"""


class TokenBlock:
    """All response tokens of some adjacent rows of a step, masked ones included, as they were logged.

    Rows of joined steps may be in one block: what depends on the step is by row (`RolloutBatch.number_N`, `by_step`).

    Attributes:
        batch: the step, or several that were joined.
        rows: the rows in the batch: ``x_N[rows]`` is the block's share of a value per row, ``[n]``.
        tokens: the tokens in the batch: ``x_T[tokens]`` is the block's share of a value per token, ``[t]``.
        runs: the tokens by row.
    """

    def __init__(self, batch: RolloutBatch, rows: slice, tokens: slice) -> None:
        self.batch = self._batch = batch
        self.rows, self.tokens = rows, tokens
        cuts = batch.rows[rows.start : rows.stop + 1]
        self.runs = seg.Runs(cuts - cuts[0])
        self._cached: dict[Hashable, object] = {}

    def __len__(self) -> int:
        return int(self.tokens.stop) - int(self.tokens.start)

    def has(self, *names: str) -> bool:
        """Return True if every named token column, or its documented stand-in, is there."""
        return all(self._batch.stored_name(name) in self._batch.per_token for name in names)

    def is_logged(self, name: str) -> bool:
        """Return True if a token column is there itself, and not a stand-in for it."""
        return name in self._batch.per_token

    def of_step(self, name: str) -> Tensor | None:
        """Return a row column of the whole batch, ``[N]``, of which `rows` is the block's share; None if absent."""
        return self._batch.per_row.get(name)

    @property
    def tokens_of_step(self) -> int:
        """All response tokens of the step; of several steps, those of the longest."""
        offsets = self._batch.by_step.runs.offsets
        return int(self._batch.rows[offsets].diff().max())

    def column(self, name: str) -> Tensor:
        """Return a token column as it was logged, ``[t]``; a view where the block lies in one chunk of the file.

        Raises:
            KeyError: if the batch has no such column.
        """
        return self.cached(("column", name), lambda: self._batch.tokens_of(name, self.tokens))

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returns, made once per block for all rules that use the same key."""
        if key not in self._cached:
            self._cached[key] = make()
        return cast(T, self._cached[key])

    def forget(self) -> None:
        """Let go of what was made: some of it holds the block, and the two would keep the step in memory."""
        self._cached.clear()

    def row_column(self, name: str) -> Tensor:
        """Return a column of the rows, ``[n]``.

        Raises:
            KeyError: if the batch has no such column.
        """
        return self._batch.per_row[name][self.rows]

    @cached_property
    def prefixes(self) -> PrefixHashes:
        """Hashes of the prefixes of `response_ids`, each after its prompt.

        Equal for equal contexts in the run; where no column has the prompts, or a row's is not known, only for rows of
        one group and step.
        """
        return PrefixHashes.of(self.column("response_ids"), self.runs, self._prompts())

    def _prompts(self) -> Tensor:
        batch, rows = self._batch, self.rows
        within_n = (batch.row_N if batch.groups is None else batch.group_N)[rows]
        # Far from the hashes of prompts, and from those of other steps and splits.
        key_n = batch.number_N[rows] * 2 + (batch.split != TRAIN)
        own_n = scramble(within_n + scramble(key_n))
        if batch.prompts is None:
            return own_n
        prompt_n = batch.prompts[rows]
        return torch.where(prompt_n == 0, own_n, prompt_n)

    @cached_property
    def trained_T(self) -> Tensor:
        """Tokens of `response_mask`, ``[t]`` bool; all tokens where there is no mask."""
        if self.has("response_mask"):
            return self.column("response_mask")
        return torch.ones(len(self), dtype=torch.bool, device=self._batch.device)

    @cached_property
    def is_all_trained(self) -> bool:
        """True if no token of the block is masked."""
        return not self.has("response_mask") or el.is_all(self.trained_T)

    @cached_property
    def trained_n(self) -> Tensor:
        """Trained tokens of each row, ``[n]`` float64."""
        if not self.has("response_mask"):
            return self.runs.lengths.double()
        return self._batch.trained[self.rows.start : self.rows.stop + 1].diff().double()

    def of_trained(self, x_T: Tensor) -> Tensor:
        """Return values of the trained tokens, 0 at the others, ``[t]``; `x_T` itself where all are trained."""
        return x_T if self.is_all_trained else self._masked.fill_(x_T.clone(), 0.0)

    @cached_property
    def _masked(self) -> Chosen:
        return Chosen(~self.trained_T)

    def extremes(self, name: str) -> tuple[float, float]:
        """Return the smallest and the largest value of a token column; NaN for both if there is one, or no token."""
        return self.cached(("extremes", name), lambda: el.extremes(self.column(name)) if len(self) else (nan, nan))

    @cached_property
    def position_T(self) -> Tensor:
        """Index of each token in its row, ``[t]`` int64."""
        places_T = torch.arange(len(self), device=self._batch.device)
        return places_T - self.runs.expand(self.runs.offsets[:-1])

    def log_ratio(self, numerator: str, denominator: str) -> Tensor:
        """Return the difference of two log-prob columns, ``[t]`` float64."""
        key = ("log_ratio", numerator, denominator)
        return self.cached(key, lambda: self.column(numerator).double() - self.column(denominator).double())

    def ratio(self, numerator: str, denominator: str) -> Tensor:
        """Return the importance ratio of two log-prob columns, ``[t]`` float64."""
        return self.cached(("ratio", numerator, denominator), lambda: torch.exp(self.log_ratio(numerator, denominator)))

    def prob(self, name: str) -> Tensor:
        """Return the probabilities of a log-prob column, ``[t]`` float64."""
        return self.cached(("prob", name), lambda: torch.exp(self.column(name).double()))

    def row_sum(self, x_T: Tensor) -> Tensor:
        """Sum over the tokens of each row, ``[t] -> [n]`` float64."""
        return self.runs.total(x_T)


class TokenMeasures:
    """Gathers token measures of one step while its blocks go by."""

    def __init__(self, measures: Mapping[str, TokenMeasure]) -> None:
        """Prepare to measure one step.

        Args:
            measures: name of whoever measures to its measure.
        """
        self._measures = dict(measures)
        self._reset()

    def __bool__(self) -> bool:
        return bool(self._measures)

    def _reset(self) -> None:
        self._rows = 0
        self._found: dict[str, list[Mapping[str, Tensor]]] = {name: [] for name in self._measures}

    def visit(self, block: TokenBlock) -> None:
        """Measure a block; blocks come in the order of their rows."""
        for name, measure in self._measures.items():
            self._found[name].append(measure(block))
        self._rows = block.rows.stop
        block.forget()

    def finish(self, batch: RolloutBatch, block_tokens: int | None = None) -> dict[str, dict[str, Tensor]]:
        """Return each measure's values, joined over the blocks, ``[N, ...]``.

        A step that no evaluation went through, or not to its end, is gone through here, in blocks of `block_tokens`.
        """
        if self._measures and (self._rows < len(batch) or not len(batch)):
            self._reset()
            for rows, tokens in cut(batch, block_tokens) if len(batch) else [(slice(0, 0), slice(0, 0))]:
                self.visit(TokenBlock(batch, rows, tokens))
        cache: dict[tuple[int, ...], Tensor] = {}
        return {name: _joined(blocks, cache) for name, blocks in self._found.items()}


def measured_on_demand(
    measures: Mapping[str, TokenMeasure], batch: RolloutBatch, *, at_once: bool
) -> Mapping[str, Mapping[str, Tensor]]:
    """Return token measures that are made when they are asked for.

    Args:
        measures: name of whoever measures to its measure.
        batch: the step, or several that were joined.
        at_once: all are made when the first is asked for, in one pass; else each by itself.
    """
    measured: dict[str, Mapping[str, Tensor]] = {}

    def made(name: str) -> Mapping[str, Tensor]:
        if name not in measured:
            measured.update(TokenMeasures(measures if at_once else {name: measures[name]}).finish(batch))
        return measured[name]

    return OnDemand(measures, made)


def _joined(blocks: Sequence[Mapping[str, Tensor]], cache: dict[tuple[int, ...], Tensor]) -> dict[str, Tensor]:
    """Join the values of the blocks; those that several measures return are joined once."""
    if len(blocks) == 1:
        return dict(blocks[0])
    columns = {}
    for name in blocks[0] if blocks else {}:
        parts = [block[name] for block in blocks]
        key = tuple(map(id, parts))
        if key not in cache:
            cache[key] = torch.cat(parts)
        columns[name] = cache[key]
    return columns
