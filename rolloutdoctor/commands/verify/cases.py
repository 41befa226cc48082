"""Cases: small batches on which the formulas of known trainers differ, packed and as a trainer's padded tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.some_rows import without
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.testing import toy_batch

AUX_LOSS = 0.8125
"""The load-balancing loss of a router, which no row has: one number for every case."""


@dataclass(frozen=True)
class Case:
    """A batch of responses, and the padded tensors that a trainer makes of it: N responses, right-padded to L tokens.

    Attributes:
        name: what it is about.
        batch: the batch.
        dtype: of the padded log-probs and rewards.
        advantages: ``[N, L]`` what the options compute, for a loss; None for a function that computes them.
        row_advantages: ``[N]`` the same of each response, fully masked ones too; None where they differ by token.
        leaves: inputs as leaves of autograd, by name: columns ``[N, L]`` and `aux_loss`.
        items: trained tokens of the whole batch, where the case is a micro-batch of it.
    """

    name: str
    batch: RolloutBatch
    dtype: torch.dtype = torch.float32
    advantages: Tensor | None = None
    row_advantages: Tensor | None = None
    leaves: Mapping[str, Tensor] = field(default_factory=dict)
    items: int | None = None

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each response."""
        return [int(length) for length in self.batch.rows.diff()]

    def pad(self, x_T: Tensor) -> Tensor:
        """Return values of tokens as a matrix, ``[N, L]``; 0 in the padding."""
        padded = torch.zeros(len(self.lengths), max([1, *self.lengths]), dtype=x_T.dtype)
        for row, values in enumerate(torch.split(x_T, self.lengths)):
            padded[row, : len(values)] = values
        return padded

    def pack(self, x: Tensor) -> Tensor:
        """Return the values of a matrix ``[N, L]`` that are no padding, ``[T]``."""
        return torch.cat([x[row, :length] for row, length in enumerate(self.lengths)])

    def column(self, name: str) -> Tensor:
        """Return a column of tokens as a matrix, ``[N, L]``."""
        if name in self.leaves:
            return self.leaves[name]
        return self.pad(self.batch.column(name).to(self.dtype))

    @property
    def response_mask(self) -> Tensor:
        """1 on trained tokens, ``[N, L]`` int64."""
        return self.pad(self.batch.column("response_mask").long())

    @property
    def has_micro_batches(self) -> bool:
        """True if it is cut into several micro-batches."""
        return len(torch.unique(self.batch.per_row["micro_batch_id"])) > 1

    @property
    def num_items_in_batch(self) -> Tensor:
        """Trained tokens of the whole batch, int64."""
        return self.response_mask.sum() if self.items is None else torch.tensor(self.items)

    @property
    def centered_rewards(self) -> Tensor:
        """Rewards less the mean of their group on trained tokens, ``[N, L]``; 0 exactly where they are equal."""
        reward_N, group_N = self.batch.column("reward").double(), self.group_index
        found_N = torch.zeros_like(reward_N)
        for group in torch.unique(group_N):
            in_group = group_N == group
            if (reward_N[in_group] != reward_N[in_group][0]).any():
                found_N[in_group] = reward_N[in_group] - reward_N[in_group].mean()
        return found_N[:, None].to(self.dtype) * self.response_mask

    def given_to(self, objective: Objective) -> RolloutBatch:
        """Return the rows as a trainer gives them to its function.

        verl picks the last row of every trajectory before it calls one, so each row that the function sees counts.
        """
        if objective.advantage.one_vote != "last":
            return self.batch
        per_row = {name: x_N for name, x_N in self.batch.per_row.items() if name != "trajectory_id"}
        return replace(self.batch, per_row=per_row)

    def part(self, start: int, stop: int | None) -> "Case":
        """Return some responses as a micro-batch."""
        place_N, width = torch.arange(len(self.lengths)), max(self.lengths[start:stop])
        left_out_N = (place_N < start) | (place_N >= (len(place_N) if stop is None else stop))
        still_T = torch.zeros(self.batch.tokens, dtype=torch.bool)
        return replace(
            self,
            batch=without(self.batch, left_out_N, still_T),
            items=int(self.num_items_in_batch),
            advantages=None if self.advantages is None else self.advantages[start:stop, :width],
            row_advantages=None if self.row_advantages is None else self.row_advantages[start:stop],
            leaves={name: x[start:stop, :width] if x.dim() else x for name, x in self.leaves.items()},
        )

    @property
    def rewards(self) -> Tensor:
        """The reward of each response, ``[N]``."""
        return self.batch.column("reward").to(self.dtype)

    @property
    def reward_baselines(self) -> Tensor:
        """The reward of a greedy response to the same prompt, ``[N]``."""
        return self.batch.column("reward_baseline").to(self.dtype)

    @property
    def rewards_per_func(self) -> Tensor:
        """The reward of each response by each reward function, ``[N, F]``."""
        return torch.stack(list(self.batch.rewards.values()), 1).to(self.dtype)

    @property
    def non_tensor_batch(self) -> dict[str, "np.ndarray"]:
        """The reward of each response by the name of the reward function, ``[N]``, as verl has them."""
        return {name: reward_N.numpy() for name, reward_N in self.batch.rewards.items()}

    @property
    def padded_batch(self) -> dict[str, Tensor]:
        """Prompts of one token and the attention mask over prompt and response, as verl has them."""
        is_token = self.pad(torch.ones(self.batch.tokens, dtype=torch.int64))
        prompts = torch.ones(len(self.lengths), 1, dtype=torch.int64)
        return {"prompts": prompts, "attention_mask": torch.cat([prompts, is_token], 1)}

    @property
    def aux_loss(self) -> Tensor:
        """The load-balancing loss of the router of a mixture of experts."""
        return self.leaves.get("aux_loss", torch.tensor(AUX_LOSS, dtype=self.dtype))

    @property
    def token_level_rewards(self) -> Tensor:
        """The reward on the last token of each response, ``[N, L]``."""
        rewards = torch.zeros(len(self.lengths), max([1, *self.lengths]), dtype=self.dtype)
        for row, length in enumerate(self.lengths):
            rewards[row, length - 1] = self.rewards[row]
        return rewards

    @property
    def group_index(self) -> Tensor:
        """The number of the group of each response, ``[N]`` int64."""
        return self.batch.group_N

    @property
    def index(self) -> "np.ndarray":
        """The name of the group of each response, ``[N]`` objects."""
        return np.array([self.batch.group_name(group) for group in self.group_index.tolist()], dtype=object)

    @property
    def group_size(self) -> int:
        """Responses of a group; 0 where groups differ."""
        sizes = torch.bincount(self.group_index)
        return int(sizes[0]) if bool((sizes == sizes[0]).all()) else 0


def _case(
    name: str,
    rewards: Sequence[Sequence[float]],
    lengths: Sequence[int],
    *,
    masked: Mapping[int, Sequence[int]] | None = None,
    spread: float = 0.2,
    base: float = 2.0,
    seed: int = 0,
    per_row: Mapping[str, Sequence[int]] | None = None,
) -> Case:
    """Draw the columns of a case: log-probs are multiples of 2^-16, which float32 and a file hold exactly.

    The two reward functions add up to the reward; a sum of squared probabilities is one that a distribution with the
    old probability of the token can have.

    Args:
        name: of the case.
        rewards: of each group.
        lengths: tokens of each response.
        masked: response to the tokens of it that are not trained.
        spread: standard deviation by which log-probs differ from each other, in nats.
        base: largest size of a log-prob, in nats.
        seed: of the draw.
        per_row: further columns.
    """
    draw = torch.Generator().manual_seed(seed)
    mask = [[int(at not in (masked or {}).get(row, ())) for at in range(length)] for row, length in enumerate(lengths)]

    def rows(values_T: Tensor) -> list[list[float]]:
        return [[round(float(value) * 2**16) / 2**16 for value in row] for row in torch.split(values_T, list(lengths))]

    tokens = sum(lengths)
    policy_T = -torch.rand(tokens, generator=draw, dtype=torch.float64) * base - 0.01
    others = [policy_T + spread * torch.randn(tokens, generator=draw, dtype=torch.float64) for _ in range(3)]
    old, ref, rollout = (rows(other_T.clamp(max=-0.001)) for other_T in others)
    values = rows(torch.randn(tokens, generator=draw, dtype=torch.float64))
    entropy = rows(0.5 + torch.rand(tokens, generator=draw, dtype=torch.float64))
    p_T = others[0].clamp(max=-0.001).exp()
    others_T = (1 - p_T) ** 2 * torch.rand(tokens, generator=draw, dtype=torch.float64)
    squared = [row.tolist() for row in torch.split(p_T**2 + others_T, list(lengths))]
    format_N, baseline_N = torch.randint(0, 4, (2, len(lengths)), generator=draw).double() / 4
    batch = toy_batch(
        rewards,
        lengths=list(lengths),
        mask=mask,
        policy=rows(policy_T),
        old=old,
        ref=ref,
        rollout=rollout,
        values=values,
        per_token={"entropy": entropy, "sum_pi_squared": squared},
        # One update on one micro-batch of one rank: means over parts of the batch are those of the whole.
        per_row={**dict.fromkeys(("micro_batch_id", "optim_step_id", "rank"), [0] * len(lengths)), **(per_row or {})},
    )
    columns = {**batch.per_row, "reward_baseline": baseline_N}
    parts = {"accuracy": batch.column("reward") - format_N, "format": format_N}
    return Case(name, replace(batch, per_row=columns, rewards=parts))


CASES = (
    _case("ragged", [[1.0, 0.25, -0.5, 2.0], [0.1, 0.7, 0.3, 0.9]], [3, 1, 5, 2, 4, 6, 2, 3]),
    _case("zero variance", [[0.5, 0.5, 0.5, 0.5], [1.0, 0.0, 0.0, 2.0]], [2, 3, 4, 1, 3, 3, 2, 5], seed=1),
    _case("tied", [[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]], [4, 4, 2, 2, 1, 6, 3, 3], seed=2),
    _case(
        "fully masked",
        [[1.0, 0.0, 5.0, 0.5], [0.2, 0.4, 0.8, 0.6]],
        [3, 2, 4, 3, 2, 5, 1, 4],
        masked={2: range(4)},
        seed=3,
    ),
    _case(
        "masked tokens",
        [[1.0, 0.0, 0.5, 0.25], [0.0, 1.0, 2.0, 3.0]],
        [6, 4, 5, 3, 4, 6, 5, 4],
        masked={0: (2, 3), 1: (3,), 5: (0, 1), 6: (2,)},
        seed=4,
    ),
    _case("float residue", [[0.1, 0.1, 0.1, 0.1], [0.3, 0.3, 0.3, 1.0]], [2, 3, 2, 4, 3, 1, 2, 2], seed=5),
    _case(
        "extreme log-probs",
        [[1.0, 0.0, 0.0, 1.0], [0.0, 2.0, 1.0, 1.0]],
        [3, 4, 2, 3, 5, 2, 3, 4],
        spread=4.0,
        base=30.0,
        seed=6,
    ),
    _case(
        "several micro-batches",
        [[1.0, 0.0, 0.0, 0.5], [0.0, 2.0, 1.0, 0.5]],
        [1, 2, 6, 3, 5, 1, 2, 4],
        per_row={"micro_batch_id": [0, 0, 0, 0, 1, 1, 1, 1]},
        seed=9,
    ),
    _case("groups of several sizes", [[1.0], [0.0, 1.0, 0.5], [0.2, 0.9, 0.4, 0.1]], [3, 2, 4, 1, 5, 2, 3, 3], seed=7),
    _case(
        "several rows of a trajectory",
        [[1.0, 1.0, 1.0, 0.0], [0.5, 0.0, 0.0, 1.0]],
        [2, 3, 4, 3, 2, 2, 5, 1],
        per_row={"trajectory_id": [0, 0, 0, 1, 2, 3, 3, 4]},
        seed=8,
    ),
)
"""Each differs from the others in what it tells apart; none has more than eight responses."""
