"""What TRL computed for one generated batch, copied to the CPU and cut into rows of a run file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.recorders._trl_config import Trainer

Columns = dict[str, list[object]]

# Per-token tensors of the batch that TRL hands to the loss, where it computed them.
_TOKEN_TENSORS = {
    "rollout_log_probs": "sampling_per_token_logps",
    "old_log_probs": "old_per_token_logps",
    "ref_log_probs": "ref_per_token_logps",
    "is_weights": "importance_sampling_ratio",
}


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
        split: ``train`` or ``eval``.
        lengths: tokens of each response.
        columns: cells that do not change while the batch is trained on.
        touched: True once a loss was computed on a part of it.
        passes: how many times training has gone over it.
    """

    name: str
    split: str
    lengths: list[int]
    columns: Columns
    touched: bool = False
    passes: int = 0

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass
class Pass:
    """One pass over a generated batch: every row once, in micro-batches.

    Attributes:
        generation: the batch.
        step: optimiser step of the first micro-batch, as logged.
        suffix: tells a second pass in the same optimiser step apart.
        found: row to its values at the loss.
    """

    generation: Generation
    step: int
    suffix: str = ""
    found: dict[int, dict[str, object]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """True if every row of the batch went through the loss."""
        return len(self.found) == len(self.generation)

    def add(
        self, rows: Sequence[int], logps: "Tensor", entropies: "Tensor | None", micro_batch: int, optim_step: int
    ) -> None:
        """Keep what the loss saw of one micro-batch."""
        policy = to_numpy(logps)
        entropy = None if entropies is None else to_numpy(entropies)
        for position, row in enumerate(rows):
            length = self.generation.lengths[row]
            values: dict[str, object] = {
                "policy_log_probs": policy[position, :length].copy(),
                "micro_batch_id": micro_batch,
                "optim_step_id": optim_step,
            }
            if entropy is not None:
                values["entropy"] = entropy[position, :length].copy()
            self.found[row] = values

    def columns(self) -> Columns:
        """Return the rows of the pass in group order."""
        count = len(self.generation)
        columns = dict(self.generation.columns)
        columns["step"] = [self.step] * count
        columns["split"] = [self.generation.split] * count
        batch = f"{self.generation.name}{self.suffix}"
        for name in ("group_id", "sample_id"):
            columns[name] = [f"{batch}/{key}" for key in columns[name]]
        for name in self.found[0]:
            columns[name] = [self.found[row][name] for row in range(count)]
        return columns


def capture(
    trainer: "Trainer",
    output: Mapping[str, "Tensor"],
    scoring: Scoring,
    tool_masks: Sequence[Sequence[int]] | None,
    *,
    name: str,
    split: str,
    text: bool,
) -> Generation:
    """Copy a generated batch.

    Args:
        trainer: the trainer that made it.
        output: what its `_generate_and_score_completions` returned.
        scoring: how the same batch was scored.
        tool_masks: the mask of tool tokens as generated, where there are tools.
        name: names the batch within the run.
        split: ``train`` or ``eval``.
        text: True to keep prompts and responses as text.
    """
    lengths = [len(ids) for ids in scoring.completion_ids]
    rows = range(len(lengths))
    rank = int(trainer.accelerator.process_index)
    first = rank * len(lengths)
    columns: Columns = {}

    # Groups may span processes, so they are counted over the gathered batch, as TRL does.
    size = trainer.num_generations
    if split == "eval":
        size = getattr(trainer, "num_generations_eval", size)
    columns["group_id"] = [str((first + row) // size) for row in rows]
    columns["sample_id"] = [f"{(first + row) // size}/{(first + row) % size}" for row in rows]
    columns |= _rewards(trainer, scoring.rewards[first : first + len(lengths)])
    advantages = to_numpy(output["advantages"])
    if advantages.ndim == 1:
        columns["advantage"] = [float(advantage) for advantage in advantages]
    else:
        columns["advantages"] = _cut(advantages, lengths)
    if text:
        columns["prompt"] = _texts(scoring.prompts)
        columns["response"] = _texts(scoring.completions)

    prompt_ids = output["prompt_ids"].cpu().numpy()
    is_prompt = output["prompt_mask"].cpu().numpy().astype(bool)
    columns["prompt_ids"] = [prompt_ids[row][is_prompt[row]].astype(np.int32) for row in rows]
    columns["response_ids"] = [np.asarray(ids, np.int32) for ids in scoring.completion_ids]
    columns |= _masks(trainer, output, lengths, tool_masks)
    for column, key in _TOKEN_TENSORS.items():
        tensor = output.get(key)
        if tensor is not None:
            columns[column] = _cut(to_numpy(tensor), lengths)
    columns["rank"] = [rank] * len(lengths)
    columns["status"] = _statuses(trainer, scoring.completion_ids)
    return Generation(name, split, lengths, columns)


def to_numpy(tensor: "Tensor") -> np.ndarray:
    """Copy a float tensor to the CPU as float32; TRL goes on using the original."""
    return tensor.detach().float().cpu().clone().numpy()


def nbytes(columns: Columns) -> int:
    """Estimate the uncompressed size of some rows."""
    total = 0
    for cells in columns.values():
        for cell in cells:
            total += cell.nbytes + 4 if isinstance(cell, np.ndarray) else len(str(cell)) if _is_text(cell) else 8
    return total


def _is_text(cell: object) -> bool:
    return isinstance(cell, (str, list, dict))


def _rewards(trainer: "Trainer", rewards: "Tensor") -> Columns:
    per_function = rewards.detach().cpu().double().numpy()
    weights = trainer.reward_weights.detach().cpu().double().numpy()
    unscorable = np.isnan(per_function).all(axis=1)
    total = np.nansum(per_function * weights, axis=1)
    names: list[str] = []
    for name in trainer.reward_func_names:
        # Two functions may share a name (lambdas); the fields of a struct may not.
        names.append(name if name not in names else f"{name}_{len(names)}")
    return {
        "reward": [None if unknown else float(reward) for reward, unknown in zip(total, unscorable, strict=True)],
        "rewards": [
            {name: None if np.isnan(value) else float(value) for name, value in zip(names, row, strict=True)}
            for row in per_function
        ],
    }


def _masks(
    trainer: "Trainer",
    output: Mapping[str, "Tensor"],
    lengths: Sequence[int],
    tool_masks: Sequence[Sequence[int]] | None,
) -> Columns:
    mask = output["completion_mask"]
    tool_mask = output.get("tool_mask")
    if tool_mask is not None:
        mask = mask * tool_mask
    columns: Columns = {"response_mask": _cut(mask.cpu().numpy().astype(np.uint8), lengths)}
    if getattr(trainer.args, "mask_truncated_completions", False):
        # TRL zeroes both masks of a truncated row: what was there before is known from the generation alone.
        before = [np.ones(length, np.uint8) for length in lengths]
        if tool_mask is not None and tool_masks is not None:
            before = [np.asarray(row, np.uint8) for row in tool_masks]
        columns["response_mask_pre"] = list(before)
    return columns


def _statuses(trainer: "Trainer", completion_ids: Sequence[Sequence[int]]) -> list[object]:
    """`stop` if the last token ends a sequence, as TRL decides what is truncated; None for an empty response."""
    tokenizer = getattr(trainer, "processing_class", None)
    tokenizer = getattr(trainer, "_tokenizer", None) or getattr(tokenizer, "tokenizer", tokenizer)
    ends = {getattr(tokenizer, "eos_token_id", None), getattr(tokenizer, "pad_token_id", None)}
    ends.update(getattr(trainer, "eos_token_ids", ()))
    return [None if len(ids) == 0 else "stop" if int(ids[-1]) in ends else "length" for ids in completion_ids]


def _cut(array: np.ndarray, lengths: Sequence[int]) -> list[object]:
    """Cut a padded ``[N, T]`` array into rows; ``[N, 1]`` holds one value for all tokens of a row."""
    if array.shape[1] == 1:
        return [np.repeat(row, length) for row, length in zip(array, lengths, strict=True)]
    return [row[:length] for row, length in zip(array, lengths, strict=True)]


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
