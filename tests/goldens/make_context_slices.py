"""Make `data/context_slices.npz`: ``python tests/goldens/make_context_slices.py SLIME_0_3_1 SLIME_DD7F037 MILES``.

Each is a folder that holds the package of a checkout of THUDM/slime, or of radixark/miles at 31f1ca961a94. Advantages
are made by their own ``compute_advantages_and_returns`` and ``normalize_advantages`` in four processes, two replicas of
two context-parallel ranks or one of four, which exchange sums as they do upstream (gloo); questions of Megatron about
ranks are answered.
"""

import importlib
import json
import os
import sys
import tempfile
from argparse import Namespace
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch.multiprocessing as mp
from goldens.processor import note
from parity.real_slime import _OFF, DEFAULTS, _Absent, _method

DATA = Path(__file__).parent / "data" / "context_slices.npz"
WORLD = 4
CONFIGS = {
    "grpo": {},
    "grpo unscaled": {"grpo_std_normalization": False},
    "raw": {"rewards_normalization": False},
    "reinforce_plus_plus": {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1, "gamma": 0.97},
    "reinforce_plus_plus_baseline": {"advantage_estimator": "reinforce_plus_plus_baseline", "kl_coef": 0.1},
    "ppo": {"advantage_estimator": "ppo", "kl_coef": 0.1, "gamma": 0.97, "lambd": 0.9},
}
SIZE, ROWS = 4, 8


def drawn() -> dict[str, list]:
    """Eight rows: prompts and responses, some tokens masked, and a row of which one rank has nothing."""
    draw = torch.Generator().manual_seed(7)
    lengths = torch.randint(60, 90, (ROWS,), generator=draw)
    prompts = torch.randint(4, 40, (ROWS,), generator=draw)
    lengths[5], prompts[5] = 9, 140
    found: dict[str, list] = {
        "prompt_length": prompts.tolist(),
        "reward": [round(x, 3) for x in torch.rand(ROWS, generator=draw).tolist()],
        "response_mask": [], "old_log_probs": [], "ref_log_probs": [], "values": [],
    }  # fmt: skip
    for length in lengths.tolist():
        mask = (torch.rand(length, generator=draw) < 0.8).int()
        mask[0] = 1
        found["response_mask"].append(mask.tolist())
        policy = -torch.rand(length, generator=draw)
        given = {"old_log_probs": policy, "values": torch.randn(length, generator=draw)}
        given["ref_log_probs"] = policy + 0.1 * torch.randn(length, generator=draw)
        for name, values in given.items():
            found[name].append(values.tolist())
    return found


def arguments(config: str) -> Namespace:
    own = {"normalize_advantages": True, "n_samples_per_prompt": SIZE, "rollout_batch_size": ROWS // SIZE}
    return Namespace(**{**_OFF, **DEFAULTS, **own, **CONFIGS[config], "qkv_format": "thd"})


def advantages_of(root: Path, args: Namespace, data: dict, groups: dict) -> list:
    """Advantages of the slices of one rank, by the functions of slime or of miles."""
    cp_rank, cp_size = groups["cp_rank"], groups["cp_size"]
    if (root / "slime").is_dir():
        mpu = importlib.import_module("megatron.core.mpu")
        answers = {
            "is_pipeline_last_stage": True, "get_context_parallel_rank": cp_rank,
            "get_context_parallel_world_size": cp_size, "get_context_parallel_group": groups["cp"],
            "get_tensor_model_parallel_rank": 0, "get_tensor_model_parallel_world_size": 1,
        }  # fmt: skip
        for name, value in answers.items():
            setattr(mpu, name, lambda *args, _value=value, **kwargs: _value)
        group_of = {True: groups["all"], False: groups["dp"]}
        mpu.get_data_parallel_group = lambda with_context_parallel=False: group_of[with_context_parallel]
        importlib.import_module("megatron.core").mpu = mpu
        cut = importlib.import_module("slime.backends.megatron_utils.cp_utils").slice_log_prob_with_cp
        made = importlib.import_module("slime.backends.megatron_utils.loss").compute_advantages_and_returns
        sliced = {
            name: [cut(torch.tensor(x), *size) for x, size in zip(data[name], data["sizes"], strict=True)]
            for name in ("log_probs", "ref_log_probs", "values")
        }
        totals, lengths = map(list, zip(*data["sizes"], strict=True))
        rollout = {**data, **sliced, "total_lengths": totals, "response_lengths": lengths}
        rollout["loss_masks"] = [torch.tensor(x) for x in data["loss_masks"]]
        made(args, rollout)
        return [x.tolist() for x in rollout["advantages"]]
    return advantages_of_miles(args, data, groups)


def advantages_of_miles(args: Namespace, data: dict, groups: dict) -> list:
    state = importlib.import_module("miles.backends.training_utils.parallel")
    one = Namespace(rank=0, size=1, group=None)
    state.set_parallel_state(
        state.ParallelState(
            **dict.fromkeys(("tp", "pp", "ep", "etp", "indep_dp"), one),
            intra_dp=Namespace(rank=groups["dp_rank"], size=WORLD // groups["cp_size"], group=groups["dp"]),
            intra_dp_cp=Namespace(rank=groups["rank"], size=WORLD, group=groups["all"]),
            cp=Namespace(rank=groups["cp_rank"], size=groups["cp_size"], group=groups["cp"]),
        )
    )
    cut = importlib.import_module("miles.backends.training_utils.cp_utils").slice_log_prob_with_cp
    hub = importlib.import_module("miles.backends.training_utils.loss_hub.advantages")
    kl_of = importlib.import_module("miles.backends.training_utils.loss_hub.math_utils").compute_approx_kl
    names = ("log_probs", "ref_log_probs", "values")
    policy, ref, values = (
        [cut(torch.tensor(x), *size) for x, size in zip(data[name], data["sizes"], strict=True)] for name in names
    )
    both = zip(policy, ref, strict=True)
    kl = [kl_of(a, b, kl_loss_type=args.kl_loss_type) if args.kl_coef else 0 * a for a, b in both]
    totals, lengths = map(list, zip(*data["sizes"], strict=True))
    masks = [torch.tensor(x) for x in data["loss_masks"]]
    found, _ = hub.compute_advantages(args, kl, data["rewards"], policy, masks, totals, lengths, values)
    return [x.tolist() for x in hub.normalize_advantages(args, found, masks, totals, lengths)]


def worker(rank: int, root: Path, cp_size: int, rows: dict, folder: str) -> None:
    """One rank: every second row, and the slices of it that are its own."""
    sys.meta_path.append(_Absent())
    sys.path.insert(0, str(root))
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    cp_rank, dp_rank = rank % cp_size, rank // cp_size
    everyone, replicas = range(WORLD), WORLD // cp_size
    groups = {"all": dist.new_group(list(everyone)), "rank": rank, "cp_rank": cp_rank, "dp_rank": dp_rank}
    groups |= {"cp_size": cp_size}
    for name, number in (("dp", cp_size), ("cp", replicas)):
        made = [
            dist.new_group([one for one in everyone if (one % cp_size if name == "dp" else one // cp_size) == part])
            for part in range(number)
        ]
        groups[name] = made[cp_rank if name == "dp" else dp_rank]
    found = {}
    for config in CONFIGS:
        args, data = arguments(config), {}
        mine = list(range(dp_rank, ROWS, replicas))
        data["sizes"] = [(rows["prompt_length"][i] + len(rows["values"][i]), len(rows["values"][i])) for i in mine]
        data["rewards"] = [rows["rewards"][config][i] for i in mine]
        for name, column in (("log_probs", "old_log_probs"), ("loss_masks", "response_mask")):
            data[name] = [rows[column][i] for i in mine]
        for name in ("ref_log_probs", "values"):
            data[name] = [rows[name][i] for i in mine]
        made = advantages_of(root, args, data, groups)
        found[config] = {str(i): x for i, x in zip(mine, made, strict=True)}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def rewards_of(slime: Path, rows: dict) -> dict[str, list[float]]:
    """What slime's rollout manager makes of the rewards; miles' gives the same for groups of one row a rollout."""
    method = _method(slime / "slime/ray/rollout.py", "_post_process_rewards")
    found = {}
    for config in CONFIGS:
        owner = Namespace(args=arguments(config), custom_reward_post_process_func=None)
        samples = [Namespace(get_reward_value=lambda args, value=value: value) for value in rows["reward"]]
        found[config] = method(owner, samples)[1]
    return found


def run(root: Path, cp_size: int, rows: dict) -> dict[str, list[list[float]]]:
    """Advantages of every row by configuration, the slices of its ranks in the order of their tokens."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (root, cp_size, rows, folder), nprocs=WORLD)
        parts = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(WORLD)]
    found = {}
    for config in CONFIGS:
        found[config] = []
        for row in range(ROWS):
            first = row % (WORLD // cp_size) * cp_size
            ranks = [parts[first + cp_rank][config][str(row)] for cp_rank in range(cp_size)]
            found[config].append(joined(ranks, rows["prompt_length"][row], len(rows["values"][row]), cp_size))
    return found


def joined(ranks: list[list[float]], prompt: int, length: int, cp_size: int) -> list[float]:
    """One row of its slices: position by position, asking which rank has the chunk of what predicts it."""
    chunk, taken, row = -(-(prompt + length) // (2 * cp_size)), [0] * cp_size, []
    for place in range(prompt, prompt + length):
        number = (place - 1) // chunk
        rank = min(number, 2 * cp_size - 1 - number)
        row.append(ranks[rank][taken[rank]])
        taken[rank] += 1
    assert taken == [len(each) for each in ranks]
    return row


def main(before: Path, after: Path, miles: Path) -> None:
    rows = drawn()
    rows["rewards"] = rewards_of(before, rows)
    results = {
        f"{name} cp{cp_size}": run(root, cp_size, rows)
        for name, root in (("slime@0.3.1", before), ("slime@0.3.2", after), ("miles@0.1.0", miles))
        for cp_size in (2, 4)
    }
    flat = {
        f"{made}|{config}": [*chain.from_iterable(found)]
        for made, each in results.items()
        for config, found in each.items()
    }
    flat |= {
        name: [*chain.from_iterable(rows[name])]
        for name in ("old_log_probs", "ref_log_probs", "values", "response_mask")
    }
    flat |= {name: rows[name] for name in ("reward", "prompt_length")}
    flat["lengths"] = [len(each) for each in rows["values"]]
    np.savez_compressed(DATA, **{name: np.array(x, np.float32) for name, x in flat.items()})
    note(DATA)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(*map(Path, sys.argv[1:4]))
