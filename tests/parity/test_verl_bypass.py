"""The correction inside verl's bypass loss over micro-batches and ranks: the real loss on every rank at once.

Ranks are threads, and the collective that the loss calls is a sum over them, so that its mean over the ranks is
upstream's own code.
"""

from collections import defaultdict
from dataclasses import replace
from functools import cache
from threading import Barrier, Thread, local

import pytest
import torch
from parity.padded import pack, pad
from parity.test_verl_policy import CLIP, FACTOR, INSIDE, objective, parts_of
from proof.claims import DOUBLE, SINGLE

from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.results.errors import CannotComputeError
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.verl import trainer as verl

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

algos = pytest.importorskip("verl.trainer.ppo.core_algos")

TOLERANCE = {torch.float32: SINGLE, torch.float64: DOUBLE}
BOUNDS = {
    "token": {"rollout_is": "token", "rollout_is_threshold": 1.3, "rollout_is_batch_normalize": True},
    "token icepop": {"rollout_is": "token", "rollout_is_threshold": "0.8_1.2", "rollout_is_batch_normalize": True},
    "sequence": {"rollout_is": "sequence", "rollout_is_threshold": 1.5, "rollout_is_batch_normalize": True},
    "sequence, rejections": {
        "rollout_is": "sequence",
        "rollout_is_threshold": "0.1_9",
        "rollout_is_batch_normalize": True,
        "rollout_rs": "token_k1,seq_max_k3",
        "rollout_rs_threshold": "0.7_1.4,0.3",
    },
    "not normalised": {"rollout_is": "token", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.2},
}


@cache
def cut_batch(dtype):
    """Two mini-batches of three micro-batches on each of two ranks; no micro-batch is empty."""
    batch = random_batch(11, sizes=(6,) * 6, spread=0.25, longest=9, rejected=0.0, dtype=dtype)
    order = torch.arange(36)
    ids = {"micro_batch_id": order % 3, "rank": order // 3 % 2, "optim_step_id": (order >= 18).long()}
    return replace(batch, per_row={**batch.per_row, **ids})


class Ranks:
    """An all-reduce over threads, one for each rank."""

    def __init__(self, count):
        self.barrier, self.sums, self.own = Barrier(count), {}, local()

    def all_reduce(self, x, op=None):
        self.own.call = getattr(self.own, "call", 0) + 1
        self.sums.setdefault(self.own.call, []).append(x.clone())
        self.barrier.wait(300)
        total = sum(self.sums[self.own.call])
        self.barrier.wait(300)
        x.copy_(total)

    def run(self, tasks):
        failed = []

        def work(task):
            try:
                task()
            except BaseException as error:
                failed.append(error)
                self.barrier.abort()

        threads = [Thread(target=work, args=(task,)) for task in tasks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]


def upstream(monkeypatch, batch, advantage_T, inside, aggregation, dtype):
    """Loss, gradient and metrics of the step, as verl's engine and worker put them together."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.utils.metric import reduce_metrics
    from verl.utils.metric.utils import Metric
    from verl.workers.config import ActorConfig, PolicyLossConfig

    options = {"rollout_is": None, **inside}
    leaf = pad(batch, batch.column("policy_log_probs"), dtype).requires_grad_()
    rollout, advantages = (pad(batch, x_T, dtype) for x_T in (batch.column("rollout_log_probs"), advantage_T))
    mask = pad(batch, batch.column("response_mask"))
    total, logged = torch.zeros((), dtype=dtype), defaultdict(list)
    names = ("optim_step_id", "rank", "micro_batch_id")
    cells = [
        (rows, sizes, share, [int(batch.per_row[name][rows][0]) for name in names])
        for rows, sizes, share in parts_of(batch)
    ]
    for step in (0, 1):
        ranks = {rank: [cell for cell in cells if cell[3][:2] == [step, rank]] for rank in (0, 1)}
        losses, metrics = {}, {}

        def forward(rank, ranks=ranks, losses=losses, metrics=metrics):
            for rows, sizes, share, _ in ranks[rank]:
                config = ActorConfig(
                    strategy="fsdp",
                    rollout_n=1,
                    ppo_micro_batch_size_per_gpu=1,
                    policy_loss=PolicyLossConfig(rollout_correction=RolloutCorrectionConfig(**options)),
                    **CLIP,
                )
                config.global_batch_info.update(sizes)
                loss, found = algos.compute_policy_loss_bypass_mode(
                    rollout[rows], leaf[rows], advantages[rows], mask[rows], loss_agg_mode=aggregation, config=config
                )
                losses.setdefault(rank, []).append(share * loss)
                for name, metric in Metric.from_dict(found, aggregation="mean").items():
                    own = metrics.setdefault(rank, {})
                    own.setdefault(name, metric.init_list()).append(metric)

        together = Ranks(2)
        with monkeypatch.context() as patch:
            patch.setattr(torch.distributed, "is_initialized", lambda: True)
            patch.setattr(torch.distributed, "all_reduce", together.all_reduce)
            together.run([lambda rank=rank: forward(rank) for rank in (0, 1)])
        total = total + sum(sum(each) for each in losses.values())
        for name in metrics[0]:
            logged[name if name.startswith("actor/") else f"actor/{name}"].append(
                Metric.aggregate_dp([metrics[rank][name] for rank in (0, 1)])
            )
    total.backward()
    return total.item(), pack(batch, leaf.grad), reduce_metrics(dict(logged))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("loss_type", ["reinforce", "ppo_clip"])
@pytest.mark.parametrize("bounds", BOUNDS)
def test_micro_batches_and_ranks(monkeypatch, bounds, loss_type, aggregation, dtype):
    batch = cut_batch(dtype)
    inside = {"loss_type": loss_type, **BOUNDS[bounds]}
    mine = objective(
        loss_mode="bypass_mode",
        loss_agg_mode=aggregation,
        loss_scale_factor=FACTOR,
        **{"rollout_correction.bypass_mode": True},
        **{f"{INSIDE}.{name}": value for name, value in inside.items()},
    )
    found = evaluate(batch, mine, dtype=dtype, per_token=True)
    advantage_T = torch.repeat_interleave(found.rows.advantage_N, batch.rows.diff())
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        loss, grad_T, logged = upstream(monkeypatch, batch, advantage_T, inside, aggregation, dtype)
    finally:
        torch.set_default_dtype(before)
    mask_T, tolerance = batch.column("response_mask"), TOLERANCE[dtype]
    scale = float(found.per_token.loss_T.double().abs().sum())
    assert abs(found.policy_loss - loss) <= tolerance * scale
    worst = float((found.per_token.grad_T - grad_T).abs()[mask_T].max())
    assert worst <= tolerance * float(grad_T.abs().max())
    own = verl.metrics(found)
    wanted = {name: value for name, value in logged.items() if name.startswith("actor/rollout_corr/")}
    assert len(wanted) > 15
    assert {name for name in own if name.startswith("actor/rollout_corr/")} == set(wanted)
    for name, value in logged.items():
        # Roots of differences of means, and exp(x) - x - 1, cancel; shares are float32 upstream.
        loose = 1e-4 if name.endswith(("std", "k3_kl", "_k3_mean", "_k3_min")) and dtype == torch.float32 else 2e-6
        if dtype == torch.float64 and "fraction" not in name and "oob" not in name:
            loose = 1e-7 if name.endswith("std") else 1e-9
        assert own[name] == pytest.approx(value, rel=loose, abs=loose), name


def test_where_upstream_fails(monkeypatch):
    """A micro-batch without a token, or without a weight above 0, stops the real loss, and so it does here."""
    batch = cut_batch(torch.float64)
    names = {"loss_mode": "bypass_mode", "rollout_correction.bypass_mode": True}
    advantage_T = torch.ones(batch.tokens)
    dead_N = (batch.per_row["micro_batch_id"] == 1) & (batch.per_row["rank"] == 0)
    dead_T = torch.repeat_interleave(dead_N, batch.rows.diff())
    empty = replace(batch, per_token={**batch.per_token, "response_mask": batch.column("response_mask") & ~dead_T})
    with pytest.raises(ValueError, match="at least one valid token"):
        upstream(monkeypatch, empty, advantage_T, {"loss_type": "ppo_clip"}, "token-mean", torch.float64)
    with pytest.raises(CannotComputeError, match="at least one token in every micro-batch"):
        evaluate(empty, objective(**names))
    far = torch.where(dead_T, batch.column("rollout_log_probs") + 9, batch.column("rollout_log_probs"))
    drifted = replace(batch, per_token={**batch.per_token, "rollout_log_probs": far})
    inside = {"loss_type": "ppo_clip", "rollout_is": "token", "rollout_is_threshold": "0.1_3"}
    with pytest.raises(ZeroDivisionError):
        upstream(monkeypatch, drifted, advantage_T, inside, "token-mean", torch.float64)
    with pytest.raises(CannotComputeError, match="every importance weight of a micro-batch is 0"):
        evaluate(drifted, objective(**names, **{f"{INSIDE}.{name}": value for name, value in inside.items()}))


def test_without_micro_batches_nothing_is_guessed():
    """The mean of the weights is over a micro-batch, and so are the metrics."""
    batch = random_batch(3, sizes=(4, 4), rejected=0.0)
    named = {"loss_mode": "bypass_mode", "rollout_correction.bypass_mode": True, f"{INSIDE}.rollout_is": "token"}
    plain = evaluate(batch, objective(**named, **{f"{INSIDE}.loss_type": "reinforce"}))
    assert plain.tokens is not None
    assert not any("rollout_corr" in name for name in verl.metrics(plain))
    normal = {**named, f"{INSIDE}.loss_type": "reinforce", f"{INSIDE}.rollout_is_batch_normalize": True}
    assert evaluate(batch, objective(**normal)).tokens is None
