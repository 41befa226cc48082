"""Call the functions of older verl releases and store what they give: `make_verl_releases.py FOLDER`.

FOLDER has a folder for each release, with its package `verl`. Every release runs in a process of its own, with stubs
for what it imports and these functions do not use; the actor's forward pass gives log-probs from a table.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from goldens import trl_releases
from goldens import verl_releases as releases
from goldens.processor import note
from parity.padded import pack, pad, precision

from rolloutdoctor.trainers.releases import parse_version

DTYPES = {"f64": torch.float64, "f32": torch.float32}
PROMPT = 1
PARTS = {
    "fastapi": ("fastapi", "fastapi.responses"),
    "starlette": ("starlette", "starlette.requests", "starlette.responses"),
    "openai": ("openai", "openai.types", "openai.types.chat", "openai.types.chat.chat_completion"),
    "torchdata": ("torchdata", "torchdata.stateful_dataloader"),
}
"""Modules of a package that the old releases import."""


def stub_imports(at: tuple[int, ...]) -> None:
    """What the old releases import and these functions never call."""
    import transformers

    if "AutoModelForVision2Seq" not in dir(transformers):
        transformers.AutoModelForVision2Seq = None
    torch.cuda.current_device = lambda: "cpu"
    for name in ("aiohttp", "uvicorn", "fastapi", "starlette", "openai", "torchdata", "sglang", "vllm"):
        if importlib.util.find_spec(name) is None:
            for part in PARTS.get(name, (name,)):
                sys.modules[part] = MagicMock(__spec__=ModuleSpec(part, None))
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(torch.cpu, name, lambda *_: 0)
    torch.cpu.mem_get_info = lambda *_: (0, 0)
    if at >= (0, 5):
        return
    names = ("index_first_axis", "pad_input", "rearrange", "unpad_input")
    for name in ("flash_attn", "flash_attn.bert_padding", "flash_attn.ops", "flash_attn.ops.triton"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    for name in names:
        setattr(sys.modules["flash_attn.bert_padding"], name, None)
    cross = types.ModuleType("flash_attn.ops.triton.cross_entropy")
    cross.cross_entropy_loss = None
    sys.modules[cross.__name__] = cross
    packages = types.ModuleType("pkg_resources")
    packages.DistributionNotFound = type("DistributionNotFound", (Exception,), {})

    def missing(name: str) -> None:
        raise packages.DistributionNotFound(name)

    packages.get_distribution = missing
    sys.modules["pkg_resources"] = packages


class Settings(dict):
    """A configuration with attributes."""

    def __getattribute__(self, name: str):
        return self[name] if name in self else super().__getattribute__(name)


def settings_class(at: tuple[int, ...]) -> type:
    """A class that the actor of a release takes for its configuration."""
    if at < (0, 6):
        return Settings
    from verl.workers.config import ActorConfig

    return type("ActorSettings", (Settings, ActorConfig), {"__init__": dict.__init__})


def advantages(release: str, batch, options: dict, dtype: torch.dtype) -> torch.Tensor:
    """Advantages of every response token, ``[T]``."""
    from verl.trainer.ppo import core_algos

    at = parse_version(release)
    mask = pad(batch, batch.column("response_mask"), dtype)
    reward = torch.zeros_like(mask)
    if "token_rewards" in batch.per_token:
        reward = pad(batch, batch.column("token_rewards"), dtype)
    else:
        last_N = (batch.rows.diff() - 1).tolist()
        for row, last in enumerate(last_N):
            if last >= 0:
                reward[row, last] = batch.per_row["reward"][row].to(dtype)
    if options.get("kl_ctrl.kl_coef"):
        reward = penalised(batch, reward, mask, options)
    index = np.array([batch.group_ids[group] for group in batch.groups.index_N.tolist()], dtype=object)
    name = options["adv_estimator"]
    settings = Settings(
        gamma=options.get("gamma", 1.0),
        lam=options.get("lam", 1.0),
        norm_adv_by_std_in_grpo=options.get("norm_adv_by_std_in_grpo", True),
    )
    of_mask = "eos_mask" if at < (0, 4) else "response_mask"
    given = {"token_level_rewards": reward, of_mask: mask}
    configured = {} if at < (0, 4, 1) else {"config": settings}
    if name in ("grpo", "grpo_vectorized"):
        flag = {} if at < (0, 4) else {"norm_adv_by_std_in_grpo": settings.norm_adv_by_std_in_grpo}
        given |= {"index": index, **flag}
    elif name == "grpo_passk":
        given |= {"index": index, **configured}
        if at < (0, 4, 1):
            given["norm_adv_by_std_in_grpo"] = True
    elif name == "gae":
        values = pad(batch, batch.column("values"), dtype)
        given |= {"values": values, "gamma": settings.gamma, "lam": settings.lam}
    elif name == "remax":
        given |= {"reward_baselines": batch.per_row["reward_baseline"].to(dtype), **configured}
    elif name == "reinforce_plus_plus":
        given |= {"gamma": settings.gamma} if at < (0, 4, 1) else configured
    else:
        given |= {"index": index, **configured}
    function = "compute_gae_advantage_return" if name == "gae" else f"compute_{name}_outcome_advantage"
    with precision(dtype):
        found = getattr(core_algos, function)(**given)[0]
    return pack(batch, found)


def penalised(batch, reward: torch.Tensor, mask: torch.Tensor, options: dict) -> torch.Tensor:
    """Token rewards less the KL penalty."""
    from verl import DataProto
    from verl.trainer.ppo.core_algos import FixedKLController
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty

    cells = {
        "responses": torch.zeros(mask.shape, dtype=torch.int64),
        "attention_mask": torch.cat([torch.ones(len(mask), PROMPT, dtype=torch.int64), mask.long()], 1),
        "response_mask": mask,
        "token_level_scores": reward,
        "old_log_probs": pad(batch, batch.column("old_log_probs"), reward.dtype),
        "ref_log_prob": pad(batch, batch.column("ref_log_probs"), reward.dtype),
    }
    with precision(reward.dtype):
        data = DataProto.from_dict(cells)
        control = FixedKLController(options["kl_ctrl.kl_coef"])
        return apply_kl_penalty(data, control, options["kl_penalty"])[0].batch["token_level_rewards"]


def loss(release: str, batch, options: dict, advantage_T: torch.Tensor, dtype: torch.dtype):
    """Loss and gradient of the step as the real `update_policy` has them, and the micro-batch of every row."""
    from verl import DataProto
    from verl.workers.actor.dp_actor import DataParallelPPOActor

    at = parse_version(release)
    leaf = pad(batch, batch.column("policy_log_probs"), dtype).requires_grad_()
    width = leaf.shape[1]
    filled = pad(batch, torch.ones(batch.tokens, dtype=torch.int64))
    mask = pad(batch, batch.column("response_mask"), torch.int64)
    # Older actors take the mask from the attention of the responses.
    attention = torch.cat([torch.ones(len(batch), PROMPT, dtype=torch.int64), mask], 1)
    ids = torch.arange(len(batch))[:, None].expand(-1, width).contiguous()
    cells = {
        "responses": ids,
        "response_mask": mask,
        "input_ids": torch.zeros_like(attention),
        "attention_mask": attention,
        "position_ids": torch.zeros_like(attention),
        "old_log_probs": pad(batch, batch.column("old_log_probs"), dtype),
        "ref_log_prob": pad(batch, batch.column("ref_log_probs"), dtype),
        "advantages": pad(batch, advantage_T, dtype),
        "prompts": torch.zeros(len(batch), PROMPT, dtype=torch.int64),
    }
    assert filled.shape == mask.shape
    actor_options = {key: value for key, value in options.items() if key not in ("adv_estimator",) and "." not in key}
    nested = {key.partition(".")[2]: value for key, value in options.items() if "." in key}
    rows_of_mini = len(batch) // releases.RANKS // releases.MINI
    config = settings_class(at)(
        ppo_mini_batch_size=rows_of_mini,
        ppo_micro_batch_size_per_gpu=rows_of_mini // releases.MICRO,
        ppo_max_token_len_per_gpu=width + PROMPT + releases.FEW_TOKENS,
        ulysses_sequence_parallel_size=1,
        ppo_epochs=1,
        use_dynamic_bsz=False,
        use_kl_loss=False,
        kl_loss_coef=0.001,
        kl_loss_type="low_var_kl",
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        clip_ratio_c=3.0,
        loss_agg_mode="token-mean",
        entropy_coeff=0,
        calculate_entropy=False,
        tau_pos=1.0,
        tau_neg=1.05,
        global_batch_info={},
        policy_loss=Settings(loss_mode="vanilla"),
    )
    config.update(actor_options)
    config["policy_loss"] = Settings(loss_mode="vanilla", **nested) if "loss_mode" not in nested else Settings(nested)
    micro_N, step, seen = torch.zeros(len(batch), dtype=torch.int64), [0, 0], []

    def forward(self, micro_batch, temperature, calculate_entropy=False):
        places = micro_batch["responses"][:, 0]
        micro_N[places] = step[0]
        step[0] += 1
        log_prob = leaf[places]
        entropy = torch.zeros_like(log_prob)
        return {"log_probs": log_prob, "entropys": entropy} if at >= (0, 7, 1) else (entropy, log_prob)

    class Actor(DataParallelPPOActor):
        _forward_micro_batch = forward

        def __init__(self) -> None:
            self.config = config
            self.actor_module = torch.nn.Identity()
            self.actor_optimizer = SimpleNamespace(zero_grad=lambda: None)
            self.ulysses_sequence_parallel_size = 1
            self.use_prefix_grouper = self.calculate_sum_pi_squared = self.use_dynamic_bsz = False
            self.scaler = None

        def _optimizer_step(self):
            # One gradient for all mini-batches: each is a loss of its own, and they are averaged.
            step[1] += 1
            return torch.zeros(())

    actor = Actor()
    for rank in range(releases.RANKS):
        rows = batch.per_row["rank"] == rank
        data = DataProto.from_dict({name: value[rows] for name, value in cells.items()})
        data.meta_info = {"temperature": 1.0, "multi_turn": False}
        step[0] = 0
        with precision(dtype):
            # Losses are not returned; what they add up to shows in the gradient of a factor.
            seen.append(actor.update_policy(data))
    grad = leaf.grad / releases.RANKS / releases.MINI
    return pack(batch, grad), micro_N, seen


def one_release(release: str, out: str) -> None:
    """Results of a release, to a file."""
    stub_imports(parse_version(release))
    found: dict[str, np.ndarray] = {}
    for kind, _, case, name, options in [entry for entry in releases.entries() if entry[1] == release]:
        batch = releases.step_of(case)
        words = f"{kind}/{case}/{name}"
        for label, dtype in DTYPES.items():
            adv_T = advantages(release, batch, options, dtype)
            if kind == "advantages":
                found[f"{words}/{label}/advantages"] = adv_T.double().numpy()
                continue
            grad_T, micro_N, _ = loss(release, batch, options, adv_T, dtype)
            sums = [*trl_releases.projections(grad_T), grad_T.double().abs().sum()]
            found[f"{words}/{label}/grad"] = torch.stack(sums).numpy()
            found[f"{words}/{label}/micro"] = micro_N.double().numpy()
    np.savez(out, **found)


def main(folder: str) -> None:
    values: list[float] = []
    places: dict[bytes, tuple[int, int]] = {}
    index: dict[str, dict] = {}
    for release in releases.RELEASES:
        with tempfile.NamedTemporaryFile(suffix=".npz") as file:
            environment = {**os.environ, "PYTHONPATH": str(Path(folder) / release)}
            subprocess.run([sys.executable, "-W", "ignore", __file__, release, file.name], env=environment, check=True)
            with np.load(file.name) as arrays:
                for key in arrays.files:
                    data = np.ascontiguousarray(arrays[key]).tobytes()
                    if data not in places:
                        places[data] = (len(values), arrays[key].size)
                        values += arrays[key].tolist()
                    index[f"{release}/{key}"] = places[data]
        print(release, len(values))
    np.savez_compressed(
        releases.FILE, values=np.array(values), index=np.frombuffer(json.dumps(index).encode(), dtype=np.uint8)
    )
    note(releases.FILE)


if __name__ == "__main__":
    main(sys.argv[1]) if len(sys.argv) == 2 else one_release(*sys.argv[1:])
