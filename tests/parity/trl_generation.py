"""TRL's real `_generate_and_score_completions` of either trainer, called with rows of a batch instead of a model."""

import math
import sys
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.trainers.trl import metrics as trl_metrics

END, INNER, PAD = 1, 5, 0
"""Token ids: the one that ends a response, any other, and padding."""


def generated(batch: RolloutBatch, seed: int, *, functions: int = 2, unscored: float = 0.3) -> RolloutBatch:
    """The batch with rewards by function (some functions give none), and with how each response ended."""
    draw = torch.Generator().manual_seed(seed)
    rewards = {}
    for number in range(functions):
        reward_N = torch.randn(len(batch), generator=draw, dtype=torch.float64).float().double()
        silent_N = torch.rand(len(batch), generator=draw) < unscored
        # A row that no function scored, and a group of which one row alone was.
        silent_N[: len(batch) // 3] |= torch.arange(len(batch) // 3) > 0
        rewards[f"f{number}"] = torch.where(silent_N, torch.nan, reward_N)
    cut = (torch.rand(len(batch), generator=draw) < 0.4).tolist()
    return replace(batch, rewards=rewards, statuses=["length" if each else "stop" for each in cut])


def weighed(batch: RolloutBatch, weights: list[float]) -> RolloutBatch:
    """The batch with the reward that its functions give together: null where none gave any."""
    parts = torch.stack(list(batch.rewards.values()), dim=1)
    total_N = (parts * torch.tensor(weights, dtype=torch.float64)).nansum(1)
    reward_N = torch.where(parts.isnan().all(1), torch.nan, total_N)
    return replace(batch, per_row={**batch.per_row, "reward": reward_N})


class Processes:
    """What the ranks tell each other: collected in a first pass, given in a second one."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.told: list[list[Tensor]] = []
        self.place = 0

    def gather(self, value: Tensor) -> Tensor:
        """The values of all ranks, one after another."""
        return torch.cat([each.reshape(-1) if each.dim() == 0 else each for each in self._of_all(value)])

    def reduce(self, value: Tensor, reduction: str) -> Tensor:
        """Their sum."""
        return torch.stack(self._of_all(value)).sum(0)

    def _of_all(self, value: Tensor) -> list[Tensor]:
        if self.place == len(self.told):
            self.told.append([])
        found = self.told[self.place]
        self.place += 1
        if len(found) < self.count:
            found.append(value)
            # In the first pass the others are not known, and only the shape matters.
            return [value] * self.count
        return found


class Trainer:
    """What the two functions use of a trainer, on one rank."""

    def __init__(
        self,
        cls: type,
        batch: RolloutBatch,
        rows: Tensor,
        options: dict,
        weights: list[float],
        processes: Processes,
        rank: int = 0,
    ) -> None:
        self.cls, self.batch, self.rows = cls, batch, rows.nonzero().squeeze(1).tolist()
        self.options = options
        training = batch.split == "train"
        size = len(batch) // len(batch.groups)
        names = list(batch.rewards)
        self.mode = batch.split
        self.model = SimpleNamespace(training=training, is_gradient_checkpointing=False)
        self.ref_model = SimpleNamespace()
        self.args = SimpleNamespace(
            report_to=[],
            gradient_checkpointing_kwargs=None,
            per_device_train_batch_size=len(batch),
            per_device_eval_batch_size=len(batch),
            steps_per_generation=1,
            gradient_accumulation_steps=1,
        )
        self.accelerator = SimpleNamespace(
            device=torch.device("cpu"),
            process_index=rank,
            num_processes=processes.count,
            is_main_process=rank == 0,
            gather=processes.gather,
            reduce=processes.reduce,
        )
        self.state = SimpleNamespace(global_step=0, num_input_tokens_seen=0)
        self._tokenizer = SimpleNamespace(eos_token_id=END, pad_token_id=PAD)
        self.processing_class = SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids))
        self.eos_token_ids = [END]
        self.pad_to_multiple_of = None
        self.environment_factories = self.environments = self.tools = None
        self.use_vllm = options.get("use_vllm", False)
        self.vllm_importance_sampling_correction = True
        self.vllm_importance_sampling_mode = options.get("vllm_importance_sampling_mode", "sequence_mask")
        self.vllm_importance_sampling_clip_max = options.get("vllm_importance_sampling_clip_max", 3.0)
        self.vllm_importance_sampling_clip_min = options.get("vllm_importance_sampling_clip_min")
        self._last_loaded_step = 0
        self.num_iterations = 1
        self.num_generations = self.num_generations_eval = size
        self.mask_truncated_completions = options.get("mask_truncated_completions", False)
        self.beta = options.get("beta", 0.0)
        self.scale_rewards = options.get("scale_rewards", "group")
        self.multi_objective_aggregation = options.get("multi_objective_aggregation", "sum_then_normalize")
        self.normalize_advantages = options.get("normalize_advantages", False)
        self.reward_clip_range = options.get("reward_clip_range")
        self.reward_weights = torch.tensor(weights)
        self.reward_func_names = names
        self.reward_funcs = [self._scoring(name) for name in names]
        self.reward_processing_classes = [None] * len(names)
        self.chat_template_kwargs = {}
        self._log_completion_extra = self._log_metric = None
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._logs = defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list))
        self._pending_extra_logs, self._pending_metrics = {}, {}
        self.images = None

    def _scoring(self, name: str):
        values = self.batch.rewards[name].tolist()
        return lambda **_: [None if math.isnan(values[row]) else values[row] for row in self.rows]

    def cells(self, name: str) -> list[list[float]]:
        """A token column of the rows, as lists."""
        parts = self.batch.column(name).split(self.batch.rows.diff().tolist())
        return [parts[row].tolist() for row in self.rows]

    def _ids(self) -> list[list[int]]:
        lengths = self.batch.rows.diff().tolist()
        ends = [END if self.batch.statuses[row] == "stop" else INNER for row in self.rows]
        return [[INNER] * (lengths[row] - 1) + [end] for row, end in zip(self.rows, ends, strict=True)]

    def rollout_func(self, prompts: list, trainer: "Trainer") -> dict:
        """GRPO's way in: everything as generated, the mask of tool tokens included."""
        found = {"prompt_ids": [[INNER]] * len(self.rows), "completion_ids": self._ids(), "logprobs": None}
        found["env_mask"] = [list(map(int, row)) for row in self.cells("response_mask_pre")]
        if self.use_vllm:
            sampler = self.cells("rollout_log_probs")
            found["logprobs"] = [[None if math.isnan(value) else value for value in row] for row in sampler]
        return found

    def _tokenize_prompts(self, prompts: list) -> tuple:
        return [[INNER]] * len(prompts), None, {}

    def _generate_single_turn(self, *_: object) -> list[list[int]]:
        return self._ids()

    def _generate(self, prompts: list) -> tuple:
        return self.cls._generate(self, prompts)

    def _calculate_rewards(self, *args: object) -> Tensor:
        return self.cls._calculate_rewards(self, *args)

    def _get_per_token_logps_and_entropies(self, model: object, ids: Tensor, *_: object, **__: object) -> tuple:
        rows = self.cells("old_log_probs" if model is self.model else "ref_log_probs")
        padded = torch.zeros(len(rows), ids.shape[1] - 1)
        for row, values in enumerate(rows):
            padded[row, : len(values)] = torch.tensor(values)
        return padded, None, None

    def score(self) -> dict[str, Tensor]:
        """What the real function returns."""
        return self.cls._generate_and_score_completions(self, [{"prompt": ""} for _ in self.rows])


def scored(
    cls: type, batch: RolloutBatch, options: dict, weights: list[float]
) -> tuple[list[dict[str, Tensor]], list[Tensor], dict[str, float]]:
    """Outputs of every generation batch and rank, which rows they were of, and TRL's metrics over all of them."""
    from accelerate import PartialState

    PartialState()  # TRL's warning about rows without any score wants to know the rank
    zero_N = torch.zeros(len(batch), dtype=torch.int64)
    batch_N = zero_N if batch.split == "train" else batch.per_row.get("micro_batch_id", zero_N)
    rank_N = batch.per_row.get("rank", zero_N)
    ranks = rank_N.unique().tolist()
    module = sys.modules[cls.__module__]
    outputs, parts, metrics = [], [], defaultdict(list)
    before = module.gather
    try:
        for number in batch_N.unique().tolist():
            processes = Processes(len(ranks))
            # Rewards and the KL in them are gathered by a function of the module.
            module.gather = processes.gather
            for known in (False, True):
                for rank in ranks:
                    here = (batch_N == number) & (rank_N == rank)
                    processes.place = 0
                    trainer = Trainer(cls, batch, here, options, weights, processes, rank)
                    output = trainer.score()
                    if known:
                        outputs.append(output)
                        parts.append(here)
            # Every rank logs what all of them found.
            for name, values in trainer._metrics[batch.split].items():
                metrics[name] += values
    finally:
        module.gather = before
    return outputs, parts, {name: trl_metrics.nanmean(values) for name, values in metrics.items()}


def sampler_ratio(old, sampling, mask, options):
    """The weights as `_generate_and_score_completions` makes them, for the loss; compared with what it returns."""
    difference = torch.nan_to_num((old - sampling) * mask, nan=0.0)
    mode = options.get("vllm_importance_sampling_mode", "sequence_mask")
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    low, high = options.get("vllm_importance_sampling_clip_min"), options.get("vllm_importance_sampling_clip_max", 3.0)
    if mode.endswith("truncate"):
        return ratio.clamp(min=low, max=high)
    outside = (ratio < (-math.inf if low is None else low)) | (ratio > (math.inf if high is None else high))
    return ratio.masked_fill(outside, 0.0)


def evaluation_share(batch: RolloutBatch, micro: int) -> float:
    """The evaluation loop repeats a loss for a full batch, and cuts the last to what is left of the prompts."""
    sizes = batch.per_row["micro_batch_id"].bincount().tolist()
    losses = [number for number in range(len(sizes)) for _ in range(sizes[0])]
    left = len(batch.groups) % sizes[0]
    losses = losses[: len(losses) - sizes[0] + left] if left else losses
    return losses.count(micro) / len(losses)
