"""TRL's real `GRPOTrainer._compute_loss`, called micro-batch by micro-batch, against the packed code."""

from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from objectives import objective_of
from parity.padded import pack, pad, precision
from parity.trl_generation import evaluation_share, sampler_ratio
from proof.claims import agree, compared, covers, values_of

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.trl import grpo as trl
from rolloutdoctor.trainers.trl import metrics as trl_metrics

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), compared("package")]

WIDTH = 40
DTYPES = {"float32": torch.float32, "float64": torch.float64}
METRICS = (
    "kl",
    "entropy",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "clip_ratio/low_min",
    "clip_ratio/high_max",
    "cispo_clip_ratio",
    "vespo/phi_seq_mean",
)


@pytest.fixture(scope="module")
def trainer_class():
    return pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer


objective = partial(objective_of, "trl")


class Ranks:
    """The parts of accelerate that the loss uses, for one rank after another.

    A reduction over ranks needs what the other ranks have: `totals` collects it in a first pass and gives it in a
    second one.
    """

    def __init__(self, count: int) -> None:
        self.num_processes = count
        self.sync_gradients = True
        self.totals: list[torch.Tensor] | None = None
        self.seen: list[torch.Tensor] = []
        self.gathered: list[torch.Tensor] | None = None
        self.given: list[torch.Tensor] = []

    def reduce(self, value, reduction="sum"):
        self.seen.append(value)
        return value if self.totals is None else self.totals[len(self.seen) - 1]

    def gather(self, value):
        self.given.append(value)
        return value if self.gathered is None else self.gathered[len(self.given) - 1]

    gather_for_metrics = gather

    def pad_across_processes(self, value, **_):
        return value


SHAPES = {
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}


def stub(
    trainer_class, mine: Objective, options: dict, accumulation: int, per_generation: int, ranks: Ranks, training: bool
):
    """The attributes of a trainer that the loss reads."""
    return SimpleNamespace(
        accelerator=ranks,
        args=SimpleNamespace(
            use_bias_correction_kl=options.get("use_bias_correction_kl", True),
            delta=options.get("delta"),
            steps_per_generation=per_generation,
            **{name: options.get(name, default) for name, default in SHAPES.items()},
        ),
        model=SimpleNamespace(training=training),
        beta=options.get("beta", 0.0),
        loss_type=options["loss_type"],
        epsilon_low=mine.surrogate.clip_low,
        epsilon_high=mine.surrogate.clip_high,
        importance_sampling_level=options.get("importance_sampling_level", "token"),
        top_entropy_quantile=options.get("top_entropy_quantile", 1.0),
        off_policy_mask_threshold=options.get("off_policy_mask_threshold"),
        get_off_policy_mask=trainer_class.get_off_policy_mask,
        get_gamma_weights=trainer_class.get_gamma_weights,
        use_vllm=options.get("use_vllm", False),
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=accumulation,
        max_completion_length=WIDTH,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
    )


def upstream(
    trainer_class,
    batch: RolloutBatch,
    mine: Objective,
    options: dict,
    dtype,
    on_policy: bool,
    *,
    advantage_N=None,
    items=None,
):
    """Loss of the step, gradient and metrics, as TRL has them after all its optimizer steps.

    Advantages are recomputed ones where none are given; `items` is what the generation counted as its tokens.
    """
    part = {
        name: batch.per_row.get(name, torch.zeros(len(batch), dtype=torch.int64))
        for name in ("micro_batch_id", "optim_step_id", "rank")
    }
    optims = part["optim_step_id"].unique().tolist()
    ranks = part["rank"].unique().tolist()
    training = batch.split == "train"
    cells = torch.stack([part["optim_step_id"], part["micro_batch_id"]]).unique(dim=1).T.tolist()
    accumulation = len(cells) // len(optims)
    leaf = pad(batch, batch.column("policy_log_probs"), dtype).requires_grad_()
    old, ref = (pad(batch, batch.column(name), dtype) for name in ("old_log_probs", "ref_log_probs"))
    sampling = pad(batch, batch.column("rollout_log_probs"), dtype)
    entropy = pad(batch, batch.per_token.get("entropy", torch.zeros(batch.tokens)), dtype)
    mask = pad(batch, batch.column("response_mask"), torch.int64)
    if advantage_N is None:
        advantage_N = evaluate(batch, mine, dtype=dtype).rows.advantage_N.to(dtype)
    total, metrics = torch.zeros((), dtype=dtype), defaultdict(list)
    for optim, micro in cells:
        accelerator = Ranks(len(ranks))
        sums = []
        for attempt in ("count", "use"):
            seen, given = [], []
            for rank in ranks:
                here = (part["optim_step_id"] == optim) & (part["micro_batch_id"] == micro) & (part["rank"] == rank)
                accelerator.seen, accelerator.given = [], []
                self = stub(trainer_class, mine, options, accumulation, len(cells), accelerator, training)
                self._get_per_token_logps_and_entropies = lambda *_, here=here, **__: (
                    leaf[here],
                    entropy[here],
                    None,
                )
                counted = mask if training else mask[here]
                ids = torch.zeros_like(mask[here])
                inputs = {
                    "prompt_ids": ids[:, :1],
                    "prompt_mask": ids[:, :1] + 1,
                    "completion_ids": ids,
                    "completion_mask": mask[here],
                    "advantages": advantage_N[here],
                    "ref_per_token_logps": ref[here],
                    "num_items_in_batch": counted.sum() if items is None else torch.tensor(items),
                }
                if not on_policy:
                    inputs["old_per_token_logps"] = old[here]
                if options.get("use_vllm"):
                    inputs["sampling_per_token_logps"] = sampling[here]
                    inputs["importance_sampling_ratio"] = sampler_ratio(old[here], sampling[here], mask[here], options)
                self.get_high_entropy_mask = partial(trainer_class.get_high_entropy_mask, self)
                loss = trainer_class._compute_loss(self, None, inputs)
                seen.append(accelerator.seen)
                given.append(accelerator.given)
                if attempt == "use":
                    # The data-parallel wrapper averages over ranks; a logged step is the mean of its optimizer steps.
                    share = 1 / len(ranks) / len(optims) if training else evaluation_share(batch, micro)
                    total = total + loss * share
            if attempt == "count":
                sums = [torch.stack(column).sum(0) for column in zip(*seen, strict=True)]
                accelerator.totals = sums
                accelerator.gathered = [torch.cat(column) for column in zip(*given, strict=True)]
        for name, values in self._metrics[batch.split].items():
            metrics[name] += values
    total.backward()
    return total.item(), pack(batch, leaf.grad), {name: trl_metrics.nanmean(values) for name, values in metrics.items()}


def laid_out(batch: RolloutBatch, layout: str) -> RolloutBatch:
    """Cut 12 rows into micro-batches, optimizer steps and ranks."""
    cut = {
        "one": {},
        "accumulated": {"micro_batch_id": [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]},
        "two steps": {"micro_batch_id": [0, 0, 0, 1, 1, 1] * 2, "optim_step_id": [0] * 6 + [1] * 6},
        "counted through": {
            "micro_batch_id": [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3],
            "optim_step_id": [0] * 6 + [1] * 6,
        },
        "two ranks": {"micro_batch_id": [0, 0, 0, 1, 1, 1] * 2, "rank": [0] * 6 + [1] * 6},
        "ranks and steps": {
            "optim_step_id": [0] * 6 + [1] * 6,
            "micro_batch_id": [0] * 12,
            "rank": [0, 0, 0, 1, 1, 1] * 2,
        },
        "uneven": {"micro_batch_id": [0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3]},
    }[layout]
    columns = {name: torch.tensor(numbers) for name, numbers in cut.items()}
    return replace(batch, per_row={**batch.per_row, **columns})


VARIANTS = {
    "plain": {},
    "beta": {"beta": 0.04, "use_bias_correction_kl": False},
    "corrected": {"beta": 0.04, "use_bias_correction_kl": True},
    "delta": {"beta": 0.04, "delta": 1.5},
    "delta inside": {"delta": 1.1, "epsilon_high": 0.3},
    "high": {"beta": 0.04, "epsilon": 0.1, "epsilon_high": 0.4},
}
LAYOUTS = ("one", "uneven", "accumulated", "two steps", "counted through", "two ranks", "ranks and steps")


def marked(name, options):
    """A set of options as a parameter."""
    shown = {option: value for option, value in options.items() if isinstance(value, str | bool)}
    return pytest.param(name, marks=[covers("trl", option, value) for option, value in shown.items()], id=name)


def check(trainer_class, batch, options, dtype, *, on_policy=False):
    mine = objective(max_completion_length=WIDTH, **options)
    if on_policy:
        batch = replace(batch, per_token={k: v for k, v in batch.per_token.items() if k != "old_log_probs"})
    found = evaluate(batch, mine, dtype=dtype, per_token=True)
    with precision(dtype):
        loss, grad_T, metrics = upstream(trainer_class, batch, mine, options, dtype, on_policy)
    mask_T = batch.column("response_mask")
    scale = float(found.per_token.loss_T.double().abs().sum())
    agree(found.loss, loss, dtype, "loss", scale=scale)
    agree(found.per_token.grad_T, grad_T, dtype, "gradient", where=mask_T)
    assert bool((found.per_token.grad_T[~mask_T] == 0).all())
    own = trl.metrics(found)
    assert set(metrics) <= {*own, "entropy"}
    for name in METRICS:
        if name == "entropy" and name not in own:
            continue  # not logged per token
        assert (name in own) == (name in metrics)
        if name in own:
            agree(own[name], metrics[name], dtype, name, scale=max(1.0, abs(metrics[name])))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", [marked(variant, VARIANTS[variant]) for variant in VARIANTS])
@pytest.mark.parametrize("mode", values_of("trl", "loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"]))
def test_loss_gradient_metrics(trainer_class, mode, variant, layout, dtype):
    batch = laid_out(random_batch(len(variant), sizes=(4, 4, 4), adjacent=True, spread=0.4, empty=0.0), layout)
    check(trainer_class, batch, {"loss_type": mode, **VARIANTS[variant]}, dtype)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("mode", values_of("trl", "loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"]))
def test_on_policy_and_scales(trainer_class, mode, scale):
    """At a ratio of one both branches of the minimum are equal; unscored rows have no advantage."""
    batch = laid_out(random_batch(3, sizes=(4, 4, 4), adjacent=True, empty=0.0), "accumulated")
    reward_N = batch.per_row["reward"].clone()
    reward_N[[1, 4, 5, 6]] = torch.nan
    batch = replace(batch, per_row={**batch.per_row, "reward": reward_N})
    options = {"loss_type": mode, "beta": 0.1, "scale_rewards": scale}
    check(trainer_class, batch, options, torch.float64, on_policy=True)


LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
TOKEN_MASK = {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask"}
GATES = {
    "none": {},
    "off policy": {"off_policy_mask_threshold": 0.05},
    "entropy": {"top_entropy_quantile": 0.3},
    "token truncate": TOKEN_MASK | {"vllm_importance_sampling_mode": "token_truncate"},
    "token mask": TOKEN_MASK | {"vllm_importance_sampling_clip_max": 1.3, "vllm_importance_sampling_clip_min": 0.7},
    "sequence truncate": {"use_vllm": True, "vllm_importance_sampling_mode": "sequence_truncate"},
    "sequence mask": {
        "use_vllm": True,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 1.5,
    },
    "all": TOKEN_MASK | {"off_policy_mask_threshold": 0.05, "top_entropy_quantile": 0.6},
}


def gated_batch(seed: int, *, unknown: bool) -> RolloutBatch:
    """With entropies, and a sampler that gives none for some tokens."""
    batch = random_batch(seed, sizes=(4, 4, 4), adjacent=True, spread=0.4, empty=0.0, dtype=torch.float64)
    draw = torch.Generator().manual_seed(seed)
    entropy_T = torch.rand(batch.tokens, generator=draw).double()
    sampler_T = batch.column("rollout_log_probs")
    if unknown:
        sampler_T = torch.where(torch.rand(batch.tokens, generator=draw) < 0.1, torch.nan, sampler_T)
    columns = {"entropy": entropy_T, "rollout_log_probs": sampler_T}
    return replace(batch, per_token={**batch.per_token, **columns})


def in_single(batch: RolloutBatch) -> RolloutBatch:
    """The same numbers in float32."""
    columns = {
        name: column if column.dtype == torch.bool else column.float() for name, column in batch.per_token.items()
    }
    return replace(batch, per_token=columns)


@pytest.mark.parametrize(
    ("layout", "beta", "dtype"),
    [*product(("uneven", "ranks and steps"), (0.0, 0.1), (torch.float64,)), ("uneven", 0.1, torch.float32)],
)
@pytest.mark.parametrize("gate", [marked(gate, GATES[gate]) for gate in GATES])
@pytest.mark.parametrize("level", values_of("trl", "importance_sampling_level", ["token", "sequence"]))
@pytest.mark.parametrize("mode", values_of("trl", "loss_type", LOSS_TYPES))
def test_every_loss_level_and_gate(trainer_class, mode, level, gate, layout, beta, dtype):
    options = {"loss_type": mode, "importance_sampling_level": level, "beta": beta, **GATES[gate]}
    batch = laid_out(gated_batch(len(gate), unknown="use_vllm" in GATES[gate]), layout)
    check(trainer_class, batch if dtype == torch.float64 else in_single(batch), options, dtype)


@pytest.mark.parametrize("level", values_of("trl", "importance_sampling_level", ["token", "sequence"]))
@pytest.mark.parametrize("mode", values_of("trl", "loss_type", LOSS_TYPES))
def test_plain_kl_shapes_and_float32(trainer_class, mode, level):
    options = {"loss_type": mode, "importance_sampling_level": level, "beta": 0.1, "epsilon_high": 1.1}
    options |= {"sapo_temperature_pos": 1.7, "sapo_temperature_neg": 0.6, "vespo_k_pos": 1.2, "vespo_lambda_neg": 0.4}
    batch = laid_out(gated_batch(1, unknown=False), "accumulated")
    check(trainer_class, batch, options | {"use_bias_correction_kl": False}, torch.float64)
    check(trainer_class, in_single(batch), options, torch.float32)


@pytest.mark.parametrize("level", values_of("trl", "importance_sampling_level", ["token", "sequence"]))
@pytest.mark.parametrize("mode", values_of("trl", "loss_type", LOSS_TYPES))
def test_every_loss_in_evaluation(trainer_class, mode, level):
    batch = gated_batch(4, unknown=False)
    columns = {**batch.per_row, "micro_batch_id": torch.tensor([0] * 5 + [1] * 5 + [2] * 2)}
    options = {"loss_type": mode, "importance_sampling_level": level, "beta": 0.1}
    check(trainer_class, replace(batch, split="eval", per_row=columns), options, torch.float64)
