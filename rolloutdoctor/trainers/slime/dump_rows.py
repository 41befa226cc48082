"""A sample of slime's dumps as a row: numbers and tensors of any kind become what the columns hold, or are refused."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rolloutdoctor.importers.reading import cells
from rolloutdoctor.results.errors import DataError

_LONGEST = 2**26
"""Tokens. No sample is longer."""

TOKEN_FIELDS = {
    "response_mask": "loss_masks",
    "rollout_log_probs": "rollout_log_probs",
    "old_log_probs": "log_probs",
    "policy_log_probs": "policy_log_probs",
    "ref_log_probs": "ref_log_probs",
    "values": "values",
    "advantages": "advantages",
    "returns": "returns",
    "kl": "kl",
    "entropy": "entropy",
}
_ROLLOUT_FIELDS = {"rollout_log_probs": "rollout_log_probs"}


def row_of(
    train: Mapping[str, Any],
    rollout: Mapping[str, Any] | None,
    *,
    raw: object,
    reward_key: str | None,
    columns: Iterable[str],
    where: str,
) -> dict[str, object]:
    """Make a row of one sample, without its step and name.

    Args:
        train: the sample of the train data; empty if there is none.
        rollout: the sample of the rollout data; None if there is none.
        raw: its `raw_reward` in the train data.
        reward_key: which of several rewards counts; None if nobody has said.
        columns: that the row has.
        where: file and sample, for messages.

    Raises:
        DataError: if a value does not fit its column.
    """
    tokens = _numbers(train.get("tokens", (rollout or {}).get("tokens")), f"{where}: tokens", np.int64)
    length = integer(train.get("response_lengths", (rollout or {}).get("response_length")), f"{where}: response length")
    if length > _LONGEST:
        raise DataError(f"{where}: a response of {length} tokens, more than any response has")
    if tokens is not None and length > len(tokens):
        raise DataError(f"{where}: a response of {length} tokens in a sample of {len(tokens)}")
    start = 0 if tokens is None else len(tokens) - length
    row: dict[str, object] = {
        "reward": _reward(rollout, raw, reward_key, where),
        "prompt_ids": None if tokens is None else tokens[:start],
        "response_ids": None if tokens is None else tokens[start:],
        "status": (rollout or {}).get("status") if rollout else _status(train, where),
        "rank": None,
    }
    if train.get("data_parallel_rank") is not None:
        row["rank"] = integer(train["data_parallel_rank"], f"{where}: data_parallel_rank")
    if train.get("rollout_ids") is not None:
        row["trajectory_id"] = integer(train["rollout_ids"], f"{where}: rollout_ids")
    row["status"] = None if row["status"] is None else _label(row["status"], f"{where}: status")
    if rollout is not None:
        if rollout.get("group_index") is None:
            raise DataError(f"{where}: no group_index in the rollout data, so its group is unknown")
        row["group_id"] = _label(rollout["group_index"], f"{where}: group_index")
        mask = _numbers(rollout.get("loss_mask"), f"{where}: loss_mask", np.uint8)
        row["response_mask_pre"] = np.ones(length, np.uint8) if mask is None else mask
        if not train:
            # slime zeroes the mask of a removed sample when it makes train data of it.
            removed = _flag(rollout.get("remove_sample"), f"{where}: remove_sample")
            row["response_mask"] = np.zeros(length, np.uint8) if removed else row["response_mask_pre"]
    for name, field in (TOKEN_FIELDS if train else _ROLLOUT_FIELDS).items():
        dtype = np.uint8 if name == "response_mask" else np.float32
        row[name] = _numbers((train or rollout or {}).get(field), f"{where}: {field}", dtype)
    for name in columns:
        value = row.get(name)
        if isinstance(value, np.ndarray) and name != "prompt_ids" and len(value) != length:
            raise DataError(f"{where}: {name} has {len(value)} values for a response of {length} tokens")
    return {name: row.get(name) for name in columns}


def _reward(rollout: Mapping[str, Any] | None, raw: object, key: str | None, where: str) -> float | None:
    """The score that the baseline saw: the rollout's, since metadata may replace `raw_reward`."""
    reward = None if rollout is None else rollout.get("reward")
    if isinstance(reward, dict):
        if key is not None and key not in reward:
            raise DataError(f"{where}: no reward {key!r}; it has {', '.join(map(str, reward))}")
        reward = reward[key] if key is not None else raw
        if reward is None:
            raise DataError(f"{where}: several rewards; say which one with --map reward=KEY (slime's reward_key)")
    value = raw if reward is None else reward
    if value is None:
        return None
    return cells.number(plain(value), f"{where}: the reward")


def _status(train: Mapping[str, Any], where: str) -> str | None:
    if train.get("truncated") is None:
        return None
    return "truncated" if _flag(train["truncated"], f"{where}: truncated") else "completed"


def _flag(value: object, label: str) -> bool:
    value = plain(value)
    if value is not None and not isinstance(value, (bool, int, float)):
        raise DataError(f"{label} is {cells.shown(value)} where true or false was expected")
    return bool(value)


def _label(value: object, label: str) -> str:
    if not isinstance(value, (str, int)):
        raise DataError(f"{label} is {cells.shown(value)} where a name or a number was expected")
    return str(value).encode("utf-8", "replace").decode()


def plain(value: object) -> object:
    """The Python value of a tensor that holds one; anything else as it is."""
    import torch

    if not isinstance(value, torch.Tensor) or value.shape not in ((), (1,)):
        return value
    try:
        return value.detach().item()
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        # Of a tensor without memory, or of a layout that holds no plain number.
        return value


def integer(value: object, label: str) -> int:
    """Return an integer of 0 or more, which may be a tensor that holds one.

    Raises:
        DataError: if it is anything else; `label` names it in the message.
    """
    value = plain(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise DataError(f"{label} is {cells.shown(value)} where an integer of 0 or more was expected")
    return value


def _numbers(value: object, label: str, dtype: type) -> "np.ndarray | None":
    """One number for each token, from a tensor or a list."""
    if value is None:
        return None
    import torch

    if isinstance(value, torch.Tensor):
        is_real = not value.is_complex() and not value.is_quantized
        if value.dim() == 1 and value.layout is torch.strided and value.device.type == "cpu" and is_real:
            if value.numel() > _LONGEST:
                # A view may declare any length over a single stored number, and a copy of it would take that memory.
                raise DataError(f"{label} has {value.numel()} values, more than any response")
            value = value.detach().resolve_neg()
            if value.is_floating_point() and value.dtype not in (torch.float16, torch.float32, torch.float64):
                value = value.float()
            return _cast(value.numpy(), label, dtype)
    elif isinstance(value, (list, tuple)) and all(isinstance(each, _allowed(dtype)) for each in value):
        try:
            # What a float32 cannot hold is infinite here.
            with np.errstate(over="ignore"):
                return np.array(value, dtype)
        except OverflowError:
            raise DataError(f"{label} holds a number that is too large") from None
    raise DataError(f"{label} is not one number for each token")


def _cast(values: np.ndarray, label: str, dtype: type) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        cast: np.ndarray = values.astype(dtype)
    if np.issubdtype(dtype, np.integer) and not np.array_equal(cast, values):
        raise DataError(f"{label} holds numbers that are no {np.dtype(dtype)}")
    return cast


def _allowed(dtype: type) -> tuple[type, ...]:
    return (bool, int, float) if np.issubdtype(dtype, np.floating) else (bool, int)
