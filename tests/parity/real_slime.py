"""Steps made by slime's real code in float32: normalised rewards, advantages, the loss, and what is logged of each.

slime imports Megatron, an inference engine and a logger, none of which its arithmetic needs. So its files are read from
a checkout, Megatron's questions about ranks are answered for one rank, and what else is absent is an empty module. The
policy's log-probs stand for what a model would give; everything after them is slime's own.
"""

import ast
import importlib
import importlib.abc
import importlib.machinery
import sys
import tempfile
import types
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
from parity.real_setup import GROUPS, SIZE, Fault, Setup, Step
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch

_ABSENT = (
    "deep_ep",
    "httpx",
    "megatron",
    "ray",
    "sglang",
    "sglang_router",
    "torch_memory_saver",
    "transformers",
    "wandb",
)

_ONE_RANK = {
    "get_context_parallel_rank": 0,
    "get_context_parallel_world_size": 1,
    "get_data_parallel_group": None,
    "get_data_parallel_group_gloo": None,
    "get_data_parallel_src_rank": 0,
    "get_data_parallel_world_size": 1,
    "get_tensor_model_parallel_rank": 0,
    "get_tensor_model_parallel_world_size": 1,
    "is_pipeline_last_stage": True,
}

DEFAULTS = {
    "advantage_estimator": "grpo",
    "kl_coef": 0.0,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "k1",
    "use_unbiased_kl": False,
    "eps_clip": 0.2,
    "eps_clip_high": None,
    "eps_clip_c": None,
    "gamma": 1.0,
    "lambd": 1.0,
    "normalize_advantages": False,
    "rewards_normalization": True,
    "grpo_std_normalization": True,
    "calculate_per_token_loss": False,
    "use_rollout_logprobs": False,
    "entropy_coef": 0.0,
}
"""slime's own defaults of what a setup may state."""

_OFF = {
    "allgather_cp": False,
    "ci_test": False,
    "custom_advantage_function_path": None,
    "custom_pg_loss_reducer_function_path": None,
    "get_mismatch_metrics": False,
    "log_correct_samples": False,
    "log_multi_turn": False,
    "log_passrate": False,
    "loss_type": "policy_loss",
    "n_samples_per_prompt": SIZE,
    "recompute_loss_function": False,
    "rollout_batch_size": GROUPS,
    "rollout_top_p": 1.0,
    "use_opd": False,
    "use_opsm": False,
    "use_tis": False,
}


class _Empty(types.ModuleType):
    """A module in which every name is a class without anything."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in _ABSENT:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Empty(spec.name)

    def exec_module(self, module):
        return None


@dataclass(frozen=True)
class Slime:
    """slime's own modules.

    Attributes:
        loss: of the advantages and the loss.
        data: of the log of the rollout.
        sums: of the log of the loss.
        rewards: the method that normalises rewards, as a function of its object and the samples.
    """

    loss: types.ModuleType
    data: types.ModuleType
    sums: types.ModuleType
    rewards: types.FunctionType


@contextmanager
def slime_of(checkout: Path) -> Iterator[Slime]:
    """Import slime from a checkout, for a while.

    Args:
        checkout: folder that holds the package `slime` of release 0.3.1.
    """
    before = set(sys.modules)
    finder = _Absent()
    sys.meta_path.append(finder)
    sys.path.insert(0, str(checkout))
    try:
        mpu = importlib.import_module("megatron.core.mpu")
        for name, value in _ONE_RANK.items():
            setattr(mpu, name, lambda *args, _value=value, **kwargs: _value)
        importlib.import_module("megatron.core").mpu = mpu
        package = "slime.backends.megatron_utils"
        loss, data, sums = (importlib.import_module(f"{package}.{name}") for name in ("loss", "data", "cp_utils"))
        with tempfile.TemporaryDirectory() as folder:
            torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/one", rank=0, world_size=1)
            try:
                yield Slime(loss, data, sums, _method(checkout / "slime/ray/rollout.py", "_post_process_rewards"))
            finally:
                torch.distributed.destroy_process_group()
    finally:
        sys.path.remove(str(checkout))
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in (*_ABSENT, "slime"):
                del sys.modules[name]


def _method(file: Path, name: str) -> types.FunctionType:
    """One method of a file that cannot be imported, as a function."""
    tree = ast.parse(file.read_text())
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    for argument in found.args.args:
        argument.annotation = None
    scope: dict[str, object] = {"torch": torch}
    exec(compile(ast.Module([found], []), str(file), "exec"), scope)
    return scope[name]


def arguments(options: Mapping[str, object]) -> Namespace:
    """slime's arguments."""
    given = {**_OFF, **DEFAULTS, **options}
    given["eps_clip_high"] = given["eps_clip"] if given["eps_clip_high"] is None else given["eps_clip_high"]
    return Namespace(**given)


def _lists(batch: RolloutBatch, name: str) -> list[Tensor]:
    return [x_T.clone() for x_T in batch.column(name).split(batch.rows.diff().tolist())]


def _rollout_data(batch: RolloutBatch, rewards: list[float], raw: list[float], args: Namespace) -> dict:
    """What slime's rollout manager gives to the trainer, with the log-probs and values that the trainer adds."""
    lengths = batch.rows.diff().tolist()
    masks = [mask.int() for mask in _lists(batch, "response_mask")]
    data = {
        "tokens": [torch.zeros(1 + length, dtype=torch.int64) for length in lengths],
        "response_lengths": lengths,
        "rewards": rewards,
        "raw_reward": raw,
        "truncated": [int(status == "length") for status in batch.statuses or ()],
        "loss_masks": masks,
        "rollout_mask_sums": [mask.sum() for mask in masks],
        "total_lengths": [1 + length for length in lengths],
        "global_batch_sizes": [len(batch)],
        "log_probs": _lists(batch, "old_log_probs"),
        "rollout_log_probs": _lists(batch, "rollout_log_probs"),
    }
    if args.kl_coef or args.use_kl_loss:
        data["ref_log_probs"] = _lists(batch, "ref_log_probs")
    if args.advantage_estimator == "ppo":
        data["values"] = _lists(batch, "values")
    return data


def _logged_rollout(slime: Slime, args: Namespace, data: dict) -> dict[str, float]:
    found: dict[str, float] = {}

    def log(args, metrics, step_key):
        found.update(metrics)

    with (
        mock.patch.object(slime.data.logging_utils, "log", log),
        mock.patch.object(slime.data, "compute_rollout_step", lambda args, rollout_id: rollout_id),
    ):
        slime.data.log_rollout_data(0, args, data)
    return {name: value for name, value in found.items() if name not in ("rollout/step", "rollout/total_lengths")}


def _update(slime: Slime, args: Namespace, batch: RolloutBatch, data: dict) -> dict[str, float]:
    """What slime logs of the loss: every micro-batch, then the step."""
    micro_N = batch.per_row.get("micro_batch_id", torch.zeros(len(batch), dtype=torch.int64))
    policy, entropy = _lists(batch, "policy_log_probs"), _lists(batch, "entropy")
    given = {"log_probs": "old_log_probs", "rollout_log_probs": "rollout_log_probs", "ref_log_probs": "ref_log_probs"}
    seen = {**data, **{name: _lists(batch, column) for name, column in given.items() if name in data}}
    parts = []
    for micro in micro_N.unique().tolist():
        rows = (micro_N == micro).nonzero()[:, 0].tolist()
        cell = {name: [x[row] for row in rows] for name, x in seen.items() if len(x) == len(batch)}
        cell["unconcat_tokens"] = cell["tokens"]
        made = {"log_probs": [policy[row] for row in rows], "entropy": [entropy[row] for row in rows]}
        with mock.patch.object(
            slime.loss, "get_log_probs_and_entropy", lambda *args, _made=made, **kwargs: (None, _made)
        ):
            _, _, log = slime.loss.loss_function(args, cell, len(micro_N.unique()), len(batch), torch.zeros(1))
        parts.append(log)
    found = slime.sums.reduce_train_step_metrics(
        parts,
        calculate_per_token_loss=args.calculate_per_token_loss,
        step_global_batch_size=len(batch),
        cp_size=1,
        dp_with_cp_group=None,
    )
    return {f"train/{name}": value for name, value in found.items()}


def slime_step(slime: Slime, setup: Setup, batch: RolloutBatch, fault: Fault) -> Step:
    """slime: normalised rewards, the estimator, the log of the rollout, the loss."""
    options = {**setup.options, **fault.options}
    args = arguments(options)
    seen = batch if fault.scoring is None else fault.scoring(batch)
    source = list(range(len(batch))) if fault.order is None else fault.order(batch).tolist()
    raw = seen.column("reward").tolist()
    with fault.patched():
        owner = Namespace(args=args, custom_reward_post_process_func=None)
        samples = [Namespace(get_reward_value=lambda args, value=raw[row]: value) for row in source]
        _, ordered = slime.rewards(owner, samples)
        rewards = [0.0] * len(batch)
        for place, row in enumerate(source):
            rewards[row] = ordered[place]
        data = _rollout_data(seen, rewards, raw, args)
        slime.loss.compute_advantages_and_returns(args, data)
        advantages = data["advantages"]
        metrics = _logged_rollout(slime, args, data)

    def update(rows: RolloutBatch) -> dict[str, float]:
        return _update(slime, args, rows, {**data, "advantages": advantages})

    metrics |= update(batch if fault.update is None else fault.update(batch))
    if fault.log is not None:
        metrics = fault.log(metrics, update, batch)
    advantage_T = torch.cat(advantages)
    return replace(batch, per_token={**batch.per_token, "advantages": advantage_T}), metrics
