"""Make `data/drawn_rows.npz`: ``python tests/goldens/make_drawn_rows.py``, with verl 0.9.1 installed.

Advantages, returns and masks are those that ``PPOTrainer._compute_advantage`` of verl's V1 trainer writes back with
`use_pf_ppo`, its store of rows being a dict; metrics are those of ``compute_data_metrics`` on what the store has then.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from goldens.processor import note

DATA = Path(__file__).parent / "data" / "drawn_rows.npz"
DTYPES = {"f64": torch.float64, "f32": torch.float32}
ROWS = 12
ENDS = ("mean", "max", "min")
METHODS = {"pow": 2.0, "max_min": 2.0, "max_random": 2.0}
DISCOUNTS = {"plain": (1.0, 1.0), "gae": (0.99, 0.95)}
SETTINGS = {"advantages": {}, "masks": {"sampler": True}, "penalty": {"kl": True}, "bypass": {"bypass": True}}
CASES = [
    *product(("pow",), DISCOUNTS, SETTINGS),
    *product(("max_min", "max_random"), ("gae",), ("advantages", "masks")),
]

LOGGED = [
    *(f"critic/{what}/{end}" for what in ("score", "rewards", "advantages", "returns", "values") for end in ENDS),
    "critic/vf_explained_var",
]


def drawn() -> dict[str, list]:
    """Rows of unequal lengths, some with masked spans and masked ends, some of equal reward."""
    draw = torch.Generator().manual_seed(11)
    lengths = torch.randint(3, 15, (ROWS,), generator=draw).tolist()
    rewards = [1.0, 0.0, 0.5, 1.0, -0.5, 0.25, 0.0, 1.0, 0.5, 0.0, -1.0, 2.0]
    found: dict[str, list] = {"lengths": lengths, "reward": rewards}
    for name in ("response_mask", "values", "old_log_probs", "ref_log_probs", "rollout_log_probs"):
        found[name] = []
    for row, length in enumerate(lengths):
        mask = torch.ones(length, dtype=torch.int64)
        if row % 3 == 1:
            mask[length // 3 : length // 2] = 0
        if row % 4 == 2:
            mask[-1] = 0
        policy = -torch.rand(length, generator=draw)
        found["response_mask"].append(mask.tolist())
        found["old_log_probs"].append(policy.tolist())
        found["values"].append(torch.randn(length, generator=draw).tolist())
        found["ref_log_probs"].append((policy + 0.1 * torch.randn(length, generator=draw)).tolist())
        found["rollout_log_probs"].append((policy + 0.01 * torch.randn(length, generator=draw)).tolist())
    return found


def trainer_module():
    """verl's V1 trainer; what it imports and this function does not use need not be installed."""
    for _ in range(20):
        try:
            return importlib.import_module("verl.trainer.ppo.v1.trainer_base")
        except ModuleNotFoundError as absent:
            sys.modules[absent.name] = MagicMock(__spec__=ModuleSpec(absent.name, None), __path__=[])
            for name in [name for name in sys.modules if name.startswith("verl.trainer.ppo.v1")]:
                del sys.modules[name]
    raise RuntimeError("verl.trainer.ppo.v1.trainer_base cannot be imported")


class Settings(dict):
    """Options by name, as verl reads them."""

    __getattr__ = dict.__getitem__


def nested(rows: list[list[float]], dtype: torch.dtype) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def made(case: tuple[str, str, str], dtype: torch.dtype) -> dict[str, np.ndarray]:
    """What the trainer writes back for the rows of `drawn`, and logs of them."""
    from tensordict import TensorDict
    from tensordict.tensorclass import NonTensorStack
    from verl.protocol import DataProto
    from verl.trainer.ppo.metric_utils import compute_data_metrics

    base = trainer_module()
    (method, discount, setting), given = case, drawn()
    gamma, lam = DISCOUNTS[discount]
    asked = SETTINGS[setting]
    lengths = given["lengths"]
    scores = [[0.0] * (length - 1) + [reward] for length, reward in zip(lengths, given["reward"], strict=True)]
    names = {"values": "values", "old_log_probs": "old_log_probs", "ref_log_prob": "ref_log_probs"}
    if asked.get("sampler") or asked.get("bypass"):
        names["rollout_log_probs"] = "rollout_log_probs"
    # Whole numbers divide to a float32.
    of_mask = torch.int64 if dtype is torch.float32 else dtype
    fields = {name: nested(given[column], dtype) for name, column in names.items()}
    fields |= {"rm_scores": nested(scores, dtype), "response_mask": nested(given["response_mask"], of_mask)}
    store = TensorDict(fields, batch_size=ROWS)
    store["uid"] = NonTensorStack(*(str(row // 4) for row in range(ROWS)))

    def get(keys, partition_id, select_fields):
        return store.select(*(name for name in select_fields if name in set(store.keys()))).clone()

    def put(keys, partition_id, fields):
        store.update(fields)
        return SimpleNamespace(keys=keys, partition_id=partition_id)

    base.tq.kv_batch_get, base.tq.kv_batch_put = get, put
    algorithm = Settings(
        adv_estimator="gae", gamma=gamma, lam=lam, use_kl_in_reward=bool(asked.get("kl")), kl_penalty="k1",
        norm_adv_by_std_in_grpo=True, use_pf_ppo=True,
        pf_ppo={"reweight_method": method, "weight_pow": METHODS[method]},
        rollout_correction=Settings(bypass_mode=bool(asked.get("bypass"))),
    )  # fmt: skip
    config = Settings(algorithm=algorithm, actor_rollout_ref=Settings(rollout=Settings(n=4)))
    control = SimpleNamespace(value=0.1, update=lambda **_: None)
    trainer = SimpleNamespace(config=config, kl_ctrl_in_reward=control)
    keys = [f"{row // 4}_{row % 4}_0" for row in range(ROWS)]
    torch.manual_seed(5)
    batch = MagicMock(keys=keys, partition_id="train", __len__=lambda _: ROWS)
    base.PPOTrainer._compute_advantage(trainer, batch, {})
    found = {name: store[name].values().double().numpy() for name in ("advantages", "returns", "response_mask")}
    # As the trainer hands it to its metrics.
    data = store.select("response_mask", "values", "advantages", "returns", "rm_scores")
    data["token_level_rewards"] = store["token_level_rewards" if asked.get("kl") else "rm_scores"]
    data["prompts"] = nested([[1, 1]] * ROWS, torch.int64)
    data["responses"] = nested([[1] * length for length in lengths], torch.int64)
    data = data.to_padded_tensor()
    data["token_level_scores"] = data["rm_scores"]
    data["prompt_length"], data["response_length"] = torch.full((ROWS,), 2.0), torch.tensor(lengths).float()
    logged = compute_data_metrics(DataProto(batch=data), use_critic=True)
    return found | {"log": np.array([float(logged[name]) for name in LOGGED])}


def main() -> None:
    arrays = {name: np.concatenate([np.ravel(row) for row in values]) for name, values in drawn().items()}
    for case in CASES:
        for label, dtype in DTYPES.items():
            arrays |= {"|".join([*case, label, name]): value for name, value in made(case, dtype).items()}
    np.savez_compressed(DATA, **arrays)
    note(DATA)
    print(len(CASES) * len(DTYPES), "configurations")


if __name__ == "__main__":
    main()
