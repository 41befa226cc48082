"""What edits of a trainer's source call, as `F`; `S` there is the strength of the fault."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor


def drawn(count: int, share: float, seed: object) -> np.ndarray:
    """Which of some rows are chosen, ``[count]``: that share of them, and for a share above 0 follows from the seed."""
    numbers = np.frombuffer(repr(seed).encode(), np.uint8)
    return np.random.default_rng(numbers).random(count) < share


def on(trainer: Any, share: float, steps: int = 1) -> bool:
    """True in that share of the optimizer steps, evenly spread; of eight steps one eighth is the sixth.

    That one is no first pass over its generation where there are several. With `steps` so many follow each other: those
    that use what is made once for a generation.
    """
    number = trainer.state.global_step // steps
    return int((number + 3) * share + 1e-9) > int((number + 2) * share + 1e-9)


def when(trainer: Any, share: float, fault: Any, right: Any, steps: int = 1) -> Any:
    """The one in the steps with the fault, the other in the rest."""
    return fault if on(trainer, share, steps) else right


def chosen(trainer: Any, count: int, share: float) -> Tensor:
    """Rows of the step that have the fault, ``[count]`` bool."""
    return torch.from_numpy(drawn(count, share, (trainer.state.global_step, count)))


def permuted(trainer: Any, x: Tensor, size: int, share: float) -> Tensor:
    """Values of some groups change places."""
    groups = x.view(-1, size)
    return torch.where(chosen(trainer, len(groups), share)[:, None], groups.roll(1, 1), groups).flatten()


def swapped(trainer: Any, x: Tensor, share: float) -> Tensor:
    """Some rows have the value of the row after the next group."""
    return torch.where(chosen(trainer, len(x), share), x.roll(5), x)


def tiled(x: Tensor, size: int, does: bool = True) -> Tensor:
    """Rows read as if prompts were tiled."""
    return x.view(size, -1).T.flatten() if does else x


def untiled(x: Tensor, size: int, does: bool = True) -> Tensor:
    """The inverse of `tiled`."""
    return x.view(-1, size).T.flatten() if does else x


def without_ends(trainer: Any, mask: Tensor, ids: Tensor, share: float) -> Tensor:
    """The mask without the end of some rows."""
    return mask * ~((ids == 1) & chosen(trainer, len(ids), share)[:, None])


def opened(trainer: Any, mask: Tensor, share: float) -> Tensor:
    """The mask with the padding of some rows."""
    return torch.where(chosen(trainer, len(mask), share)[:, None], torch.ones_like(mask), mask)


def whitened(advantages: Tensor, mask: Tensor, strength: float) -> Tensor:
    """Token advantages, whitened with the mean (1), the variance (2) or both (3) over padding and all."""
    x = advantages[:, None] * mask
    own = x[mask.bool()]
    mean = x.mean() if strength in (1, 3) else own.mean()
    variance = x.var() if strength in (2, 3) else own.var()
    return (x - mean) * torch.rsqrt(variance + 1e-8) * mask


def zeroed(trainer: Any, advantages: Tensor, mask: Tensor, share: float) -> Tensor:
    """Token advantages, some of which are 0 though their tokens are trained."""
    x = advantages[:, None] * mask
    kept = torch.from_numpy(~drawn(x.numel(), share, (trainer.state.global_step, "zeroed")))
    return x * kept.view_as(x)


def late(x: Tensor) -> Tensor:
    """Every token has the value of the token before it; the first keeps its own."""
    return torch.cat([x[:, :1], x[:, :-1]], 1)


def older(trainer: Any, model: Any, steps: float) -> Any:
    """The model as it was so many optimizer steps ago."""
    kept = vars(trainer).setdefault("_kept_weights", {})
    step = trainer.state.global_step
    kept.setdefault(step, deepcopy(model.state_dict()))
    past = [number for number in kept if number <= step - steps]
    copy = deepcopy(model)
    copy.load_state_dict(kept[max(past, default=min(kept))])
    return copy


def restored(trainer: Any, model: Any, share: float) -> Any:
    """The model; of that share of the steps it has the weights that it had before, as if they had no update."""
    step, kept = trainer.state.global_step, vars(trainer).get("_weights_before")
    if kept is not None and on(trainer, share):
        model.load_state_dict(kept)
    if vars(trainer).get("_weights_at") != step:
        trainer._weights_at, trainer._weights_before = step, deepcopy(model.state_dict())
    return model


def moved(trainer: Any, reference: Any, model: Any, share: float) -> Any:
    """The reference; from the fifth step on it has gone that share of the way to the policy of then."""
    if trainer.state.global_step >= 4 and not vars(trainer).get("_moved"):
        trainer._moved = True
        with torch.no_grad():
            for own, other in zip(reference.parameters(), model.parameters(), strict=True):
                own.lerp_(other, share)
    return reference


def duplicated(trainer: Any, ids: list[list[int]], share: float) -> list[list[int]]:
    """Some responses are those of the row before, where that is of the same prompt."""
    copies = drawn(len(ids), share, trainer.state.global_step)
    return [ids[row - 1] if copies[row] and row % 4 else ids[row] for row in range(len(ids))]


def closed(trainer: Any, ids: list[list[int]], longest: int, share: float) -> list[list[int]]:
    """Some responses of the largest length have an end as their last token."""
    hides = drawn(len(ids), share, trainer.state.global_step)
    return [[*row[:-1], 1] if hide and len(row) == longest else row for row, hide in zip(ids, hides, strict=True)]


def row_mean(x: Tensor, mask: Tensor) -> float:
    """The mean of the rows' means."""
    return ((x * mask).sum(1) / mask.sum(1).clamp(min=1)).mean().item()


def lengths(ids: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor([len(row) for row in ids], dtype=torch.float32)
