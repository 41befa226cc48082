"""`RolloutBatch`: one step of a run, packed twice (tokens into rows, rows into groups)."""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolloutdoctor.data.schema import BY_NAME, PROMPTS, STAND_INS
from rolloutdoctor.data.step_key import TRAIN, StepKey
from rolloutdoctor.data.token_columns import TokenColumns
from rolloutdoctor.data.turns import Turns
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.by_step import ByStep
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.results.errors import BatchError

_PART = 2**18
"""Tokens that are counted at a time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutBatch:
    """All rows of one step and split.

    Attributes:
        step: optimizer step as logged.
        split: ``train`` or ``eval``.
        rows: ``[N+1]`` int64 offsets into the token axis; empty rows are allowed.
        groups: the rows gathered into groups, or None if the file has no groups.
        per_row: canonical column name to ``[N]`` tensor (float64 for numbers, int64 for integers; NaN is null). Prompts
            and responses are there as 64-bit hashes, int64 (0 is null): they tell equal ones from others.
        per_token: canonical column name to ``[T]`` tensor (float for log-probs, bool for masks). Any mapping may be
            given; what is kept is `TokenColumns`, whose chunks are joined only for who asks for a whole column.
        rewards: name of a reward function to ``[N]`` float64.
        group_ids: ``[G]`` names of the groups.
        sample_ids: ``[N]`` names of the rows.
        statuses: ``[N]`` column `status`, None where null; empty if it was not read.
        incomplete: token column that some rows have and others lack to a row that lacks it; not in `per_token`.
        place_N: ``[N]`` int64, ascending from 0: which of several steps a row is of, where the batch holds several
            (`joined`); None: all rows are of one.
        numbers: of these steps, `step` being that of the first.
        errors: ``[N]`` column `error`, None where null; empty if it was not read.
        turns: who wrote which tokens, as the run says; None if it was not read.
    """

    step: int
    split: str = TRAIN
    rows: Tensor
    groups: Groups | None = None
    per_row: Mapping[str, Tensor] = field(default_factory=dict)
    per_token: Mapping[str, Tensor] = field(default_factory=dict)
    rewards: Mapping[str, Tensor] = field(default_factory=dict)
    group_ids: Sequence[str] = ()
    sample_ids: Sequence[str] = ()
    statuses: Sequence[str | None] = ()
    incomplete: Mapping[str, str] = field(default_factory=dict)
    place_N: Tensor | None = None
    numbers: Sequence[int] = ()
    errors: Sequence[str | None] = ()
    turns: Turns | None = None

    def __post_init__(self) -> None:
        rows = self.rows
        if rows.dtype != torch.int64 or rows.dim() != 1 or len(rows) == 0 or int(rows[0]) != 0:
            raise BatchError("row offsets must be int64, one-dimensional and start at 0")
        cuts = rows.cpu().numpy()
        if (cuts[1:] < cuts[:-1]).any():
            raise BatchError("row offsets must not fall", row=int((cuts[1:] < cuts[:-1]).argmax()))
        object.__setattr__(self, "per_token", TokenColumns.of(self.per_token))
        for name in self.token_columns:
            if name not in BY_NAME or not BY_NAME[name].per_token:
                raise BatchError(f"{name!r} is not a token column", column=name)
            shape = self.token_columns.shape(name)
            if shape != (self.tokens,):
                raise BatchError(f"{name} has shape {shape} where ({self.tokens},) was expected", column=name)
        for name, column in [*self.per_row.items(), *self.rewards.items()]:
            if column.shape != (len(self),):
                raise BatchError(f"{name} has {column.numel()} values where {len(self)} were expected", column=name)
        for name, ids, count in (
            ("sample_id", self.sample_ids, len(self)),
            ("status", self.statuses, len(self)),
            ("error", self.errors, len(self)),
            ("group_id", self.group_ids, len(self.groups) if self.groups else 0),
        ):
            if len(ids) not in (0, count):
                raise BatchError(f"{len(ids)} {name}s for {count}", column=name)
        if self.groups is not None and len(self.groups.index_N) != len(self):
            raise BatchError("every row needs a group", column="group_id")
        if self.turns is not None and len(self.turns.offsets) != len(self) + 1:
            raise BatchError(f"turns of {len(self.turns.offsets) - 1} rows for {len(self)}", column="turns")

    def __len__(self) -> int:
        # Of a tensor, len() is slow, and a step is asked for its rows often.
        return self.rows.shape[0] - 1

    @property
    def key(self) -> StepKey:
        """Step and split."""
        return StepKey(self.step, self.split)

    @property
    def step_numbers(self) -> Sequence[int]:
        """Numbers of the steps, S of them; one but for joined steps."""
        return self.numbers or (self.step,)

    @cached_property
    def by_step(self) -> ByStep:
        """Reduces values of rows, ``[N]``, to one of each step, ``[S]``; S is 1 but for joined steps."""
        if self.place_N is None:
            return ByStep.of_sizes([len(self)], self.device)
        return ByStep.of_sizes(torch.bincount(self.place_N, minlength=len(self.numbers)).numpy())

    @cached_property
    def number_N(self) -> Tensor:
        """Number of each row's step, ``[N]`` int64."""
        return self.by_step.expand(torch.tensor(self.step_numbers))

    @cached_property
    def row_N(self) -> Tensor:
        """Number of each row in its step, ``[N]`` int64."""
        first_N = self.by_step.expand(self.by_step.runs.offsets[:-1])
        return torch.arange(len(self), device=self.device) - first_N

    @cached_property
    def groups_by_step(self) -> ByStep:
        """Reduces values of groups, ``[G]``, to one of each step, ``[S]``."""
        assert self.groups is not None
        if self.place_N is None:
            return ByStep.of_sizes([len(self.groups)], self.device)
        first_G = self.groups.order_N[self.groups.offsets[:-1]]
        return ByStep.of_sizes(torch.bincount(self.place_N[first_G], minlength=len(self.numbers)).numpy())

    @cached_property
    def group_N(self) -> Tensor:
        """Number of each row's group in its step, ``[N]`` int64."""
        assert self.groups is not None
        return self.groups.index_N - self.by_step.expand(self.groups_by_step.runs.offsets[:-1])

    @cached_property
    def first_update_N(self) -> Tensor | None:
        """Rows whose log-probs are those of the policy before the step's first update, ``[N]`` bool; None: all rows.

        Where log-probs of the loss stand in for old ones, those of later updates are of a policy that has moved.
        """
        return None if "old_log_probs" in self.per_token else self.first_part_N

    @cached_property
    def first_part_N(self) -> Tensor | None:
        """Rows of each step's first update, ``[N]`` bool; None: no column says which ones these are."""
        part_N = self.per_row.get("optim_step_id")
        return None if part_N is None else part_N == self.by_step.expand(self.by_step.low(part_N))

    @cached_property
    def tokens(self) -> int:
        """Number of response tokens, masked ones included."""
        return int(self.rows[-1])

    @property
    def token_columns(self) -> TokenColumns:
        """`per_token`, as it is kept."""
        assert isinstance(self.per_token, TokenColumns)
        return self.per_token

    @cached_property
    def trained(self) -> Tensor:
        """``[N+1]`` int64 offsets of the rows into the trained tokens (`response_mask`), packed in their order."""
        lengths_N = torch.zeros(len(self) + 1, dtype=torch.int64, device=self.device)
        # Part by part where the mask is in several chunks: they would else be joined for this alone.
        in_one = len(self.token_columns.chunks("response_mask")) == 1
        for rows, tokens in self.blocks(max(1, self.tokens) if in_one else _PART):
            cuts = self.rows[rows.start : rows.stop + 1]
            is_trained_T = self.tokens_of("response_mask", tokens)
            lengths_N[rows.start + 1 : rows.stop + 1] = seg.trues(is_trained_T, cuts - cuts[0])
        return lengths_N.cumsum_(0)

    @cached_property
    def prompts(self) -> Tensor | None:
        """``[N]`` int64, the same for rows of one prompt, in any step; 0 where unknown, None without a column."""
        return next((self.per_row[name] for name in PROMPTS if name in self.per_row), None)

    @property
    def device(self) -> torch.device:
        """Return the device of the tensors."""
        return self.rows.device

    def has(self, *names: str) -> bool:
        """True if every named column (or its documented stand-in) is there."""
        return all(self._has(name) for name in names)

    def _has(self, name: str) -> bool:
        if name == "group_id":
            return self.groups is not None
        if name in ("status", "error"):
            return len(self.statuses if name == "status" else self.errors) > 0
        if name == "turns":
            return self.turns is not None
        return bool(self.rewards) if name == "rewards" else self.stored_name(name) is not None

    def column(self, name: str) -> Tensor:
        """Return a row or token column.

        `old_log_probs` and `policy_log_probs` stand in for each other, as the contract says.

        Raises:
            KeyError: if the batch has no such column.
        """
        stored = self._stored_or_raise(name)
        return self.per_token[stored] if stored in self.per_token else self.per_row[stored]

    def stored_name(self, name: str) -> str | None:
        """The row or token column that gives a column: itself or its stand-in; None if there is neither."""
        for each in STAND_INS.get(name, (name,)):
            if each in self.per_token or each in self.per_row:
                return each
        return None

    def _stored_or_raise(self, name: str) -> str:
        stored = self.stored_name(name)
        if stored is None:
            raise KeyError(name)
        return stored

    def tokens_of(self, name: str, places: slice) -> Tensor:
        """Return some adjacent values of a token column, without joining its chunks.

        Raises:
            KeyError: if the batch has no such column.
        """
        return self.token_columns.part(self._stored_or_raise(name), places)

    def tokens_at(self, name: str, places: NDArray[np.int64]) -> NDArray[Any]:
        """Return the values of a token column at some places, in rising order, on the CPU, without joining its chunks.

        Raises:
            KeyError: if the batch has no such column.
        """
        return self.token_columns.at(self._stored_or_raise(name), places)

    def lacks(self, names: Collection[str]) -> list[str]:
        """Those of some columns that are in part of the rows only."""
        return sorted(self.incomplete.keys() & names) if self.incomplete else []

    def group_name(self, group: int) -> str:
        """Name of a group, for messages and examples."""
        return self.group_ids[group] if len(self.group_ids) else str(group)

    def sample_name(self, row: int) -> str:
        """Name of a row, for messages and examples."""
        return self.sample_ids[row] if len(self.sample_ids) else str(row)

    def to(self, device: torch.device | str) -> "RolloutBatch":
        """Return the batch on `device`; the same object if it is there already."""
        if torch.device(device).type == self.device.type:
            return self
        groups = self.groups
        if groups is not None:
            groups = Groups(groups.index_N.to(device), groups.order_N.to(device), groups.offsets.to(device))

        def moved(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: column.to(device) for name, column in columns.items()}

        return replace(
            self,
            rows=self.rows.to(device),
            groups=groups,
            per_row=moved(self.per_row),
            per_token=self.token_columns.to(device),
            rewards=moved(self.rewards),
        )

    def blocks(self, tokens: int) -> Iterator[tuple[slice, slice]]:
        """Cut the batch into runs of whole rows of about `tokens` tokens: pairs of row and token slices.

        A run ends with a chunk of the token columns where one is near, so that its columns need not be joined.
        """
        start = 0
        cuts, ends = self.rows.cpu().numpy(), self.token_columns.chunk_ends
        while start < len(self):
            begin = int(cuts[start])
            stop = min(int(cuts.searchsorted(begin + tokens)), len(self))
            near = bisect_right(ends, begin + tokens * 5 // 4) - 1
            if near >= 0 and ends[near] >= begin + max(1, tokens // 4):
                last = int(cuts.searchsorted(ends[near]))
                # The chunks of a caller may end inside a row.
                stop = last if cuts[last] == ends[near] else stop
            # Empty rows go with the tokens before them: at the end of a step they would have a run of their own.
            stop = int(cuts.searchsorted(cuts[stop], side="right")) - 1
            yield slice(start, stop), slice(begin, int(cuts[stop]))
            start = stop
