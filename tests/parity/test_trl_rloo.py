"""TRL's real `RLOOTrainer._compute_loss` against the packed code; rewards and advantages against loops."""

import math
from collections import defaultdict
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import oracles
import pytest
import torch
from objectives import objective_of
from parity.padded import pack, pad, precision
from parity.trl_generation import evaluation_share
from proof.claims import ONLY_DOUBLE, agree, compared, covers, values_of

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers import table

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), compared("package")]

LAYOUTS = {
    "one": {},
    "uneven": {"micro_batch_id": [0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3]},
    "two steps": {"micro_batch_id": [0, 0, 0, 1, 1, 1] * 2, "optim_step_id": [0] * 6 + [1] * 6},
}


objective = partial(objective_of, "trl-rloo")


def batch_of(seed: int, layout: str = "one", dtype: torch.dtype = torch.float64) -> RolloutBatch:
    batch = random_batch(seed, sizes=(4, 4, 4), adjacent=True, spread=0.2, dtype=dtype)
    columns = {name: torch.tensor(numbers) for name, numbers in LAYOUTS[layout].items()}
    entropy_T = torch.rand(batch.tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    per_token = {**batch.per_token, "entropy": entropy_T}
    return replace(batch, per_row={**batch.per_row, **columns}, per_token=per_token)


def upstream(
    batch: RolloutBatch, mine: Objective, dtype: torch.dtype, *, advantage_N: torch.Tensor | None = None
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient and metrics of the step; advantages are recomputed ones where none are given."""
    trainer_class = pytest.importorskip("trl.trainer.rloo_trainer").RLOOTrainer
    zero_N = torch.zeros(len(batch), dtype=torch.int64)
    optim_N, micro_N = (batch.per_row.get(name, zero_N) for name in ("optim_step_id", "micro_batch_id"))
    leaf = pad(batch, batch.column("policy_log_probs"), dtype).requires_grad_()
    old, mask = pad(batch, batch.column("old_log_probs"), dtype), pad(batch, batch.column("response_mask"), torch.int64)
    if advantage_N is None:
        advantage_N = evaluate(batch, mine, dtype=dtype).rows.advantage_N.to(dtype)
    entropy = pad(batch, batch.column("entropy"), dtype)
    training, metrics = batch.split == "train", {batch.split: defaultdict(list)}
    cells = torch.stack([optim_N, micro_N]).unique(dim=1).T.tolist()
    total = torch.zeros((), dtype=dtype)
    for optim, micro in cells:
        here = (optim_N == optim) & (micro_N == micro)
        trainer = SimpleNamespace(
            accelerator=SimpleNamespace(reduce=lambda value, reduction: value, gather=lambda value: value),
            model=SimpleNamespace(training=training),
            epsilon_low=mine.surrogate.clip_low,
            epsilon_high=mine.surrogate.clip_high,
            aux_loss_enabled=False,
            _metrics=metrics,
            _get_per_token_logps_and_entropies=lambda *_, here=here, **__: (leaf[here], entropy[here], None),
        )
        ids = torch.zeros_like(mask[here])
        inputs = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1] + 1,
            "completion_ids": ids,
            "completion_mask": mask[here],
            "old_logps": (old[here] * mask[here]).sum(1),
            "advantages": advantage_N[here],
        }
        # The Trainer divides by the micro-batches of an optimizer step.
        share = 1 / len(cells) if training else evaluation_share(batch, micro)
        total = total + trainer_class._compute_loss(trainer, None, inputs) * share
    total.backward()
    means = {name: sum(values) / len(values) for name, values in metrics[batch.split].items()}
    return total.item(), pack(batch, leaf.grad), means


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("layout", "split"), [*((name, "train") for name in LAYOUTS), ("uneven", "eval")])
@pytest.mark.parametrize("options", [{}, {"beta": 0.0, "epsilon_high": 0.4}, {"normalize_advantages": True}])
@covers("trl-rloo", "loss", "clipped")
def test_loss_gradient_metrics(options, layout, split, dtype):
    batch, mine = replace(batch_of(2, layout, dtype), split=split), objective(**options)
    assert bool((evaluate(batch, mine, dtype=dtype).rows.length_N == 0).any())
    found = evaluate(batch, mine, dtype=dtype, per_token=True)
    with precision(dtype):
        loss, grad_T, metrics = upstream(batch, mine, dtype)
    mask_T = batch.column("response_mask")
    scale = float(found.rows.advantage_N.abs().mean())
    agree(found.loss, loss, dtype, "loss", scale=scale)
    agree(found.per_token.grad_T, grad_T, dtype, "gradient", where=mask_T)
    own = table.TRAINERS["trl-rloo"].metrics(found)
    for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max"):
        metric = f"clip_ratio/{name}"
        agree(own[metric], metrics[metric], dtype, metric, scale=1.0)
    agree(own["entropy"], metrics["entropy"], dtype, "entropy")
    assert metrics["clip_ratio/region_mean"] > 0
    # Every metric of the loss is there.
    assert set(metrics) <= set(own)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("normalised", values_of("trl-rloo", "normalize_advantages", [False, True]))
@pytest.mark.parametrize("bounds", values_of("trl-rloo", "reward_clip_range", [None, (-0.5, 0.7)]))
@compared("loop", ONLY_DOUBLE)
def test_rewards_and_advantages_against_loops(bounds, normalised, seed):
    batch = batch_of(seed)
    reward_N = batch.column("reward").clone()
    reward_N[[1, 4, 5, 6]] = torch.nan
    batch = replace(batch, per_row={"reward": reward_N})
    mine = objective(beta=0.3, normalize_advantages=normalised, reward_clip_range=bounds)
    found = evaluate(batch, mine, dtype=torch.float64).rows
    wanted, kl = [], []
    for reward, old, ref, mask in zip(
        reward_N.tolist(),
        *(
            oracles.cut(batch.column(name).tolist(), batch.rows.tolist())
            for name in ("old_log_probs", "ref_log_probs", "response_mask")
        ),
        strict=True,
    ):
        kl.append(sum(o - f for o, f, on in zip(old, ref, mask, strict=True) if on))
        clamped = reward if bounds is None or math.isnan(reward) else oracles.clipped(reward, *bounds)
        wanted.append(clamped - 0.3 * kl[-1])
    agree(found.score_N, wanted, torch.float64, "rewards", scale=1.0)
    advantages, groups = [], batch.groups.index_N.tolist()
    for row, score in enumerate(wanted):
        others = [
            wanted[other]
            for other in range(len(wanted))
            if other != row and groups[other] == groups[row] and not math.isnan(wanted[other])
        ]
        advantages.append(score - oracles.mean(others) if others else math.nan)
    known = [value for value in advantages if not math.isnan(value)]
    assert len(known) == 7  # a group of three, one of a single row, one of four
    if normalised:
        middle, spread = oracles.mean(known), oracles.std(known)
        advantages = [(value - middle) / (spread + 1e-4) for value in advantages]
    advantages = [0.0 if math.isnan(value) else value for value in advantages]
    agree(found.advantage_N, advantages, torch.float64, "advantages")
    tokens = float(batch.column("response_mask").sum())
    metrics = table.TRAINERS["trl-rloo"].metrics(evaluate(batch, mine, dtype=torch.float64))
    agree(metrics["kl"], sum(kl) / tokens, torch.float64, "kl", scale=1.0)
    known = [reward for reward in reward_N.tolist() if not math.isnan(reward)]
    agree(metrics["reward"], oracles.mean(known), torch.float64, "reward", scale=1.0)


def test_rejected_rows_lose_their_vote():
    batch = batch_of(2)
    fixed = choose("rejected-rows").apply(objective(beta=0.0))
    found = evaluate(batch, fixed).rows
    assert bool(found.rejected_N.any())
    assert found.in_baseline_N.tolist() == (~found.rejected_N).tolist()
    assert bool((found.advantage_N[found.rejected_N] == 0).all())
