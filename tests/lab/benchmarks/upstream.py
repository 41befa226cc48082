"""Our functions against the trainers' own, which work on padded tensors.

``python tests/lab/benchmarks/upstream.py ours|theirs FILE`` is one side of the comparison of memory, as a process.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from measure import HERE, forget_peak, interleaved, memory_mib, ratio

OPTIONS = {"beta": 0.04, "loss_type": "grpo"}


def objective_of(trainer, options):
    from rolloutdoctor.trainers.options import Layer, resolve
    from rolloutdoctor.trainers.releases import parse_version
    from rolloutdoctor.trainers.table import find

    spec = find(trainer)
    return spec.objective(resolve(spec.options, parse_version(spec.newest), [Layer("", options)], trainer=trainer))


def ragged_batch(rows, *, group=16, longest=4096, seed=0):
    """Lengths as a run has them, 3 % rejected rows, ratios and KL of a policy that moves."""
    from rolloutdoctor.data.batch import RolloutBatch
    from rolloutdoctor.ops.groups import Groups

    draw = torch.Generator().manual_seed(seed)
    lengths = torch.empty(rows).log_normal_(6.4, 0.8, generator=draw).clamp(8, longest).long()
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    policy = -torch.empty(int(offsets[-1])).exponential_(2.0, generator=draw)
    near = {
        name: policy + scale * torch.randn(policy.shape, generator=draw)
        for name, scale in (("old_log_probs", 0.02), ("ref_log_probs", 0.1))
    }
    rejected = torch.rand(rows, generator=draw) < 0.03
    return RolloutBatch(
        step=0,
        rows=offsets,
        groups=Groups.of(torch.arange(rows) // group),
        per_row={"reward": (torch.rand(rows, generator=draw) < 0.5).double()},
        per_token={
            "response_mask": torch.repeat_interleave(~rejected, lengths),
            "policy_log_probs": policy,
            **near,
        },
    )


def padded(batch, name, dtype=torch.float32):
    """A token column as the matrix that the trainers hold, zeros to the right."""
    lengths = batch.rows.diff()
    there = torch.arange(int(lengths.max()), device=batch.device) < lengths[:, None]
    return torch.zeros(there.shape, dtype=dtype, device=batch.device).masked_scatter_(
        there, batch.column(name).to(dtype)
    )


def advantages(quick, folder):
    """verl's estimators; theirs sum token rewards over a row, ours count its trained tokens."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import numpy as np
    from verl.trainer.ppo import core_algos

    from rolloutdoctor.evaluation.rows import evaluate_rows

    rows, repeats = (8_192, 3) if quick else (32_768, 15)
    batch = ragged_batch(rows, longest=1024)
    mask = padded(batch, "response_mask")
    index = np.array([str(group) for group in batch.groups.index_N.tolist()], dtype=object)
    scores = torch.zeros_like(mask)
    scores[torch.arange(rows), batch.rows.diff() - 1] = batch.column("reward").float()
    for name in ("grpo", "rloo", "opo", "gpg"):
        objective, function = objective_of("verl", {"adv_estimator": name}), core_algos.get_adv_estimator_fn(name)
        # A new batch each time: what one evaluation learns of the mask is not kept for the next.
        fresh = [replace(batch) for _ in range(repeats)]
        slow, fast = interleaved(
            repeats,
            lambda function=function: function(
                token_level_rewards=scores, response_mask=mask, index=index, config=None
            ),
            lambda objective=objective, fresh=fresh: evaluate_rows(fresh.pop(), objective),
        )
        yield ratio(f"verl's `{name}`, {rows:,} rows of up to 1,024 tokens", "ours", slow / fast, ">= 50")


def theirs_on(batch):
    """TRL's own `_compute_loss` and its backward pass on the padded batch."""
    sys.path.insert(0, str(HERE.parents[1]))
    from parity.test_trl import Ranks, stub
    from trl.trainer.grpo_trainer import GRPOTrainer

    objective = objective_of("trl", OPTIONS)
    from rolloutdoctor.evaluation.rows import evaluate_rows

    advantage = evaluate_rows(batch, objective).advantage_N.float()
    self = stub(GRPOTrainer, objective, OPTIONS, 1, 1, Ranks(1), True)
    leaf, old, ref = (padded(batch, f"{name}_log_probs") for name in ("policy", "old", "ref"))
    leaf.requires_grad_()
    mask = padded(batch, "response_mask", torch.int64)
    self._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, leaf.new_zeros(()).expand(leaf.shape), None)
    inputs = {
        "prompt_ids": mask[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": advantage,
        "ref_per_token_logps": ref,
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }

    def work():
        leaf.grad = None
        loss = GRPOTrainer._compute_loss(self, None, inputs)
        loss.backward()
        return loss.item()

    return work


def verl_on(batch, kl_coef=0.001):
    """verl's own policy and KL loss and their backward pass on the padded batch."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    from rolloutdoctor.evaluation.rows import evaluate_rows

    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    leaf, old, ref = (padded(batch, f"{name}_log_probs") for name in ("policy", "old", "ref"))
    leaf.requires_grad_()
    mask = padded(batch, "response_mask")
    advantage = evaluate_rows(batch, objective_of("verl", {"adv_estimator": "grpo"})).advantage_N.float()
    advantage = (advantage[:, None] * mask).contiguous()

    def work():
        leaf.grad = None
        policy, _ = core_algos.compute_policy_loss_vanilla(
            old, leaf, advantage, mask, loss_agg_mode="token-mean", config=config
        )
        kl = core_algos.kl_penalty(leaf, ref, "low_var_kl")
        loss = policy + kl_coef * core_algos.agg_loss(loss_mat=kl, loss_mask=mask, loss_agg_mode="token-mean")
        loss.backward()
        return loss.item()

    return work


def ours_on(batch, trainer="trl", options=OPTIONS):
    from rolloutdoctor.evaluation.evaluate import evaluate

    objective = objective_of(trainer, options)
    return lambda: evaluate(replace(batch), objective).loss


def loss(quick, folder):
    """TRL's loss, KL and gradient; theirs on all cores, ours on one."""
    from rolloutdoctor.ops.evaluation_mode import evaluation_mode

    rows, repeats = (2_048, 3) if quick else (8_192, 5)
    batch = ragged_batch(rows)
    theirs, ours = theirs_on(batch), ours_on(batch)

    def alone():
        with evaluation_mode():
            return ours()

    assert abs(theirs() - alone()) < 1e-6
    slow, fast = interleaved(repeats, theirs, alone)
    what = f"TRL's loss, KL and gradient by autograd, {rows:,} rows, {batch.tokens / 1e6:.1f} M tokens"
    yield ratio(what, "ours", slow / fast, ">= 8")
    theirs, ours = (_extra_mib(side, rows) for side in ("theirs", "ours"))
    yield ratio("the memory of that, inputs included", "ours", theirs / ours, ">= 8")


def _extra_mib(side, rows):
    words = [sys.executable, str(Path(__file__)), side, str(rows)]
    return float(subprocess.run(words, capture_output=True, check=True, text=True).stdout)


def main():
    """One side as a process of its own: its peak memory beyond that of the imports."""

    import rolloutdoctor.evaluation.evaluate  # noqa: F401

    side, rows = sys.argv[1], int(sys.argv[2])
    before = memory_mib("VmRSS")
    forget_peak()
    {"ours": ours_on, "theirs": theirs_on}[side](ragged_batch(rows))()
    print(memory_mib("VmHWM") - before)


if __name__ == "__main__":
    main()
