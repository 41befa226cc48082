"""What TRL computed for one generated batch: copied at once, made into rows of a run file later and elsewhere."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from rolloutdoctor.io.write.recorded_rows import Cells
from rolloutdoctor.recorders._cells import Cut, at_rows, copied, floats

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.recorders._trl_config import Trainer

# Per-token tensors of the batch that TRL hands to the loss, where it computed them.
_TOKEN_TENSORS = {
    "rollout_log_probs": "sampling_per_token_logps",
    "old_log_probs": "old_per_token_logps",
    "ref_log_probs": "ref_per_token_logps",
    "is_weights": "importance_sampling_ratio",
}
_OTHER_TENSORS = ("advantages", "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")


@dataclass(frozen=True)
class Scoring:
    """Arguments and result of the trainer's `_calculate_rewards`; the rewards are those of all processes."""

    prompts: Sequence[object]
    completions: Sequence[object]
    completion_ids: Sequence[Sequence[int]]
    rewards: "Tensor"


@dataclass
class Generation:
    """One generated batch of this process, in group order.

    Attributes:
        name: names the batch within the run; rows and groups are named after it.
        number: of the batch, counted by split.
        split: ``train`` or ``eval``.
        lengths: ``[N]``, tokens of each response.
        group_size: rows of a group.
        rank: which process.
        tensors: copies of what the trainer made, by its own names.
        reward_names: of the reward functions.
        weights: ``[F]``, of the reward functions.
        tool_masks: the mask of tool tokens as generated, or None.
        ends: token ids that end a response.
        texts: prompts and responses, where they are kept.
        touched: True once a loss was computed on a part of it.
        passes: how many times training has gone over it.
    """

    name: str
    number: int
    split: str
    lengths: np.ndarray
    group_size: int
    rank: int
    tensors: Mapping[str, "Tensor"]
    reward_names: Sequence[str]
    weights: "Tensor"
    tool_masks: Sequence[Sequence[int]] | None
    ends: frozenset[int]
    texts: Mapping[str, list[object]]
    touched: bool = False
    passes: int = 0

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def mask(self) -> np.ndarray:
        """The tokens that the trainer trains on, ``[N, T]`` bool, padding of the completions included."""
        mask = self.tensors["completion_mask"]
        if "tool_mask" in self.tensors:
            mask = mask * self.tensors["tool_mask"]
        return mask.bool().numpy()

    @cached_property
    def cut(self) -> Cut:
        """The tokens of the responses, and the padding after them as far as the trainer trains on it."""
        width = self.mask.shape[1]
        last = np.where(self.mask.any(1), width - self.mask[:, ::-1].argmax(1), 0)
        return Cut.after(np.maximum(self.lengths, last))

    @cached_property
    def columns(self) -> dict[str, Cells]:
        """Cells that do not change while the batch is trained on; made when first asked for, not when copied."""
        found: dict[str, Cells] = dict(self.texts)
        found |= _rewards(self.tensors["rewards"], self.weights, self.reward_names)
        advantages = floats(self.tensors["advantages"])
        if advantages.ndim == 1:
            found["advantage"] = advantages.astype(np.float64)
        else:
            found["advantages"] = self.cut.lists(advantages, np.float32)
        is_prompt = self.tensors["prompt_mask"].bool().numpy()
        found["prompt_ids"] = Cut.of(is_prompt).lists(self.tensors["prompt_ids"].numpy(), np.int32)
        ids = self.tensors["completion_ids"].numpy()
        found["response_ids"] = self.cut.lists(ids, np.int32)
        found |= self._masks()
        for column, key in _TOKEN_TENSORS.items():
            if key in self.tensors:
                found[column] = self.cut.lists(floats(self.tensors[key]), np.float32)
        found["rank"] = np.full(len(self), self.rank, np.int32)
        beyond = np.arange(self.mask.shape[1]) >= self.lengths[:, None]
        found["trained_beyond"] = (self.mask & beyond).sum(1, dtype=np.int32)
        # As TRL decides what is truncated: by the last token. None for an empty response.
        last = ids[np.arange(len(self)), np.maximum(self.lengths - 1, 0)]
        found["status"] = [
            None if not length else "stop" if token in self.ends else "length"
            for length, token in zip(self.lengths.tolist(), last.tolist(), strict=True)
        ]
        return found

    def _masks(self) -> dict[str, Cells]:
        """The mask of the loss; and what the model generated, which is known from the generation alone."""
        generated = np.arange(self.cut.slots.shape[1]) < self.lengths[:, None]
        if "tool_mask" in self.tensors and self.tool_masks is not None:
            generated[generated] = np.concatenate([np.asarray(row, np.bool_) for row in self.tool_masks])
        return {
            "response_mask": self.cut.lists(self.mask, np.uint8),
            "response_mask_pre": self.cut.lists(generated, np.uint8),
        }


@dataclass
class Pass:
    """One pass over a generated batch: every row once, in micro-batches.

    Attributes:
        generation: the batch.
        step: optimiser step of the first micro-batch, as logged.
        suffix: tells a second pass in the same optimiser step apart.
        number: of the generated batch; a second pass in the same optimiser step has another.
        parts: of each micro-batch: its rows, what the loss saw of them, its number, and its optimiser step.
    """

    generation: Generation
    step: int
    suffix: str = ""
    number: int = 0
    parts: list[tuple[np.ndarray, "Tensor", "Tensor | None", int, int]] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """True if every row of the batch went through the loss."""
        return len(self.seen) == len(self.generation)

    def add(
        self, rows: Sequence[int], logps: "Tensor", entropies: "Tensor | None", micro_batch: int, optim_step: int
    ) -> None:
        """Keep what the loss saw of one micro-batch."""
        entropy = None if entropies is None else copied(entropies)
        self.parts.append((np.array(rows), copied(logps), entropy, micro_batch, optim_step))
        self.seen.update(rows)

    def columns(self) -> dict[str, Cells]:
        """Return the rows of the pass in group order."""
        generation = self.generation
        count, cut = len(generation), generation.cut
        columns = dict(generation.columns)
        columns["step"] = np.full(count, self.step, np.int64)
        columns["split"] = [generation.split] * count
        first = generation.rank * count
        places = [divmod(first + row, generation.group_size) for row in range(count)]
        batch = f"{generation.name}{self.suffix}"
        columns["group_id"] = [f"{batch}/{group}" for group, _ in places]
        columns["sample_id"] = [f"{batch}/{group}/{place}" for group, place in places]
        policy = at_rows([(rows, floats(logps)) for rows, logps, *_ in self.parts], cut.slots.shape)
        columns["policy_log_probs"] = cut.lists(policy, np.float32)
        entropies = [(rows, floats(entropy)) for rows, _, entropy, *_ in self.parts if entropy is not None]
        if len(entropies) == len(self.parts):
            columns["entropy"] = cut.lists(at_rows(entropies, cut.slots.shape), np.float32)
        numbers = np.zeros((2, count), np.int32)
        for rows, _, _, *pair in self.parts:
            numbers[:, rows] = np.array(pair, np.int32)[:, None]
        columns["micro_batch_id"], columns["optim_step_id"] = numbers
        columns["generation_id"] = np.full(count, self.number, np.int32)
        return columns


def capture(
    trainer: "Trainer",
    output: Mapping[str, "Tensor | None"],
    scoring: Scoring,
    tool_masks: Sequence[Sequence[int]] | None,
    *,
    name: str,
    number: int,
    split: str,
    text: bool,
    ends: frozenset[int],
) -> Generation:
    """Copy a generated batch.

    Args:
        trainer: the trainer that made it.
        output: what its `_generate_and_score_completions` returned, and log-probs of the same layout.
        scoring: how the same batch was scored.
        tool_masks: the mask of tool tokens as generated, where there are tools.
        name: names the batch within the run.
        number: of the batch, counted by split.
        split: ``train`` or ``eval``.
        text: True to keep prompts and responses as text.
        ends: token ids that end a response; see `ends_of`.
    """
    lengths = np.array([len(ids) for ids in scoring.completion_ids], np.int64)
    rank = int(trainer.accelerator.process_index)
    first = rank * len(lengths)
    tensors = {}
    for key in (*_OTHER_TENSORS, *_TOKEN_TENSORS.values()):
        tensor = output.get(key)
        if tensor is not None:
            tensors[key] = copied(tensor)
    tensors["rewards"] = copied(scoring.rewards[first : first + len(lengths)])
    # Groups may span processes, so they are counted over the gathered batch, as TRL does.
    size = trainer.num_generations
    if split == "eval":
        size = getattr(trainer, "num_generations_eval", size)
    texts = {"prompt": _texts(scoring.prompts), "response": _texts(scoring.completions)} if text else {}
    return Generation(
        name=name,
        number=number,
        split=split,
        lengths=lengths,
        group_size=size,
        rank=rank,
        tensors=tensors,
        reward_names=_distinct(trainer.reward_func_names),
        weights=copied(trainer.reward_weights),
        tool_masks=tool_masks,
        ends=ends,
        texts=texts,
    )


def _rewards(rewards: "Tensor", weights: "Tensor", names: Sequence[str]) -> dict[str, Cells]:
    per_function = rewards.double().numpy()
    weighted = per_function * weights.double().numpy()
    total = np.where(np.isnan(weighted), 0.0, weighted).sum(1)
    unscorable = np.isnan(per_function).all(1)
    return {
        "reward": [None if no else each for no, each in zip(unscorable.tolist(), total.tolist(), strict=True)],
        "rewards": dict(zip(names, per_function.T, strict=True)),
    }


def _distinct(names: Sequence[str]) -> list[str]:
    """Two functions may share a name (lambdas); the fields of a struct may not."""
    found: list[str] = []
    for name in names:
        found.append(name if name not in found else f"{name}_{len(found)}")
    return found


def ends_of(trainer: "Trainer") -> frozenset[int]:
    """Return the token ids that end a response; asking a tokenizer takes long enough to do it once."""
    tokenizer = getattr(trainer, "processing_class", None)
    tokenizer = getattr(trainer, "_tokenizer", None) or getattr(tokenizer, "tokenizer", tokenizer)
    ends = {getattr(tokenizer, "eos_token_id", None), getattr(tokenizer, "pad_token_id", None)}
    ends.update(getattr(trainer, "eos_token_ids", ()))
    return frozenset(int(end) for end in ends if end is not None)


def _texts(values: Sequence[object]) -> list[object]:
    return [value if isinstance(value, str) else _messages(value) for value in values]


def _messages(value: object) -> object:
    if not isinstance(value, Sequence):
        return str(value)
    messages = []
    for message in value:
        fields = message if isinstance(message, Mapping) else {"content": message}
        content = fields.get("content")
        if content is not None and not isinstance(content, str):
            content = json.dumps(content, default=str)
        messages.append({"role": str(fields.get("role", "")), "content": content})
    return messages
