"""Rewards to advantages, the sampler's weights and the metrics of a generation, as the real trainers make them."""

from dataclasses import replace

import pytest
import torch
from objectives import objective_of as objective
from parity.padded import pad, precision
from parity.trl_generation import generated, sampler_ratio, scored, weighed
from proof.claims import agree, compared, covers

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers import table

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), compared("package")]

WEIGHTS = [0.5, 2.0]
CLASSES = {"trl": ("trl.trainer.grpo_trainer", "GRPOTrainer"), "trl-rloo": ("trl.trainer.rloo_trainer", "RLOOTrainer")}


def trainer_class(name: str) -> type:
    module, cls = CLASSES[name]
    return getattr(pytest.importorskip(module), cls)


def batch_of(seed: int, dtype: torch.dtype, *, size: int = 4, split: str = "train", masks: bool = True) -> RolloutBatch:
    groups = 12 // size
    rejected = {"rejected": 0.0, "holes": 0.2 if masks else 0.0, "empty": 0.0}
    batch = random_batch(seed, sizes=(size,) * groups, adjacent=True, spread=0.4, dtype=dtype, **rejected)
    draw = torch.Generator().manual_seed(seed)
    sampler_T = batch.column("rollout_log_probs")
    sampler_T = torch.where(torch.rand(batch.tokens, generator=draw) < 0.1, torch.nan, sampler_T)
    batch = replace(batch, split=split, per_token={**batch.per_token, "rollout_log_probs": sampler_T})
    return weighed(generated(batch, seed), WEIGHTS)


def truncated_masked(batch: RolloutBatch) -> RolloutBatch:
    """`mask_truncated_completions`: rows that were cut have an empty mask, and vote all the same."""
    kept_N = torch.tensor([status == "stop" for status in batch.statuses])
    kept_T = torch.repeat_interleave(kept_N, batch.rows.diff())
    return replace(batch, per_token={**batch.per_token, "response_mask": batch.column("response_mask") & kept_T})


def check(trainer: str, batch: RolloutBatch, options: dict, dtype: torch.dtype) -> None:
    options = {"beta": 0.05 if trainer == "trl-rloo" else 0.0, **options}
    mine = objective(trainer, reward_weights=WEIGHTS, **options)
    with precision(dtype):
        outputs, parts, metrics = scored(trainer_class(trainer), batch, options, WEIGHTS)
    rows = evaluate(batch, mine, dtype=dtype)
    own = table.TRAINERS[trainer].metrics(rows)
    wanted_N = torch.zeros(len(batch), dtype=torch.float64)
    counted_N = torch.tensor(
        [int(row.sum()) for row in batch.column("response_mask").split(batch.rows.diff().tolist())]
    )
    for output, part in zip(outputs, parts, strict=True):
        wanted_N[part] = output["advantages"].double()
        if trainer == "trl":
            # In training all rows are one generation batch, over all ranks.
            whole = counted_N if batch.split == "train" else counted_N[part]
            assert int(output["num_items_in_batch"]) == int(whole.sum())
    if batch.split == "train" or not options.get("normalize_advantages"):
        agree(rows.rows.advantage_N, wanted_N, dtype, "advantages")
    for name, wanted in metrics.items():
        if name == "num_tokens":
            continue  # counted since the start of training
        agree(own[name], wanted, dtype, name, scale=max(1.0, abs(wanted)))
    # What is not of the generation is of the loss.
    assert {name for name in own if name.split("/")[0] in ("completions", "rewards", "reward", "sampling")} == {
        name for name in metrics if name.split("/")[0] in ("completions", "rewards", "reward", "sampling")
    }


def marked(trainer: str, variants: dict[str, dict]) -> list:
    """Sets of options as parameters, each marked with the values that it covers."""
    return [
        pytest.param(name, id=name, marks=[covers(trainer, option, value) for option, value in options.items()])
        for name, options in variants.items()
    ]


SINGLE_AND_DOUBLE = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
GRPO = {
    "group": {"scale_rewards": "group"},
    "batch": {"scale_rewards": "batch"},
    "none": {"scale_rewards": "none"},
    "gdpo": {"multi_objective_aggregation": "normalize_then_sum"},
    "kl": {"beta": 0.1},
}


@SINGLE_AND_DOUBLE
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("variant", marked("trl", GRPO))
def test_grpo(variant, seed, dtype):
    check("trl", batch_of(seed, dtype), GRPO[variant], dtype)


@SINGLE_AND_DOUBLE
@pytest.mark.parametrize("variant", [*marked("trl", GRPO), *marked("trl-rloo", {"rloo": {"beta": 0.3}})])
def test_groups_that_span_two_ranks(variant, dtype):
    trainer = "trl-rloo" if variant == "rloo" else "trl"
    batch = batch_of(4, dtype, masks=trainer == "trl")
    batch = replace(batch, per_row={**batch.per_row, "rank": torch.tensor([0] * 6 + [1] * 6)})
    check(trainer, batch, {"beta": 0.3} if variant == "rloo" else GRPO[variant], dtype)


@SINGLE_AND_DOUBLE
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("variant", marked("trl", {name: GRPO[name] for name in ("group", "batch", "none")}))
def test_grpo_in_evaluation(variant, size, dtype):
    """Every batch of an evaluation is normalised by itself; groups of one have advantage 0."""
    batch = batch_of(5, dtype, size=size, split="eval")
    batch = replace(batch, per_row={**batch.per_row, "micro_batch_id": torch.tensor([0] * 4 + [1] * 4 + [2] * 4)})
    check("trl", batch, GRPO[variant] | {"num_generations_eval": size}, dtype)


BOTH = [pytest.param(name, marks=covers(name, "mask_truncated_completions", True)) for name in CLASSES]
UNMASKED = [pytest.param(name, marks=covers(name, "mask_truncated_completions", False)) for name in CLASSES]


@SINGLE_AND_DOUBLE
@pytest.mark.parametrize("trainer", BOTH)
def test_truncated_completions_masked(trainer, dtype):
    batch = truncated_masked(batch_of(2, dtype, masks=trainer == "trl"))
    assert bool((evaluate(batch, objective(trainer), dtype=dtype).rows.length_N == 0).any())
    check(trainer, batch, {"mask_truncated_completions": True}, dtype)


@SINGLE_AND_DOUBLE
@pytest.mark.parametrize("trainer", UNMASKED)
@pytest.mark.parametrize("status", ["stop", "length"])
def test_all_ended_alike(trainer, status, dtype):
    batch = replace(batch_of(2, dtype, masks=trainer == "trl"), statuses=[status] * 12)
    check(trainer, batch, {}, dtype)


SAMPLER = {
    "sequence_mask": {"vllm_importance_sampling_mode": "sequence_mask"},
    "sequence_truncate": {"vllm_importance_sampling_mode": "sequence_truncate"},
    "token_mask": {
        "vllm_importance_sampling_mode": "token_mask",
        "vllm_importance_sampling_clip_max": 1.3,
        "vllm_importance_sampling_clip_min": 0.7,
    },
    "token_truncate": {
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 1.2,
        "vllm_importance_sampling_clip_min": 0.9,
    },
}


@SINGLE_AND_DOUBLE
@pytest.mark.parametrize("mode", marked("trl", SAMPLER))
def test_weights_on_two_ranks(mode, dtype):
    batch = batch_of(1, dtype)
    batch = replace(batch, per_row={**batch.per_row, "rank": torch.tensor([0] * 6 + [1] * 6)})
    check("trl", batch, {"use_vllm": True, **SAMPLER[mode]}, dtype)


@SINGLE_AND_DOUBLE
@pytest.mark.parametrize("mode", marked("trl", SAMPLER))
def test_weights_against_the_sampler(mode, dtype):
    """The sampler gives no log-prob for some tokens."""
    batch, options = batch_of(1, dtype), {"use_vllm": True, **SAMPLER[mode]}
    check("trl", batch, options, dtype)
    with precision(dtype):
        (output,), _, _ = scored(trainer_class("trl"), batch, options, WEIGHTS)
    old, sampler, mask = (
        pad(batch, batch.column(name), dtype) for name in ("old_log_probs", "rollout_log_probs", "response_mask")
    )
    wanted = output["importance_sampling_ratio"]
    found = sampler_ratio(old, sampler, mask, options)
    assert bool((wanted != 1).any())
    agree(found, wanted, dtype, "weights")


RLOO = {
    "plain": {"beta": 0.0},
    "kl": {"beta": 0.3},
    "clipped": {"beta": 0.3, "reward_clip_range": (-0.5, 0.7)},
    "normalised": {"beta": 0.05, "normalize_advantages": True},
}


@SINGLE_AND_DOUBLE
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("variant", marked("trl-rloo", RLOO))
def test_rloo(variant, seed, dtype):
    check("trl-rloo", batch_of(seed, dtype, masks=False), RLOO[variant], dtype)


@SINGLE_AND_DOUBLE
@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=covers("trl-rloo", "num_generations_eval", size)) for size in (1, 2, 4)]
)
def test_rloo_in_evaluation(size, dtype):
    batch = batch_of(5, dtype, size=size, split="eval", masks=False)
    batch = replace(batch, per_row={**batch.per_row, "micro_batch_id": torch.tensor([0] * 4 + [1] * 4 + [2] * 4)})
    check("trl-rloo", batch, {"num_generations_eval": size}, dtype)


VALUES = (0.3, 0.5, 1.1, 0.7, 2.7, 10.1)


def fractional(batch: RolloutBatch, size: int) -> RolloutBatch:
    """Groups of equal fractional rewards, but for the last one; one row has none."""
    values = [VALUES[row // size % len(VALUES)] for row in range(len(batch) - size)] + list(range(size))
    reward_N = torch.tensor(values, dtype=torch.float64)
    reward_N[1] = torch.nan
    rewards = {
        "f0": reward_N.float().double(),
        "f1": torch.where(torch.arange(len(batch)) // size % 3 == 0, torch.nan, 0.3),
    }
    return weighed(replace(batch, rewards=rewards), WEIGHTS)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("size", [2, 3, 5, 8, 12, 16, 32, 64])
@pytest.mark.parametrize("variant", ["group", "batch", "none", "gdpo"])
def test_float32_is_bit_for_bit_that_of_trl(variant, size, ranks):
    """Rounding of equal rewards included."""
    batch = random_batch(1, sizes=(size,) * 8, adjacent=True, empty=0.0, rejected=0.0)
    batch = fractional(generated(batch, 1), size)
    rank_N = torch.arange(len(batch)) * ranks // len(batch)
    batch = replace(batch, per_row={**batch.per_row, "rank": rank_N})
    # The weighted sum as float32 has it.
    parts = torch.stack([reward_N.float() for reward_N in batch.rewards.values()], 1)
    sum_N = (parts * torch.tensor(WEIGHTS)).nansum(1).masked_fill(parts.isnan().all(1), torch.nan)
    batch = replace(batch, per_row={**batch.per_row, "reward": sum_N.double()})
    outputs, rows, _ = scored(trainer_class("trl"), batch, {"beta": 0.0, **GRPO[variant]}, WEIGHTS)
    wanted_N = torch.zeros(len(batch))
    for output, part in zip(outputs, rows, strict=True):
        wanted_N[part] = output["advantages"]
    mine = objective("trl", reward_weights=WEIGHTS, beta=0.0, **GRPO[variant])
    found_N = evaluate(batch, mine.in_single()).rows.advantage_N
    assert found_N.float().tolist() == wanted_N.tolist()
    if variant == "group" and size == 8:
        flat_N = evaluate(batch, mine).rows.zero_std_N
        assert float(found_N[flat_N].abs().max()) > 1e-4
