"""Elementwise work for which numpy, on the tensors' own memory, takes a fraction of torch's time on the CPU."""

import numpy as np
import torch
from torch import Tensor


def unwarned() -> np.errstate:
    """Let numpy be as silent as torch about infinities and NaN: they are results, which rules look for.

    The context is a decorator too.
    """
    return np.errstate(all="ignore")


def outside(x: Tensor, low: float, high: float) -> Tensor | None:
    """Places where ``x < low`` or ``x > high``, int64 in their order; None if there are none. NaN is at neither.

    >>> outside(torch.tensor([0.5, 1.0, 2.0]), 0.8, 1.2).tolist()
    [0, 2]
    """
    if x.device.type != "cpu":
        places = ((x < low) | (x > high)).nonzero().squeeze(1)
        return places if len(places) else None
    values = x.numpy()
    is_out = values < low
    if high < np.inf:
        is_out |= values > high
    return torch.from_numpy(np.flatnonzero(is_out)) if is_out.any() else None


def extremes(x: Tensor) -> tuple[float, float]:
    """Smallest and largest value; NaN for both if there is one.

    >>> extremes(torch.tensor([3.0, 1.0]))
    (1.0, 3.0)
    """
    if x.device.type != "cpu":
        low, high = torch.aminmax(x)
        return float(low), float(high)
    values = x.numpy()
    return float(values.min()), float(values.max())


def is_all(x: Tensor) -> bool:
    """Return True if every value is true, ``[T]`` bool."""
    return bool(x.numpy().all()) if x.device.type == "cpu" else bool(x.all())


def finite(x: Tensor) -> Tensor:
    """The finite values of a vector in their order; the vector itself where there are no others.

    >>> finite(torch.tensor([1.0, torch.nan, -torch.inf, 2.0])).tolist()
    [1.0, 2.0]
    """
    if x.device.type != "cpu":
        return x[x.isfinite()]
    is_finite = np.isfinite(x.numpy())
    return x if is_finite.all() else torch.from_numpy(x.numpy()[is_finite])


def is_finite(x: Tensor) -> Tensor:
    """True where a value is neither infinite nor NaN, in the shape of `x`.

    >>> is_finite(torch.tensor([1.0, torch.inf, torch.nan])).tolist()
    [True, False, False]
    """
    return torch.from_numpy(np.isfinite(x.numpy())) if x.device.type == "cpu" else x.isfinite()


def places_of(chosen: Tensor) -> Tensor:
    """Places of the true values of a vector, int64 in their order.

    >>> places_of(torch.tensor([True, False, True])).tolist()
    [0, 2]
    """
    if chosen.device.type != "cpu":
        return chosen.nonzero().squeeze(1)
    return torch.from_numpy(np.flatnonzero(chosen.numpy()))


def is_below(x: Tensor, bound: float) -> Tensor:
    """``x < bound``, in the shape of `x`; NaN is not below infinity.

    >>> is_below(torch.tensor([1.0, torch.inf, torch.nan]), torch.inf).tolist()
    [True, False, False]
    """
    return torch.from_numpy(x.numpy() < bound) if x.device.type == "cpu" else x < bound


def is_above(x: Tensor, bound: float) -> Tensor:
    """``x > bound``, in the shape of `x`; NaN is not above minus infinity."""
    return torch.from_numpy(x.numpy() > bound) if x.device.type == "cpu" else x > bound


def is_equal(x: Tensor, value: float) -> Tensor:
    """``x == value``, in the shape of `x`."""
    return torch.from_numpy(x.numpy() == value) if x.device.type == "cpu" else x == value


def is_unequal(left: Tensor, right: Tensor) -> Tensor:
    """``one != other``, of one shape; NaN is equal to nothing."""
    return torch.from_numpy(left.numpy() != right.numpy()) if left.device.type == "cpu" else left != right


def difference(left: Tensor, right: Tensor) -> Tensor:
    """``one - other`` in float64, where the difference of two float32 numbers is exact.

    >>> difference(torch.tensor([1.0]), torch.tensor([2.0**-40])).item() == 1 - 2.0**-40
    True
    """
    if left.device.type != "cpu":
        return left.double() - right
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.subtract(left.numpy(), right.numpy(), dtype=np.float64))


def kept(x: Tensor, chosen: Tensor) -> Tensor:
    """``x`` where it is chosen, 0 elsewhere, whatever `x` is there.

    Args:
        x: of any shape, float32 or float64.
        chosen: of the same shape, bool.

    >>> kept(torch.tensor([torch.nan, 2.0, torch.inf]), torch.tensor([False, True, False])).tolist()
    [0.0, 2.0, 0.0]
    """
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return torch.where(chosen, x, 0.0)
    # The bits times 0 or 1: torch branches at every value, and mispredicts where the choice is in no order.
    return torch.from_numpy((x.numpy().view(np.int32) * chosen.numpy().view(np.int8)).view(np.float32))


def put(target: Tensor, places: "slice | Tensor", x: Tensor) -> None:
    """Write values to places of a tensor."""
    if target.device.type != "cpu":
        target[places] = x
    else:
        target.numpy()[places if isinstance(places, slice) else places.numpy()] = x.numpy()
